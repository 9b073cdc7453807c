"""Policies on simulated jobs: the real `Policy`, the simulator's truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from failslow.config import DecideConfig
from failslow.decide import learn_history
from failslow.localize.calibrate import calibrate
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload
from failslow.simulate.facts import job_facts
from failslow.simulate.inquire import locate, true_findings
from failslow.simulate.policies import FaultCase, PolicyTrial, StudyPolicy, Trial, incident_of

JOB = Scenario(
    cluster=Cluster(groups=(NodeGroup(nodes=4),), devices_per_node=2, network_gbyte_per_s=5),
    workload=Workload(layers=8, hidden=2048, vocabulary=0, tp=2, pp=2, dp=2, micro_batches=16),
)
FROM_S, FOR_S, NOTICED_S = 100.0, 900.0, 112.0


def trial(
    strike: Callable[[Scenario], Scenario], *, noticed_s: float | None = NOTICED_S
) -> Callable[[StudyPolicy], Trial]:
    """What any policy makes of that fault."""
    scenario = strike(JOB)
    located = locate(scenario, at_s=FROM_S, onset_s=FROM_S)
    case = FaultCase(
        from_s=FROM_S,
        until_s=FROM_S + FOR_S,
        noticed_s=noticed_s,
        slowdown=located.slowdown,
        findings=located.verdict.findings,
        truth=true_findings(scenario, FROM_S),
    )
    facts = calibrate(job_facts(scenario), located.profiles)
    history = learn_history([incident_of(case, "like it")])
    return PolicyTrial(scenario, [case], facts, DecideConfig(), history=history).run


def slow_device(job: Scenario) -> Scenario:
    return job.slow_device(rank=5, from_s=FROM_S, for_s=FOR_S, factor=1.8)


def congested_link(job: Scenario) -> Scenario:
    return job.congest(link=(0, 1), from_s=FROM_S, for_s=FOR_S, factor=20)


def test_doing_nothing_costs_what_the_slowness_does() -> None:
    run = trial(slow_device)

    nothing = run("do nothing")

    slowdown = locate(slow_device(JOB), at_s=FROM_S).slowdown
    assert nothing.lost_s == pytest.approx(FOR_S * (1 - 1 / slowdown))
    assert nothing.spent_s == 0.0


def test_a_slow_device_is_redistributed_around_until_it_is_well_again() -> None:
    run = trial(slow_device)

    ladder, nothing, best = run("full ladder"), run("do nothing"), run("clairvoyant")

    levels = [decision.level for _, decision in ladder.decisions if decision.apply]
    assert levels == ["S2", "S1"]
    when_s = [when_s for when_s, decision in ladder.decisions if decision.apply]
    assert NOTICED_S < when_s[0] < NOTICED_S + 20
    assert when_s[1] == pytest.approx(FROM_S + FOR_S + DecideConfig().relief_hold_s, abs=10)
    assert best.total_s < ladder.total_s < nothing.total_s
    assert [d.level for _, d in run("S2 only").decisions] == levels


def test_a_congested_link_makes_workers_change_places() -> None:
    run = trial(congested_link)

    ladder = run("full ladder")

    assert next(d.level for _, d in ladder.decisions if d.apply) == "S3"
    assert ladder.total_s < 0.5 * run("do nothing").total_s
    # micro-batches do nothing for it, and are not tried
    assert run("S2 only").lost_s == pytest.approx(run("do nothing").lost_s)


def test_always_restarting_pays_at_the_first_verdict_and_is_rid_of_it() -> None:
    run = trial(slow_device)

    restart = run("always restart")

    (decision,) = [d for _, d in restart.decisions if d.apply]
    assert (decision.level, decision.action) == ("S4", "obey")
    assert decision.plan is not None
    assert decision.plan.evict == ("node2",)
    assert restart.spent_s > DecideConfig().restart_cost_s
    assert restart.lost_s < 20


def test_what_nobody_notices_nobody_does_anything_about() -> None:
    run = trial(slow_device, noticed_s=None)

    assert run("full ladder").total_s == run("do nothing").total_s


def test_the_ladder_with_history_acts_no_later_on_what_lasted_long_before() -> None:
    run = trial(congested_link)

    def acted_s(policy: StudyPolicy) -> float:
        return next(when_s for when_s, decision in run(policy).decisions if decision.apply)

    assert acted_s("ladder with history") <= acted_s("full ladder")
