"""One fault as it was, so that other policies can be tried on it; read back from a journal.

In: journal entries of kind episode, verdict, decision, outcome and culpritpace, and the iterations
after a restart. Out: `Incident`s: when it began, how slow the job would have been had nothing been
done, who was to blame, what the levels could do and cost, and what was really lost and spent.

    for incident in read_incidents(read_journal(path)):
        incident.duration_s, incident.ended, incident.stretches[0].slowdown
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from failslow.decide.learned import History
from failslow.decide.levels import Assessment
from failslow.records import (
    Culprit,
    CulpritPace,
    Decision,
    Episode,
    Finding,
    JobFacts,
    Outcome,
    Rung,
    StepSample,
    Verdict,
)
from failslow.stats.survival import SurvivalCurve

if TYPE_CHECKING:
    from failslow.journal import JournalEntry

__all__ = [
    "Incident",
    "Stretch",
    "learn_history",
    "number_told",
    "read_facts",
    "read_incidents",
]

_WELL = 1.05
_MOVED = 0.05
"""A slowdown that moved by less is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A while in which the fault did not change."""

    after_s: float
    """Seconds after onset at which it began."""
    slowdown: float
    """Of the job, were nothing done about it."""
    findings: tuple[Finding, ...] = ()
    """Who was known to be to blame; () nobody yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One fault from onset to the relief of its culprits."""

    id: str
    start_t: float
    duration_s: float
    ended: bool
    """Its end was seen; else it lasted at least so long."""
    stretches: tuple[Stretch, ...]
    """In order; the first begins at 0."""
    levels: Mapping[Rung, Assessment] = field(default_factory=dict)
    """What the levels could do; measured where they were tried."""
    costs_s: Mapping[Rung, float] = field(default_factory=dict)
    """Measured where they were tried; of S4 from the saving to the first iteration afterwards."""
    lost_s: float = 0.0
    """As recorded."""
    spent_s: float = 0.0
    """As recorded."""
    paced: bool = False
    """Its culprits' own times are on record, so it is known when they were well."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was slow: "device", "host", "link"."""
        found = {finding.what for stretch in self.stretches for finding in stretch.findings}
        return tuple(sorted(found))


def read_facts(entries: Iterable[JournalEntry]) -> JobFacts | None:
    """The job's latest facts in its journal; None when it has none."""
    found = None
    for entry in entries:
        if isinstance(entry.record, JobFacts):
            found = entry.record
    return found


def read_incidents(entries: Iterable[JournalEntry]) -> list[Incident]:
    """The faults of one job's journal, in order; work that changed is none."""
    reader = _Reader()
    for entry in entries:
        reader.take(entry)
    return reader.finish()


def learn_history(incidents: Sequence[Incident]) -> History:
    """How long faults lasted, by what was slow, and altogether under ""."""
    groups: dict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        for kind in (*incident.kinds, ""):
            groups[kind].append(incident)
    return {
        kind: SurvivalCurve.fit([i.duration_s for i in group], [i.ended for i in group])
        for kind, group in groups.items()
    }


@dataclass(slots=True)
class _Open:
    id: str
    start_t: float
    stretches: list[Stretch] = field(default_factory=list)
    undone: float = 1.0
    findings: dict[str, Finding] = field(default_factory=dict)
    well_since: dict[str, float] = field(default_factory=dict)
    applied: Rung = "S1"
    levels: dict[Rung, Assessment] = field(default_factory=dict)
    shares: dict[Rung, float] = field(default_factory=dict)
    """Of the slowdown of the time that each level was measured to remove last."""
    costs_s: dict[Rung, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[Rung, str] = field(default_factory=dict)
    lost_s: dict[str, float] = field(default_factory=dict)
    spent_s: float = 0.0
    paced: bool = False

    def push(self, t: float) -> None:
        """The fault is another from `t` on."""
        after_s = max(0.0, t - self.start_t)
        while self.stretches and self.stretches[-1].after_s >= after_s:
            self.stretches.pop()
        self.stretches.append(
            Stretch(
                after_s=after_s if self.stretches else 0.0,
                slowdown=self.undone,
                findings=tuple(self.findings.values()),
            )
        )


@dataclass(slots=True)
class _Saved:
    """A job that was saved to start again, until it trains."""

    t: float
    save_s: float
    anew: bool = False
    """Watching has begun anew: iterations before that are the old workers' last ones."""


class _Reader:
    """Follows a journal; at most one fault is open."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._found: list[Incident] = []
        self._last_t = 0.0
        self._saved: _Saved | None = None
        """By the S4 that ended the last fault found."""

    def take(self, entry: JournalEntry) -> None:
        record, t = entry.record, entry.t
        self._last_t = max(self._last_t, t)
        if isinstance(record, Episode):
            self._episode(record, entry.tags, t)
            return
        if self._saved is not None:
            self._follow(self._saved, entry)
        fault = self._open
        if fault is None:
            return
        if isinstance(record, Verdict):
            fault.findings.update({finding.key: finding for finding in record.findings})
            if record.findings:
                fault.push(t)
        elif isinstance(record, CulpritPace) and record.key in fault.findings:
            fault.paced = True
            if record.slowdown <= _WELL:
                fault.well_since.setdefault(record.key, t)
            else:
                fault.well_since.pop(record.key, None)
        elif isinstance(record, Decision):
            self._decision(record, t)
        elif isinstance(record, Outcome):
            self._outcome(record, t)

    def finish(self) -> list[Incident]:
        self._close(self._last_t, ended=False)
        return self._found

    def _episode(self, record: Episode, tags: Mapping[str, Any], t: float) -> None:
        if record.kind != "fail_slow":
            return
        id, event = str(tags.get("id", "")), tags.get("event")
        if self._open is None and event in ("relief", "abandoned"):
            return
        if self._open is None:
            self._open = _Open(id=id, start_t=number_told(tags, "start_t", t))
        fault = self._open
        fault.lost_s[id] = record.lost_s
        if event in ("relief", "abandoned"):
            if fault.applied == "S1":
                self._close(number_told(tags, "end_t", t), ended=event == "relief")
            return
        slowdown = number_told(tags, "slowdown_now", record.slowdown)
        if fault.applied == "S1" and abs(slowdown / fault.undone - 1.0) > _MOVED:
            fault.undone = max(1.0, slowdown)
            fault.push(t)
        if not fault.findings:
            # nobody validated: what the job's own series tells of its workers
            fault.findings = {
                finding.key: finding
                for finding in map(_suspect, record.culprits)
                if finding is not None
            }
            if fault.findings:
                fault.push(t)

    def _follow(self, saved: _Saved, entry: JournalEntry) -> None:
        """When the job trains again, what the restart cost is known: most of it is no saving."""
        record = entry.record
        if isinstance(record, Mapping):
            begins = record.get("what") == "controller" and record.get("event") == "started"
            saved.anew = saved.anew or (begins and entry.t > saved.t)
        elif isinstance(record, StepSample) and entry.rank is None and saved.anew:
            after_s = entry.t - record.duration_s - saved.t
            if after_s <= 0.0:
                return
            fault, self._saved = self._found[-1], None
            costs_s = {**fault.costs_s, "S4": saved.save_s + after_s}
            self._found[-1] = replace(fault, costs_s=costs_s, spent_s=fault.spent_s + after_s)

    def _decision(self, record: Decision, t: float) -> None:
        fault = self._open
        assert fault is not None
        base = next((o.slowdown for o in record.options if o.level == "S1"), 1.0)
        is_plan = record.plan is not None and record.action in ("escalate", "replan")
        if is_plan and fault.applied != "S1" and abs(base / fault.undone - 1.0) > _MOVED:
            fault.undone = max(1.0, base)  # for other culprits: the job itself does not show it
            fault.push(t)
        for option in record.options[1:]:
            share = _share(base, option.slowdown)
            # a level that promised something was closed by the policy's own rules, if at all
            fault.levels[option.level] = Assessment(
                level=option.level,
                applicable=share > 0.0,
                reason="" if share > 0.0 else option.reason,
                share=share,
            )
        if record.action == "restore":
            # without the culprits' own times on record: when their recovery was believed
            self._close(max(fault.well_since.values(), default=t), ended=True)

    def _outcome(self, record: Outcome, t: float) -> None:
        fault = self._open
        assert fault is not None
        fault.spent_s += record.cost_s
        if not record.ok:
            fault.failed[record.level] = record.error
            return
        fault.failed.pop(record.level, None)
        if record.cost_s > 0.0 and record.level != "S4":
            fault.costs_s[record.level].append(record.cost_s)
        if record.slowdown is not None and record.level != "S1":
            fault.shares[record.level] = _share(fault.undone, record.slowdown)
        fault.applied = record.level
        if record.level == "S4":
            self._close(t, ended=False)  # how long it would have lasted is not known
            self._saved = _Saved(t=t, save_s=record.cost_s)

    def _close(self, t: float, *, ended: bool) -> None:
        fault, self._open = self._open, None
        if fault is None or not fault.stretches:
            return
        for level, share in fault.shares.items():
            fault.levels[level] = Assessment(level=level, applicable=True, share=share)
        for level, error in fault.failed.items():
            fault.levels[level] = Assessment(level=level, applicable=False, reason=error)
        self._found.append(
            Incident(
                id=fault.id,
                start_t=fault.start_t,
                duration_s=max(0.0, t - fault.start_t),
                ended=ended,
                stretches=tuple(fault.stretches),
                levels=fault.levels,
                costs_s={level: median(costs) for level, costs in fault.costs_s.items()},
                lost_s=sum(fault.lost_s.values()),
                spent_s=fault.spent_s,
                paced=fault.paced,
            )
        )


def number_told(tags: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A number among a line's tags, which may hold anything."""
    value = tags.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value and math.isfinite(value) else otherwise


def _share(undone: float, left: float) -> float:
    """The part of a slowdown that is removed."""
    return min(1.0, max(0.0, (undone - left) / (undone - 1.0))) if undone > 1.0 else 0.0


def _suspect(culprit: Culprit) -> Finding | None:
    if culprit.what not in ("compute", "host"):
        return None
    return Finding(what="device", slowdown=culprit.slowdown, ranks=(culprit.rank,))
