"""A watched job as its journal tells it so far.

In: the journal's entries in order (see `failslow.pipeline` for what they hold), and the time.
Out: a `LiveJob`, which the live table, `status --json` and `doctor --job` show.

    state = LiveState("pretrain7")
    for entry in read_journal(path): state.observe(entry)
    job = state.look(now_s=time.time())     # LiveJob(phase="slow", step=812, slowdown=1.39, ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from failslow.journal import JournalEntry
from failslow.records import Culprit, Episode, Finding, StepSample, Suspect
from failslow.report.inquiry import Inquiry

__all__ = ["LiveJob", "LiveState", "LiveWorker", "Phase", "Trouble", "WorkerState"]

Phase = Literal[
    "waiting", "learning", "healthy", "suspected", "slow", "between", "stalled", "silent", "ended"
]
"""waiting: nothing is known; learning: no healthy iteration time yet; slow: an episode is on;
between: no iteration ends for long while collectives go on, as in an evaluation; stalled: neither
goes on; silent: nobody writes, so what is known is of the past."""
WorkerState = Literal["ok", "suspected", "slow", "blind", "gone"]
"""slow: named by a verdict or the episode that is on, suspected: by a suspicion or a diagnosis;
blind: its agent or its records are missing; gone: it has ended."""

_SILENT_S = 30.0
"""Three times the interval at which the controller says that it lives."""
_GONE_S = 15.0
_IMPAIRED = frozenset({"clock", "messages", "names", "ring", "tracker"})
"""Troubles that cost samples; any other one means that something is not seen at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One worker. Times are means over the iterations of its last record."""

    rank: int
    node: str
    state: WorkerState
    step: int
    last_t: float
    """Epoch seconds at the end of its last known iteration."""
    iteration_s: float
    healthy_s: float | None
    compute_s: float | None
    """Of an iteration, in no collective."""
    suspicion: Culprit | None = None
    """As its own times tell."""
    suspect: Suspect | None = None
    """As a profile tells, and..."""
    finding: Finding | None = None
    """...as validation proved."""

    @property
    def ratio(self) -> float | None:
        """Last over healthy iteration time."""
        return self.iteration_s / self.healthy_s if self.healthy_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that keeps the job, or a part of it, from being seen."""

    what: str
    message: str
    since_t: float
    node: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()

    @property
    def blinds(self) -> bool:
        """Something is not seen at all; else samples are lost."""
        return self.what not in _IMPAIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """The job at one moment."""

    name: str
    phase: Phase
    now_s: float
    last_t: float | None
    """Epoch seconds of the newest entry."""
    began_t: float | None
    """Epoch seconds at which watching this start of the job began."""
    step: int | None
    iterations: int
    """Since watching began."""
    iteration_s: float | None
    healthy_s: float | None
    slowdown: float
    """Of the suspicion or episode that is on, else 1."""
    slow_since_t: float | None
    slow_since_step: int | None
    confirmed: bool
    """It is an episode, no mere suspicion."""
    culprits: tuple[Culprit, ...]
    episodes: int
    """Episodes so far, the one that is on included."""
    lost_s: float
    troubles: tuple[Trouble, ...]
    """Worst first."""
    workers: tuple[LiveWorker, ...]
    """By rank."""
    inquiry: Inquiry = field(default_factory=Inquiry)
    """Who is to blame, and what is done about it."""

    @property
    def monitoring(self) -> Literal["healthy", "impaired", "blind"]:
        """Whether all of the job is seen."""
        if any(trouble.blinds for trouble in self.troubles):
            return "blind"
        return "impaired" if self.troubles else "healthy"


@dataclass(slots=True)
class _Worker:
    record: StepSample
    t: float
    node: str
    healthy_s: float | None
    silent: bool
    interval_s: float = 0.0
    gone: bool = False


@dataclass(slots=True)
class _Slow:
    """A suspicion or an episode."""

    slowdown: float
    since_t: float
    since_step: int
    culprits: tuple[Culprit, ...]
    confirmed: bool


@dataclass(slots=True)
class _Launch:
    """What belongs to one start of the job."""

    began_t: float | None = None
    ended: bool = False
    first_step: int | None = None
    last: StepSample | None = None
    step_t: float = 0.0
    healthy_s: float | None = None
    workers: dict[int, _Worker] = field(default_factory=dict)
    slow: _Slow | None = None
    between: bool = False
    episodes: set[str] = field(default_factory=set)
    lost_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """By id and first step: an episode that is opened again has several stretches."""
    troubles: dict[tuple[str, str, int | None], Trouble] = field(default_factory=dict)
    inquiry: Inquiry = field(default_factory=Inquiry)


class LiveState:
    """Takes a journal's entries; starts anew with each start of the job in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last_t: float | None = None
        self._launch = _Launch()

    def observe(self, entry: JournalEntry) -> None:
        """Take one entry; what it cannot read only shows that somebody writes."""
        self._last_t = entry.t if self._last_t is None else max(self._last_t, entry.t)
        with suppress(KeyError, TypeError, ValueError):  # another version's
            self._take(entry)
            self._launch.inquiry.take(entry)

    def look(self, now_s: float) -> LiveJob:
        """The job at `now_s`, epoch seconds."""
        launch, inquiry = self._launch, self._launch.inquiry
        slow, last = launch.slow, launch.last
        troubles = self._troubles(now_s)
        return LiveJob(
            name=self.name,
            phase=self._phase(now_s),
            now_s=now_s,
            last_t=self._last_t,
            began_t=launch.began_t,
            step=None if last is None else last.step,
            iterations=0 if last is None else last.step - (launch.first_step or 0) + 1,
            iteration_s=None if last is None else last.duration_s,
            healthy_s=launch.healthy_s,
            slowdown=slow.slowdown if slow else 1.0,
            slow_since_t=slow.since_t if slow else None,
            slow_since_step=slow.since_step if slow else None,
            confirmed=slow is not None and slow.confirmed,
            culprits=tuple(self._culprits()),
            episodes=len(launch.episodes),
            lost_s=sum(launch.lost_s.values()),
            troubles=tuple(troubles),
            workers=tuple(
                self._worker(rank, worker, now_s) for rank, worker in sorted(launch.workers.items())
            ),
            inquiry=replace(inquiry, findings=dict(inquiry.findings)),
        )

    # -- what comes in -----------------------------------------------------------------------------

    def _take(self, entry: JournalEntry) -> None:
        record = entry.record
        if isinstance(record, StepSample):
            if entry.rank is None:
                self._take_job_step(record, entry)
            else:
                self._take_worker_step(record, entry.rank, entry)
        elif isinstance(record, Episode):
            self._take_episode(record, entry)
        elif isinstance(record, Mapping) and entry.kind == "suspicion":
            self._take_suspicion(record)
        elif isinstance(record, Mapping) and entry.kind == "health":
            self._take_health(record, entry.t)

    def _take_job_step(self, step: StepSample, entry: JournalEntry) -> None:
        launch = self._launch
        self._note_step(step.step)
        launch.between = False
        launch.last, launch.step_t = step, entry.t
        launch.healthy_s = _number(entry.tags.get("healthy_s")) or launch.healthy_s

    def _take_worker_step(self, step: StepSample, rank: int, entry: JournalEntry) -> None:
        launch, tags = self._launch, entry.tags
        before = launch.workers.get(rank)
        launch.workers[rank] = _Worker(
            record=step,
            t=entry.t,
            node=str(tags.get("node", "")),
            healthy_s=_number(tags.get("healthy_s")),
            silent=tags.get("state") == "silent",
            interval_s=0.0 if before is None else entry.t - before.t,
        )

    def _note_step(self, step: int) -> None:
        first = self._launch.first_step
        self._launch.first_step = step if first is None else min(first, step)

    def _take_suspicion(self, record: Mapping[str, Any]) -> None:
        launch = self._launch
        if record.get("event") == "cleared":
            if launch.slow and not launch.slow.confirmed:
                launch.slow = None
            return
        launch.healthy_s = _number(record.get("baseline_s")) or launch.healthy_s
        launch.slow = _Slow(
            slowdown=_number(record.get("slowdown")) or 1.0,
            since_t=_number(record.get("first_t")) or self._last_t or 0.0,
            since_step=int(record.get("first_step", 0)),
            culprits=tuple(_culprits(record.get("culprits", ()))),
            confirmed=False,
        )

    def _take_episode(self, episode: Episode, entry: JournalEntry) -> None:
        if episode.kind != "fail_slow":
            return
        launch, tags = self._launch, entry.tags
        id = str(tags.get("id", episode.start_step))
        launch.episodes.add(id)
        launch.lost_s[id, episode.start_step] = episode.lost_s
        if episode.end_step is not None or tags.get("event") in ("relief", "abandoned"):
            launch.slow = None
            return
        launch.healthy_s = episode.baseline_s
        launch.slow = _Slow(
            slowdown=_number(tags.get("slowdown_now")) or episode.slowdown,
            since_t=_number(tags.get("start_t")) or entry.t,
            since_step=episode.start_step,
            culprits=episode.culprits,
            confirmed=True,
        )

    def _take_health(self, record: Mapping[str, Any], t: float) -> None:
        what, node, rank = str(record.get("what")), str(record.get("node", "")), record.get("rank")
        if what == "controller":
            if record.get("event") == "started":
                self._launch = _Launch(began_t=t)
            elif record.get("event") == "resumed":
                self._launch.troubles.clear()  # another controller, which finds its own
            self._launch.ended = record.get("event") == "ended"
        if what == "agent" and record.get("left"):
            for gone in record.get("ranks", ()):
                if gone in self._launch.workers:
                    self._launch.workers[gone].gone = True
            for key in [key for key in self._launch.troubles if key[1] == node]:
                del self._launch.troubles[key]
        if what == "job":
            self._launch.between = record.get("event") == "between"
        key = (what, node, rank)
        if record.get("ok", True):
            self._launch.troubles.pop(key, None)
            return
        self._launch.troubles[key] = Trouble(
            what=what,
            message=str(record.get("message", what)),
            since_t=_number(record.get("since_t")) or t,
            node=node,
            rank=rank,
            ranks=tuple(record.get("ranks", ())),
        )

    # -- what goes out -----------------------------------------------------------------------------

    def _phase(self, now_s: float) -> Phase:
        launch = self._launch
        if launch.ended:
            return "ended"
        if self._is_silent(now_s):
            return "silent"
        if self._last_t is None or (launch.last is None and not launch.workers):
            return "waiting"
        hangs = any(trouble.what == "job" for trouble in launch.troubles.values())
        if hangs or launch.between:
            return "stalled" if hangs else "between"
        if launch.slow:
            return "slow" if launch.slow.confirmed else "suspected"
        return "learning" if launch.healthy_s is None else "healthy"

    def _is_silent(self, now_s: float) -> bool:
        return self._last_t is not None and now_s - self._last_t > _SILENT_S

    def _troubles(self, now_s: float) -> list[Trouble]:
        launch = self._launch
        if launch.ended:
            return []
        found = [t for t in launch.troubles.values() if t.what != "job"]
        if self._is_silent(now_s):
            message = "nothing is written any more: the job, or its controller, was killed"
            found.append(Trouble(what="controller", message=message, since_t=self._last_t or now_s))
        return sorted(found, key=lambda t: (not t.blinds, t.since_t, t.what, t.node, t.rank or 0))

    def _culprits(self) -> Iterable[Culprit]:
        """Of what is on, those that nothing newer has cleared."""
        launch = self._launch
        named = launch.slow.culprits if launch.slow else ()
        return (culprit for culprit in named if launch.inquiry.holds(culprit.rank))

    def _worker(self, rank: int, worker: _Worker, now_s: float) -> LiveWorker:
        launch = self._launch
        named = next((c for c in self._culprits() if c.rank == rank), None)
        return LiveWorker(
            rank=rank,
            node=worker.node,
            state=self._state(rank, worker, named, now_s),
            step=worker.record.step,
            last_t=worker.t,
            iteration_s=worker.record.duration_s,
            # a worker's own grows with a fault that is not noticed at once
            healthy_s=launch.healthy_s or worker.healthy_s,
            compute_s=worker.record.compute_s,
            suspicion=named,
            suspect=launch.inquiry.suspect_of(rank),
            finding=launch.inquiry.finding_of(rank),
        )

    def _state(
        self, rank: int, worker: _Worker, named: Culprit | None, now_s: float
    ) -> WorkerState:
        launch = self._launch
        if worker.gone or launch.ended:
            return "gone"
        blind = (
            worker.silent
            or self._is_silent(now_s)
            or any(
                trouble.what in ("agent", "worker")
                and (rank == trouble.rank or rank in trouble.ranks)
                for trouble in launch.troubles.values()
            )
        )
        if blind:
            return "blind"
        patience_s = max(_GONE_S, 3.0 * worker.interval_s, 20.0 * worker.record.duration_s)
        if launch.step_t - worker.t > patience_s:
            return "gone"  # the job goes on without it, and nobody misses its records
        if launch.inquiry.finding_of(rank) is not None:
            return "slow"
        if named is not None and launch.slow is not None:
            return "slow" if launch.slow.confirmed else "suspected"
        return "suspected" if launch.inquiry.suspect_of(rank) is not None else "ok"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _culprits(values: Iterable[Any]) -> Iterable[Culprit]:
    for value in values:
        if isinstance(value, Culprit):
            yield value
        elif isinstance(value, Mapping):
            yield Culprit(
                rank=int(value["rank"]), what=value["what"], slowdown=float(value["slowdown"])
            )
