"""Burn CPU time beside a training worker: what a noisy neighbour on its cores does.

In: cores and a load. Out: one busy process a core, pinned to it, until undone.

    Burn((0, 1), load=1.0, beside=4711)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import ClassVar

from failslow.errors import InjectError
from failslow.inject.cgroups import cpu_group
from failslow.inject.fault import Guarding
from failslow.inject.processes import refuse_process

__all__ = ["Burn", "parse_cores"]

_MOST_LOAD = 16


@dataclass(frozen=True)
class Burn:
    """Use the share `load` of each core in `cores`: more than 1 is that many busy processes a core,
    the last one busy for what remains.

    beside: a pid; the burners join its control group, where they weigh as much as it does. In the
    injector's own group they may get too little time against workers of more weight.
    """

    kind: ClassVar[str] = "cpu"
    cores: tuple[int, ...]
    load: float = 1.0
    beside: int | None = None

    def check(self) -> None:
        """Raises InjectError for a core that is not there or a load out of range."""
        usable = os.sched_getaffinity(0)
        if not self.cores:
            raise InjectError("cores is empty; name one or more, as in 0,1")
        for core in self.cores:
            if core not in usable:
                known = ",".join(str(c) for c in sorted(usable))
                raise InjectError(f"core {core} is not for this process to use; it has {known}")
        if len(set(self.cores)) != len(self.cores):
            raise InjectError(f"cores {self.cores} names one twice; name each once")
        if not 0.01 <= self.load <= _MOST_LOAD:
            raise InjectError(
                f"load ({self.load:g}) must be from 0.01 to {_MOST_LOAD}: the share of each core, "
                "or how many processes want all of it"
            )
        if self.beside is not None:
            refuse_process(self.beside)

    def targets(self) -> tuple[str, ...]:
        """The cores."""
        return tuple(f"core {core}" for core in self.cores)

    def summary(self) -> str:
        """The cores and their load."""
        cores = ", ".join(str(core) for core in self.cores)
        beside = "" if self.beside is None else f" beside process {self.beside}"
        return f"core{'s' * (len(self.cores) > 1)} {cores} by {100 * self.load:.0f} %{beside}"

    def target_pid(self) -> int | None:
        """The process the burners run beside."""
        return self.beside

    def start(self, guard: Guarding) -> str:
        """Start the burners. Raises InjectError."""
        group = None if self.beside is None else cpu_group(self.beside)
        folder = "" if group is None else str(group.path)
        loads = [1.0] * int(self.load)
        if self.load - len(loads) >= 0.01:
            loads.append(self.load - len(loads))
        for core in self.cores:
            for load in loads:
                guard.act("burn", str(core), f"{load:g}", folder)
        where = f" in {folder}" if folder else ""
        count = len(self.cores) * len(loads)
        return f"{count} pinned process{'es' * (count > 1)}{where}"


def parse_cores(text: str) -> tuple[int, ...]:
    """Cores as the kernel lists them. Raises InjectError.

    >>> parse_cores("0,2-4")
    (0, 2, 3, 4)
    """
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None:
            raise InjectError(f"cores {text!r} is no list of cores; write it as 0,1 or 0-3")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cores)
