"""What pauses measured: who sends to whom how fast, and when training stood still for it.

In: records of kind "validation" (made in `pipeline.inquiry`):

    {"episode":"e1745735301","why":"suspects","ok":true,"reason":"","step":845,"pause_s":1.9,
     "results":[{"do":"p2p","rank":1,"peer":4,"size_bytes":16777216,"seconds":0.021,"error":""},…]}

Out: `Pause`s, each with `LinkTime`s: one a directed pair of nodes and a size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["LinkTime", "Pause", "PauseBook"]


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
    usual_s: float
    """The same link in the reference of healthy times; without one, the median of these links."""
    against: str
    """Which of both: "the reference", "the median link"."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, latency included."""
        return self.size_bytes / self.seconds

    @property
    def ratio(self) -> float:
        """Its time over the usual one."""
        return self.seconds / self.usual_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One validation."""

    t: float
    """When its results were there."""
    episode: str
    why: str
    """"reference", "suspects"; "" unknown."""
    ok: bool
    reason: str
    """Why it came to nothing."""
    step: int | None
    pause_s: float
    links: tuple[LinkTime, ...]


_Times = dict[tuple[int, int, int], list[float]]
"""By (sender, receiver, bytes)."""


@dataclass(slots=True)
class PauseBook:
    """Collects the validations of a journal."""

    _taken: list[tuple[float, Mapping[str, Any], _Times]] = field(default_factory=list)

    def take(self, record: Mapping[str, Any], t: float) -> None:
        """A validation; what of its results is no transfer, or failed, is left out."""
        results = record.get("results")
        times = _transfers(results if isinstance(results, list) else ())
        self._taken.append((t, record, times))

    def pauses(self, nodes: Mapping[int, str]) -> tuple[Pause, ...]:
        """In order. nodes: of each rank; one whose node nobody knows stands for itself."""
        found: list[Pause] = []
        reference: dict[tuple[str, str, int], float] = {}
        for t, record, times in self._taken:
            together = _by_node(times, nodes)
            why = str(record.get("why", ""))
            links = _links(together, {} if why == "reference" else reference)
            step, pause_s = record.get("step"), record.get("pause_s")
            found.append(
                Pause(
                    t=t,
                    episode=str(record.get("episode", "")),
                    why=why,
                    ok=record.get("ok", True) is not False,
                    reason=str(record.get("reason") or ""),
                    step=step if isinstance(step, int) else None,
                    pause_s=float(pause_s) if isinstance(pause_s, (int, float)) else 0.0,
                    links=links,
                )
            )
            if why == "reference" and links:
                reference = {(k.source, k.target, k.size_bytes): k.seconds for k in links}
        return tuple(found)


def _transfers(results: Iterable[Any]) -> _Times:
    found: _Times = defaultdict(list)
    for result in results:
        if not isinstance(result, Mapping) or result.get("do") != "p2p" or result.get("error"):
            continue
        rank, peer = result.get("rank"), result.get("peer")
        size_bytes, seconds = result.get("size_bytes"), result.get("seconds")
        if not (isinstance(rank, int) and isinstance(peer, int) and isinstance(size_bytes, int)):
            continue
        if isinstance(seconds, (int, float)) and seconds > 0 and size_bytes > 0:
            found[rank, peer, size_bytes].append(float(seconds))
    return found


_Nodes = dict[tuple[str, str, int], tuple[list[float], set[tuple[int, int]]]]


def _by_node(times: _Times, nodes: Mapping[int, str]) -> _Nodes:
    found: _Nodes = {}
    for (rank, peer, size_bytes), seconds in times.items():
        names = [nodes.get(one) or f"rank {one}" for one in (rank, peer)]
        all_s, pairs = found.setdefault((names[0], names[1], size_bytes), ([], set()))
        all_s.extend(seconds)
        pairs.add((rank, peer))
    return found


def _links(
    together: _Nodes, reference: Mapping[tuple[str, str, int], float]
) -> tuple[LinkTime, ...]:
    by_size: dict[int, list[float]] = defaultdict(list)
    for (_, _, size_bytes), (seconds, _) in together.items():
        by_size[size_bytes].append(median(seconds))
    return tuple(
        LinkTime(
            source=key[0],
            target=key[1],
            size_bytes=key[2],
            seconds=median(seconds),
            measured=len(seconds),
            ranks=tuple(sorted(pairs)),
            usual_s=reference.get(key, median(by_size[key[2]])),
            against="the reference" if key in reference else "the median link",
        )
        for key, (seconds, pairs) in sorted(together.items())
    )
