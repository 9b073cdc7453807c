"""Which worker computes what: a grid of pipeline stages × data-parallel replicas × tensor shards.

In: the grid's sizes and the worker (rank) at each position, row-major over (pp, dp, tp). Out: this
worker's coordinates, and a DeviceMesh with a process group a dimension.

    grid = Grid.build(Layout(pp=2, dp=2, tp=1), placement=(0, 1, 2, 3), device_type="cpu")
    grid.stage, grid.replica, grid.shard    # of this worker
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from failslow.mitigate.rebuild import retire

__all__ = ["Grid", "Layout"]

_generations = count()


@dataclass(frozen=True)
class Layout:
    """Sizes of the grid."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def workers(self) -> int:
        """World size it needs."""
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class Grid:
    """A layout with workers in it, seen from this worker."""

    layout: Layout
    placement: tuple[int, ...]
    """The worker at each position."""
    mesh: DeviceMesh
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]
    """This worker's, along pp, dp and tp; ranks in a group are in order of the coordinate."""
    stage: int
    replica: int
    shard: int

    @classmethod
    def build(cls, layout: Layout, placement: tuple[int, ...], device_type: str) -> Grid:
        """All workers call it together, with the same arguments."""
        ranks = torch.tensor(placement, device="cpu").view(layout.pp, layout.dp, layout.tp)
        me = dist.get_rank()
        groups = []
        for dimension, size in enumerate(ranks.shape):
            mine: dist.ProcessGroup | None = None
            for line in ranks.movedim(dimension, -1).reshape(-1, size).tolist():
                # sorted by rank, a group's order would not be that of the coordinates, and
                # pipelining would talk to the wrong neighbour once workers have changed places
                group = dist.new_group(line, sort_ranks=False)
                if me in line:
                    mine = group
            assert mine is not None
            groups.append(mine)
        # DTensor caches by the mesh's names: another generation must not meet this one's
        generation = next(_generations)
        names = tuple(f"{name}{generation}" for name in ("pp", "dp", "tp"))
        mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
        stage, replica, shard = (ranks == me).nonzero()[0].tolist()
        return cls(
            layout=layout,
            placement=placement,
            mesh=mesh,
            groups=(groups[0], groups[1], groups[2]),
            stage=stage,
            replica=replica,
            shard=shard,
        )

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The tensor shards of this worker's stage and replica."""
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh[names[2]]

    def close(self) -> None:
        """Destroy the groups, all workers together; what was made with them must be gone."""
        retire(self.groups)
