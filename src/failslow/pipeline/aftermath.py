"""What a plan left of the slowdown, until the detector has seen the new level. Pure.

In: outcomes of plans, the iterations after them, the episode's level as the detector tells it. Out:
the slowdown measured, once, and the slowdown to go by meanwhile:

    aftermath.begin(Outcome(level="S2", ok=True, …))
    aftermath.take(0.081, 1.46, healthy_s=0.073)    # None until enough have shown it, then 1.10
    aftermath.present(1.46)                         # 1.10: the detector still tells of the past
"""

from __future__ import annotations

from statistics import median

from failslow.records import Outcome

__all__ = ["SETTLE", "Aftermath"]

SETTLE = 2
"""Iterations after a change that are slow because of it: groups, caches, pipelines fill."""
_MEASURED = 10


class Aftermath:
    """Of one job's latest plan."""

    def __init__(self) -> None:
        self.since = 0
        """Iterations seen since the last change."""
        self._level = 1.0
        """The episode's slowdown as last told, and..."""
        self._level_then: float | None = None
        """...when a plan was carried out: as long as it is that, it is of the time before."""
        self._left: float | None = None
        """What that plan was measured to leave."""
        self._after_s: list[float] | None = None
        """Durations of iterations, while that is being measured."""

    def begin(self, outcome: Outcome) -> None:
        """What was measured before an outcome says nothing of the job after it."""
        self.since, self._left = 0, None
        is_change = outcome.ok and outcome.level in ("S2", "S3")
        self._after_s = [] if is_change else None
        if outcome.ok:
            self._level_then = self._level if is_change else None

    def forget(self) -> None:
        """The episode is not followed further: what is measured of the job is of no plan."""
        self._left = self._after_s = None

    def take(
        self, duration_s: float, level: float, *, healthy_s: float | None, waits: bool = False
    ) -> float | None:
        """One iteration; the slowdown left, once. waits: for the answer to another order."""
        self._level = level
        self.since += 1
        if self._after_s is None or self.since <= SETTLE or not healthy_s or waits:
            return None
        self._after_s.append(duration_s)
        if len(self._after_s) < _MEASURED:
            return None
        self._left, self._after_s = median(self._after_s) / healthy_s, None
        return self._left

    def present(self, level: float) -> float | None:
        """The job's slowdown now; None where it is not known since a plan was carried out.

        The detector needs a while to see another level: the old one is no reason for more.
        """
        if level != self._level_then:
            self._level_then = None
            return level
        return self._left
