"""From a journal to the story of its job: figures, cases, comparisons, and what is no entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.sample_journals import SAMPLES, dp4, ppdp, write
from tests.report.sample_script import BEGUN, MB, Script, cell

from failslow.errors import JournalError
from failslow.journal import decode_entry
from failslow.pipeline.wording import proved
from failslow.records import (
    CallCell,
    CulpritPace,
    Decision,
    Outcome,
    Plan,
    RankProfile,
    StepSample,
    Suspect,
    Verdict,
)
from failslow.report.json import dumps
from failslow.report.story import Story, read_story, story_document
from failslow.report.story.evidence import amount, panels
from failslow.report.story.heat import worst_cells
from failslow.report.story.places import decided_moves, moves
from failslow.report.story.profiles import ProfileBook
from failslow.report.story.terminal import slowdown_text
from failslow.report.words import (
    decision_text,
    plan_text,
    ranks_text,
    size_text,
    suspect_text,
    verdict_text,
)

Read = Callable[[Script], Story]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The story of a script."""
    return lambda script: read_story(write(script, tmp_path / "pretrain7"))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return read_story(write(dp4(), tmp_path_factory.mktemp("dp4")))


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return read_story(write(ppdp(), tmp_path_factory.mktemp("ppdp")))


def plain(script: Script, *, count: int = 40) -> Script:
    script.steps(count)
    return script


# -- figures ---------------------------------------------------------------------------------------


def test_the_header_counts_iterations_loss_and_spikes(device: Story) -> None:
    a = device.analysis

    assert (a.iterations, a.first_step, a.last_step) == (1306, 0, 1305)
    assert a.healthy_iteration_s == pytest.approx(0.08, rel=0.01)
    assert a.lost_s == 4.3
    assert a.jct_increase_pct == pytest.approx(100 * 4.3 / (a.wall_s - 4.3))
    assert a.wall_s == pytest.approx(112.9, abs=0.2)
    assert a.spikes == 4
    assert (len(device.workers), device.nodes) == (4, ("gpu-0", "gpu-1"))
    assert (device.ended, device.mode, device.starts) == (True, "auto", 1)
    assert device.paused_s == pytest.approx(0.82)
    assert device.spent_s == pytest.approx(0.11)


def test_a_suspicion_that_was_cleared_is_no_fault(device: Story) -> None:
    first, fault = device.cases

    assert device.suspected == (first,)
    assert first.cleared_t is not None
    assert device.faults == (fault,)
    assert [finding.key for finding in fault.findings] == ["device rank 2"]
    assert [decision.action for _, decision in fault.decisions] == ["escalate", "restore"]
    assert fault.findings[0].cause == "device degradation (thermal)"


def test_an_episode_lies_where_its_iterations_are_in_this_series(device: Story) -> None:
    (episode,) = device.analysis.fail_slows
    inside = device.series.duration_s[episode.first_index : episode.last_index + 1]
    before = device.series.duration_s[: episode.first_index]

    assert device.series.step[episode.first_index] == episode.start_step
    assert device.series.step[episode.last_index] == 944  # the end is the first healthy one
    assert sorted(inside)[5] > 0.083
    assert sorted(before)[len(before) // 2] < 0.081


def test_what_actions_removed_is_measured_in_wall_time_per_iteration(device: Story) -> None:
    removal = device.faults[0].removal
    assert removal is not None

    assert removal.healthy_s == 0.08
    assert removal.slow_s == pytest.approx(1.39 * 0.08, rel=0.01)
    assert removal.after_s == pytest.approx(1.11 * 0.08, rel=0.01)
    assert removal.share == pytest.approx((1.39 - 1.11) / 0.39, abs=0.03)
    assert removal.iterations == 320  # up to the iteration at which the culprit was well


def test_an_action_that_failed_removes_nothing(read: Read) -> None:
    script = ppdp()
    script.lines = [line for line in script.lines if b'"ok":true,"cost_s"' not in line]
    story = read(script)

    assert [outcome.ok for _, outcome in story.faults[0].outcomes] == [False]
    assert story.faults[0].removal is None
    assert story.in_force == ()


def test_the_timeline_has_all_that_happened_in_order(device: Story, link: Story) -> None:
    kinds = [mark.kind for mark in device.marks]
    assert kinds == [
        "watch", "suspicion", "cleared", "suspicion", "diagnosis", "pause", "verdict", "decision",
        "action", "decision", "action", "watch",
    ]  # fmt: skip
    pause = device.marks[5]
    assert pause.until_t == pytest.approx(pause.t + 0.82)
    assert [level for _, level in device.in_force] == ["S2", "S1"]
    assert [mark.text for mark in link.marks if mark.kind == "pause"] == [
        "paused 1.10 s for the reference",
        "paused 2.40 s for validation",
    ]


def test_a_pause_only_a_verdict_tells_of_counts_once(read: Read) -> None:
    script = dp4()
    with_record = read(script)
    script.lines = [line for line in script.lines if b'"kind":"validation"' not in line]
    without = read(script)

    assert with_record.paused_s == without.paused_s == pytest.approx(0.82)
    assert without.pauses[0].links == ()


def test_a_pause_that_came_to_nothing_says_why(read: Read) -> None:
    script = plain(Script(2, 1, 0.1))
    record = {"why": "suspects", "ok": False, "reason": "rank 1 was not ready", "results": []}
    script.write(record, kind="validation")
    story = read(script)

    assert story.paused_s == 0.0
    assert story.marks[-1].text == "not paused for validation: rank 1 was not ready"


def test_a_second_start_begins_a_new_run_and_its_pause_is_no_wall_time(read: Read) -> None:
    script = plain(Script(2, 1, 0.1))
    script.t += 3600.0
    script.step = 0
    script.health("controller", event="started", launch="2-3")
    plain(script)
    story = read(script)

    assert story.starts == 2
    assert story.series.run.tolist() == [0] * 40 + [1] * 40
    assert story.analysis.wall_s == pytest.approx(8.0, rel=0.05)
    assert story.series.end_s[-1] > 3600.0


def test_a_job_without_lines_of_its_own_is_told_by_a_worker(read: Read) -> None:
    script = Script(2, 1, 0.1)
    for step in range(20):
        script.t += 0.1
        sample = StepSample(step=step, duration_s=0.1, end_s=script.t - BEGUN, compute_s=0.05)
        script.write(sample, rank=1, node="gpu-1")
    story = read(script)

    assert story.analysis.iterations == 20
    assert "the job's own iterations are missing: those of rank 1" in story.analysis.warnings


def test_when_nothing_was_seen_is_told_apart_from_lost_samples(read: Read) -> None:
    script = plain(Script(2, 1, 0.1))
    script.health("agent", False, node="gpu-1", ranks=[1], since_t=script.t - 1.0)
    script.health("worker", False, node="gpu-1", rank=1, since_t=script.t - 0.5)
    script.health("ring", False, node="gpu-0", rank=0)
    script.steps(30)
    script.health("agent", node="gpu-1", ranks=[1])
    script.health("worker", node="gpu-1", rank=1)
    plain(script)
    story = read(script)

    agent = next(trouble for trouble in story.troubles if trouble.what == "agent")
    assert agent.until_t is not None
    assert story.blind_s == pytest.approx(agent.until_t - agent.since_t)  # the overlap once
    assert [t.until_t is None for t in story.troubles if t.what == "ring"] == [True]


# -- comparisons -----------------------------------------------------------------------------------


def test_the_heat_map_names_the_slow_worker_and_the_slow_group(device: Story, link: Story) -> None:
    healthy, slow = device.rounds
    assert (healthy.why, slow.why) == ("healthy", "suspicion")
    assert slow.columns == ("iteration", "mesh_dp", "default_pg")
    by_rank = dict(zip(slow.ranks, slow.values["own"], strict=True))
    assert by_rank[2][0] == pytest.approx(1.55, abs=0.05)
    assert by_rank[1][0] == pytest.approx(1.0, abs=0.05)
    late = dict(zip(slow.ranks, slow.values["late"], strict=True))
    assert late[2][1] == pytest.approx(0.55 * 0.056)
    assert late[0][1] == pytest.approx(0.0)
    assert worst_cells(slow, most=1)[0].rank == 2

    transfers = dict(zip(link.rounds[1].ranks, link.rounds[1].values["transfer"], strict=True))
    place = link.rounds[1].columns.index("mesh_dp")
    assert transfers[0][place] == pytest.approx(4.9)
    assert transfers[5][place] == pytest.approx(1.0)


def profile(rank: int, *cells: CallCell, device: str = "", compute_s: float = 0.1) -> RankProfile:
    return RankProfile(
        rank=rank, node="n", device=device, start_t=0.0, end_t=1.0, iterations=10, iteration_s=0.2,
        compute_s=compute_s, cells=cells,
    )  # fmt: skip


def test_only_equal_devices_and_equal_calls_compare() -> None:
    def own(rank: int, gap_s: float, device: str) -> RankProfile:
        calls = cell((0, 1, 2, 3), "dp", "allreduce_", MB, calls=10, wait_s=0.01, gap_s=gap_s)
        return profile(rank, calls, device=device, compute_s=gap_s)

    book = ProfileBook()
    for rank, gap_s, device in ((0, 0.1, "A"), (1, 0.1, "A"), (2, 0.3, "B"), (3, 0.3, "B")):
        book.take(own(rank, gap_s, device), 1.0, "")
    (taken,) = book.rounds()

    assert [row[0] for row in taken.values["own"]] == [1.0] * 4


def test_times_count_per_iteration_and_next_to_nothing_is_damped() -> None:
    def often(rank: int, gap_s: float) -> RankProfile:
        # four calls an iteration in one cell
        calls = cell((0, 1, 2), "tp", "allreduce_", MB, calls=40, wait_s=0.01, gap_s=gap_s)
        return profile(rank, calls)

    book = ProfileBook()
    for rank, gap_s in enumerate((0.01, 0.01, 0.02)):
        book.take(often(rank, gap_s), 1.0, "")
    for rank, gap_s in enumerate((1e-5, 1e-5, 3e-5)):
        book.take(often(rank, gap_s), 100.0, "")
    telling, nothing = book.rounds()

    assert [row[1] for row in telling.values["own"]] == [1.0, 1.0, pytest.approx(2.0)]
    assert nothing.values["own"][2][1] == pytest.approx(1.0 + 4 * 2e-5 / (0.02 * 0.2))


def test_links_compare_with_the_reference_where_there_is_one(link: Story) -> None:
    reference, last = link.pauses
    (slow,) = [
        one for one in last.links
        if (one.source, one.target, one.size_bytes) == ("gpu-1", "gpu-0", 16 * MB)
    ]  # fmt: skip

    assert (reference.why, last.why) == ("reference", "suspects")
    assert {one.against for one in last.links} == {"the reference"}
    assert {one.against for one in reference.links} == {"the median link"}
    assert slow.ratio == pytest.approx(4.8)
    assert slow.ranks == ((2, 0), (2, 1), (3, 0), (3, 1))
    assert slow.bytes_per_s == pytest.approx(16 * MB / slow.seconds)
    others = [one.ratio for one in last.links if (one.source, one.target) != ("gpu-1", "gpu-0")]
    assert max(others) < 1.05


def test_telemetry_that_moved_with_the_onset_comes_first(device: Story) -> None:
    t, body = device.telemetry[0]
    case = device.case_at(t)
    assert case is device.faults[0]
    found = panels(body, onset_t=case.start_t, relief_t=case.end_t, most=8)

    assert {panel.name for panel in found[:3]} == {
        "gpu/0/temperature_c", "gpu/0/sm_clock_mhz", "gpu/0/power_w"
    }  # fmt: skip
    clock = next(panel for panel in found if panel.name == "gpu/0/sm_clock_mhz")
    assert clock.unit == "MHz"
    assert amount(clock.before, clock.unit) == "1,977 MHz"
    assert {(panel.rank, panel.name) for panel in found} >= {(2, "runqueue_share")}
    assert max(panel.score for panel in found[3:]) < 3.0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"t": "x", "series": 7},
        {"t": [1.0, 2.0], "series": {"a": [1.0]}, "ranks": {"x": {}, "3": 5}},
        {"t": [1.0, None], "series": {"a": [None, None], "b": "text"}},
    ],
)
def test_telemetry_of_another_version_gives_no_panel(body: dict[str, Any]) -> None:
    assert panels(body, onset_t=1.5, relief_t=None, most=3) == []


def test_own_time_shows_the_slow_worker_in_its_time(device: Story) -> None:
    own = device.own_time
    assert own is not None
    fault = device.faults[0]
    assert fault.end_t is not None
    inside = (own.t > fault.start_t + 2) & (own.t < fault.end_t - 2)
    rows = dict(zip(own.ranks, own.ratio, strict=True))

    assert rows[2][inside].min() > 1.4
    assert rows[2][own.t < fault.start_t - 2].max() < 1.1
    assert rows[0][inside].max() < 1.1


# -- the document ----------------------------------------------------------------------------------


def test_the_document_has_the_keys_promised(device: Story) -> None:
    found = story_document(device)
    told = json.loads(dumps(found))

    assert list(found) == [
        "schema", "job", "source", "begin_t", "end_t", "ended", "mode", "workers", "layout",
        "iterations", "first_step", "last_step", "healthy_iteration_s", "wall_s", "lost_s",
        "jct_increase_pct", "spikes", "spike_lost_s", "paused_s", "spent_s", "episodes",
        "suspicions", "timeline", "level_in_force", "profiles", "start", "pauses", "telemetry",
        "monitoring", "warnings",
    ]  # fmt: skip
    assert told["schema"] == "failslow.report/1"
    (episode,) = told["episodes"]
    assert list(episode) == [
        "id", "kind", "start_t", "end_t", "ongoing", "start_step", "end_step", "slowdown",
        "peak_slowdown", "baseline_s", "iteration_s", "lost_s", "confidence", "note", "levels",
        "culprits", "suspects", "findings", "verdicts", "decisions", "outcomes", "restarts",
        "commands", "removed",
    ]  # fmt: skip
    assert episode["findings"][0]["component"] == "device rank 2"
    assert episode["suspects"][0]["score"] == 0.94
    assert episode["decisions"][0]["plan"]["microbatches"] == [9, 9, 6, 8]
    assert episode["decisions"][0]["options"][2]["reason"] == "one stage"
    assert episode["removed"]["share"] == pytest.approx(0.72, abs=0.02)
    assert told["layout"]["microbatches"] == 32
    assert told["telemetry"][0]["episode"] == episode["id"]
    assert told["monitoring"]["troubles"][0]["node"] == "gpu-1"


@pytest.mark.parametrize("name", ["dp4", "ppdp"])
def test_samples_are_journals_that_nothing_is_strange_in(name: str) -> None:
    kinds = set()
    for line in SAMPLES[name]().lines:
        entry = decode_entry(line)
        kinds.add(entry.kind)
        known = entry.kind in ("suspicion", "health", "validation", "telemetry")
        assert isinstance(entry.record, dict) == known, entry

    assert kinds >= {"step", "episode", "rankprofile", "diagnosis", "verdict", "decision",
                     "outcome", "jobfacts"}  # fmt: skip


# -- what is no journal ----------------------------------------------------------------------------


def test_a_line_cut_short_and_unknown_kinds_are_counted_not_fatal(read: Read) -> None:
    script = dp4()
    whole = read(script).analysis
    script.lines += [
        b'{"t":1745735400,"kind":"newthing","x":1}',
        b'{"t":1745735400,"kind":"verdict","findings":7}',
        b'{"t":1745735400,"kind":"step","step":"many"}',
        b'{"t":1745735400,"kind":"suspicion"}',
        b'{"t":1745735400,"kind":"telemetry","telemetry_t":[1],"ranks":7}',
        b'{"t":1745735400,"kind":"validation","results":[7,{"do":"p2p","rank":"x"}]}',
        b'{"t":1745735400,"kind":"step","st',
        b"\xff\xfe",
    ]
    story = read(script)

    assert story.skipped == 2
    assert story.unknown == {"newthing": 1, "verdict": 1, "step": 1, "suspicion": 1}
    assert story.analysis.lost_s == whole.lost_s
    assert any("2 lines of the journal are no entries" in w for w in story.analysis.warnings)
    assert any("newthing (1)" in w for w in story.analysis.warnings)


def test_a_job_that_never_iterated_is_told_with_what_is_known(read: Read) -> None:
    story = read(Script(2, 1, 0.1))

    assert story.analysis.iterations == 0
    assert len(story.workers) == 2
    assert any("no iteration was seen" in warning for warning in story.analysis.warnings)
    assert json.loads(dumps(story_document(story)))["healthy_iteration_s"] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"", "the journal is empty"), (b"hello\nworld\n", "the journal is 2 lines that no journal")],
)
def test_what_holds_no_entry_is_an_error_of_one_line(
    text: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(text)

    with pytest.raises(JournalError, match=says):
        read_story(path)
    with pytest.raises(JournalError, match="no journal there"):
        read_story(tmp_path / "other" / "journal.jsonl")


def test_rotated_files_are_read_first(tmp_path: Path) -> None:
    script = dp4()
    half = len(script.lines) // 2
    first = replace_lines(script, script.lines[half:])
    path = write(first, tmp_path)
    path.with_name("journal.jsonl.1").write_bytes(b"\n".join(script.lines[:half]) + b"\n")

    assert read_story(path).analysis.iterations == 1306


def replace_lines(script: Script, lines: list[bytes]) -> Script:
    other = Script(1, 1, 0.1)
    other.lines = lines
    return other


def test_of_a_long_journal_every_iteration_and_a_part_of_the_workers_lines_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(dp4(), tmp_path)
    whole = read_story(path)
    monkeypatch.setattr("failslow.report.story.reading._LONG_BYTES", 100_000)
    part = read_story(path)

    assert part.analysis == whole.analysis
    assert part.own_time is not None
    assert whole.own_time is not None
    assert part.own_time.ratio.shape[1] < whole.own_time.ratio.shape[1]
    assert [w.rank for w in part.workers] == [0, 1, 2, 3]


def test_culprits_pace_and_a_case_after_it_end_what_counts_as_after_the_action(read: Read) -> None:
    script = ppdp()
    script.write(CulpritPace(key="link gpu-1>gpu-0", slowdown=1.0))
    script.steps(40)
    known = read(script).faults[0].removal
    assert known is not None
    assert known.iterations == 130  # the healthy ones afterwards are no merit of the action
    script.write(Outcome(episode="other", level="S1", ok=True, cost_s=0.0))
    assert replace(known, iterations=1).share == known.share


def test_a_verdict_about_no_episode_is_about_the_start(read: Read) -> None:
    script = plain(Script(2, 1, 0.1))
    findings = ppdp_findings()
    script.write(Verdict(episode="", findings=findings, step=39, pause_s=1.0))
    story = read(script)

    assert story.cases == ()
    assert story.start is not None
    assert story_document(story)["start"]["findings"][0]["component"] == "link gpu-1>gpu-0"


def ppdp_findings() -> Any:
    entries = map(decode_entry, ppdp().lines)
    return next(e.record.findings for e in entries if e.kind == "verdict" and e.record.findings)


def test_words() -> None:
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([4, 5, 6]) == "ranks 4–6"
    assert ranks_text([0, 8]) == "ranks 0, 8"
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert size_text(16 * MB) == "16 MiB"
    assert size_text(1_500_000) == "1.5 MB"


def test_a_reference_without_findings_is_no_failed_search() -> None:
    note = "also measured slow, but not what the job waits for: device rank 2 x1.73"
    said = f"the reference was taken ({note})"
    assert verdict_text(Verdict(episode="", note=note)) == proved(Verdict(episode="", note=note))
    assert verdict_text(Verdict(episode="", note=note)) == said
    assert verdict_text(Verdict(episode="")) == "the reference was taken"
    assert verdict_text(Verdict(episode="e1", note=note)) == f"nothing found: {note}"


def test_a_group_nobody_named_is_not_called_undefined() -> None:
    group = Suspect(what="group", ranks=(0, 1, 2, 3), label="undefined", slowdown=27.9,
                    extra_s=0.2, score=0.6)  # fmt: skip
    assert suspect_text(group) == "group of ranks 0–3"
    assert suspect_text(replace(group, label="mesh_dp")) == "group of ranks 0–3 in mesh_dp"
    book = ProfileBook()
    for rank in range(2):
        made = cell(range(2), "undefined", "allreduce_", MB, wait_s=0.01, gap_s=0.1)
        book.take(profile(rank, made), BEGUN, "")
    assert book.rounds()[-1].columns == ("iteration", "unnamed group")


def test_the_slowdown_told_is_that_of_the_worst_level_with_what_is_left_of_it(
    device: Story,
) -> None:
    (fault,) = device.faults
    (stretch,) = fault.stretches
    # most of its time something was done about it
    mended = replace(stretch, episode=replace(stretch.episode, slowdown=0.97))
    case = replace(fault, stretches=[mended])
    assert case.worst == 1.39
    assert case.left == pytest.approx(1.11, abs=0.02)
    assert slowdown_text(case) == "×1.39\n×1.11 left"


def test_who_changes_places_is_told_against_those_in_force(read: Read) -> None:
    assert moves((0, 2, 3, 1), (), {1: "gpu-1"}) == [
        "rank 2 takes the place of rank 1 (gpu-1)",
        "rank 3 takes the place of rank 2",
        "rank 1 (gpu-1) takes the place of rank 3",
    ]
    assert moves((0, 1, 3, 2), (0, 1, 3, 2), {}) == []
    many = moves(tuple(reversed(range(40))), (), {})
    assert many[-1] == "and 12 more changes"

    story = read(ppdp())
    order = (0, 1, 4, 5, 2, 3, 6, 7)
    ((t, now),) = story.orders  # the first try failed
    assert (now, t) == (order, story.cases[-1].outcomes[-1][0])
    (back, *_) = decided_moves(story, t + 1.0, tuple(range(8)))
    assert back == "rank 2 (gpu-1) and rank 4 (gpu-2) change places"
    assert decided_moves(story, t + 1.0, order) == []


def test_a_plan_names_the_order_of_its_workers() -> None:
    plan = Plan(
        level="S3", predicted_slowdown=1.0, microbatches=(7, 7, 7, 7), placement=(0, 1, 3, 2)
    )
    assert plan_text(plan) == "workers in the order 0 1 3 2, micro-batches 7 7 7 7"
    swapped = [*range(10), 11, 10, *range(12, 32)]
    assert plan_text(replace(plan, microbatches=(), placement=tuple(swapped))) == (
        "ranks 10, 11 at others' places"
    )


def test_handing_back_to_the_policy_is_no_advice() -> None:
    decision = Decision(
        episode="e1", action="obey", level="S2", from_level="S2", mode="auto", apply=False,
        culprits=("device rank 2",), lost_s=55.1, threshold_s=None, options=(),
        reason="automatic again",
    )  # fmt: skip
    assert decision_text(decision) == "as ordered: automatic again, at S2"
    back = replace(decision, action="restore", level="S1", reason="nothing is to be undone")
    assert decision_text(back) == "back to S1"
