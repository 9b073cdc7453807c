"""The steps of a job, in whatever state it is: computation, transfers, reduction -> seconds.

In: a `Scenario`, at what level each of its faults acts. Out: for a block of iterations their
durations and what each worker computed, by the exact pipeline recurrence, every iteration with its
own noise:

    model = StepModel(scenario)
    StepBlock(model, 0, 100).durations(model.state(300.0))      # (100,) seconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.simulate.costs import Costs, StepCosts
from failslow.simulate.faults import Effects
from failslow.simulate.noise import worker_noise
from failslow.simulate.pipeline import Pipeline
from failslow.simulate.scenario import Scenario
from failslow.simulate.schedule import Computation

__all__ = ["State", "StepBlock", "StepModel", "StepTimes"]

Floats: TypeAlias = "NDArray[np.float64]"
State: TypeAlias = tuple[float, ...]
Watch: TypeAlias = "Callable[[Any, int, Computation, Floats, Floats], None]"

_BLOCK_CASES = 16_384
"""Iterations times replicas worked out together, about."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When, in seconds after each iteration began."""

    stage_end_s: Floats
    """(stages, iterations, replicas): the last computation ends..."""
    reduced_s: Floats
    """...and (stages, iterations): the gradients of a stage are reduced."""


class StepModel:
    """What all blocks of a scenario share."""

    def __init__(self, scenario: Scenario, *, devices: Sequence[int] | None = None) -> None:
        """devices: the device at each position, where that is no matter of whole nodes."""
        self.scenario = scenario
        self.workload = w = scenario.workload
        self.counts = np.array(scenario.split or (w.micro_batches,) * w.dp)
        """(replicas,): micro-batches of each."""
        self.pipelines = [
            (
                Pipeline(w.schedule, stages=w.pp, micro_batches=m, chunks_per_stage=w.vpp),
                np.flatnonzero(self.counts == m) if scenario.split else slice(None),
            )
            for m in np.unique(self.counts).tolist()
        ]
        """Each with the replicas that run it."""
        self.block = max(1, _BLOCK_CASES // w.dp)
        self.healthy: State = (1.0,) * len(scenario.faults)
        self.cost_model = Costs(scenario.cluster, w, scenario.placement, devices=devices)
        self._known: dict[State, StepCosts] = {}

    def run(
        self,
        forward_s: Floats,
        backward_s: Floats,
        onward_s: Floats,
        back_s: Floats,
        *,
        watch: Watch | None = None,
    ) -> tuple[Floats, Floats]:
        """Of (chunks or links, iterations, replicas) seconds: when each (stage, iteration, replica)
        ends its last computation, and each (chunk, iteration, replica) its last backward.

        watch: called with the replicas, stage, computation, its starts and ends of each.
        """
        iterations = forward_s.shape[1]
        stage_end = np.empty((self.workload.pp, iterations, self.workload.dp))
        chunk_end = np.empty(forward_s.shape)
        for pipeline, mine in self.pipelines:
            given = [_flat(part[:, :, mine]) for part in (forward_s, backward_s, onward_s, back_s)]
            seen = None if watch is None else partial(watch, mine)
            times = pipeline.run(*given, watch=seen)
            for whole, part in ((stage_end, times.stage_end_s), (chunk_end, times.chunk_end_s)):
                whole[:, :, mine] = part.reshape(len(part), iterations, -1)
        return stage_end, chunk_end

    def state(self, time_s: float) -> State:
        """At what level each fault acts."""
        return tuple(fault.level(time_s) for fault in self.scenario.faults)

    def effects(self, state: State) -> Effects:
        """How slow everything is while the faults act like this."""
        effects = Effects.none(self.scenario.cluster)
        for fault, level in zip(self.scenario.faults, state, strict=True):
            if level > 1.0:
                fault.apply(level, effects)
        return effects

    def costs(self, state: State) -> StepCosts:
        """What things cost while the faults act like this."""
        if state not in self._known:
            self._known[state] = self.cost_model.step(self.effects(state))
        return self._known[state]


class StepBlock:
    """Iterations in a row, in whatever state is asked for."""

    def __init__(self, model: StepModel, number: int, iterations: int) -> None:
        self.model, self.iterations = model, iterations
        w = model.workload
        # drawn for a whole block, so that the job's length changes no iteration
        compute, network = worker_noise(
            model.scenario.noise, model.scenario.seed, number, (model.block, w.pp, w.dp)
        )
        self._compute_noise, self._network_noise = compute[:iterations], network[:iterations]
        self._durations: dict[State, Floats] = {}
        self._computes: dict[State, Floats] = {}
        self._times: dict[State, StepTimes] = {}

    def durations(self, state: State) -> Floats:
        """(iterations,) seconds, before the noise of whole iterations."""
        if state not in self._durations:
            self._work_out(state)
        return self._durations[state]

    def compute(self, state: State) -> Floats:
        """(iterations, stages, replicas) seconds of computation."""
        if state not in self._computes:
            self._work_out(state)
        return self._computes[state]

    def times(self, state: State) -> StepTimes:
        """When workers are done with what."""
        if state not in self._times:
            self._work_out(state)
        return self._times[state]

    @property
    def noise(self) -> tuple[Floats, Floats]:
        """(iterations, stages, replicas) factors on computation, (iterations,) on transfers."""
        return self._compute_noise, self._network_noise

    def transfers(self, state: State) -> tuple[Floats, Floats]:
        """(chunks - 1, iterations, replicas) seconds to pass a micro-batch on, and back."""
        costs, network = self.model.costs(state), self._network_noise[None, :, None]
        return costs.onward_s[:, None, :] * network, costs.back_s[:, None, :] * network

    def watch(self, state: State, watch: Watch) -> None:
        """Call `watch` for every computation."""
        forward, backward, _ = self._computing(state)
        self.model.run(forward, backward, *self.transfers(state), watch=watch)

    def _computing(self, state: State) -> tuple[Floats, Floats, Floats]:
        """(chunks, iterations, replicas) seconds of a micro-batch's forward, and backward, with
        exchanges; (iterations, stages, replicas) of all that a worker computes."""
        w, costs = self.model.workload, self.model.costs(state)
        stage = np.arange(w.pp * w.vpp) % w.pp
        noise = self._compute_noise.transpose(1, 0, 2)[stage]
        exchange = costs.exchange_s[:, None, :] * self._network_noise[None, :, None]
        forward = costs.forward_s[:, None, :] * noise
        backward = costs.backward_s[:, None, :] * noise
        compute = np.zeros((w.pp, *noise.shape[1:]))
        np.add.at(compute, stage, self.model.counts * (forward + backward))
        return forward + exchange, backward + exchange, compute.transpose(1, 0, 2)

    def _work_out(self, state: State) -> None:
        w, costs = self.model.workload, self.model.costs(state)
        forward, backward, self._computes[state] = self._computing(state)
        stage_end, chunk_end = self.model.run(forward, backward, *self.transfers(state))
        reduced = self._reduce(chunk_end, backward, costs, stage_end.max(axis=2))
        self._times[state] = StepTimes(stage_end, reduced)
        gather_s = costs.gather_s.max() * self._network_noise
        self._durations[state] = reduced.max(axis=0) + w.optimizer_ms * 1e-3 + gather_s

    def _reduce(
        self, chunk_end: Floats, backward: Floats, costs: StepCosts, stage_end: Floats
    ) -> Floats:
        """(stages, iterations): when each stage has its reduced gradients.

        Overlapped, the gradients of a chunk come in buckets, evenly over its last backward; a
        bucket is reduced when all replicas have it and the bucket before is done.
        """
        w = self.model.workload
        if w.dp == 1:
            return stage_end
        buckets = w.gradient_buckets if w.overlap_gradients else 1
        free = np.zeros_like(stage_end)
        for chunk in reversed(range(w.pp * w.vpp)):
            stage = chunk % w.pp
            each_s = costs.reduce_s[chunk] / buckets * self._network_noise
            for bucket in range(buckets):
                if w.overlap_gradients:
                    left = 1 - (bucket + 1) / buckets
                    ready = (chunk_end[chunk] - left * backward[chunk]).max(axis=1)
                else:
                    ready = stage_end[stage]
                np.maximum(free[stage], ready, out=free[stage])
                free[stage] += each_s
        return np.maximum(free, stage_end)


def _flat(values: Floats) -> Floats:
    """(chunks, iterations, replicas) -> (chunks, cases)."""
    chunks, iterations, replicas = values.shape
    return np.ascontiguousarray(values.reshape(chunks, iterations * replicas))
