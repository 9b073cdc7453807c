"""From a verdict to a plan carried out and taken back: scripted jobs that obey their plans."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.runtime.scripted import Scripted

from failslow.config import DecideConfig
from failslow.pipeline import Order, Report, Tick
from failslow.records import Finding, JobFacts, Verdict

MICROBATCHES = 32
EVEN = (8, 8, 8, 8)
FACTS = JobFacts(
    pp=1,
    dp=4,
    microbatches=MICROBATCHES,
    hosts=("a", "b", "c", "d"),
    iteration_s=0.1,
    no_topology_change="no state callbacks given",
    no_restart="no checkpoint callback given",
)


class Steered(Scripted):
    """Four replicas whose Coordinator does as it is told."""

    answers = True
    refuses = ""

    def begin(self, launch: str, entries: Any = ()) -> None:
        first = not self.out
        self.read = len(self.out)
        super().begin(launch, entries)
        if first:
            self.counts = EVEN
            self.slow = [1.0] * 4
            self.orders: list[Order] = []
            self.restarts: list[Order] = []
        self.obey()

    def give(self, event: Any) -> None:
        super().give(event)
        self.obey()

    def obey(self) -> None:
        """Do as the orders say that have come since."""
        new, self.read = self.out[self.read :], len(self.out)
        for order in new:
            if isinstance(order, Order) and order.topic == "restart":
                self.restarts.append(order)
            elif isinstance(order, Order) and order.topic == "steer":
                self.orders.append(order)
                if self.answers:
                    self.answer(order)

    def answer(self, order: Order) -> None:
        body = order.body
        if not self.refuses and body["plan"]["microbatches"]:
            self.counts = tuple(body["plan"]["microbatches"])
        self.give(
            Report(
                node="node0",
                rank=0,
                topic="steer",
                body={
                    "what": "outcome",
                    "id": body["id"],
                    "episode": body["episode"],
                    "level": body["level"],
                    "ok": not self.refuses,
                    "cost_s": 0.001,
                    "error": self.refuses,
                },
            )
        )

    def facts(self, **changes: Any) -> None:
        body = {"what": "facts"} | asdict(FACTS) | changes
        self.give(Report(node="node0", rank=0, topic="steer", body=body))

    def train(self, count: int) -> None:
        """Iterations of 100 ms: 8.5 ms of work a micro-batch and 32 ms of the rest."""
        for _ in range(count):
            own = [0.0085 * m * slow for m, slow in zip(self.counts, self.slow, strict=True)]
            noise = self.random.gauss(1.0, 0.01)
            duration_s = (max(own) + 0.032) * noise
            self.now_s += duration_s
            for rank in self.ranks:
                self.give(self.sample(rank, duration_s, compute_s=own[rank] * noise))
            self.give(Tick())
            if self.step[0] % 10 == 0:
                self.beat()

    def accuse(self, rank: int, slowdown: float) -> None:
        finding = Finding(what="device", slowdown=slowdown, ranks=(rank,), host=FACTS.hosts[rank])
        episode = self.pipeline.episode or ""
        said = self.pipeline.remedy.verdict(
            Verdict(episode=episode, findings=(finding,)), self.now_s
        )
        self.out += said


def steered(**changes: Any) -> Steered:
    config = DecideConfig(
        **{"mode": "auto", "redistribute_cost_s": 0.2, "relief_hold_s": 3.0} | changes
    )
    return Steered(decide=config)


def levels(job: Steered) -> list[tuple[str, str]]:
    return [(e.record.action, e.record.level) for e in job.said("decision")]


def test_one_fault_yields_one_plan_and_the_even_split_once_the_culprit_is_well() -> None:
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    # ten minutes and more: one plan, though the job looks nearly healthy
    job.train(6000)
    assert levels(job) == [("escalate", "S2")]
    assert len(job.orders) == 1
    assert sum(job.counts) == MICROBATCHES
    assert job.counts[2] < 8
    assert [event for event, _ in job.events() if event in ("relief", "abandoned")] == []
    job.slow[2] = 1.0
    job.train(120)
    assert levels(job) == [("escalate", "S2"), ("restore", "S1")]
    assert job.counts == EVEN
    job.train(150)
    assert [event for event, _ in job.events()][-1] == "relief"
    measured = [e.record for e in job.said("outcome") if e.record.slowdown is not None]
    assert len(measured) == 1
    assert 1.0 < measured[0].slowdown < 1.35


def test_a_second_culprit_is_planned_for_with_the_first() -> None:
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(60)
    job.slow[0] = 2.0
    job.train(30)
    job.accuse(0, 2.0)
    job.train(60)
    assert levels(job) == [("escalate", "S2"), ("replan", "S2")]
    assert job.counts[0] == job.counts[2] < job.counts[1]


def test_only_a_coordinator_makes_plans_possible_and_the_reason_is_said_once() -> None:
    job = steered()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(300)
    (decision,) = [e.record for e in job.said("decision")]
    assert decision.action == "stay"
    assert "no coordinator" in decision.reason
    assert job.orders == []


def test_in_mode_observe_nothing_is_decided_and_in_advise_nothing_ordered() -> None:
    for mode, said in (("observe", 0), ("advise", 1)):
        job = steered(mode=mode)
        job.facts()
        job.train(100)
        job.slow[2] = 2.0
        job.train(40)
        job.accuse(2, 2.0)
        job.train(200)
        assert len(job.said("decision")) == said
        assert job.orders == []


def test_a_coordinator_that_does_not_answer_is_asked_twice_and_given_up() -> None:
    job = steered()
    job.answers = False
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(2500)
    assert len(job.orders) == 2
    errors = {e.record.error for e in job.said("outcome")}
    assert errors == {"the job's coordinator did not answer within 60 s"}


def test_a_refusal_is_believed() -> None:
    job = steered()
    job.refuses = "a SyncBatchNorm crosses replicas"
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(600)
    assert 1 <= len(job.orders) <= 2
    assert job.counts == EVEN


def test_letters_without_sense_cost_a_line_and_nothing_else() -> None:
    job = steered()
    bodies: tuple[dict[str, Any], ...] = (
        {"what": "facts", "pp": "two"},
        {"what": "outcome", "ok": 3},
        {},
        {"what": []},
    )
    for body in bodies:
        job.give(Report(node="node0", rank=0, topic="steer", body=body))
    job.give(Report(node="cli", topic="act", body={"order": "S9"}))
    job.train(30)
    assert len(job.job_steps()) >= 25


def test_a_person_may_take_over_and_hand_back() -> None:
    job = steered(redistribute_cost_s=1e6)  # by itself it would never
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(50)
    assert job.orders == []
    job.give(Report(node="cli", topic="act", body={"order": "S2"}))
    job.train(50)
    assert job.counts[2] < 8
    assert levels(job)[-1] == ("obey", "S2")


def slow_host(job: Steered) -> None:
    """One replica is so slow that only leaving its host out helps."""
    job.facts(no_redistribution="FSDP shard axis", no_restart="")
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)


def test_a_host_is_left_out_once_two_verdicts_name_it_and_the_job_was_saved() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0)
    slow_host(job)
    job.accuse(2, 2.0)
    job.train(100)
    assert job.restarts == []  # one verdict is not enough
    job.accuse(2, 2.0)
    job.train(5)
    (order,) = job.restarts
    assert order.body["evict"] == ["node1"]
    assert order.body["why"] == "device rank 2 x2.00"
    assert [order.body["level"] for order in job.orders] == ["S4"]


def test_a_host_that_receives_slowly_from_everybody_is_the_one_left_out() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0)
    slow_host(job)
    ingress = Finding(what="link", slowdown=3.0, ranks=(), peer_ranks=(3,), peer_host="d")
    for _ in range(2):
        episode = job.pipeline.episode or ""
        verdict = Verdict(episode=episode, findings=(ingress,))
        job.out += job.pipeline.remedy.verdict(verdict, job.now_s)
        job.train(5)
    (order,) = job.restarts
    assert order.body["evict"] == ["node1"]
    assert order.body["why"] == "link >d x3.00"


def test_no_host_is_left_out_without_being_asked_for() -> None:
    job = steered(restart_cost_s=1.0)
    slow_host(job)
    for _ in range(3):
        job.accuse(2, 2.0)
        job.train(100)
    assert job.orders == []
    assert job.restarts == []


def test_a_job_that_could_not_be_saved_is_not_started_again() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0)
    job.refuses = "the disk is full"
    slow_host(job)
    for _ in range(3):
        job.accuse(2, 2.0)
        job.train(300)
    assert job.restarts == []
    assert {e.record.ok for e in job.said("outcome")} == {False}


def test_hosts_given_up_are_counted_over_every_start_of_the_job() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0, max_evictions=1)
    slow_host(job)
    job.accuse(2, 2.0)
    job.accuse(2, 2.0)
    job.train(5)
    assert len(job.restarts) == 1
    job.slow[2] = 1.0
    job.begin("launch-2", job.journal)
    job.facts(no_redistribution="FSDP shard axis", no_restart="")
    job.train(100)
    job.slow[0] = 2.0
    job.train(40)
    for _ in range(3):
        job.accuse(0, 2.0)
        job.train(100)
    assert len(job.restarts) == 1
    assert "max_evictions" in job.said("decision")[-1].record.reason


def test_a_new_controller_takes_back_a_split_whose_reason_it_does_not_know() -> None:
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(60)
    assert job.counts[2] < 8
    job.begin("launch-1", job.journal)
    assert job.counts == EVEN
    job.train(60)
    job.accuse(2, 2.0)  # still slow: found again
    job.train(60)
    assert job.counts[2] < 8


def test_what_workers_tell_of_their_micro_batches_outranks_their_time_outside_of_calls() -> None:
    job = steered()
    job.facts()
    pace_s = 0.0085

    def train(count: int) -> None:
        for _ in range(count // 10):
            job.train(10)
            for rank in job.ranks:
                body = {"what": "pace", "rank": rank, "step": 1, "microbatches": job.counts[rank]}
                told = body | {"microbatch_s": pace_s * job.slow[rank] * 0.5}
                job.give(Report(node="node0", rank=rank, topic="steer", body=told))

    train(100)
    job.slow[2] = 2.0
    train(40)
    assert job.pipeline.remedy.own_slowdowns() == {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}
    job.accuse(2, 2.0)
    train(200)
    assert job.counts[2] < 8
    assert job.pipeline.remedy.own_slowdowns()[2] == 2.0
    job.slow[2] = 1.0
    train(100)
    assert job.counts == EVEN
