"""Orders of a person: what they may ask for, whom they have left alone, what is advised anew."""

from __future__ import annotations

from tests.decide.jobs import Shares, device, facts, settings, verdict
from tests.decide.policed import Job

from failslow.decide.events import Tick
from failslow.decide.levels import LayoutPlanner
from failslow.records import Command, CulpritPace

NO_SPLIT = facts(no_redistribution="FSDP shard axis", no_topology_change="no state callbacks")


def test_restart_that_nobody_would_follow_up_cannot_be_ordered() -> None:
    job = Job(Shares({"S4": 1.0}), allow_restart=False)
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="S4"))
    assert (decision.action, decision.apply) == ("stay", False)
    assert decision.reason == (
        "S4 was asked for, but restarting is not allowed: failslow run --restarts N allows it N "
        "times"
    )
    assert not job.policy.waiting


def test_ordered_restart_keeps_to_the_cap_on_evictions() -> None:
    job = Job(Shares({"S4": 1.0}), max_evictions=1)
    job.policy.evictions = 1
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="S4"))
    assert (decision.action, decision.apply) == ("stay", False)
    assert "1 hosts were given up before and 1 more would exceed" in decision.reason


def test_ordered_restart_needs_no_second_verdict() -> None:
    job = Job(Shares({"S4": 1.0}), confirmations=2)
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="S4"))
    assert (decision.action, decision.level, decision.apply) == ("obey", "S4", True)


def ignored(job: Job) -> None:
    """Rank 1 is to be left alone, from 2 s on."""
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="ignore"))
    assert decision.action == "obey"
    assert job.at(100.0, Tick(), verdict(device(1))) == []


def test_culprit_found_after_others_were_ignored_is_dealt_with() -> None:
    job = Job(LayoutPlanner(facts(), settings()), redistribute_cost_s=10.0, allow_restart=False)
    ignored(job)
    assert job.policy.due_s() is None
    (decision,) = job.at(200.0, verdict(device(2)))
    assert (decision.action, decision.level) == ("escalate", "S2")
    assert decision.plan is not None
    assert decision.plan.microbatches == (11, 5, 5, 11)  # the ignored one gets no more work


def test_host_of_an_ignored_culprit_is_not_left_out() -> None:
    job = Job(LayoutPlanner(NO_SPLIT, settings()), restart_cost_s=10.0)
    ignored(job)
    (decision,) = job.at(200.0, verdict(device(2, host="gpu-2")))
    assert decision.level == "S4"
    assert decision.culprits == ("device rank 2",)  # whose nodes are left out
    assert decision.plan is not None
    assert decision.plan.evict == ("gpu-2",)


def test_plan_for_a_culprit_that_recovered_does_not_outlive_it_beside_an_ignored_one() -> None:
    job = Job(LayoutPlanner(facts(), settings()), redistribute_cost_s=10.0, allow_restart=False)
    ignored(job)
    job.at(200.0, verdict(device(2)))
    job.done(201.0, "S2", slowdown=1.4)
    job.at(300.0, CulpritPace(key="device rank 2", slowdown=1.0))
    job.at(330.0, Tick())
    (decision,) = job.decisions[2:] or job.at(400.0, Tick())
    assert (decision.action, decision.culprits) == ("replan", ("device rank 1",))
    assert decision.plan is not None
    assert decision.plan.microbatches[2] > 5


def test_ignored_culprit_that_recovered_and_is_back_is_not_ignored_any_more() -> None:
    job = Job(Shares({"S2": 0.5, "S3": 0.9}), topology_cost_s=300.0, redistribute_cost_s=10.0)
    ignored(job)
    job.at(200.0, verdict(device(2)))
    job.done(200.0, "S2", slowdown=1.4)
    job.at(200.0, Command(order="ignore"))
    assert job.at(1000.0, Tick()) == []
    job.at(1001.0, CulpritPace(key="device rank 1", slowdown=1.0))
    assert job.at(1031.0, Tick()) == []
    (decision,) = job.at(1040.0, verdict(device(1)))
    assert decision.level == "S3"


def _advised_restart() -> Job:
    job = Job(mode="advise")
    job.slow(0.0)
    job.at(5000.0, verdict(device(1)))
    for now_s in (5001.0, 5002.0):
        job.at(now_s, Tick())
    assert [d.level for d in job.decisions] == ["S2", "S3", "S4"]
    return job


def test_restart_is_advised_again_when_another_culprit_joins() -> None:
    job = _advised_restart()
    (decision,) = job.at(5010.0, verdict(device(2)))
    assert (decision.action, decision.level, decision.apply) == ("replan", "S4", False)
    assert decision.culprits == ("device rank 1", "device rank 2")
    assert job.at(5020.0, Tick()) == []


def test_where_a_restart_is_closed_for_more_culprits_the_level_below_is_advised() -> None:
    planner = LayoutPlanner(facts(), settings(spares=2))
    job = Job(planner, mode="advise", max_evictions=1, restart_cost_s=20.0)
    job.slow(0.0)
    job.at(5000.0, verdict(device(1)))
    job.at(5001.0, Tick())
    assert [d.level for d in job.decisions] == ["S2", "S4"]
    (decision,) = job.at(5010.0, verdict(device(2, host="gpu-2")))
    assert (decision.action, decision.level) == ("replan", "S2")
    assert decision.plan is not None
    assert decision.plan.microbatches == (11, 5, 5, 11)
    assert job.at(5020.0, Tick()) == []
