"""What the levels cost and how much they remove: estimates first, measurements once there are any.

In: `Outcome`s. Out: seconds, and how far plans keep their promise.

    book = CostBook(DecideConfig())
    book.cost("S3")                        # (15.0, "estimate")
    book.learn_cost("S3", 6.2)
    book.cost("S3")                        # (6.2, "measured")
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median
from typing import Literal

from failslow.config import DecideConfig
from failslow.records import Rung

__all__ = ["CostBook", "Source"]

Source = Literal["estimate", "measured"]

_KEPT = 5
"""The median of so many of the latest measurements is believed."""


class CostBook:
    """One job's experience with the levels."""

    def __init__(self, config: DecideConfig) -> None:
        self._estimate_s: dict[Rung, float] = {
            "S1": 0.0,
            "S2": config.redistribute_cost_s,
            "S3": config.topology_cost_s,
            "S4": config.restart_cost_s,
        }
        self._measured_s: dict[Rung, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._refused: dict[Rung, str] = {}
        self._kept: dict[Rung, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def refuse(self, level: Rung, why: str) -> None:
        """`level` can never work on this job."""
        self._refused[level] = why

    def refusal(self, level: Rung) -> str:
        """Why `level` can never work; "" when it may."""
        return self._refused.get(level, "")

    def learn_cost(self, level: Rung, cost_s: float) -> None:
        """Going to `level` took so long."""
        self._measured_s[level].append(cost_s)

    def learn_share(self, level: Rung, *, promised: float, achieved: float) -> None:
        """A plan that promised to remove this share of the slowdown removed that one."""
        if promised > 0.0:
            self._kept[level].append(min(max(achieved / promised, 0.0), 1.0 / promised))

    def cost(self, level: Rung) -> tuple[float, Source]:
        """Seconds it costs to go to `level`, and how that is known."""
        measured = self._measured_s.get(level)
        return (median(measured), "measured") if measured else (self._estimate_s[level], "estimate")

    def share(self, level: Rung, promised: float) -> float:
        """The share a plan will remove that promises `promised`, as such plans have done."""
        kept = self._kept.get(level)
        return min(1.0, promised * median(kept)) if kept else promised
