"""`failslow study` on the sample logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_the_study_of_the_samples_counts_one_hit_of_four(run: Any, examples: Path) -> None:
    result = run("study", examples, "--json")

    study = json.loads(result.stdout)
    assert result.exit_code == 0
    assert study["schema"] == "failslow.study/1"
    assert (study["jobs"], study["hit"], study["hit_pct"]) == (4, 1, 25.0)
    assert study["workload_changes"] == 1
    assert study["duration_s"]["mean"] == study["duration_s"]["longest"] == pytest.approx(460, 0.02)
    jct = study["jct_increase_pct"]
    assert jct["mean_hit"] == pytest.approx(4 * jct["mean_all"])
    assert study["over_50_pct"] == {"jobs": 0, "share_of_hit_pct": 0.0}
    assert sorted(row["hit"] for row in study["per_job"]) == [False, False, False, True]


def test_the_table_lists_figures_and_jobs(run: Any, examples: Path) -> None:
    result = run("study", examples)

    assert "hit by a fail-slow         1 (25 %)" in result.stdout
    assert "\nmegatron_slow.log" in result.stdout
    assert result.stderr == ""


def test_an_unreadable_file_is_in_the_document_and_on_stderr(
    run: Any, examples: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("")

    result = run("study", examples, empty, "--json")

    study = json.loads(result.stdout)
    assert result.exit_code == 1
    assert study["jobs"] == 4
    assert [u["source"] for u in study["unreadable"]] == [str(empty)]
    assert result.stderr.startswith("failslow: ")


def test_the_page_of_a_study_holds_its_figures(run: Any, examples: Path, tmp_path: Path) -> None:
    page = tmp_path / "study.html"

    run("study", examples, "--html", page, "--quiet")

    text = page.read_text()
    assert "<h1>failslow study</h1>" in text
    assert "1 of 4" in text
