"""What the policy may do: modes, failures, restarts, orders, histories, and any events at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.decide.jobs import Shares, device, facts, link, settings, verdict
from tests.decide.policed import LEVELS, Job

from failslow.decide.events import Event, Pace, Relieved, Tick
from failslow.decide.levels import LayoutPlanner
from failslow.decide.policy import Policy
from failslow.records import Command, CulpritPace, Decision, JobFacts, Outcome, Rung
from failslow.stats.survival import SurvivalCurve


def test_observing_policy_decides_nothing() -> None:
    job = Job(mode="observe")
    job.slow(0.0)
    assert job.at(1000.0, verdict(device(1)), Tick()) == []
    assert job.policy.due_s() is None


def test_advice_is_given_at_the_same_moments_and_carried_out_by_nobody() -> None:
    job = Job(mode="advise")
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    for now_s in (20.0, 31.0, 40.0, 2000.0):
        job.at(now_s, Tick())
    assert [(d.level, d.apply) for d in job.decisions] == [
        ("S2", False),
        ("S3", False),
        ("S4", False),
    ]
    assert not job.policy.waiting
    job.at(2001.0, Relieved(episode="e1", lost_s=1000.0))
    assert job.policy.level == "S1"


def test_advice_is_given_again_when_another_culprit_joins() -> None:
    job = Job(LayoutPlanner(facts(), settings()), mode="advise", allow_restart=False)
    job.slow(0.0)
    (first,) = job.at(10.0, verdict(device(1)))
    assert job.at(11.0, verdict(device(1, 2.3)), Tick()) == []
    (second,) = job.at(12.0, verdict(device(2)))
    assert (first.action, second.action, second.apply) == ("escalate", "replan", False)
    assert second.plan is not None
    assert second.plan.microbatches == (11, 5, 5, 11)
    assert job.at(13.0, Tick()) == []


def test_restart_needs_to_be_allowed_confirmed_and_within_its_cap() -> None:
    only_restart = Shares({"S4": 1.0})
    barred = Job(only_restart, allow_restart=False)
    barred.slow(0.0)
    (decision,) = barred.at(5000.0, verdict(device(1)))
    assert "S4: restarting is not allowed" in decision.reason

    job = Job(only_restart, confirmations=2, max_evictions=1)
    job.slow(0.0)
    (decision,) = job.at(5000.0, verdict(device(1)))
    assert "S4: 1 of 2 verdicts name device rank 1" in decision.reason
    (decision,) = job.at(5010.0, verdict(device(1)))
    assert (decision.level, decision.apply) == ("S4", True)
    assert decision.plan is not None
    assert decision.plan.evict == ("gpu-1",)
    job.done(5600.0, "S4", cost_s=590.0)
    assert job.policy.evictions == 1
    assert job.policy.level == "S1"

    job.at(9000.0, Pace(episode="e2", slowdown=2.0, lost_s=0.0))
    (decision,) = job.at(15000.0, verdict(device(2), episode="e2"))
    assert "S4: 1 hosts were given up before and 1 more would exceed" in decision.reason


def _ring() -> JobFacts:
    """Four replicas of two stages on eight hosts: a congested ring is helped by S3 alone."""
    hosts = tuple(f"gpu-{n}" for n in range(8))
    return facts(pp=2, stage_s=(0.1, 0.1), hosts=hosts, dp_s=0.3, pp_s=0.004)


def test_places_change_once_a_fault_is_old_enough_to_be_worth_it() -> None:
    planner = LayoutPlanner(_ring(), settings())
    job = Job(planner, allow_restart=False, topology_cost_s=60.0, horizon_s=20.0)
    congested = verdict(link("gpu-2", "gpu-3"))
    job.slow(0.0, lost_s=0.0)
    # it has lost more than a move costs, in little time: it may be over as soon
    (stays,) = job.at(10.0, Pace(episode="e1", slowdown=2.0, lost_s=80.0), congested)
    assert stays.action == "stay"
    assert "less than the 60 s that moving costs" in stays.reason
    due_s = job.policy.due_s()
    assert due_s is not None
    assert 60.0 < due_s < 200.0
    assert job.at(due_s - 1.0, Tick()) == []
    (moves,) = job.at(due_s, Tick())
    assert (moves.action, moves.level, moves.apply) == ("escalate", "S3", True)


def test_a_person_may_order_a_change_of_places_that_would_not_pay() -> None:
    planner = LayoutPlanner(_ring(), settings())
    job = Job(planner, allow_restart=False, topology_cost_s=1e6, horizon_s=1.0)
    job.slow(0.0)
    (stays,) = job.at(10.0, verdict(link("gpu-2", "gpu-3")))
    assert stays.action == "stay"
    (decision,) = job.at(11.0, Command(order="S3"))
    assert (decision.action, decision.level, decision.apply) == ("obey", "S3", True)


def test_plan_that_fails_is_tried_again_and_then_given_up() -> None:
    job = Job(max_failures=2, allow_restart=False)
    failed = Outcome(episode="e1", level="S2", ok=False, cost_s=1.0, error="rank 3 timed out")
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    (again,) = job.at(11.0, failed)
    assert (again.action, again.level, again.from_level) == ("escalate", "S2", "S1")
    assert job.at(12.0, failed) == []
    (instead,) = job.at(60.0, Tick())
    assert instead.level == "S3"
    assert "failed 2 times" in instead.options[1].reason


@pytest.mark.parametrize("abandoned", [True, False])
def test_order_that_fails_after_its_episode_leaves_no_culprit_behind(abandoned: bool) -> None:
    job = Job()
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    job.at(20.0, Pace(episode="e1", slowdown=1.0, lost_s=10.0))
    job.at(20.0, Relieved(episode="e1", lost_s=10.0, abandoned=abandoned))
    job.at(70.0, Outcome(episode="e1", level="S2", ok=False, cost_s=0.0, error="no answer"))
    assert job.at(50_000.0, Pace(episode="e2", slowdown=2.0, lost_s=100.0)) == []
    (decision,) = job.at(50_001.0, verdict(device(2, host="gpu-2"), episode="e2"))
    assert decision.culprits == ("device rank 2",)


def test_refused_plan_is_never_tried_again() -> None:
    job = Job()
    refused = Outcome(
        episode="e1", level="S2", ok=False, cost_s=0.0, error="SyncBN found", refused=True
    )
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    assert job.at(11.0, refused) == []
    job.at(20.0, Relieved(episode="e1", lost_s=10.0))
    job.at(9000.0, Pace(episode="e2", slowdown=2.0, lost_s=0.0))
    (decision,) = job.at(9100.0, verdict(device(1), episode="e2"))
    assert decision.level == "S3"
    assert decision.options[1].reason == "SyncBN found"


def test_restore_that_fails_is_tried_again_after_as_long_a_wait() -> None:
    job = Job(relief_hold_s=30.0)
    job.mitigated(slowdown=1.02)
    job.at(100.0, CulpritPace(key="device rank 1", slowdown=1.0))
    job.at(130.0, Tick())
    failed = Outcome(episode="e1", level="S1", ok=False, cost_s=0.1, error="busy")
    assert job.at(131.0, failed) == []
    assert job.policy.due_s() == pytest.approx(161.0)
    (decision,) = job.at(161.0, Tick())
    assert decision.action == "restore"


def test_change_of_places_is_not_undone_at_relief() -> None:
    job = Job(Shares({"S3": 0.9}), relief_hold_s=30.0)
    job.slow(0.0)
    job.at(40.0, verdict(link("gpu-1", "gpu-2")))
    job.done(41.0, "S3", slowdown=1.05)
    job.at(50.0, CulpritPace(key="link gpu-1>gpu-2", slowdown=1.0))
    (decision,) = job.at(80.0, Tick())
    assert (decision.action, decision.apply, decision.plan) == ("restore", False, None)
    assert job.policy.in_force.placement == (1, 0)


def test_person_overrules_and_hands_back() -> None:
    job = Job(redistribute_cost_s=100.0)
    assert job.at(0.0, Command(order="S3")) == []  # nothing to act on
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="S3"))
    assert (decision.action, decision.level, decision.apply) == ("obey", "S3", True)
    (busy,) = job.at(2.5, Command(order="S2"))
    assert "S3 is being carried out" in busy.reason
    job.done(3.0, "S3", slowdown=1.9)
    assert job.at(5000.0, Tick()) == []
    resumed, escalated = job.at(5001.0, Command(order="resume"))
    assert resumed.action == "obey"
    assert escalated.level == "S4"


def test_person_may_order_what_the_mode_would_not_do() -> None:
    job = Job(mode="advise", redistribute_cost_s=100.0)
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="S2"))
    assert decision.apply


def test_what_a_person_ordered_is_undone_in_whatever_mode() -> None:
    job = Job(mode="advise", redistribute_cost_s=100.0, relief_hold_s=30.0)
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    job.at(2.0, Command(order="S2"))
    job.done(3.0, "S2", slowdown=1.2)
    job.at(100.0, CulpritPace(key="device rank 1", slowdown=1.0))
    (decision,) = job.at(130.0, Tick())
    assert (decision.action, decision.level, decision.apply) == ("restore", "S1", True)
    assert job.policy.waiting
    assert (job.policy.level, job.policy.applied) == ("S1", "S2")  # the account is open
    failed = Outcome(episode="e1", level="S1", ok=False, cost_s=0.1, error="busy")
    assert job.at(131.0, failed) == []
    (decision,) = job.at(161.0, Tick())
    assert decision.apply
    job.done(162.0, "S1")
    assert job.policy.in_force.microbatches == (8, 8)
    assert job.policy.applied == "S1"
    assert job.at(1e4, Tick()) == []


def test_advice_that_nobody_followed_needs_no_undoing() -> None:
    job = Job(mode="advise", relief_hold_s=30.0)
    job.slow(0.0)
    job.at(10.0, verdict(device(1)))
    job.at(20.0, CulpritPace(key="device rank 1", slowdown=1.0))
    (decision,) = job.at(50.0, Tick())
    assert (decision.action, decision.apply) == ("restore", False)


_UNANSWERED = "the job's coordinator did not answer"


def _unanswered(job: Job, now_s: float, level: Rung) -> list[Decision]:
    failed = Outcome(episode="e1", level=level, ok=False, cost_s=0.0, error=_UNANSWERED)
    return job.at(now_s, failed)


def _late(job: Job, now_s: float, decision: Decision) -> list[Decision]:
    outcome = Outcome(episode="e1", level=decision.level, ok=True, cost_s=0.5)
    new = job.policy.late(decision, outcome, now_s)
    job.decisions += new
    return new


def test_a_plan_carried_out_late_is_in_force_and_its_failure_none() -> None:
    job = Job(max_failures=2, allow_restart=False)
    job.slow(0.0)
    (first,) = job.at(10.0, verdict(device(1)))
    (again,) = _unanswered(job, 70.0, "S2")
    assert again.level == "S2"
    assert _late(job, 71.0, first) == []  # the second one is on its way
    assert job.policy.waiting
    assert job.policy.in_force.microbatches == (5, 11)
    assert (job.policy.applied, job.policy.level) == ("S2", "S2")
    _unanswered(job, 130.0, "S2")
    assert job.policy.applied == "S2"  # what the first one did still holds
    assert job.policy.in_force.microbatches == (5, 11)


def test_a_plan_carried_out_after_its_fault_is_taken_back() -> None:
    job = Job(Shares({"S2": 0.8}), max_failures=1, relief_hold_s=30.0)
    job.slow(0.0)
    (first,) = job.at(10.0, verdict(device(1)))
    _unanswered(job, 70.0, "S2")
    job.at(80.0, Relieved(episode="e1", lost_s=40.0))
    (back,) = _late(job, 90.0, first)
    assert (back.action, back.level, back.apply) == ("restore", "S1", True)
    assert "carried out late" in back.reason
    # should that fail, there is a wait before it is tried again
    failed = Outcome(episode="e1", level="S1", ok=False, cost_s=0.1, error="busy")
    assert job.at(91.0, failed) == []
    assert job.policy.due_s() == pytest.approx(121.0)
    (back,) = job.at(121.0, Tick())
    assert back.apply
    assert job.done(122.0, "S1") == []
    assert job.policy.in_force.microbatches == (8, 8)
    assert job.policy.applied == "S1"
    assert job.policy.due_s() is None


def test_an_even_split_that_came_back_late_leaves_a_fault_that_is_on() -> None:
    job = Job(Shares({"S2": 0.8}), relief_hold_s=30.0)
    job.mitigated(slowdown=1.02)
    job.at(100.0, CulpritPace(key="device rank 1", slowdown=1.0))
    (back,) = job.at(130.0, Tick())
    _unanswered(job, 190.0, "S1")
    job.at(195.0, CulpritPace(key="device rank 1", slowdown=2.0))
    _late(job, 200.0, back)
    assert job.policy.applied == "S1"
    assert job.policy.in_force.microbatches == (8, 8)
    (again,) = job.slow(210.0, lost_s=60.0)
    assert (again.action, again.level) == ("escalate", "S2")


def test_an_even_split_that_came_back_late_ends_a_fault_that_is_over() -> None:
    job = Job(relief_hold_s=30.0)
    job.mitigated(slowdown=1.02)
    job.at(100.0, CulpritPace(key="device rank 1", slowdown=1.0))
    (back,) = job.at(130.0, Tick())
    _unanswered(job, 190.0, "S1")
    assert _late(job, 200.0, back) == []
    assert job.policy.in_force.microbatches == (8, 8)
    assert job.policy.due_s() is None
    assert _late(job, 201.0, back) == []


def test_a_job_saved_late_has_lost_its_host() -> None:
    job = Job(Shares({"S4": 1.0}), max_failures=1)
    job.slow(0.0)
    (saved,) = job.at(5000.0, verdict(device(1)))
    _unanswered(job, 6000.0, "S4")
    _late(job, 6100.0, saved)
    assert job.policy.evictions == 1
    assert job.policy.applied == "S1"
    assert not job.policy.waiting


def test_order_that_cannot_be_says_why() -> None:
    job = Job(LayoutPlanner(facts(no_redistribution="FSDP shard axis"), settings()))
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="S2"))
    assert (decision.action, decision.apply) == ("stay", False)
    assert decision.reason == "S2 was asked for, but FSDP shard axis"


def test_ignored_culprit_is_left_alone_until_it_has_recovered() -> None:
    job = Job(redistribute_cost_s=10.0)
    job.slow(0.0)
    job.at(1.0, verdict(device(1)))
    (decision,) = job.at(2.0, Command(order="ignore"))
    assert "device rank 1 is left alone" in decision.reason
    assert job.at(900.0, Tick()) == []
    job.at(901.0, Relieved(episode="e1", lost_s=450.0))
    job.at(910.0, Pace(episode="e2", slowdown=2.0, lost_s=0.0))
    (decision,) = job.at(911.0, verdict(device(1), episode="e2"))
    assert decision.level == "S2"


def test_history_of_long_faults_makes_it_act_early_and_says_so() -> None:
    history = {"device": SurvivalCurve.fit([40000.0, 80000.0])}
    policy = Policy(LEVELS, settings(trust=0.5, redistribute_cost_s=10.0), history=history)
    policy.update(Pace(episode="e1", slowdown=2.0, lost_s=0.0), 0.0)
    assert policy.update(verdict(device(1)), 1.0) == []
    assert policy.due_s() == pytest.approx(10.0)
    (decision,) = policy.update(Tick(), policy.due_s() or 0.0)
    assert decision.trust_factor == 0.5
    assert decision.threshold_s == pytest.approx(5.0)


@pytest.mark.parametrize("start_s", [0.0, 1.7e9, 4.0e9])
@given(cost_s=st.floats(0.01, 1e3), slowdown=st.floats(1.11, 9.0), hold_s=st.floats(0.0, 1e3))
def test_tick_when_it_is_due_is_enough_whatever_the_clock(
    start_s: float, cost_s: float, slowdown: float, hold_s: float
) -> None:
    job = Job(Shares({"S2": 0.8}), redistribute_cost_s=cost_s, relief_hold_s=hold_s)
    job.slow(start_s, slowdown)
    job.at(start_s, verdict(device(1)))
    due_s = job.policy.due_s()
    assert due_s is not None
    assert [d.level for d in job.at(due_s, Tick())] == ["S2"]
    job.done(due_s, "S2", 1.01)
    job.at(due_s + 1.0, CulpritPace(key="device rank 1", slowdown=1.0))
    due_s = job.policy.due_s() or due_s + 1.0
    job.at(due_s, Tick())
    assert [d.action for d in job.decisions] == ["escalate", "restore"]


events = st.one_of(
    st.builds(
        Pace,
        episode=st.sampled_from(["e1", "e2"]),
        slowdown=st.floats(1.0, 5.0),
        lost_s=st.floats(0.0, 1e3),
    ),
    st.builds(Relieved, episode=st.sampled_from(["e1", "e2"]), lost_s=st.floats(0.0, 1e3)),
    st.just(Tick()),
    st.sampled_from([verdict(device(0)), verdict(device(1), link("gpu-1", "gpu-2")), verdict()]),
    st.builds(
        CulpritPace,
        key=st.sampled_from(["device rank 0", "device rank 1", "link gpu-1>gpu-2"]),
        slowdown=st.floats(1.0, 4.0),
    ),
    st.builds(
        Outcome,
        episode=st.just("e1"),
        level=st.sampled_from(["S1", "S2", "S3", "S4"]),
        ok=st.booleans(),
        cost_s=st.floats(0.0, 100.0),
        slowdown=st.none() | st.floats(1.0, 3.0),
        refused=st.booleans(),
    ),
    st.builds(Command, order=st.sampled_from(["S2", "S3", "S4", "resume", "ignore"])),
)


@given(
    st.lists(st.tuples(st.floats(0.0, 200.0), events), max_size=40),
    st.sampled_from(["observe", "advise", "auto"]),
)
def test_any_events_give_sane_decisions_and_the_same_ones_again(
    story: list[tuple[float, Event]], mode: str
) -> None:
    told = []
    for _ in range(2):
        job = Job(LayoutPlanner(facts(dp_s=0.2), settings()), mode=mode)
        now_s = 0.0
        for wait_s, event in story:
            now_s += wait_s
            waiting = job.policy.waiting
            for decision in job.at(now_s, event):
                assert decision.lost_s >= 0.0
                assert decision.plan is None or decision.plan.level == decision.level
                assert not decision.apply or decision.plan is not None
                assert not (decision.apply and waiting and not isinstance(event, Outcome))
                # a person's order is carried out in any mode, and so is its end
                told_to = decision.action in ("obey", "restore")
                assert told_to or decision.apply <= (mode == "auto")
            due_s = job.policy.due_s()
            assert due_s is None or due_s >= now_s
        told.append(job.decisions)
    assert told[0] == told[1]
    if mode == "observe":
        assert all(d.action in ("obey", "stay") for d in told[0])
