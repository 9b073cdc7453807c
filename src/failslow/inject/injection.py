"""The owner's side of an injection: a context manager around a guard process.

In: a fault. Out: the fault in force inside the block, and the machine as it was after it.

    with Injection(Throttle(4711, to=0.7), for_s=30) as injection:
        injection.wait(60)            # "time is up"

The guard (`failslow.inject.guard`) does the work, so that killing the owner undoes the fault too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from failslow.errors import InjectError
from failslow.inject.fault import Fault
from failslow.inject.guard import fault_to_json, python_command
from failslow.inject.ledger import Ledger, Record, ledger_folder
from failslow.inject.processes import identify, is_alive, send_signal

__all__ = ["Injection", "undo_leftovers"]

_START_LIMIT_S = 60.0
_UNDO_LIMIT_S = 30.0


class Injection:
    """One fault, in force between `start` and `stop` or inside a `with` block.

    Making one starts nothing. `for_s`: it ends by itself after so many seconds. Raises InjectError
    from `start` where it is refused, from `stop` where it cannot be undone.
    """

    def __init__(
        self, fault: Fault, *, for_s: float | None = None, folder: Path | None = None
    ) -> None:
        self.fault = fault
        self.for_s = for_s
        self.how = ""
        """How the fault was applied, in words."""
        self.ended: str | None = None
        """Why it was undone; None while it is in force."""
        self._folder = folder
        self._guard: subprocess.Popen[bytes] | None = None
        self._received = b""

    @property
    def guard_pid(self) -> int | None:
        """The process that watches over it; None before the start."""
        return None if self._guard is None else self._guard.pid

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self._folder or ledger_folder())

    def start(self) -> Injection:
        """Apply the fault; returns once it is in force. Raises InjectError."""
        if self._guard is not None:
            raise InjectError("this injection was started before; make a new one")
        if self.for_s is not None and not 0 < self.for_s <= 10**7:
            raise InjectError(f"for ({self.for_s:g} s) must be above 0; leave it out for no limit")
        self.fault.check()
        order = {
            "fault": fault_to_json(self.fault),
            "owner": vars(identify(os.getpid())),
            "folder": str(self._ledger.folder),
            "for_s": self.for_s,
        }
        debug = bool(os.environ.get("FAILSLOW_DEBUG"))
        self._guard = subprocess.Popen(
            python_command("failslow.inject.guard"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if debug else subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            assert self._guard.stdin is not None
            with suppress(BrokenPipeError):  # what it has to say is read below
                self._guard.stdin.write(json.dumps(order).encode() + b"\n")
                self._guard.stdin.flush()
            reply = self._hear(_START_LIMIT_S)
            if reply is None:
                raise InjectError(f"the injection is not in force after {_START_LIMIT_S:g} s")
            if "applied" not in reply:
                self.ended = "it was refused"
                raise InjectError(str(next(iter(reply.values()))))
            self.how = reply["applied"]
        except BaseException:
            with suppress(InjectError):
                self.stop()
            raise
        return self

    def wait(self, timeout_s: float) -> str | None:
        """Until the fault is undone: why. None where it is still in force after `timeout_s`.

        Raises InjectError where it could not be undone.
        """
        if self.ended is None and self._guard is not None:
            reply = self._hear(timeout_s)
            if reply is not None:
                self._finish(reply)
        return self.ended

    def stop(self) -> None:
        """Undo the fault; returns once that is done. Raises InjectError. A second call is none."""
        guard = self._guard
        if guard is None or guard.stdin is None or guard.stdout is None or guard.stdout.closed:
            return
        try:
            # a child forked meanwhile may hold the pipe open, so its closing alone will not do
            with suppress(OSError):
                guard.stdin.write(b"\n")
                guard.stdin.flush()
            with suppress(OSError):
                guard.stdin.close()
            if self.ended is None:
                self._finish(self._hear(_UNDO_LIMIT_S) or {"stuck": "its guard does not answer"})
        finally:
            with suppress(subprocess.TimeoutExpired):
                guard.wait(_UNDO_LIMIT_S)
            guard.stdout.close()

    def _finish(self, reply: dict[str, Any]) -> None:
        if "stuck" in reply:
            raise InjectError(reply["stuck"])
        if "undone" in reply:
            self.ended = reply["undone"]
            return
        # the guard was killed: what it promised is done here
        assert self._guard is not None
        with self._ledger.lock():
            for record in self._ledger.find(self._guard.pid):
                record.undo()
                self._ledger.remove(record)
        self.ended = "its guard was killed"

    def _hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The guard's next line; {"died": …} where there will be none, None after `timeout_s`."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        handle = self._guard.stdout.fileno()
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([handle], [], [], left_s)[0]:
                return None
            if not (data := os.read(handle, 65536)):
                return {"died": "the guard of this injection died; FAILSLOW_DEBUG=1 shows why"}
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Injection:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def undo_leftovers(
    *, include_running: bool = False, folder: Path | None = None
) -> tuple[Record, ...]:
    """Undo the injections whose guard is gone; with `include_running` those in force as well.

    Returns what was undone. Raises InjectError where a step fails or a guard does not answer.
    """
    ledger = Ledger(folder or ledger_folder())
    if not ledger.folder.is_dir():
        return ()
    done = []
    with ledger.lock():
        for record in ledger.records():
            if not record.in_force:
                record.undo()
                ledger.remove(record)
                done.append(record)
    if include_running:
        running = [record for record in ledger.records() if record.in_force]
        for record in running:
            _end(ledger, record)
        done.extend(running)
    return tuple(done)


def _end(ledger: Ledger, record: Record) -> None:
    """Tell a guard to undo its fault, and see that it does."""
    send_signal(record.guard, signal.SIGTERM)
    deadline_s = time.monotonic() + _UNDO_LIMIT_S
    while is_alive(record.guard):
        if time.monotonic() > deadline_s:
            raise InjectError(
                f"process {record.guard.pid} does not undo its {record.kind} injection; kill -9 "
                "it, then run `failslow inject undo`"
            )
        time.sleep(0.02)
    if ledger.find(record.guard.pid):
        raise InjectError(
            f"{record.kind} of {', '.join(record.targets)} could not be undone; run "
            "`failslow inject undo` to see why"
        )
