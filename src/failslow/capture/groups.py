"""Process groups as the records name them: a small number each, described once in the ring.

In: torch ProcessGroups as calls bring them. Out: lines of the ring's group table:

    {"id":2,"name":"5","desc":"mesh_tp","backend":"gloo","size":2,"rank":1,"ranks":[[2,4,1]],
     "global_rank":3,"time_ns":…}
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from failslow.capture.layout import NO_GROUP, to_runs

__all__ = ["GroupTable"]


class GroupTable:
    """Numbers process groups in the order of their first call.

    A group that is destroyed and made again with the same name, backend and ranks keeps its
    number: to a reader it is the same set of workers.
    """

    def __init__(
        self, add: Callable[[Mapping[str, Any]], bool], renewed: Callable[[int], None]
    ) -> None:
        """add: appends an entry to the ring's table; False when that is full. renewed: told the
        number of a group that was made again."""
        self.known: dict[int, tuple[int, int]] = {}
        """{id of the Python object: (number, size)}; an entry leaves with its object, so an
        address that is used again is never taken for the group that had it before."""
        self._add, self._renewed = add, renewed
        self._backends: dict[int, str] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._guards: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.Lock()

    def register(self, group: Any) -> tuple[int, int]:
        """(number, size) of a group seen for the first time; all groups torch knows are listed
        with it, so that the table shows groups in the order they were made."""
        from torch.distributed import distributed_c10d as c10d

        with self._lock:
            for other in list(c10d._world.pg_map):
                if id(other) not in self.known:
                    self._describe(other, c10d)
            if id(group) not in self.known:
                self._describe(group, c10d)
            return self.known[id(group)]

    def backend(self, number: int) -> str:
        """Backend name of a numbered group; "" for NO_GROUP."""
        return self._backends.get(number, "")

    def _describe(self, group: Any, c10d: Any) -> None:
        ranks = list(c10d._world.pg_group_ranks.get(group, ()))
        name, size = str(group.group_name), int(group.size())
        try:
            backend = str(c10d.get_backend(group))
        except ValueError:  # not one of torch's: a group some library made by itself
            backend = str(group.name())
        desc = str(getattr(group, "group_desc", ""))
        key = (name, desc, backend, size, tuple(ranks))
        number = self._numbers.get(key)
        if number is None:
            number = min(len(self._numbers), NO_GROUP)
            entry = {
                "id": number,
                "name": name,
                "desc": desc,
                "backend": backend,
                "size": size,
                "rank": int(group.rank()),
                "ranks": to_runs(ranks) if ranks else None,
                "global_rank": int(c10d.get_rank()) if c10d.is_initialized() else None,
                "time_ns": time.monotonic_ns(),
            }
            if number == NO_GROUP or not self._add(entry):
                number = NO_GROUP
            else:
                self._numbers[key] = number
                self._backends[number] = backend
        elif group in c10d._world.pg_map:  # else perhaps a new object that stands for the old group
            self._renewed(number)
        address = id(group)
        self._guards[address] = weakref.ref(group, lambda _: self._forget(address))
        self.known[address] = (number, size)

    def _forget(self, address: int) -> None:
        self.known.pop(address, None)
        self._guards.pop(address, None)
