"""The healthy level of a regime and its noise, from its healthy records.

In: log times of healthy records, some at a time. Out: the level (a running median), the
reference it may not creep away from, and the noise.

    level.log_s = log(0.571), level.reference_log_s = log(0.568), noise = Noise(.021, .3, 128)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from failslow.detect.windows import Noise, Spikes, run_lengths
from failslow.stats.robust import autocorrelation, mad

__all__ = ["HealthyLevel"]

Floats = NDArray[np.float64]

_LEVEL_RECORDS = 128
_NOISE_RECORDS = 256
_FLOOR = 0.004  # log time; clocks and printed digits are not better than that
_FEW = 32  # below so many records the spread is not trusted to be small
_FEW_FLOOR = 0.01
_LAGS = 4
_RARE, _ROOM = 3, 0.03  # so many records may be higher than usual, and others by so much,
_LEAST_RATE = 0.02  # so often, whatever the few records seen say
_YOUNG = 64
_BLOCK = 128


class HealthyLevel:
    """Running level, reference and noise; `take` is called with healthy records only."""

    def __init__(self, log_s: float, slow: float, known_log_s: float = math.inf) -> None:
        """known_log_s: what the reference may not lie above, whatever the records say."""
        self._known_log_s = known_log_s
        self.reference_log_s = min(log_s, known_log_s)
        self.log_s = min(log_s, self.reference_log_s + slow)
        self.noise = Noise(sigma=0.02, rho=0.0, count=1)
        self.spikes = [Spikes(height=slow, rate=0.01)]
        """How common spikes of one or two heights are in this job."""
        self.wall_s = 0.0
        self.warm_up = 0
        """How many of the first records were warm-up and do not count."""
        self._slow = slow
        self._recent: Floats = np.empty(0)
        self._taken = 0

    def take(self, log_s: Floats, iterations: Floats) -> None:
        """Healthy records, shape (n,), and how many iterations each stands for."""
        self._recent = np.concatenate((self._recent, log_s))[-_NOISE_RECORDS:]
        if self._taken < _YOUNG:
            settled = _after_warm_up(self._recent)
            self.warm_up += len(self._recent) - len(settled)
            self._recent = settled
        self._taken += len(log_s)
        self.wall_s += float((np.exp(log_s) * iterations).sum())
        level = float(np.median(self._recent[-_LEVEL_RECORDS:]))
        self.noise = _noise(_detrended(self._recent), min(self._taken, _LEVEL_RECORDS))
        self.spikes = _spikes(self._recent - level, self._slow)
        if self._taken <= _LEVEL_RECORDS:
            self.reference_log_s = min(level, self._known_log_s)
        elif self._taken >= 2 * _LEVEL_RECORDS:
            error = 1.25 * self.noise.sigma / np.sqrt(self.noise.effective(_LEVEL_RECORDS))
            if level < self.reference_log_s - max(self._slow / 2, 5.0 * error):
                self.reference_log_s = level
        self.log_s = min(level, self.reference_log_s + self._slow)

    def watch(self, log_s: Floats) -> None:
        """Suspicious records, from the regime's first on: what they tell of spikes.

        A level of few records may not know the job's habits yet. A fault is one run of long
        records and changes no rate; what comes and goes is a habit.
        """
        if self._taken < _FEW:
            self.spikes = _spikes(log_s - self.log_s, self._slow)


def _spikes(excess: Floats, slow: float) -> list[Spikes]:
    """How common spikes are: those slow enough, and those over what one record in twenty reaches.

    The second tells a fault where slow records are the job's habit: two kinds of batches, or an
    evaluation in every other log line.
    """
    n = len(excess)
    found = [_spikes_over(slow, excess, 0.0)]
    if n >= _FEW:
        usual = n - 1 - max(_RARE, n // 20)
        height = float(np.partition(excess, usual)[usual]) + _ROOM
        if height > slow:
            found.append(_spikes_over(height, excess, _LEAST_RATE))
    return found


def _spikes_over(height: float, excess: Floats, least: float) -> Spikes:
    runs = run_lengths(excess >= height)
    longest = float(runs.max()) if len(runs) > _RARE else math.inf
    rate = max(least, _rate(len(runs), len(excess)))
    return Spikes(height=height, rate=rate, longest=longest)


def _rate(count: int, n: int) -> float:
    """Spikes per record: one is chance, more are a rate; of few records it may be far too low."""
    if n < _FEW and count >= _RARE:
        return (count + 2.0 * math.sqrt(count)) / n
    return max((0.5 + count) / (100.0 + n), (count - 1) / n)


def _after_warm_up(log_s: Floats) -> Floats:
    """Without the first records as long as they lie above what the later half is like."""
    later = log_s[len(log_s) // 2 :]
    level = np.median(later)
    high = log_s > level + 3.0 * max(mad(later), _FLOOR)
    return log_s[len(log_s) // 2 if high.all() else int(np.argmin(high)) :]


def _detrended(log_s: Floats) -> Floats:
    """Each half of the records against its own median, when they are many: drift is no noise."""
    parts = max(1, len(log_s) // _BLOCK)
    return np.concatenate([p - np.median(p) for p in np.array_split(log_s, parts)])


def _noise(excess: Floats, count: int) -> Noise:
    n = len(excess)
    sigma = mad(excess, 0.0)
    if n < _FEW:
        # the median deviation of few samples may be far too small
        sigma = max(sigma * (1.0 + 4.0 / n), _FEW_FLOOR)
    sigma = max(sigma, _FLOOR)
    if n < 2 * _LAGS:
        return Noise(sigma=sigma, rho=0.0, count=count)
    correlations = autocorrelation(excess, _LAGS)
    sure = 3.0 / np.sqrt(n)
    rho = max(0.0, float(correlations[0]))
    if rho > sure:
        # white noise on top hides a slow process at lag 1; it shows in how slowly
        # the correlation falls from there
        rho = max(float(r) ** (1.0 / k) for k, r in enumerate(correlations, 1) if r > sure)
    if rho > 0.0:
        # correlations about a block's own centre come out low by (1 + 3 rho) / n (Kendall 1954)
        block = min(n, _BLOCK)
        rho = (rho + 1.0 / block) / (1.0 - 3.0 / block)
    return Noise(sigma=sigma, rho=min(rho, 0.97), count=count)
