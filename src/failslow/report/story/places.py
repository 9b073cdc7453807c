"""Who changed places with whom (S3).

In: the cases and the controller's starts; a plan's placement. Out: the orders of the workers that
were in force, and a sentence for each move:

    moves((0, 1, 3, 2), (), {2: "gpu-1", 3: "gpu-2"})
    # ["rank 2 (gpu-1) and rank 3 (gpu-2) change places"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from failslow.report import units
from failslow.report.story.model import Case, Story

__all__ = ["decided_moves", "moves", "orders"]

_MOST = 8


def orders(
    cases: Sequence[Case], watch: Sequence[tuple[float, str, str]]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(t, the worker at each place) at each change; () with a new start: all at their own."""
    events: list[tuple[float, tuple[int, ...]]] = [(t, ()) for t, what, _ in watch
                                                   if what == "started"]  # fmt: skip
    for case in cases:
        for t, outcome in case.outcomes:
            plans = [d.plan for at, d in case.decisions if at <= t and d.plan is not None]
            if outcome.ok and plans and plans[-1].placement:
                events.append((t, plans[-1].placement))
    now: tuple[int, ...] = ()
    for t, order in sorted(events):
        if order != now:
            now = order
            yield t, order


def decided_moves(story: Story, t: float, placement: tuple[int, ...]) -> list[str]:
    """What `placement`, decided on at `t`, changes."""
    before = next((order for at, order in reversed(story.orders) if at < t), ())
    return moves(placement, before, {worker.rank: worker.node for worker in story.workers})


def moves(
    placement: tuple[int, ...], before: tuple[int, ...], nodes: Mapping[int, str]
) -> list[str]:
    """A sentence a move, of very many the first few. before: () each at its own place."""
    before = before or tuple(sorted(placement))
    moved = {rank: there for rank, there in zip(placement, before, strict=False) if rank != there}

    def name(rank: int) -> str:
        node = nodes.get(rank, "")
        return f"rank {rank} ({node})" if node else f"rank {rank}"

    texts: list[str] = []
    for rank, there in moved.items():
        if moved.get(there) != rank:
            texts.append(f"{name(rank)} takes the place of {name(there)}")
        elif rank > there:  # once a pair
            texts.append(f"{name(there)} and {name(rank)} change places")
    more = len(texts) - _MOST
    return texts[:_MOST] + ([f"and {units.plural(more, 'more change')}"] if more > 0 else [])
