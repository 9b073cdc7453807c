"""Where a worker is in the grid of pipeline stages × data-parallel replicas × shards.

In: the grid's sizes, or a DeviceMesh with names. Out: this worker's `Place`. Positions are numbered
row-major, as everywhere: ((stage · dp) + replica) · tp + shard.

    >>> Place(stage=1, replica=0, shard=1, grid=(2, 2, 2)).position
    5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from failslow.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Place", "place_in"]

_AXES = (
    ("pp", "pipe", "pipeline", "stage"),
    ("dp", "data", "replicate", "replica", "dp_replicate", "ddp"),
    ("tp", "tensor", "model", "shard", "dp_shard", "fsdp"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's coordinates. Raises PlanError for some outside the grid."""

    stage: int
    replica: int
    shard: int
    grid: tuple[int, int, int]
    """Stages, replicas, shards of each."""

    def __post_init__(self) -> None:
        for at, size in zip((self.stage, self.replica, self.shard), self.grid, strict=True):
            if not 0 <= at < size:
                raise PlanError(
                    f"stage {self.stage}, replica {self.replica}, shard {self.shard} is no place "
                    f"in a grid of {' x '.join(map(str, self.grid))}; count from 0"
                )

    @classmethod
    def at(cls, position: int, grid: tuple[int, int, int]) -> Place:
        """The place of that number."""
        _, dp, tp = grid
        return cls(position // (dp * tp), position // tp % dp, position % tp, grid)

    @property
    def position(self) -> int:
        """Its number."""
        _, dp, tp = self.grid
        return (self.stage * dp + self.replica) * tp + self.shard


def place_in(mesh: DeviceMesh) -> Place:
    """This worker's place in a mesh that spans the job, by the names of its dimensions.

    Known are pp, dp or replicate, tp or shard, and their like; numbers at the end don't count.
    One dimension without a name is data parallel. Raises PlanError for other names.
    """
    names = mesh.mesh_dim_names
    at, sizes = [0, 0, 0], [1, 1, 1]
    axes = [1] if mesh.ndim == 1 and names is None else []
    for name in names or ():
        bare = name.rstrip("0123456789_")
        axes += [axis for axis, known in enumerate(_AXES) if bare in known]
    if len(axes) != mesh.ndim or axes != sorted(set(axes)):
        raise PlanError(
            f"a mesh with dimensions {names} has no known order of pp, dp and tp; give grid= and "
            "place= instead"
        )
    for dimension, axis in enumerate(axes):
        at[axis], sizes[axis] = mesh.get_local_rank(dimension), mesh.size(dimension)
    return Place(at[0], at[1], at[2], (sizes[0], sizes[1], sizes[2]))
