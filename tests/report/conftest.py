"""Jobs made by hand, so that the report is tested without the detector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from failslow.records import Culprit, Episode, EpisodeKind, JobAnalysis, Level, Run, StepSeries


class MakeJob(Protocol):
    """`make_job(seconds, episodes=[(first, last, kind)], spikes=[...])`."""

    def __call__(
        self,
        seconds: Sequence[float] | NDArray[np.float64],
        *,
        episodes: Sequence[tuple[int, int, EpisodeKind]] = (),
        spikes: Sequence[int] = (),
        runs: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
        iterations: int = 1,
        start_time: float | None = None,
        **changes: Any,
    ) -> tuple[StepSeries, JobAnalysis]: ...


def _make_job(
    seconds: Sequence[float] | NDArray[np.float64],
    *,
    episodes: Sequence[tuple[int, int, EpisodeKind]] = (),
    spikes: Sequence[int] = (),
    runs: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    iterations: int = 1,
    start_time: float | None = None,
    **changes: Any,
) -> tuple[StepSeries, JobAnalysis]:
    duration = np.asarray(seconds, dtype=np.float64)
    n = len(duration)
    run = np.zeros(n, np.int64) if runs is None else np.asarray(runs, np.int64)
    step = np.arange(1, n + 1) * iterations if steps is None else np.asarray(steps)
    end_s = np.cumsum(duration * iterations)
    series = StepSeries(
        source=changes.get("source", "train.log"),
        format="megatron",
        step=step.astype(np.int64),
        duration_s=duration,
        end_s=end_s,
        iterations=np.full(n, iterations),
        work=np.full(n, np.nan),
        data_s=changes.pop("data_s", np.full(n, np.nan)),
        run=run,
        runs=tuple(Run(note=f"run {k}") for k in range(int(run.max()) + 1)),
        start_time=start_time,
    )
    healthy = float(np.median(duration))
    found = tuple(_episode(series, healthy, *place) for place in episodes)
    lost = sum(e.lost_s for e in found)
    wall = float(end_s[-1])
    fields: dict[str, Any] = {
        "source": series.source,
        "format": series.format,
        "iterations": n * iterations,
        "first_step": int(step[0]),
        "last_step": int(step[-1]),
        "start_time": start_time,
        "healthy_iteration_s": healthy,
        "wall_s": wall,
        "lost_s": lost,
        "jct_increase_pct": 100 * lost / (wall - lost),
        "episodes": found,
        "spikes": len(spikes),
        "spike_lost_s": float(sum(duration[i] - healthy for i in spikes)),
        "spike_index": tuple(spikes),
    }
    return series, JobAnalysis(**(fields | changes))


def _episode(
    series: StepSeries, healthy: float, first: int, last: int, kind: EpisodeKind
) -> Episode:
    inside = series.duration_s[first : last + 1]
    level = float(np.median(inside))
    ongoing = last == len(series) - 1
    start_s = float(series.end_s[first] - inside[0] * series.iterations[first])
    slow = kind == "fail_slow"
    return Episode(
        start_step=int(series.step[first]),
        end_step=None if ongoing else int(series.step[last + 1]),
        start_s=start_s,
        end_s=None if ongoing else float(series.end_s[last]),
        duration_s=float(series.end_s[last]) - start_s,
        iteration_s=level,
        baseline_s=healthy,
        slowdown=level / healthy,
        peak_slowdown=float(inside.max()) / healthy,
        lost_s=float((inside - healthy).sum() * series.iterations[0]) if slow else 0.0,
        confidence=0.999,
        kind=kind,
        culprits=(Culprit(rank=3, what="compute", slowdown=2.3),) if slow else (),
        levels=(Level(start_step=int(series.step[first]), slowdown=level / healthy),),
        note="" if slow else "batch 64 -> 128",
        first_index=first,
        last_index=last,
    )


@pytest.fixture(scope="session")
def make_job() -> MakeJob:
    """Factory of a series and its analysis."""
    return _make_job


@pytest.fixture(scope="session")
def slow_job() -> tuple[StepSeries, JobAnalysis]:
    """5,000 records, ×1.4 from 1,500 to 1,999, three spikes, one of them inside."""
    seconds = 0.571 * np.exp(0.01 * np.random.default_rng(0).standard_normal(5000))
    seconds[1500:2000] *= 1.4
    seconds[[100, 1700, 4200]] *= 20
    return _make_job(
        seconds,
        episodes=[(1500, 1999, "fail_slow")],
        spikes=[100, 1700, 4200],
        iterations=10,
        start_time=1_745_735_250.9,
        warnings=("3 lines without a time",),
    )
