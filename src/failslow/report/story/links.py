"""Measured transfers -> node by node: who sends to whom how fast.

In: the results of validations (journal kind "validation") and what verdicts measured. Out:
`LinkTime`s, one a directed pair of nodes and a size:

    {"do":"p2p","rank":1,"peer":4,"size_bytes":16777216,"seconds":0.021,"error":""}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["LinkBook", "LinkTime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """Transfers from one node to another, of one size: the median."""

    source: str
    target: str
    size_bytes: int
    seconds: float
    measured: int
    """Transfers."""
    ranks: tuple[tuple[int, int], ...]
    """(sender, receiver)."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, latency included."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0


class LinkBook:
    """Collects transfers of a journal."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], list[float]] = defaultdict(list)

    def take(self, results: Iterable[Any]) -> None:
        """Results of a pause; what is no transfer, or failed, is left out."""
        for result in results:
            if not isinstance(result, Mapping) or result.get("do") != "p2p" or result.get("error"):
                continue
            try:
                rank, peer = int(result["rank"]), int(result["peer"])
                size_bytes, seconds = int(result["size_bytes"]), float(result["seconds"])
            except (KeyError, TypeError, ValueError):
                continue
            if seconds > 0 and size_bytes > 0:
                self._found[rank, peer, size_bytes].append(seconds)

    def links(self, nodes: Mapping[int, str]) -> tuple[LinkTime, ...]:
        """By nodes of ranks; a rank whose node nobody knows stands for itself."""

        def name(rank: int) -> str:
            return nodes.get(rank) or f"rank {rank}"

        together: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        pairs: dict[tuple[str, str, int], set[tuple[int, int]]] = defaultdict(set)
        for (rank, peer, size_bytes), seconds in self._found.items():
            key = (name(rank), name(peer), size_bytes)
            together[key] += seconds
            pairs[key].add((rank, peer))
        return tuple(
            LinkTime(
                source=source,
                target=target,
                size_bytes=size_bytes,
                seconds=median(seconds),
                measured=len(seconds),
                ranks=tuple(sorted(pairs[source, target, size_bytes])),
            )
            for (source, target, size_bytes), seconds in sorted(together.items())
        )
