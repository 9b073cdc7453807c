"""`failslow study --simulate SEED`: the field study, simulated, analysed and scored.

In: a seed, the detector's settings. Out: the analyses and pictures of a `Batch`, and a
`FieldStudy`. Here the stages meet: jobs are simulated, the detector looks at their iterations,
localize at the calls and benchmarks of those that were hit, and their faults are put to every
policy; all of it is the code that watches live jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from failslow.cli.inputs import Batch
from failslow.cli.output import progress
from failslow.config import DecideConfig, DetectConfig, load_config
from failslow.decide import Incident, learn_history
from failslow.detect import Detector, analyze
from failslow.localize.calibrate import calibrate
from failslow.records import JobAnalysis, JobFacts
from failslow.report.fieldstudy import FieldStudy, PolicyResult, PopulationResult
from failslow.report.picture import job_picture
from failslow.simulate.facts import job_facts
from failslow.simulate.fieldstudy import POPULATIONS, Population, StudyJob, field_study
from failslow.simulate.inquire import is_part, locate, true_findings
from failslow.simulate.job import SimulatedJob, simulate
from failslow.simulate.policies import POLICY_NAMES, FaultCase, PolicyTrial, incident_of
from failslow.simulate.score import Score, score

__all__ = ["simulate_study"]

_PICTURES = 40
"""Jobs drawn on the page, the hardest hit first."""
_CLASSES = {"device": "GPU", "host": "CPU", "link": "network"}
"""Of a finding, in the study's words."""


@dataclass(frozen=True, slots=True)
class _Case:
    told: StudyJob
    job: SimulatedJob
    analysis: JobAnalysis
    score: Score
    faults: tuple[FaultCase, ...] = ()
    facts: JobFacts | None = None
    """Of a job that was truly hit."""


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
    """All jobs of the field study of this seed, analysed, localised and scored.

    Policies hear of a fault when the detector confirms it, and of its culprits as localisation
    names them; costs are those of the decide settings.
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
            case = _Case(told, job, analysis, score(job, analysis))
            if told.scenario.faults:
                case = _localised(case, settings)
            cases[told.population.name].append(case)
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
    lasted = [fault.until_s - fault.from_s for case in cases for fault in case.faults]
    true_increases = [
        100 * case.job.lost_s / float(case.job.healthy_s.sum()) for case in cases if case.faults
    ]
    faults, right, innocent = _culprits(cases)
    return PopulationResult(
        name=population.name,
        jobs=len(cases),
        hit=len(hit),
        truly_hit=sum(any(truth.counts for truth in case.job.truth) for case in cases),
        published_hit=population.hit,
        false_alarms=sum(case.score.false_alarms for case in cases),
        missed=sum(case.score.missed for case in cases),
        mean_duration_s=fmean(lengths) if lengths else None,
        true_duration_s=fmean(lasted) if lasted else None,
        published_duration_s=population.mean_duration_s,
        jct_increase_pct=fmean(increases) if increases else None,
        true_jct_increase_pct=fmean(true_increases) if true_increases else None,
        published_jct_increase_pct=population.jct_increase_pct,
        over_50_share_pct=(
            100 * sum(value > 50 for value in increases) / len(increases) if increases else None
        ),
        median_onset_error=median(errors) if errors else None,
        faults=faults,
        culprits_right=right,
        innocents=innocent,
        causes=_causes(cases),
        policies=_policies(cases, costs),
    )


def _localised(case: _Case, settings: DetectConfig) -> _Case:
    """With what localisation makes of its faults; two that begin together are one."""
    scenario = case.told.scenario
    confirmed = _confirmations(case.job, settings)
    end_s = float(case.job.series.end_s[-1])
    found, facts = [], None
    for from_s in sorted({fault.from_s for fault in scenario.faults}):
        acting = [fault for fault in scenario.faults if fault.from_s == from_s]
        until_s = min(max(from_s + (fault.for_s or end_s) for fault in acting), end_s)
        if until_s <= from_s:
            continue
        located = locate(scenario, at_s=from_s, onset_s=from_s)
        facts = facts or calibrate(job_facts(scenario), located.profiles)
        found.append(
            FaultCase(
                from_s=from_s,
                until_s=until_s,
                noticed_s=next((t for t in confirmed if from_s < t < until_s), None),
                slowdown=located.slowdown,
                findings=located.verdict.findings,
                truth=true_findings(scenario, from_s),
            )
        )
    return replace(case, faults=tuple(found), facts=facts)


def _confirmations(job: SimulatedJob, settings: DetectConfig) -> list[float]:
    """When the detector, iteration by iteration, was sure of an onset or a deeper level."""
    detector, times = Detector(settings), list[float]()
    for index in range(len(job.series)):
        sample = job.series.sample(index)
        events = detector.update(sample)
        times += [sample.end_s for event in events if event.kind in ("onset", "level")]
    return times


def _causes(cases: Sequence[_Case]) -> list[tuple[str, int, int, int]]:
    """(cause, jobs truly hit by it, jobs it is named in, jobs where both agree)."""
    true: Counter[str] = Counter()
    named: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for case in cases:
        fate = case.told.fate
        # parts that different faults of a job name add up
        parts = {_CLASSES[finding.what] for fault in case.faults for finding in fault.findings}
        cause = " and ".join(sorted(parts, reverse=True))
        true.update([fate] if fate else [])
        named.update([cause] if cause else [])
        right.update([cause] if cause and cause == fate else [])
    return [(c, true[c], named[c], right[c]) for c in sorted({*true, *named})]


def _culprits(cases: Sequence[_Case]) -> tuple[int, int, int]:
    """(faults, those whose culprits were all named and nobody else, those with an innocent named).

    Of a node whose card is slow a link from it is a culprit, too: too few links may have been
    measured to tell the two apart.
    """
    faults = [fault for case in cases for fault in case.faults]
    right = innocent = 0
    for fault in faults:
        guilty = [any(is_part(f, true) for true in fault.truth) for f in fault.findings]
        found = [any(is_part(f, true) for f in fault.findings) for true in fault.truth]
        right += all(guilty) and all(found)
        innocent += not all(guilty)
    return len(faults), right, innocent


def _policies(cases: Sequence[_Case], config: DecideConfig) -> list[PolicyResult]:
    """What each policy makes of all jobs; the one that learns knows the other jobs' faults."""
    past: dict[str, list[Incident]] = {
        case.told.scenario.name: [
            incident_of(fault, f"{case.told.scenario.name}, {number}")
            for number, fault in enumerate(case.faults)
        ]
        for case in cases
    }
    lost = dict.fromkeys(POLICY_NAMES, 0.0)
    spent = dict.fromkeys(POLICY_NAMES, 0.0)
    for case in cases:
        if case.facts is None:
            continue
        name = case.told.scenario.name
        others = [incident for job, each in past.items() if job != name for incident in each]
        trial = PolicyTrial(
            case.told.scenario,
            case.faults,
            case.facts,
            config,
            history=learn_history(others) if others else None,
        )
        for policy in POLICY_NAMES:
            result = trial.run(policy)
            lost[policy] += result.lost_s
            spent[policy] += result.spent_s
    nothing = lost["do nothing"]
    return [
        PolicyResult(
            policy=policy,
            lost_s=lost[policy] + spent[policy],
            spent_s=spent[policy],
            saved_pct=100 * (nothing - lost[policy] - spent[policy]) / nothing if nothing else 0.0,
        )
        for policy in POLICY_NAMES
    ]
