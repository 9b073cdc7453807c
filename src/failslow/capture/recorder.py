"""What one training process knows of its calls: from hook events to ring records.

In: a call that returned, a wait that ended, an optimizer step. Out: ring records. Every entry
is cheap and fails open: whatever goes wrong here costs the sample and is counted.

A call is written when its caller has waited for it, so that a blocking collective is one record
with its waiting time. A call nobody waited for by the thread's next event is written as
asynchronous; a later wait for it becomes a record of its own (kind WAIT).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from failslow.capture.groups import GroupTable
from failslow.capture.layout import (
    CALL,
    FLAG_ASYNC,
    FLAG_ERROR,
    FLAG_LATE,
    NO_GROUP,
    OFFSET_CONTROL,
    OPTIMIZER_STEP,
    TRAINER_STEP,
    WAIT,
)
from failslow.capture.ring import DEFAULT_CAPACITY, Append, RingWriter, job_name

__all__ = ["Recorder", "ThreadState"]

_LATE_NS = 20_000
"""A wait shorter than this did not block: waiting for finished work takes a few µs itself."""
_UNWAITED = 512
"""Asynchronous calls remembered until their wait; the oldest is forgotten."""


class ThreadState:
    """One thread's unwritten call, and whether that thread is at work for us."""

    __slots__ = ("busy", "call", "thread", "work")

    def __init__(self) -> None:
        self.busy = False
        """Calls made while it is set are our own and are not recorded."""
        self.thread = threading.get_native_id()
        self.work: Any = None
        self.call: tuple[int, int, int, int, int, int, int, int] | None = None
        """start_ns, size_bytes, call_ns, peer, group_size, op, dtype, group."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


class Recorder:
    """The recording side of the hook in one process; opens its ring at the first call."""

    def __init__(self, *, mode: str, description: dict[str, Any]) -> None:
        self.on = True
        """Cleared for good when recording is refused, stopped, or left behind by a fork."""
        self.mode = mode
        self.reason = ""
        """Why `on` is cleared."""
        self.local = _Local()
        self.ring: RingWriter | None = None
        self.groups: GroupTable | None = None
        self.known: dict[int, tuple[int, int]] = {}
        """`GroupTable.known`, here to save the hook a look-up."""
        self.append: Append = self._first_append
        self.control: Any = bytes(OFFSET_CONTROL + 1)
        """The ring's bytes; `control[OFFSET_CONTROL]` is what the agent asks for."""
        self.faults: dict[str, int] = {}
        """{what went wrong in our own code: how often}."""
        self._description = description
        self._unwaited: dict[int, tuple[int, int, int, int]] = {}
        self._optimizers: dict[int, int] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the ring. On refusal recording ends for good and the reason goes to stderr."""
        with self._lock:
            if self.ring is not None or not self.on:
                return
            environ = os.environ
            try:
                self.ring = RingWriter.create(
                    job=job_name(environ),
                    rank=int(environ.get("RANK", "0")),
                    world_size=int(environ.get("WORLD_SIZE", "1")),
                    description={**self._description, "mode": self.mode},
                    capacity=int(environ.get("FAILSLOW_CAPTURE_RECORDS", DEFAULT_CAPACITY)),
                )
            except Exception as error:
                self.refuse(str(error))
                raise
            self.groups = GroupTable(self.ring.add_group)
            self.known = self.groups.known
            self.control = self.ring.memory
            self.append = self.ring.append

    def refuse(self, reason: str) -> None:
        """End recording for good and say why, once."""
        if self.on:
            self.on = False
            self.reason = reason
            sys.stderr.write(f"failslow: this worker is not watched: {reason}\n")

    def fault(self, error: Exception) -> None:
        """Count a sample lost to our own fault."""
        name = repr(error)[:200]
        self.faults[name] = self.faults.get(name, 0) + 1
        if self.ring is not None:
            self.ring.count_fault()

    def group(self, group: Any) -> tuple[int, int]:
        """(number, size) of a process group not met before."""
        if self.groups is None:
            self.open()
        if self.groups is None:
            return NO_GROUP, 0
        return self.groups.register(group)

    def flush(self, state: ThreadState) -> int:
        """Write the thread's unwritten call as asynchronous; its seq, or 0 without one."""
        call, work = state.call, state.work
        state.call = state.work = None
        if call is None:
            return 0
        start, size, call_ns, peer, group_size, op, dtype, group = call
        seq = self.append(
            start, 0, 0, size, call_ns, state.thread, peer, group_size, op, CALL, dtype,
            FLAG_ASYNC, group,
        )  # fmt: skip
        # Besides `work` here only getrefcount holds it, unless the caller kept it to wait for.
        if work is not None and sys.getrefcount(work) > 2:
            unwaited = self._unwaited
            unwaited[id(work)] = (seq, op, group, group_size)
            if len(unwaited) > _UNWAITED:
                del unwaited[next(iter(unwaited))]
        return seq

    def failed(self, state: ThreadState, start: int, op: int, group: Any) -> None:
        """The collective raised: write the call, whose exception is on its way to the caller."""
        try:
            if state.call is not None:
                self.flush(state)
            now = time.monotonic_ns()
            number, size = self.known.get(id(group)) or self.group(group)
            self.append(
                start, now, 0, 0, now - start, state.thread, -1, size, op, CALL, 0, FLAG_ERROR,
                number,
            )  # fmt: skip
        except Exception as error:
            self.fault(error)

    def waited(self, state: ThreadState, work: Any, start: int, end: int, flags: int) -> None:
        """A caller waited for `work` from `start` to `end`."""
        try:
            if work is state.work:
                call = state.call
                state.call = state.work = None
                if call is not None:
                    begun, size, call_ns, peer, group_size, op, dtype, group = call
                    self.append(
                        begun, end, end - start, size, call_ns, state.thread, peer, group_size,
                        op, CALL, dtype, flags, group,
                    )  # fmt: skip
                return
            if state.call is not None:
                self.flush(state)
            waited = end - start
            known = self._unwaited.pop(id(work), None)
            if known is None:
                if waited < _LATE_NS:
                    return
                known = (0, 0, NO_GROUP, 0)
            seq, op, group, group_size = known
            if waited < _LATE_NS:
                flags |= FLAG_LATE
            self.append(
                start, end, waited, seq, 0, state.thread, -1, group_size, op, WAIT, 0, flags,
                group,
            )  # fmt: skip
        except Exception as error:
            self.fault(error)

    def step(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        """An optimizer finished a step (signature of torch's global post-step hook)."""
        if not self.on or self.ring is None:
            return  # before the first collective nothing can be compared
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        self._boundary(OPTIMIZER_STEP, number)

    def mark_step(self, index: int) -> None:
        """The trainer itself says that iteration `index` ended; outranks every other source."""
        if self.on and self.ring is not None:
            self._boundary(TRAINER_STEP, index)

    def _boundary(self, kind: int, value: int) -> None:
        try:
            state = self.local.state
            if state.call is not None:
                self.flush(state)
            now = time.monotonic_ns()
            self.append(now, now, 0, value, 0, state.thread, -1, 0, 0, kind, 0, 0, NO_GROUP)
        except Exception as error:
            self.fault(error)

    def stop(self, reason: str) -> None:
        """Write what is unwritten and end recording; the ring is removed in its own process."""
        self.on, was_on, self.reason = False, self.on, self.reason or reason
        try:
            if was_on and self.ring is not None:
                self.flush(self.local.state)
        except Exception as error:
            self.fault(error)
        if self.ring is not None:
            self.ring.close()

    def forked(self) -> None:
        """In a forked child: never touch the parent's ring, never record."""
        self.on = False
        self.reason = "forked from a watched process"
        self.local = _Local()

    def _first_append(self, *_values: int) -> int:
        """Stands in until the ring is open: a record before that is lost, by design none is."""
        return 0
