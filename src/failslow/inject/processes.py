"""Processes as the kernel lists them: who they are, whose, since when, with whom.

In: pids and /proc. Out: identities that a reused pid cannot forge, and refusals in one line.

    >>> identify(4711)                                                   # doctest: +SKIP
    ProcessId(pid=4711, start_ticks=183203)
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from failslow.errors import InjectError

__all__ = [
    "ProcessId",
    "ancestors",
    "boot_id",
    "cpu_time_s",
    "end_process",
    "family",
    "holds_terminal",
    "identify",
    "is_alive",
    "refuse_process",
    "send_signal",
]

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# of /proc/PID/stat, counted from the state that follows the command's name
_PARENT, _GROUP, _SESSION, _FOREGROUND, _FLAGS = 1, 2, 3, 5, 6
_USER, _SYSTEM, _START = 11, 12, 19
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD, one of the flags."""


@dataclass(frozen=True)
class ProcessId:
    """A process for good: a pid is reused, a pid with its start time is not."""

    pid: int
    start_ticks: int
    """Start in clock ticks since boot."""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None where there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the command's name stands in brackets and may hold anything, brackets too
    return text.rpartition(")")[2].split()


def identify(pid: int) -> ProcessId:
    """The identity of the running process `pid`. Raises InjectError where there is none."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        raise InjectError(f"no process {pid} runs here; `ps -e` lists those that do")
    return ProcessId(pid, int(fields[_START]))


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    fields = _stat(process.pid)
    return (
        fields is not None and fields[0] not in "ZX" and int(fields[_START]) == process.start_ticks
    )


def cpu_time_s(pid: int) -> float:
    """CPU time the process has used, in seconds, to the clock tick; 0.0 where it is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S


def ancestors(pid: int) -> list[int]:
    """The parent of `pid`, its parent, and so on up to pid 1."""
    found: list[int] = []
    while (fields := _stat(pid)) is not None and (pid := int(fields[_PARENT])) > 0:
        found.append(pid)
    return found


def family(pid: int) -> set[int]:
    """`pid` and those of its descendants that are in its session.

    Data loaders are; a monitor that a worker started for its node, in a session of its own, is not.
    """
    children: dict[int, list[int]] = {}
    sessions: dict[int, str] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
            sessions[int(entry.name)] = fields[_SESSION]
    found: set[int] = set()
    pending = [pid]
    while pending:
        member = pending.pop()
        if member not in found and sessions.get(member) == sessions.get(pid):
            found.add(member)
            pending.extend(children.get(member, ()))
    return found


def boot_id() -> str:
    """A name of this boot: start times of processes mean nothing in another."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; False where it has ended. Raises PermissionError."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # an old kernel, or a sandbox without the call: pids it is
        if not is_alive(process):
            return False
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return True
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def end_process(process: ProcessId, *, limit_s: float = 5.0) -> None:
    """Kill it unless it has ended; returns once it is gone. Raises InjectError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while send_signal(process, signal.SIGKILL):
        if time.monotonic() > deadline_s:
            raise InjectError(f"process {process.pid} does not die within {limit_s:g} s of SIGKILL")
        if time.monotonic() > deadline_s - 0.8 * limit_s:
            with suppress(OSError):  # to die takes time on a core, and its own may have none left
                os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))
        time.sleep(0.005)


def refuse_process(pid: int) -> None:
    """Raises InjectError where a fault in `pid` would hurt more than a training job of ours.

    Refused: none such, pid 1, kernel threads, this process and its ancestors, other users.
    """
    if pid < 1:
        raise InjectError(f"{pid} is no process id; `ps -e` lists them")
    identify(pid)
    if pid == 1:
        raise InjectError("process 1 runs this machine and is refused; name a training worker")
    if pid == os.getpid() or pid in ancestors(os.getpid()):
        raise InjectError(
            f"process {pid} started this command and is refused: it would slow the injector too; "
            "name a training worker"
        )
    fields = _stat(pid)
    # (its empty command line would not tell: a process that starts its program has none either)
    if fields is not None and int(fields[_FLAGS]) & _KERNEL_THREAD:
        raise InjectError(f"process {pid} belongs to the kernel; name a training worker")
    try:
        owner = (_PROC / str(pid)).stat().st_uid
    except OSError:
        raise InjectError(f"process {pid} has just ended") from None
    if owner not in _our_users():
        raise InjectError(
            f"process {pid} belongs to user {owner}, you are {os.geteuid()}; run this as its user"
        )


def _our_users() -> set[int]:
    """Us, and as root the one who said sudo."""
    ours = {os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdigit():
        ours.add(int(os.environ["SUDO_UID"]))
    return ours


def holds_terminal(pid: int) -> bool:
    """Whether a shell waits for `pid` in the foreground: stopped, it would go to the background."""
    fields = _stat(pid)
    if fields is None:
        return False
    foreground = fields[_GROUP] == fields[_FOREGROUND]
    return foreground and fields[_PARENT] == fields[_SESSION]
