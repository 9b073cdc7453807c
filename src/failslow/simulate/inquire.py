"""Localisation of a simulated fault by the code that localises real ones.

In: a `Scenario`, a time at which something is slow. Out: a `Located`: the `Diagnosis` of the
workers' profiles, and the `Verdict` of the benchmarks it led to, agreed with it:

    located = locate(scenario, at_s=700.0)
    located.verdict.findings        # (Finding(what="device", ranks=(35,), slowdown=1.50, …),)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from failslow.localize.accord import accord
from failslow.localize.evidence import explain_all
from failslow.localize.judge import judge
from failslow.localize.profile import diagnose
from failslow.localize.script import ScriptSettings, plan, reference_script
from failslow.records import Diagnosis, Finding, RankProfile, Verdict
from failslow.simulate.bench import Result, run_bench, worker_places
from failslow.simulate.faults import CpuContention, SlowDevice, Thermal
from failslow.simulate.job import iteration_s
from failslow.simulate.scenario import Scenario
from failslow.simulate.sensors import faulty_nodes, node_windows
from failslow.simulate.streams import job_profiles, node_name

__all__ = ["Located", "is_part", "locate", "true_findings"]

_BEFORE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What was found, and what finding it cost."""

    slowdown: float
    """Of an iteration, over one without faults."""
    diagnosis: Diagnosis
    verdict: Verdict
    profiles: Sequence[RankProfile]
    """Of healthy times."""
    diagnose_s: float
    """Processor time."""
    judge_s: float
    """...of the script and of judging what it gave."""


def locate(
    scenario: Scenario,
    *,
    at_s: float,
    onset_s: float | None = None,
    places: int = 8,
    healthy: Sequence[RankProfile] | None = None,
) -> Located:
    """Profile, diagnose, benchmark and judge the job as it is at `at_s`.

    Healthy profiles and the reference are of the same job without its faults. onset_s: when it
    became slow, for telemetry; None: at `at_s`. places: as in `job_profiles`. healthy: profiles of
    the job without faults, where they have been made.
    """
    calm = scenario.but(faults=())
    slowdown = iteration_s(scenario, at_s) / iteration_s(calm)
    if healthy is None:
        healthy = job_profiles(calm, at_s=0.0, window=0, places=places)
    now = job_profiles(scenario, at_s=at_s, window=1, places=places)
    begin_s = time.process_time()
    diagnosis = diagnose(now, healthy, episode="simulated", slowdown=slowdown)
    diagnosed_s = time.process_time()
    workers = worker_places(scenario)
    settings = ScriptSettings()
    script = plan(diagnosis, workers, settings)
    first = reference_script(workers, settings)
    planned_s = time.process_time() - diagnosed_s
    results = _flat(run_bench(script, scenario, at_s=at_s, seed=scenario.seed))
    reference = _flat(run_bench(first, calm, at_s=0.0, seed=scenario.seed + 1))
    judging_s = time.process_time()
    verdict = judge(results, reference, workers, episode="simulated")
    onset_t = at_s if onset_s is None else onset_s
    windows = node_windows(scenario, since_s=onset_t - _BEFORE_S, until_s=at_s + _BEFORE_S / 2)
    devices = {worker.rank: worker.device for worker in workers}
    findings = explain_all(verdict.findings, windows, onset_t=onset_t, devices=devices)
    verdict = replace(verdict, findings=findings)
    verdict = accord(verdict, diagnosis, slowdown=slowdown)
    return Located(
        slowdown=slowdown,
        diagnosis=diagnosis,
        verdict=verdict,
        profiles=healthy,
        diagnose_s=diagnosed_s - begin_s,
        judge_s=planned_s + time.process_time() - judging_s,
    )


def true_findings(scenario: Scenario, at_s: float) -> tuple[Finding, ...]:
    """What a perfect verdict would name at that time: a finding of each fault that acts then."""
    cluster, found = scenario.cluster, list[Finding]()

    def ranks(node: int) -> tuple[int, ...]:
        each = cluster.devices_per_node
        return tuple(range(node * each, (node + 1) * each))

    for fault in scenario.faults:
        level = fault.level(at_s)
        nodes = faulty_nodes(scenario, fault)
        if level <= 1.0:
            continue
        if isinstance(fault, (SlowDevice, Thermal)):
            slow = ranks(nodes[0]) if fault.rank is None else (fault.rank,)
            host = node_name(nodes[0])
            found += [Finding(what="device", slowdown=level, ranks=(r,), host=host) for r in slow]
        elif isinstance(fault, CpuContention):
            host = node_name(nodes[0])
            found.append(Finding(what="host", slowdown=level, ranks=ranks(nodes[0]), host=host))
        elif fault.link is not None:
            here, there = fault.link
            found.append(_link(level, ranks(here), node_name(here), ranks(there), node_name(there)))
        else:
            for node in nodes:
                found.append(_link(level, ranks(node), node_name(node), (), ""))
                found.append(_link(level, (), "", ranks(node), node_name(node)))
    return tuple(found)


def is_part(finding: Finding, true: Finding) -> bool:
    """Whether what `finding` names is slow because of the `true` one: the same component, or one
    link of a card that is slow."""
    if finding.what != true.what:
        return False
    if finding.what == "device":
        return finding.ranks == true.ranks
    if finding.what == "host":
        return finding.host == true.host
    ends = ((true.host, finding.host), (true.peer_host, finding.peer_host))
    return all(not whole or whole == named for whole, named in ends)


def _link(
    slowdown: float, here: tuple[int, ...], host: str, there: tuple[int, ...], peer_host: str
) -> Finding:
    return Finding(
        what="link",
        slowdown=slowdown,
        ranks=here,
        host=host,
        peer_ranks=there,
        peer_host=peer_host,
    )


def _flat(results: dict[int, list[Result]]) -> list[Result]:
    return [result for of_rank in results.values() for result in of_rank]
