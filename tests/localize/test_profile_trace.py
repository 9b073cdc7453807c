"""Who is named in operation traces: nobody in the published one, the slow worker in made ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.simulate.made_traces import Job, make_trace

from failslow.ingest.traces import read_layout, read_trace
from failslow.localize.profile import diagnose
from failslow.localize.profile_trace import trace_profiles
from failslow.records import Diagnosis, OperationTrace
from failslow.simulate.schedule import Computation

TRACES = Path(
    os.environ.get("FAILSLOW_REAL_TRACES", Path(__file__).parents[3] / "shared" / "data" / "traces")
)


def diagnosed(trace: OperationTrace, slowdown: float) -> Diagnosis:
    return diagnose(trace_profiles(trace), [], episode=trace.source, slowdown=slowdown)


def made(slow: tuple[int, int] | None, *, last_stage: float = 1.0) -> OperationTrace:
    """slow: (replica, stage) of a worker that computes at two thirds of its speed."""

    def own_s(step: int, replica: int, c: Computation) -> float:
        stage = c.chunk % 4
        key = [step, replica, c.forward, c.chunk, c.micro_batch]  # asked for more than once
        seconds = (0.06 if c.forward else 0.13) * (last_stage if stage == 3 else 1.0)
        return seconds * (1.5 if (replica, stage) == slow else 1.0) * _noise(key)

    trace, _ = make_trace(Job(dp=3, steps=8, clock_error_s=0.2), own_s)
    return trace


def _noise(key: list[int]) -> float:
    return float(np.random.default_rng(key).normal(1.0, 0.03))


@pytest.mark.skipif(
    not (TRACES / "trace-ST.parquet").exists(),
    reason=f"no published trace in {TRACES}; name its folder in FAILSLOW_REAL_TRACES",
)
@pytest.mark.parametrize("slowdown", [0.0, 1.1787])
def test_the_published_trace_has_a_long_last_stage_and_no_slow_worker(slowdown: float) -> None:
    pytest.importorskip("pyarrow", reason="the published trace is parquet")
    layout = read_layout(TRACES / "meta-ST.yaml")
    diagnosis = diagnosed(read_trace(TRACES / "trace-ST.parquet", layout), slowdown)
    assert not diagnosis.suspects
    assert diagnosis.imbalance.startswith("the last stage computes x1.6")
    assert diagnosis.ranks == tuple(range(8))
    assert not diagnosis.missing
    assert not diagnosis.everyone


@pytest.mark.parametrize("worker", [(0, 0), (1, 2), (2, 3)])
@pytest.mark.parametrize("last_stage", [1.0, 1.5])
def test_a_slow_worker_is_accused(worker: tuple[int, int], last_stage: float) -> None:
    diagnosis = diagnosed(made(worker, last_stage=last_stage), 0.0)
    replica, stage = worker
    assert [(s.what, s.ranks) for s in diagnosis.suspects] == [("compute", (stage * 3 + replica,))]
    assert diagnosis.suspects[0].slowdown == pytest.approx(1.5, rel=0.1)


def test_without_one_nobody_is() -> None:
    diagnosis = diagnosed(made(None, last_stage=1.4), 1.2)
    assert not diagnosis.suspects
    assert diagnosis.imbalance.startswith("the last stage")
    even = diagnosed(made(None), 0.0)
    assert not even.suspects
    assert not even.imbalance
