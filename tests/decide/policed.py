"""A policy on a job that the tests make slow."""

from __future__ import annotations

from typing import Any

from tests.decide.jobs import Shares, device, settings, verdict

from failslow.decide.events import Event, Pace
from failslow.decide.levels import Planner
from failslow.decide.policy import Policy
from failslow.records import Decision, Outcome, Rung

LEVELS = Shares({"S2": 0.8, "S3": 0.9, "S4": 1.0})


class Job:
    """A policy, its clock, and every decision so far."""

    def __init__(self, planner: Planner = LEVELS, **changed: Any) -> None:
        self.policy = Policy(planner, settings(**changed))
        self.now_s = 0.0
        self.decisions: list[Decision] = []

    def at(self, now_s: float, *events: Event) -> list[Decision]:
        self.now_s = now_s
        new = [d for event in events for d in self.policy.update(event, now_s)]
        self.decisions += new
        return new

    def slow(self, now_s: float, slowdown: float = 2.0, lost_s: float = 0.0) -> list[Decision]:
        return self.at(now_s, Pace(episode="e1", slowdown=slowdown, lost_s=lost_s))

    def done(
        self, now_s: float, level: Rung, slowdown: float | None = None, cost_s: float = 0.5
    ) -> list[Decision]:
        outcome = Outcome(episode="e1", level=level, ok=True, cost_s=cost_s, slowdown=slowdown)
        return self.at(now_s, outcome)

    def mitigated(self, slowdown: float = 1.2) -> Decision:
        """Slow from 0 on, rank 1 to blame, S2 in force at 10 s."""
        self.slow(0.0)
        (decision,) = self.at(10.0, verdict(device(1)))
        assert decision.level == "S2"
        assert self.done(10.0, "S2", slowdown) == []
        return decision
