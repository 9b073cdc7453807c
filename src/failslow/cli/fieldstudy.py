"""`failslow study --simulate SEED`: the field study, simulated, analysed and scored.

In: a seed, the detector's settings. Out: the analyses and pictures of a `Batch`, and a
`FieldStudy`. Here the stages meet: jobs are simulated, detected, blamed, compared with the truth,
and each true fault is put to every policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from failslow.cli.inputs import Batch
from failslow.cli.output import progress
from failslow.config import DecideConfig, DetectConfig, load_config
from failslow.decide.allocate import allocate, even_split, pipeline_costs
from failslow.decide.learned import choose_theta
from failslow.decide.ski import Ladder
from failslow.detect import analyze
from failslow.records import JobAnalysis
from failslow.report.fieldstudy import FieldStudy, PolicyResult, PopulationResult
from failslow.report.picture import job_picture
from failslow.simulate.blame import blame
from failslow.simulate.fieldstudy import POPULATIONS, Population, StudyJob, field_study
from failslow.simulate.job import SimulatedJob, compute_s, iteration_s, simulate
from failslow.simulate.scenario import Scenario
from failslow.simulate.score import Score, score
from failslow.stats.survival import SurvivalCurve

__all__ = ["simulate_study"]

_POLICIES = (
    "do nothing",
    "always restart",
    "S2 only",
    "full ladder",
    "ladder with history",
    "clairvoyant",
)
_TRUST = 0.5
_TRIED = 16
"""Places a congested link's node is tried at."""
_PICTURES = 40
"""Jobs drawn on the page, the hardest hit first."""


@dataclass(frozen=True, slots=True)
class _Case:
    told: StudyJob
    job: SimulatedJob
    analysis: JobAnalysis
    score: Score


@dataclass(frozen=True, slots=True)
class _Fault:
    """A true fault: how long it would last, and how slow the job is at each level."""

    duration_s: float
    slowdown: tuple[float, ...]
    """At S1, S2, S3, S4."""


def simulate_study(
    seed: int,
    *,
    min_slowdown: float | None,
    min_duration_s: float | None,
    config: Path | None,
    pictures: bool,
    quiet: bool,
    populations: Sequence[Population] = POPULATIONS,
) -> tuple[Batch, FieldStudy]:
    """All jobs of the field study of this seed, analysed and scored.

    Policies act at a fault's onset and take no time from it. S2 is the exact split of
    `decide.allocate`; S3 the best exchange of a congested node with one of 16 others, by the
    simulator itself; costs are those of the decide settings.
    """
    settings = load_config(
        "detect",
        DetectConfig,
        arguments={"min_slowdown": min_slowdown, "min_duration_s": min_duration_s},
        file=config,
    )
    costs = load_config("decide", DecideConfig, file=config)
    batch = Batch()
    cases: dict[str, list[_Case]] = {population.name: [] for population in populations}
    with progress(sum(p.jobs for p in populations), enabled=not quiet) as begin:
        for told in field_study(seed, populations):
            begin(told.scenario.name)
            job = simulate(told.scenario)
            analysis = analyze(job.series, settings)
            batch.analyses.append(analysis)
            cases[told.population.name].append(_Case(told, job, analysis, score(job, analysis)))
    if pictures:
        everything = [case for group in cases.values() for case in group]
        everything.sort(key=lambda case: -case.analysis.jct_increase_pct)
        batch.pictures += [
            job_picture(case.job.series, case.analysis, buckets=300)
            for case in everything[:_PICTURES]
        ]
    results = [_population(p, cases[p.name], costs) for p in populations]
    return batch, FieldStudy(seed=seed, populations=results)


def _population(
    population: Population, cases: Sequence[_Case], costs: DecideConfig
) -> PopulationResult:
    hit = [case for case in cases if case.analysis.fail_slows]
    lengths = [e.duration_s for case in hit for e in case.analysis.fail_slows]
    increases = [case.analysis.jct_increase_pct for case in hit]
    errors = [
        abs(fault.onset_error)
        for case in cases
        for fault in case.score.faults
        if fault.onset_error is not None and fault.truth.counts
    ]
    return PopulationResult(
        name=population.name,
        jobs=len(cases),
        hit=len(hit),
        truly_hit=sum(any(truth.counts for truth in case.job.truth) for case in cases),
        published_hit=population.hit,
        false_alarms=sum(case.score.false_alarms for case in cases),
        missed=sum(case.score.missed for case in cases),
        mean_duration_s=fmean(lengths) if lengths else None,
        published_duration_s=population.mean_duration_s,
        jct_increase_pct=fmean(increases) if increases else None,
        published_jct_increase_pct=population.jct_increase_pct,
        over_50_share_pct=(
            100 * sum(value > 50 for value in increases) / len(increases) if increases else None
        ),
        median_onset_error=median(errors) if errors else None,
        causes=_causes(cases),
        policies=_policies([f for case in cases for f in _faults(case)], costs),
    )


def _causes(cases: Sequence[_Case]) -> list[tuple[str, int, int, int]]:
    true: Counter[str] = Counter()
    named: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for case in cases:
        fate = case.told.fate
        found = {
            blame(case.job, case.analysis, episode).cause for episode in case.analysis.fail_slows
        }
        # parts that different episodes name add up
        parts = {part for cause in found for part in cause.split(" and ")}
        cause = " and ".join(sorted(parts, reverse=True))
        true.update([fate] if fate else [])
        named.update([cause] if cause else [])
        right.update([cause] if cause and cause == fate else [])
    return [(c, true[c], named[c], right[c]) for c in sorted({*true, *named})]


def _faults(case: _Case) -> Iterator[_Fault]:
    """The true faults that slow the job; two that act together are one."""
    scenario = case.told.scenario
    if not scenario.faults:
        return
    healthy_s = iteration_s(scenario.but(faults=()))
    for from_s in sorted({fault.from_s for fault in scenario.faults}):
        acting = [fault for fault in scenario.faults if fault.from_s == from_s]
        only = scenario.but(faults=tuple(acting))
        slow_s = iteration_s(only, from_s)
        left_s = case.job.series.end_s[-1] - from_s
        duration_s = min(max(f.for_s or left_s for f in acting), left_s)
        if duration_s <= 0:
            continue
        redistributed_s = _redistributed_s(only, from_s, slow_s)
        rearranged_s = min(redistributed_s, _rearranged_s(only, from_s, slow_s))
        ratios = (slow_s, redistributed_s, rearranged_s, healthy_s)
        yield _Fault(float(duration_s), tuple(max(1.0, s / healthy_s) for s in ratios))


def _redistributed_s(scenario: Scenario, at_s: float, slow_s: float) -> float:
    """Seconds of an iteration with the micro-batches split as the slow replicas can take them."""
    workload = scenario.workload
    if workload.dp == 1:
        return slow_s
    stage_s = compute_s(scenario, at_s).T / workload.micro_batches
    total = workload.dp * workload.micro_batches
    least = workload.pp if workload.pp > 1 else 1
    fixed, slope = pipeline_costs(stage_s)
    even = float(np.max(fixed + slope * np.array(even_split(total, workload.dp))))
    best = allocate(fixed, slope, total, least=least).makespan_s
    return slow_s - (even - best)


def _rearranged_s(scenario: Scenario, at_s: float, slow_s: float) -> float:
    """Seconds of an iteration with the node at a bad link's end in the best of other places."""
    nodes = scenario.cluster.nodes
    bad = {
        node
        for fault in scenario.faults
        for node in (*(getattr(fault, "link", None) or ()), getattr(fault, "node", None))
        if node is not None
    }
    best_s = slow_s
    for node in sorted(bad)[-1:]:
        for other in np.linspace(0, nodes - 1, min(nodes, _TRIED)).astype(int).tolist():
            placement = list(range(nodes))
            placement[node], placement[other] = placement[other], placement[node]
            best_s = min(best_s, iteration_s(scenario.but(placement=tuple(placement)), at_s))
    return best_s


def _policies(faults: Sequence[_Fault], costs: DecideConfig) -> list[PolicyResult]:
    totals = dict.fromkeys(_POLICIES, 0.0)
    lengths = np.array([fault.duration_s for fault in faults])
    prices = (0.0, costs.redistribute_cost_s, costs.topology_cost_s, costs.restart_cost_s)
    for number, fault in enumerate(faults):
        rates = [1 - 1 / slowdown for slowdown in fault.slowdown]
        ladder = Ladder(cost_s=prices, rate=rates)
        others = np.delete(lengths, number)
        theta = (
            choose_theta(ladder, SurvivalCurve.fit(others), trust=_TRUST) if len(others) else 1.0
        )
        s = fault.duration_s
        gains = rates[1] < rates[0]
        totals["do nothing"] += rates[0] * s
        totals["always restart"] += prices[3]
        totals["S2 only"] += prices[1] + rates[1] * s if gains else rates[0] * s
        totals["full ladder"] += float(ladder.online_s(s))
        totals["ladder with history"] += float(ladder.online_s(s, theta))
        totals["clairvoyant"] += float(ladder.clairvoyant_s(s))
    nothing = totals["do nothing"]
    return [
        PolicyResult(
            policy=name,
            lost_s=lost_s,
            saved_pct=100 * (nothing - lost_s) / nothing if nothing else 0.0,
        )
        for name, lost_s in totals.items()
    ]
