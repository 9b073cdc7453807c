"""Results of a script as run_script would give them, for made-up jobs with made-up culprits.

In: a script, places, culprits, noise. Out: results with the shape and the books of real ones; the
figures are of an idle 2-core machine (CPU) and of an H100's data sheet (GPU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from failslow.localize.script import Script, WorkerPlace, is_cpu

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Culprits:
    """What is slow by which factor. `wait` and `hosts` are of a host's processor."""

    devices: Mapping[int, float] = field(default_factory=dict)
    hosts: Mapping[str, float] = field(default_factory=dict)
    """Node: its processor and memory, for everything that runs there."""
    crowded: Mapping[str, float] = field(default_factory=dict)
    """Node: its cores are shared with others."""
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    out: Mapping[str, float] = field(default_factory=dict)
    into: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Lab:
    """Makes results."""

    workers: Sequence[WorkerPlace]
    noise: float = 0.0
    """Standard deviation of each sample, over its mean."""
    seed: int = 0
    crowd: bool = True
    """CPU results carry the books of the scheduler."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.places = {worker.rank: worker for worker in self.workers}

    def run(self, script: Script, culprits: Culprits | None = None) -> list[Result]:
        """All ranks' results of a script."""
        culprits = culprits or Culprits()
        results: list[Result] = []
        for index, stage in enumerate(script):
            for rank in stage.get("ranks", ()):
                about = {"stage": index, "rank": rank, "error": ""}
                results += [{**about, **r} for r in self._compute(stage, rank, culprits)]
            for sender, receiver in stage.get("pairs", ()):
                about = {"do": "p2p", "stage": index, "rank": sender, "peer": receiver}
                about |= {"by": receiver, "error": ""}
                transfers = self._transfer(stage, sender, receiver, culprits)
                results += [{**about, **r} for r in transfers]
        return [results[i] for i in self.random.permutation(len(results))]

    def _compute(self, stage: Mapping[str, Any], rank: int, culprits: Culprits) -> list[Result]:
        place = self.places[rank]
        on_cpu = is_cpu(place.device)
        host = culprits.hosts.get(place.node, 1.0)
        crowd = culprits.crowded.get(place.node, 1.0)
        if stage["do"] == "gemm":
            # a host's slowness is its devices' as well, where the processor is the device
            slow = culprits.devices.get(rank, 1.0) * host
            about = {"do": "gemm", "dtype": stage["dtype"], "size": stage["size"]}
            return [{**about, **self.timed(1e-3 * slow, 40, crowd if on_cpu else None)}]
        own = host * (culprits.devices.get(rank, 1.0) if on_cpu else 1.0)
        return [
            {"do": "host", "what": what, **self.timed(base_s * own, 20, crowd if on_cpu else None)}
            for what, base_s in (("core", 1e-4), ("memory", 3e-3))
        ]

    def _transfer(
        self, stage: Mapping[str, Any], sender: int, receiver: int, culprits: Culprits
    ) -> list[Result]:
        here, there = self.places[sender], self.places[receiver]
        slow = max(
            culprits.links.get((here.node, there.node), 1.0),
            culprits.out.get(here.node, 1.0),
            culprits.into.get(there.node, 1.0),
        )
        return [
            {"size_bytes": size, **self.timed(2e-4 + size * slow / 125e6, stage["repeats"], None)}
            for size in stage["sizes_bytes"]
        ]

    def timed(self, mean_s: float, count: int, crowd: float | None) -> Result:
        """`summarize` of that many noisy samples; crowd: wall over running time, with books."""
        samples = mean_s * np.maximum(0.2, 1.0 + self.noise * self.random.standard_normal(count))
        cpu_s = float(samples.sum())
        if crowd is not None:
            samples = samples * crowd
        ordered = np.sort(samples)
        middle_s = float(np.median(ordered))
        result: Result = {
            "seconds": float(ordered[: max(1, count - max(1, count // 10))].mean()),
            "min_s": float(ordered[0]),
            "median_s": middle_s,
            "mad_s": float(np.median(np.abs(ordered - middle_s))),
            "repeats": count,
        }
        if crowd is not None:
            wall_s = float(samples.sum())
            result |= {"wall_s": wall_s, "cpu_s": cpu_s, "queued_s": wall_s - cpu_s}
            result["throttled_s"] = 0.0
        return result
