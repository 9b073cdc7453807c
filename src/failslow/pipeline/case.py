"""What an inquiry knows of one suspicion. Pure.

In: profiles as they come, verdicts. Out: whether more are to be waited for:

    Case("e1745735301", onset_t=1745735301.2, slowdown=1.41)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from failslow.pipeline.messages import Order, Write
from failslow.records import Diagnosis, RankProfile

__all__ = ["Case", "opened", "profile_order"]

_PROFILE_S = 3.0
_ITERATIONS, _HEALTHY_ITERATIONS = 8, 20
_LIMIT_S, _PROFILE_LEAST = 15.0, 3
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
    kept: bool = False
    """Its episode is not followed further, but something is done about it: it is looked at again
    until that is taken back."""

    @property
    def collect_s(self) -> float:
        """How long agents may collect a profile."""
        return max(_LIMIT_S, _PROFILE_LEAST * self.iteration_s)

    def is_late(self, now_s: float) -> bool:
        """Profiles were asked for, and those that are missing do not come any more."""
        return self.asked_s is not None and now_s - self.asked_s > self.collect_s + _LATE_S

    def ask(self, now_s: float) -> Order:
        """Have all workers' calls profiled."""
        self.asked_s, self.profiles = now_s, {}
        return profile_order("suspicion", self.collect_s)


def opened(write: Write) -> Case:
    """By a suspicion, or by the onset of an episode."""
    record, tags = write.record, write.tags
    if write.event == "suspected":
        case = Case(record["id"], record["first_t"], record["slowdown"])
        case.iteration_s = record["slowdown"] * record["baseline_s"]
        return case
    case = Case(tags["id"], tags["start_t"], record.slowdown, confirmed=True)
    case.iteration_s = record.slowdown * record.baseline_s
    return case


def profile_order(why: str, limit_s: float = _LIMIT_S) -> Order:
    """why: "suspicion" or "healthy"."""
    body = {
        "why": why,
        "for_s": _PROFILE_S,
        "min_iterations": _HEALTHY_ITERATIONS if why == "healthy" else _ITERATIONS,
        "limit_s": limit_s,
    }
    return Order(topic="profile", body=body)
