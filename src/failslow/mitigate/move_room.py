"""Is there room for a second copy of the state? Asked before anything is allocated.

In: what every worker will receive, and what memory is free. Out: None, or why it cannot be:

    "a second copy of the state takes 6100.0 MB of cuda memory for ranks 2, and of 4000.0 MB …"

Workers that share a host share its memory, so their needs are added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

__all__ = ["Need", "free_bytes", "lacking"]

USABLE = 0.9
"""Of the free memory; what else runs there needs some too."""


@dataclass(frozen=True, slots=True)
class Need:
    """One worker's need of one kind of memory."""

    rank: int
    place: str
    """The memory itself: "host boot-id", "cuda uuid"; the same for workers that share it."""
    need_bytes: int
    free_bytes: int


def lacking(needs: Sequence[Need]) -> str | None:
    """Why the first place without room has none; None where all have."""
    by_place: dict[str, list[Need]] = defaultdict(list)
    for need in needs:
        by_place[need.place].append(need)
    for place, sharing in by_place.items():
        total = sum(need.need_bytes for need in sharing)
        free = min(need.free_bytes for need in sharing)
        if total > USABLE * free:
            ranks = ", ".join(str(need.rank) for need in sharing)
            return (
                f"a second copy of the state takes {total / 1e6:.1f} MB of {place.split()[0]} "
                f"memory for ranks {ranks}, and of {free / 1e6:.1f} MB free only {USABLE:.0%} may "
                "be used; free some, or receive into host memory"
            )
    return None


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had there: of the device, or of this process's host or cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min([int(psutil.virtual_memory().available), *_cgroup_room()])


def place_name(device: torch.device) -> str:
    """Names the memory behind a device, for `Need.place`."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown"
    return f"host {boot}"


def _cgroup_room() -> list[int]:
    """Bytes below the memory limit of this process's control group; [] where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = Path("/sys/fs/cgroup" + path), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory" + path)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        try:
            limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in names)
            rooms.append(max(0, int(limit) - int(used)))
        except (OSError, ValueError):  # "max": no limit
            continue
    return rooms
