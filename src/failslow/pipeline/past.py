"""What a journal's end says of a launch, for a controller that goes on with it.

In: journal entries, oldest first. Out: a `Past`, or None when the launch is not in them:

    past = read_past(entries, "41822-991")
    past.steps[-1].record.step, past.episode
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from failslow.journal import JournalEntry
from failslow.records import Decision, Episode, JobFacts, Outcome, Plan, RankProfile, StepSample

__all__ = ["Past", "read_past"]

_STEPS, _MOST_STEPS = 4_096, 32_768
"""The detector takes 0.2 ms for one."""


@dataclass(slots=True)
class Past:
    """The part of a journal since the launch began."""

    steps: list[JournalEntry] = field(default_factory=list)
    """The job's own iterations."""
    workers: dict[int, JournalEntry] = field(default_factory=dict)
    """Each worker's last record."""
    episode: JournalEntry | None = None
    """Last record of the episode that was on."""
    ended: bool = False
    """The controller said so: the workers were gone."""
    last_t: float = 0.0
    facts: JobFacts | None = None
    """What the job's coordinator said of it."""
    plan: Plan | None = None
    """What was carried out last of S1, S2 and S3."""
    reference: list[dict[str, Any]] = field(default_factory=list)
    """Results of the benchmarks in healthy times."""
    profiles: dict[int, RankProfile] = field(default_factory=dict)
    """How each worker's calls went in healthy times."""
    pauses: list[tuple[float, float, bool]] = field(default_factory=list)
    """When training was paused, for how many seconds, and whether the budget counts it."""
    _decided: Plan | None = None

    def telling_steps(self) -> list[JournalEntry]:
        """The last iterations that the detector needs to know what it knew, episode included."""
        begin = max(0, len(self.steps) - _STEPS)
        if self.episode is not None:
            start_t = self.episode.tags.get("start_t", 0.0)
            before = bisect_left(self.steps, start_t, key=lambda entry: entry.t) - _STEPS // 4
            if len(self.steps) - before <= _MOST_STEPS:
                begin = min(begin, max(0, before))
        return self.steps[begin:]

    def take(self, entry: JournalEntry) -> None:
        """Add the next entry."""
        self.last_t = max(self.last_t, entry.t)
        if isinstance(entry.record, Episode):
            over = entry.tags.get("event") in ("relief", "abandoned")
            self.episode = None if over else entry
        elif isinstance(entry.record, StepSample):
            if entry.rank is None:
                self.steps.append(entry)
            else:
                self.workers[entry.rank] = entry
        elif isinstance(entry.record, RankProfile):
            if not entry.tags.get("episode"):
                self.profiles[entry.record.rank] = entry.record
        elif isinstance(entry.record, JobFacts):
            self.facts, self.plan = entry.record, None
        elif isinstance(entry.record, Decision):
            self._decided = entry.record.plan if entry.record.apply else self._decided
        elif isinstance(entry.record, Outcome) and self._decided is not None:
            if entry.record.ok and entry.record.level == self._decided.level:
                self.plan = self._decided
        elif entry.kind == "validation" and isinstance(entry.record, dict):
            refers, pause_s = entry.record.get("why") == "reference", entry.record.get("pause_s")
            if isinstance(pause_s, (int, float)):
                self.pauses.append((entry.t, float(pause_s), not refers))
            ok = refers and entry.record.get("ok")
            self.reference = list(entry.record.get("results", ())) if ok else self.reference


def read_past(entries: Iterable[JournalEntry], launch: str) -> Past | None:
    """What follows the last word of any other launch; None if this one said nothing after it."""
    past, ours = Past(), False
    for entry in entries:
        record = entry.record
        if isinstance(record, dict) and record.get("what") == "controller":
            if record.get("launch") != launch:
                past, ours = Past(), False
                continue
            ours, past.ended = True, record.get("event") == "ended"
        past.take(entry)
    return past if ours else None
