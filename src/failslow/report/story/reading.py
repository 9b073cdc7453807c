"""A journal -> a `Story`. Reads it once, however long; what it does not know it counts.

In: the path of a journal, rotated files beside it. Out: the `Story`, with the job's iterations as
one series and everything that was found out under the id of its episode.

    read_story(Path("failslow-runs/pretrain7/journal.jsonl"), name="pretrain7")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from failslow.errors import JournalError
from failslow.journal import JournalEntry, decode_entry, nothing_in, read_journal
from failslow.records import (
    CulpritPace,
    Decision,
    Diagnosis,
    Episode,
    JobFacts,
    Outcome,
    RankProfile,
    Verdict,
)
from failslow.report.story.course import (
    Course,
    in_force,
    job_course,
    marks,
    own_time,
    removal,
    workers,
)
from failslow.report.story.links import Pause, PauseBook
from failslow.report.story.model import Case, Story, Stretch, Trouble
from failslow.report.story.places import orders
from failslow.report.story.profiles import ProfileBook
from failslow.report.story.restarts import RestartBook
from failslow.report.story.steps import StepLines, is_step

__all__ = ["read_story"]

_LONG_BYTES = 48 << 20
"""Of a longer journal only a part of the workers' lines is read."""
_KNOWN = frozenset({"suspicion", "health", "validation", "telemetry"})
_MOST_TELEMETRY = 64


def read_story(path: Path, *, name: str = "", source: str = "") -> Story:
    """The story in the journal at `path`.

    name: of the job; its folder's, if left out. source: what to call the journal.
    Raises JournalError when there is no journal, or nothing in it.
    """
    journal = read_journal(path)
    size = sum(
        file.stat().st_size for file in path.parent.glob(f"{escape(path.name)}*") if file.is_file()
    )
    reader = _Reader(stride=1 + size // _LONG_BYTES)
    for line in journal.lines():
        if not line.isspace():
            reader.take(line)
    if not reader.entries:
        raise nothing_in(source or str(path), reader.skipped)
    return reader.story(name or path.absolute().parent.name, source or str(path))


class _Reader:
    """Collects the entries."""

    def __init__(self, stride: int) -> None:
        self.entries = 0
        self.skipped = 0
        self.unknown: Counter[str] = Counter()
        self._steps = StepLines(stride)
        self._cases: dict[str, Case] = {}
        self._profiles = ProfileBook()
        self._pauses = PauseBook()
        self._restarts = RestartBook()
        self._telemetry: list[tuple[float, Mapping[str, Any]]] = []
        self._facts: JobFacts | None = None
        self._nodes: dict[int, str] = {}
        self._open: dict[tuple[str, str, int | None], Trouble] = {}
        self._troubles: list[Trouble] = []
        self._watch: list[tuple[float, str, str]] = []
        self._ended = False
        self._begin_t: float | None = None
        self._last_t: float | None = None
        self._current = ""

    def take(self, line: bytes) -> None:
        """One line of the journal."""
        self.entries += 1
        if is_step(line):
            self._steps.take(line)
            return
        try:
            entry = decode_entry(line)
        except JournalError:
            self.entries -= 1
            self.skipped += 1
            return
        self._begin_t = entry.t if self._begin_t is None else min(self._begin_t, entry.t)
        try:
            known = self._entry(entry)
        except (AttributeError, KeyError, TypeError, ValueError):  # another version's
            known = False
        if not known:
            self.unknown[entry.kind] += 1
        self._last_t = entry.t if self._last_t is None else max(self._last_t, entry.t)

    # -- by kind -----------------------------------------------------------------------------------

    def _entry(self, entry: JournalEntry) -> bool:
        """Take it; False when this version does not know it."""
        record, t = entry.record, entry.t
        if isinstance(record, Episode):
            self._episode(record, entry)
        elif isinstance(record, Diagnosis):
            self._case(record.episode).diagnoses.append((t, record))
        elif isinstance(record, Verdict):
            self._case(record.episode).verdicts.append((t, record))
        elif isinstance(record, Decision):
            self._case(record.episode).decisions.append((t, record))
        elif isinstance(record, Outcome):
            self._case(record.episode).outcomes.append((t, record))
        elif isinstance(record, CulpritPace):
            if self._current in self._cases:
                self._cases[self._current].paces.append((t, record))
        elif isinstance(record, RankProfile):
            self._nodes.setdefault(record.rank, record.node)
            episode = entry.tags.get("episode")
            why = "suspicion" if episode else "healthy" if episode == "" else ""
            self._profiles.take(record, t, str(entry.tags.get("why", why)))
        elif isinstance(record, JobFacts):
            self._facts = record
        elif isinstance(record, Mapping) and entry.kind in _KNOWN:
            self._bare(entry.kind, record, t)
        elif entry.kind == "action" and isinstance(record, Mapping):
            # a command, an order is shown by what follows from it
            self._restarts.take(record, t)
        else:
            return not isinstance(record, Mapping)  # a measurement of its own
        return True

    def _bare(self, kind: str, record: Mapping[str, Any], t: float) -> None:
        if kind == "suspicion":
            self._suspicion(record, t)
        elif kind == "health":
            self._health(record, t)
        elif kind == "validation":
            self._pauses.take(record, t)
        elif record.get("why") != "record":  # what a verdict rests on, not all there is
            self._telemetry.append((t, record))
            del self._telemetry[:-_MOST_TELEMETRY]

    def _case(self, id: str) -> Case:
        self._current = id
        if id not in self._cases:
            self._cases[id] = Case(id=id)
        return self._cases[id]

    def _suspicion(self, record: Mapping[str, Any], t: float) -> None:
        case = self._case(str(record["id"]))
        case.suspicions.append((t, record))
        if record.get("event") == "cleared":
            case.cleared_t = t
        elif case.suspected_t is None:
            case.suspected_t = t

    def _episode(self, episode: Episode, entry: JournalEntry) -> None:
        tags = entry.tags
        case = self._case(str(tags.get("id", f"step {episode.start_step}")))
        event = str(tags.get("event", "relief" if episode.end_step is not None else "update"))
        known = case.stretches[-1] if case.stretches else None
        if known is None or known.episode.start_step != episode.start_step:
            start_t = _number(tags.get("start_t"))
            known = Stretch(
                episode=episode,
                event=event,
                start_t=entry.t - episode.duration_s if start_t is None else start_t,
                end_t=None,
                seen_t=entry.t,
                slowdown_now=episode.slowdown,
            )
            case.stretches.append(known)
        known.episode, known.event, known.seen_t = episode, event, entry.t
        known.slowdown_now = _number(tags.get("slowdown_now")) or episode.slowdown
        if episode.end_step is not None:
            end_t = _number(tags.get("end_t"))
            known.end_t = entry.t if end_t is None else end_t

    def _health(self, record: Mapping[str, Any], t: float) -> None:
        what, node, rank = str(record.get("what")), str(record.get("node", "")), record.get("rank")
        message = str(record.get("message", what))
        if what == "controller":
            self._controller(str(record.get("event", "")), message, t)
            return
        if what == "agent":
            for watched in record.get("ranks") or ():
                self._nodes.setdefault(int(watched), node)
        key = (what, node, rank if isinstance(rank, int) else None)
        if record.get("ok", True):
            trouble = self._open.pop(key, None)
            if trouble is not None:
                trouble.until_t = t
            if what == "agent" and record.get("left"):
                self._close(t, node)
        elif key not in self._open:
            since_t = _number(record.get("since_t"))
            trouble = Trouble(
                what=what,
                message=message,
                since_t=t if since_t is None else since_t,
                node=node,
                rank=key[2],
            )
            self._open[key] = trouble
            self._troubles.append(trouble)

    def _controller(self, event: str, message: str, t: float) -> None:
        self._ended = event == "ended"
        if event == "alive":
            return
        if event in ("started", "resumed"):
            self._steps.flush()
        if event == "started":
            self._steps.start += 1
        if event == "resumed":
            before = max(self._steps.last_t, self._last_t or t)
            gap = Trouble(what="controller", message=message, since_t=min(before, t), until_t=t)
            self._troubles.append(gap)
        self._close(t)
        self._watch.append((t, event, message))

    def _close(self, t: float, node: str | None = None) -> None:
        """Open troubles (of `node`) end."""
        for key in [key for key in self._open if node is None or key[1] == node]:
            self._open.pop(key).until_t = t

    # -- altogether --------------------------------------------------------------------------------

    def story(self, name: str, source: str) -> Story:
        """What came of it."""
        steps = self._steps
        steps.flush()
        self.skipped += steps.skipped
        if steps.unknown:
            self.unknown["step"] += steps.unknown
        times = [t for t in (self._begin_t, self._last_t) if t is not None]
        if steps.workers or len(steps.job):
            times += [steps.first_t, steps.last_t]
        start = self._cases.pop("", None)
        cases = sorted(self._cases.values(), key=lambda case: case.start_t)
        starts = max(1, sum(event == "started" for _, event, _ in self._watch))
        course = job_course(
            source, steps, cases, skipped=self.skipped, unknown=self.unknown, ended=self._ended
        )
        self._add_restarts(cases, course)
        for number, case in enumerate(cases):
            later = cases[number + 1].start_t if number + 1 < len(cases) else None
            with suppress(IndexError, ZeroDivisionError):
                case.removal = removal(course, case, until_t=later)
        nodes = {rank: worker.node for rank, worker in steps.workers.items() if worker.node}
        nodes = {**self._nodes, **nodes}
        pauses = self._pauses.pauses(nodes)
        pauses += tuple(_unrecorded(pauses, [*cases, *([start] if start else [])]))
        return Story(
            name=name,
            source=source,
            entries=self.entries - steps.skipped,
            skipped=self.skipped,
            unknown=dict(self.unknown),
            begin_t=min(times, default=None),
            end_t=max(times, default=None),
            ended=self._ended,
            starts=starts,
            series=course.series,
            analysis=course.analysis,
            cases=tuple(cases),
            start=start,
            pauses=tuple(sorted(pauses, key=lambda pause: pause.t)),
            marks=tuple(marks([*cases, *([start] if start else [])], pauses, self._watch, course)),
            in_force=tuple(in_force(cases, self._watch)),
            orders=tuple(orders(cases, self._watch)),
            workers=workers(steps, nodes),
            own_time=own_time(steps, cases),
            rounds=self._profiles.rounds(),
            telemetry=tuple(self._telemetry),
            facts=self._facts,
            troubles=tuple(sorted(self._troubles, key=lambda trouble: trouble.since_t)),
            mode=_mode(cases),
        )

    def _add_restarts(self, cases: Sequence[Case], course: Course) -> None:
        """What became of each S4; the workers it was about are gone, and the episode with them."""
        started_t = [t for t, event, _ in self._watch if event == "started"]
        begun_t = course.t - course.series.duration_s
        for case in cases:
            case.commands = self._restarts.commands(case.id)
            case.restarts = self._restarts.restarts(
                case.id, case.outcomes, started_t=started_t, begun_t=begun_t, ended_t=course.t
            )
            last = case.stretches[-1] if case.stretches else None
            if case.restarts and last is not None and last.end_t is None:
                last.event, last.seen_t = "abandoned", case.restarts[-1].t


def _unrecorded(pauses: Sequence[Pause], cases: Sequence[Case]) -> Iterator[Pause]:
    """Pauses that only a verdict tells of."""
    known = {(pause.step, round(pause.pause_s, 6)) for pause in pauses}
    for case in cases:
        for t, verdict in case.verdicts:
            if verdict.pause_s > 0 and (verdict.step, round(verdict.pause_s, 6)) not in known:
                yield Pause(
                    t=t,
                    episode=case.id,
                    why="",
                    ok=True,
                    reason="",
                    step=verdict.step,
                    pause_s=verdict.pause_s,
                    links=(),
                )


def _mode(cases: list[Case]) -> str:
    decisions = [decision for case in cases for _, decision in case.decisions]
    return decisions[-1].mode if decisions else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
