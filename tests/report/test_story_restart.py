"""How a restart without a host is told: what was saved, who was left out, what it cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.report.sample_restart import COMMANDS, restarted
from tests.report.sample_script import Script, write

from failslow.report.json import dumps
from failslow.report.story import Story, read_story, story_document, story_view, write_story
from failslow.report.story.terminal import done_text


def story_of(script: Script, folder: Path) -> Story:
    return read_story(write(script, folder / "pretrain7"))


def shown(story: Story) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(story_view(story))
    return " ".join(captured.get().split())


def page(story: Story, folder: Path) -> str:
    write_story(folder / "report.html", story, made_at="2026-01-01 00:00 UTC")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_a_restart_is_told_from_the_checkpoint_to_the_first_iteration(tmp_path: Path) -> None:
    story = story_of(restarted(), tmp_path)
    (case,) = story.faults
    (restart,) = case.restarts
    assert (restart.evict, restart.starts, restart.save_s) == (("gpu-1",), 2, 3.5)
    # saved, one iteration more, 40 s of nothing
    assert restart.lost_s == pytest.approx(3.5 + 0.18 + 40.0, abs=0.1)
    assert case.spent_s == pytest.approx(restart.lost_s)
    assert story.starts == 2
    assert case.end_t == restart.t, "who was slow is gone, and the episode with it"
    assert case.removal is not None
    assert case.removal.share == pytest.approx(1.0, abs=0.05)


def test_terminal_page_and_document_tell_the_same(tmp_path: Path) -> None:
    story = story_of(restarted(), tmp_path)
    terminal, html = shown(story), page(story, tmp_path)
    for text in (
        "and 43.7 s by restarts",
        "+ 43.7 s restart",
        "×1.80",
        "×1.00 left",
        "S4 done in 3.50 s",
        "restarted without gpu-1 (device rank 3 x1.84): trains again, 43.7 s lost, 2 starts",
        "Slurm told: scontrol update NodeName=gpu-1 State=DRAIN",
    ):
        assert text in terminal, text
        assert text in html, text
    assert done_text(story.faults[0]) == "S4: without gpu-1, 43.7 s lost: 100 % removed"
    told = json.loads(dumps(story_document(story)))["episodes"][0]
    (restart,) = told["restarts"]
    assert restart["evict"] == ["gpu-1"]
    assert restart["why"] == "device rank 3 x1.84"
    assert restart["starts"] == 2
    assert restart["lost_s"] == pytest.approx(43.68, abs=0.1)
    assert told["commands"][0]["commands"] == COMMANDS
    assert told["commands"][0]["run"]
    assert not told["ongoing"]
    assert any("restarted without gpu-1" in mark.text for mark in story.marks)


def test_a_node_that_was_left_out_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Script(ranks=3, per_node=1, healthy_s=0.1, seed=4)
    job.steps(40)
    monkeypatch.setattr(job, "node", lambda rank: f"gpu-{rank + 1}")  # without gpu-0
    job.ranks = 2
    job.steps(40)
    assert set(story_of(job.finish(), tmp_path).nodes) == {"gpu-0", "gpu-1", "gpu-2"}


def test_a_job_that_was_not_seen_again_is_told_so(tmp_path: Path) -> None:
    story = story_of(restarted(comes_back=False), tmp_path)
    (restart,) = story.faults[0].restarts
    assert (restart.back_t, restart.lost_s, restart.starts) == (None, None, 0)
    assert story.faults[0].spent_s == 3.5
    for text in (shown(story), page(story, tmp_path)):
        assert "not seen to train again; its checkpoint is as it was" in text
    assert [mark.kind for mark in story.marks if "restarted" in mark.text] == ["failed"]


def test_one_start_is_not_counted_out(tmp_path: Path) -> None:
    text = shown(story_of(restarted(starts=1), tmp_path))
    assert "trains again, 43.7 s lost" in text
    assert "1 start" not in text


def test_advice_shows_the_commands_nobody_ran(tmp_path: Path) -> None:
    story = story_of(restarted(apply=False), tmp_path)
    assert story.faults[0].restarts == []
    text = shown(story)
    assert "advice: go to S4: without gpu-1" in text
    assert "to be told Slurm: scontrol update NodeName=gpu-1" in text


@pytest.mark.parametrize(
    "record",
    [
        {"what": "restart"},
        {"what": "restart", "id": "e1-1", "evict": 7},
        {"what": "restarted", "id": "e1-1", "starts": "many"},
        {"what": "slurm", "episode": "e1"},
    ],
)
def test_lines_of_another_version_are_counted_and_left_out(
    tmp_path: Path, record: dict[str, object]
) -> None:
    script = restarted()
    script.write(record, kind="action")
    story = story_of(script, tmp_path)
    assert len(story.faults[0].restarts) == 1
    assert story.unknown == {"action": 1}
