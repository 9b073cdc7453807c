"""The field study of FALCON (arXiv 2410.12588, §3), as scenarios: three populations of jobs.

In: a seed. Out: a `Scenario` for each of the 526 jobs. How many jobs are hit, by what and for how
long on average are the study's own figures; which job, which node, when and how hard is drawn.
Durations are log-normal, from half a minute to ten hours; a hit job has one or two fail-slows. How
hard a single fault hits the study does not tell but for the extremes: it is drawn between bounds.
Nor does it tell how long jobs run: that is solved for, so that the true completion times of the hit
jobs grow by its mean. Every fault is over before its job is: else less of it would be seen than the
mean duration promises.

    jobs = list(field_study(seed=1))
    jobs[0].population.name, jobs[0].scenario.faults     # ("1 node", ())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from failslow.simulate.cluster import Cluster, NodeGroup
from failslow.simulate.job import iteration_s
from failslow.simulate.scenario import Scenario
from failslow.simulate.workload import Workload

__all__ = ["POPULATIONS", "Population", "StudyJob", "field_study"]

Fate = Literal["CPU", "GPU", "network", "network and GPU"]
_Strike: TypeAlias = "Callable[[Scenario, float], Scenario]"
"""A fault of some factor, added to a scenario."""

_SHORTEST_S, _LONGEST_S = 30.0, 36_000.0
_SPREAD = 1.0
"""Standard deviation of log durations: one in ten lasts over twice the mean."""
_LINKS = 0.5
"""Share of the congestions that are of one link; the others are of all a node sends and gets."""
_AFTER = 0.05
"""Healthy time after the last fail-slow, over the usual length of a job."""
_LENGTH_HALVINGS = 40
_HALVINGS = 11
"""Of the range of factors: then the slowdown is right to about a percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Jobs of one size, with what the study found among them."""

    name: str
    jobs: int
    fates: tuple[tuple[Fate, int], ...]
    """How many jobs were hit by what."""
    mean_duration_s: float
    """Of a fail-slow."""
    jct_increase_pct: float
    """Mean over the hit jobs."""
    nodes: tuple[int, ...]
    """Sizes of the jobs."""
    slowdown: tuple[float, float]
    """Between these a fault slows the job, evenly in the logarithm."""
    workload: Workload
    """Of the smallest size; more nodes are more replicas."""

    @property
    def hit(self) -> int:
        """Jobs with a fail-slow."""
        return sum(number for _, number in self.fates)

    def scenario(self, nodes: int) -> Scenario:
        """A healthy job of this size."""
        workload = self.workload.model_copy(
            update={"dp": self.workload.dp * nodes // self.nodes[0]}
        )
        groups = (NodeGroup(nodes=nodes, device="A100", tflops=312),)
        return Scenario(cluster=Cluster(groups=groups, network_gbyte_per_s=25), workload=workload)


POPULATIONS = (
    Population(
        name="1 node",
        jobs=392,
        fates=(("CPU", 4), ("GPU", 2)),
        mean_duration_s=600,
        jct_increase_pct=11.79,
        nodes=(1,),
        slowdown=(1.2, 1.8),
        workload=Workload(layers=24, hidden=2048, vocabulary=0, tp=1, pp=1, dp=8, micro_batches=6),
    ),
    Population(
        name="4 nodes",
        jobs=107,
        fates=(("network", 42), ("CPU", 1)),
        mean_duration_s=1440,
        jct_increase_pct=15.45,
        nodes=(4,),
        slowdown=(1.2, 2.4),
        workload=Workload(layers=32, hidden=4096, vocabulary=0, tp=4, pp=2, dp=4, micro_batches=8),
    ),
    Population(
        name="64 to 128 nodes",
        jobs=27,
        fates=(("network", 13), ("network and GPU", 3)),
        mean_duration_s=4320,
        jct_increase_pct=34.59,
        nodes=(64, 96, 128),
        slowdown=(1.3, 7.0),
        workload=Workload(
            layers=80, hidden=8192, sequence=2048, tp=8, pp=8, dp=8, micro_batches=32
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJob:
    """One job of the study."""

    population: Population
    fate: Fate | None
    """What it is hit by; None for a healthy job."""
    scenario: Scenario


def field_study(seed: int, populations: Sequence[Population] = POPULATIONS) -> Iterator[StudyJob]:
    """The jobs of all populations; equal seeds give equal studies."""
    for place, population in enumerate(populations):
        rng = np.random.default_rng([seed, place])
        fates: list[Fate | None] = [f for f, number in population.fates for _ in range(number)]
        fates += [None] * (population.jobs - len(fates))
        rng.shuffle(fates)
        draws = _draws(population, rng)
        plans = [_plan(fate, population, draws, rng) for fate in fates]
        length_s = _length_s([plan for plan in plans if plan.blows], population.jct_increase_pct)
        healthy_s = {n: iteration_s(population.scenario(n)) for n in population.nodes}
        for number, (fate, plan) in enumerate(zip(fates, plans, strict=True), start=1):
            work_s = max(length_s, plan.needed_s(length_s))
            scenario = population.scenario(plan.nodes).but(
                name=f"{population.name}, job {number}",
                iterations=math.ceil(work_s / healthy_s[plan.nodes]),
                seed=int(rng.integers(2**32)),
            )
            begin_s = plan.before * length_s
            for blow in plan.blows:
                assert fate is not None
                scenario = _strike(scenario, fate, replace(blow, from_s=begin_s), rng)
                begin_s += blow.for_s + plan.between * length_s
            yield StudyJob(population=population, fate=fate, scenario=scenario)


@dataclass(frozen=True, slots=True)
class _Blow:
    from_s: float
    for_s: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is drawn of a job before it is known how long jobs run."""

    nodes: int
    blows: tuple[_Blow, ...]
    before: float
    """Healthy time before the first fail-slow..."""
    between: float
    """...and after each but the last, over the usual length of a job."""

    @property
    def lost_s(self) -> float:
        return sum(blow.for_s * (1 - 1 / blow.slowdown) for blow in self.blows)

    def needed_s(self, length_s: float) -> float:
        """Work, in healthy seconds, that the job must have for all its fail-slows to fit in."""
        during_s = sum(blow.for_s / blow.slowdown for blow in self.blows)
        between = self.before + self.between * (len(self.blows) - 1) + _AFTER
        return during_s + between * length_s


def _plan(
    fate: Fate | None,
    population: Population,
    draws: Iterator[list[tuple[float, float]]],
    rng: np.random.Generator,
) -> _Plan:
    drawn = next(draws) if fate is not None else []
    return _Plan(
        nodes=int(rng.choice(population.nodes)),
        blows=tuple(_Blow(0.0, for_s, slowdown) for for_s, slowdown in drawn),
        before=rng.uniform(0.03, 0.2),
        between=rng.uniform(0.15, 0.3),
    )


def _length_s(hit: Sequence[_Plan], jct_increase_pct: float) -> float:
    """The usual length of a job with which the completion times of the `hit` grow by that mean."""
    low, high = 0.0, math.log(1e7)
    for _ in range(_LENGTH_HALVINGS):
        middle = math.exp((low + high) / 2)
        grown = [p.lost_s / max(middle, p.needed_s(middle)) for p in hit]
        if 100 * sum(grown) > jct_increase_pct * len(hit):
            low = math.log(middle)
        else:
            high = math.log(middle)
    return math.exp(high)


def _draws(population: Population, rng: np.random.Generator) -> Iterator[list[tuple[float, float]]]:
    """For each hit job its one or two fail-slows: (duration, slowdown).

    Stratified: one draw from each of as many equal parts of the distribution, so that the few
    jobs of a population have its mean; the mean itself is then made the study's.
    """
    each = rng.integers(1, 3, population.hit)
    total = int(each.sum())

    def shares() -> NDArray[np.float64]:
        return (rng.permutation(total) + rng.random(total)) / total

    durations = np.exp(_SPREAD * ndtri(shares()))
    durations *= population.mean_duration_s / durations.mean()
    low, high = np.log(population.slowdown)
    slowdowns = np.exp(low + (high - low) * shares())
    pairs = list(zip(np.clip(durations, _SHORTEST_S, _LONGEST_S), slowdowns, strict=True))
    for first, number in zip(np.cumsum(each) - each, each, strict=True):
        yield [(float(d), float(s)) for d, s in pairs[first : first + number]]


def _strike(scenario: Scenario, fate: Fate, blow: _Blow, rng: np.random.Generator) -> Scenario:
    """With the faults that slow the job this much."""
    node = int(rng.integers(scenario.cluster.nodes))
    rank = int(rng.integers(scenario.cluster.ranks))
    at, span = blow.from_s, blow.for_s

    def contend(base: Scenario, factor: float) -> Scenario:
        return base.cpu_contention(node=node, from_s=at, for_s=span, factor=factor)

    def degrade(base: Scenario, factor: float) -> Scenario:
        return base.slow_device(rank=rank, from_s=at, for_s=span, factor=factor)

    of_link = "network" in fate and rng.random() < _LINKS
    link = _ring_link(scenario, rng) if of_link else None

    def congest(base: Scenario, factor: float) -> Scenario:
        only = {"node": node} if link is None else {"link": link}
        return base.congest(from_s=at, for_s=span, factor=factor, **only)

    wanted_s = iteration_s(scenario) * blow.slowdown
    if fate == "network and GPU":
        # the GPU alone does half of it
        half_s = iteration_s(scenario) * math.sqrt(blow.slowdown)
        scenario = _just_so(scenario, degrade, at, half_s)
    only: dict[Fate, _Strike] = {"CPU": contend, "GPU": degrade}
    return _just_so(scenario, only.get(fate, congest), at, wanted_s)


def _ring_link(scenario: Scenario, rng: np.random.Generator) -> tuple[int, int]:
    """A link between nodes that replicas of a stage reduce gradients over."""
    workload, cluster = scenario.workload, scenario.cluster
    first = int(rng.integers(workload.pp)) * workload.dp
    workers = (first + np.arange(workload.dp)) * workload.ranks_per_worker
    node = cluster.node_of(workers)
    across = np.flatnonzero(node != np.roll(node, -1))
    at = int(rng.choice(across))
    return int(node[at]), int(np.roll(node, -1)[at])


def _just_so(scenario: Scenario, strike: _Strike, at_s: float, wanted_s: float) -> Scenario:
    """With the fault at the factor that makes an iteration take so long (within a percent)."""
    low, high = 0.0, math.log(10_000)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if iteration_s(strike(scenario, math.exp(middle)), at_s) < wanted_s:
            low = middle
        else:
            high = middle
    return strike(scenario, math.exp(high))
