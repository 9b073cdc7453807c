"""What an inquiry knows of one suspicion. Pure.

In: profiles as they come, verdicts. Out: whether more are to be waited for:

    Case("e1745735301", onset_t=1745735301.2, slowdown=1.41)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from failslow.records import Diagnosis, RankProfile

__all__ = ["PROFILE_LIMIT_S", "Case"]

PROFILE_LIMIT_S, _PROFILE_LEAST = 15.0, 3
"""Agents collect a profile for so long, or so many iterations if these take longer."""
_LATE_S = 5.0
"""Profiles that have not come so long after do not come."""


@dataclass(slots=True)
class Case:
    """One suspicion, and the episode it has become."""

    id: str
    onset_t: float
    slowdown: float
    confirmed: bool = False
    iteration_s: float = 0.0
    """What an iteration takes now."""
    asked_s: float | None = None
    """When profiles were asked for; None: not waiting for any."""
    profiles: dict[int, RankProfile] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    due_s: float | None = None
    """When suspects are to be put to the proof (again)."""
    recheck_s: float = 0.0
    failures: int = 0
    empty: int = 0
    """Verdicts in a row that found nothing..."""
    judged: Diagnosis | None = None
    """...and the diagnosis the last one was on."""

    @property
    def collect_s(self) -> float:
        """How long agents may collect a profile."""
        return max(PROFILE_LIMIT_S, _PROFILE_LEAST * self.iteration_s)

    def is_late(self, now_s: float) -> bool:
        """Profiles were asked for, and those that are missing do not come any more."""
        return self.asked_s is not None and now_s - self.asked_s > self.collect_s + _LATE_S
