"""Simulated jobs under the controller's own code: detect, diagnose, judge, decide, report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from failslow.cli import app
from failslow.config import DecideConfig
from failslow.journal import JournalEntry, read_journal
from failslow.records import Decision, Diagnosis, Episode, Outcome, RankProfile, Verdict
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload
from failslow.simulate.watched import Settings, WatchedJob, watch_job

EIGHT = Scenario(
    cluster=Cluster(groups=(NodeGroup(nodes=4),), devices_per_node=2, network_gbyte_per_s=5),
    workload=Workload(
        layers=8,
        hidden=2048,
        vocabulary=0,
        tp=2,
        pp=2,
        dp=2,
        micro_batches=16,
        distributed_optimizer=False,
    ),
    iterations=700,
    seed=5,
)
"""Four nodes of two devices; an iteration takes 0.26 s."""


def watched(
    scenario: Scenario, folder: Path, **decide: Any
) -> tuple[WatchedJob, list[JournalEntry]]:
    """It, run to its end, and its journal."""
    settings = Settings(decide=DecideConfig(**decide))
    job = watch_job(scenario, folder / "journal.jsonl", settings=settings)
    return job, list(read_journal(job.journal))


def records(entries: Sequence[JournalEntry], kind: type) -> Iterator[Any]:
    """Those of one class."""
    return (entry.record for entry in entries if isinstance(entry.record, kind))


def test_a_slow_device_goes_from_suspicion_to_report_by_the_code_of_live_jobs(
    tmp_path: Path,
) -> None:
    scenario = EIGHT.slow_device(rank=5, from_s=40, for_s=100, factor=1.6)
    file, run = tmp_path / "slow.json.yaml", tmp_path / "run"
    file.write_text(scenario.model_dump_json(), encoding="utf-8")

    done = CliRunner().invoke(app, ["simulate", str(file), "--watch", str(run), "--json"])
    told = CliRunner().invoke(app, ["report", str(run), "--json", "--no-html"])

    assert done.exit_code == 0, done.output
    entries = list(read_journal(run / "journal.jsonl"))
    (suspicion, *_) = records(entries, Diagnosis)
    assert suspicion.episode == ""  # of healthy times
    of_episode = [d for d in records(entries, Diagnosis) if d.episode]
    assert [s.ranks for s in of_episode[0].suspects] == [(5,)]
    found = [v for v in records(entries, Verdict) if v.episode and v.findings]
    assert {f.key for v in found for f in v.findings} == {"device rank 5"}
    assert found[0].findings[0].slowdown == pytest.approx(1.6, rel=0.05)
    assert found[0].findings[0].cause.startswith("device degradation")
    assert [d.level for d in records(entries, Decision) if d.apply] == ["S2", "S1"]
    assert all(outcome.ok for outcome in records(entries, Outcome))
    events = [e.tags["event"] for e in entries if isinstance(e.record, Episode)]
    assert events[0] == "onset"
    assert events[-1] == "relief"
    document = json.loads(told.stdout)
    (episode,) = document["episodes"]
    assert episode["findings"][0]["ranks"] == [5]
    assert not [w for w in document["warnings"] if "version" in w]


def test_what_is_done_about_a_fault_saves_time_that_really_passes(tmp_path: Path) -> None:
    scenario = EIGHT.slow_device(rank=5, from_s=40, factor=1.6)

    nothing, _ = watched(scenario, tmp_path / "observe", mode="observe")
    steered, entries = watched(scenario, tmp_path / "auto", mode="auto")

    assert nothing.idle_s == 0.0
    slowness_s = sum(steered.duration_s) - sum(steered.healthy_s)
    assert slowness_s < 0.75 * nothing.lost_s
    # and by as much as the plan had promised
    plan = next(d.plan for d in records(entries, Decision) if d.plan)
    healthy = sum(steered.healthy_s[-200:]) / 200
    assert sum(steered.duration_s[-200:]) / 200 == pytest.approx(
        plan.predicted_slowdown * healthy, rel=0.05
    )


def test_a_congested_link_gets_out_of_the_gradients_ring(tmp_path: Path) -> None:
    job, entries = watched(EIGHT.congest(link=(0, 1), from_s=40, factor=20), tmp_path, mode="auto")

    found = [v for v in records(entries, Verdict) if v.episode]
    assert {f.key for v in found for f in v.findings} == {"link node0>node1"}
    (decision,) = [d for d in records(entries, Decision) if d.apply]
    assert decision.level == "S3"
    assert job.duration_s[-1] == pytest.approx(job.healthy_s[-1], rel=0.1)


def test_a_job_whose_slow_iterations_take_half_a_minute_is_profiled(tmp_path: Path) -> None:
    slow = EIGHT.workload.model_copy(update={"efficiency": 0.011})
    scenario = EIGHT.but(workload=slow, iterations=130).slow_device(rank=5, from_s=400, factor=6.0)

    job, entries = watched(scenario, tmp_path, mode="advise")

    assert max(job.duration_s) > 20.0
    named = [[s.ranks for s in d.suspects] for d in records(entries, Diagnosis) if d.episode]
    assert named[0] == [(5,)]
    verdict = next(v for v in records(entries, Verdict) if v.episode)
    assert [f.key for f in verdict.findings] == ["device rank 5"]


def test_a_job_restarted_without_a_host_goes_on_watched(tmp_path: Path) -> None:
    scenario = EIGHT.but(iterations=2500).congest(node=2, from_s=40, factor=60)

    job, entries = watched(
        scenario, tmp_path, mode="auto", allow_restart=True, restart_cost_s=60, topology_cost_s=9e9
    )

    *_, decision = [d for d in records(entries, Decision) if d.apply]
    assert (decision.level, decision.plan.evict) == ("S4", ("node2",))
    launches = {e.record["launch"] for e in entries if e.kind == "health" and "launch" in e.record}
    assert launches == {"simulated-1", "simulated-2"}
    assert job.duration_s[-1] == pytest.approx(job.healthy_s[-1], rel=0.05)


def test_two_device_models_in_a_job_accuse_nobody(tmp_path: Path) -> None:
    mixed = (
        NodeGroup(nodes=2, device="H800", tflops=990),
        NodeGroup(nodes=2, device="A100", tflops=312),
    )
    scenario = EIGHT.but(cluster=EIGHT.cluster.model_copy(update={"groups": mixed}), iterations=150)

    _, entries = watched(scenario, tmp_path, mode="auto")

    devices = {profile.device for profile in records(entries, RankProfile)}
    assert devices == {"H800", "A100"}
    assert [d.suspects for d in records(entries, Diagnosis)] == [()]
    assert [v.findings for v in records(entries, Verdict)] == [()]
    assert not list(records(entries, Episode))


def test_equal_scenarios_give_equal_journals(tmp_path: Path) -> None:
    scenario = EIGHT.but(iterations=260).cpu_contention(node=1, from_s=40, factor=1.5)

    first, _ = watched(scenario, tmp_path / "first", mode="auto")
    again, _ = watched(scenario, tmp_path / "again", mode="auto")

    assert first.journal.read_bytes() == again.journal.read_bytes()


def test_a_folder_with_a_journal_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "calm.yaml"
    file.write_text("iterations: 5\n", encoding="utf-8")
    (tmp_path / "journal.jsonl").write_text("", encoding="utf-8")

    result = CliRunner().invoke(app, ["simulate", str(file), "--watch", str(tmp_path)])

    assert result.exit_code == 1
    assert "another folder" in result.stderr
