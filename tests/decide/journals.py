"""Journals as a live job writes them, policy included."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tests.decide.jobs import Shares, device, settings, verdict

from failslow.decide.events import Event, Pace, Relieved, Tick
from failslow.decide.policy import Policy
from failslow.journal import JournalWriter
from failslow.records import Culprit, CulpritPace, Decision, Episode, Outcome


class Recorder:
    """A live policy whose events and decisions go to a journal."""

    def __init__(self, path: Path, policy: Policy, start_t: float = 1e9) -> None:
        self._writer = JournalWriter(path)
        self._policy, self._start_t = policy, start_t

    def at(
        self, after_s: float, event: Event, *, culprits: tuple[Culprit, ...] = ()
    ) -> list[Decision]:
        t = self._start_t + after_s
        if isinstance(event, (Pace, Relieved)):
            self._episode(event, t, culprits)
        elif not isinstance(event, Tick):
            self._writer.append(event, t=t)
        decisions = self._policy.update(event, t)
        for decision in decisions:
            self._writer.append(decision, t=t)
        return decisions

    def write(self, after_s: float, record: object, *, kind: str | None = None) -> None:
        """A record that is no event of the policy."""
        self._writer.append(record, t=self._start_t + after_s, kind=kind)

    def show(self, after_s: float, event: Pace | Relieved) -> None:
        """What an episode's own record tells, and the policy is not told so."""
        self._episode(event, self._start_t + after_s, ())

    def tell(self, after_s: float, *events: Event, pace: Pace | None = None) -> list[Decision]:
        """What the policy is told; pace: with the line that there is for it while something is
        done about a fault."""
        if pace is not None:
            self.write(after_s, {"what": "pace", **asdict(pace)}, kind="action")
        told = (*(() if pace is None else (pace,)), *events)
        return [d for event in told for d in self._policy.update(event, self._start_t + after_s)]

    def due_s(self) -> float:
        due = self._policy.due_s()
        assert due is not None
        return due - self._start_t

    def _episode(self, event: Pace | Relieved, t: float, culprits: tuple[Culprit, ...]) -> None:
        over = isinstance(event, Relieved)
        slowdown = 1.0 if isinstance(event, Relieved) else event.slowdown
        record = Episode(
            start_step=1,
            end_step=None,
            start_s=0.0,
            end_s=None,
            duration_s=t - self._start_t,
            iteration_s=slowdown,
            baseline_s=1.0,
            slowdown=slowdown,
            peak_slowdown=slowdown,
            lost_s=event.lost_s,
            confidence=1.0,
            culprits=culprits,
        )
        self._writer.append(
            record,
            t=t,
            event=_turn(event),
            id=event.episode,
            start_t=self._start_t,
            end_t=t if over else None,
            slowdown_now=slowdown,
        )


def _turn(event: Pace | Relieved) -> str:
    if isinstance(event, Pace):
        return "update"
    return "abandoned" if event.abandoned else "relief"


def live(path: Path) -> list[Decision]:
    """A fault of 400 s: verdict at 8 s, S2 at once, S3 when its cost is lost, relief, restore."""
    policy = Policy(Shares({"S2": 0.75, "S3": 0.9}), settings(relief_hold_s=20.0))
    job = Recorder(path, policy)
    made = job.at(0.0, Pace(episode="e1", slowdown=2.0, lost_s=0.0))
    made += job.at(8.0, verdict(device(1)))
    job.at(8.4, Outcome(episode="e1", level="S2", ok=True, cost_s=0.4, slowdown=1.3))
    made += job.at(job.due_s(), Tick())
    job.at(60.0, Outcome(episode="e1", level="S3", ok=True, cost_s=6.0, slowdown=1.1))
    job.at(90.0, Relieved(episode="e1", lost_s=20.0))
    job.at(200.0, CulpritPace(key="device rank 1", slowdown=2.0))
    job.at(400.0, CulpritPace(key="device rank 1", slowdown=1.0))
    made += job.at(job.due_s(), Tick())
    job.at(421.0, Outcome(episode="e1", level="S1", ok=True, cost_s=0.3))
    return made
