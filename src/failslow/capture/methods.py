"""Capture for a torch whose dispatcher cannot be used: wraps the methods of ProcessGroup.

In: calls from Python (`torch.distributed.*`, FSDP2, pipelining reach a group this way). Out:
the same records as the dispatcher hook's. Collectives that C++ starts are not seen: those of
DDP's reducer, functional collectives (DTensor, tensor parallel), compiled graphs. `status` and
`failslow doctor` say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from failslow.capture.layout import OFFSET_CONTROL, OPS, POINT_TO_POINT
from failslow.capture.ops import dtype_codes
from failslow.capture.recorder import Recorder, ThreadState

__all__ = ["METHODS", "UNSEEN", "make_method"]

UNSEEN = (
    "collectives of DDP's C++ reducer",
    "functional collectives (DTensor, tensor parallel)",
    "collectives in compiled graphs",
)
METHODS = {
    # method of ProcessGroup: (op, argument holding the message, one rank's share of it);
    # torch has had two names for some, and a torch has either or both
    "allreduce": ("allreduce_", 0, False),
    "allreduce_coalesced": ("allreduce_coalesced_", 0, False),
    "allgather": ("allgather_", 1, True),
    "_allgather_base": ("_allgather_base_", 0, False),
    "all_gather_single": ("_allgather_base_", 0, False),
    "allgather_coalesced": ("allgather_coalesced_", 1, True),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", 0, False),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", 0, False),
    "reduce_scatter": ("reduce_scatter_", 0, True),
    "_reduce_scatter_base": ("_reduce_scatter_base_", 1, False),
    "reduce_scatter_single": ("_reduce_scatter_base_", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", 1, False),
    "broadcast": ("broadcast_", 0, False),
    "reduce": ("reduce_", 0, False),
    "gather": ("gather_", 1, True),
    "scatter": ("scatter_", 0, True),
    "alltoall": ("alltoall_", 1, False),
    "alltoall_base": ("alltoall_base_", 1, False),
    "all_to_all_single": ("alltoall_base_", 1, False),
    "send": ("send", 0, False),
    "recv": ("recv_", 0, False),
    "recv_anysource": ("recv_any_source_", 0, False),
    "barrier": ("barrier", None, False),
    "monitored_barrier": ("monitored_barrier_", None, False),
}
_PEER_ARGUMENT = {"send": 1, "recv": 1}


def make_method(recorder: Recorder, name: str, original: Any) -> Callable[..., Any]:
    """The replacement of `ProcessGroup.<name>`, whose pybind method is `original`."""
    op_name, at_message, times = METHODS[name]
    code, at_peer, codes = OPS.index(op_name), _PEER_ARGUMENT.get(name), dtype_codes()
    local, now, known = recorder.local, time.monotonic_ns, recorder.groups.known
    counted = op_name not in POINT_TO_POINT

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: ThreadState = local.state
        if state.busy or not recorder.on:
            return original(self, *args, **kwargs)
        try:
            number, group_size = known.get(id(self)) or recorder.group(self)
            if counted and group_size == recorder.spans:
                recorder.arrive(number)
        except Exception as error:
            recorder.fault(error)
            return original(self, *args, **kwargs)
        profiled = recorder.control[OFFSET_CONTROL]
        first, size = None, 0
        if at_message is not None and at_message < len(args):
            first, size = _message(args[at_message])
        begun = recorder.begin(first) if profiled and first is not None else None
        start = now()
        try:
            work = original(self, *args, **kwargs)
        except BaseException:
            recorder.failed(state, start, code, self)
            raise
        call_ns = now() - start
        try:
            recorder.flush(state)
            options = kwargs.get("opts", args[-1] if args else None)
            peer = args[at_peer] if at_peer is not None else getattr(options, "rootRank", -1)
            on_cpu = first is None or first.is_cpu
            dtype = 0 if first is None else codes.get(first.dtype, 0)
            size = size * group_size if times else size
            state.call = (
                start, size, call_ns, peer, group_size, code, dtype, number, on_cpu,
            )  # fmt: skip
            if work is None:
                recorder.returned(state)
            elif profiled:
                recorder.follow(state, work, begun)
            elif on_cpu:
                state.work = work
            else:
                recorder.flush(state)
        except Exception as error:
            recorder.fault(error)
        return work

    method.__doc__ = original.__doc__
    return method


def _message(value: Any) -> tuple[Any, int]:
    """(first tensor, bytes) of a tensor or a list of tensors."""
    if isinstance(value, (list, tuple)):
        return (value[0] if value else None), sum(tensor.nbytes for tensor in value)
    return value, value.nbytes
