"""One node's part of a probe: the training and its watching, from the start to the result.

In: a `ProbeSpec`, the node's place in it, the fleet's history. Out: on the node of rank 0 the
`ProbeResult`, of whatever had happened when it ended; on the others how their part ended.

    with Stop.on_signals() as stop:
        result = run_probe(spec, place, folder, environ, stop=stop)

SIGTERM (a scheduler takes the nodes back) or Ctrl-C asks all workers of all nodes to end after the
step they are at, and kills them where that takes too long; a second one kills at once.

The probe's time counts from the first iteration that is seen: one of which nothing is seen, as its
agents get no core, has measured nothing, and has failed.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from failslow.config import DetectConfig
from failslow.errors import JournalError
from failslow.journal import GrowingJournal, JournalEntry
from failslow.probe.fleet import FleetReference, fleet_reference
from failslow.probe.job import Place, ProbeJob
from failslow.probe.reading import Ending, devices_of, read_result
from failslow.probe.result import ProbeResult, ProbeSpec, ProbeState
from failslow.probe.signals import Stop
from failslow.records import Episode, StepSample, Verdict
from failslow.runtime.rendezvous import node_name

__all__ = ["Progress", "run_probe"]

_HEALTHY_VARIABLE = "FAILSLOW_DETECT_HEALTHY_ITERATION_S"
_LOOK_S = 0.1
_START_S = 180.0
"""To the first iteration, on a machine as busy as may be."""
_UNSEEN_S, _UNSEEN_STEPS = 60.0, 10
"""Training that has come so far, and of which nothing is seen for so long, is watched by nobody."""
_OVERTIME_S = 30.0
"""Beyond its time training is taken to hang."""
_LEAVE_S = 3.0
"""What workers that were told to end have for it."""
_PEERS_S = 2.0
"""A worker whose peer went first fails; the reason, a signal to us as well, comes this much later
at most."""
_JOURNAL_S = 10.0
_JOURNAL_SOON_S = 1.5
"""The controller's last lines are waited for so long; when there is no time, so long."""


@dataclass(slots=True)
class Progress:
    """How far it is, for a person to look at."""

    train_s: float = 0.0
    """Since the first iteration."""
    iterations: int = 0
    iteration_s: float | None = None
    note: str = "starting"


Show = Callable[[Progress], None]


def run_probe(
    spec: ProbeSpec,
    place: Place,
    folder: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    stop: Stop,
    history: Sequence[ProbeResult] = (),
    show: Show = lambda _: None,
) -> ProbeResult:
    """Run it; takes the spec's duration and some seconds.

    folder: for journal, logs, and `workers-NODE.json` with the workers' pids. history: earlier
    results, for the fleet's reference. show: told a few times a second. On nodes of other ranks
    the result holds no more than state and error. Raises ProbeError when the workers cannot be
    started.
    """
    begin_t = time.time()
    name = _name_here(environ)
    known = _known(fleet_reference(spec, history))
    environ = {**known, **environ, "FAILSLOW_NODE": name}
    with ProbeJob(spec, place, folder, environ) as job:
        watch = _Watch(job, stop, show)
        state, error = watch.run()
    end_t = time.time()
    soon = state != "done"
    entries: list[JournalEntry] = []
    if place.node_rank == 0:
        if stop.count < 2:
            show(Progress(note="reading the journal"))
            _await_journal(job.journal, _JOURNAL_SOON_S if soon else _JOURNAL_S, stop)
        entries = _entries(job.journal)
    ending = Ending(begin_t=begin_t, end_t=end_t, state=state, error=error, node=name)
    result = _read(entries, spec, ending, history)
    if place.node_rank == 0 and state == "done" and not result.trained_s:
        return replace(result, state="failed", error=_unseen_text(result.iterations, job, watch))
    return result


def _unseen_text(iterations: int, job: ProbeJob, watch: _Watch) -> str:
    """Of training that ended by itself: why nothing can be said of it."""
    seen = f"only {iterations} iterations were" if iterations else "nothing was"
    why = "that is too few to tell anything; give a longer --duration"
    if job.steps > max(_UNSEEN_STEPS, 2 * iterations):
        why = f"agent or controller got no core ({job.watchers_words})"
    return f"trained {watch.trained_s:.0f} s, but {seen} seen: {why}"


def _known(fleet: FleetReference | None) -> dict[str, str]:
    """For the detector: a fault in the first seconds would be taken for the healthy level."""
    return {} if fleet is None else {_HEALTHY_VARIABLE: f"{_healthy_s(fleet):.6g}"}


def _healthy_s(fleet: FleetReference) -> float:
    return fleet.iteration_s * fleet.limit_alone / DetectConfig().min_slowdown


def _read(
    entries: Sequence[JournalEntry],
    spec: ProbeSpec,
    ending: Ending,
    history: Sequence[ProbeResult],
) -> ProbeResult:
    """The result; on which model of device it ran is known only now."""
    devices = devices_of(entries, spec.workers)
    told, fleet = fleet_reference(spec, history), fleet_reference(spec, history, devices)
    not_healthy_s = math.inf
    if told is not None and told.devices and devices and told.devices != devices:
        not_healthy_s = _healthy_s(told) * (1.0 - 1e-3)  # as it was told, rounded
    return read_result(entries, spec, ending, fleet, devices=devices, not_healthy_s=not_healthy_s)


def _name_here(environ: Mapping[str, str]) -> str:
    """The node's: its host name alone, where even on a shared machine that is its own."""
    own, init = (_uts_namespace(pid) for pid in ("self", "1"))
    name = node_name(environ)
    host = socket.gethostname()
    return host if own != init and name.startswith(f"{host}-") else name


def _uts_namespace(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


class _Watch:
    """Looks after the workers until they have ended."""

    def __init__(self, job: ProbeJob, stop: Stop, show: Show) -> None:
        self._job, self._stop, self._show = job, stop, show
        self._tail = _Tail(job.journal)
        self._begin_s = time.monotonic()
        self._trains_since_s: float | None = None
        """By what its workers say, or by what is seen of it."""
        self._told_s: float | None = None
        self._is_over = False
        """Its time is, or it has the iterations it is to have."""

    @property
    def trained_s(self) -> float:
        """By now."""
        since_s = self._trains_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def run(self) -> tuple[ProbeState, str]:
        """(state, error) once no worker runs any more."""
        while (state := self._job.state()) == "running":
            ended = self._look(time.monotonic())
            if ended is not None:
                return ended
            time.sleep(_LOOK_S)
        if state == "ended":
            return self._ended()
        error = self._job.error
        if self._told_s is None and self._stop.count == 0:
            deadline_s = time.monotonic() + _PEERS_S
            while self._stop.count == 0 and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
        self._job.kill()
        if self._stop.count or (self._job.reason == "told" and not self._is_over):
            return "preempted", ""
        return "failed", error

    def _look(self, now_s: float) -> tuple[ProbeState, str] | None:
        self._tail.read(now_s)
        told = self._tail.progress
        self._show(told)
        if self._stop.count >= 2 or (self._told_s is not None and now_s - self._told_s > _LEAVE_S):
            self._job.kill()
            return "preempted", ""
        if self._stop.count and self._told_s is None:
            self._told_s = now_s
            self._job.tell()
            told.note = "told to end"
        error = self._fault(now_s)
        if error:
            self._job.kill()
            return "failed", error
        return None

    def _fault(self, now_s: float) -> str:
        """Why it is to be given up; ends it when its time is over."""
        spec, seen_s = self._job.spec, self._tail.seen_s
        duration_s = spec.duration_s
        if self._job.place.node_rank:
            hangs = now_s - self._begin_s > _START_S + duration_s + _OVERTIME_S
        elif seen_s is None:
            return self._unseen(now_s)
        else:
            self._trains_since_s = self._trains_since_s or seen_s
            hangs = now_s - seen_s > duration_s + _OVERTIME_S
            enough = (
                spec.iterations is not None and self._tail.progress.iterations >= spec.iterations
            )
            is_over = enough or now_s - seen_s >= duration_s
            if is_over and not self._is_over and self._told_s is None:
                self._is_over = True
                self._job.tell()
        return f"training did not end within {duration_s:g} s; it hangs" if hangs else ""

    def _unseen(self, now_s: float) -> str:
        """Why it is to be given up while nothing of it is seen."""
        steps = self._job.steps
        if steps and self._trains_since_s is None:
            self._trains_since_s = now_s
        waited_s = now_s - (self._trains_since_s or now_s)
        if waited_s > _UNSEEN_S and steps > _UNSEEN_STEPS:
            return _unseen_text(0, self._job, self)
        if now_s - self._begin_s > _START_S:
            return f"no iteration within {_START_S:.0f} s; {self._job.last_words}"
        return ""

    def _ended(self) -> tuple[ProbeState, str]:
        """All workers have, by themselves."""
        reason = self._job.reason
        is_done = self._is_over or reason in ("time", "steps") or not (reason or self._stop.count)
        return ("done" if is_done else "preempted"), ""


class _Tail:
    """What a growing journal says of how far the probe is."""

    def __init__(self, path: Path) -> None:
        self._journal = GrowingJournal(path)
        self._first_t: float | None = None
        self.seen_s: float | None = None
        """When the first iteration was seen here, by a clock that nobody sets."""
        self.progress = Progress()

    def read(self, now_s: float) -> None:
        """Take the entries that are new."""
        with suppress(JournalError):  # no progress to show
            for entry in self._journal.refresh():
                self._take(entry)
        if self.seen_s is None and self.progress.iterations:
            self.seen_s = now_s

    def _take(self, entry: JournalEntry) -> None:
        record, told = entry.record, self.progress
        if isinstance(record, StepSample) and entry.rank is None:
            self._first_t = self._first_t or entry.t - record.duration_s
            told.train_s = entry.t - self._first_t
            told.iterations += 1
            told.iteration_s = record.duration_s
            told.note = "healthy" if told.note == "starting" else told.note
        elif entry.kind == "suspicion" and isinstance(record, Mapping):
            told.note = "healthy" if record.get("event") == "cleared" else "slower than it was"
        elif isinstance(record, Episode):
            is_over = entry.tags.get("event") in ("relief", "abandoned")
            told.note = "well again" if is_over else f"x{record.slowdown:.2f} slow"
        elif isinstance(record, Verdict) and record.findings:
            told.note = ", ".join(f"{f.key} x{f.slowdown:.2f}" for f in record.findings)


def _await_journal(path: Path, limit_s: float, stop: Stop) -> None:
    """Until the controller has written its last line."""
    deadline_s = time.monotonic() + limit_s
    journal = GrowingJournal(path)
    while time.monotonic() < deadline_s and stop.count < 2:
        with suppress(JournalError):
            journal.refresh()
        if any(_is_end(entry) for entry in journal.entries[-5:]):
            return
        time.sleep(_LOOK_S)


def _is_end(entry: JournalEntry) -> bool:
    record = entry.record
    return entry.kind == "health" and isinstance(record, Mapping) and record.get("event") == "ended"


def _entries(path: Path) -> list[JournalEntry]:
    journal = GrowingJournal(path)
    with suppress(JournalError):  # the probe has a result all the same
        journal.refresh()
    return journal.entries
