"""Who sends its state to whom when workers change places.

In: the worker (rank) at each position, now and afterwards, as `Plan.placement` gives it. Out: each
worker's `Route`.

    >>> find_route(1, now=(0, 1, 2, 3), new=(0, 2, 3, 1))
    Route(position_now=1, position_new=3, to=2, source=3)
    >>> find_route(0, now=(0, 1, 2, 3), new=(0, 2, 3, 1)).moves
    False

Positions are numbered row-major over (pp, dp, tp): ((stage · dp) + replica) · tp + shard. State
belongs to a position: whoever takes a position gets the state of who held it. Any permutation will
do, cycles of three and more too, as long as tensor-parallel blocks stay whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from failslow.errors import MoveError

__all__ = ["Route", "check_placements", "find_route", "plan_number"]


@dataclass(frozen=True, slots=True)
class Route:
    """One worker's part in a move."""

    position_now: int
    position_new: int
    to: int
    """Rank that takes the present position, and this worker's state with it."""
    source: int
    """Rank whose state belongs to the new position."""

    @property
    def moves(self) -> bool:
        """Whether the worker changes places at all."""
        return self.position_now != self.position_new


def find_route(rank: int, *, now: Sequence[int], new: Sequence[int]) -> Route:
    """What `rank` sends and receives. MoveError where it has no position."""
    for placement in (now, new):
        if rank not in placement:
            raise MoveError(f"rank {rank} has no position in {_told(placement)}", refused=True)
    here, there = list(now).index(rank), list(new).index(rank)
    return Route(here, there, to=new[here], source=now[there])


def check_placements(now: Sequence[int], new: Sequence[int], *, tp: int = 1) -> None:
    """MoveError unless `new` is `now` with whole tensor-parallel blocks exchanged."""
    if len(set(now)) != len(now) or set(now) != set(new) or len(now) != len(new):
        raise MoveError(
            f"{_told(new)} is not {_told(now)} in another order; a move exchanges the places of "
            "the job's own workers",
            refused=True,
        )
    if tp < 1 or len(now) % tp:
        raise MoveError(
            f"{len(now)} workers do not form tensor-parallel blocks of {tp}", refused=True
        )
    blocks = {tuple(now[at : at + tp]) for at in range(0, len(now), tp)}
    for at in range(0, len(new), tp):
        block = tuple(new[at : at + tp])
        if block not in blocks:
            raise MoveError(
                f"positions {at} to {at + tp - 1} would hold ranks {_told(block)}, which are no "
                f"tensor-parallel block now; blocks of {tp} move as wholes, in their own order",
                refused=True,
            )


def plan_number(now: Sequence[int], new: Sequence[int], chunk_bytes: int) -> int:
    """The same for workers that were asked for the same move, else (nearly always) another."""
    return zlib.crc32(repr((list(now), list(new), chunk_bytes)).encode())


def _told(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"({shown}{', …' if len(ranks) > 8 else ''})"
