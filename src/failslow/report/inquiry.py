"""What is known at the moment about who is to blame, and what is being done about it.

In: a watched job's journal entries in order. Out: an `Inquiry`, which the live table shows:

    inquiry.suspects, inquiry.findings, inquiry.level, inquiry.decision

A mitigated culprit stays known until it is well again, although the job's iterations are healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from failslow.journal import JournalEntry
from failslow.records import (
    CulpritPace,
    Decision,
    Diagnosis,
    Episode,
    Finding,
    JobFacts,
    Outcome,
    Rung,
    Suspect,
    Verdict,
)

__all__ = ["Inquiry"]

_WELL = 1.05
"""A culprit this near its healthy time is well (design, relief)."""
_WEAK = 0.5
"""Of the likeliest suspect's score: a group of everybody is often the next one."""


@dataclass(slots=True)
class Inquiry:
    """Of one start of the job."""

    id: str = ""
    """Of the suspicion or episode it is about."""
    diagnosis: Diagnosis | None = None
    verdict: Verdict | None = None
    verdict_t: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)
    """By component, as last measured; those that are well again are gone."""
    level: Rung = "S1"
    """In force."""
    decision: Decision | None = None
    decision_t: float = 0.0
    outcome: Outcome | None = None
    """Of the last plan that was tried."""
    facts: JobFacts | None = None

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """The likeliest first."""
        return self.diagnosis.suspects if self.diagnosis else ()

    @property
    def open_suspects(self) -> tuple[Suspect, ...]:
        """Those no verdict has judged yet."""
        return () if self._is_judged else self.suspects

    @property
    def _is_judged(self) -> bool:
        return self.verdict is not None and self.verdict.episode == self.id

    def finding_of(self, rank: int) -> Finding | None:
        """The worst that is proven of a worker; of a link its sending side is slowed."""
        mine = [finding for finding in self.findings.values() if rank in finding.ranks]
        return max(mine, key=lambda finding: finding.slowdown, default=None)

    def suspect_of(self, rank: int) -> Suspect | None:
        """The likeliest open suspicion that names the worker; a weak one marks nobody."""
        if self._is_judged or not self.suspects:
            return None
        enough = _WEAK * self.suspects[0].score
        likely = (s for s in self.suspects if rank in s.ranks and s.score >= enough)
        return next(likely, None)

    def holds(self, rank: int) -> bool:
        """Whether a worker that was late by its own times is thought to be slow still: until the
        newest diagnosis or verdict on the same fault names others, or nobody."""
        if self.finding_of(rank) is not None:
            return True
        if self._is_judged:
            return False
        if self.diagnosis is None or self.diagnosis.episode != self.id:
            return True
        return rank in self.diagnosis.missing or self.suspect_of(rank) is not None

    def take(self, entry: JournalEntry) -> None:
        """One more entry. Raises KeyError, TypeError, ValueError on one of another version."""
        record = entry.record
        if isinstance(record, Diagnosis):
            if record.episode:
                self._about(record.episode)
                self.diagnosis = record
                if not self.findings:
                    self.verdict = None  # that found nobody; it is looked for anew
        elif isinstance(record, Verdict):
            self._proved(record, entry.t)
        elif isinstance(record, Decision):
            self.decision, self.decision_t = record, entry.t
        elif isinstance(record, Outcome):
            self._tried(record)
        elif isinstance(record, CulpritPace):
            if record.slowdown <= _WELL:
                self.findings.pop(record.key, None)
        elif isinstance(record, JobFacts):
            self.facts = record
        elif isinstance(record, Episode):
            self._episode(record, entry)
        elif isinstance(record, Mapping) and entry.kind == "suspicion":
            self._about(str(record.get("id", "")))
            if record.get("event") == "cleared" and self.level == "S1":
                self._forget()

    def _proved(self, verdict: Verdict, t: float) -> None:
        # that of the reference, about nobody's fault, tells who is slow from the start
        if verdict.episode:
            self._about(verdict.episode)
        if verdict.episode or verdict.findings:
            self.verdict, self.verdict_t = verdict, t
        self.findings.update({finding.key: finding for finding in verdict.findings})

    def _tried(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome.ok:
            self.level = outcome.level
            if outcome.level == "S1":
                self._forget()

    def _episode(self, episode: Episode, entry: JournalEntry) -> None:
        if episode.kind != "fail_slow":
            return
        self._about(str(entry.tags.get("id", "")))
        over = episode.end_step is not None or entry.tags.get("event") in ("relief", "abandoned")
        # under a level the job is well because of it, whatever the culprit is
        if over and self.level == "S1":
            self._forget()

    def _about(self, id: str) -> None:
        """Another fault begins; culprits that are being worked around are still there."""
        if id != self.id and self.level == "S1":
            self._forget()
        self.id = id

    def _forget(self) -> None:
        self.diagnosis, self.verdict, self.decision = None, None, None
        self.findings.clear()
