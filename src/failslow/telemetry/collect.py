"""All samplers of a node together, their history, and windows of it as plain values.

In: rank -> pid of the node's workers. Out: the body of the report that `runtime.duty_telemetry`
describes.

    collector = Collector(node_samplers(lambda: {3: 41822}, job="j1"), keep=600)
    collector.take(time.monotonic(), t=time.time())
    collector.report(since_t=None, until_t=None, interval_s=1.0)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failslow.telemetry.base import Sampler
from failslow.telemetry.cpu import CpuSampler
from failslow.telemetry.history import Floats, History, Window
from failslow.telemetry.net import ConnectionSampler, InterfaceSampler
from failslow.telemetry.nvml import Background, NvmlSampler
from failslow.telemetry.rdma import RdmaSampler

__all__ = ["Collector", "node_samplers"]

_POINTS = 120
_FEWEST_POINTS = 8
_MOST_BYTES = 190_000
"""Of a report as JSON: a message may hold 256 KiB, and the rest of it needs room."""
_DIGITS = 5
_STALE_S = 5.0


def node_samplers(
    workers: Callable[[], Mapping[int, int]],
    *,
    devices: Callable[[], Mapping[int, str]] = dict,
    job: str = "",
    root: Path = Path("/"),
    interval_s: float = 1.0,
) -> tuple[Sampler, ...]:
    """Every sampler there is. workers: rank -> pid; devices: rank -> UUID of its GPU, as far as it
    told; root: where /proc and /sys are; interval_s: at which they will be asked."""
    gpus = NvmlSampler(workers, devices=devices)
    return (
        CpuSampler(workers, job=job, root=root),
        InterfaceSampler(root=root),
        ConnectionSampler(workers, root=root),
        RdmaSampler(root=root),
        # it gives what it found the last time: that is as old as the samples are apart
        Background(gpus, what="NVML", stale_s=max(_STALE_S, 2.5 * interval_s)),
    )


class Collector:
    """Takes samples and keeps the last `keep`. One thread may take while another reads."""

    def __init__(self, samplers: Sequence[Sampler], *, keep: int) -> None:
        self._samplers = samplers
        self._history = History(keep)
        self._failed: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not to be had here, a sentence each."""
        found = [text for sampler in self._samplers for text in sampler.missing]
        return (*found, *self._failed.values())

    def peek(self) -> None:
        """What must be looked at more often than a sample is taken."""
        for sampler in self._samplers:
            if isinstance(sampler, CpuSampler):
                sampler.peek()

    def take(self, now_s: float, *, t: float) -> None:
        """A sample of everything; a sampler that fails is left out from then on."""
        values: dict[str, float] = {}
        for i, sampler in enumerate(self._samplers):
            if i in self._failed:
                continue
            try:
                values.update(sampler.sample(now_s))
            except Exception as error:
                name = type(sampler).__name__
                self._failed[i] = f"{name} failed and is left out: {error!r}"
        with self._lock:
            self._history.add(t, values)

    def window(self, since_t: float | None = None, until_t: float | None = None) -> Window:
        """What was sampled from `since_t` to `until_t`."""
        with self._lock:
            return self._history.window(since_t, until_t)

    def report(
        self, *, since_t: float | None, until_t: float | None, interval_s: float
    ) -> dict[str, Any]:
        """The window as plain values that fit into a message; see `runtime.duty_telemetry`."""
        window = self.window(since_t, until_t)
        points, left_out = _POINTS, 0
        while True:
            body = self._body(window.shrunk(points), since_t, until_t, interval_s)
            if left_out:
                body["missing"].append(f"{left_out} series, left out of a report too long")
            if len(json.dumps(body)) <= _MOST_BYTES:
                return body
            if points > _FEWEST_POINTS:
                points = max(_FEWEST_POINTS, points // 2)
            else:
                kept = sorted(window.series, key=lambda name: not name.startswith("rank/"))
                kept = kept[: len(kept) // 2]
                left_out += len(window.series) - len(kept)
                window = Window(window.t, {name: window.series[name] for name in kept})

    def _body(
        self, window: Window, since_t: float | None, until_t: float | None, interval_s: float
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "since_t": since_t,
            "until_t": until_t,
            "interval_s": interval_s,
            "t": [round(float(t), 3) for t in window.t],
            "series": {},
            "steady": {},
            "ranks": {},
            "gpus": self._gpus(),
            "addresses": self._addresses(),
            "missing": list(self.missing),
        }
        for name, series in window.series.items():
            place, short = body, name
            if name.startswith("rank/"):
                _, rank, short = name.split("/", 2)
                place = body["ranks"].setdefault(rank, {"series": {}, "steady": {}})
            low, high = float(np.nanmin(series)), float(np.nanmax(series))
            if low == high:
                place["steady"][short] = _rounded(low)
            else:
                place["series"][short] = _plain(series)
        return body

    def _gpus(self) -> dict[str, Any]:
        return {
            str(index): {"name": name, "ranks": nvml.ranks.get(index, [])}
            for nvml in self._of(NvmlSampler)
            for index, name in nvml.names.items()
        }

    def _addresses(self) -> list[str]:
        return sorted({a for net in self._of(ConnectionSampler) for a in net.addresses})

    def _of(self, kind: type[Any]) -> Iterator[Any]:
        for sampler in self._samplers:
            inner = sampler.sampler if isinstance(sampler, Background) else sampler
            if isinstance(inner, kind):
                yield inner


def _plain(series: Floats) -> list[float | None]:
    return [None if np.isnan(x) else _rounded(float(x)) for x in series]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
