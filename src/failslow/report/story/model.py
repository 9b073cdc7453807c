"""What a journal tells of a job, in the order people ask: how slow, who, why, what was done.

Made by `reading.read_story`; terminal, document and page only show it. Times named `t` are epoch
seconds. Everything beside the steps may be missing: an older journal, or a mode that never pauses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from failslow.records import (
    CulpritPace,
    Decision,
    Diagnosis,
    Episode,
    Finding,
    JobAnalysis,
    JobFacts,
    Outcome,
    StepSeries,
    Verdict,
)
from failslow.report.story.links import Pause
from failslow.report.story.profiles import ProfileRound
from failslow.report.story.restarts import Commands, Restart

__all__ = [
    "Case",
    "Mark",
    "MarkKind",
    "OwnTime",
    "Removal",
    "Story",
    "Stretch",
    "Trouble",
    "Worker",
]

MarkKind = Literal[
    "suspicion", "cleared", "diagnosis", "verdict", "pause", "decision", "action", "failed", "watch"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened, for the timeline."""

    t: float
    kind: MarkKind
    text: str
    until_t: float | None = None
    """Of a pause: when training went on."""


@dataclass(slots=True, kw_only=True)
class Stretch:
    """One episode record: onset to relief. An episode that is opened again has several."""

    episode: Episode
    """As last written."""
    event: str
    """"onset", "level", "update", "relief" or "abandoned"."""
    start_t: float
    end_t: float | None
    seen_t: float
    """When it was last written."""
    slowdown_now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """How much of a slowdown the actions took away, by wall time per iteration."""

    healthy_s: float
    slow_s: float
    """Median iteration from onset to the first action."""
    after_s: float
    """Median iteration from the last action to the end of the fault."""
    iterations: int
    """Of them."""

    @property
    def share(self) -> float:
        """(slow − after) / (slow − healthy); 1 is all of it, below 0 it became worse."""
        return (self.slow_s - self.after_s) / (self.slow_s - self.healthy_s)


@dataclass(slots=True, kw_only=True)
class Case:
    """Everything under one id: a suspicion, and the fault or change it became."""

    id: str
    suspected_t: float | None = None
    cleared_t: float | None = None
    suspicions: list[tuple[float, Mapping[str, Any]]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    diagnoses: list[tuple[float, Diagnosis]] = field(default_factory=list)
    verdicts: list[tuple[float, Verdict]] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)
    paces: list[tuple[float, CulpritPace]] = field(default_factory=list)
    removal: Removal | None = None
    restarts: list[Restart] = field(default_factory=list)
    commands: list[Commands] = field(default_factory=list)

    @property
    def episode(self) -> Episode | None:
        """Its last record; None of a mere suspicion."""
        return self.stretches[-1].episode if self.stretches else None

    @property
    def is_fault(self) -> bool:
        """A fail-slow, no mere suspicion and no change of the work."""
        return self.episode is not None and self.episode.kind == "fail_slow"

    @property
    def start_t(self) -> float:
        """When it began, as far as anybody knows."""
        if self.stretches:
            return self.stretches[0].start_t
        first = [self.suspected_t] if self.suspected_t is not None else []
        lists: Sequence[Sequence[tuple[float, Any]]] = (
            self.diagnoses, self.verdicts, self.decisions, self.outcomes
        )  # fmt: skip
        return min([*first, *(events[0][0] for events in lists if events)], default=0.0)

    @property
    def end_t(self) -> float | None:
        """When the job's iterations were healthy again, or nobody followed it further."""
        if not self.stretches:
            return self.cleared_t
        last = self.stretches[-1]
        if last.end_t is None and last.event == "abandoned":
            return last.seen_t
        return last.end_t

    @property
    def lost_s(self) -> float:
        """Over all its stretches."""
        return sum(stretch.episode.lost_s for stretch in self.stretches)

    @property
    def spent_s(self) -> float:
        """Seconds training stood still for actions; for a restart, until it trained again."""
        restarted_s = sum((r.lost_s or r.save_s) - r.save_s for r in self.restarts)
        return restarted_s + sum(outcome.cost_s for _, outcome in self.outcomes)

    @property
    def restarted_s(self) -> float:
        """Seconds lost by restarts: from the last iteration before each to the next one."""
        return sum(restart.lost_s or 0.0 for restart in self.restarts)

    @property
    def worst(self) -> float:
        """The slowdown of its worst level: over all of it the time after a remedy counts, too."""
        levels = [v.slowdown for s in self.stretches for v in s.episode.levels]
        return max(levels, default=max((s.episode.slowdown for s in self.stretches), default=1.0))

    @property
    def left(self) -> float | None:
        """The slowdown that what was done has left; None where nothing was, or it is not known."""
        found = self.removal
        return None if found is None else max(1.0, found.after_s / found.healthy_s)

    @property
    def acts(self) -> list[tuple[float, Decision | Outcome | Commands | Restart]]:
        """What was decided and done, in order."""
        every: list[tuple[float, Decision | Outcome | Commands | Restart]] = [
            *self.decisions,
            *self.outcomes,
            *((told.t, told) for told in self.commands),
            *((restart.t, restart) for restart in self.restarts),
        ]
        return sorted(every, key=lambda pair: pair[0])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What validation proved, each component once, as last measured."""
        found: dict[str, Finding] = {}
        for _, verdict in self.verdicts:
            found.update({finding.key: finding for finding in verdict.findings})
        return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker by its own records."""

    rank: int
    node: str
    iterations: int
    last_t: float
    compute_s: float | None
    """Median of its seconds per iteration in no collective; None unknown."""
    nodes: tuple[str, ...] = ()
    """All it has been on: a job that starts again may be on others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTime:
    """Each worker's own time per iteration over the job, against its usual one."""

    ranks: tuple[int, ...]
    t: NDArray[np.float64]
    """(columns,): the middle of each."""
    ratio: NDArray[np.float64]
    """(ranks, columns): own time over its median in healthy times; NaN nothing known."""
    left_out: int = 0
    """Workers not in it: the ones that stand out least."""


@dataclass(slots=True, kw_only=True)
class Trouble:
    """Something was not seen, or not all of it."""

    what: str
    message: str
    since_t: float
    until_t: float | None = None
    node: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Story:
    """All of a journal."""

    name: str
    source: str
    entries: int
    skipped: int
    """Lines that are no entries: cut short by a crash."""
    unknown: Mapping[str, int]
    """Entries of kinds, or with fields, that this version does not know, by kind."""
    begin_t: float | None
    end_t: float | None
    """First and last entry."""
    ended: bool
    """The controller said that the job has ended."""
    starts: int
    """Starts of the job in this journal."""
    series: StepSeries
    """The job's iterations; `end_s` counts wall time from the first one's begin."""
    analysis: JobAnalysis
    """Its header figures; the episodes are the journal's own."""
    cases: tuple[Case, ...]
    """In order."""
    start: Case | None
    """What was found about nobody's fault in particular: who is slow from the start."""
    pauses: tuple[Pause, ...]
    """For validations, in order; those that came to nothing too."""
    marks: tuple[Mark, ...]
    in_force: tuple[tuple[float, str], ...]
    """(t, level) at each change of the level in force."""
    orders: tuple[tuple[float, tuple[int, ...]], ...]
    """(t, the worker at each place) at each change; (): all at their own."""
    workers: tuple[Worker, ...]
    own_time: OwnTime | None
    rounds: tuple[ProfileRound, ...]
    telemetry: tuple[tuple[float, Mapping[str, Any]], ...]
    facts: JobFacts | None
    troubles: tuple[Trouble, ...]
    mode: str
    """"observe", "advise", "auto"; "" where no decision says."""

    @property
    def faults(self) -> tuple[Case, ...]:
        """The fail-slows."""
        return tuple(case for case in self.cases if case.is_fault)

    @property
    def suspected(self) -> tuple[Case, ...]:
        """Suspicions that came to nothing (so far)."""
        return tuple(case for case in self.cases if not case.stretches)

    def case_at(self, t: float) -> Case | None:
        """The case a record of time `t` belongs to: the last that had begun."""
        begun = [case for case in self.cases if case.start_t <= t]
        return begun[-1] if begun else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes it was on, in order of their first worker."""
        ever = (node for worker in self.workers for node in (worker.node, *worker.nodes))
        return tuple(dict.fromkeys(filter(None, ever)))

    @property
    def paused_s(self) -> float:
        """Seconds of all validations."""
        return sum(pause.pause_s for pause in self.pauses)

    @property
    def spent_s(self) -> float:
        """Seconds of all actions."""
        return sum(case.spent_s for case in self.cases)

    @property
    def blind_s(self) -> float:
        """Seconds in which some of the job was not seen at all, overlaps counted once."""
        blind = sorted(
            (trouble.since_t, self.end_t if trouble.until_t is None else trouble.until_t)
            for trouble in self.troubles
            if trouble.what in ("agent", "worker", "bus", "coverage", "controller")
        )
        total, reached = 0.0, -np.inf
        for since, until in blind:
            if until is not None and until > reached:
                total += until - max(since, reached)
                reached = until
        return total
