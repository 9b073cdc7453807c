"""The rules by which a stretch of slow records is a fail-slow, and not spikes, noise or a blip.

In: a supposed change and the excesses since. Out: its numbers (`Stretch`), and yes or no.

    Stretch(first=1200, count=13, over=13, median=0.336, error=0.011, wall_s=10.4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import pdtrc

from failslow.config import DetectConfig
from failslow.detect.windows import Noise, Spikes, run_lengths, standard_error

__all__ = ["CERTAIN", "MIN_SLOW", "SUSPECT", "Rules", "Stretch", "creeps"]

Floats = NDArray[np.float64]

MIN_SLOW = 5  # fewer slow records are spikes
CERTAIN = 5.5  # sigmas: not once by chance in a year of iterations
SUSPECT = 4.0  # sigmas

_SPIKE_CAP = math.log(3.0)  # one record is evidence for at most three healthy ones
_MARGIN = 2.5  # sigmas above 8 %, so that a slowdown of 8 % is not called one of 10 %
_WORTH = math.log(1.08)
_SPIKE_ITERATIONS = 3  # a spike is one to so many long iterations
_SPIKE_CHANCE = 1e-5  # that a job's ordinary spikes fall so close together
_AROUND = 24


@dataclass(frozen=True, slots=True)
class Stretch:
    """The records since a supposed change, measured against a base level."""

    first: int
    """Index in the series."""
    count: int
    over: int
    """Records at least min_slowdown over the base."""
    median: float
    """Of the excess."""
    error: float
    """Standard error of `median`."""
    wall_s: float
    """Wall seconds, no record counted for more than three healthy ones."""


class Rules:
    """What the settings say of a stretch."""

    def __init__(self, config: DetectConfig) -> None:
        self._config = config
        self.slow = math.log(config.min_slowdown)
        self.healthy = math.log(config.relief_slowdown)

    def measure(
        self, first: int, excess: Floats, base: float, iterations: Floats, noise: Noise
    ) -> Stretch:
        """The numbers of a stretch: excess over the log level `base`, iterations, shapes (n,)."""
        healthy_s = math.exp(base)
        return Stretch(
            first=first,
            count=len(excess),
            over=int(np.count_nonzero(excess >= self.slow)),
            median=float(np.median(excess)),
            error=standard_error(noise, len(excess)),
            wall_s=healthy_s * float(iterations @ np.exp(np.minimum(excess, _SPIKE_CAP))),
        )

    def suspicious(self, stretch: Stretch) -> bool:
        """Slow enough for profiling to start; costs nothing when wrong."""
        return (
            stretch.over >= self._config.suspect_iterations
            and stretch.median >= self.slow
            and stretch.median >= SUSPECT * stretch.error
        )

    def lasting(self, stretch: Stretch, base: float) -> bool:
        """Whether the stretch has lasted as long as a fail-slow (or its relief) must."""
        need_s = max(self._config.min_duration_s, self._config.min_iterations * math.exp(base))
        return stretch.count >= MIN_SLOW and stretch.wall_s >= need_s

    def slow_for_sure(self, stretch: Stretch, base: float) -> bool:
        """Slow, lasting, and the noise would not do it."""
        return (
            stretch.median >= self.slow
            and stretch.over >= MIN_SLOW
            and self.lasting(stretch, base)
            and stretch.median >= CERTAIN * stretch.error
            and stretch.median - _WORTH >= _MARGIN * stretch.error
        )

    @staticmethod
    def usual(excess: Floats, iterations: Floats, spikes: Sequence[Spikes]) -> bool:
        """Whether the job's ordinary spikes would do it: not if it is more at one of the heights.

        excess, iterations: of the stretch, shape (n,). A spike is at most three slow iterations
        in a row, or what the job's longest is: longer runs take several.
        """
        most = max(1.0, _SPIKE_ITERATIONS / float(np.mean(iterations)))
        for spike in spikes:
            runs = run_lengths(excess >= spike.height)
            needed = np.ceil(runs / min(most, spike.longest)).sum()
            if float(pdtrc(needed - 1, spike.rate * len(excess))) < _SPIKE_CHANCE:
                return False
        return True


def creeps(excess: Floats, onset: int, slow: float) -> bool:
    """Whether the records just around the onset differ by less than a slowdown would.

    excess: shape (n,), onset in 0..n-1, slow: log of the slowdown.
    """
    if onset == 0:
        return False
    return any(
        float(np.median(excess[onset : onset + n]) - np.median(excess[max(0, onset - n) : onset]))
        < 0.7 * slow
        for n in (MIN_SLOW, _AROUND)
    )
