"""The page and the summary of a watched job: every section has its data, no name becomes code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.report.sample_journals import dp4, large, ppdp, write
from tests.report.sample_script import Script

from failslow.records import JobFacts
from failslow.report.story import Story, read_story, story_view, write_story


class Visible(HTMLParser):
    """Text outside scripts and styles by the heading of its card, and every reference."""

    def __init__(self) -> None:
        super().__init__()
        self.cards: dict[str, str] = {}
        self.text = ""
        self.references: list[str] = []
        self.tags: list[str] = []
        self._silent, self._card, self._heading = 0, "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._silent += tag in ("script", "style")
        self._heading = tag == "h2"
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "data", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        if self._heading:
            self._card, self._heading = data, False
        self.text += data
        self.cards[self._card] = self.cards.get(self._card, "") + data


def opened(story: Story, folder: Path) -> tuple[str, Visible]:
    path = folder / "report.html"
    write_story(path, story, made_at="2026-01-01 00:00 UTC")
    page, visible = path.read_text(encoding="utf-8"), Visible()
    visible.feed(page)
    return page, visible


def payload(page: str, id: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{id}">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


def shown(story: Story, width: int = 100) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(story_view(story))
    return captured.get()


def has(text: str, words: Sequence[str]) -> None:
    flat = " ".join(text.split())
    for word in words:
        assert word in flat, word


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("runs") / "pretrain7"
    return read_story(write(dp4(), folder), source="failslow-runs/pretrain7")


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return read_story(write(ppdp(), tmp_path_factory.mktemp("ppdp")))


def test_the_page_refers_to_nothing_and_has_every_section(device: Story, tmp_path: Path) -> None:
    page, visible = opened(device, tmp_path)

    assert set(visible.references) == {"#case-1"}
    assert "default-src 'none'" in page.split("<title>")[0]
    assert "connect-src" not in page.split("<title>")[0]
    assert list(visible.cards)[1:] == [
        "failslow-runs/pretrain7", "Fail-slow 1", "Suspicions that became no episode",
        "Workers and groups", "Own time of each worker", "What happened", "Monitoring",
    ]  # fmt: skip


def test_each_section_tells_what_the_journal_says(device: Story, tmp_path: Path) -> None:
    _, visible = opened(device, tmp_path)
    cards = visible.cards

    has(cards["failslow-runs/pretrain7"], [
        "4 workers on 2 nodes", "1,306 iterations", "healthy 80.0 ms", "pp 1 × dp 4", "mode auto",
        "1 fail-slow, 4.30 s lost: completion time +3.96 %", "step 586", "step 945", "34.5 s",
        "×1.39", "device of rank 2 (gpu-1, GPU 0) ×1.52: device degradation (thermal)",
        "S2: 72 % removed", "×1.11 left",
    ])  # fmt: skip
    has(cards["Own time of each worker"], ["more micro-batches take longer"])
    has(cards["Fail-slow 1"], [
        "confidence 0.998", "gemm bf16 4096", "31.0 ms", "20.4 ms", "×1.52",
        "throttle reason hw_thermal_slowdown", "against CPU contention", "at step 622 (820 ms)",
        "own time of rank 2 in mesh_dp", "0.94", "nothing to compare to",
        "go to S2: micro-batches 9 9 6 8", "1.21 s lost ≥ threshold 100 ms",
        "→ S2: leaves ×1.11 (estimate), costs 100 ms (estimate)", "S3: one stage",
        "S2 done in 60.0 ms, leaves ×1.11", "back to S1: micro-batches 8 8 8 8",
        "72 % of the slowdown removed",
    ])  # fmt: skip
    has(cards["Suspicions that became no episode"], ["e1745735274", "×1.18", "cleared 06:27:57"])
    has(cards["What happened"], ["12 entries", "paused 0.82 s for validation"])
    has(cards["Monitoring"], ["blind for 6.21 s", "monitoring of node gpu-1 is blind since 3 s"])


def test_the_timeline_has_lanes_marks_bars_and_levels(device: Story, tmp_path: Path) -> None:
    page, _ = opened(device, tmp_path)
    drawn = payload(page, "data-1")

    assert drawn["lanes"] == [
        "watching", "suspicion", "profile", "verdict", "decision", "action", "in force"
    ]  # fmt: skip
    assert [mark["kind"] for mark in drawn["marks"]].count("decision") == 2
    bars = {(span["kind"], drawn["lanes"][span["lane"]]) for span in drawn["spans"]}
    assert bars == {("pause", "verdict"), ("S2", "in force"), ("blind", "watching")}
    s2 = next(span for span in drawn["spans"] if span["kind"] == "S2")
    assert s2["x"] == [pytest.approx(625, abs=2), pytest.approx(1006, abs=2)]
    heights = [y for y in drawn["levels"]["y"] if y is not None]
    assert heights == pytest.approx([0.1112, 0.1112, 0.0888, 0.0888])
    assert drawn["levels"]["x"][:2] == [586, 625]
    assert len(drawn["episodes"]) == 1


def test_the_pictures_have_their_numbers(device: Story, link: Story, tmp_path: Path) -> None:
    page, _ = opened(device, tmp_path)
    story = payload(page, "story-data")
    assert [taken["ranks"] for taken in story["rounds"]] == [[0, 1, 2, 3]] * 2
    assert story["rounds"][1]["values"]["own"][2][0] == pytest.approx(1.55, abs=0.05)
    assert max(story["own"]["percent"][2]) > 150
    assert story["links"] is None
    (telemetry,) = story["telemetry"]
    assert telemetry["panels"][0]["telling"]
    assert any("gpu/0/sm_clock_mhz" in panel["title"] for panel in telemetry["panels"])
    assert "1,977 MHz → 1,315 MHz" in {panel["change"] for panel in telemetry["panels"]}

    page, visible = opened(link, tmp_path)
    links = payload(page, "story-data")["links"]
    assert [size["label"] for size in links["sizes"]] == [
        f"{size}, {when}"
        for when in ("06:27:51 reference", "06:29:00 suspects")
        for size in ("1 MiB", "4 MiB", "16 MiB")
    ]
    worst = max(links["sizes"][-1]["cells"], key=lambda one: one[2])
    assert worst[:4] == [1, 0, 4.8, "479 MB/s"]
    has(visible.cards["Links"], ["gpu-1", "gpu-0", "479 MB/s", "×4.80", "the reference"])
    assert 'data-picture="profiles" data-metric="transfer"' in page  # what the suspicion is about
    has(visible.cards["From the start"], ["nobody slow by peers", "the last stage computes ×1.12"])
    has(visible.cards["Fail-slow 1"], [
        "S3 failed: rank 6 did not commit", "ongoing",
        "go to S3: workers in the order 0 1 4 5 2 3 6 7",
        "rank 2 (gpu-1) and rank 4 (gpu-2) change places",
    ])  # fmt: skip


def test_a_thousand_ranks_stay_readable_and_the_page_small(tmp_path: Path) -> None:
    story = read_story(write(large(steps=60), tmp_path))
    page, visible = opened(story, tmp_path)
    drawn = payload(page, "story-data")

    assert len(story.workers) == 1024
    assert len(drawn["rounds"][1]["ranks"]) == 1024
    assert 'data-picture="profiles" data-metric="own" data-by="node"' in page
    assert len(page) < 6_000_000
    has(visible.cards["Fail-slow 1"], ["host gpu-17 (ranks 136–143) ×1.33", "CPU contention"])
    text = shown(story)
    has(text, [
        "1,024 workers on 128 nodes", "advice: go to S2: micro-batches 8 ×62, 6, 10",
        "and 3 suspects more", "mode advise",
    ])  # fmt: skip
    assert len(text.splitlines()) < 60


def test_the_summary_has_the_same_facts_in_80_columns(device: Story, link: Story) -> None:
    text = shown(device, 80)

    assert all(len(line.rstrip()) <= 80 for line in text.splitlines()[1:])
    has(text, [
        "1 fail-slow, 4.30 s lost: completion time +3.96 %", "paused 820 ms for validation",
        "110 ms spent on actions", "proven: device of rank 2 (gpu-1, GPU 0) ×1.52",
        "suspect own time of rank 2 in mesh_dp ×1.55, +31.0 ms, score 0.94",
        "06:28:24 go to S2: micro-batches 9 9 6 8 (1.21 s lost ≥ threshold 100 ms)",
        "S2: leaves ×1.11 (estimate), costs 100 ms (estimate)", "72 % of the slowdown removed",
        "gpu-1 gpu/0/sm_clock_mhz: 1,977 MHz → 1,315 MHz at the onset",
        "monitoring: blind for 6.21 s",
    ])  # fmt: skip
    has(shown(link), [
        "S3: 90 % removed", "rank 3 (gpu-1) and rank 5 (gpu-2) change places",
        "slowest of 12 links measured with 16 MiB",
        "gpu-1 gpu-0 479 MB/s ×4.80 the reference", "uneven by design",
        "the journal has no end: the job still runs, or it was killed",
    ])  # fmt: skip


def test_a_healthy_job_and_one_that_never_iterated_say_what_is_missing(tmp_path: Path) -> None:
    script = Script(2, 1, 0.1)
    never = read_story(write(script, tmp_path / "never"))
    script.steps(60)
    healthy = read_story(write(script.finish(), tmp_path / "healthy"))

    _, visible = opened(never, tmp_path)
    has(visible.text, ["no iteration was seen", "0iterations seen"])
    has(shown(never), ["no iteration was seen"])
    page, visible = opened(healthy, tmp_path)
    has(visible.cards["Monitoring"], [
        "no trouble",
        "not in it: profiles of the workers' calls, validation, telemetry, decisions",
    ])  # fmt: skip
    assert payload(page, "story-data")["rounds"] == []
    assert "Fail-slow 1" not in visible.cards
    has(shown(healthy), ["2 workers on 2 nodes · 60 iterations", "no fail-slow"])


def test_names_and_notes_cannot_become_markup_or_script(device: Story, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x><!--"
    plain = opened(device, tmp_path)[1].tags
    case = device.faults[0]
    t, verdict = case.verdicts[0]
    finding = replace(verdict.findings[0], cause=evil, host=evil, evidence=(evil,))
    diagnosis = replace(
        case.diagnoses[0][1],
        suspects=(replace(case.diagnoses[0][1].suspects[0], label=evil, note=evil),),
        note=evil,
    )
    outcome = replace(case.outcomes[0][1], ok=False, error=evil)
    changed = replace(
        case,
        id=evil,
        verdicts=[(t, replace(verdict, findings=(finding,), note=evil))],
        diagnoses=[(t, diagnosis)],
        outcomes=[(t, outcome)],
        decisions=[(at, replace(d, reason=evil)) for at, d in case.decisions],
    )
    story = replace(
        device,
        name=evil,
        source=evil,
        cases=(changed,),
        marks=tuple(replace(mark, text=evil) for mark in device.marks),
        rounds=tuple(replace(r, columns=(evil,) * len(r.columns)) for r in device.rounds),
        facts=JobFacts(pp=1, dp=4, microbatches=8, no_topology_change=evil),
        troubles=tuple(replace(trouble, message=evil) for trouble in device.troubles),
    )
    page, visible = opened(story, tmp_path)

    assert "img" not in visible.tags
    assert visible.tags.count("script") == plain.count("script")
    assert visible.text.count(evil) >= 12
    assert "<!--" not in page.split("<script>")[0]
