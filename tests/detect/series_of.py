"""Small jobs with known truth for the detector's tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from failslow.records import Run, StepSeries

Floats = NDArray[np.float64]


def noise(n: int, cv: float = 0.01, seed: int = 0) -> Floats:
    return np.asarray(np.exp(np.random.default_rng(seed).normal(0.0, cv, n)))


def levels(*parts: tuple[int, float], cv: float = 0.01, seed: int = 0) -> Floats:
    """Durations of (records, level_s) stretches, one after the other, with noise."""
    level = np.concatenate([np.full(n, s) for n, s in parts])
    return np.asarray(level * noise(len(level), cv, seed))


def job(
    duration_s: Floats,
    *,
    iterations: int = 1,
    work: Floats | None = None,
    data_s: Floats | None = None,
    run: NDArray[np.int64] | None = None,
    runs: tuple[Run, ...] = (Run(),),
    step: NDArray[np.int64] | None = None,
    planned_ramp: str = "",
) -> StepSeries:
    n = len(duration_s)
    unknown = np.full(n, np.nan)
    return StepSeries(
        source="job",
        format="test",
        step=np.arange(1, n + 1) * iterations if step is None else step,
        duration_s=duration_s,
        end_s=np.cumsum(duration_s * iterations),
        iterations=np.full(n, iterations, dtype=np.int64),
        work=unknown if work is None else work,
        data_s=unknown if data_s is None else data_s,
        run=np.zeros(n, dtype=np.int64) if run is None else run,
        runs=runs,
        planned_ramp=planned_ramp,
    )
