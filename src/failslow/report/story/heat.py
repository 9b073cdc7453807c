"""The numbers behind the heat map in words: what each metric is called, and its worst cells.

In: a `ProfileRound`. Out: `Cell`s, the furthest from their peers first.
"""

from __future__ import annotations

from dataclasses import dataclass

from failslow.report import units
from failslow.report.story.profiles import Metric, ProfileRound

__all__ = ["METRICS", "Cell", "worst_cells"]

METRICS: dict[Metric, tuple[str, str]] = {
    "own": ("own time", "time of its own before its calls, over the median of the same calls"),
    "healthy": ("own time before", "time of its own before its calls, over its healthy profile"),
    "late": ("lateness", "arrives later than the first of its group, seconds an iteration"),
    "transfer": ("transfer", "shortest time of its calls over the ranks, against like groups"),
}
"""Name and meaning of each."""
_TELLING = 0.1
"""A tenth off its peers is worth a word (design, profile)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One value of the heat map."""

    rank: int
    node: str
    column: str
    title: str
    """Of the metric."""
    value: float
    text: str
    excess: float
    """By how much of its peers' time, or of an iteration, it is too long."""


def worst_cells(taken: ProfileRound, *, most: int) -> list[Cell]:
    """The cells at least a tenth off, in all metrics but the one against healthy times."""
    found = []
    for metric, rows in taken.values.items():
        if metric == "healthy":
            continue
        for rank, node, row in zip(taken.ranks, taken.nodes, rows, strict=True):
            for column, value in zip(taken.columns, row, strict=True):
                if value is None:
                    continue
                late = metric == "late"
                excess = value / max(taken.iteration_s, 1e-9) if late else value - 1.0
                if excess < _TELLING:
                    continue
                found.append(
                    Cell(
                        rank=rank,
                        node=node,
                        column=column,
                        title=METRICS[metric][0],
                        value=value,
                        text=f"+{units.duration(value)}" if late else units.slowdown(value),
                        excess=excess,
                    )
                )
    found.sort(key=lambda cell: (-cell.excess, cell.rank))
    return found[:most]
