"""What a journal's end says of a launch, for a controller that goes on with it.

In: journal entries, oldest first. Out: a `Past`, or None when the launch is not in them:

    past = read_past(entries, "41822-991")
    past.steps[-1].record.step, past.episode
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from failslow.journal import JournalEntry
from failslow.records import (
    CulpritPace,
    Decision,
    Diagnosis,
    Episode,
    JobFacts,
    Outcome,
    RankProfile,
    StepSample,
    Verdict,
)

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
    microbatches: tuple[int, ...] = ()
    """As they were split last, and..."""
    placement: tuple[int, ...] = ()
    """...the worker at each position; () as at the start."""
    unanswered: dict[int, tuple[Decision, Mapping[str, Any]]] = field(default_factory=dict)
    """Orders of which nobody said what became of them, and their journal lines."""
    next_id: int = 1
    """Of orders."""
    reference: list[dict[str, Any]] = field(default_factory=list)
    """Results of the benchmarks in healthy times."""
    profiles: dict[int, RankProfile] = field(default_factory=dict)
    """How each worker's calls went in healthy times."""
    pauses: list[tuple[float, float, bool]] = field(default_factory=list)
    """When training was paused, for how many seconds, and whether the budget counts it."""
    inquiry: list[JournalEntry] = field(default_factory=list)
    """What was found out about suspicions, and tried."""
    learnt: Mapping[str, Any] | None = None
    """What levels were known to cost."""
    _late_s: float = math.inf
    _pausing: bool = False
    """The last of `pauses` had begun, no more is told."""
    _decided: Decision | None = None
    _settled: int = 0
    """The latest order that was carried out."""

    @property
    def late_s(self) -> float:
        """By how much the controller's clock is ahead of the job's."""
        return self._late_s if math.isfinite(self._late_s) else 0.0

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
        record = entry.record
        if isinstance(record, dict):
            self._take_plain(entry, record)
        elif isinstance(record, Episode):
            over = entry.tags.get("event") in ("relief", "abandoned")
            self.episode = None if over else entry
        elif isinstance(record, StepSample):
            if entry.rank is None:
                if self.steps and record.run != self.steps[-1].record.run:
                    self.profiles = {}  # of another program, or of workers started before
                self.steps.append(entry)
            else:
                self.workers[entry.rank] = entry
        elif isinstance(record, RankProfile) and not entry.tags.get("episode"):
            self.profiles[record.rank] = record
        elif isinstance(record, (RankProfile, Diagnosis, Verdict, CulpritPace)):
            self.inquiry.append(entry)
        elif isinstance(record, JobFacts):
            self._learn(record)
        elif isinstance(record, Decision):
            self._decided = record if record.apply else self._decided
        elif isinstance(record, Outcome):
            self._answer(record, entry.tags.get("id"))

    def _take_plain(self, entry: JournalEntry, record: Mapping[str, Any]) -> None:
        if entry.kind == "validation" or record.get("what") == "pausing":
            self._pause(entry, record, over=entry.kind == "validation")
        elif entry.kind == "action":
            self._act(record)
        elif record.get("what") == "controller":
            self._pausing = self._pausing and record.get("event") != "resumed"
            if self.steps:  # it writes of an iteration soon after that is over, or much later
                self._late_s = min(self._late_s, entry.t - self.steps[-1].t)

    def begin_anew(self) -> None:
        """The workers are others: as at the start."""
        self.reference, self.profiles = [], {}
        self.microbatches = self.placement = ()
        self.unanswered = {}

    def _learn(self, facts: JobFacts) -> None:
        """They are repeated now and then; others are of another trainer."""
        known, self.facts = self.facts, facts
        if known is not None and replace(known, iteration_s=facts.iteration_s) != facts:
            self.begin_anew()

    def _pause(self, entry: JournalEntry, record: Mapping[str, Any], *, over: bool) -> None:
        """Of one of which the end is not told the expected time counts; one refused is none."""
        self.inquiry.append(entry)
        ok, refers = bool(record.get("ok")), record.get("why") == "reference"
        pause_s = record.get("pause_s")
        if over and self._pausing:
            self.pauses.pop()
        if isinstance(pause_s, (int, float)) and (pause_s or ok or not over or self._pausing):
            self.pauses.append((entry.t, float(pause_s), not refers))
        self._pausing = not over
        if ok and refers:
            self.reference = list(record.get("results", ()))

    def _act(self, record: Mapping[str, Any]) -> None:
        if record.get("what") == "learnt":
            self.learnt = record
        if record.get("what") == "standing":
            if record.get("anew"):  # the workers were started again
                self.begin_anew()
            self.microbatches = tuple(record.get("microbatches", ()))
            self.placement = tuple(record.get("placement", ()))
            self.next_id = max(self.next_id, int(record.get("next_id", 1)))
        number = record.get("id")
        if record.get("what") == "ordered" and isinstance(number, int):
            self.next_id = max(self.next_id, number + 1)
            if self._decided is not None:
                self.unanswered[number] = (self._decided, record)

    def _answer(self, outcome: Outcome, number: Any) -> None:
        """number: the order's; without it nobody answered, or it was measured afterwards."""
        if not isinstance(number, int) or number not in self.unanswered:
            return
        plan = self.unanswered.pop(number)[0].plan
        if not outcome.ok or plan is None or number < self._settled:
            return
        self._settled = number
        self.microbatches = plan.microbatches or self.microbatches
        self.placement = plan.placement or self.placement
        if outcome.level == "S4":
            self.microbatches = self.placement = ()


def read_past(entries: Iterable[JournalEntry], launch: str) -> Past | None:
    """What follows the last word of any other launch; None if this one said nothing after it."""
    past, ours = Past(), False
    for entry in entries:
        record = entry.record
        if isinstance(record, dict) and record.get("what") == "controller":
            if record.get("launch") != launch:
                past, ours = Past(), False
                continue
            if past.ended:
                past.begin_anew()
            ours, past.ended = True, record.get("event") == "ended"
        past.take(entry)
    return past if ours else None
