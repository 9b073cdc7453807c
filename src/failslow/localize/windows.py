"""Telemetry of one node around an onset, as its agent reported it.

In: the body of a report (`runtime.duty_telemetry`) with the node's name, also from a journal line
of kind "telemetry". Out: a `NodeWindow`, whose series are arrays.

    >>> node = NodeWindow.of({"node": "gpu-17", "t": [1.0, 2.0], "series": {"a": [0.5, None]},
    ...     "steady": {"b": 3.0}, "ranks": {"5": {"series": {}, "steady": {"c": 0.0}}}})
    >>> node.series("a"), node.series("b"), node.of_rank(5, "c"), node.series("d")
    (array([0.5, nan]), array([3., 3.]), array([0., 0.]), None)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeWindow", "on_job_clock"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NodeWindow:
    """A node's series over one window of time."""

    node: str
    t: Floats
    """Epoch seconds by the job's clock, shape (n,)."""
    body: Mapping[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> NodeWindow:
        """What is malformed counts as not there: it comes from another machine."""
        try:
            t = np.asarray(body.get("t", ()), dtype=np.float64)
        except (TypeError, ValueError):
            t = np.empty(0)
        return cls(str(body.get("node", "")), t if t.ndim == 1 else np.empty(0), body)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Workers it has series of."""
        return tuple(sorted(int(r) for r in self._part("ranks") if str(r).isdigit()))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its own, as its workers' connections show them."""
        found = self.body.get("addresses")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def missing(self) -> tuple[str, ...]:
        """What the node could not sample, a sentence each."""
        found = self.body.get("missing")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def gpus(self, rank: int) -> list[int]:
        """The GPUs NVML saw `rank` on."""
        found = []
        for index, about in self._part("gpus").items():
            ranks = about.get("ranks") if isinstance(about, Mapping) else None
            if str(index).isdigit() and isinstance(ranks, list) and rank in ranks:
                found.append(int(index))
        return found

    @property
    def gpu_numbers(self) -> list[int]:
        """The GPUs the node has, as far as NVML says."""
        return [int(index) for index in self._part("gpus") if str(index).isdigit()]

    def series(self, name: str) -> Floats | None:
        """A series of the node, shape (n,), NaN where unknown; None where there is none."""
        return self._find(self.body, name)

    def of_rank(self, rank: int, name: str) -> Floats | None:
        """A series of a worker, as `series`."""
        return self._find(self._part("ranks").get(str(rank)), name)

    def names(self, prefix: str) -> Iterator[str]:
        """Names of the node's series that begin so."""
        for part in ("series", "steady"):
            found = self.body.get(part)
            for name in found if isinstance(found, Mapping) else ():
                if str(name).startswith(prefix):
                    yield str(name)

    def _part(self, name: str) -> Mapping[str, Any]:
        part = self.body.get(name)
        return part if isinstance(part, Mapping) else {}

    def _find(self, place: Any, name: str) -> Floats | None:
        if not isinstance(place, Mapping):
            return None
        moving, steady = place.get("series"), place.get("steady")
        try:
            if isinstance(moving, Mapping) and name in moving:
                x = np.array([np.nan if v is None else float(v) for v in moving[name]])
                return x if x.shape == self.t.shape else None
            if isinstance(steady, Mapping) and name in steady:
                return np.full(len(self.t), float(steady[name]))
        except (TypeError, ValueError):
            pass
        return None


def on_job_clock(body: Mapping[str, Any], ahead_s: float | None) -> dict[str, Any]:
    """A report whose times are by its node's clock, by that of the job's iterations.

    ahead_s: by how much the node's clock is ahead; None unknown, and the times stay as they are.

    >>> on_job_clock({"since_t": None, "until_t": 122.5, "t": [121.0, 122.0]}, 120.0)
    {'since_t': None, 'until_t': 2.5, 't': [1.0, 2.0], 'ahead_s': 120.0}
    """
    moved = {**body, "ahead_s": ahead_s}
    if not ahead_s:
        return moved
    for name in ("since_t", "until_t"):
        if isinstance(body.get(name), int | float):
            moved[name] = round(body[name] - ahead_s, 3)
    t = NodeWindow.of(body).t
    if len(t):
        moved["t"] = [round(float(time_t) - ahead_s, 3) for time_t in t]
    return moved
