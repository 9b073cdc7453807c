"""What the policy is told, besides the records `Verdict`, `Outcome`, `CulpritPace` and `Command`.

Pace(episode="e1745735301", slowdown=1.40, lost_s=12.5)
Relieved(episode="e1745735301", lost_s=31.0)
"""

from __future__ import annotations

from dataclasses import dataclass

from failslow.records import Command, CulpritPace, Outcome, Verdict

__all__ = ["Event", "Pace", "Relieved", "Tick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the job fares in an episode."""

    episode: str
    slowdown: float
    """Iteration time now over the healthy one."""
    lost_s: float
    """Seconds lost since this episode's onset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relieved:
    """The episode is over: job time looks healthy."""

    episode: str
    lost_s: float
    """Seconds lost in it altogether."""
    abandoned: bool = False
    """It is only not followed further: how the job fares is not known."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Pace | Relieved | Tick | Verdict | Outcome | CulpritPace | Command
