"""One node's part of a probe: the training and its watching, from the start to the result.

In: a `ProbeSpec`, the node's place in it, the fleet's history. Out: on the node of rank 0 the
`ProbeResult`, of whatever had happened when it ended; on the others how their part ended.

    with Stop.on_signals() as stop:
        result = run_probe(spec, place, folder, environ, stop=stop)

SIGTERM (a scheduler takes the nodes back) or Ctrl-C asks all workers of all nodes to end after the
step they are at, and kills them where that takes too long; a second one kills at once.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from failslow.config import DetectConfig
from failslow.errors import JournalError
from failslow.journal import GrowingJournal, JournalEntry
from failslow.probe.fleet import FleetReference, fleet_reference
from failslow.probe.job import Place, ProbeJob
from failslow.probe.reading import Ending, devices_of, read_result
from failslow.probe.result import ProbeResult, ProbeSpec, ProbeState
from failslow.probe.signals import handled
from failslow.records import Episode, StepSample, Verdict
from failslow.runtime.rendezvous import node_name

__all__ = ["Progress", "Stop", "run_probe"]

_HEALTHY_VARIABLE = "FAILSLOW_DETECT_HEALTHY_ITERATION_S"
_LOOK_S = 0.1
_START_S = 180.0
"""To the first iteration, on a machine as busy as may be."""
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


class Stop:
    """Whether, and how urgently, the probe is to end."""

    def __init__(self) -> None:
        self.count = 0
        self.number: int | None = None
        """The last signal."""

    def __call__(self, number: int, _frame: object = None) -> None:
        """A signal came. A terminal that goes may send SIGHUP more than once: that is no hurry."""
        if number != signal.SIGHUP or self.count == 0:
            self.count += 1
            self.number = number

    @classmethod
    @contextmanager
    def on_signals(cls) -> Iterator[Stop]:
        """SIGTERM, SIGINT and SIGHUP count, until the block is left."""
        stop = cls()
        with handled(stop):
            yield stop


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
        state, error = _Watch(job, stop, show).run()
    end_t = time.time()
    soon = state != "done"
    entries: list[JournalEntry] = []
    if place.node_rank == 0:
        if stop.count < 2:
            show(Progress(note="reading the journal"))
            _await_journal(job.journal, _JOURNAL_SOON_S if soon else _JOURNAL_S, stop)
        entries = _entries(job.journal)
    ending = Ending(begin_t=begin_t, end_t=end_t, state=state, error=error, node=name)
    return _read(entries, spec, ending, history)


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
        self._told_s: float | None = None

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
        if self._stop.count or self._job.reason == "told":
            return "preempted", ""
        return "failed", error

    def _look(self, now_s: float) -> tuple[ProbeState, str] | None:
        self._tail.read()
        spec, told = self._job.spec, self._tail.progress
        self._show(told)
        if self._stop.count >= 2 or (self._told_s is not None and now_s - self._told_s > _LEAVE_S):
            self._job.kill()
            return "preempted", ""
        if self._stop.count and self._told_s is None:
            self._told_s = now_s
            self._job.tell()
            told.note = "told to end"
        is_first = self._job.place.node_rank == 0
        if is_first and not self._tail.progress.iterations and now_s - self._begin_s > _START_S:
            self._job.kill()
            return "failed", f"no iteration within {_START_S:.0f} s; {self._job.last_words}"
        if now_s - self._begin_s > _START_S + spec.duration_s + _OVERTIME_S or (
            is_first and told.train_s > spec.duration_s + _OVERTIME_S
        ):
            self._job.kill()
            return "failed", f"training did not end within {spec.duration_s:g} s; it hangs"
        return None

    def _ended(self) -> tuple[ProbeState, str]:
        """All workers have, by themselves."""
        reason = self._job.reason
        is_done = reason in ("time", "steps") or not (reason or self._stop.count)
        return ("done" if is_done else "preempted"), ""


class _Tail:
    """What a growing journal says of how far the probe is."""

    def __init__(self, path: Path) -> None:
        self._journal = GrowingJournal(path)
        self._first_t: float | None = None
        self.progress = Progress()

    def read(self) -> None:
        """Take the entries that are new."""
        with suppress(JournalError):  # no progress to show
            for entry in self._journal.refresh():
                self._take(entry)

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
