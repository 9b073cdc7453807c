"""From a verdict to a plan carried out and taken back: scripted jobs that obey their plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.runtime.scripted import Scripted

from failslow.config import DecideConfig
from failslow.decide import InForce
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
            self.counts: tuple[int, ...] = EVEN
            self.placement: tuple[int, ...] = (0, 1, 2, 3)
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
        body, plan = order.body, order.body["plan"]
        if not self.refuses:  # as `mitigate.steer_apply.Hands` does
            self.placement = tuple(plan["placement"]) or self.placement
            self.counts = tuple(plan["microbatches"]) or self.counts
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

    def pass_by(self, own: Sequence[float], iteration_s: float) -> None:
        """One iteration, of which each rank takes so much by itself."""
        noise = self.random.gauss(1.0, 0.01)
        self.now_s += iteration_s * noise
        for rank in self.ranks:
            self.give(self.sample(rank, iteration_s * noise, compute_s=own[rank] * noise))
        self.give(Tick())

    def train(self, count: int) -> None:
        """Iterations of 100 ms: 8.5 ms of work a micro-batch and 32 ms of the rest."""
        for _ in range(count):
            at = [self.placement.index(rank) for rank in self.ranks]
            own = [0.0085 * self.counts[at[rank]] * self.slow[rank] for rank in self.ranks]
            self.pass_by(own, max(own) + 0.032)
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


def struck(job: Steered, **facts: Any) -> None:
    """Healthy for a while, then worker 2 takes twice as long and is named."""
    job.facts(**facts)
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)


def levels(job: Steered) -> list[tuple[str, str]]:
    return [(e.record.action, e.record.level) for e in job.said("decision")]


def test_one_fault_yields_one_plan_and_the_even_split_once_the_culprit_is_well() -> None:
    job = steered()
    struck(job)
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
    struck(job)
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
        struck(job)
        job.train(200)
        assert len(job.said("decision")) == said
        assert job.orders == []


def test_a_coordinator_that_does_not_answer_is_asked_twice_and_given_up() -> None:
    job = steered()
    job.answers = False
    struck(job)
    job.train(2500)
    assert len(job.orders) == 2
    errors = {e.record.error for e in job.said("outcome")}
    assert errors == {"the job's coordinator did not answer within 61 s"}


def test_a_refusal_is_believed() -> None:
    job = steered()
    job.refuses = "a SyncBatchNorm crosses replicas"
    struck(job)
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
    struck(job)
    job.train(50)
    assert job.orders == []
    job.give(Report(node="cli", topic="act", body={"order": "S2"}))
    job.train(50)
    assert job.counts[2] < 8
    assert levels(job)[-1] == ("obey", "S2")


def slow_host(job: Steered, **facts: Any) -> None:
    """One replica is so slow that only leaving its host out helps."""
    job.facts(no_redistribution="FSDP shard axis", no_restart="", **facts)
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
    struck(job)
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


def congested(job: Steered) -> str:
    """S2 for a slow device, then S3 for a slow link too; the link's key."""
    struck(job, no_topology_change="", dp_s=0.03)
    job.train(60)
    assert job.counts[2] < 8
    link = Finding(what="link", slowdown=6.0, ranks=(), host="a", peer_host="b")
    told(job, findings=(link,))
    job.give(Report(node="cli", topic="act", body={"order": "S3"}))
    return link.key


def told(job: Steered, **about: Any) -> None:
    verdict = Verdict(episode=job.pipeline.episode or "", **about)
    job.out += job.pipeline.remedy.verdict(verdict, job.now_s)
    job.obey()


def in_force(job: Steered) -> InForce:
    return job.pipeline.remedy._policy.in_force


def test_places_and_the_split_planned_with_them_are_in_force_at_the_trainer() -> None:
    job = steered(relief_hold_s=3.0)
    congested(job)
    order = job.orders[-1].body
    assert order["level"] == "S3"
    assert sum(order["plan"]["microbatches"]) == MICROBATCHES
    assert job.placement != (0, 1, 2, 3)
    assert in_force(job) == InForce(microbatches=job.counts, placement=job.placement)
    # the slow worker has fewer at its new place
    assert job.counts[job.placement.index(2)] == min(job.counts) < 8
    job.slow[2] = 1.0
    job.train(200)
    assert in_force(job) == InForce(microbatches=job.counts, placement=job.placement)


def test_places_changed_for_an_earlier_fault_are_no_level_for_the_next_one() -> None:
    job = steered(topology_cost_s=0.2)
    job.facts(no_topology_change="", dp_s=0.03)
    job.train(100)
    job.placement = (0, 2, 1, 3)  # as after a congested link
    policy = job.pipeline.remedy._policy
    policy.in_force = InForce(microbatches=EVEN, placement=job.placement)
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    job.train(300)
    assert levels(job) == [("escalate", "S2")]
    assert [order.body["level"] for order in job.orders] == ["S2"]
    assert job.counts[job.placement.index(2)] < 8


def test_what_an_iteration_takes_is_learnt_after_the_first_facts() -> None:
    """A Coordinator has to see some first; without it gains are guessed, in rounds."""
    job = steered()
    job.facts(iteration_s=0.0, dp_s=0.03, no_topology_change="")
    job.facts(iteration_s=0.0, dp_s=0.03, no_topology_change="")
    assert [e.record.iteration_s for e in job.said("jobfacts")] == [0.0]
    job.train(100)
    job.facts(dp_s=0.03, no_topology_change="")
    job.facts(iteration_s=0.2, dp_s=0.03, no_topology_change="")
    assert [e.record.iteration_s for e in job.said("jobfacts")] == [0.0, 0.1]
    job.slow[2] = 2.0
    job.train(40)
    job.accuse(2, 2.0)
    decision = job.said("decision")[-1].record
    (refused,) = [o.reason for o in decision.options if o.level == "S3"]
    assert refused == "the best placement takes 0.17 s to 0.17 s an iteration: below a gain of 5 %"


def test_only_what_a_pause_measured_and_found_fast_is_well() -> None:
    job = steered(relief_hold_s=3.0)
    key = congested(job)
    job.slow[2] = 1.0
    for _ in range(5):
        told(job)  # a pause that did not get as far as this link
        job.train(60)
    assert levels(job)[-1] != ("restore", "S1")
    told(job, well=("link b>a", "device rank 0"))
    job.train(60)
    account = job.pipeline.remedy._policy._account
    assert account is not None
    assert key in account.findings
    told(job, well=(key,))
    job.train(60)
    assert levels(job)[-1] == ("restore", "S1")
    assert job.counts == EVEN


def test_a_plan_carried_out_after_it_was_given_up_is_known_to_be_in_force() -> None:
    job = steered()
    job.answers = False
    struck(job)
    job.train(2500)
    assert [e.record.ok for e in job.said("outcome")] == [False, False]
    job.answers = True
    job.answer(job.orders[0])
    assert job.counts[2] < 8
    assert in_force(job).microbatches == job.counts
    assert job.pipeline.remedy.holding
    job.answer(job.orders[0])  # once is enough
    assert len([e for e in job.said("outcome") if e.record.ok]) == 1
    job.train(60)
    assert levels(job) == [("escalate", "S2")] * 2 + [("stay", "S1")]
    job.slow[2] = 1.0
    job.train(200)
    assert job.counts == EVEN
    assert levels(job)[-1] == ("restore", "S1")


def test_a_checkpoint_may_take_its_time_and_the_restart_follows_however_late() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0)
    job.answers = False
    slow_host(job)
    job.accuse(2, 2.0)
    job.accuse(2, 2.0)
    job.train(5)
    job.wait(600.0)  # the job is being saved
    assert job.said("outcome") == []
    job.wait(1300.0)
    assert [e.record.ok for e in job.said("outcome")] == [False]
    job.answer(job.orders[0])
    (order,) = job.restarts
    assert order.body["evict"] == ["node1"]
    assert order.body["why"] == "device rank 2 x2.00"
    assert job.pipeline.remedy.evictions == 1
    assert job.said("outcome")[-1].record.ok


def test_a_coordinator_hears_of_an_order_between_two_iterations_only() -> None:
    job = steered()
    job.answers = False
    job.facts()
    job.train(100)
    job.slow[2] = 900.0  # iterations of a minute
    job.train(40)
    job.accuse(2, 900.0)
    job.train(3)
    assert job.said("outcome") == []
    job.train(8)
    assert not job.said("outcome")[0].record.ok


def test_what_an_order_without_an_answer_did_is_taken_back_by_a_new_controller() -> None:
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    job.answers = False
    job.accuse(2, 2.0)
    job.train(5)
    (ordered,) = job.orders
    job.begin("launch-1", job.journal)  # killed before the answer came
    assert [(o.body["id"], o.body["level"]) for o in job.orders] == [(1, "S2"), (2, "S1")]
    job.answers = True
    for order in (ordered, job.orders[1]):
        job.answer(order)
    assert job.counts == EVEN
    assert in_force(job).microbatches == EVEN
    job.train(60)
    job.accuse(2, 2.0)
    job.train(60)
    assert in_force(job).microbatches == job.counts != EVEN
    assert len({order.body["id"] for order in job.orders}) == len(job.orders)


def test_a_change_of_places_is_known_to_a_new_controller_until_the_workers_are_others() -> None:
    job = steered()
    congested(job)
    job.train(60)
    moved = job.placement
    assert moved != (0, 1, 2, 3)
    job.begin("launch-1", job.journal)
    assert in_force(job) == InForce(microbatches=EVEN, placement=moved)
    assert job.counts == EVEN
    job.out += job.pipeline.finish(job.now_s)
    job.counts, job.placement = EVEN, (0, 1, 2, 3)
    for _ in range(2):  # killed once more
        job.begin("launch-1", job.journal)
        assert in_force(job) == InForce(microbatches=EVEN, placement=(0, 1, 2, 3))


def test_what_must_not_be_lost_is_in_the_end_of_the_journal() -> None:
    job = steered()
    congested(job)
    done_s = job.now_s
    job.train(900)
    tail = [entry for entry in job.journal if entry.t > done_s + 20.0]
    assert not any(entry.kind == "outcome" for entry in tail)
    job.begin("launch-1", tail)
    assert job.pipeline.remedy.facts is not None
    assert in_force(job).placement == job.placement != (0, 1, 2, 3)
    assert job.counts == EVEN
    ids = [order.body["id"] for order in job.orders]
    assert ids == sorted(set(ids))


def test_an_order_without_an_answer_is_not_forgotten_over_what_is_repeated() -> None:
    job = steered()
    job.facts(no_topology_change="")
    job.train(900)
    begun_s = job.now_s
    job.slow[2] = 2.0
    job.train(40)
    job.answers = False
    job.accuse(2, 2.0)
    job.wait(70.0)
    tail = [entry for entry in job.journal if entry.t > begun_s]
    assert [e.kind for e in tail if e.kind == "jobfacts"] == ["jobfacts"]
    job.begin("launch-1", tail)
    assert job.orders[-1].body["level"] == "S1"
    assert list(job.orders[-1].body["plan"]["microbatches"]) == list(EVEN)


def test_hosts_given_up_long_ago_are_counted() -> None:
    job = steered(allow_restart=True, restart_cost_s=1.0, max_evictions=1)
    slow_host(job)
    job.accuse(2, 2.0)
    job.accuse(2, 2.0)
    job.train(5)
    assert job.pipeline.remedy.evictions == 1
    job.train(400)
    for launch in ("launch-1", "launch-2", "launch-3"):
        tail = job.journal[-500:]
        assert not any(e.kind == "action" and "evict" in e.record for e in tail)
        job.begin(launch, tail)
        assert job.pipeline.remedy.evictions == 1
