"""A graph of what waits for what -> when everything ends, for many cases at once.

In: edges between nodes, once; then a duration of each node in each case. Out: when each node
ends, if it starts as soon as all it waits for has ended. Nodes of one level (equal longest way
from a start) are worked out together, so the cost is that of the numpy calls of a level.

    graph = Graph(3, before=[0, 1], after=[2, 2])
    graph.ends(np.array([[1.0], [2.0], [0.5]]))        # [[1.0], [2.0], [2.5]]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["CycleError", "Graph"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FEW = 4
"""Up to so many predecessors are compared one after another, more by one reduction."""


class CycleError(ValueError):
    """Some nodes wait for each other."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Nodes of one level with equally few predecessors, or any number: places low..high-1."""

    low: int
    high: int
    few: Ints | None
    """(predecessors, nodes) places to look at."""
    many: Ints
    """Places, node after node..."""
    offsets: Ints
    """...and where those of each node begin."""


class Graph:
    """`before[i]` must have ended when `after[i]` starts. Raises CycleError."""

    def __init__(self, nodes: int, before: ArrayLike, after: ArrayLike) -> None:
        self.nodes = nodes
        edges = np.unique(np.asarray(after, np.int64) * nodes + np.asarray(before, np.int64))
        after, before = np.divmod(edges, nodes) if nodes else (edges, edges)
        level = _levels(nodes, before, after)
        count = np.bincount(after, minlength=nodes)
        self._order = np.lexsort((count, level))
        self._place: Ints = np.empty(nodes, dtype=np.int64)
        self._place[self._order] = np.arange(nodes)
        self._blocks = self._cut(level, count, before, after)

    def ends(self, durations: Floats) -> Floats:
        """When each node ends in each case: (nodes, cases), from durations of that shape."""
        return self._by_level(durations)[self._place]

    def last_end(self, durations: Floats) -> Floats:
        """When all is done in each case: (cases,), from durations (nodes, cases)."""
        result: Floats = self._by_level(durations).max(axis=0)
        return result

    def _by_level(self, durations: Floats) -> Floats:
        own = durations[self._order]
        ends = np.empty_like(own)
        for block in self._blocks:
            row = slice(block.low, block.high)
            if block.few is None:
                start = np.maximum.reduceat(ends[block.many], block.offsets, axis=0)
            elif len(block.few):
                start = ends[block.few[0]]
                for places in block.few[1:]:
                    np.maximum(start, ends[places], out=start)
            else:
                ends[row] = own[row]
                continue
            np.add(start, own[row], out=ends[row])
        return ends

    def _cut(self, level: Ints, count: Ints, before: Ints, after: Ints) -> list[_Block]:
        order = self._order
        by_place = np.argsort(self._place[after], kind="stable")
        sources = self._place[before[by_place]]
        ends_at = np.cumsum(count[order])
        kind = np.where(count[order] <= _FEW, count[order], _FEW + 1)
        cuts = np.flatnonzero(np.diff(level[order]) | np.diff(kind)) + 1
        blocks = []
        for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), self.nodes], strict=True):
            first = int(ends_at[low - 1]) if low else 0
            mine = sources[first : int(ends_at[high - 1])]
            few = None
            if kind[low] <= _FEW:
                few = np.ascontiguousarray(mine.reshape(high - low, int(kind[low])).T)
            offsets = np.concatenate(([0], ends_at[low : high - 1] - first))
            blocks.append(_Block(low, high, few, mine, offsets.astype(np.int64)))
        return blocks


def _levels(nodes: int, before: Ints, after: Ints) -> Ints:
    """Longest way to each node; all nodes of a level are found together."""
    by_source = np.argsort(before, kind="stable")
    targets = after[by_source]
    begins = np.searchsorted(before[by_source], np.arange(nodes + 1))
    waiting = np.bincount(after, minlength=nodes)
    level = np.zeros(nodes, dtype=np.int64)
    ready = np.flatnonzero(waiting == 0)
    done, depth = 0, 0
    while len(ready):
        level[ready] = depth
        done += len(ready)
        depth += 1
        counts = begins[ready + 1] - begins[ready]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        reached = targets[np.repeat(begins[ready], counts) + within]
        freed, times = np.unique(reached, return_counts=True)
        waiting[freed] -= times
        ready = freed[waiting[freed] == 0]
    if done < nodes:
        raise CycleError(f"{nodes - done} of {nodes} nodes wait for each other")
    return level
