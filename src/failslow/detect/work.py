"""How much of a change of iteration time the work per iteration explains.

In: log time and work (tokens or samples) of each iteration. Out: the correction `g`, such that
log(time) − g is comparable over all amounts of work.

    1.0 s at 1024 samples, 1.9 s at 2048  ->  g(2048) = log(1.9): a workload change, no fault

Nothing is assumed of the workload but that time grows with work, and not faster than
its power 1.3 (attention over longer sequences). The first samples of a new amount of work teach
its time, as far as the known neighbours allow; what exceeds their bound stays in the series as
slowness.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

__all__ = ["WorkModel"]

_BIN = 0.02  # log width: amounts of work within 2 % are one
_LEARN = 8  # samples that teach a new amount of work
_POWER = 1.3
_SLACK = 0.03


class WorkModel:
    """Time as a function of work, learnt from healthy samples."""

    def __init__(self) -> None:
        self._anchor: float | None = None
        self._known: dict[int, float] = {}
        self._order: list[int] = []
        self._learning: dict[int, list[float]] = {}

    def is_reference(self, log_work: NDArray[np.float64]) -> bool:
        """Whether all this work is the job's first amount, for which no correction is needed.

        The first work ever seen becomes that amount.
        """
        if self._anchor is None:
            self._anchor = float(log_work[0])
            self._known[0] = 0.0
            self._order = [0]
        return bool(np.abs(log_work - self._anchor).max() < _BIN / 2)

    def correct(self, log_work: float, excess: float | None, *, learn: bool) -> float:
        """The correction for a sample whose log time lies `excess` over the healthy level.

        excess None: no level known yet, the work is taken as the reference. learn False (the job
        is slow): the model is used and not taught.
        """
        if math.isnan(log_work):
            return 0.0
        if self._anchor is None:
            raise ValueError("is_reference() must see the first work before correct() is asked")
        key = round((log_work - self._anchor) / _BIN)
        if key in self._known:
            return self._known[key]
        low, high = self._bounds(key)
        if excess is None:
            return (low + high) / 2
        value = min(max(excess, low), high)
        if learn:
            taught = self._learning.setdefault(key, [])
            taught.append(value)
            if len(taught) >= _LEARN:
                self._known[key] = float(np.median(taught))
                insort(self._order, key)
                del self._learning[key]
        return value

    def _bounds(self, key: int) -> tuple[float, float]:
        """Correction between which the neighbours' times put this amount of work."""
        at = bisect_left(self._order, key)
        low, high = -math.inf, math.inf
        if at > 0:
            below = self._order[at - 1]
            low = self._known[below]
            high = low + _POWER * (key - below) * _BIN
        if at < len(self._order):
            above = self._order[at]
            high = min(high, self._known[above])
            low = max(low, self._known[above] - _POWER * (above - key) * _BIN)
        low, high = min(low, high), max(low, high)
        return low - _SLACK, high + _SLACK
