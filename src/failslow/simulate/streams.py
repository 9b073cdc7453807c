"""What the agents of a simulated job would report of its workers' calls: `RankProfile`s.

In: a `Scenario`, a time of it. Out: a profile of every worker over some iterations that begin then,
with the calls its place in the job makes, as localize compares those of live jobs:

    before = job_profiles(scenario, at_s=100.0)
    diagnose(job_profiles(scenario, at_s=700.0), before, episode="e", slowdown=1.4).suspects

Calls: exchanges between the shards of a worker, sends and receives of the pipeline, the experts'
exchange, the gradients' reduction, the norm over all workers, the gathering of parameters. A
worker's own time is what its device computes. Messages take both ends their transfer time, as
NCCL's do: a receive takes it even where the data could have come earlier, and a send is waited for,
as torch's schedules do. The shards of a worker have the same noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.records import CallCell, RankProfile
from failslow.simulate.scenario import Scenario
from failslow.simulate.schedule import Computation
from failslow.simulate.steps import StepBlock, StepModel

__all__ = ["job_profiles", "node_name"]

Floats: TypeAlias = "NDArray[np.float64]"

_NORM_S = 2e-5
"""What summing two numbers over all workers takes."""
_NORM_BYTES = 16
_GRADIENT_BYTES, _PARAMETER_BYTES = 4, 2
_LEAST_QUANTILE = 0.1


def node_name(node: int) -> str:
    """What a node of a simulated job is called."""
    return f"node{node}"


def job_profiles(
    scenario: Scenario,
    *,
    at_s: float,
    iterations: int = 8,
    window: int = 0,
    devices: Sequence[int] | None = None,
    places: int = 8,
    start_t: float = 0.0,
) -> list[RankProfile]:
    """A profile of each worker, by rank: of `iterations` that begin at `at_s`.

    window: another one has other noise. devices: the device (which is the worker's rank) at each
    position, where workers have changed places; None as they are numbered. places: sends and
    receives in an iteration that are told apart, as by `localize.digest`. start_t: epoch seconds
    of the job's start.
    """
    model = StepModel(scenario, devices=devices)
    block = StepBlock(model, window, min(iterations, model.block))
    return _Window(model, block, at_s, places).profiles(start_t + at_s)


class _Times(NamedTuple):
    """Of one call of one worker."""

    duration_s: float
    least_s: float
    wait_s: float


class _Message(NamedTuple):
    """Some of the sends or receives a worker makes in an iteration."""

    op: str
    peer_stage: int
    position: int
    calls: int
    times: _Times


@dataclass(frozen=True, slots=True)
class _Group:
    """A call of a worker with others, the same for all its shards."""

    label: str
    op: str
    size_bytes: int
    position: int
    calls: int
    """In an iteration."""
    overlap: float
    times: list[list[_Times]]
    """By stage and replica."""


class _Window:
    """The numbers of one window of iterations."""

    def __init__(self, model: StepModel, block: StepBlock, at_s: float, places: int) -> None:
        self.model, self.block, self.places = model, block, places
        self.workload, self.state = model.workload, model.state(at_s)
        self.costs, self.times = model.costs(self.state), block.times(self.state)
        self.device = model.cost_model.device.reshape(self.workload.pp, self.workload.dp, -1)
        """(stages, replicas, shards): the rank at each place."""
        self.duration_s = block.durations(self.state)

    def profiles(self, start_t: float) -> list[RankProfile]:
        """Of every worker."""
        w, count, device = self.workload, self.block.iterations, self.device.tolist()
        own_s, spread_s = self._own()
        exchanged = self._exchanged(own_s).tolist()
        messages, calls = self._messages(), list(self._with_replicas())
        norm = self._norm()
        cluster = self.model.scenario.cluster
        models = [group.device for group in cluster.groups for _ in range(group.nodes)]
        names = [node_name(node) for node in range(cluster.nodes)]
        everyone = tuple(sorted(self.device.ravel().tolist()))
        replicas = self.device.transpose(0, 2, 1).tolist()
        lines = self.device.transpose(1, 2, 0).tolist()
        pipes = [[tuple(line) for line in of_replica] for of_replica in lines]
        rings = [[tuple(ring) for ring in of_stage] for of_stage in replicas]
        iteration_s = float(np.median(self.duration_s))
        size = int(2 * w.micro_batch * w.sequence * w.hidden / w.cp)
        each = 4 * w.layers_per_chunk * w.vpp
        found = []
        for s, d in np.ndindex(w.pp, w.dp):
            shards = tuple(device[s][d])
            for i, rank in enumerate(shards):
                cells = []
                if len(shards) > 1:
                    took_s = exchanged[s][d][i]
                    times = _Times(took_s, took_s, took_s)
                    number = each * int(self.model.counts[d])
                    cells.append(
                        _cell(
                            shards, times, label="tp", op="allreduce_", size_bytes=size,
                            position=0, calls=number * count,
                        )
                    )  # fmt: skip
                for m in messages[s, d]:
                    peer = device[m.peer_stage][d][i]
                    cells.append(
                        _cell(
                            pipes[d][i], m.times, label="pp", op=m.op,
                            size_bytes=int(w.activation_bytes), position=m.position,
                            calls=m.calls * count, peer=peer,
                        )
                    )  # fmt: skip
                for c in calls:
                    group = rings[s][i]
                    if c.label == "ep":
                        first = d - d % w.ep
                        group = group[first : first + w.ep]
                    cells.append(
                        _cell(
                            group, c.times[s][d], label=c.label, op=c.op,
                            size_bytes=c.size_bytes, position=c.position, calls=c.calls * count,
                            overlap=c.overlap,
                        )
                    )  # fmt: skip
                if len(everyone) > 1:
                    cells.append(
                        _cell(
                            everyone, norm[s], label="world", op="allreduce_",
                            size_bytes=_NORM_BYTES, position=0, calls=count,
                        )
                    )  # fmt: skip
                node = rank // cluster.devices_per_node
                found.append(
                    RankProfile(
                        rank=rank,
                        node=names[node],
                        host=names[node],
                        device=models[node],
                        start_t=start_t,
                        end_t=start_t + float(self.duration_s.sum()),
                        iterations=count,
                        iteration_s=iteration_s,
                        compute_s=float(own_s[s, d, i]),
                        compute_spread_s=float(spread_s[s, d, i]),
                        cells=tuple(cells),
                    )
                )
        found.sort(key=lambda profile: profile.rank)
        return found

    # -- inside a worker ---------------------------------------------------------------------------

    def _own(self) -> tuple[Floats, Floats]:
        """(stages, replicas, shards): seconds a step each device computes, and their spread."""
        bare = self.model.cost_model.own_s(self.model.effects(self.state))
        bare = bare * self.model.counts[None, :, None]
        noise = self.block.noise[0]
        middle = np.median(noise, axis=0)
        spread = np.median(np.abs(noise - middle), axis=0)
        own = bare * middle[..., None] + self.workload.optimizer_ms * 1e-3
        return own, bare * spread[..., None]

    def _exchanged(self, own_s: Floats) -> Floats:
        """(stages, replicas, shards): seconds of an exchange between the shards of a worker; who is
        done early waits for the slowest."""
        w = self.workload
        whole = np.median(self.block.compute(self.state), axis=0)[..., None]
        calls = 4 * w.layers_per_chunk * w.vpp * self.model.counts[None, :, None]
        left: Floats = np.maximum(0.0, whole + w.optimizer_ms * 1e-3 - own_s) / calls
        return left

    # -- along the pipeline ------------------------------------------------------------------------

    def _messages(self) -> dict[tuple[int, int], list[_Message]]:
        """Of each (stage, replica), in the order of their positions."""
        w, found = self.workload, defaultdict[tuple[int, int], list[_Message]](list)
        if w.pp == 1:
            return found
        iterations, chunks = self.block.iterations, w.pp * w.vpp
        free: dict[tuple[int, int], Floats] = {}
        waits: dict[tuple[int, int, bool], list[Floats]] = defaultdict(list)
        passed: dict[tuple[int, int, bool], tuple[int, Any, Floats]] = {}
        onward, back = self.block.transfers(self.state)

        def watch(mine: Any, stage: int, c: Computation, start: Floats, end: Floats) -> None:
            number = int(self.model.counts[mine][0])
            idle = start - free.get((number, stage), 0.0)
            free[number, stage] = end
            need = c.needs(chunks)
            if need is None or need.chunk % w.pp == stage:
                return
            key = (number, stage, c.forward)
            transfer = onward[c.chunk - 1] if c.forward else back[c.chunk]
            passed[key] = (need.chunk % w.pp, mine, transfer[:, mine])
            waits[key].append(idle.reshape(iterations, -1))

        self.block.watch(self.state, watch)
        for (number, stage, forward), idle in sorted(waits.items(), key=lambda item: item[0][:2]):
            sender, mine, transfer = passed[number, stage, forward]
            took = np.maximum(np.stack(idle), transfer[None])
            replicas = np.arange(w.dp)[mine].tolist()
            # both ways may pass between the same two workers
            first = 0 if forward else len(took)
            for position, rows in _folds(len(took), self.places):
                received = [_Times(a, b, a) for a, b in zip(*_typical(took[rows]), strict=True)]
                sent = [_Times(a, b, a) for a, b in zip(*_typical(transfer[None]), strict=True)]
                calls = rows.stop - rows.start
                for d, got, gave in zip(replicas, received, sent, strict=True):
                    at = first + position
                    found[stage, d].append(_Message("recv_", sender, at, calls, got))
                    found[sender, d].append(_Message("send", stage, at, calls, gave))
        return found

    # -- with the replicas -------------------------------------------------------------------------

    def _with_replicas(self) -> Iterator[_Group]:
        """Calls of all replicas of a stage, or some of them."""
        w, network = self.workload, self.block.noise[1]
        if w.ep > 1:
            calls = 4 * w.layers_per_chunk * w.vpp * int(self.model.counts[0])
            each_s = self.costs.exchange_s[: w.pp] / (2 * w.layers_per_chunk)
            times = [[_plain(float(s)) for s in row] for row in each_s * float(np.median(network))]
            size = int(w.activation_bytes * w.experts_per_token)
            yield _Group("ep", "alltoall_base_", size, 0, calls, 0.0, times)
        if w.dp == 1:
            return
        end, reduced = self.times.stage_end_s, self.times.reduced_s
        whole = np.zeros((w.pp, 1, 1))
        np.add.at(whole, np.arange(w.pp * w.vpp) % w.pp, self.costs.reduce_s[:, None, None])
        behind = end.max(axis=2, keepdims=True) - end
        took, blocked = whole * network[None, :, None] + behind, reduced[..., None] - end
        op = "_reduce_scatter_base_" if w.distributed_optimizer else "allreduce_"
        size = int(_GRADIENT_BYTES * w.chunk_parameters * w.vpp)
        overlap = float(w.overlap_gradients)
        yield _Group("dp", op, size, 0, 1, overlap, _table(took, blocked))
        if w.distributed_optimizer:
            gather = self.costs.gather_s[:, None, None] * network[None, :, None]
            gather = np.broadcast_to(gather, end.shape)
            size = int(_PARAMETER_BYTES * w.chunk_parameters * w.vpp)
            yield _Group("dp", "_allgather_base_", size, 0, 1, 0.0, _table(gather, gather))

    def _norm(self) -> list[_Times]:
        """Of each stage: all wait for the stage whose gradients are reduced last."""
        reduced = self.times.reduced_s
        took = reduced.max(axis=0) - reduced + _NORM_S
        return [times[0] for times in _table(took[..., None], took[..., None])]


def _cell(
    group: tuple[int, ...],
    times: _Times,
    *,
    label: str,
    op: str,
    size_bytes: int,
    position: int,
    calls: int,
    peer: int | None = None,
    overlap: float = 0.0,
) -> CallCell:
    return CallCell(
        group=group,
        label=label,
        op=op,
        size_bytes=size_bytes,
        position=position,
        peer=peer,
        calls=calls,
        duration_s=times.duration_s,
        least_s=times.least_s,
        wait_s=times.wait_s,
        gap_s=0.0,
        overlap=overlap,
    )


def _folds(calls: int, places: int) -> Iterator[tuple[int, slice]]:
    """(ordinal of the first, which) of the calls that are told apart."""
    folds = min(calls, places)
    edges = [-(-fold * calls // folds) for fold in range(folds + 1)]
    for low, high in pairwise(edges):
        yield low, slice(low, high)


def _typical(took: Floats) -> tuple[list[float], list[float]]:
    """(calls, iterations, replicas) -> medians and lowest tenths by replica."""
    flat = took.reshape(-1, took.shape[-1])
    least = np.quantile(flat, _LEAST_QUANTILE, axis=0)
    return np.median(flat, axis=0).tolist(), least.tolist()


def _table(took: Floats, blocked: Floats) -> list[list[_Times]]:
    """(stages, iterations, replicas) of both -> by stage and replica."""
    middle, wait = np.median(took, axis=1).tolist(), np.median(blocked, axis=1).tolist()
    least = np.quantile(took, _LEAST_QUANTILE, axis=1).tolist()
    return [
        [_Times(*numbers) for numbers in zip(*rows, strict=True)]
        for rows in zip(middle, least, wait, strict=True)
    ]


def _plain(seconds: float) -> _Times:
    return _Times(seconds, seconds, seconds)
