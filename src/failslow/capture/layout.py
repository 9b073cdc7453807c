"""The bytes of a ring file: header, description, group table, records. Standard library only.

In: nothing. Out: `struct` layouts shared by the writer (in the trainer) and the reader (in the
agent). All integers are little-endian, all times CLOCK_MONOTONIC nanoseconds. The file:

    0        header: magic, version, sizes and offsets; then, a cache line each, the live fields
             head (records written so far), groups_used, control (the agent's wishes), faults;
             from 512 on the collectives begun so far on each group that spans all workers
    4096     description: one JSON object (host, job, rank, op names, clock anchor, mode ...)
    15872    device: one JSON object, once the worker is known to compute on one of its own
    16384    group table: one JSON line a group, appended when the group appears:
             {"id":1,"name":"3","desc":"mesh_tp","backend":"gloo","size":2,"ranks":[[0,2,1]],...}
    ...      `capacity` records of 64 bytes; record number n lives in slot (n - 1) % capacity

A record (kind CALL) as the reader shows it:

    (seq=812, start_ns=…, end_ns=0, wait_ns=0, size_bytes=25165824, call_ns=31200, thread=4182,
     peer=-1, group_size=8, op=5, kind=1, dtype=6, flags=1, group=0)
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = [
    "CALL",
    "CONTROL_PROFILE",
    "COUNTED_GROUPS",
    "DESCRIPTION_OFFSET",
    "DEVICE_OFFSET",
    "DONE",
    "DTYPES",
    "FLAG_ASYNC",
    "FLAG_ERROR",
    "FLAG_LATE",
    "GROUPS_OFFSET",
    "HEADER",
    "MAGIC",
    "NO_GROUP",
    "OFFSET_CLOSED",
    "OFFSET_CONTROL",
    "OFFSET_COUNTS",
    "OFFSET_DEVICE",
    "OFFSET_FAULTS",
    "OFFSET_GROUPS_USED",
    "OFFSET_HEAD",
    "OPS",
    "OPTIMIZER_STEP",
    "PAUSE",
    "POINT_TO_POINT",
    "RECORD",
    "RECORD_FIELDS",
    "TRAINER_STEP",
    "U32",
    "U64",
    "VERSION",
    "WAIT",
    "from_runs",
    "to_runs",
]

MAGIC: Final = b"FAILSLOW"
VERSION: Final = 1

HEADER: Final = struct.Struct("<8sIIQQQQQQQii")
"""magic, version, record size, capacity, ring offset, description offset, its size, groups
offset, groups capacity, pid, rank, world size."""
U32: Final = struct.Struct("<I")
U64: Final = struct.Struct("<Q")

# Each live field has a cache line of its own: writer and reader sit on different cores.
OFFSET_HEAD: Final = 128
OFFSET_GROUPS_USED: Final = 192
OFFSET_CONTROL: Final = 256
OFFSET_FAULTS: Final = 320
OFFSET_CLOSED: Final = 384
OFFSET_DEVICE: Final = 448
"""Bytes of what is told of the device; 0: nothing yet."""
OFFSET_COUNTS: Final = 512
COUNTED_GROUPS: Final = (4096 - OFFSET_COUNTS) // 8
"""Groups whose collectives are counted: those numbered below it, if they span all workers. A count
begins at 0 with each making of the group, and is the same on all ranks at the same call."""
DESCRIPTION_OFFSET: Final = 4096
DEVICE_OFFSET: Final = 15872
GROUPS_OFFSET: Final = 16384

CONTROL_PROFILE: Final = 1
"""Control bit: record completions too, although that costs more a call. (The extension records
those of CPU collectives always: they cost it next to nothing.)"""

RECORD: Final = struct.Struct("<QqqqqIIiIBBBBHH")
RECORD_FIELDS: Final = (
    ("seq", "<u8"),
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
    ("wait_ns", "<i8"),
    ("size_bytes", "<i8"),
    ("call_ns", "<u4"),
    ("thread", "<u4"),
    ("peer", "<i4"),
    ("group_size", "<u4"),
    ("op", "u1"),
    ("kind", "u1"),
    ("dtype", "u1"),
    ("flags", "u1"),
    ("group", "<u2"),
    ("check", "<u2"),
)
"""Name and numpy type of each field of `RECORD`, in order.

seq         number of the record, from 1; written first, its low 16 bits again last (`check`):
            a record whose two ends disagree is torn
start_ns    the host entered the call (CALL), began to wait (WAIT), or the moment of a step
end_ns      when the collective was complete; 0 while unknown. A host that only enqueues does
            not know: see `FLAG_LATE`
wait_ns     how long the caller was blocked in `wait` for it
size_bytes  the whole message, the same on every rank of the group: all-gather output,
            reduce-scatter input, else the tensor. For WAIT and DONE: the seq of their call
call_ns     host time inside the call (saturates at 4.29 s); on CUDA this is enqueueing only
thread      native thread id
peer        root of a rooted collective, the other side of a send or recv (rank in the group)
group       index into the group table; NO_GROUP if the table was full
"""

CALL: Final = 1
"""One collective was called."""
WAIT: Final = 2
"""A caller waited for an earlier asynchronous call; `size_bytes` holds that call's seq."""
DONE: Final = 3
"""An earlier call completed at `end_ns`; `size_bytes` holds its seq."""
OPTIMIZER_STEP: Final = 4
"""An optimizer finished a step: a boundary candidate. `size_bytes` numbers the optimizer (0, 1,
... in the order of their first step), `op` is 0, `group` NO_GROUP."""
TRAINER_STEP: Final = 5
"""The trainer itself says that iteration `size_bytes` ended; outranks every other source.
`wait_ns` holds the work in it (tokens or samples), 0 not told."""
PAUSE: Final = 6
"""This worker was made to stand still from `start_ns` to `end_ns`; `size_bytes` numbers the pause,
`thread` is the one that stood, `group` the one before whose call."""

FLAG_ASYNC: Final = 1
"""The caller asked for a Work instead of blocking."""
FLAG_ERROR: Final = 2
"""The collective raised; its exception went to the caller untouched."""
FLAG_LATE: Final = 4
"""`end_ns` is only an upper bound: the wait for it returned at once, so it ended earlier."""
NO_GROUP: Final = 0xFFFF

OPS: Final = (
    "",
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "broadcast_",
    "reduce_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
    "recv_any_source_",
    "barrier",
    "monitored_barrier_",
)
"""Names of `RECORD.op`, those of torch's c10d dispatcher. Append only: the index is the code."""
POINT_TO_POINT: Final = frozenset({"send", "recv_", "recv_any_source_"})
"""Those that not all ranks of the group call."""

DTYPES: Final = (
    "",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""Names of `RECORD.dtype`; 0 stands for none and for every other type."""


def to_runs(ranks: list[int]) -> list[list[int]]:
    """Ranks as [start, stop, step] runs, so that a world of 100,000 takes one entry.

    >>> to_runs([0, 1, 2, 3]), to_runs([1, 9, 17]), to_runs([5, 2])
    ([[0, 4, 1]], [[1, 25, 8]], [[5, 6, 1], [2, 3, 1]])
    """
    runs: list[list[int]] = []
    index = 0
    while index < len(ranks):
        step = ranks[index + 1] - ranks[index] if index + 1 < len(ranks) else 1
        end = index + 1
        if step > 0:
            while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
                end += 1
        else:
            step = 1
        runs.append([ranks[index], ranks[end - 1] + step, step])
        index = end
    return runs


def from_runs(runs: list[list[int]]) -> list[int]:
    """The inverse of `to_runs`."""
    return [rank for start, stop, step in runs for rank in range(start, stop, step)]
