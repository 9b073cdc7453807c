"""Who slowed a simulated job: what the workers' computation and the job's pace tell together.

In: a `SimulatedJob` and an episode of its analysis. Out: a `Blame`. A worker whose computation
takes 10 % longer in the episode than outside it is slow: alone on its node it is a device, with
all others of the node the host. What slow computation does not explain is the network.

    blame(job, analysis, episode).cause       # "GPU"
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.records import Culprit, Episode, JobAnalysis
from failslow.simulate.job import SimulatedJob

__all__ = ["Blame", "Cause", "blame"]

Cause: TypeAlias = Literal["CPU", "GPU", "network", "network and GPU"]
Floats: TypeAlias = "NDArray[np.float64]"

_SLOW = 1.10
_PARTS, _LEAST = 20, 5
"""An episode is looked at in up to so many parts of at least so many iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The cause of an episode, and the workers whose computation is slow, the slowest first."""

    cause: Cause
    culprits: tuple[Culprit, ...]
    """Each by the first rank of the worker."""


def blame(job: SimulatedJob, analysis: JobAnalysis, episode: Episode) -> Blame:
    """The cause of `episode`: of all that is slow in any part of it, as faults come and go."""
    outside = np.ones(len(job.series), dtype=np.bool_)
    for other in analysis.fail_slows:
        outside[other.first_index : other.last_index + 1] = False
    usual = _usual(job.worker_compute_s, outside)
    first, last = episode.first_index, episode.last_index + 1
    parts = max(1, min(_PARTS, (last - first) // _LEAST))
    cuts = np.linspace(first, last, parts + 1).astype(int)
    ratio, unexplained = np.ones(usual.shape), 0.0
    for begin, end in pairwise(cuts.tolist()):
        compute = np.median(job.worker_compute_s[begin:end], axis=0) / usual
        slowdown = np.median(job.series.duration_s[begin:end]) / episode.baseline_s
        ratio = np.maximum(ratio, compute)
        unexplained = max(unexplained, slowdown / max(1.0, float(compute.max())))
    slow = ratio >= _SLOW
    network = unexplained >= _SLOW
    cause: Cause = "network and GPU" if network else "GPU"
    if not slow.any():
        cause = "network"
    elif not network and _whole_node(job, slow):
        cause = "CPU"
    return Blame(cause=cause, culprits=_culprits(job, ratio, slow))


def _usual(compute_s: NDArray[np.float32], outside: NDArray[np.bool_]) -> Floats:
    """(stages, replicas): of each worker outside episodes; with none, of its stage's median."""
    if outside.any():
        return np.median(compute_s[outside], axis=0).astype(np.float64)
    peers = np.median(np.median(compute_s, axis=0), axis=1, keepdims=True).astype(np.float64)
    return np.repeat(peers, compute_s.shape[2], axis=1)


def _whole_node(job: SimulatedJob, slow: NDArray[np.bool_]) -> bool:
    """Whether a node with several workers has only slow ones."""
    workload, cluster = job.scenario.workload, job.scenario.cluster
    if workload.ranks_per_worker >= cluster.devices_per_node:
        return False
    node = cluster.node_of(np.arange(slow.size) * workload.ranks_per_worker)
    total, slow_ones = np.bincount(node), np.bincount(node, weights=slow.ravel())
    return bool(np.any((slow_ones == total) & (total > 1)))


def _culprits(job: SimulatedJob, ratio: Floats, slow: NDArray[np.bool_]) -> tuple[Culprit, ...]:
    each = job.scenario.workload.ranks_per_worker
    found = [
        Culprit(rank=int(worker) * each, what="compute", slowdown=float(ratio.flat[worker]))
        for worker in np.flatnonzero(slow)
    ]
    return tuple(sorted(found, key=lambda culprit: -culprit.slowdown))
