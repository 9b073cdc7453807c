"""Sees every collective of this process through torch's dispatcher, and hands it to a recorder.

In: c10d operators as they are dispatched (DDP's C++ reducer, FSDP2, DeviceMesh, pipelining,
functional and compiled collectives). Out: the same call, redispatched, and a ring record.

The kernels sit at dispatch key BackendSelect, above every device's, and call
`redispatch(keys below BackendSelect)`, which releases the interpreter's lock inside. A kernel at
the device's own key that calls the next one boxed would hold it and can hang a job.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from failslow.capture.layout import FLAG_ERROR
from failslow.capture.ops import Op, dispatcher_ops, dtype_codes
from failslow.capture.recorder import Recorder, ThreadState

__all__ = ["install", "mark_step", "status", "uninstall"]


class _Installed:
    """The one hook of the process and what it takes to remove it."""

    recorder: Recorder | None = None
    missed: tuple[str, ...] = ()
    undo: ExitStack = ExitStack()


def install() -> Recorder:
    """Hook this process; a second call changes nothing. The ring is made at the first call.

    Raises what torch raises when its parts are missing: `autoload` turns that into a message.
    """
    if _Installed.recorder is not None:
        return _Installed.recorder
    recorder = Recorder(mode="dispatcher", description={"torch": torch.__version__})
    ops, missed = dispatcher_ops()
    with ExitStack() as stack:  # half an installation is undone
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's own gap
        stack.callback(library._destroy)
        for overload, op in ops.values():
            kernel = _kernel(recorder, overload, op)
            library.impl(op.name, kernel, "BackendSelect", with_keyset=True)
        work: Any = dist.Work
        original = work.wait
        stack.callback(setattr, work, "wait", original)
        work.wait = _wait(recorder, original)
        stack.callback(register_optimizer_step_post_hook(_step(recorder)).remove)
        _Installed.undo = stack.pop_all()
    _Installed.recorder = recorder
    _Installed.missed = tuple(missed)
    os.register_at_fork(after_in_child=recorder.forked)
    atexit.register(uninstall)
    return recorder


def uninstall() -> None:
    """Remove the hook, write what is unwritten, close the ring."""
    recorder, _Installed.recorder = _Installed.recorder, None
    if recorder is not None:
        recorder.stop("uninstalled")
        _Installed.undo.close()


def mark_step(index: int) -> None:
    """The trainer says that iteration `index` ended; nothing happens when it is not watched."""
    if _Installed.recorder is not None:
        _Installed.recorder.mark_step(index)


def status() -> dict[str, Any]:
    """{mode, active, reason, ring, records, faults, missed} of this process.

    mode: "dispatcher" (every collective), "python" (only those called from Python), "off".
    """
    recorder = _Installed.recorder
    if recorder is None:
        return {"mode": "off", "active": False, "reason": "not installed", "missed": []}
    ring = recorder.ring
    return {
        "mode": recorder.mode,
        "active": recorder.on,
        "reason": recorder.reason,
        "ring": None if ring is None else str(ring.path),
        "records": 0 if ring is None else ring.written,
        "faults": dict(recorder.faults),
        "missed": list(_Installed.missed),
    }


def _kernel(recorder: Recorder, overload: Any, op: Op) -> Callable[..., Any]:
    """The BackendSelect kernel of one collective. Its locals save look-ups on every call."""
    redispatch = overload._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    unbox_group, unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox
    returns = len(overload._schema.returns)
    local, now, size_of = recorder.local, time.monotonic_ns, _size_of(op)
    at_group, at_peer, code = op.group, op.peer, op.code

    def kernel(keys: Any, *args: Any) -> Any:
        state: ThreadState = local.state
        if state.busy or not recorder.on:
            return redispatch(keys & below, *args)
        start = now()
        try:
            out = redispatch(keys & below, *args)
        except BaseException:
            recorder.failed(state, start, code, unbox_group(args[at_group]))
            raise
        call_ns = now() - start
        try:
            if state.call is not None:
                recorder.flush(state)
            group = unbox_group(args[at_group])
            known = recorder.known.get(id(group)) or recorder.group(group)
            size, dtype, on_cpu = size_of(args, known[1])
            state.call = (
                start, size, call_ns, -1 if at_peer is None else args[at_peer], known[1], code,
                dtype, known[0],
            )  # fmt: skip
            if returns and on_cpu:
                state.work = unbox_work(out if returns == 1 else out[-1])
            else:
                # Holding a CUDA Work would keep its tensors alive, and waiting for it blocks
                # a stream, not the caller.
                recorder.flush(state)
        except Exception as error:
            recorder.fault(error)
        return out

    return kernel


def _size_of(op: Op) -> Callable[[tuple[Any, ...], int], tuple[int, int, bool]]:
    """Reads (message bytes, dtype code, on the CPU) from a call's arguments and group size."""
    codes = dtype_codes()
    at, device, listed, times = op.size, op.device, op.listed, op.times_group

    def size_of(args: tuple[Any, ...], group_size: int) -> tuple[int, int, bool]:
        message = args[device]
        if listed:
            if not message:
                return 0, 0, True
            first = message[0]
            size = first.nbytes
            if len(message) > 1:
                size = sum(tensor.nbytes for tensor in message)
        else:
            first = message
            size = first.nbytes
        if times:
            size *= group_size
        elif at is None:
            size = 0
        return size, codes.get(first.dtype, 0), first.is_cpu

    return size_of


def _wait(recorder: Recorder, original: Any) -> Callable[..., Any]:
    """`Work.wait`, timed: where a caller really blocks for a collective."""
    local, now, waited = recorder.local, time.monotonic_ns, recorder.waited

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: ThreadState = local.state
        if state.busy or not recorder.on:
            return original(self, *args, **kwargs)
        start = now()
        try:
            done = original(self, *args, **kwargs)
        except BaseException:
            waited(state, self, start, now(), FLAG_ERROR)
            raise
        waited(state, self, start, now(), 0)
        return done

    wait.__doc__ = original.__doc__
    wait._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark dynamo looks for
    return wait


def _step(recorder: Recorder) -> Callable[[Any, Any, Any], None]:
    def step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():  # traced, it would break a full graph
            recorder.step(optimizer, args, kwargs)

    return step
