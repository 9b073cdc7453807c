"""The measures of a probe from the telemetry its journal holds. Pure.

In: journal entries of kind "telemetry", which overlap in time. Out: one `NodeSeries` a node, and
the field study's measures:

    Measures(sm_utilisation_share=0.93, cnp_per_s=0.0, temperature_c=61.2, temperature_max_c=66.0,
             latency_cv_intra_node=0.04, latency_cv_inter_node=0.29)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.journal import JournalEntry
from failslow.localize.windows import NodeWindow, on_job_clock

__all__ = ["Measures", "NodeSeries", "Span", "measures", "node_series"]

Floats = NDArray[np.float64]
Span = tuple[float, float]
"""Epoch seconds, from and to."""
_FEWEST = 3
_RANK_SERIES = ("runqueue_cores", "throttled_cores", "stopped_share")
"""Of a worker: what keeps it from computing."""


@dataclass(slots=True)
class NodeSeries:
    """All that was sampled on a node, each time once."""

    node: str
    ranks: tuple[int, ...] = ()
    gpus: frozenset[int] = frozenset()
    """Those workers were seen on; empty: nobody knows, so all."""
    values: dict[str, dict[float, float]] = field(default_factory=dict)
    """Series by name, that of a worker as "rank/3/runqueue_cores": {epoch seconds: value}."""

    def take(self, window: NodeWindow) -> None:
        """One report."""
        self.ranks = tuple(sorted({*self.ranks, *window.ranks}))
        mine = [gpu for rank in window.ranks for gpu in window.gpus(rank)]
        self.gpus = self.gpus | frozenset(mine)
        for prefix in ("gpu/", "rdma/", "link/"):
            for name in window.names(prefix):
                self._add(name, window.t, window.series(name))
        for rank in window.ranks:
            for name in _RANK_SERIES:
                self._add(f"rank/{rank}/{name}", window.t, window.of_rank(rank, name))

    def of(self, name: str) -> Floats:
        """The values of a series, in the order of time."""
        found = self.values.get(name, {})
        return np.array([found[t] for t in sorted(found)])

    def split(self, name: str, spans: Sequence[Span], *, of: Span) -> tuple[Floats, Floats]:
        """The values of a series within the spans, and those in the rest of `of`."""
        times = np.array(sorted(self.values.get(name, {})))
        within = np.zeros(len(times), dtype=bool)
        for begin_t, end_t in spans:
            within |= (times > begin_t) & (times <= end_t)
        rest = (times > of[0]) & (times <= of[1]) & ~within
        return self.of(name)[within], self.of(name)[rest]

    def names(self, prefix: str, what: str) -> list[str]:
        """Series `prefix…/what`."""
        return [n for n in self.values if n.startswith(prefix) and n.endswith(f"/{what}")]

    def _add(self, name: str, t: Floats, x: Floats | None) -> None:
        if x is None or x.shape != t.shape:
            return
        kept = np.isfinite(t) & np.isfinite(x)
        if kept.any():
            self.values.setdefault(name, {}).update(
                zip(t[kept].tolist(), x[kept].tolist(), strict=True)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Fields of `ProbeResult`, None where the machine has none to give."""

    sm_utilisation_share: float | None = None
    cnp_per_s: float | None = None
    temperature_c: float | None = None
    temperature_max_c: float | None = None
    latency_cv_intra_node: float | None = None
    latency_cv_inter_node: float | None = None


def node_series(entries: Iterable[JournalEntry]) -> dict[str, NodeSeries]:
    """{node: all that was sampled there}, by the job's clock."""
    nodes: dict[str, NodeSeries] = {}
    early: dict[str, list[Mapping[str, Any]]] = {}
    """Reports from before a node's clock was known."""
    for entry in entries:
        if entry.kind != "telemetry" or not isinstance(entry.record, Mapping):
            continue
        # a line's own "t" is that of writing it; the window's stands under another name
        body = {**entry.record, "t": entry.record.get("telemetry_t", ())}
        node, ahead_s = str(body.get("node", "")), body.get("ahead_s", 0.0)
        waiting = early.setdefault(node, [])
        if isinstance(ahead_s, int | float):
            for one in waiting:
                _take(nodes, on_job_clock(one, ahead_s))
            waiting.clear()
            _take(nodes, body)
        else:
            waiting.append(body)
    for one in (one for waiting in early.values() for one in waiting):
        _take(nodes, one)
    return nodes


def _take(nodes: dict[str, NodeSeries], body: Mapping[str, Any]) -> None:
    window = NodeWindow.of(body)
    nodes.setdefault(window.node, NodeSeries(window.node)).take(window)


def measures(nodes: Iterable[NodeSeries]) -> Measures:
    """Over all nodes and times."""
    nodes = list(nodes)
    heat = list(_of_gpus(nodes, "temperature_c"))
    return Measures(
        sm_utilisation_share=_mean(list(_of_gpus(nodes, "sm_share"))),
        cnp_per_s=_cnp_per_s(nodes),
        temperature_c=_mean(heat),
        temperature_max_c=max((float(x.max()) for x in heat), default=None),
        latency_cv_intra_node=_variation([node.of("link/intra/rtt_s") for node in nodes]),
        latency_cv_inter_node=_variation([node.of("link/inter/rtt_s") for node in nodes]),
    )


def _of_gpus(nodes: Sequence[NodeSeries], what: str) -> Iterator[Floats]:
    for node in nodes:
        for name in node.names("gpu/", what):
            index = name.split("/")[1]
            if not node.gpus or (index.isdigit() and int(index) in node.gpus):
                yield node.of(name)


def _mean(parts: Sequence[Floats]) -> float | None:
    return float(np.concatenate(parts).mean()) if parts else None


def _cnp_per_s(nodes: Sequence[NodeSeries]) -> float | None:
    ports = [node.of(name) for node in nodes for name in node.names("rdma/", "cnp_handled_per_s")]
    return sum(float(port.mean()) for port in ports) if ports else None


def _variation(parts: Sequence[Floats]) -> float | None:
    """Standard deviation over mean, of the times of all nodes; a node that is further away than
    others varies no more for that."""
    own = [x / x.mean() for x in parts if len(x) >= _FEWEST and x.mean() > 0]
    return float(np.concatenate(own).std()) if own else None
