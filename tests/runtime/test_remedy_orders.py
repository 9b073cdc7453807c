"""Orders that fail, that another controller gave, that other workers had."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.test_remedy import (
    EVEN,
    FACTS,
    Steered,
    in_force,
    levels,
    slow_host,
    steered,
    struck,
    told,
)

from failslow.pipeline import Order, Report
from failslow.records import Finding

# -- orders that fail ------------------------------------------------------------------------------


def test_after_orders_that_failed_the_culprits_are_known_for_the_next_one() -> None:
    job = steered(allow_restart=True, restart_cost_s=8.0, confirmations=1)
    job.refuses = "no memory"
    struck(job, no_restart="")
    job.train(5)
    assert levels(job) == [("escalate", "S2")] * 2
    job.refuses = ""
    job.train(400)
    assert levels(job)[-1] == ("escalate", "S4")
    (order,) = job.restarts
    assert order.body["evict"] == ["node1"]
    assert order.body["why"] == "device rank 2 x2.00"


def test_a_culprit_whose_orders_failed_is_followed_under_a_person_s_order() -> None:
    job = steered(max_failures=1)
    job.refuses = "no memory"
    struck(job)
    job.train(60)
    assert levels(job)[0] == ("escalate", "S2")
    job.refuses = ""
    job.give(Report(node="cli", topic="act", body={"order": "S2"}))
    job.train(60)
    assert job.counts[2] < 8
    job.slow[2] = 1.0
    job.train(120)
    assert job.counts == EVEN
    assert levels(job)[-1] == ("restore", "S1")


def test_a_culprit_that_a_pause_found_well_costs_no_host() -> None:
    job = steered(allow_restart=True, restart_cost_s=8.0, confirmations=1)
    job.refuses = "no memory"
    struck(job, no_restart="")
    job.train(5)
    job.refuses = ""
    told(job, well=("device rank 2",))
    job.train(400)
    assert job.restarts == []
    assert levels(job) == [("escalate", "S2")] * 2


def test_a_job_is_not_started_again_without_anybody() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0)
    slow_host(job)
    nobody = Finding(what="device", slowdown=2.0, ranks=(2,), host=FACTS.hosts[2])
    job.pipeline.series.workers[2].node = ""  # no agent said where it is
    for _ in range(2):
        told(job, findings=(nobody,))
    assert [e.record.error for e in job.said("outcome")] == [
        "nobody knows on which node its culprits are"
    ] * 2
    assert job.orders == []
    job.train(100)
    assert job.restarts == []
    assert job.pipeline.remedy.evictions == 0


@pytest.mark.parametrize("slurm", ["off", "requeue"])
def test_the_last_node_of_a_job_is_left_only_where_a_scheduler_finds_others(
    slurm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0, confirmations=1, slurm=slurm)
    monkeypatch.setattr(job, "node", lambda _rank: "node1")
    slow_host(job)
    job.accuse(2, 2.0)
    job.train(100)
    if slurm == "requeue":
        assert [order.body["level"] for order in job.orders] == ["S4"]
        return
    assert job.orders == []
    assert {e.record.error for e in job.said("outcome")} == {
        "the job has no node but node1 to start again on"
    }


def test_the_only_host_of_a_job_is_not_even_planned_to_be_left_out() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0, confirmations=1)
    slow_host(job, hosts=["vm"] * 4)
    job.accuse(2, 2.0)
    job.train(100)
    job.give(Report(node="cli", topic="act", body={"order": "S4"}))
    assert "S4" not in {level for _, level in levels(job)}
    asked = job.said("decision")[-1].record
    assert asked.reason == ("S4 was asked for, but the job has no host but vm to start again on")
    assert job.said("outcome") == []


# -- what an earlier controller ordered ------------------------------------------------------------


class TakenOver(Steered):
    """A new controller finds a split that it takes back, and `failures` orders for it fail."""

    failures = 0

    def answer(self, order: Order) -> None:
        self.refuses = "rank 2: rebuild failed" * (
            order.body["level"] == "S1" and self.failures > 0
        )
        self.failures -= bool(self.refuses)
        super().answer(order)


def taken_over(failures: int, **changes: Any) -> TakenOver:
    plain = steered(**changes)
    job = TakenOver(decide=plain.decide)
    struck(job)
    job.train(60)
    assert job.counts[2] < 8
    job.failures = failures
    job.begin("launch-1", job.journal)
    return job


def test_a_split_that_cannot_be_taken_back_at_once_is_tried_again() -> None:
    job = taken_over(failures=2)
    job.slow[2] = 1.0
    assert job.counts[2] < 8
    assert job.pipeline.remedy.holding
    job.train(200)
    assert len(job.orders) == 2  # not at once
    job.train(1000)
    assert job.counts == EVEN == in_force(job).microbatches
    assert [order.body["level"] for order in job.orders] == ["S2", "S1", "S1", "S1"]
    assert not job.pipeline.remedy.holding


def test_a_split_that_cannot_be_taken_back_is_known_to_stay() -> None:
    job = taken_over(failures=9)
    split = job.counts
    job.slow[2] = 1.0
    job.train(3000)
    assert [order.body["level"] for order in job.orders] == ["S2"] + ["S1"] * 4
    assert job.counts == split == in_force(job).microbatches
    assert not job.pipeline.remedy.holding


def test_a_take_back_that_nobody_answers_is_given_again() -> None:
    job = steered()
    struck(job)
    job.train(60)
    job.answers = False
    job.begin("launch-1", job.journal)
    asked = len(job.orders)
    job.wait(62.0)
    job.answers = True
    job.wait(32.0)
    assert len(job.orders) == asked + 1
    assert job.counts == EVEN


def test_a_third_controller_knows_the_orders_of_the_second() -> None:
    job = taken_over(failures=9)
    job.failures = 0
    job.begin("launch-1", job.journal)
    ids = [order.body["id"] for order in job.orders]
    assert ids == [1, 2, 3]
    assert job.counts == EVEN
    job.begin("launch-1", job.journal)
    assert len(job.orders) == 3  # it is even


def test_what_the_second_could_not_take_back_the_third_does() -> None:
    """The second has written meanwhile what is in force, which is not yet what it plans by."""
    job = taken_over(failures=9)
    job.slow[2] = 1.0
    job.train(200)
    assert "standing" in [e.record["what"] for e in job.said("action")[-2:]]
    assert job.counts != EVEN
    job.failures = 0
    job.begin("launch-1", job.journal)
    assert job.counts == EVEN


def test_a_plan_for_a_culprit_found_meanwhile_outdoes_the_take_back() -> None:
    job = taken_over(failures=9)
    job.train(60)
    job.accuse(2, 2.0)
    job.train(60)
    assert [order.body["level"] for order in job.orders] == ["S2", "S1", "S2"]
    job.train(2000)
    assert job.counts == in_force(job).microbatches != EVEN
    assert [order.body["level"] for order in job.orders] == ["S2", "S1", "S2"]
    job.failures = 0
    job.slow[2] = 1.0
    job.train(150)
    assert job.counts == EVEN


# -- workers that are started again ----------------------------------------------------------------


def start_again(job: Steered) -> None:
    """All workers are other processes, and begin with the even split at their own places."""
    for rank in job.ranks:
        job.process[rank], job.step[rank] = f"{2000 + rank}-99", -1
    job.now_s += 3.0
    job.counts, job.placement = EVEN, (0, 1, 2, 3)
    job.beat()
    job.facts()


def test_workers_that_are_started_again_run_as_at_the_start() -> None:
    job = steered()
    struck(job)
    job.train(60)
    assert in_force(job).microbatches == job.counts != EVEN
    job.answers = False
    start_again(job)
    job.slow[2] = 1.0
    job.train(1)
    assert in_force(job).microbatches == EVEN
    assert job.orders[-1].body["level"] == "S2"  # slow, as far as is known
    (*_, standing) = [e.record for e in job.said("action") if e.record["what"] == "standing"]
    assert standing["microbatches"] == list(EVEN)


def test_a_culprit_that_outlives_the_workers_is_planned_for_again() -> None:
    job = steered()
    struck(job)
    job.train(60)
    start_again(job)
    job.train(200)
    assert levels(job) == [("escalate", "S2"), ("escalate", "S2")]
    assert in_force(job).microbatches == job.counts
    assert job.counts[2] < 8
    job.slow[2] = 1.0
    job.train(150)
    assert levels(job)[-1] == ("restore", "S1")
    assert job.counts == EVEN


def test_an_order_that_the_workers_died_with_is_not_waited_for() -> None:
    job = steered()
    job.answers = False
    struck(job)
    job.train(1)
    (lost,) = job.orders
    start_again(job)
    job.train(1)
    errors = [e.record.error for e in job.said("outcome")]
    assert errors == ["the workers were started again"]
    job.answer(lost)  # it was on its way: of workers that are gone
    assert in_force(job).microbatches == EVEN


def another_coordinator(job: Steered) -> None:
    """As where a second training begins in the same processes: with the even split."""
    job.counts = EVEN
    for _ in range(3):  # it says so again until it knows what an iteration takes
        job.facts(iteration_s=0.0)
        job.train(10)
    job.facts()


def test_another_coordinator_of_the_same_workers_begins_with_the_even_split() -> None:
    job = steered()
    struck(job)
    job.train(60)
    assert job.counts[2] < 8
    another_coordinator(job)
    assert levels(job) == [("escalate", "S2")] * 2
    assert in_force(job).microbatches == job.counts != EVEN
    assert [e.record.iteration_s for e in job.said("jobfacts")][-3:] == [0.1, 0.0, 0.1]
    job.slow[2] = 1.0
    job.train(150)
    assert job.counts == EVEN


def test_workers_whose_coordinator_was_heard_before_them_are_planned_for_once() -> None:
    job = steered()
    struck(job)
    job.train(60)
    start_again(job)
    job.facts(iteration_s=0.0)
    job.train(100)
    assert levels(job) == [("escalate", "S2")] * 2
    assert in_force(job).microbatches == job.counts != EVEN


def test_an_order_to_workers_without_a_coordinator_ends_with_them() -> None:
    """Else the policy would wait for its outcome for ever."""
    job = steered(allow_restart=True, restart_cost_s=1.0, confirmations=1)
    job.answers = False
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(20)
    assert [order.body["level"] for order in job.orders] == ["S4"]
    for rank in job.ranks:
        job.process[rank], job.step[rank] = f"{2000 + rank}-99", -1
    job.now_s += 3.0
    job.train(1)
    assert [e.record.error for e in job.said("outcome")] == ["the workers were started again"]
    assert [order.body["level"] for order in job.orders] == ["S4", "S4"]  # it is still slow


def test_a_new_controller_knows_that_the_workers_were_started_again() -> None:
    job = steered()
    struck(job)
    job.train(60)
    job.answers = False
    start_again(job)
    job.slow[2] = 1.0
    job.train(1)
    # killed before it could order S2 again
    journal = [e for e in job.journal if e.kind != "action" or e.record.get("id") != 2]
    count = len(job.orders)
    job.begin("launch-1", journal)
    assert len(job.orders) == count  # nothing is to be taken back
