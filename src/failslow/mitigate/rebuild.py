"""Process groups and the DeviceMesh of a grid of workers, made anew when workers change places.

In: the worker (rank) at each position, row-major over (pp, dp, tp). Out: this worker's coordinates,
its group along each dimension, and a mesh:

    grid = LiveGrid.build((0, 1, 2, 3), sizes=(2, 2, 1), device_type="cpu")
    grid.stage, grid.replica, grid.shard      # of this worker
    …                                         # drop the model, its optimizer and schedule, then
    grid = grid.moved((1, 0, 2, 3))           # the old groups are gone, nothing leaks

Three things go wrong without it. A mesh made from ranks sorts its groups, so that after a move a
group's order is no longer that of the coordinates: pipelining then talks to the wrong neighbour and
gathering shards is silently wrong. DTensor caches what it knows of a mesh by the mesh's value, and
keeps the old one's groups alive: every generation has dimension names of its own, and the caches
are emptied. Groups that are not destroyed keep their threads and connections.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from failslow.errors import PlanError

__all__ = ["DIMENSIONS", "LiveGrid", "forget_meshes", "retire"]

DIMENSIONS = ("pp", "dp", "tp")
_generations = count()


@dataclass(frozen=True, slots=True, eq=False)
class LiveGrid:
    """A placement of the workers with its groups, seen from this worker."""

    sizes: tuple[int, int, int]
    """(pp, dp, tp)."""
    placement: tuple[int, ...]
    """The rank at each position."""
    mesh: DeviceMesh
    """(pp, dp, tp); its dimensions are called as `names` says."""
    groups: tuple[dist.ProcessGroup, ...]
    """This worker's along pp, dp and tp; a group's ranks are in order of the coordinate."""
    stage: int
    replica: int
    shard: int
    timeout_s: float | None = None
    """Of the groups; None the default of torch."""

    @classmethod
    def build(
        cls,
        placement: Sequence[int],
        *,
        sizes: tuple[int, int, int],
        device_type: str,
        timeout_s: float | None = None,
    ) -> LiveGrid:
        """A collective of all workers of the job, with the same arguments.

        Raises PlanError where the placement does not hold every rank of the job once.
        """
        world = dist.get_world_size()
        if sorted(placement) != list(range(world)) or math.prod(sizes) != world:
            raise PlanError(
                f"a grid of {' x '.join(map(str, sizes))} with {len(placement)} ranks does not fit "
                f"the job's {world} workers; give each one position"
            )
        ranks = torch.tensor(list(placement), device="cpu").view(sizes)
        me = dist.get_rank()
        generation = next(_generations)
        names = tuple(f"{name}_{generation}" for name in DIMENSIONS)
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        groups: list[dist.ProcessGroup] = []
        for dimension, name in enumerate(names):
            for line in ranks.movedim(dimension, -1).reshape(-1, sizes[dimension]).tolist():
                group = dist.new_group(line, timeout=timeout, sort_ranks=False, group_desc=name)
                if me in line:
                    groups.append(group)
        mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
        stage, replica, shard = (ranks == me).nonzero()[0].tolist()
        return cls(
            sizes=sizes,
            placement=tuple(placement),
            mesh=mesh,
            groups=tuple(groups),
            stage=stage,
            replica=replica,
            shard=shard,
            timeout_s=timeout_s,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The mesh's dimensions in this generation: ("pp_3", "dp_3", "tp_3")."""
        names = self.mesh.mesh_dim_names
        assert names is not None
        return names

    def along(self, dimension: str) -> DeviceMesh:
        """This worker's line of the mesh along "pp", "dp" or "tp"."""
        return self.mesh[self.names[DIMENSIONS.index(dimension)]]

    def close(self) -> None:
        """Destroy the groups, on all workers together.

        What was made with them must be gone, or nothing of them is freed: parameters that are
        DTensors, so the model and its optimizer, and the pipeline's schedule.
        """
        retire(self.groups)

    def moved(self, placement: Sequence[int]) -> LiveGrid:
        """`close`, and the grid of another placement."""
        self.close()
        return LiveGrid.build(
            placement,
            sizes=self.sizes,
            device_type=self.mesh.device_type,
            timeout_s=self.timeout_s,
        )


def retire(groups: Sequence[dist.ProcessGroup]) -> None:
    """Destroy process groups, if they are not yet, and what DTensor remembers of their meshes."""
    forget_meshes()
    gc.collect()  # modules refer to each other in circles, and some of them to the groups
    for group in groups:
        # destroyed already: a change of places failed after this, and is undone by another
        with suppress(ValueError):
            dist.destroy_process_group(group)


def forget_meshes() -> None:
    """Empty DTensor's caches of shardings, redistributions and costs, which keep meshes alive.

    They are private to torch: one that another version lacks or calls otherwise is left alone,
    which costs memory and not correctness, as generations never share a name.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in (
        ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
        ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ):
        with suppress(ImportError, AttributeError, TypeError):
            getattr(import_module(module), name)()
    for name, module_there in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for owner in list(vars(module_there).values()):
                _empty_caches(owner)


def _empty_caches(owner: Any) -> None:
    """That of a function with an lru_cache, or those of a class."""
    values = [owner, *vars(owner).values()] if isinstance(owner, type) else [owner]
    for value in values:
        function = value.__func__ if isinstance(value, staticmethod) else value
        if isinstance(function, _CACHED):
            function.cache_clear()


_CACHED = type(lru_cache(repr))
