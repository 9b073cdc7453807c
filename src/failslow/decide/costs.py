"""What the levels cost and how much they remove: estimates first, measurements once there are any.

In: `Outcome`s. Out: seconds, and how far plans keep their promise.

    book = CostBook(DecideConfig())
    book.cost("S3")                        # (15.0, "estimate")
    book.learn_cost("S3", 6.2)
    book.cost("S3")                        # (6.2, "measured")
    book.learnt()                          # {"S3": {"cost_s": [6.2], "kept": [], "refused": ""}}

What was learnt outlives the book: another controller of the job recalls it from the journal.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

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

    def learnt(self) -> dict[str, dict[str, Any]]:
        """All there is besides the estimates, as plain values; {} nothing."""
        levels = [level for level in self._estimate_s if self._knows(level)]
        return {
            level: {
                "cost_s": list(self._measured_s.get(level, ())),
                "kept": list(self._kept.get(level, ())),
                "refused": self.refusal(level),
            }
            for level in levels
        }

    def recall(self, learnt: Mapping[str, Any]) -> None:
        """Begin with what another book had learnt; what makes no sense of it is passed over."""
        for level in self._estimate_s:
            about = learnt.get(level)
            if not isinstance(about, Mapping):
                continue
            self._measured_s[level].extend(_numbers(about.get("cost_s")))
            self._kept[level].extend(_numbers(about.get("kept")))
            if about.get("refused"):
                self._refused[level] = str(about["refused"])

    def _knows(self, level: Rung) -> bool:
        known = (self._measured_s, self._kept, self._refused)
        return any(where.get(level) for where in known)

    def cost(self, level: Rung) -> tuple[float, Source]:
        """Seconds it costs to go to `level`, and how that is known."""
        measured = self._measured_s.get(level)
        return (median(measured), "measured") if measured else (self._estimate_s[level], "estimate")

    def share(self, level: Rung, promised: float) -> float:
        """The share a plan will remove that promises `promised`, as such plans have done.

        n bad measurements leave 1 / (n + 1) of the promise: a level believed to remove nothing
        would never be measured again, and another fault may have struck just then.
        """
        kept = self._kept.get(level)
        if not kept:
            return promised
        return min(1.0, promised * max(median(kept), 1.0 / (1.0 + len(kept))))


def _numbers(found: object) -> list[float]:
    """What comes from a journal may be anything."""
    if not isinstance(found, Sequence) or isinstance(found, str):
        return []
    return [
        float(x)
        for x in found
        if isinstance(x, int | float) and not isinstance(x, bool) and 0.0 <= x < math.inf
    ]
