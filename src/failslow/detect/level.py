"""The healthy level of a regime and its noise, from its healthy records.

In: log times of healthy records, some at a time. Out: the level (a running median), the
reference it may not creep away from, and the noise.

    level.log_s = log(0.571), level.reference_log_s = log(0.568), noise = Noise(.021, .3, 128)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from failslow.detect.windows import Noise

__all__ = ["HealthyLevel"]

Floats = NDArray[np.float64]

_LEVEL_RECORDS = 128
_NOISE_RECORDS = 256
_FLOOR = 0.004  # log time; clocks and printed digits are not better than that
_FEW = 32  # below so many records the spread is not trusted to be small
_FEW_FLOOR = 0.01
_LAGS = 4


class HealthyLevel:
    """Running level, reference and noise; `take` is called with healthy records only."""

    def __init__(self, log_s: float, slow: float) -> None:
        self.log_s = log_s
        self.reference_log_s = log_s
        self.noise = Noise(sigma=0.02, rho=0.0, count=1)
        self.spike_share = 0.0
        """Share of healthy records that are long by themselves."""
        self.wall_s = 0.0
        self._slow = slow
        self._recent: Floats = np.empty(0)
        self._taken = 0

    def take(self, log_s: Floats, wall_s: float) -> None:
        """Healthy records, shape (n,), that lasted `wall_s` in all."""
        self._recent = np.concatenate((self._recent, log_s))[-_NOISE_RECORDS:]
        self._taken += len(log_s)
        self.wall_s += wall_s
        level = float(np.median(self._recent[-_LEVEL_RECORDS:]))
        excess = self._recent - float(np.median(self._recent))
        self.noise = _noise(excess, min(self._taken, _LEVEL_RECORDS))
        self.spike_share = float(np.mean(self._recent - level >= self._slow))
        if self._taken <= _LEVEL_RECORDS:
            self.reference_log_s = level
        elif self._taken >= 2 * _LEVEL_RECORDS:
            error = 1.25 * self.noise.sigma / np.sqrt(self.noise.effective(_LEVEL_RECORDS))
            if level < self.reference_log_s - max(self._slow / 2, 5.0 * error):
                self.reference_log_s = level
        self.log_s = min(level, self.reference_log_s + self._slow)


def _noise(excess: Floats, count: int) -> Noise:
    n = len(excess)
    sigma = 1.4826 * float(np.median(np.abs(excess)))
    if n < _FEW:
        # the median deviation of few samples may be far too small
        sigma = max(sigma * (1.0 + 4.0 / n), _FEW_FLOOR)
    sigma = max(sigma, _FLOOR)
    clipped = np.clip(excess, -3.0 * sigma, 3.0 * sigma)
    clipped = clipped - clipped.mean()
    power = float(clipped @ clipped)
    rho = 0.0
    if power > 0.0:
        sure = 3.0 / np.sqrt(n)
        correlations = [float(clipped[k:] @ clipped[:-k]) / power for k in range(1, _LAGS + 1)]
        if correlations[0] > 0.0:
            rho = correlations[0]
        if correlations[0] > sure:
            # white noise on top hides a slow process at lag 1; it shows in how slowly
            # the correlation falls from there
            rho = max(r ** (1.0 / k) for k, r in enumerate(correlations, 1) if r > sure)
    return Noise(sigma=sigma, rho=min(rho, 0.97), count=count)
