"""Pure tests on a stretch of excesses: is it slow, where does it begin, how sure is that.

In: excess = log(time) − log(healthy time), newest last; the noise of healthy samples.
Out: first index of the stretch, its median, its z-scores.

    locate_rise([0, .01, -.01, .2, .19, .21], level=.2) -> 3

"The median of the last L is at least c" is the same as "at least half of the last L are at
least c", so scanning every window length over a block costs one cumulative sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from failslow.stats.robust import effective_count

__all__ = [
    "WINDOWS",
    "Noise",
    "Spikes",
    "locate_fall",
    "locate_rise",
    "majority_ends",
    "run_lengths",
    "standard_error",
]

Floats = NDArray[np.float64]

WINDOWS = (5, 12, 24, 48, 96, 192, 384)
"""Window lengths in samples: short for steps, long for drift, bursts and noisy jobs."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Spread of healthy log times: robust sigma and the lag-1 correlation it behaves like."""

    sigma: float
    rho: float
    count: int
    """Healthy samples the level was taken from."""

    def effective(self, n: int) -> float:
        """How many independent samples n correlated ones are worth, at least 1 (AR(1))."""
        return effective_count(n, self.rho)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    """How common single long records are among a job's healthy ones."""

    height: float
    """Log time over the level from which a record counts."""
    rate: float
    """Spikes, that is runs of such records, per healthy record."""
    longest: float = math.inf
    """Records in the longest of them; inf while too few were seen."""


def standard_error(noise: Noise, n: int) -> float:
    """Standard error of the difference of two medians: of n samples, and of the level's."""
    # 1.25: a median of Gaussian samples is that much noisier than their mean
    return (
        1.25
        * noise.sigma
        * float(np.sqrt(1.0 / noise.effective(n) + 1.0 / noise.effective(noise.count)))
    )


def majority_ends(
    flags: NDArray[np.bool_], begin: int, windows: tuple[int, ...]
) -> NDArray[np.bool_]:
    """For each position >= begin: whether some window that ends there is at least half flagged.

    flags: shape (n,), history first. Returns shape (n - begin,). Windows longer than the
    history available at a position do not count there.
    """
    n = len(flags)
    counts = np.zeros(n + 1, dtype=np.int32)
    np.cumsum(flags, out=counts[1:])
    out = np.zeros(n - begin, dtype=np.bool_)
    if counts[-1] == 0:
        return out
    for length in windows:
        first = max(begin, length - 1)
        if first >= n:
            break
        hits = counts[first + 1 :] - counts[first + 1 - length : n + 1 - length]
        out[first - begin :] |= 2 * hits >= length
    return out


def run_lengths(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Lengths of the runs of True, in order.

    >>> run_lengths(np.array([True, False, True, True])).tolist()
    [1, 2]
    """
    padded = np.zeros(len(flags) + 2, dtype=np.int8)
    padded[1:-1] = flags
    edges = np.flatnonzero(np.diff(padded))
    return edges[1::2] - edges[::2]


def locate_rise(excess: Floats, level: float) -> int:
    """Index at which the excess rises from about 0 to about `level` (> 0) and stays to the end.

    The maximum-likelihood change point of two known levels: the suffix with the largest sum of
    (excess − level/2). Excesses are clipped so that one spike does not draw the onset to it.
    """
    return _best_suffix(np.clip(excess, -0.25 * level, 1.25 * level) - 0.5 * level)


def locate_fall(excess: Floats, high: float, low: float) -> int:
    """Index at which the excess falls from about `high` to about `low` and stays to the end.

    Clipped at both: what counts is whether a record is nearer to the one or the other, so that
    neither bursts nor a job's regular fast records shift it.
    """
    return _best_suffix(0.5 * (high + low) - np.clip(excess, low, high))


def _best_suffix(gain: Floats) -> int:
    sums = np.cumsum(gain[::-1])
    return len(gain) - 1 - int(np.argmax(sums))
