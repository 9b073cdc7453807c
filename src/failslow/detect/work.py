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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["WorkModel"]

_BIN = 0.02  # log width: amounts of work within 2 % share a knot
_LEARN = 8  # samples that make a knot
_REFINE = 64  # samples that still improve it
_POWER = 1.3
_SLACK = 0.03
_JUMP = 0.1  # log width: farther away is another amount of work, not the next of a ramp
_USUAL = 0.7
_RATE = 0.3


@dataclass(slots=True)
class _Knot:
    """What is known of an amount of work: where it lies, its correction, from how many samples."""

    at: float
    value: float
    count: int
    slope: float = 0.5


class WorkModel:
    """Time as a function of work, learnt from healthy samples; linear between knots."""

    def __init__(self) -> None:
        self._anchor: float | None = None
        self._known: dict[int, _Knot] = {}
        self._order: list[int] = []
        self._frontier = (-math.inf, 0.0)  # work and correction of the last sample that taught
        self._learning: dict[int, list[tuple[float, float]]] = {}

    def is_reference(self, log_work: NDArray[np.float64]) -> bool:
        """Whether all this work is the job's first amount, for which no correction is needed.

        The first work ever seen becomes that amount.
        """
        if self._anchor is None:
            self._anchor = float(log_work[0])
            self._known[0] = _Knot(0.0, 0.0, _REFINE)
            self._order = [0]
        return bool((log_work == self._anchor).all())

    def correct(self, log_work: float, excess: float | None, *, learn: bool) -> float:
        """The correction for a sample whose log time lies `excess` over the healthy level.

        excess None: no level known yet. learn False (the job is slow): the model is used and not
        taught.
        """
        if math.isnan(log_work):
            return 0.0
        if self._anchor is None:
            raise ValueError("is_reference() must see the first work before correct() is asked")
        at = log_work - self._anchor
        key = round(at / _BIN)
        knot = self._known.get(key)
        if knot is not None:
            value = knot.value + knot.slope * (at - knot.at)
            if learn and excess is not None and knot.count < _REFINE:
                knot.count += 1
                knot.value += min(max(excess - value, -_SLACK), _SLACK) / knot.count
            return value
        low, high = self._bounds(at)
        if excess is None:
            return (low + high) / 2
        value = min(max(excess, low), high)
        if learn:
            value = self._follow(at, value, low, high)
            taught = self._learning.setdefault(key, [])
            taught.append((at, min(max(excess, low), high)))
            if len(taught) >= _LEARN:
                points = np.array(self._learning.pop(key))
                self._known[key] = _Knot(
                    float(points[:, 0].mean()), float(np.median(points[:, 1])), _LEARN
                )
                insort(self._order, key)
                self._renew_slopes(self._order.index(key))
        return value

    def _follow(self, at: float, value: float, low: float, high: float) -> float:
        """Smoothed over the samples before, so that their noise stays in the series.

        Taking each sample's own excess would leave none, and the job would look more even than
        it is.
        """
        last_at, last = self._frontier
        if abs(at - last_at) < _JUMP:
            expected = last + _USUAL * (at - last_at)
            value = min(max(expected + _RATE * (value - expected), low), high)
        self._frontier = at, value
        return value

    def _renew_slopes(self, position: int) -> None:
        """Slopes of a new knot and its neighbours: the secant over what lies beside each."""
        for i in range(max(0, position - 1), min(len(self._order), position + 2)):
            below = self._known[self._order[max(0, i - 1)]]
            above = self._known[self._order[min(len(self._order) - 1, i + 1)]]
            slope = (above.value - below.value) / max(above.at - below.at, _BIN / 2)
            self._known[self._order[i]].slope = min(max(slope, 0.0), _POWER)

    def _bounds(self, at: float) -> tuple[float, float]:
        """Corrections between which the neighbours' times put this amount of work."""
        place = bisect_left(self._order, at / _BIN)
        low, high = -math.inf, math.inf
        if place > 0:
            below = self._known[self._order[place - 1]]
            low = below.value
            high = low + _POWER * (at - below.at)
        if place < len(self._order):
            above = self._known[self._order[place]]
            high = min(high, above.value)
            low = max(low, above.value - _POWER * (above.at - at))
        low, high = min(low, high), max(low, high)
        return low - _SLACK, high + _SLACK
