"""Suspects, verdict, level and decision as `failslow status` shows them, from sample journals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.report.sample_journals import Script, dp4, ppdp

from failslow.cli.output import emit_view
from failslow.journal import JournalEntry, decode_entry, encode_entry
from failslow.records import Diagnosis, Outcome, Verdict
from failslow.report import words
from failslow.report.live import live_document, live_view
from failslow.report.livejob import LiveJob, LiveState

Stop = Callable[[JournalEntry], bool]


def seen(script: Script, until: Stop) -> LiveJob:
    """The job right after the first entry for which `until` holds."""
    state, last = LiveState("pretrain7"), 0.0
    for line in script.lines:
        entry = decode_entry(line)
        state.observe(entry)
        last = entry.t
        if until(entry):
            return state.look(last + 0.5)
    raise AssertionError("no such entry in the sample")


def of_kind(kind: str, number: int = 1) -> Stop:
    found = []

    def until(entry: JournalEntry) -> bool:
        found.append(entry.kind == kind)
        return sum(found) == number

    return until


def shown(job: LiveJob, width: int = 140) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(live_view(job))
    return captured.get()


@pytest.fixture(scope="module")
def device() -> Script:
    return dp4()


def test_suspects_of_a_profile_are_named_until_there_is_a_verdict(device: Script) -> None:
    job = seen(device, of_kind("diagnosis"))
    text = shown(job)

    assert "suspect: own time of rank 2 in mesh_dp ×1.55, score 0.94" in text
    # the episode names rank 2 already; the weak suspicion of the whole group marks nobody
    assert [w.state for w in job.workers] == ["ok", "ok", "slow", "ok"]
    assert "suspect: group of ranks 0–3 in mesh_dp ×1.12, score 0.18" in text
    assert live_document(job, folder="x")["workers"][2]["suspect"]["score"] == 0.94


def test_whoever_the_newest_finds_not_slow_is_named_no_more(device: Script) -> None:
    state = LiveState("pretrain7")
    for line in device.lines:
        entry = decode_entry(line)
        if entry.kind == "diagnosis":
            break
        state.observe(entry)
    t, id = entry.t, entry.record.episode

    def told(record: object, after_s: float) -> LiveJob:
        state.observe(decode_entry(encode_entry(record, t=t + after_s)))
        return state.look(t + after_s + 0.1)

    by_own_times = state.look(t)
    assert [w.state for w in by_own_times.workers] == ["ok", "ok", "slow", "ok"]
    assert "): rank 2 (compute ×1.55)" in shown(by_own_times)

    alike = told(Diagnosis(episode=id, suspects=(), everyone=True), 1.0)
    assert [w.state for w in alike.workers] == ["ok"] * 4
    assert (alike.culprits, alike.phase) == ((), "slow")
    assert "): no worker stands out" in shown(alike)
    assert "all workers are late alike" in shown(alike)

    (suspect, _) = entry.record.suspects
    cleared = told(Verdict(episode=id, note="all alike"), 2.0)
    assert "verdict: nothing found: all alike" in shown(cleared)
    other = replace(suspect, ranks=(1,))
    again = told(Diagnosis(episode=id, suspects=(other,)), 3.0)
    assert [w.state for w in again.workers] == ["ok", "suspected", "ok", "ok"]
    assert "nothing found" not in shown(again)
    assert "no worker stands out" not in shown(again)
    unseen = told(Diagnosis(episode=id, suspects=(), missing=(2,)), 4.0)
    assert unseen.workers[2].state == "slow"  # nobody could look at it


def test_a_ratio_is_that_to_the_job_s_healthy_time(device: Script) -> None:
    state = LiveState("pretrain7")
    for line in device.lines:
        entry = decode_entry(line)
        if entry.kind == "step" and entry.rank is not None:
            crept = dict(entry.tags) | {"healthy_s": 10.0 * entry.record.duration_s}
            entry = replace(entry, tags=crept)
        state.observe(entry)
        if entry.kind == "diagnosis":
            break
    ratios = [worker.ratio for worker in state.look(entry.t).workers]
    assert ratios == pytest.approx([1.39] * 4, abs=0.1)


def test_a_worker_only_a_profile_names_is_a_suspect() -> None:
    job = seen(ppdp(), of_kind("diagnosis", 2))

    assert [w.rank for w in job.workers if w.state == "suspected"] == [0, 1, 2, 3]
    assert shown(job).count("suspect  ") == 4
    assert "group ×4.90" in shown(job)


def test_a_verdict_names_its_worker_with_cause_and_ratio(device: Script) -> None:
    job = seen(device, of_kind("verdict"))
    text, document = shown(job), live_document(job, folder="x")

    assert "verdict: device of rank 2 (gpu-1, GPU 0) ×1.52: device degradation (thermal)" in text
    assert "slow: device ×1.52 (verdict)" in text
    assert "suspect: " not in text
    assert document["verdict"]["findings"][0]["component"] == "device rank 2"
    assert document["verdict"]["findings"][0]["cause"] == "device degradation (thermal)"
    assert document["workers"][2]["finding"] == "device rank 2"
    assert document["workers"][2]["state"] == "slow"
    assert document["layout"]["microbatches"] == 32
    json.dumps(document, allow_nan=False)


def test_the_level_in_force_and_the_decision_stay_while_the_culprit_is_slow(device: Script) -> None:
    decided = seen(device, of_kind("decision"))
    assert decided.inquiry.level == "S1"
    assert "S1 in force · decided 06:28:24 UTC: go to S2: micro-batches 9 9 6 8" in shown(decided)
    assert "(1.21 s lost ≥ threshold 100 ms)" in shown(decided)

    done = seen(device, of_kind("outcome"))
    document = live_document(done, folder="x")
    assert document["level"] == "S2"
    assert document["decision"]["plan"]["microbatches"] == (9, 9, 6, 8)
    assert document["outcome"] == {
        "level": "S2", "ok": True, "cost_s": 0.06, "slowdown": 1.11, "error": ""
    }  # fmt: skip
    assert "S2 in force" in shown(done)


def test_a_culprit_that_is_well_again_is_no_longer_named(device: Script) -> None:
    job = seen(device, of_kind("culpritpace"))
    assert job.inquiry.findings == {}
    assert job.inquiry.level == "S2"
    assert [w.state for w in job.workers] == ["ok"] * 4  # though the episode is still on

    restored = seen(device, of_kind("outcome", 2))
    assert (restored.inquiry.level, restored.inquiry.verdict) == ("S1", None)


def test_relief_under_a_level_keeps_the_culprit_and_without_one_forgets_it() -> None:
    script = ppdp()
    lines = script.lines[:]
    job = seen(script, of_kind("outcome", 2))
    assert job.inquiry.level == "S3"
    assert [w.rank for w in job.workers if w.state == "slow"] == [2, 3]
    last = next(e for e in map(decode_entry, reversed(lines)) if e.kind == "episode")
    state = LiveState("pretrain7")
    for entry in map(decode_entry, lines):
        state.observe(entry)
    tags = {**last.tags, "event": "relief"}
    state.observe(decode_entry(encode_entry(last.record, t=last.t + 1, **tags)))
    job = state.look(last.t + 2)
    assert (job.phase, job.inquiry.level) == ("healthy", "S3")
    assert [w.rank for w in job.workers if w.state == "slow"] == [2, 3]

    back = Outcome(episode=str(last.tags["id"]), level="S1", ok=True, cost_s=0.1)
    state.observe(decode_entry(encode_entry(back, t=last.t + 3)))
    assert {w.state for w in state.look(last.t + 4).workers} == {"ok"}


def test_a_failed_action_and_a_verdict_that_found_nothing_are_said() -> None:
    script = ppdp()
    job = seen(script, of_kind("outcome"))
    assert "S3 failed: rank 6 did not commit within 2 s: rolled back" in shown(job)
    assert job.inquiry.level == "S1"

    script.lines = [line for line in script.lines if b'"kind":"verdict"' not in line]
    state = LiveState("pretrain7")
    for entry in map(decode_entry, script.lines):
        state.observe(entry)
    t = script.t
    state.observe(
        decode_entry(encode_entry(Verdict(episode=job.inquiry.id, note="all alike"), t=t))
    )
    assert "verdict: nothing found: all alike" in shown(state.look(t + 1))


def test_another_start_of_the_job_forgets_all_of_it(device: Script) -> None:
    state = LiveState("pretrain7")
    for line in device.lines[:-1]:
        state.observe(decode_entry(line))
    record: dict[str, Any] = {"what": "controller", "ok": True, "event": "started", "launch": "2-3"}
    state.observe(decode_entry(encode_entry(record, t=device.t + 1, kind="health")))

    assert state.look(device.t + 2).inquiry.facts is None


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_terminal(device: Script, width: int) -> None:
    text = shown(seen(device, of_kind("outcome")), width)

    assert all(len(row.rstrip()) <= width for row in text.splitlines())
    assert "slow: device ×1.52" in text
    assert "(verdict)" in text


def test_names_are_shown_as_they_are_whatever_is_in_them(
    device: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rich took "[/gpu]" for the end of a style, and there was no status."""
    job = seen(device, of_kind("verdict"))
    names = ["gpu[1]", "[/gpu]", "[red]gpu", "rack:eight:gpu"]
    workers = [replace(w, node=name) for w, name in zip(job.workers, names, strict=True)]
    emit_view(live_view(replace(job, name="[/pretrain]", workers=tuple(workers))))
    text = capsys.readouterr().out
    assert all(name in text for name in (*names, "[/pretrain]"))


def test_of_many_findings_the_rest_is_counted(device: Script) -> None:
    job = seen(device, of_kind("verdict"))
    (finding,) = job.inquiry.findings.values()
    more = {f"device rank {rank}": replace(finding, ranks=(rank,)) for rank in range(9)}
    text = shown(replace(job, inquiry=replace(job.inquiry, findings=more)))
    assert text.count("verdict: device of rank") == 3
    assert "verdict: 6 more" in text
    verdict = Verdict(episode="e", findings=tuple(more.values()))
    assert words.verdict_text(verdict).endswith("; and 1 more")
