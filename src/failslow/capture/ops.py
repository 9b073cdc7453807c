"""Which collectives there are, and how to read a call of one: message size, peer, blocking.

In: an operator of torch's c10d dispatcher. Out: `Op`, the argument positions the hook needs.

    Op(code=4, name="_allgather_base_", group=2, message=0, listed=False, sized=True,
       times_group=False, peer=None, blocking=3, returns=2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from failslow.capture.layout import DTYPES, OPS

__all__ = ["Op", "describe", "dispatcher_ops", "dtype_codes"]

_MESSAGE = {
    # op: (argument holding the message, whether it is one rank's share of it)
    "allreduce_": ("tensors", False),
    "allreduce_coalesced_": ("tensors", False),
    "allgather_": ("input_tensors", True),
    "_allgather_base_": ("output_tensor", False),
    "allgather_coalesced_": ("input_list", True),
    "allgather_into_tensor_coalesced_": ("outputs", False),
    "reduce_scatter_": ("output_tensors", True),
    "_reduce_scatter_base_": ("input_tensor", False),
    "reduce_scatter_tensor_coalesced_": ("inputs", False),
    "broadcast_": ("tensors", False),
    "reduce_": ("tensors", False),
    "gather_": ("input_tensors", True),
    "scatter_": ("output_tensors", True),
    "alltoall_": ("input_tensors", False),
    "alltoall_base_": ("input", False),
    "send": ("tensors", False),
    "recv_": ("tensors", False),
    "recv_any_source_": ("tensors", False),
    "barrier": ("", False),
    "monitored_barrier_": ("", False),
}
_PEERS = ("root_rank", "dst", "src")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Where a call of one collective keeps what a record needs (positions in its arguments)."""

    code: int
    """Index into `layout.OPS`."""
    name: str
    group: int
    """The process group."""
    message: int
    """The tensor or tensors that tell size, type and device."""
    listed: bool
    """`message` holds a list."""
    sized: bool
    """`message` is moved; a barrier's is only there for its device."""
    times_group: bool
    """`message` is one rank's share: the whole is group size times that."""
    peer: int | None
    """Root, source or destination, as a rank of the group."""
    blocking: int | None
    """`async_op`; None: the op does not say whether its caller blocks."""
    returns: int
    """Values it returns, the last of them the Work; 0: it blocks and returns nothing."""


def describe(overload: Any) -> Op | None:
    """How to read calls of `overload` (a torch OpOverload); None for what is no collective.

    A name this version does not know, or a schema that lost an argument we need, gives None.
    """
    schema = overload._schema
    name = schema.name.split("::")[1]
    if name not in _MESSAGE or name not in OPS or any(a.kwarg_only for a in schema.arguments):
        return None
    position = {argument.name: index for index, argument in enumerate(schema.arguments)}
    message, times_group = _MESSAGE[name]
    sized, message = bool(message), message or "tensor"
    if "process_group" not in position or message not in position:
        return None
    peers = [position[peer] for peer in _PEERS if peer in position]
    return Op(
        code=OPS.index(name),
        name=name,
        group=position["process_group"],
        message=position[message],
        listed=str(schema.arguments[position[message]].type).startswith("List"),
        sized=sized,
        times_group=times_group,
        peer=peers[0] if peers else None,
        blocking=position.get("async_op"),
        returns=len(schema.returns),
    )


def dispatcher_ops() -> tuple[dict[str, tuple[Any, Op]], list[str]]:
    """The c10d collectives of this torch as {name: (overload, how to read it)}, and the rest.

    The rest holds operators that move data between ranks but cannot be read: `doctor` shows
    them. `check_for_nan` is local and left out.
    """
    import torch

    known: dict[str, tuple[Any, Op]] = {}
    missed = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space != "c10d" or "." in name or name == "check_for_nan":
            continue
        overload = getattr(torch.ops.c10d, name).default
        op = describe(overload)
        if op is None:
            missed.append(name)
        else:
            known[name] = (overload, op)
    return known, sorted(missed)


def dtype_codes() -> dict[Any, int]:
    """{torch dtype: index into `layout.DTYPES`} for the types this torch has."""
    import torch

    return {
        getattr(torch, name): code
        for code, name in enumerate(DTYPES)
        if name and hasattr(torch, name)
    }
