"""A scenario -> the iterations of the job: their times, what each worker computed, and the truth.

In: a `Scenario`. Out: a `SimulatedJob` whose `series` goes to the detector as any log's does.
Every iteration is run through the exact pipeline recurrence with its own noise and whatever is
slow when it begins. Iterations are worked out in blocks: in one go for each state of the faults
that occurs in the block; then time decides, iteration by iteration, which state it was in. The
same iterations without any fault, noise and all, are the truth to compare with.

    job = simulate(Scenario().slow_device(rank=3, from_s=200, for_s=600, factor=1.4))
    analyze(job.series).episodes[0].start_step      # about job.truth[0].start_step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.records import StepSeries
from failslow.simulate.costs import Costs, StepCosts
from failslow.simulate.faults import Effects
from failslow.simulate.noise import Noise, iteration_factors, worker_noise
from failslow.simulate.pipeline import Pipeline
from failslow.simulate.scenario import Scenario

__all__ = ["FaultTruth", "SimulatedJob", "compute_s", "iteration_s", "simulate"]

Floats: TypeAlias = "NDArray[np.float64]"
State: TypeAlias = tuple[float, ...]

_BLOCK_CASES = 16_384
"""Iterations times replicas worked out together, about."""
_WORTH = 1.10
"""From this slowdown on a fault is one a detector must find (design, §1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTruth:
    """What a fault did to the job. Steps count from 1; `end_step` is the first step after it."""

    fault: str
    """Its kind in a scenario: "slow_device" ..."""
    cause: str
    what: str
    """"compute" or "communication"."""
    where: str
    from_s: float
    until_s: float | None
    """None: to the end of the job."""
    start_step: int | None
    """None: no iteration began while it acted."""
    end_step: int | None
    slowdown: float
    """Median of the iterations in which it acted (with all else that acted) over the same
    iterations without faults."""
    counts: bool
    """It is a fail-slow as the design defines one: from its first iteration to its last the
    median is slower by 10 % or more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedJob:
    """n iterations of a job that never ran."""

    scenario: Scenario
    series: StepSeries
    healthy_s: Floats
    """(n,): each iteration as it would have been without faults."""
    worker_compute_s: NDArray[np.float32]
    """(n, stages, replicas): what each worker computed, waiting left out."""
    truth: tuple[FaultTruth, ...]

    @property
    def slow(self) -> NDArray[np.bool_]:
        """(n,): iterations that faults made slower by 10 % or more."""
        result: NDArray[np.bool_] = self.series.duration_s >= _WORTH * self.healthy_s
        return result

    @property
    def lost_s(self) -> float:
        """Wall time faults cost, small slowdowns included."""
        return float((self.series.duration_s - self.healthy_s).sum())


def simulate(scenario: Scenario) -> SimulatedJob:
    """Run the scenario; equal scenarios give equal jobs."""
    model = _Model(scenario)
    n = scenario.iterations
    factor, spike = iteration_factors(scenario.noise, n, scenario.seed)
    pause = np.zeros(n)
    if scenario.checkpoint_every:
        pause[scenario.checkpoint_every - 1 :: scenario.checkpoint_every] = scenario.checkpoint_s
    duration_s, healthy_s = np.empty(n), np.empty(n)
    compute_s = np.empty((n, model.workload.pp, model.workload.dp), dtype=np.float32)
    levels = np.ones((n, len(scenario.faults)))
    now_s = 0.0
    for first in range(0, n, model.block):
        last = min(first + model.block, n)
        block = _Block(model, first // model.block, last - first)
        plain_s = block.durations(model.healthy)
        own, extra_s = factor[first:last], plain_s * spike[first:last] + pause[first:last]
        healthy_s[first:last] = plain_s * own + extra_s
        for i in range(first, last):
            state = model.state(now_s)
            levels[i] = state
            k = i - first
            duration_s[i] = block.durations(state)[k] * own[k] + extra_s[k]
            compute_s[i] = block.compute(state)[k]
            now_s += duration_s[i]
    series = _series(scenario, duration_s)
    return SimulatedJob(
        scenario=scenario,
        series=series,
        healthy_s=healthy_s,
        worker_compute_s=compute_s,
        truth=_truth(scenario, levels, duration_s / healthy_s),
    )


def iteration_s(scenario: Scenario, at_s: float = 0.0) -> float:
    """Seconds of an iteration that begins at `at_s`, noise left out."""
    model = _Model(scenario.but(noise=Noise.none()))
    return float(_Block(model, 0, 1).durations(model.state(at_s))[0])


def compute_s(scenario: Scenario, at_s: float = 0.0) -> Floats:
    """(stages, replicas): seconds each worker computes in that iteration, noise left out."""
    model = _Model(scenario.but(noise=Noise.none()))
    result: Floats = _Block(model, 0, 1).compute(model.state(at_s))[0]
    return result


class _Model:
    """What all blocks of a scenario share."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.workload = w = scenario.workload
        self.pipeline = Pipeline(
            w.schedule, stages=w.pp, micro_batches=w.micro_batches, chunks_per_stage=w.vpp
        )
        self.block = max(1, _BLOCK_CASES // w.dp)
        self.healthy: State = (1.0,) * len(scenario.faults)
        self._costs = Costs(scenario.cluster, w, scenario.placement)
        self._known: dict[State, StepCosts] = {}

    def state(self, time_s: float) -> State:
        """At what level each fault acts."""
        return tuple(fault.level(time_s) for fault in self.scenario.faults)

    def costs(self, state: State) -> StepCosts:
        """What things cost while the faults act like this."""
        if state not in self._known:
            effects = Effects.none(self.scenario.cluster)
            for fault, level in zip(self.scenario.faults, state, strict=True):
                if level > 1.0:
                    fault.apply(level, effects)
            self._known[state] = self._costs.step(effects)
        return self._known[state]


class _Block:
    """Iterations in a row, in whatever state is asked for."""

    def __init__(self, model: _Model, number: int, iterations: int) -> None:
        self.model, self.iterations = model, iterations
        w = model.workload
        # drawn for a whole block, so that the job's length changes no iteration
        compute, network = worker_noise(
            model.scenario.noise, model.scenario.seed, number, (model.block, w.pp, w.dp)
        )
        self._compute_noise, self._network_noise = compute[:iterations], network[:iterations]
        self._durations: dict[State, Floats] = {}
        self._computes: dict[State, Floats] = {}

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

    def _work_out(self, state: State) -> None:
        w, costs = self.model.workload, self.model.costs(state)
        stage = np.arange(w.pp * w.vpp) % w.pp
        # (chunks, iterations, replicas)
        noise = self._compute_noise.transpose(1, 0, 2)[stage]
        network = self._network_noise[None, :, None]
        exchange = costs.exchange_s[:, None, :] * network
        forward = costs.forward_s[:, None, :] * noise
        backward = costs.backward_s[:, None, :] * noise
        compute = np.zeros((w.pp, *noise.shape[1:]))
        np.add.at(compute, stage, w.micro_batches * (forward + backward))
        self._computes[state] = compute.transpose(1, 0, 2)
        forward, backward = forward + exchange, backward + exchange
        times = self.model.pipeline.run(
            _flat(forward),
            _flat(backward),
            _flat(costs.onward_s[:, None, :] * network),
            _flat(costs.back_s[:, None, :] * network),
        )
        shape = (-1, self.iterations, w.dp)
        stage_end = times.stage_end_s.reshape(shape).max(axis=2)
        reduced = self._reduce(times.chunk_end_s.reshape(shape), backward, costs, stage_end)
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


def _series(scenario: Scenario, duration_s: Floats) -> StepSeries:
    n = len(duration_s)
    return StepSeries(
        source=scenario.name,
        format="simulated",
        step=np.arange(1, n + 1),
        duration_s=duration_s,
        end_s=np.cumsum(duration_s),
        iterations=np.ones(n, dtype=np.int64),
        work=np.full(n, float(scenario.workload.tokens)),
        data_s=np.full(n, np.nan),
        run=np.zeros(n, dtype=np.int64),
        clocked=True,
    )


def _truth(scenario: Scenario, levels: Floats, slowdown: Floats) -> tuple[FaultTruth, ...]:
    truth = []
    for fault, level in zip(scenario.faults, levels.T, strict=True):
        acting = np.flatnonzero(level > 1.0)
        last = int(acting[-1]) if len(acting) else 0
        ends = len(acting) and last < len(level) - 1
        truth.append(
            FaultTruth(
                fault=fault.kind,
                cause=fault.cause,
                what=fault.what,
                where=fault.where,
                from_s=fault.from_s,
                until_s=None if fault.for_s is None else fault.from_s + fault.for_s,
                start_step=int(acting[0]) + 1 if len(acting) else None,
                end_step=last + 2 if ends else None,
                slowdown=float(np.median(slowdown[acting])) if len(acting) else 1.0,
                counts=bool(np.median(slowdown[acting[0] : last + 1]) >= _WORTH)
                if len(acting)
                else False,
            )
        )
    return tuple(truth)
