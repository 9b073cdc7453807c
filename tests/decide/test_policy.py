"""The policy event by event: when it acts, on what numbers, and when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.decide.jobs import Shares, device, facts, link, settings, verdict
from tests.decide.policed import Job

from failslow.decide.events import Pace, Relieved, Tick
from failslow.decide.levels import LayoutPlanner
from failslow.records import CulpritPace


def test_waits_until_the_loss_reaches_the_cost_of_the_next_level() -> None:
    job = Job(redistribute_cost_s=3.0)
    job.slow(0.0)
    assert job.at(2.0, verdict(device(1))) == []
    assert job.policy.due_s() == pytest.approx(6.0)
    assert job.at(5.9, Tick()) == []
    (decision,) = job.at(6.1, Tick())
    assert (decision.action, decision.from_level, decision.level) == ("escalate", "S1", "S2")
    assert decision.apply
    assert decision.lost_s == pytest.approx(3.05)
    assert decision.threshold_s == 3.0
    assert decision.culprits == ("device rank 1",)
    assert decision.plan is not None
    assert decision.plan.microbatches == (5, 11)
    assert "3.05 s lost since onset reach the 3 s at which S2 is worth its 3 s" in decision.reason


def test_record_holds_every_level_with_its_numbers() -> None:
    decision = Job().mitigated()
    levels = {option.level: option for option in decision.options}
    assert levels["S1"].slowdown == 2.0
    assert levels["S1"].slowdown_source == "measured"
    assert levels["S2"].slowdown == pytest.approx(1.2)
    assert levels["S3"].cost_s == 15.0
    assert levels["S4"].cost_source == "estimate"
    assert levels["S1"].loss_rate == pytest.approx(0.5)


def test_late_verdict_finds_the_loss_already_there() -> None:
    job = Job()
    job.slow(0.0)
    (decision,) = job.at(600.0, verdict(device(1)))
    assert decision.level == "S2"
    assert decision.lost_s == pytest.approx(300.0)


def test_a_pause_of_our_own_is_no_loss_by_slowness() -> None:
    job = Job()
    job.slow(10.0, slowdown=4.0, lost_s=7.5)
    # the last iteration was told at 10 s; training stood still for 4 of the 5 s since
    (decision,) = job.at(15.0, replace(verdict(device(1)), pause_s=4.0))
    assert decision.lost_s == pytest.approx(7.5 + 0.75)
    told_since = Job()
    told_since.slow(10.0, slowdown=4.0, lost_s=7.5)
    told_since.slow(15.0, slowdown=4.0, lost_s=8.0)
    (decision,) = told_since.at(15.2, replace(verdict(device(1)), pause_s=4.0))
    assert decision.lost_s == pytest.approx(8.0)  # what iterations told stays


def test_next_level_follows_only_once_its_own_cost_is_lost() -> None:
    job = Job()
    job.mitigated(slowdown=1.25)
    due_s = job.policy.due_s()
    assert due_s == pytest.approx(10.0 + (15.0 - 5.0) / 0.2)
    assert due_s is not None
    (decision,) = job.at(due_s, Tick())
    assert (decision.from_level, decision.level) == ("S2", "S3")
    assert decision.spent_s == 0.5


def test_remedy_that_works_ends_the_climb() -> None:
    job = Job()
    job.mitigated(slowdown=1.02)
    assert job.policy.due_s() is None
    assert job.at(1e6, Tick()) == []


def test_level_that_cannot_help_is_passed_over() -> None:
    grid = facts(
        pp=4,
        dp=2,
        stage_s=(0.1,) * 4,
        hosts=tuple(f"gpu-{n}" for n in range(8)),
        dp_s=0.3,
        pp_s=0.004,
    )
    job = Job(LayoutPlanner(grid, settings()))
    job.slow(0.0)
    assert job.at(10.0, verdict(link("gpu-2", "gpu-3"))) == []
    due_s = job.policy.due_s()
    assert due_s == pytest.approx(30.0)
    assert due_s is not None
    (decision,) = job.at(due_s, Tick())
    assert decision.level == "S3"
    assert "below a gain" in decision.options[1].reason
    job.done(due_s, "S3", 1.02)
    job.at(100.0, CulpritPace(key=decision.culprits[0], slowdown=1.0))
    (over,) = job.at(200.0, Tick())
    assert (over.action, over.plan) == ("restore", None)
    assert over.reason.endswith("s; the workers keep their places")


def test_nothing_that_helps_is_said_once_with_the_reasons() -> None:
    job = Job(LayoutPlanner(facts(no_redistribution="FSDP shard axis"), settings()))
    job.policy.costs.refuse("S4", "no spare host")
    job.slow(0.0)
    (decision,) = job.at(10.0, verdict(device(1)))
    assert decision.action == "stay"
    assert "S2: FSDP shard axis" in decision.reason
    assert "S4: no spare host" in decision.reason
    assert job.at(20.0, Tick(), verdict(device(1)), Tick()) == []


def test_validation_without_findings_decides_nothing() -> None:
    job = Job()
    job.slow(0.0)
    assert job.at(50.0, verdict()) == []


def test_costs_and_what_is_left_are_learned_from_outcomes() -> None:
    job = Job(redistribute_cost_s=3.0)
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    job.done(10.0, "S2", slowdown=1.6, cost_s=0.25)  # 40 % removed where 80 % were promised
    job.at(20.0, CulpritPace(key="device rank 1", slowdown=1.0))
    job.at(60.0, Tick())
    job.done(60.0, "S1")
    job.at(5000.0, Pace(episode="e2", slowdown=2.0, lost_s=0.0))
    (decision,) = job.at(5001.0, verdict(device(2), episode="e2"))
    option = decision.options[1]
    assert (option.cost_s, option.cost_source) == (0.25, "measured")
    assert option.slowdown == pytest.approx(1.6)
    assert decision.threshold_s == 0.25


def test_nothing_is_decided_while_a_plan_is_being_carried_out() -> None:
    job = Job()
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    assert job.policy.waiting
    assert job.policy.due_s() is None
    assert job.at(1000.0, Tick(), verdict(device(2))) == []
    (decision,) = job.done(1000.0, "S2", slowdown=1.5)
    assert decision.level == "S3"
    assert decision.culprits == ("device rank 1", "device rank 2")


def test_second_culprit_is_planned_for_with_the_first() -> None:
    job = Job(LayoutPlanner(facts(), settings()))
    job.slow(0.0)
    (first,) = job.at(10.0, verdict(device(1)))
    assert first.plan is not None
    assert first.plan.microbatches == (9, 5, 9, 9)
    job.done(10.0, "S2", slowdown=1.25)
    job.at(100.0, Relieved(episode="e1", lost_s=5.0))
    job.at(200.0, Pace(episode="e2", slowdown=2.25, lost_s=0.0))
    decisions = job.at(204.0, verdict(device(2), episode="e2"))
    decisions += job.at(206.0, Tick())
    (second,) = decisions
    assert second.action == "replan"
    assert second.level == second.from_level == "S2"
    assert second.culprits == ("device rank 1", "device rank 2")
    assert second.plan is not None
    assert second.plan.microbatches == (11, 5, 5, 11)


def test_recovery_of_one_culprit_plans_for_the_rest() -> None:
    job = Job(LayoutPlanner(facts(), settings()), relief_hold_s=30.0)
    job.slow(0.0)
    job.at(10.0, verdict(device(1), device(2)))
    job.done(10.0, "S2", slowdown=1.4)
    job.at(20.0, CulpritPace(key="device rank 2", slowdown=1.01))
    decisions = job.at(50.0, Tick()) + job.at(60.0, Tick())
    (decision,) = decisions
    assert decision.action == "replan"
    assert decision.culprits == ("device rank 1",)
    assert decision.plan is not None
    assert decision.plan.microbatches == (10, 5, 7, 10)  # from (11, 5, 5, 11) the nearest best


def test_even_split_comes_back_when_the_culprit_itself_has_recovered() -> None:
    job = Job(relief_hold_s=30.0)
    job.mitigated(slowdown=1.02)
    job.at(100.0, CulpritPace(key="device rank 1", slowdown=1.04))
    assert job.policy.due_s() == pytest.approx(130.0)
    assert job.at(129.0, Tick()) == []
    (decision,) = job.at(130.0, Tick())
    assert (decision.action, decision.level, decision.from_level) == ("restore", "S1", "S2")
    assert decision.plan is not None
    assert decision.plan.microbatches == (8, 8)
    job.done(130.5, "S1")
    assert job.policy.level == "S1"
    assert job.policy.in_force.microbatches == (8, 8)


def test_job_that_looks_healthy_keeps_its_plan() -> None:
    job = Job()
    job.mitigated(slowdown=1.2)
    assert job.at(60.0, Relieved(episode="e1", lost_s=5.0)) == []
    for now_s in range(70, 670, 10):
        job.at(float(now_s), CulpritPace(key="device rank 1", slowdown=2.0), Tick())
    assert [d.level for d in job.decisions] == ["S2"]
    assert job.policy.level == "S2"
    assert job.policy.in_force.microbatches == (5, 11)


def test_episode_that_is_lost_sight_of_changes_nothing() -> None:
    job = Job()
    job.mitigated(slowdown=1.2)
    job.at(60.0, Relieved(episode="e1", lost_s=5.0, abandoned=True))
    due_s = job.policy.due_s()
    assert due_s is not None
    assert [d.level for d in job.at(due_s, Tick())] == ["S3"]


def test_ten_minute_fault_yields_one_plan() -> None:
    job = Job(LayoutPlanner(facts(), settings(allow_restart=False)), allow_restart=False)
    job.slow(0.0)
    job.at(8.0, verdict(device(1, 1.4)))
    job.done(8.1, "S2", slowdown=1.04)
    job.at(20.0, Relieved(episode="e1", lost_s=3.0))
    for now_s in range(21, 600):
        noise = 1.4 + 0.03 * ((7 * now_s) % 5 - 2)
        job.at(float(now_s), CulpritPace(key="device rank 1", slowdown=noise), Tick())
    for now_s in range(600, 640):
        job.at(float(now_s), CulpritPace(key="device rank 1", slowdown=1.0), Tick())
    assert [d.action for d in job.decisions] == ["escalate", "restore"]


def test_fault_that_passes_before_anything_was_done_leaves_no_trace() -> None:
    job = Job(redistribute_cost_s=10.0)
    job.slow(0.0)
    job.at(5.0, verdict(device(1)))
    job.at(6.0, Relieved(episode="e1", lost_s=3.0))
    assert job.decisions == []
    assert job.policy.due_s() is None
    assert job.at(100.0, CulpritPace(key="device rank 1", slowdown=2.0), Tick()) == []


def test_fault_that_comes_back_soon_goes_on_with_its_account() -> None:
    job = Job(redistribute_cost_s=10.0, memory_s=600.0)
    for start in (0.0, 100.0, 200.0):
        job.at(start, Pace(episode=f"e{start:.0f}", slowdown=2.0, lost_s=0.0))
        decisions = job.at(start + 2.0, verdict(device(1)))
        decisions += job.at(start + 8.0, Tick())
        if decisions:
            break
        job.at(start + 8.0, Relieved(episode=f"e{start:.0f}", lost_s=4.0))
    (decision,) = decisions
    assert decision.lost_s == pytest.approx(10.0, abs=2.1)
    assert start == 200.0


def test_other_culprits_one_after_the_other_are_not_charged_what_those_before_them_lost() -> None:
    job = Job(Shares({"S4": 1.0}), restart_cost_s=600.0, memory_s=1800.0)
    for number in range(15):  # 55 s each, over ten minutes apart
        start_s, culprit = 700.0 * number, device(number, host=f"gpu-{number}")
        job.at(start_s, Pace(episode=f"e{number}", slowdown=2.0, lost_s=0.0))
        job.at(start_s + 2.0, verdict(culprit, episode=f"e{number}"))
        job.at(start_s + 110.0, Tick())
        job.at(start_s + 110.0, Relieved(episode=f"e{number}", lost_s=55.0))
    assert job.decisions == []
    job.at(11_000.0, Pace(episode="e14", slowdown=2.0, lost_s=0.0))  # the last one is back
    job.at(11_002.0, verdict(culprit, episode="e14"))
    due_s = job.policy.due_s()
    assert due_s == pytest.approx(11_000.0 + (600.0 - 55.0) * 2.0)
    assert due_s is not None
    (decision,) = job.at(due_s, Tick())
    assert decision.level == "S4"
    assert decision.lost_s == pytest.approx(600.0)


def test_another_culprit_in_the_same_episode_has_lost_what_it_has_lost() -> None:
    job = Job(Shares({"S2": 0.8}), redistribute_cost_s=5.0)
    job.slow(0.0)
    job.slow(200.0, lost_s=100.0)
    job.at(200.0, verdict(device(1)))
    job.done(200.0, "S2", slowdown=1.02, cost_s=5.0)
    job.at(220.0, CulpritPace(key="device rank 1", slowdown=1.0))
    (restore,) = job.at(250.0, Tick())
    assert restore.level == "S1"
    job.done(250.0, "S1")
    job.slow(260.0, lost_s=0.0)  # soon after: the episode is called as before
    job.at(261.0, verdict(device(2)))
    assert job.policy.due_s() == pytest.approx(270.0)


def test_fault_that_comes_back_late_is_another_one() -> None:
    job = Job(redistribute_cost_s=10.0, memory_s=600.0)
    job.slow(0.0)
    job.at(8.0, Relieved(episode="e1", lost_s=4.0))
    job.at(700.0, Pace(episode="e2", slowdown=2.0, lost_s=0.0))
    job.at(701.0, verdict(device(1), episode="e2"))
    assert job.policy.due_s() == pytest.approx(720.0)


@given(st.lists(st.floats(1.0, 120.0), min_size=2, max_size=120))
def test_flapping_culprit_does_not_thrash(phases: Sequence[float]) -> None:
    hold_s = 30.0
    job = Job(relief_hold_s=hold_s, memory_s=1e6)
    now_s, applied = 0.0, "S1"
    for number, phase_s in enumerate(phases):
        end_s = now_s + phase_s
        slow = number % 2 == 0
        if slow and applied == "S1":
            job.at(now_s, Pace(episode=f"e{number}", slowdown=2.0, lost_s=0.0))
            job.at(now_s, verdict(device(1), episode=f"e{number}"))
        job.at(now_s, CulpritPace(key="device rank 1", slowdown=2.0 if slow else 1.0))
        while True:
            if job.policy.waiting:
                decision = job.decisions[-1]
                applied = decision.level
                left = {"S1": 2.0 if slow else 1.0}.get(applied, 1.01)
                job.done(now_s, applied, left)
            due_s = job.policy.due_s()
            if due_s is None or due_s > end_s:
                break
            now_s = max(now_s, due_s)
            job.at(now_s, Tick())
        now_s = end_s
        if slow and applied == "S1":
            job.at(now_s, Relieved(episode=f"e{number}", lost_s=phase_s / 2))
    restores = [d for d in job.decisions if d.action == "restore"]
    # the n-th return costs twice the wait of the one before, so they need 2^n · hold_s together
    assert hold_s * (2 ** len(restores) - 1) <= now_s
    assert len(job.decisions) <= 2 * len(restores) + 3
