"""Replaying traces: exact on traces made with known durations, faithful to the published analysis
of a real one, and a diagnosis that accuses who is at fault and nobody else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.made_traces import GATHER_S, Job, Own, make_trace

from failslow.errors import InputError
from failslow.ingest.traces import read_layout, read_trace
from failslow.records import OperationTrace, WhatIf
from failslow.simulate import what_if
from failslow.simulate.schedule import Computation, Schedule

TRACES = Path(
    os.environ.get(
        "FAILSLOW_REAL_TRACES",
        Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces",
    )
)
real = pytest.mark.skipif(
    not (TRACES / "trace-ST.parquet").exists(),
    reason=f"no published trace in {TRACES}; name its folder in FAILSLOW_REAL_TRACES",
)


def even(step: int, dp: int, c: Computation) -> float:
    """Every computation as long as any other of its way."""
    return 0.1 if c.forward else 0.2


def jittery(seed: int) -> Own:
    """Computations of 1 to 1.5 times the usual, without a pattern."""

    def own(step: int, dp: int, c: Computation) -> float:
        rng = np.random.default_rng([seed, step, dp, c.chunk, c.micro_batch, c.forward])
        return even(step, dp, c) * (1 + rng.random() / 2)

    return own


def noisy(own: Own, cv: float = 0.02) -> Own:
    """`own` with noise on every computation."""

    def with_noise(step: int, dp: int, c: Computation) -> float:
        rng = np.random.default_rng([9, step, dp, c.chunk, c.micro_batch, c.forward])
        return own(step, dp, c) * float(np.exp(cv * rng.standard_normal()))

    return with_noise


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Layouts and schedules of every kind, recorded in every way."""
    schedule: Schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    pp = draw(st.integers(1, 4))
    interleaved = schedule == "interleaved" and pp > 1
    return Job(
        schedule=schedule,
        dp=draw(st.integers(1, 3)),
        pp=pp,
        vpp=draw(st.integers(1, 3)) if interleaved else 1,
        micro_batches=pp * draw(st.integers(1, 2)) if interleaved else pp * draw(st.integers(1, 3)),
        steps=2,
        overlapped=draw(st.booleans()),
        idle_transfers=draw(st.booleans()),
        clock_error_s=draw(st.sampled_from([0.0, 0.3])),
    )


@settings(max_examples=40)
@given(jobs(), st.integers(0, 1000))
def test_a_trace_without_gaps_is_replayed_to_the_nanosecond(job: Job, seed: int) -> None:
    trace, step_s = make_trace(job, jittery(seed))

    found = what_if(trace)

    assert found.replayed_s == pytest.approx(step_s, abs=1e-9)
    assert found.steps.tolist() == list(range(job.steps))


def test_a_job_in_which_nothing_varies_is_as_fast_as_its_ideal_and_nobody_is_accused() -> None:
    trace, step_s = make_trace(Job(schedule="interleaved", vpp=2), even)

    found = what_if(trace)

    assert found.slowdown == pytest.approx(1.0)
    assert found.ideal_s == pytest.approx(step_s)
    everything = [
        *found.dp_slowdown,
        *found.stage_slowdown,
        *dict(found.operation_slowdown).values(),
    ]
    assert everything == pytest.approx([1.0] * len(everything))
    assert [cause.what for cause in found.diagnosis] == ["none"]
    assert found.fixes == ()


def test_time_between_operations_is_in_the_measured_step_but_not_in_the_replayed() -> None:
    plain, step_s = make_trace(Job(), even)
    gappy, gappy_s = make_trace(Job(gap_s=0.02), even)

    found = what_if(gappy)

    assert found.measured_s == pytest.approx(gappy_s)
    assert found.replayed_s == pytest.approx(step_s)
    assert any("between operations" in warning for warning in found.warnings)
    assert not what_if(plain).warnings


def slow_worker(step: int, dp: int, c: Computation) -> float:
    return even(step, dp, c) * (2.0 if dp == 1 and c.chunk == 2 else 1.0)


def test_a_slow_worker_is_accused_and_its_replacement_gains_what_it_costs() -> None:
    job = Job(dp=3, steps=4)
    trace, slow_s = make_trace(job, noisy(slow_worker))
    _, healthy_s = make_trace(job, noisy(even))

    found = what_if(trace)

    cause = found.diagnosis[0]
    assert (cause.what, cause.where.split(" ×")[0]) == ("worker", "dp 1 stage 2 (rank 7)")
    assert [c.what for c in found.diagnosis].count("worker") == 1
    assert cause.share > 0.9
    fix = found.fixes[0]
    assert fix.what == "replace the worker"
    assert fix.gain_pct == pytest.approx(100 * (1 - healthy_s.mean() / slow_s.mean()), abs=1.5)
    assert int(np.argmax(found.worker_slowdown)) == 1 * 4 + 2
    others = np.delete(found.worker_slowdown.ravel(), 1 * 4 + 2)
    assert others.max() < 1.06 < found.worker_slowdown[1, 2]


def test_a_worker_slow_in_some_steps_only_is_accused_when_that_is_no_chance() -> None:
    def own(step: int, dp: int, c: Computation) -> float:
        return even(step, dp, c) * (2.0 if dp == 0 and c.chunk == 1 and step % 2 else 1.0)

    trace, _ = make_trace(Job(dp=4, pp=2, steps=12), noisy(own))

    assert [c.what for c in what_if(trace).diagnosis] == ["worker"]


def test_a_stage_with_too_much_work_is_an_imbalance_and_no_worker_is_accused() -> None:
    def own(step: int, dp: int, c: Computation) -> float:
        return even(step, dp, c) * (1.5 if c.chunk == 3 else 1.0)

    trace, _ = make_trace(Job(dp=3), noisy(own))

    found = what_if(trace)

    cause = found.diagnosis[0]
    assert cause.what == "stage imbalance"
    assert cause.where.startswith("last stage, 3 (×1.3")
    assert cause.share > 0.85
    assert "worker" not in {c.what for c in found.diagnosis}
    assert found.fixes[0].what == "balance the stages"
    assert not [fix for fix in found.fixes if "worker" in fix.what]


def test_with_one_replica_the_imbalance_says_that_it_may_be_a_worker() -> None:
    def own(step: int, dp: int, c: Computation) -> float:
        return even(step, dp, c) * (2.0 if c.chunk == 0 else 1.0)

    trace, _ = make_trace(Job(dp=1, micro_batches=16), noisy(own))

    cause = what_if(trace).diagnosis[0]
    assert cause.what == "stage imbalance"
    assert "may as well be a slow worker" in cause.where


def test_micro_batches_of_unequal_length_are_a_data_imbalance_and_no_worker_is_accused() -> None:
    def own(step: int, dp: int, c: Computation) -> float:
        rng = np.random.default_rng([step, dp, c.micro_batch])
        return even(step, dp, c) * (0.5 + rng.exponential(0.7))

    trace, _ = make_trace(Job(dp=4, micro_batches=8, steps=6), noisy(own))

    found = what_if(trace)

    assert found.slowdown > 1.1
    cause = found.diagnosis[0]
    assert cause.what == "data imbalance"
    assert cause.share > 0.8
    assert "worker" not in {c.what for c in found.diagnosis}


def test_computation_that_varies_without_a_pattern_is_not_blamed_on_the_data() -> None:
    trace, _ = make_trace(Job(dp=4, micro_batches=8, steps=6), noisy(even, cv=0.4))

    found = what_if(trace)

    assert found.slowdown > 1.1
    assert [c.what for c in found.diagnosis] == ["none"]
    assert found.fixes[0].what == "steady the computation"


def test_slow_communication_is_named_with_the_kind_that_is_slow() -> None:
    trace, _ = make_trace(Job(), even)
    reducing = np.array(trace.kinds)[trace.kind] == "grads-reduce-scatter"
    late = reducing & (trace.step == 1)
    after = np.isin(np.array(trace.kinds)[trace.kind], ["optimizer", "optimizer-clip-main-grad"])
    slow = replace(
        trace,
        duration_s=trace.duration_s + np.where(late, 1.0, 0.0),
        start_s=trace.start_s + np.where(after & (trace.step == 1), 1.0, 0.0),
    )

    found = what_if(slow)

    assert [(c.what, c.where) for c in found.diagnosis] == [
        ("communication", "mostly grads-reduce-scatter")
    ]
    assert found.replayed_s[1] - found.replayed_s[0] == pytest.approx(1.0)


def test_parameters_gathered_for_a_later_chunk_do_not_delay_the_first() -> None:
    job = Job(schedule="interleaved", dp=2, pp=2, vpp=2, micro_batches=4)
    trace, step_s = make_trace(job, even)
    names = np.array(trace.kinds)[trace.kind]
    first = names == "params-all-gather"
    second = joined(trace, trace, first)
    second.seq[len(trace) :] = 1
    # the second gather runs beside the forwards of the first chunk, 0.1 s each
    longer = replace(
        second,
        start_s=second.start_s
        + np.where(second.seq == 1, GATHER_S, 0.0)
        * (np.array(second.kinds)[second.kind] == "params-all-gather"),
    )

    assert what_if(longer).replayed_s == pytest.approx(step_s)


COLUMNS = (
    *("step", "dp", "stage", "rank", "kind", "start_s", "duration_s", "seq"),
    *("chunk", "microbatch", "global_chunk"),
)


def joined(first: OperationTrace, second: OperationTrace, rows: np.ndarray) -> OperationTrace:
    """The first trace, and those rows of the second."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)[rows]])
        for name in COLUMNS
    }
    return replace(first, **columns)


def test_steps_of_different_shape_are_replayed_side_by_side() -> None:
    short, short_s = make_trace(Job(micro_batches=4, steps=4), even)
    long, long_s = make_trace(Job(micro_batches=6, steps=2), even)
    both = joined(long, short, short.step >= 2)

    found = what_if(both)

    assert found.replayed_s == pytest.approx([*long_s, *short_s[2:]])
    assert any("2 shapes" in warning for warning in found.warnings)


def test_times_that_contradict_each_other_are_refused() -> None:
    trace, _ = make_trace(Job(dp=1, pp=2, micro_batches=1, steps=1), even)
    names = np.array(trace.kinds)[trace.kind]
    # stage 0 computes backward before forward: it waits for itself through stage 1
    swapped = trace.start_s.copy()
    first = trace.stage == 0
    forward = np.flatnonzero(first & (names == "forward-compute"))
    backward = np.flatnonzero(first & (names == "backward-compute"))
    swapped[forward], swapped[backward] = trace.start_s[backward], trace.start_s[forward]

    with pytest.raises(InputError, match=r"step 0: .*start times contradict"):
        what_if(replace(trace, start_s=swapped))


def test_an_operation_recorded_twice_is_refused() -> None:
    trace, _ = make_trace(Job(steps=1), even)

    with pytest.raises(InputError, match="compute number 0 is there twice"):
        what_if(replace(trace, seq=np.zeros_like(trace.seq)))


@pytest.fixture(scope="module")
def published() -> tuple[WhatIf, Mapping[str, Any]]:
    """The analysis of the published trace ST, ours and theirs."""
    trace = read_trace(TRACES / "trace-ST.parquet", read_layout(TRACES / "meta-ST.yaml"))
    return what_if(trace), json.loads((TRACES / "result-ST.json").read_text())


@real
def test_step_times_of_the_published_trace_are_those_published(
    published: tuple[WhatIf, Mapping[str, Any]],
) -> None:
    found, theirs = published

    for name, ours, within in (
        ("step_t_base", found.measured_s, 1e-6),
        ("step_t_nodelay", found.replayed_s, 0.002),
        ("step_t_noblk", found.ideal_s, 0.001),
    ):
        expected = np.array([theirs[name][str(step)] for step in found.steps])
        assert ours == pytest.approx(expected, rel=within), name
        assert ours.mean() == pytest.approx(expected.mean(), rel=within), name
    assert found.slowdown == pytest.approx(theirs["blocking_slowdown"], abs=0.002)


@real
def test_slowdowns_of_the_published_trace_are_those_published(
    published: tuple[WhatIf, Mapping[str, Any]],
) -> None:
    found, theirs = published
    by_dp = dict(zip(map(str, found.dp_ranks), found.dp_slowdown, strict=True))
    by_stage = dict(zip(map(str, found.stages), found.stage_slowdown, strict=True))
    by_kind = dict(found.operation_slowdown)

    assert by_dp == pytest.approx(theirs["blocking_decompose_by_dp_rank"], abs=0.002)
    assert by_stage == pytest.approx(theirs["blocking_decompose_by_stage"], abs=0.002)
    assert by_kind == pytest.approx(theirs["blocking_decompose_by_optype"], abs=0.002)


@real
def test_the_published_trace_has_a_last_stage_too_long_and_no_worker_at_fault(
    published: tuple[WhatIf, Mapping[str, Any]],
) -> None:
    found, _ = published

    assert [cause.what for cause in found.diagnosis] == ["stage imbalance"]
    assert found.diagnosis[0].where.startswith("last stage, 3")
    assert found.diagnosis[0].share > 0.8
