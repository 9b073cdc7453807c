"""Pauses that outlive what they are for, and whose telemetry a verdict waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from tests.runtime.test_inquiry import HEALTHY_S, RANKS, Inquired

from failslow.config import DecideConfig, LocalizeConfig
from failslow.pipeline import Report, Tick
from failslow.pipeline.witnesses import Witnesses
from failslow.records import Finding, JobFacts, Verdict


class Slow(Inquired):
    """Its workers do not come to the boundary, or do not report, before `go_on`."""

    holds = ""
    """An order of a pause for suspects that is carried out late."""

    def begin(self, launch: str, entries: Any = ()) -> None:
        self.held: list[dict[str, Any]] = []
        super().begin(launch, entries)

    def do_pause(self, body: Any) -> None:
        if self.slow > 1.0 and body["do"] == self.holds:
            self.held.append(body)
        else:
            super().do_pause(body)

    def go_on(self) -> None:
        for body in self.held:
            super().do_pause(body)

    def until(self, what: Callable[[], bool], *, slow: float = 1.0) -> None:
        """Iterations until that happens."""
        for _ in range(200):
            self.iterate(1, HEALTHY_S, slow=slow, culprit=self.culprit)
            if what():
                return
        raise AssertionError("it did not happen")

    @property
    def pause_orders(self) -> list[str]:
        return [order.body["do"] for order in self.orders if order.topic == "pause"]

    def verdicts(self) -> list[Verdict]:
        return [e.record for e in self.said("verdict") if e.record.episode]


def slow(holds: str) -> Slow:
    job = Slow(
        decide=DecideConfig.model_validate({"mode": "advise", "topology_cost_s": 0.2}),
        localize=LocalizeConfig.model_validate({"pauses_per_hour": 100, "max_pause_share": 1.0}),
    )
    job.holds = holds
    return job


def test_a_pause_is_called_off_once_what_was_slow_is_well() -> None:
    """Workers whose iterations take a minute come to the boundary that much later."""
    job = slow("arm")
    job.story()
    assert job.pause_orders[-1] == "arm"
    job.slow = 1.0
    job.iterate(60, HEALTHY_S)
    assert job.events()[-1][0] == "relief"
    assert job.pause_orders[-2:] == ["arm", "release"]
    last = job.said("validation")[-1].record
    assert (last["ok"], last["why"]) == (False, "suspects")
    assert last["reason"] == "what was slow is well"
    assert last["episode"] == job.events()[-1][1]
    assert job.verdicts() == []


def test_what_was_measured_for_one_slowness_is_no_verdict_on_the_next() -> None:
    """No call stream of the next one has been heard yet that could bear it out."""
    job = slow("commit")
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(40, HEALTHY_S)
    job.slow = 1.6
    job.until(lambda: bool(job.held), slow=1.4)
    job.slow = 1.0
    job.until(lambda: job.events()[-1][0] == "relief")
    job.mute = frozenset(RANKS)
    job.until(lambda: job.events()[-1][0] == "suspected", slow=1.4)
    job.slow = 1.6
    job.go_on()
    job.iterate(5, HEALTHY_S, slow=1.4)
    assert job.said("validation")[-1].record["ok"]
    assert job.verdicts() == []


def told(witnesses: Witnesses) -> bool:
    return witnesses.told


def test_workers_that_are_started_again_have_a_reference_of_their_own() -> None:
    """Rank 2 may be on another machine: the reference of the one before says nothing of it."""
    job = slow("")
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(40, HEALTHY_S)
    assert job.pause_orders == ["survey", "arm", "commit"]
    for rank in job.ranks:
        job.process[rank], job.step[rank] = f"{2000 + rank}-99", -1
    job.iterate(40, HEALTHY_S)
    assert job.pipeline.inquiry.healthy == []
    job.profile("healthy")
    job.iterate(5, HEALTHY_S)
    assert job.pause_orders == ["survey", "arm", "commit"] * 2
    taken = [e.record for e in job.said("validation")]
    assert [(record["why"], record["ok"]) for record in taken] == [("reference", True)] * 2


def changed(before: float = 1.0) -> Slow:
    """Profiled at the start, rank 2 `before` times as slow; then its program became another."""
    job = slow("")
    job.iterate(40, HEALTHY_S)
    job.profile("healthy", before)
    job.iterate(40, HEALTHY_S)
    job.run += 1
    job.iterate(20, HEALTHY_S)
    return job


def test_after_a_change_of_the_program_healthy_profiles_are_asked_for_anew() -> None:
    """Calls of the earlier one compare with nothing: peers alone tell who is slow."""
    job = changed()
    earlier = job.pipeline.inquiry.healthy
    job.iterate(60, HEALTHY_S)
    asked = [order.body["why"] for order in job.orders if order.topic == "profile"]
    assert asked == ["healthy"]
    anew = job.pipeline.inquiry.healthy
    assert [p.rank for p in anew] == [p.rank for p in earlier] == list(RANKS)
    assert min(p.start_t for p in anew) > max(p.end_t for p in earlier)
    assert job.pause_orders == ["survey", "arm", "commit"]  # the reference still holds


def test_who_is_slow_just_after_a_change_of_the_program_is_told_by_peers() -> None:
    """In the earlier one this worker had so much more to do: by that nobody would be slow."""
    job = changed(1.6)
    job.slow = 1.6
    job.until(lambda: job.said("diagnosis")[-1].record.episode != "", slow=1.4)
    assert [s.ranks for s in job.said("diagnosis")[-1].record.suspects] == [(2,)]


def planned_for_a_link(job: Slow) -> list[str]:
    """The levels that can help, once a link between two of its workers is named."""
    link = Finding(what="link", slowdown=20.0, ranks=(2,), peer_ranks=(1,), host="c", peer_host="b")
    verdict = Verdict(episode=job.pipeline.episode or "", findings=(link,))
    job.out += job.pipeline.remedy.verdict(verdict, job.now_s)
    job.until(lambda: bool(job.said("decision")), slow=1.4)
    return [o.level for o in job.said("decision")[-1].record.options if o.applicable]


def struck_at_last(job: Slow) -> None:
    """Its Coordinator speaks up, then it becomes slow for good."""
    facts = JobFacts(pp=1, dp=4, microbatches=32, hosts=("a", "b", "c", "d"))
    about = {"what": "facts"} | asdict(facts)
    job.give(Report(node="node0", rank=0, topic="steer", body=about))
    job.slow, job.refuses = 1.6, "no pause"
    job.until(lambda: job.pipeline.episode is not None, slow=1.4)


def test_a_link_slow_just_after_a_change_of_the_program_is_planned_for() -> None:
    """By profiles of the earlier program: without any, no other placement promises anything."""
    job = changed()
    struck_at_last(job)
    assert planned_for_a_link(job) == ["S1", "S3"]


def test_a_new_controller_plans_by_the_profiles_in_the_journal() -> None:
    """The suspicion at which it would learn from them has come already."""
    job = slow("")
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(40, HEALTHY_S)
    struck_at_last(job)
    job.begin("launch-1", job.journal)
    job.iterate(5, HEALTHY_S, slow=1.4, culprit=2)
    assert planned_for_a_link(job) == ["S1", "S3"]


def test_a_new_controller_takes_no_profiles_of_another_program() -> None:
    """It asks for new ones, once it knows who lives."""
    job = changed()
    job.begin("launch-1", job.journal)
    job.iterate(5, HEALTHY_S)
    assert (job.orders, job.pipeline.inquiry.healthy) == ([], [])
    job.iterate(60, HEALTHY_S)
    assert [(order.topic, order.body["why"]) for order in job.orders] == [("profile", "healthy")]
    assert len(job.pipeline.inquiry.healthy) == 4


def test_a_worker_that_never_gives_a_profile_is_asked_ever_more_seldom() -> None:
    """While profiles are taken each call costs its worker more."""
    job = slow("")
    job.mute = frozenset({3})
    job.iterate(40, HEALTHY_S)
    job.run += 1
    job.iterate(20, HEALTHY_S)
    job.wait(1000.0, calls=1)
    assert [order.topic for order in job.orders] == ["profile"] * 5


@pytest.mark.parametrize("why", ["healthy", "suspicion"])
def test_profiles_that_come_before_it_is_known_who_lives_are_not_taken_for_all(why: str) -> None:
    """As after an outage of the bus: the first would be compared with nobody, the others not."""
    job = slow("")
    job.iterate(40, HEALTHY_S)
    if why == "suspicion":
        job.profile("healthy")
        job.iterate(40, HEALTHY_S)
        job.mute, job.slow = frozenset(RANKS), 1.6
        job.until(lambda: job.events()[-1:] != [], slow=1.4)
    told = len(job.said("diagnosis"))
    job.now_s += job.runtime.blind_after_s + 1.0
    job.give(Tick())
    job.mute = frozenset()
    job.profile(why, job.slow)
    assert len(job.said("diagnosis")) == told
    job.beat()
    job.profile(why, job.slow)
    assert len(job.said("diagnosis")) == told + (why == "suspicion")
    if why == "healthy":
        job.iterate(60, HEALTHY_S)
        assert [e.record["why"] for e in job.said("validation")] == ["reference"]


def test_of_a_large_job_only_the_concerned_are_asked() -> None:
    """The windows of a thousand nodes are 200 MB: a verdict would be given without any."""
    every = [f"n{i}" for i in range(1000)]
    witnesses = Witnesses()
    orders = witnesses.ask(["n7", "n3", "n7"], 130.0, every=every)
    assert [order.node for order in orders] == ["n7", "n3"]
    assert all(order.body == {"last_s": 130.0} for order in orders)
    witnesses.take("n3", {"t": []})
    assert not told(witnesses)
    witnesses.take("n7", {"t": []})
    assert told(witnesses)
    assert not witnesses.lacks(["n3"])

    assert witnesses.lacks(["n3", "n8"])
    (more,) = witnesses.ask_more(["n3", "n8"], 130.0)
    assert more.node == "n8"
    assert not told(witnesses)
    witnesses.take("n8", {"t": []})
    assert told(witnesses)
    windows = witnesses.windows(lambda _: None, first=["n8", "n9"])
    assert [window["node"] for window in windows] == ["n8", "n3", "n7"]


def test_so_many_culprits_are_not_all_asked() -> None:
    every = [f"n{i}" for i in range(1000)]
    witnesses = Witnesses()
    assert witnesses.ask([], 1.0, every=every) == []
    assert len(witnesses.ask_more(every, 1.0)) == 64
    assert not witnesses.lacks(every)


@pytest.mark.parametrize("count", [1, 64])
def test_a_job_of_few_nodes_is_asked_as_a_whole(count: int) -> None:
    witnesses = Witnesses()
    (order,) = witnesses.ask(["n0"], 1.0, every=[f"n{i}" for i in range(count)])
    assert order.node == ""
    assert not told(witnesses)
    for i in range(count):
        witnesses.take(f"n{i}", {})
    assert told(witnesses)
