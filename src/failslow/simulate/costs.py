"""What the parts of a step cost on a cluster: computation by worker, links between workers.

In: a `Cluster`, a `Workload`, and how slow things are (`Effects`). Out: seconds per micro-batch,
transfer and reduction. A worker is a stage of a replica: its tp · cp ranks go at the pace of the
slowest. Rings go through the replicas in order, at the pace of their slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.simulate import collectives
from failslow.simulate.cluster import Cluster
from failslow.simulate.faults import Effects
from failslow.simulate.workload import Workload

__all__ = ["Costs", "StepCosts"]

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"

_GRADIENT_BYTES, _PARAMETER_BYTES = 4.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds, before noise."""

    forward_s: Floats
    """(chunks, replicas) for a micro-batch: on the device..."""
    backward_s: Floats
    exchange_s: Floats
    """...and for exchanges with other workers inside forward (backward: as much again)."""
    onward_s: Floats
    """(chunks - 1, replicas): to pass a micro-batch from chunk k to k + 1..."""
    back_s: Floats
    """...and its gradient from k + 1 to k."""
    reduce_s: Floats
    """(chunks,): to reduce the gradients of a chunk over the replicas."""
    gather_s: Floats
    """(stages,): to gather the updated parameters."""


@dataclass(frozen=True, slots=True)
class _Links:
    """Links between workers, each over all the nodes it spans: (spans, ...) from `a` to `b`."""

    a: Ints
    b: Ints


class Costs:
    """The costs of one workload on one cluster, whatever is slow."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        placement: Sequence[int] = (),
        *,
        devices: Sequence[int] | None = None,
    ) -> None:
        """placement: the node at each position of the job; () as they are numbered. devices: the
        device at each position, where it is not a matter of whole nodes."""
        self.cluster, self.workload = cluster, workload
        w = workload
        nodes = np.asarray(placement or range(cluster.nodes), dtype=np.int64)
        each = cluster.devices_per_node
        self.device = (nodes[:, None] * each + np.arange(each)).ravel()[: w.ranks]
        """(ranks,): the device at each position of the job."""
        if devices is not None:
            self.device = np.asarray(devices, dtype=np.int64)
        self._first = (
            np.arange(w.pp)[:, None] * w.dp + np.arange(w.dp)[None, :]
        ) * w.ranks_per_worker
        """(stages, replicas): first rank of each worker."""
        spans = np.arange(max(1, w.ranks_per_worker // each)) * each
        node = cluster.node_of(self.device[self._first + spans[:, None, None]])
        self._stage = np.arange(w.pp * w.vpp) % w.pp
        """(chunks,): where each chunk lives."""
        self._ring = _Links(node, np.roll(node, -1, axis=2))
        here, there = node[:, self._stage[:-1]], node[:, self._stage[1:]]
        self._onward, self._back = _Links(here, there), _Links(there, here)
        self._healthy = self._worst(1.0 / cluster.tflops_of_ranks())

    def step(self, effects: Effects) -> StepCosts:
        """The costs while these things are slow."""
        w = self.workload
        slow = self._worst(effects.device / self.cluster.tflops_of_ranks())
        chunks = len(self._stage)
        flop = np.array([w.forward_flop(last_chunk=c == chunks - 1) for c in range(chunks)])
        forward = flop[:, None] * slow[self._stage] / (w.efficiency * 1e12)
        forward += self._inside_s() * (slow / self._healthy)[self._stage]
        size = w.activation_bytes
        reduce_s, gather_s = self._replicas_s(effects)
        return StepCosts(
            forward_s=forward,
            backward_s=(3 if w.recompute else 2) * forward,
            exchange_s=self._experts_s(effects),
            onward_s=self._transfer_s(self._onward, size, effects),
            back_s=self._transfer_s(self._back, size, effects),
            reduce_s=reduce_s,
            gather_s=gather_s,
        )

    def _worst(self, by_device: Floats) -> Floats:
        """(stages, replicas): the largest value of each worker's devices."""
        w = self.workload
        by_rank = by_device[self.device]
        result: Floats = by_rank.reshape(w.pp, w.dp, w.ranks_per_worker).max(axis=2)
        return result

    def own_s(self, effects: Effects) -> Floats:
        """(stages, replicas, ranks of a worker): seconds each device computes a micro-batch, both
        ways, exchanges inside the worker left out."""
        w = self.workload
        last = w.pp * w.vpp - 1
        flop = np.zeros(w.pp)
        np.add.at(
            flop, self._stage, [w.forward_flop(last_chunk=c == last) for c in range(last + 1)]
        )
        slow = (effects.device / self.cluster.tflops_of_ranks())[self.device]
        each = slow.reshape(w.pp, w.dp, w.ranks_per_worker) / (w.efficiency * 1e12)
        own: Floats = (4 if w.recompute else 3) * flop[:, None, None] * each
        return own

    def transfer_s(self, sender: Ints, receiver: Ints, size: float, effects: Effects) -> Floats:
        """Seconds a message of `size` bytes takes from node to node, element by element."""
        return self._transfer_s(_Links(sender[None], receiver[None]), size, effects)

    def _inside_s(self) -> float:
        """Exchanges inside a worker in a forward, a micro-batch: they are as slow as its device."""
        w, c = self.workload, self.cluster
        size = 2.0 * w.micro_batch * w.sequence * w.hidden
        speed, latency = c.node_gbyte_per_s * 1e9, c.node_latency_us * 1e-6
        tensor = 2 * collectives.ring_all_reduce_s(
            size / w.cp, ranks=w.tp, bytes_per_s=speed, latency_s=latency
        )
        context = 0.0
        if w.cp > 1:
            if len(self._ring.a) > 1:
                speed, latency = c.network_gbyte_per_s * 1e9, c.network_latency_us * 1e-6
            context = collectives.ring_half_s(
                2 * size / w.tp, ranks=w.cp, bytes_per_s=speed, latency_s=latency
            )
        return w.layers_per_chunk * (tensor + context)

    def _experts_s(self, effects: Effects) -> Floats:
        """(chunks, replicas): dispatch and combine of a forward, at the ring's slowest link."""
        w = self.workload
        if w.ep == 1:
            return np.zeros((len(self._stage), w.dp))
        slowest, latency = self._group(effects)
        each = (
            2
            * w.layers_per_chunk
            * collectives.all_to_all_s(
                w.activation_bytes * w.experts_per_token,
                ranks=w.ep,
                bytes_per_s=slowest,
                latency_s=latency,
            )
        )
        return np.repeat(each[self._stage][:, None], w.dp, axis=1)

    def _replicas_s(self, effects: Effects) -> tuple[Floats, Floats]:
        w = self.workload
        if w.dp == 1:
            return np.zeros(len(self._stage)), np.zeros(w.pp)
        slowest, latency = self._group(effects)
        size = _GRADIENT_BYTES * w.chunk_parameters
        if w.distributed_optimizer:
            reduce = collectives.ring_half_s
        elif w.collective == "tree":
            reduce = collectives.tree_all_reduce_s
        else:
            reduce = collectives.ring_all_reduce_s
        reduce_s = reduce(size, ranks=w.dp, bytes_per_s=slowest, latency_s=latency)
        gather_s = np.zeros(w.pp)
        if w.distributed_optimizer:
            gather_s = w.vpp * collectives.ring_half_s(
                _PARAMETER_BYTES * w.chunk_parameters,
                ranks=w.dp,
                bytes_per_s=slowest,
                latency_s=latency,
            )
        return reduce_s[self._stage], gather_s

    def _group(self, effects: Effects) -> tuple[Floats, float]:
        """Of the replicas of each stage: bandwidth of the slowest link, and its latency."""
        c = self.cluster
        speed = self._bytes_per_s(self._ring, effects).min(axis=1)
        inside = bool((self._ring.a == self._ring.b).all())
        return speed, (c.node_latency_us if inside else c.network_latency_us) * 1e-6

    def _transfer_s(self, links: _Links, size: float, effects: Effects) -> Floats:
        if not links.a.size:
            return np.zeros(links.a.shape[1:])
        return collectives.transfer_s(
            size,
            bytes_per_s=self._bytes_per_s(links, effects),
            latency_s=self.cluster.network_latency_us * 1e-6,
        )

    def _bytes_per_s(self, links: _Links, effects: Effects) -> Floats:
        """Of each link, the slowest of the node pairs it runs over."""
        c, a, b = self.cluster, links.a, links.b
        slow = np.maximum(effects.node[a], effects.node[b])
        across = c.leaf_of(a) != c.leaf_of(b)
        uplink = np.maximum(effects.leaf[c.leaf_of(a)], effects.leaf[c.leaf_of(b)])
        slow = np.maximum(slow, np.where(across, uplink, 1.0))
        for (source, target), factor in effects.link.items():
            slow = np.where((a == source) & (b == target), np.maximum(slow, factor), slow)
        network = c.network_gbyte_per_s * 1e9 / np.where(across, c.oversubscription, 1.0) / slow
        speed: Floats = np.where(a == b, c.node_gbyte_per_s * 1e9, network).min(axis=0)
        return speed
