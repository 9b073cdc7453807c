"""From a suspicion to a verdict: a scripted job whose agents profile, pause and measure as told."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from tests.localize.made_results import Culprits, Lab
from tests.runtime.scripted import Scripted

from failslow.config import DecideConfig, LocalizeConfig
from failslow.journal import decode_entry, encode_entry
from failslow.localize.script import WorkerPlace
from failslow.pipeline import Order, Report, Write
from failslow.pipeline.case import Case
from failslow.pipeline.remedy import Remedy
from failslow.pipeline.resumption import go_on
from failslow.records import CallCell, Finding, RankProfile, Verdict

RANKS = range(4)
HEALTHY_S = 0.1


class Inquired(Scripted):
    """Four replicas on two nodes; rank `culprit`'s device is `slow` times as slow."""

    culprit = 2
    slow = 1.0
    refuses = ""
    """Why rank 0 does not let itself be paused."""
    mute: frozenset[int] = frozenset()
    """Ranks that send no profile."""
    shy = 0
    """Pauses for suspects in which the culprit's benchmark is as fast as any other's."""

    def begin(self, launch: str, entries: Any = ()) -> None:
        self.read = len(self.out)
        self.orders: list[Order] = []
        self.script: list[dict[str, Any]] = []
        super().begin(launch, entries)

    def give(self, event: Any) -> None:
        super().give(event)
        new, self.read = self.out[self.read :], len(self.out)
        for order in new:
            if isinstance(order, Order):
                self.orders.append(order)
                getattr(self, f"do_{order.topic}")(order.body)

    def tell(self, rank: int | None, topic: str, body: dict[str, Any]) -> None:
        node = self.node(rank or 0)
        self.give(Report(node=node, rank=rank, topic=topic, body=body))

    # -- what agents do ----------------------------------------------------------------------------

    def profile(self, why: str, slow: float = 1.0) -> None:
        for rank in set(RANKS) - self.mute:
            own_s = 0.06 * (slow if rank == self.culprit else 1.0)
            wait_s = 0.06 * slow - own_s + 0.002
            cell = CallCell(
                group=tuple(RANKS),
                label="default_pg",
                op="allreduce_",
                size_bytes=1_000_000,
                position=0,
                calls=20,
                duration_s=wait_s + 0.03,
                wait_s=wait_s + 0.03,
                gap_s=own_s,
                spread_s=0.0005,
            )
            profile = RankProfile(
                rank=rank,
                node=self.node(rank),
                host="boot-1",
                device="cpu",
                start_t=self.now_s - 3.0,
                end_t=self.now_s,
                iterations=20,
                iteration_s=own_s + wait_s + 0.03,
                compute_s=own_s,
                cells=(cell,),
            )
            self.tell(rank, "profile", {"why": why} | asdict(profile))

    def do_profile(self, body: Any) -> None:
        self.profile(body["why"], self.slow)

    def do_telemetry(self, _body: Any) -> None:
        for node in self.nodes:
            self.give(Report(node=node, topic="telemetry", body={"t": [], "series": {}}))

    def do_pause(self, body: Any) -> None:
        about = {"id": body["id"]}
        if body["do"] == "survey":
            for rank in RANKS:
                groups = [["0 gloo", 100, 2, HEALTHY_S]]
                self.tell(
                    rank, "pause", about | {"say": "groups", "groups": groups, "speaks": True}
                )
        elif body["do"] == "arm":
            self.script = body["script"]
            for rank in RANKS:
                if rank == 0 and self.refuses:
                    self.tell(rank, "pause", about | {"say": "refused", "why": self.refuses})
                else:
                    self.tell(rank, "pause", about | {"say": "ready", "count": 110})
        elif body["do"] == "commit":
            hidden = self.slow > 1.0 and self.shy > 0
            self.shy -= hidden
            culprits = Culprits(devices={} if hidden else {self.culprit: self.slow})
            measured = Lab(workers=self.places(), noise=0.03).run(self.script, culprits)
            for rank in RANKS:
                results = [r for r in measured if r.get("by", r["rank"]) == rank]
                done = {"say": "done", "results": results, "error": "", "step": 7}
                self.tell(rank, "pause", about | done | {"pause_s": 1.5, "waited_s": 0.1})

    def places(self) -> list[WorkerPlace]:
        return [WorkerPlace(rank=r, node=self.node(r), host="boot-1", device="cpu") for r in RANKS]

    # -- a whole story -----------------------------------------------------------------------------

    def story(self, *, slow: float = 1.6) -> None:
        """Healthy, then slow for long enough."""
        self.iterate(40, HEALTHY_S)
        self.profile("healthy")
        self.iterate(40, HEALTHY_S)
        self.slow = slow
        self.iterate(80, HEALTHY_S, slow=1.4, culprit=self.culprit)

    def kinds(self, *kinds: str) -> list[str]:
        return [entry.kind for entry in self.journal if entry.kind in kinds]


def inquired(mode: str = "advise", **changes: Any) -> Inquired:
    limits = {"pauses_per_hour": 100, "max_pause_share": 1.0} | changes
    return Inquired(
        decide=DecideConfig.model_validate({"mode": mode}),
        localize=LocalizeConfig.model_validate(limits),
    )


def test_a_slow_device_is_suspected_proved_and_named() -> None:
    job = inquired()
    job.story()
    (episode,) = {entry.record.episode for entry in job.said("diagnosis")} - {""}
    assert episode == job.pipeline.episode
    diagnosis = job.said("diagnosis")[-1].record
    assert [suspect.ranks for suspect in diagnosis.suspects] == [(2,)]
    assert [e.tags["episode"] for e in job.said("rankprofile")] == [""] * 4 + [episode] * 4
    why = [entry.record["why"] for entry in job.said("validation")]
    assert why == ["reference", "suspects"]
    reference, verdict = (entry.record for entry in job.said("verdict"))
    assert reference.findings == ()
    (finding,) = verdict.findings
    assert (finding.what, finding.ranks) == ("device", (2,))
    # as it is felt in training, not by the benchmark
    assert finding.slowdown == pytest.approx(0.95 * 1.4 / 0.6, abs=0.15)
    assert verdict.pause_s == 1.5
    onset = next(e.t for e in job.said("episode") if e.tags["event"] == "onset")
    assert job.said("verdict")[-1].t - onset < 5.0


def test_of_many_calls_the_suspects_profiles_are_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a thousand ranks would hold the controller up, and drive all else out."""
    monkeypatch.setattr("failslow.pipeline.case._JOURNALED_CELLS", 2)
    job = inquired()
    job.story()
    taken = [(e.tags["episode"] != "", e.record.rank) for e in job.said("rankprofile")]
    assert taken == [(False, 0), (False, 1), (True, 2), (True, 0)]


def test_in_mode_observe_nobody_is_paused_and_the_suspect_is_named() -> None:
    job = inquired("observe")
    job.story()
    assert {order.topic for order in job.orders} == {"profile"}
    assert [s.ranks for s in job.said("diagnosis")[-1].record.suspects] == [(2,)]
    assert job.said("verdict") == []


def test_a_healthy_job_is_paused_for_its_reference_and_no_more() -> None:
    job = inquired()
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(400, HEALTHY_S)
    assert [entry.record["why"] for entry in job.said("validation")] == ["reference"]
    assert [entry.record.findings for entry in job.said("verdict")] == [()]


def test_healthy_profiles_that_a_suspicion_came_before_are_asked_for_after_it() -> None:
    job = inquired()
    job.iterate(40, HEALTHY_S)
    job.slow = 1.6
    job.iterate(8, HEALTHY_S, slow=1.4, culprit=2)  # agents make no healthy profile any more
    job.slow = 1.0
    job.iterate(200, HEALTHY_S)
    assert [event for event, _ in job.events()] == ["suspected", "cleared"]
    assert [o.body["why"] for o in job.orders if o.topic == "profile"] == ["suspicion", "healthy"]
    assert [entry.record["why"] for entry in job.said("validation")] == ["reference"]


def test_without_a_reference_peers_prove_it() -> None:
    job = inquired(reference=False)
    job.story()
    assert [entry.record["why"] for entry in job.said("validation")] == ["suspects"]
    assert [f.ranks for f in job.said("verdict")[-1].record.findings] == [(2,)]


def test_slow_from_the_start_is_found_by_peers() -> None:
    job = inquired()
    job.slow = 1.6
    job.iterate(40, HEALTHY_S)
    job.profile("healthy", 1.6)
    job.iterate(40, HEALTHY_S)
    (verdict,) = [entry.record for entry in job.said("verdict")]
    assert [finding.ranks for finding in verdict.findings] == [(2,)]
    assert [s.ranks for s in job.said("diagnosis")[0].record.suspects] == [(2,)]


def test_a_benchmark_that_no_call_bears_out_accuses_nobody_at_the_start() -> None:
    job = inquired()
    job.slow = 1.6
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(40, HEALTHY_S)
    (verdict,) = [entry.record for entry in job.said("verdict")]
    assert verdict.findings == ()
    assert "device rank 2" in verdict.note


def test_a_pause_that_comes_to_nothing_is_said_and_tried_again() -> None:
    job = inquired(reference=False)
    job.refuses = "no collective spans all workers"
    job.story()
    failed = [entry.record for entry in job.said("validation")]
    assert {record["ok"] for record in failed} == {False}
    assert len(failed) >= 1
    job.refuses = ""
    job.iterate(150, HEALTHY_S, slow=1.4, culprit=2)
    assert [f.ranks for f in job.said("verdict")[-1].record.findings] == [(2,)]


def test_a_worker_without_profile_is_waited_for_only_so_long() -> None:
    job = inquired("observe")
    job.mute = frozenset({3})
    job.story()
    job.iterate(160, HEALTHY_S, slow=1.4, culprit=2)
    (diagnosis,) = [e.record for e in job.said("diagnosis") if e.record.episode]
    assert diagnosis.missing == (3,)


def test_a_suspicion_that_is_cleared_is_not_followed() -> None:
    job = inquired()
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(40, HEALTHY_S)
    job.slow = 1.6
    job.iterate(8, HEALTHY_S, slow=1.4, culprit=2)
    job.slow = 1.0
    job.iterate(200, HEALTHY_S)
    assert [event for event, _ in job.events()] == ["suspected", "cleared"]
    assert "suspects" not in [entry.record["why"] for entry in job.said("validation")]


def test_a_verdict_that_names_nobody_is_tried_again_on_new_profiles() -> None:
    job = inquired()
    job.shy = 1
    job.story()
    job.iterate(200, HEALTHY_S, slow=1.4, culprit=2)
    empty, named = (e for e in job.said("verdict") if e.record.episode)
    assert empty.record.findings == ()
    assert [(f.what, f.ranks) for f in named.record.findings] == [("device", (2,))]
    assert 10.0 <= named.t - empty.t < 20.0
    asked = [order for order in job.orders if order.topic == "profile"]
    assert len(asked) == 2


def test_a_culprit_that_is_found_no_more_is_looked_at_as_seldom_as_before() -> None:
    job = inquired(recheck_s=40.0)
    job.story()
    job.shy = 100
    job.iterate(1500, HEALTHY_S, slow=1.4, culprit=2)
    found = [e for e in job.said("verdict") if e.record.episode]
    assert [bool(e.record.findings) for e in found[:3]] == [True, False, False]
    assert found[1].t - found[0].t >= 40.0
    assert found[2].t - found[1].t >= 80.0


def test_verdicts_that_name_nobody_end_after_three() -> None:
    job = inquired()
    job.shy = 100
    job.story()
    job.iterate(4000, HEALTHY_S, slow=1.4, culprit=2)
    assert len([e for e in job.said("verdict") if e.record.episode]) == 3


def test_relief_ends_the_inquiry() -> None:
    job = inquired()
    job.story()
    pauses = len(job.said("validation"))
    job.slow = 1.0
    job.iterate(900, HEALTHY_S)
    assert job.pipeline.episode is None
    assert len(job.said("validation")) == pauses


def test_a_long_fault_is_looked_at_again_and_ever_more_seldom() -> None:
    job = inquired(recheck_s=10.0)
    job.story()
    job.iterate(1000, HEALTHY_S, slow=1.4, culprit=2)
    times = [e.t for e in job.said("validation") if e.record["why"] == "suspects"]
    assert 3 <= len(times) <= 5
    assert times[2] - times[1] > 1.5 * (times[1] - times[0])


def test_a_fault_longer_than_the_hour_s_pauses_is_looked_at_again_later() -> None:
    job = inquired(recheck_s=60.0, pauses_per_hour=6)
    job.story()
    began_t = job.now_s
    job.iterate(9500, HEALTHY_S, slow=5.0, culprit=2)  # so slow that an hour is not too many
    assert job.now_s - began_t > 4500.0
    tried = [(e.t, e.record["ok"]) for e in job.said("validation") if e.record["why"] == "suspects"]
    assert all(ok for _, ok in tried)
    gaps_s = [after - before for (before, _), (after, _) in pairwise(tried)]
    assert max(gaps_s) > 1800.0, "the hour's pauses for it were spent in between"
    assert max(t for t, ok in tried if ok) - began_t > 3600.0


def test_looking_again_at_a_culprit_leaves_pauses_for_another_fault() -> None:
    job = inquired(recheck_s=10.0, pauses_per_hour=6)
    job.story()
    job.iterate(700, HEALTHY_S, slow=5.0, culprit=2)
    looks = [e for e in job.said("verdict") if e.record.episode]
    assert len(looks) == 4
    job.culprit = 1
    job.iterate(80, HEALTHY_S, slow=10.0, culprit=1)
    assert [f.ranks for f in job.said("verdict")[-1].record.findings] == [(1,)]


def test_a_new_controller_keeps_no_more_pauses_where_a_link_is_to_blame() -> None:
    """Nothing but another pause tells how that fares."""
    case = Case("e1", 0.0, 0.0, 1.4)
    link = Finding(what="link", slowdown=9.0, ranks=(2,), peer_ranks=(1,))
    for verdict in (Verdict(episode="e1", findings=(link,)), Verdict(episode="e1")):
        entry = decode_entry(encode_entry(verdict, t=5.0, kind="verdict"))
        go_on(case, [entry], LocalizeConfig())
        assert case.linked
    device = Finding(what="device", slowdown=2.0, ranks=(2,))
    case.take_verdict(Verdict(episode="e1", findings=(device,)), recheck_s=60.0, now_s=9.0)
    assert not case.linked


def test_reports_without_sense_cost_a_line_and_nothing_else() -> None:
    job = inquired()
    for topic, body in (
        ("profile", {"why": "healthy", "rank": "x"}),
        ("profile", {}),
        ("telemetry", {"t": "x", "series": 3}),
        ("pause", {"say": "done"}),
        ("nonsense", {}),
    ):
        job.give(Report(node="node0", rank=1, topic=topic, body=body))
    job.story()
    assert [f.ranks for f in job.said("verdict")[-1].record.findings] == [(2,)]


def test_a_new_controller_compares_with_the_reference_in_the_journal() -> None:
    job = inquired()
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(40, HEALTHY_S)
    job.begin("launch-1", job.journal)
    job.iterate(10, HEALTHY_S)
    job.slow = 1.6
    job.iterate(120, HEALTHY_S, slow=1.4, culprit=2)
    assert [entry.record["why"] for entry in job.said("validation")] == ["reference", "suspects"]
    finding = job.said("verdict")[-1].record.findings[0]
    assert finding.ranks == (2,)
    assert finding.slowdown > 1.3
    (diagnosis,) = [e.record for e in job.said("diagnosis") if e.record.episode]
    (suspect,) = diagnosis.suspects
    # ...and the profiles with those of healthy times there
    assert [m.expected for m in suspect.measurements if m.what.startswith("own time")] == [
        pytest.approx(0.06)
    ]


def test_a_new_controller_keeps_to_the_budget_of_pauses() -> None:
    job = inquired(pauses_per_hour=1)
    job.story()
    assert [entry.record["ok"] for entry in job.said("validation")] == [True, True]
    job.begin("launch-1", job.journal)
    job.slow = 1.0
    job.iterate(300, HEALTHY_S)
    job.slow = 1.6
    job.iterate(200, HEALTHY_S, slow=1.4, culprit=2)
    refused = [entry.record["reason"] for entry in job.said("validation")][2:]
    assert refused
    assert all("pauses_per_hour" in reason for reason in refused)


def test_a_fault_something_is_done_about_is_looked_at_again_without_its_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = inquired(recheck_s=10.0)
    job.story()
    monkeypatch.setattr(Remedy, "holding", property(lambda _: True))
    job.run = 1  # the program has changed
    job.iterate(30, HEALTHY_S, slow=1.4, culprit=2)
    assert job.events()[-1][0] == "abandoned"
    count = len(job.said("verdict"))
    job.iterate(200, HEALTHY_S, slow=1.4, culprit=2)
    assert len(job.said("verdict")) > count
    assert [f.ranks for f in job.said("verdict")[-1].record.findings] == [(2,)]
    job.slow = 1.0  # it is well
    job.iterate(400, HEALTHY_S, slow=1.4)
    assert "device rank 2" in job.said("verdict")[-1].record.well
    count = len(job.said("validation"))
    monkeypatch.setattr(Remedy, "holding", property(lambda _: False))
    job.iterate(800, HEALTHY_S, slow=1.4)
    assert len(job.said("validation")) == count


def test_a_suspicion_that_is_cleared_gives_way_to_the_fault_that_is_still_mitigated() -> None:
    job = inquired(recheck_s=10.0)
    job.story()
    inquiry = job.pipeline.inquiry
    abandoned = Write(kind="episode", record=None, t=job.now_s, tags={"event": "abandoned"})
    inquiry.note(abandoned, job.now_s, holding=True)
    about = {"id": "e9", "first_t": job.now_s, "slowdown": 1.3, "baseline_s": 0.1}
    for event in ("suspected", "cleared"):
        record = {"event": event} | about
        inquiry.note(Write(kind="suspicion", record=record, t=job.now_s), job.now_s, holding=True)
    out = inquiry.tick(job.now_s + 60.0, holding=True)
    assert "pause" in {order.topic for order in out if isinstance(order, Order)}


def noted(job: Inquired, event: str, slowdown: float = 1.3) -> None:
    """A turn of the detector while something is done about the fault of the story."""
    record: Any = {"event": event, "id": "e9", "first_t": job.now_s, "slowdown": slowdown}
    write = Write(kind="suspicion", record=record | {"baseline_s": 0.1}, t=job.now_s)
    if event == "level":
        (onset,) = job.said("episode")[:1]
        tags = {"event": "level", "slowdown_now": slowdown}
        write = Write(kind="episode", record=onset.record, t=job.now_s, tags=tags)
    if job.pipeline.inquiry.note(write, job.now_s, holding=True):
        job.profile("suspicion", job.slow)


def test_a_suspicion_that_is_cleared_leaves_the_case_of_an_episode_that_is_held() -> None:
    job = inquired(recheck_s=10.0)
    job.story()
    noted(job, "suspected")
    noted(job, "cleared")
    out = job.pipeline.inquiry.tick(job.now_s + 60.0, holding=True)
    assert "pause" in {order.topic for order in out if isinstance(order, Order)}


def test_a_second_fault_in_an_episode_that_is_held_is_put_to_the_proof() -> None:
    job = inquired(recheck_s=600.0)
    job.story()
    noted(job, "suspected")
    out = job.pipeline.inquiry.tick(job.now_s + 30.0, holding=True)
    assert "pause" not in {order.topic for order in out if isinstance(order, Order)}
    noted(job, "level")
    out = job.pipeline.inquiry.tick(job.now_s + 30.0, holding=True)
    assert "pause" in {order.topic for order in out if isinstance(order, Order)}


def test_a_healthy_profile_of_slow_times_is_none() -> None:
    job = inquired()
    job.story()
    before = list(job.pipeline.inquiry.healthy)
    job.profile("healthy", 1.6)  # a new agent makes one of its own accord
    assert list(job.pipeline.inquiry.healthy) == before
    assert before


def test_a_fault_that_could_not_be_put_to_the_proof_at_first_is_later() -> None:
    job = inquired(reference=False)
    job.refuses = "six pauses in the last hour"
    job.story()
    job.iterate(3000, HEALTHY_S, slow=1.4, culprit=2)
    failed = [entry.record["ok"] for entry in job.said("validation")]
    assert failed.count(False) >= 6
    assert not any(failed)
    job.refuses = ""
    job.iterate(6000, HEALTHY_S, slow=1.4, culprit=2)
    assert [f.ranks for f in job.said("verdict")[-1].record.findings] == [(2,)]
