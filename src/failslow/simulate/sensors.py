"""What the samplers of a simulated job's nodes would show: bodies of telemetry reports.

In: a `Scenario`, a window of its time. Out: one body a node (those with a fault, and one without),
of the shape `runtime.duty_telemetry` describes: waiting for cores, clocks and heat of GPUs,
congestion notices of the network card.

    node_windows(scenario, since_s=500.0, until_s=700.0)[0]["series"]["gpu/3/sm_mhz"]

Heat is there on a healthy GPU too, now and then: it alone proves nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from failslow.simulate.faults import AnyFault, CpuContention, SlowDevice, Thermal
from failslow.simulate.scenario import Scenario
from failslow.simulate.streams import node_name

__all__ = ["faulty_nodes", "node_windows"]

_MOST = 120
_MHZ, _COOL_C, _HOT_C = 1980.0, 55.0, 87.0
_PORT = "rdma/mlx5_0:1"
_NOISE = 0.01


def faulty_nodes(scenario: Scenario, fault: AnyFault) -> list[int]:
    """The nodes a fault acts on."""
    each = scenario.cluster.devices_per_node
    if isinstance(fault, SlowDevice) or (isinstance(fault, Thermal) and fault.rank is not None):
        return [int(fault.rank or 0) // each]
    if isinstance(fault, (Thermal, CpuContention)):
        return [int(fault.node or 0)]
    if fault.link is not None:
        return list(fault.link)
    if fault.node is not None:
        return [fault.node]
    first = int(fault.leaf or 0) * scenario.cluster.nodes_per_leaf
    return list(range(first, min(first + scenario.cluster.nodes_per_leaf, scenario.cluster.nodes)))


def node_windows(
    scenario: Scenario, *, since_s: float, until_s: float, start_t: float = 0.0
) -> list[dict[str, Any]]:
    """The telemetry of the nodes concerned, sampled once a second or less often.

    start_t: epoch seconds of the job's start.
    """
    hit = {node for fault in scenario.faults for node in faulty_nodes(scenario, fault)}
    calm = next((n for n in range(scenario.cluster.nodes) if n not in hit), None)
    nodes = sorted(hit | ({calm} if calm is not None else set()))
    span_s = max(1.0, until_s - max(0.0, since_s))
    t = max(0.0, since_s) + np.linspace(0.0, span_s, min(_MOST, 1 + int(span_s)))
    return [_window(scenario, node, t, start_t) for node in nodes]


def _window(scenario: Scenario, node: int, t: Any, start_t: float) -> dict[str, Any]:
    each = scenario.cluster.devices_per_node
    random = np.random.default_rng([scenario.seed, node])
    ranks = range(node * each, (node + 1) * each)
    device = {rank: np.ones(len(t)) for rank in ranks}
    heat = {rank: np.full(len(t), _COOL_C) for rank in ranks}
    taken, marked = np.zeros(len(t)), np.zeros(len(t))
    throttled = {rank: np.zeros(len(t)) for rank in ranks}
    for fault in scenario.faults:
        if node not in faulty_nodes(scenario, fault):
            continue
        level = np.array([fault.level(float(s)) for s in t])
        if isinstance(fault, CpuContention):
            taken += level - 1.0
        elif isinstance(fault, (SlowDevice, Thermal)):
            for rank in ranks if fault.rank is None else (fault.rank,):
                device[rank] *= level
                if isinstance(fault, Thermal):
                    heat[rank] = np.where(level > 1.0, _HOT_C, heat[rank])
                    throttled[rank] = np.where(level > 1.0, 1.0, throttled[rank])
        else:
            marked += np.where(level > 1.0, 2000.0, 0.0)

    def noisy(values: Any) -> list[float]:
        spread = 1.0 + _NOISE * random.standard_normal(len(t))
        return [round(float(v), 4) for v in values * spread]

    series: dict[str, list[float]] = {
        "cpu/neighbour_cores": noisy(0.05 + 8.0 * taken),
        f"{_PORT}/cnp_handled_per_s": noisy(2.0 + marked),
    }
    for index, rank in enumerate(ranks):
        series[f"gpu/{index}/sm_mhz"] = noisy(_MHZ / device[rank])
        series[f"gpu/{index}/temperature_c"] = noisy(heat[rank])
        series[f"gpu/{index}/throttle_thermal"] = noisy(throttled[rank])
    waits = {"runqueue_cores": noisy(0.01 + np.minimum(0.9, taken))}
    kind = next(
        group.device
        for group, last in zip(
            scenario.cluster.groups,
            np.cumsum([g.nodes for g in scenario.cluster.groups]),
            strict=True,
        )
        if node < last
    )
    return {
        "node": node_name(node),
        "since_t": start_t + float(t[0]),
        "until_t": start_t + float(t[-1]),
        "interval_s": 1.0,
        "t": [start_t + float(s) for s in t],
        "series": series,
        "steady": {"cpu/steal_share": 0.0},
        "ranks": {
            str(rank): {"series": waits, "steady": {"throttled_cores": 0.0}} for rank in ranks
        },
        "gpus": {str(i): {"name": kind, "ranks": [rank]} for i, rank in enumerate(ranks)},
        "addresses": [],
        "missing": [],
    }
