"""The words of the suite: the kinds of jobs, what a job is set to, and the plan of what happens.

Setting(records=1200, interval=10, iteration_s=0.57, noise=Noise(shape="white", cv=0.02), …)
Plan(factor=[1, …, 1.4, …, 1], spans=(Span(start=2000, stop=2300),), …)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EPISODE_FACTOR",
    "KINDS",
    "LEAD_RECORDS",
    "MAX_OFF_S",
    "MIN_APART_S",
    "Floats",
    "Kind",
    "Noise",
    "Plan",
    "Setting",
    "Span",
    "log_uniform",
]

Kind = Literal[
    "clean",
    "short_compute",
    "long_communication",
    "compound",
    "drift",
    "flapping",
    "spikes",
    "workload_ramp",
    "workload_step",
    "restart",
    "partial_recovery",
    "bursty",
    "never_relieved",
    "slow_drift_below_threshold",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

LEAD_RECORDS = 40
MAX_OFF_S = 18.0  # 0.6 of the merge gap of 30 s
MIN_APART_S = 60.0  # twice the merge gap
EPISODE_FACTOR = 1.10

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Iteration noise: `white` and `heavy` (Student t, 5 degrees) are drawn per iteration and
    average out over a record; `correlated` is AR(1) from record to record and does not."""

    shape: Literal["white", "heavy", "correlated"]
    cv: float
    """Coefficient of variation of one iteration (white, heavy) or of one record (correlated)."""
    rho: float = 0.0
    """Correlation of neighbouring records; 0 unless correlated."""

    @property
    def label(self) -> str:
        """The class the score is broken down by: "correlated 1-3%"."""
        size = "<1%" if self.cv < 0.01 else "1-3%" if self.cv < 0.03 else ">3%"
        return f"{self.shape} {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all kinds share of a job."""

    records: int
    interval: int
    """Iterations a record averages."""
    iteration_s: float
    noise: Noise
    warm_iterations: int
    fast_every: int
    """Every so many records one takes only 0.82 of the time; 0: none does."""

    @property
    def iterations(self) -> int:
        """Iterations of the whole job."""
        return self.records * self.interval

    @property
    def lead(self) -> int:
        """The first iteration at which a fault may begin."""
        return self.warm_iterations + LEAD_RECORDS * self.interval

    @property
    def min_slow(self) -> int:
        """Least length of a slow stretch, in iterations."""
        records = 30 if self.interval == 1 else 20 if self.fast_every else 8
        return max(30, math.ceil(15.0 / self.iteration_s), records * self.interval)

    @property
    def tail(self) -> int:
        """Least healthy iterations after a relief."""
        return max(self.min_slow, LEAD_RECORDS * self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Iterations [start, stop) of one true episode."""

    start: int
    stop: int
    since: int = 0
    """From here on the healthy iterations before `start` compare to it (same workload)."""
    rise: int | None = None
    """A drift's first iteration: an onset claimed between it and `start` is right."""
    fall: int | None = None
    """A drift back's last iteration: a relief claimed between `stop` and it is right."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What happens, iteration by iteration."""

    factor: Floats
    """Slowdown of each iteration, 1 when healthy."""
    spans: tuple[Span, ...] = ()
    levels: tuple[tuple[int, float], ...] = ()
    """(iteration, factor) at which each level begins, of all spans."""
    work: Floats | None = None
    """Work of each iteration relative to the first; None: it does not change."""
    overhead: float = 0.0
    """Share of the healthy time at work 1 that does not grow with the work."""
    show_work: bool | None = None
    """Whether the log tells the work; None: as in other jobs, at random."""
    restarts: tuple[int, ...] = ()
    """Iterations before which the program was started anew."""
    config_changed: bool = False
    """The restarts name another configuration."""
    planned_ramp: str = ""
    features: tuple[str, ...] = ()
    """What to tell a reader of a failure: "drift to 1.40 then reset"."""


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """A draw whose logarithm is uniform between those of `low` and `high`."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))
