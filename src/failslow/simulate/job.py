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
from failslow.simulate.noise import Noise, iteration_factors
from failslow.simulate.scenario import Scenario
from failslow.simulate.steps import StepBlock, StepModel

__all__ = ["FaultTruth", "SimulatedJob", "compute_s", "iteration_s", "simulate"]

Floats: TypeAlias = "NDArray[np.float64]"

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
    model = StepModel(scenario)
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
        block = StepBlock(model, first // model.block, last - first)
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
    model = StepModel(scenario.but(noise=Noise.none()))
    return float(StepBlock(model, 0, 1).durations(model.state(at_s))[0])


def compute_s(scenario: Scenario, at_s: float = 0.0) -> Floats:
    """(stages, replicas): seconds each worker computes in that iteration, noise left out."""
    model = StepModel(scenario.but(noise=Noise.none()))
    result: Floats = StepBlock(model, 0, 1).compute(model.state(at_s))[0]
    return result


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
