"""What the kernel counts of one worker process, and which processes are the job's.

In: /proc/PID. Out: `Counts` of seconds and switches that only rise; a set of pids.

/proc/PID/task/TID/schedstat holds nanoseconds on a core, nanoseconds ready but waiting for one, and
time slices; /proc/PID/stat ticks on a core, threads that have ended included.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from failslow.telemetry.base import read

__all__ = ["Counts", "JobProcesses", "WorkerProcess", "cpu_s", "is_stopped"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _PARENT, _USER, _SYSTEM, _START = 0, 1, 11, 12, 19
"""Of /proc/PID/stat, counted from the state that follows the command's name."""
_ALL_THREADS_EVERY = 5
_FEW_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one process since somewhere before the first look; each only rises."""

    cpu_s: float
    ran_s: float
    """As `cpu_s`, of the threads alive, exact to the nanosecond: what compares with `waited_s`."""
    waited_s: float
    """Its threads were ready and waited for a core, summed over them..."""
    longest_wait_s: float
    """...and at each look counting the one that waited longest: a quota holds all alike."""
    switches: float
    """Its main thread gave the core up itself..."""
    forced_switches: float
    """...or had it taken away."""


def _stat(proc: Path | str, pid: int) -> list[bytes] | None:
    text = read(f"{proc}/{pid}/stat")
    # the command's name stands in brackets and may hold anything, brackets too
    fields = text.rpartition(b")")[2].split() if text else []
    return fields if len(fields) > _START else None


def cpu_s(proc: Path | str, pid: int) -> float | None:
    """CPU seconds of a process, to the clock tick; None where there is no such process."""
    fields = _stat(proc, pid)
    return None if fields is None else (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S


def is_stopped(proc: Path | str, pid: int) -> bool | None:
    """Whether a signal (or a debugger) has stopped it; None where there is no such process."""
    fields = _stat(proc, pid)
    return None if fields is None else fields[_STATE] in (b"T", b"t")


class WorkerProcess:
    """Follows the threads of one process.

    Threads that have not run lately cannot have waited: with many threads only those that have
    are looked at each time, and all of them every fifth time.
    """

    def __init__(self, proc: Path | str, pid: int) -> None:
        self._proc, self._task = proc, f"{proc}/{pid}/task"
        self.pid = pid
        self._seen: dict[str, tuple[int, int]] = {}
        self._busy: set[str] = set()
        self._ran_ns = self._waited_ns = self._longest_ns = 0
        self._looks = pid  # so that processes are looked through at different times

    def counts(self) -> Counts | None:
        """None where the process is gone, or hidden."""
        used = cpu_s(self._proc, self.pid)
        if used is None:
            return None
        self._looks += 1
        if len(self._seen) <= _FEW_THREADS or self._looks % _ALL_THREADS_EVERY == 0:
            try:
                threads: Iterable[str] = os.listdir(self._task)
            except OSError:
                return None
            whole = True
        else:
            threads, whole = list(self._busy), False
        self._look(threads, whole=whole)
        own, forced = self._switches()
        return Counts(
            cpu_s=used,
            ran_s=self._ran_ns / 1e9,
            waited_s=self._waited_ns / 1e9,
            longest_wait_s=self._longest_ns / 1e9,
            switches=own,
            forced_switches=forced,
        )

    def _look(self, threads: Iterable[str], *, whole: bool) -> None:
        seen: dict[str, tuple[int, int]] = {}
        longest_ns = 0
        for thread in threads:
            text = read(f"{self._task}/{thread}/schedstat")
            fields = text.split() if text else []
            if len(fields) < 2:  # it has ended; a kernel without schedstat has no file
                continue
            ran, waited = int(fields[0]), int(fields[1])
            seen[thread] = ran, waited
            before = self._seen.get(thread, (0, 0))
            # a smaller number: another thread under the number of one that has ended
            since = before if before[0] <= ran and before[1] <= waited else (0, 0)
            self._ran_ns += ran - since[0]
            self._waited_ns += waited - since[1]
            longest_ns = max(longest_ns, waited - since[1])
            if ran != before[0]:
                self._busy.add(thread)
            elif whole:
                self._busy.discard(thread)
        self._longest_ns += longest_ns
        if whole:
            self._seen = seen
            self._busy &= seen.keys()
        else:
            self._seen.update(seen)

    def _switches(self) -> tuple[float, float]:
        text = read(f"{self._proc}/{self.pid}/status") or b""
        own, forced = 0.0, 0.0
        with suppress(ValueError, IndexError):
            at = text.index(b"\nvoluntary_ctxt_switches:")
            words = text[at:].split()
            own, forced = float(words[1]), float(words[3])
        return own, forced


class JobProcesses:
    """Which processes of this machine are the job's: its workers, what they started, and what has
    the job's name in its environment (other nodes' workers where nodes share a machine, failslow's
    own processes)."""

    def __init__(self, proc: Path | str, job: str) -> None:
        self._proc = proc
        self._mark = f"FAILSLOW_JOB={job}".encode() if job else b""
        self._known: dict[int, bool] = {}

    def refresh(self, workers: Iterable[int]) -> set[int]:
        """Look for new processes; the pids that are the job's."""
        chosen = set(workers)
        try:
            pids = sorted(int(name) for name in os.listdir(self._proc) if name.isdigit())
        except OSError:
            return chosen
        known: dict[int, bool] = {}
        for pid in pids:  # parents come first, but for pids that have run over
            mine = pid in chosen or self._known.get(pid)
            known[pid] = self._is_ours(pid, known) if mine is None else mine
        self._known = known
        return {pid for pid, ours in known.items() if ours} | chosen

    def _is_ours(self, pid: int, known: dict[int, bool]) -> bool:
        fields = _stat(self._proc, pid)
        if fields is None:
            return False
        if known.get(int(fields[_PARENT]), False):
            return True
        environ = read(f"{self._proc}/{pid}/environ") if self._mark else None
        return bool(environ) and self._mark in (environ or b"").split(b"\0")
