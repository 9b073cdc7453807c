"""Keeps a job's command on this node through restarts that leave a slow host out (level S4).

In: the command of `failslow run --restarts N -- CMD`, and orders that this node's agent leaves in
the run's folder. Out: the command's exit code.

    restart-gpu-17.json  {"id":"e1745735301-4","evict":["gpu-3"],"why":"device rank 25 x1.84"}

The training saved itself and ended before the order came. The node that is left out stays away; on
the others the command is started again, at most N times, with those that are left or a spare
(torchrun --nnodes MIN:MAX), and goes on from the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from failslow.comeback import saved
from failslow.runtime.runs import JOURNAL
from failslow.runtime.slurm import Slurm

__all__ = [
    "RECENT_S",
    "RESTARTED",
    "RestartOrder",
    "Supervised",
    "last_order",
    "leave_order",
    "read_order",
    "restart_file",
]

RESTARTED = "FAILSLOW_RESTARTED"
"""What a command that is started again finds in its environment: "1 e1745735301-4", how often it
was started again since the order, and the order's id."""

_LOOK_S = 0.2
_GRACE_S = 30.0
_SAVED_S = 120.0
"""A training that has saved itself ends by itself within so long; then it is ended."""
_LATE_S, _LATE_FAILED_S = 10.0, 3.0
"""An order may come so long after the command has ended well, or has failed; only to a job that has
saved itself, or to a spare that then has nobody to meet."""
RECENT_S = 900.0
"""A command that fails so long after an order fails because of it."""
_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0
_KILLED_S = 600.0
"""A job that is requeued is ended by Slurm within its KillWait, 30 s unless set."""
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOrder:
    """Start the job again without some nodes."""

    id: str
    evict: tuple[str, ...]
    """Names of the nodes to leave out."""
    why: str = ""
    """The culprits."""


def restart_file(folder: Path, node: str) -> Path:
    """Where the orders for a node lie; a folder may be shared by all nodes of a job."""
    return folder / f"restart-{re.sub(r'[^A-Za-z0-9_.-]+', '_', node)}.json"


def leave_order(folder: Path, node: str, order: RestartOrder) -> None:
    """Put an order there, in one step. Raises OSError."""
    path = restart_file(folder, node)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(
            handle,
            json.dumps({"id": order.id, "evict": order.evict, "why": order.why}).encode(),
        )
    finally:
        os.close(handle)
    draft.replace(path)


def read_order(folder: Path, node: str) -> RestartOrder | None:
    """The last order for a node; None when there is none, or not by this user or root."""
    try:
        handle = os.open(restart_file(folder, node), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_uid not in (os.geteuid(), 0):
            return None
        found = json.loads(os.read(handle, _MAX_BYTES))
        evict = tuple(str(name) for name in found["evict"])
        return RestartOrder(id=str(found["id"]), evict=evict, why=str(found.get("why", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(handle)


def last_order(folder: Path, since_t: float) -> RestartOrder | None:
    """The latest order for any of the job's nodes that share the folder, if not before `since_t`.

    All nodes have the same one; a spare, which has no worker yet, has none of its own.
    """
    found: list[tuple[float, str]] = []
    for path in folder.glob("restart-*.json"):
        with contextlib.suppress(OSError):
            t = path.stat().st_mtime
            if t >= since_t:
                found.append((t, path.name.removeprefix("restart-").removesuffix(".json")))
    return read_order(folder, max(found)[1]) if found else None


class Supervised:
    """One node's command, and what becomes of it.

    limit: how often the command is started again. say: told what a person should know. slurm: whom
    to tell of nodes left out. resumed: the order for which Slurm has just started the job again.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        folder: Path,
        node: str,
        limit: int,
        say: Callable[[str], None],
        slurm: Slurm | None = None,
        resumed: str = "",
        saved_s: float = _SAVED_S,
        grace_s: float = _GRACE_S,
        backoff_s: float = _BACKOFF_S,
        late_s: float = _LATE_S,
        killed_s: float = _KILLED_S,
    ) -> None:
        self._command, self._environ = list(command), dict(environ)
        self._folder, self._node, self._limit, self._say = folder, node, limit, say
        self._saved_s, self._grace_s = saved_s, grace_s
        self._backoff_s, self._late_s = backoff_s, late_s
        self._slurm, self._killed_s = slurm, killed_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_by = 0
        self._owed = 0
        """A signal that is to end the command and came while there was none to get it."""
        self._left = 0
        """Exit code where the command is not to go on here: being left out is no failure."""
        self._told = False
        """An order came since the last start."""
        self._saved: dict[str, int] = {}
        """Of earlier starts (`comeback.saved`)."""
        earlier = read_order(folder, node) or last_order(folder, 0.0)
        self._done = earlier.id if earlier else ""
        """Id of the last order seen: one of an earlier run is none of ours."""
        self._begun_t = time.time()
        self._ordered_s = -RECENT_S
        self._before = 0
        """Starts since that order that were none of ours."""
        if resumed:
            self._done, self._ordered_s, self._before = resumed, time.monotonic(), 1

    def run(self) -> int:
        """Until the command has ended for good; its exit code as a shell gives it.

        Raises OSError when it cannot be started at all.
        """
        before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        starts = 0
        while True:
            if self._stop_signal():  # it came before the command was there
                return 128 + self._stop_signal()
            self._start(starts)
            code = self._watch()
            if code is None:
                return self._left
            again = self._told or (code != 0 and self._is_recent())
            if self._stop_signal() or not again:
                return code
            if starts >= self._limit:
                self._say(
                    f"the job did not come up again without its slow host: the command ended with "
                    f"{code} after {starts} more starts, and is left stopped; its last checkpoint "
                    "is as it was, start it by hand"
                )
                return code or 1
            starts += 1
            wait_s = 0.0 if code == 0 else min(_MAX_BACKOFF_S, self._backoff_s * 2 ** (starts - 1))
            self._say(
                f"the command ended with {code}; it is started again in {wait_s:g} s "
                f"({starts} of {self._limit})"
            )
            deadline_s = time.monotonic() + wait_s
            while time.monotonic() < deadline_s:
                time.sleep(min(_LOOK_S, wait_s))
                if self._stop_signal():
                    return 128 + self._stop_signal()

    def _is_recent(self) -> bool:
        return time.monotonic() - self._ordered_s < RECENT_S

    def _start(self, starts: int) -> None:
        self._told, self._saved = False, saved(self._folder)
        told = {RESTARTED: f"{self._before + starts} {self._done}"} if self._is_recent() else {}
        if starts >= self._limit:  # once it has saved itself and ended, nobody starts it again
            told["FAILSLOW_DECIDE_ALLOW_RESTART"] = "false"
        self._process = subprocess.Popen(self._command, env={**self._environ, **told})
        if self._owed:
            self._send(self._owed)
            self._owed = 0

    def _watch(self) -> int | None:
        """The command's exit code once it has ended; None when it is not to go on here."""
        assert self._process is not None
        ended: int | None = None
        until_s = stop_s = 0.0
        while True:
            if ended is None and self._told and time.monotonic() >= stop_s:
                # torchrun waits minutes for the launchers of nodes that are gone
                self._say(f"the command has not ended within {self._saved_s:g} s: it is ended")
                self._stop()
                return 0
            if ended is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(_LOOK_S)
                    ended = 128 - code if code < 0 else code
                    until_s = time.monotonic() + self._wait_s(ended)
            elif time.monotonic() >= until_s or self._told or self._stop_signal():
                return ended
            else:
                time.sleep(_LOOK_S / 4)
            order = self._fresh(ended is not None)
            if order is None:
                continue
            self._done, self._ordered_s = order.id, time.monotonic()
            without = ", ".join(order.evict)
            if self._slurm is not None and self._slurm.requeue:
                self._hand_over(self._slurm, order)
                return None
            if self._slurm is not None:
                self._slurm.leave_out(order.evict, order.why)
            if self._node not in order.evict:
                self._told, stop_s = True, time.monotonic() + self._saved_s
                self._say(f"the job starts again without {without} ({order.why})")
                continue
            self._say(
                f"this node, {self._node}, is left out of the job ({order.why}): its workers are "
                "stopped; have it looked at before it is used again"
            )
            self._end()
            return None

    def _wait_s(self, code: int) -> float:
        """How long an order may still come, once the command has ended."""
        if code == 0:
            # a job that was saved to be started again ends before the order is here
            return self._late_s if saved(self._folder) != self._saved else 0.0
        # ...then a spare's launcher, which has nobody to wait for any more, fails
        is_watched = saved(self._folder) or (self._folder / JOURNAL).exists()
        return min(self._late_s, _LATE_FAILED_S) if is_watched else 0.0

    def _fresh(self, ended: bool) -> RestartOrder | None:
        """An order that was not followed yet: this node's, else, once the command has ended, the
        job's."""
        order = read_order(self._folder, self._node)
        if ended and (order is None or order.id == self._done):
            order = last_order(self._folder, self._begun_t)
        return None if order is None or order.id == self._done else order

    def _hand_over(self, slurm: Slurm, order: RestartOrder) -> None:
        """Slurm starts the whole job again: nothing goes on here, whichever node this is."""
        self._say(f"the job starts again without {', '.join(order.evict)} ({order.why})")
        self._end()
        self._left = 0 if slurm.leave_out(order.evict, order.why) else 1
        # a batch script that ended now would end the job before it is requeued
        deadline_s = time.monotonic() + (0.0 if self._left else self._killed_s)
        while time.monotonic() < deadline_s and not self._stop_signal():
            time.sleep(_LOOK_S)

    def _end(self) -> None:
        """Let a command that has saved itself end, for others may wait for it to; then end it."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._saved_s)
        self._stop()

    def _stop(self) -> None:
        """End the command and all it started: politely, then not."""
        assert self._process is not None
        family = [self._process.pid]
        with contextlib.suppress(psutil.Error):
            family += [p.pid for p in psutil.Process(self._process.pid).children(recursive=True)]
        members = []
        for pid in family:
            with contextlib.suppress(psutil.Error):
                members.append(psutil.Process(pid))
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace_s)
        for member in members:  # psutil knows a pid that is used again for another process
            with contextlib.suppress(psutil.Error):
                member.kill()
        self._process.wait()

    def _stop_signal(self) -> int:
        """The signal that ended the job; 0 none."""
        return self._stopped_by

    def _forward(self, number: int, _frame: object) -> None:
        if number in _ENDING:
            self._stopped_by = number
        if self._process is not None and self._process.poll() is None:
            if number != signal.SIGINT or not self._has_terminal():
                self._send(number)
        elif number in _ENDING:
            self._owed = number

    def _has_terminal(self) -> bool:
        """Whether the terminal sends Ctrl-C to the command too: it decides what comes of it.

        (Ignored here, it would be ignored there as well.)
        """
        assert self._process is not None
        try:
            terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.tcgetpgrp(terminal) == os.getpgid(self._process.pid)
        except OSError:
            return False
        finally:
            os.close(terminal)

    def _send(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
