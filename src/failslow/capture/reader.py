"""The reading end of a ring, in another process than the writer.

In: a ring file. Out: the records since the last read, oldest first, and how many were lost:

    reader = RingReader("/dev/shm/failslow-0-pretrain7-r3-p41822.ring")
    batch = reader.read()
    batch.records["start_ns"], batch.lost          # numpy structured array; int

The reader takes no lock and the writer never waits for it. A record is taken only when both its
ends carry the number it should have: one that is being written, or was overwritten while it was
copied, is left for the next read or counted as lost. (Stores become visible in program order on
x86; on machines where they may not, the same check is all the protection there is.)
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from failslow.capture import layout
from failslow.capture.ring import process_start_ticks
from failslow.errors import CaptureError

__all__ = ["RECORD_DTYPE", "Batch", "Group", "RingReader"]

RECORD_DTYPE = np.dtype(list(layout.RECORD_FIELDS))
"""`layout.RECORD` as numpy sees it."""
_PATIENCE = 64
"""A record still missing when the writer is this far past it will not come any more: its thread
was stopped between taking the number and writing."""


class Batch(NamedTuple):
    """What one read brought."""

    records: NDArray[np.void]
    """New records of every kind in the order of their numbers; dtype `RECORD_DTYPE`."""
    lost: int
    """Records that were overwritten before they could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One line of the ring's group table."""

    number: int
    """What `group` in a record refers to."""
    name: str
    desc: str
    backend: str
    size: int
    rank: int
    """The worker's own rank in the group."""
    ranks: tuple[int, ...] | None
    """Global ranks ordered by group rank; None when torch did not know them."""
    time_ns: int
    """CLOCK_MONOTONIC when it was first used."""


class RingReader:
    """Reads one ring; `read` returns what is new. Not safe for several threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Maps the file; raises CaptureError naming it when it is no ring of this version."""
        self.path = Path(path)
        try:
            with self.path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise CaptureError(f"{self.path}: cannot be mapped: {error}") from None
        if len(self._memory) < layout.GROUPS_OFFSET or self._memory[:8] != layout.MAGIC:
            raise CaptureError(f"{self.path}: is no ring of failslow; remove it")
        header = layout.HEADER.unpack_from(self._memory)
        version, width, self.capacity, ring_offset = header[1:5]
        if version != layout.VERSION or width != layout.RECORD.size:
            raise CaptureError(
                f"{self.path}: ring version {version}, this failslow reads {layout.VERSION}; "
                "run trainer and agent with the same failslow"
            )
        if len(self._memory) < ring_offset + self.capacity * width:
            raise CaptureError(f"{self.path}: is cut short; remove it")
        start, size, self._groups_offset = header[5:8]
        self.description: dict[str, Any] = json.loads(self._memory[start : start + size])
        """job, host, rank, world_size, pid, ops, dtypes, mode, clock anchors ..."""
        self.pid, self.rank, self.world_size = header[9:12]
        self._ring: NDArray[np.void] = np.frombuffer(
            self._memory, dtype=RECORD_DTYPE, count=self.capacity, offset=ring_offset
        )
        self._patience = min(_PATIENCE, self.capacity // 4)
        self._next = 1
        self._head = 0
        self._groups: list[Group] = []
        self._groups_read = 0

    def read(self) -> Batch:
        """All records written since the last read that have not been overwritten."""
        head = self._written()
        first = max(self._next, head - self.capacity + 1)
        expected = np.arange(first, head + 1, dtype=np.uint64)
        records = self._ring[(expected - 1) % self.capacity]  # a copy
        good = (records["seq"] == expected) & (records["check"] == expected % 65535 + 1)
        # Not good: overwritten while it was copied (its slot holds a later number, or none at
        # all: it is being overwritten), or not yet written by a thread that took its number.
        pending = (
            ~good
            & (expected + self._patience > head)
            & (expected + self.capacity > self._written() + self._patience)
        )
        end = head if not pending.any() else first + int(np.argmax(pending)) - 1
        good &= expected <= end
        taken = records[good]
        lost = max(end - self._next + 1, 0) - len(taken)
        self._next = max(end + 1, self._next)
        return Batch(taken, lost)

    def groups(self) -> list[Group]:
        """The process groups seen so far, index = `number`."""
        (used,) = layout.U64.unpack_from(self._memory, layout.OFFSET_GROUPS_USED)
        start = self._groups_offset + self._groups_read
        for line in self._memory[start : self._groups_offset + used].splitlines():
            entry = json.loads(line)
            ranks = entry["ranks"]
            self._groups.append(
                Group(
                    number=entry["id"],
                    name=entry["name"],
                    desc=entry["desc"],
                    backend=entry["backend"],
                    size=entry["size"],
                    rank=entry["rank"],
                    ranks=None if ranks is None else tuple(layout.from_runs(ranks)),
                    time_ns=entry["time_ns"],
                )
            )
        self._groups_read = used
        return list(self._groups)

    def device(self) -> dict[str, Any]:
        """What the worker computes on; {} where it has not told, or is at it."""
        (used,) = layout.U64.unpack_from(self._memory, layout.OFFSET_DEVICE)
        try:
            told = json.loads(self._memory[layout.DEVICE_OFFSET : layout.DEVICE_OFFSET + used])
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    def count(self, number: int) -> int:
        """Collectives the worker has begun on this group; 0 for one that does not span all."""
        if not 0 <= number < layout.COUNTED_GROUPS:
            return 0
        return int(layout.U64.unpack_from(self._memory, layout.OFFSET_COUNTS + 8 * number)[0])

    def set_profile(self, on: bool) -> None:
        """Ask the writer to record completions too (costs it more a call), or no longer."""
        value = layout.CONTROL_PROFILE if on else 0
        layout.U32.pack_into(self._memory, layout.OFFSET_CONTROL, value)

    @property
    def faults(self) -> int:
        """Samples the writer lost to its own faults."""
        return int(layout.U64.unpack_from(self._memory, layout.OFFSET_FAULTS)[0])

    @property
    def closed(self) -> bool:
        """The writer said good-bye; records may still be unread."""
        return bool(layout.U64.unpack_from(self._memory, layout.OFFSET_CLOSED)[0])

    @property
    def alive(self) -> bool:
        """The writing process exists (looked up in this pid namespace)."""
        return bool(process_start_ticks(self.pid) == self.description["pid_start_ticks"])

    def to_epoch_s(self, monotonic_ns: float) -> float:
        """A record's time as seconds since 1970, by the writer's clock at its start."""
        about = self.description
        return float(about["start_epoch_ns"] + monotonic_ns - about["start_monotonic_ns"]) / 1e9

    def close(self) -> None:
        """Unmap; arrays already returned are copies and stay valid."""
        del self._ring
        self._memory.close()

    def _written(self) -> int:
        # Two threads of the writer may store their heads in the wrong order.
        head = int(layout.U64.unpack_from(self._memory, layout.OFFSET_HEAD)[0])
        self._head = max(self._head, head)
        return self._head
