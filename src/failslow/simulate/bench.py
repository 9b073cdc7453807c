"""What a simulated job's workers would measure in a pause: results for `localize.judge`.

In: a script of `localize.script`, a `Scenario`, a time of it. Out: results of the shape of
`localize.benchmarks.run_script`, by rank:

    places = worker_places(scenario)
    run_bench(plan(diagnosis, places), scenario, at_s=700.0, seed=1)
    # {5: [{"do":"gemm","rank":5,"dtype":"float16","size":8192,"seconds":0.0011,…}], …}

Matrix products feel the device's own slowness, host checks what others take of a node's processors,
transfers the links, by the simulator's own model of them; each sample is 2 % noisy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.localize.script import Script, WorkerPlace
from failslow.simulate.costs import Costs
from failslow.simulate.faults import CpuContention, Effects
from failslow.simulate.scenario import Scenario
from failslow.simulate.streams import node_name

__all__ = ["run_bench", "worker_places"]

Floats: TypeAlias = "NDArray[np.float64]"
Result: TypeAlias = dict[str, Any]

_NOISE = 0.02
_OVERHEAD_S = 2e-5
"""Of launching a product, of beginning a transfer."""
_GEMM_SHARE = 0.7
"""Of the peak that a large product reaches."""
_CHECKS = (("core", 1e-4), ("memory", 3e-3))
"""Host checks, and what they take on a healthy node."""
_CHECK_REPEATS = 20


def worker_places(scenario: Scenario) -> list[WorkerPlace]:
    """Where each worker is, by rank."""
    cluster = scenario.cluster
    models = [group.device for group in cluster.groups for _ in range(group.nodes)]
    each = cluster.devices_per_node
    return [
        WorkerPlace(
            rank=rank,
            node=node_name(rank // each),
            host=node_name(rank // each),
            device=models[rank // each],
            device_id=f"device{rank % each}",
        )
        for rank in range(cluster.ranks)
    ]


def run_bench(
    script: Script, scenario: Scenario, *, at_s: float, seed: int = 0
) -> dict[int, list[Result]]:
    """What each rank that takes part measures at that time."""
    bench = _Bench(scenario, at_s, seed)
    found: dict[int, list[Result]] = {}
    for index, stage in enumerate(script):
        for result in bench.stage(stage):
            by: int = result["by"] if "by" in result else result["rank"]
            found.setdefault(by, []).append({"stage": index, "error": "", **result})
    return found


class _Bench:
    """One pause."""

    def __init__(self, scenario: Scenario, at_s: float, seed: int) -> None:
        self._cluster = scenario.cluster
        self._random = np.random.default_rng([seed, round(1000 * at_s)])
        self._costs = Costs(scenario.cluster, scenario.workload)
        self._effects = Effects.none(scenario.cluster)
        hosts = Effects.none(scenario.cluster)
        for fault in scenario.faults:
            level = fault.level(at_s)
            if level > 1.0:
                fault.apply(level, hosts if isinstance(fault, CpuContention) else self._effects)
        self._host = hosts.device[:: scenario.cluster.devices_per_node]
        self._tflops = scenario.cluster.tflops_of_ranks()

    def stage(self, stage: Mapping[str, Any]) -> Iterator[Result]:
        """What all ranks measure in it."""
        if stage["do"] == "gemm":
            for rank in stage["ranks"]:
                yield self._gemm(stage, rank)
        elif stage["do"] == "host":
            for rank in stage["ranks"]:
                slow = float(self._host[rank // self._cluster.devices_per_node])
                for what, healthy_s in _CHECKS:
                    numbers = self._timed(healthy_s * slow, _CHECK_REPEATS)
                    yield {"do": "host", "rank": rank, "what": what, **numbers}
        elif stage["do"] == "p2p":
            yield from self._transfers(stage)

    def _gemm(self, stage: Mapping[str, Any], rank: int) -> Result:
        size = int(stage["size"])
        healthy_s = 2.0 * size**3 / (_GEMM_SHARE * 1e12 * float(self._tflops[rank]))
        each_s = healthy_s * float(self._effects.device[rank]) + _OVERHEAD_S
        repeats = max(int(stage["repeats"]), min(1000, round(float(stage["least_s"]) / each_s)))
        about = {"do": "gemm", "rank": rank, "dtype": stage["dtype"], "size": size}
        return {**about, **self._timed(each_s, repeats)}

    def _transfers(self, stage: Mapping[str, Any]) -> Iterator[Result]:
        pairs: Sequence[Sequence[int]] = stage["pairs"]
        sender, receiver = np.array(pairs, dtype=np.int64).T
        nodes = self._cluster.node_of(sender), self._cluster.node_of(receiver)
        for size in stage["sizes_bytes"]:
            took_s = self._costs.transfer_s(*nodes, float(size), self._effects) + _OVERHEAD_S
            for (here, there), mean_s in zip(pairs, took_s.tolist(), strict=True):
                about = {"do": "p2p", "rank": here, "peer": there, "by": there}
                yield {**about, "size_bytes": size, **self._timed(mean_s, int(stage["repeats"]))}

    def _timed(self, mean_s: float, count: int) -> Result:
        """That many noisy samples, summed up as the real benchmarks do."""
        noise = self._random.standard_normal(count)
        samples = np.sort(mean_s * np.maximum(0.2, 1.0 + _NOISE * noise))
        middle_s = float(np.median(samples))
        trimmed = samples[: max(1, count - max(1, count // 10))]
        return {
            "seconds": float(trimmed.mean()),
            "min_s": float(samples[0]),
            "median_s": middle_s,
            "mad_s": float(np.median(np.abs(samples - middle_s))),
            "repeats": count,
        }
