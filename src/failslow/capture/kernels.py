"""The code that runs inside every collective: the dispatcher kernel and the timed wait.

In: a dispatched c10d operator, or a `Work.wait`. Out: the same result or exception, and a call
handed to the recorder. This is the only place where nanoseconds are worth longer code: values
sit in closures, nothing is looked up twice, and a blocking call makes one ring record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from failslow.capture.layout import FLAG_ERROR, OFFSET_CONTROL, POINT_TO_POINT
from failslow.capture.ops import Op, dtype_codes
from failslow.capture.recorder import Recorder, ThreadState

__all__ = ["make_kernel", "make_wait"]


def make_kernel(recorder: Recorder, overload: Any, op: Op) -> Callable[..., Any]:
    """The BackendSelect kernel of one collective, to be registered `with_keyset`.

    It redispatches to the keys below, which releases the interpreter's lock inside.
    """
    redispatch = overload._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    unbox_group, unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox
    local, now, flush = recorder.local, time.monotonic_ns, recorder.flush
    number_of, control_at = recorder.groups.known.get, OFFSET_CONTROL
    code_of = (dtype_codes() if op.sized else {}).get
    at_group, at_peer, at_message, at_blocking = op.group, op.peer, op.message, op.blocking
    code, returns, scaled = op.code, op.returns, op.times_group
    measure = _whole_list if op.listed else _one_tensor if op.sized else _nothing
    enough = len(overload._schema.arguments) if at_blocking is None else at_blocking
    counted = op.name not in POINT_TO_POINT

    def kernel(keys: Any, *args: Any) -> Any:
        state: ThreadState = local.state
        if state.busy or not recorder.on:
            return redispatch(keys & below, *args)
        try:
            group = unbox_group(args[at_group])
            number, group_size = number_of(id(group)) or recorder.group(group)
            if counted and group_size == recorder.spans:
                recorder.arrive(number)
        except Exception as error:
            recorder.fault(error)
            return redispatch(keys & below, *args)
        profiled = recorder.control[control_at]
        begun = recorder.begin(args[at_message]) if profiled else None
        start = now()
        try:
            out = redispatch(keys & below, *args)
        except BaseException:
            recorder.failed(state, start, code, group)
            raise
        call_ns = now() - start
        try:
            if state.work is not None or state.call is not None:
                flush(state)
            first, size = measure(args[at_message])
            on_cpu = first.is_cpu
            state.call = (
                start, size * group_size if scaled else size, call_ns,
                -1 if at_peer is None else args[at_peer], group_size, code,
                code_of(first.dtype, 0), number, on_cpu,
            )  # fmt: skip
            # Arguments that have their default are left out, and asynchronous is the default.
            blocking = len(args) > enough and not args[enough]
            if blocking and on_cpu:
                pass  # its caller waits for it next, on this thread
            elif not returns:
                recorder.returned(state)
            elif profiled:
                recorder.follow(state, unbox_work(out if returns == 1 else out[-1]), begun)
            elif on_cpu:
                state.work = unbox_work(out if returns == 1 else out[-1])
            elif not blocking:
                # Holding a CUDA Work would keep its tensors alive, and waiting for it blocks a
                # stream, not the caller.
                flush(state)
        except Exception as error:
            recorder.fault(error)
        return out

    return kernel


def _whole_list(message: Any) -> tuple[Any, int]:
    first = message[0]
    return first, first.nbytes if len(message) == 1 else sum([part.nbytes for part in message])


def _one_tensor(message: Any) -> tuple[Any, int]:
    return message, message.nbytes


def _nothing(message: Any) -> tuple[Any, int]:
    return message, 0


def make_wait(recorder: Recorder, original: Any) -> Callable[..., Any]:
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
