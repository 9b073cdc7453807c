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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from failslow.capture.completion import Completions, CudaClock, DeviceClock
from failslow.capture.groups import GroupTable
from failslow.capture.layout import (
    CALL,
    COUNTED_GROUPS,
    DONE,
    FLAG_ASYNC,
    FLAG_ERROR,
    FLAG_LATE,
    NO_GROUP,
    OFFSET_CONTROL,
    OPTIMIZER_STEP,
    PAUSE,
    TRAINER_STEP,
    WAIT,
)
from failslow.capture.ring import Append, RingWriter, job_name, ring_capacity
from failslow.errors import CaptureError
from failslow.mailbox import OFFSET_ATTENTION, Mailbox
from failslow.saying import say

if TYPE_CHECKING:
    from failslow.capture.pausing import Pauser

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
        self.call: tuple[int, int, int, int, int, int, int, int, bool] | None = None
        """start_ns, size_bytes, call_ns, peer, group_size, op, dtype, group, on the CPU."""
        self.work: Any = None
        """The Work of the latest asynchronous call, held until the thread's next event: its
        Python object must survive until the caller has it, to be recognised in `wait`."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


class Recorder:
    """The recording side of the hook in one process; opens its ring at the first call."""

    def __init__(
        self,
        *,
        mode: str,
        description: Mapping[str, Any],
        device: DeviceClock | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """mode: what `status` shows. device: stands in for CUDA events in tests.

        environ: what tells job, rank and number of workers when the ring is made.
        """
        self.on = True
        """Cleared for good when recording is refused, stopped, or left behind by a fork."""
        self.mode = mode
        self.environ = environ
        self.reason = ""
        """Why `on` is cleared."""
        self.local = _Local()
        self.ring: RingWriter | None = None
        self.mailbox: Mailbox | None = None
        """The way to and from the node's agent; None before the first call."""
        self.groups = GroupTable(self._add_group, self._renew_group)
        self.spans = 0
        """Size of a group that spans all workers, whose collectives are counted in..."""
        self.counts: Any = []
        """...this, by the group's number (see `layout.COUNTED_GROUPS`)."""
        self.attention: Any = bytes(1)
        """Its item 0 is what the agent wants looked at; 0 nothing."""
        self.append: Append = self._unopened
        self.control: Any = bytes(OFFSET_CONTROL + 1)
        """The ring's bytes; `control[OFFSET_CONTROL]` is what the agent asks for."""
        self.faults: dict[str, int] = {}
        """{what went wrong in our own code: how often}."""
        self._device = device or CudaClock()
        self._told = False
        """The agent knows what this process computes on."""
        self._completions = Completions(self._done, self._device)
        self._description = description
        self._unwaited: dict[int, tuple[int, int, int, int]] = {}
        self._optimizers: dict[int, int] = {}
        self._begun = False
        """The trainer has begun with its iterations."""
        self._lock = threading.Lock()
        self._pauser: Pauser | None = None

    def open(self) -> None:
        """Make the ring. On refusal recording ends for good and the reason goes to stderr."""
        with self._lock:
            if self.ring is not None or not self.on:
                return
            environ = self.environ
            try:
                ring = RingWriter.create(
                    job=job_name(environ),
                    rank=int(environ.get("RANK", "0")),
                    world_size=int(environ.get("WORLD_SIZE", "1")),
                    description={**self._description, "mode": self.mode},
                    capacity=ring_capacity(environ),
                    environ=environ,
                )
            except Exception as error:
                self.refuse(str(error))
                raise
            self.opened(ring)
            try:
                mailbox = Mailbox.create(ring.path)
            except CaptureError as error:  # watched all the same, but cannot be spoken to
                self.fault(error)
            else:
                self.reachable(mailbox)
            self.ring = ring  # last: other threads take it as the sign that all is ready

    def opened(self, ring: RingWriter) -> None:
        """The ring was just made: from now on records go there."""
        self.control = ring.memory
        self.append = ring.append
        self.counts, self.spans = ring.counts, ring.world_size

    def reachable(self, mailbox: Mailbox) -> None:
        """The agent can be heard from now on."""
        self.mailbox = mailbox
        view = memoryview(mailbox.memory)[OFFSET_ATTENTION : OFFSET_ATTENTION + 8]
        self.attention = view.cast("Q")

    def arrive(self, number: int) -> None:
        """A collective on a group of `spans` workers is about to be called: count it, and see to
        what the agent wants.

        It may return much later: see `pausing`. Whatever it raises is a signal's doing, not ours.
        """
        if number < COUNTED_GROUPS:
            counts = self.counts
            counts[number] = count = counts[number] + 1
            if self.attention[0]:
                self.meet(number, count)

    def meet(self, number: int, count: int) -> None:
        """The agent wants something, and this is the `count`-th call on the group."""
        try:
            if self._pauser is None:
                from failslow.capture.pausing import Pauser

                with self._lock:
                    self._pauser = self._pauser or Pauser(self)
            self._pauser.meet(number, count)
        except Exception as error:
            self.fault(error)

    def paused(self, start: int, end: int, pause: int, group: int) -> None:
        """Write that this thread was made to stand still."""
        state = self.local.state
        self.flush(state)
        self.append(start, end, end - start, pause, 0, state.thread, -1, 0, 0, PAUSE, 0, 0, group)

    def refuse(self, reason: str) -> None:
        """End recording for good and say why, once."""
        if self.on:
            self.on = False
            self.reason = reason
            say(f"this worker is not watched: {reason}")

    def fault(self, error: Exception) -> None:
        """Count a sample lost to our own fault."""
        name = repr(error)[:200]
        self.faults[name] = self.faults.get(name, 0) + 1
        if self.ring is not None:
            self.ring.count_fault()

    def group(self, group: Any) -> tuple[int, int]:
        """(number, size) of a process group not met before."""
        if self.ring is None:
            self.open()
        return self.groups.register(group)

    def flush(self, state: ThreadState) -> None:
        """The thread goes on without having waited: write its call as asynchronous."""
        call, work = state.call, state.work
        state.call = state.work = None
        if call is not None:
            noted = self._write(state, call)
            if work is not None:
                self._remember(work, noted)
        # Besides `work` only getrefcount holds it, unless the caller kept it to wait for.
        if work is not None and sys.getrefcount(work) <= 2:
            self._unwaited.pop(id(work), None)

    def returned(self, state: ThreadState) -> None:
        """The call blocked inside and hands out no Work: it is complete."""
        call = state.call
        state.call = None
        if call is not None:
            begun, size, call_ns, peer, group_size, op, dtype, group, _ = call
            self.append(
                begun, begun + call_ns, 0, size, call_ns, state.thread, peer, group_size, op, CALL,
                dtype, 0, group,
            )  # fmt: skip

    def begin(self, message: Any) -> Any:
        """Profiling: before a call. What `follow` wants back."""
        try:
            first = message[0] if isinstance(message, (list, tuple)) else message
            return None if first.is_cpu else self.begin_on_device()
        except Exception as error:
            self.fault(error)
            return None

    def begin_on_device(self) -> Any:
        """Profiling on a GPU: before a call. Its device is told first, as it is in use by now."""
        if not self._told and self.ring is not None:
            self._told = True
            try:
                self.ring.tell_device(self._device.about())
            except Exception as error:
                self.fault(error)
        return self._completions.begin()

    def follow(self, state: ThreadState, work: Any, begun: Any) -> None:
        """Profiling: write the call now and report when it is complete."""
        call = state.call
        state.call = None
        if call is None:
            return
        noted, on_cpu = self._write(state, call), call[-1]
        if on_cpu:
            state.work = work
            self._remember(work, noted)
        polls = "gloo" not in self.groups.backend(noted[2])
        self._completions.follow(noted, work, begun, on_cpu=on_cpu, polls=polls)

    def _write(self, state: ThreadState, call: tuple[Any, ...]) -> tuple[int, int, int, int]:
        """Write an asynchronous call; (seq, op, group, group size)."""
        begun, size, call_ns, peer, group_size, op, dtype, group, _ = call
        seq = self.append(
            begun, 0, 0, size, call_ns, state.thread, peer, group_size, op, CALL, dtype,
            FLAG_ASYNC, group,
        )  # fmt: skip
        return seq, op, group, group_size

    def _remember(self, work: Any, noted: tuple[int, int, int, int]) -> None:
        unwaited = self._unwaited
        unwaited[id(work)] = noted
        if len(unwaited) > _UNWAITED:
            del unwaited[next(iter(unwaited))]

    def _done(self, noted: tuple[int, int, int, int], start: int, end: int) -> None:
        seq, op, group, group_size = noted
        if self.on:
            try:
                self.append(start, end, 0, seq, 0, 0, -1, group_size, op, DONE, 0, 0, group)
            except Exception as error:
                self.fault(error)

    def failed(self, state: ThreadState, start: int, op: int, group: Any) -> None:
        """The collective raised: write the call, whose exception is on its way to the caller."""
        try:
            self.flush(state)
            now = time.monotonic_ns()
            number, size = self.groups.known.get(id(group)) or self.group(group)
            self.append(
                start, now, 0, 0, now - start, state.thread, -1, size, op, CALL, 0, FLAG_ERROR,
                number,
            )  # fmt: skip
        except Exception as error:
            self.fault(error)

    def waited(self, state: ThreadState, work: Any, start: int, end: int, flags: int) -> None:
        """A caller waited for `work` from `start` to `end`; flags: FLAG_ERROR if that raised."""
        call, held = state.call, state.work
        try:
            if call is not None and (held is None or held is work):
                state.call = state.work = None
                begun, size, call_ns, peer, group_size, op, dtype, group, on_cpu = call
                self.append(
                    begun, end if on_cpu else 0, end - start, size, call_ns, state.thread, peer,
                    group_size, op, CALL, dtype, flags, group,
                )  # fmt: skip
                return
            if call is not None or held is not None:
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

    def mark_step(self, index: int, work: int = 0) -> None:
        """The trainer itself says that iteration `index` ended; outranks every other source.

        work: tokens or samples in it; 0 not told.
        """
        if self.on and self.ring is not None:
            self._boundary(TRAINER_STEP, index, work)

    def begin_steps(self, index: int) -> None:
        """The trainer is about to begin with iteration `index`; only the first one counts.

        Without a mark before it, what that repeats would pass for iterations: perhaps there has
        been no collective yet.
        """
        if self._begun:
            return
        self._begun = True
        try:
            if self.ring is None:
                self.open()
        except Exception as error:
            self.fault(error)
        self.mark_step(index - 1)

    def _boundary(self, kind: int, value: int, work: int = 0) -> None:
        try:
            state = self.local.state
            self.flush(state)
            now = time.monotonic_ns()
            self.append(now, now, work, value, 0, state.thread, -1, 0, 0, kind, 0, 0, NO_GROUP)
        except Exception as error:
            self.fault(error)

    def set_busy(self, busy: bool) -> None:
        """This thread's calls are failslow's own and not recorded, or no longer."""
        self.local.state.busy = busy

    def stop(self, reason: str) -> None:
        """Write what is unwritten and end recording; the ring file is removed."""
        if self.on and self.ring is not None:
            try:
                self.flush(self.local.state)
            except Exception as error:
                self.fault(error)
        self.on, self.reason = False, self.reason or reason
        self._completions.stop()
        if self.mailbox is not None:
            self.mailbox.remove()
        if self.ring is not None:
            self.ring.close()

    def forked(self) -> None:
        """In a forked child: the ring is the parent's; never touch it, never record."""
        self.on, self.ring, self.mailbox, self._pauser = False, None, None, None
        self.reason = "forked from a watched process"
        self.control, self.attention, self.spans = bytes(OFFSET_CONTROL + 1), bytes(1), 0
        self.append = self._unopened

    def _renew_group(self, number: int) -> None:
        if number < len(self.counts):
            self.counts[number] = 0

    def _add_group(self, entry: Mapping[str, Any]) -> bool:
        return self.ring is not None and self.ring.add_group(entry)

    def _unopened(self, *_values: int) -> int:
        """Stands in for the ring's `append` until there is a ring."""
        return 0
