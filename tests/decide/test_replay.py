"""Faults replayed: what the policy really pays, against the clairvoyant and other policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.decide.jobs import NOTHING_IGNORED, Shares, device, facts, settings, verdict
from tests.decide.journals import Recorder, live
from tests.report.sample_restart import restarted
from tests.report.sample_script import write

from failslow.decide.events import Pace, Relieved, Tick
from failslow.decide.incident import (
    Incident,
    Stretch,
    learn_history,
    read_facts,
    read_incidents,
)
from failslow.decide.learned import History
from failslow.decide.levels import Assessment, LayoutPlanner
from failslow.decide.policy import Policy
from failslow.decide.redecide import redecide
from failslow.decide.replay import RecordedPlanner, compare, replay
from failslow.decide.ski import Ladder
from failslow.journal import JournalEntry, read_journal
from failslow.records import (
    Command,
    CulpritPace,
    JobFacts,
    Outcome,
    Rung,
)
from failslow.stats.survival import SurvivalCurve

FLOAT = 1 + 1e-6


def fault(
    duration_s: float,
    slowdown: float = 2.0,
    *,
    shares: dict[Rung, float] | None = None,
    costs_s: dict[Rung, float] | None = None,
    verdict_after_s: float = 0.0,
    ended: bool = True,
) -> Incident:
    """One culprit, one slowdown throughout."""
    shares = {"S2": 0.8, "S3": 0.9, "S4": 1.0} if shares is None else shares
    stretches = [Stretch(after_s=0.0, slowdown=slowdown)] if verdict_after_s else []
    stretches.append(Stretch(after_s=verdict_after_s, slowdown=slowdown, findings=(device(1),)))
    return Incident(
        id="e1",
        start_t=1000.0,
        duration_s=duration_s,
        ended=ended,
        stretches=tuple(stretches),
        levels={
            level: Assessment(level=level, applicable=True, share=share)
            for level, share in shares.items()
        },
        costs_s=costs_s or {},
    )


@st.composite
def cases(draw: st.DrawFn, levels: int) -> tuple[Incident, dict[Rung, float], Ladder]:
    """A fault, the price of each level, and the same as a ladder for the theory."""
    every: tuple[Rung, ...] = ("S2", "S3", "S4")
    rungs = every[:levels]
    # gains of less than 1e-9 are ignored even so
    share = st.floats(0.0, 1.0).map(lambda value: round(value, 5))
    shares = sorted(draw(st.lists(share, min_size=levels, max_size=levels)))
    prices = sorted(draw(st.lists(st.floats(0.5, 500.0), min_size=levels, max_size=levels)))
    slowdown = draw(st.floats(1.1, 8.0))
    incident = fault(
        draw(st.floats(0.1, 1e4)), slowdown, shares=dict(zip(rungs, shares, strict=True))
    )
    left = [slowdown, *(1 + (slowdown - 1) * (1 - share) for share in shares)]
    ladder = Ladder(cost_s=(0.0, *prices), rate=[1 - 1 / s for s in left])
    return incident, dict(zip(rungs, prices, strict=True)), ladder


def policy_for(incident: Incident, prices: dict[Rung, float]) -> tuple[Policy, RecordedPlanner]:
    planner = RecordedPlanner(tuple(incident.levels.values()))
    config = settings(
        redistribute_cost_s=prices.get("S2", 1.0),
        topology_cost_s=prices.get("S3", 1.0),
        restart_cost_s=prices.get("S4", 1.0),
        **NOTHING_IGNORED,
    )
    return Policy(planner, config), planner


@given(cases(levels=1))
def test_with_two_levels_the_policy_pays_at_most_twice_the_clairvoyant(
    case: tuple[Incident, dict[Rung, float], Ladder],
) -> None:
    incident, prices, ladder = case
    result = replay(incident, *policy_for(incident, prices))
    assert result.total_s <= 2 * float(ladder.clairvoyant_s(incident.duration_s)) * FLOAT


@given(cases(levels=3))
def test_with_additive_costs_the_policy_pays_at_most_twice_the_clairvoyant(
    case: tuple[Incident, dict[Rung, float], Ladder],
) -> None:
    incident, prices, ladder = case
    paid: list[float] = [0.0]

    def difference_s(level: Rung) -> float:
        paid.append(prices[level])
        return paid[-1] - paid[-2]

    result = replay(incident, *policy_for(incident, prices), costs_s=difference_s)
    assert result.total_s <= 2 * float(ladder.clairvoyant_s(incident.duration_s)) * FLOAT


@given(cases(levels=3))
def test_at_full_prices_the_policy_stays_below_four_times_the_clairvoyant(
    case: tuple[Incident, dict[Rung, float], Ladder],
) -> None:
    incident, prices, ladder = case
    result = replay(incident, *policy_for(incident, prices))
    assert result.total_s < 4 * float(ladder.clairvoyant_s(incident.duration_s)) * FLOAT


@given(cases(levels=3))
def test_policy_pays_what_the_theory_of_its_rule_says(
    case: tuple[Incident, dict[Rung, float], Ladder],
) -> None:
    incident, prices, ladder = case
    if any(abs(when / incident.duration_s - 1) < 1e-6 for when in ladder.times_s()):
        return
    result = replay(incident, *policy_for(incident, prices))
    assert result.total_s == pytest.approx(float(ladder.online_s(incident.duration_s)), rel=1e-6)


@hypothesis_settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e4), st.floats(1.1, 5.0), st.floats(0.0, 30.0)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.2, 1.0),
)
def test_history_never_costs_more_than_its_factor(
    seen: list[tuple[float, float, float]], trust: float
) -> None:
    incidents = [
        fault(duration, slowdown, shares={"S2": 0.9}, verdict_after_s=0.0)
        for duration, slowdown, _ in seen
    ]
    history = {"device": SurvivalCurve.fit([s[2] + 0.1 for s in seen])}
    config = settings(trust=trust, redistribute_cost_s=20.0, **NOTHING_IGNORED)
    results = compare(incidents, ("learned", "clairvoyant"), config=config, history=history)
    for learned, best in zip(results["learned"], results["clairvoyant"], strict=True):
        assert learned.total_s <= (1 + 1 / trust) * best.total_s * FLOAT


def test_learning_from_long_faults_saves_time_on_long_faults() -> None:
    rng = np.random.default_rng(0)
    past = [fault(float(d)) for d in rng.lognormal(8.5, 0.5, 40)]
    now = [fault(float(d), verdict_after_s=5.0) for d in rng.lognormal(8.5, 0.5, 40)]
    config = settings(topology_cost_s=200.0, max_evictions=0)
    results = compare(
        now, ("ladder", "learned", "clairvoyant"), config=config, history=learn_history(past)
    )
    total = {name: sum(r.total_s for r in found) for name, found in results.items()}
    assert total["clairvoyant"] < total["learned"] < total["ladder"]


def test_policies_are_what_their_names_say() -> None:
    incident = fault(1000.0, 2.0, verdict_after_s=10.0)
    config = settings(redistribute_cost_s=1.0, topology_cost_s=15.0, restart_cost_s=600.0)
    results = {name: found[0] for name, found in compare([incident], config=config).items()}
    assert (results["recorded"].lost_s, results["recorded"].spent_s) == (0.0, 0.0)
    assert (results["wait"].lost_s, results["wait"].spent_s) == (500.0, 0.0)
    redistributed = 5.0 + 990.0 * (1 - 1 / 1.2)
    assert results["redistribute"].lost_s == pytest.approx(redistributed)
    assert results["redistribute"].spent_s == 1.0
    assert (results["restart"].lost_s, results["restart"].spent_s) == (5.0, 600.0)
    assert results["clairvoyant"].total_s == pytest.approx(15.0 + 1000.0 * (1 - 1 / 1.1))
    assert [d.level for _, d in results["ladder"].decisions] == ["S2", "S3"]
    assert results["ladder"].total_s < results["wait"].total_s


def test_clairvoyant_restarts_only_where_that_is_allowed() -> None:
    incident = fault(1e6)
    config = settings(allow_restart=False)
    assert compare([incident], ("clairvoyant",), config=config)["clairvoyant"][0].spent_s == 15.0
    config = settings(allow_restart=True)
    assert compare([incident], ("clairvoyant",), config=config)["clairvoyant"][0].spent_s == 600.0


def test_evictions_count_over_all_faults_of_the_job() -> None:
    incidents = [fault(1e5, shares={"S4": 1.0}) for _ in range(3)]
    found = compare(incidents, ("ladder",), config=settings(max_evictions=2))["ladder"]
    assert [result.spent_s for result in found] == [600.0, 600.0, 0.0]


def test_measured_costs_outrank_estimates_and_given_ones_outrank_both() -> None:
    incident = fault(1000.0, costs_s={"S2": 7.0})
    assert compare([incident], ("redistribute",))["redistribute"][0].spent_s == 7.0
    found = compare([incident], ("redistribute",), costs_s={"S2": 3.0})
    assert found["redistribute"][0].spent_s == 3.0


# -- journals --------------------------------------------------------------------------------------


def test_journal_gives_back_the_fault_with_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    decisions = live(path)
    assert [d.level for d in decisions] == ["S2", "S3", "S1"]

    (incident,) = read_incidents(read_journal(path))
    assert incident.duration_s == 400.0
    assert incident.ended
    assert [(s.after_s, s.slowdown, len(s.findings)) for s in incident.stretches] == [
        (0.0, 2.0, 0),
        (8.0, 2.0, 1),
    ]
    assert incident.levels["S2"].share == pytest.approx(0.7)  # 0.75 were promised
    assert incident.levels["S3"].share == pytest.approx(0.9)
    assert incident.costs_s == {"S2": 0.4, "S3": 6.0}
    assert incident.lost_s == 20.0
    assert incident.spent_s == pytest.approx(6.4)
    assert incident.kinds == ("device",)


@pytest.mark.parametrize("value", ["soon", [], None, float("inf"), True, -0.0])
def test_a_journal_whose_numbers_are_none_is_read_all_the_same(
    tmp_path: Path, value: object
) -> None:
    live(tmp_path / "j.jsonl")
    whole = list(read_journal(tmp_path / "j.jsonl"))
    none = dict.fromkeys(("start_t", "end_t", "slowdown_now"), value)
    spoilt = [replace(entry, tags={**entry.tags, **none}) for entry in whole]
    known, found = read_incidents(whole), read_incidents(spoilt)
    assert [incident.id for incident in found] == [incident.id for incident in known]
    assert all(incident.duration_s >= 0.0 for incident in found)
    made = redecide(spoilt, Policy(RecordedPlanner(()), settings()))
    assert [decision.action for _, decision in made] == ["stay"]


def test_decisions_written_are_the_decisions_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    decisions = live(path)
    read = [e.record for e in read_journal(path) if e.kind == "decision"]
    assert read == decisions


def test_same_events_from_the_journal_give_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    decisions = live(path)
    policy = Policy(Shares({"S2": 0.75, "S3": 0.9}), settings(relief_hold_s=20.0))
    assert [decision for _, decision in redecide(read_journal(path), policy)] == decisions


def test_other_settings_meet_the_same_events(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    live(path)
    policy = Policy(Shares({"S2": 0.75}), settings(redistribute_cost_s=10.0, mode="advise"))
    ((t, decision),) = redecide(read_journal(path), policy)
    assert decision.threshold_s == 10.0
    assert t == pytest.approx(1e9 + 20.0, abs=1e-3)


def test_persons_orders_in_a_journal_are_followed_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    policy = Policy(Shares({"S2": 0.75, "S3": 0.9}), settings())
    job = Recorder(path, policy)
    made = job.at(0.0, Pace(episode="e1", slowdown=2.0, lost_s=0.0))
    made += job.at(1.0, verdict(device(1)))
    made += policy.update(Command(order="S3"), 1e9 + 1.5)
    order = {"what": "act", "id": "9f3c", "order": "S3", "by": "ada"}
    job.write(1.5, order, kind="action")
    made += job.at(9.0, Outcome(episode="e1", level="S3", ok=True, cost_s=6.0))
    assert [d.action for d in made] == ["obey"]
    again = Policy(Shares({"S2": 0.75, "S3": 0.9}), settings())
    assert [decision for _, decision in redecide(read_journal(path), again)] == made


def test_correction_of_a_plan_is_decided_again_at_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    config = settings(relief_hold_s=10.0, allow_restart=False)
    job = Recorder(path, Policy(LayoutPlanner(facts(), config), config))
    made = job.at(0.0, Pace(episode="e1", slowdown=1.5, lost_s=0.0))
    made += job.at(10.0, verdict(device(1, 1.5)))
    made += job.at(10.0, Outcome(episode="e1", level="S2", ok=True, cost_s=0.002, slowdown=1.02))
    made += job.at(20.0, CulpritPace(key="device rank 1", slowdown=3.0))
    made += job.at(25.0, Tick())  # what was told of it has lasted, and is planned for
    made += job.at(job.due_s(), Tick())
    made += job.at(100.0, Outcome(episode="e1", level="S2", ok=True, cost_s=0.002))
    assert [d.action for d in made] == ["escalate", "replan"]
    told = [entry for entry in read_journal(path) if entry.kind != "decision"]
    again = redecide(told, Policy(LayoutPlanner(facts(), config), config))
    assert [decision for _, decision in again] == made


def test_under_a_plan_a_job_s_pace_is_what_its_policy_was_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    config = settings(relief_hold_s=20.0, allow_restart=False)
    shares = Shares({"S2": 0.75, "S3": 0.95})
    job = Recorder(path, Policy(shares, config))
    made = job.at(0.0, Pace(episode="e1", slowdown=2.0, lost_s=0.0))
    made += job.at(8.0, verdict(device(1)))
    made += job.at(8.4, Outcome(episode="e1", level="S2", ok=True, cost_s=0.4))
    # the detector still tells of the time before the plan
    job.show(10.0, Pace(episode="e1", slowdown=2.0, lost_s=4.4))
    made += job.at(12.0, Outcome(episode="e1", level="S2", ok=True, cost_s=0.0, slowdown=1.3))
    made += job.tell(12.0, pace=Pace(episode="e1", slowdown=1.3, lost_s=4.8))
    job.show(20.0, Pace(episode="e1", slowdown=2.0, lost_s=6.6))
    made += job.tell(20.0, Pace(episode="e1", slowdown=1.3, lost_s=6.6))
    # another program: nobody can tell any more how slow the job is
    over = Relieved(episode="e1", lost_s=8.9, abandoned=True)
    job.show(30.0, over)
    made += job.tell(30.0, over, pace=Pace(episode="e1", slowdown=1.0, lost_s=8.9))
    made += job.at(300.0, CulpritPace(key="device rank 1", slowdown=1.0))
    made += job.at(job.due_s(), Tick())
    job.write(400.0, {"what": "nothing to do with it"}, kind="action")
    assert [(d.action, d.level) for d in made] == [("escalate", "S2"), ("restore", "S1")]
    entries = list(read_journal(path))
    again = redecide(entries, Policy(shares, config))
    assert [(d.action, d.level) for _, d in again] == [("escalate", "S2"), ("restore", "S1")]
    assert [d.lost_s for _, d in again] == pytest.approx([d.lost_s for d in made])
    untold = [e for e in entries if not (e.kind == "action" and e.record["what"] == "pace")]
    other = redecide(untold, Policy(shares, config))
    assert "S3" in {decision.level for _, decision in other}


def test_restore_is_decided_again_where_the_culprits_own_times_are_on_record(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    live(path)
    kept = list(read_journal(path))
    config = settings(relief_hold_s=20.0)
    (incident,) = read_incidents(kept)
    (result,) = compare([incident], ("ladder",), config=config)["ladder"]
    assert [d.action for _, d in result.decisions] == ["escalate", "escalate", "restore"]
    assert result.decisions[-1][0] == pytest.approx(420.0)
    assert "the even split is restored" in result.decisions[-1][1].reason

    (blind,) = read_incidents([e for e in kept if not isinstance(e.record, CulpritPace)])
    assert (blind.paced, blind.ended) == (False, True)
    assert blind.duration_s == pytest.approx(420.0)  # when the recovery was believed
    (result,) = compare([blind], ("ladder",), config=config)["ladder"]
    assert [d.action for _, d in result.decisions] == ["escalate", "escalate"]


def entries(*lines: tuple[float, object]) -> list[JournalEntry]:
    return [JournalEntry(t=t, kind="", record=record) for t, record in lines]


def test_fault_that_outlives_its_journal_was_not_seen_to_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    job = Recorder(path, Policy(Shares({}), settings()))
    job.at(0.0, Pace(episode="e1", slowdown=1.5, lost_s=0.0))
    job.at(60.0, Pace(episode="e1", slowdown=1.5, lost_s=20.0))
    (incident,) = read_incidents(read_journal(path))
    assert (incident.duration_s, incident.ended, incident.lost_s) == (60.0, False, 20.0)


def test_levels_that_failed_are_closed_and_faults_that_deepen_have_stretches(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    job = Recorder(path, Policy(Shares({"S2": 0.75}), settings(max_failures=1)))
    job.at(0.0, Pace(episode="e1", slowdown=1.5, lost_s=0.0))
    job.at(8.0, verdict(device(1)))
    job.at(9.0, Outcome(episode="e1", level="S2", ok=False, cost_s=1.0, error="no answer"))
    job.at(30.0, Pace(episode="e1", slowdown=3.0, lost_s=10.0))
    job.at(50.0, Relieved(episode="e1", lost_s=20.0))
    (incident,) = read_incidents(read_journal(path))
    assert [s.slowdown for s in incident.stretches] == [1.5, 1.5, 3.0]
    assert (incident.levels["S2"].applicable, incident.levels["S2"].reason) == (
        False,
        "no answer",
    )
    found = compare([incident], ("redistribute", "wait"))
    assert found["redistribute"][0].total_s == found["wait"][0].total_s


def test_restart_hides_how_long_the_fault_would_have_lasted(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    job = Recorder(path, Policy(Shares({"S4": 1.0}), settings(restart_cost_s=10.0)))
    job.at(0.0, Pace(episode="e1", slowdown=2.0, lost_s=0.0))
    job.at(30.0, verdict(device(1)))
    job.at(640.0, Outcome(episode="e1", level="S4", ok=True, cost_s=3.5))
    (incident,) = read_incidents(read_journal(path))
    assert (incident.duration_s, incident.ended) == (640.0, False)
    assert incident.costs_s == {}  # it was not seen to train again


def test_restart_costs_what_passes_until_training_is_back(tmp_path: Path) -> None:
    script = restarted()
    (incident,) = read_incidents(read_journal(write(script, tmp_path / "pretrain7")))
    # saved in 3.5 s, one iteration of the old workers, 40 s of nothing
    assert incident.costs_s["S4"] == pytest.approx(3.5 + 0.18 + 40.0, abs=0.1)
    assert incident.spent_s == pytest.approx(incident.costs_s["S4"])
    config = settings(restart_cost_s=600.0)
    found = compare([incident], ("restart", "recorded"), config=config)
    assert found["restart"][0].spent_s == incident.costs_s["S4"]
    assert found["recorded"][0].spent_s == incident.costs_s["S4"]


def test_saving_alone_is_not_what_the_policy_takes_a_restart_to_cost() -> None:
    policy = Policy(Shares({"S4": 1.0}), settings(restart_cost_s=10.0))
    policy.update(Pace(episode="e1", slowdown=2.0, lost_s=0.0), 0.0)
    (decision,) = policy.update(verdict(device(1)), 30.0)
    assert decision.level == "S4"
    policy.update(Outcome(episode="e1", level="S4", ok=True, cost_s=0.45), 31.0)
    assert policy.costs.cost("S4") == (10.0, "estimate")


def test_history_keeps_kinds_apart_and_knows_what_was_cut_short() -> None:
    history: History = learn_history([fault(100.0), fault(300.0, ended=False)])
    assert set(history) == {"device", ""}
    assert history["device"].survival(200.0) == 0.5
    assert history["device"].count == 2


def test_facts_of_the_job_are_read_from_its_journal() -> None:
    facts = JobFacts(pp=1, dp=2, microbatches=8)
    assert read_facts(entries((0.0, facts), (1.0, {"what": "controller"}))) == facts
    assert read_facts(entries((0.0, {}))) is None


def test_work_that_changed_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    job = Recorder(path, Policy(Shares({}), settings()))
    job.at(0.0, Pace(episode="e1", slowdown=2.0, lost_s=0.0))
    (entry,) = read_journal(path)
    changed = replace(entry.record, kind="workload_change")
    assert read_incidents([replace(entry, record=changed)]) == []
