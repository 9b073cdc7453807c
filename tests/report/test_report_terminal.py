"""What the tables say, as text of a width."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from failslow.records import JobAnalysis, StepSeries
from failslow.report import summarize
from failslow.report.terminal import analysis_view, study_view


def render(view: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(view, crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_a_job_is_a_heading_its_episodes_what_they_cost_and_the_warnings(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    text = render(analysis_view([slow_job[1]]))

    lines = text.splitlines()
    assert lines[0] == "train.log · megatron · 50,000 iterations · healthy 572 ms · 8 h 21 min"
    assert lines[1].split() == ["#", "what", "start", "length", "slowdown", "time", "lost"]
    assert "1  fail-slow  step 15,010" in lines[2]
    assert "×1.40" in lines[2]
    assert "2025-04-27 08:52:04" in lines[3]
    assert lines[4].strip() == "1: rank 3 (compute ×2.30)"
    assert lines[5].startswith("  1 fail-slow, ")
    assert "completion time +" in lines[5]
    assert lines[5].endswith("3 spikes (37.2 s)")
    assert lines[6] == "  warning: 3 lines without a time"
    assert len(lines) == 7


def test_a_workload_change_is_called_that_and_costs_nothing(make_job: Any) -> None:
    _, job = make_job(
        np.r_[np.full(60, 1.0), np.full(40, 2.0)], episodes=[(60, 99, "workload_change")]
    )

    text = render(analysis_view([job]))

    assert "workload change  step 61" in text
    assert "1 min 20 s, ongoing" in text
    assert "1 min in" in text
    assert "1: batch 64 -> 128" in text
    assert "no fail-slow" in text
    assert "lost:" not in text


def test_a_data_stall_is_named(make_job: Any) -> None:
    _, job = make_job(np.r_[np.full(60, 1.0), np.full(40, 2.0)], episodes=[(60, 99, "fail_slow")])
    stalled = replace(
        job.episodes[0], culprits=(), note="data stall: waiting for data explains 97 %"
    )

    text = render(analysis_view([replace(job, episodes=(stalled,))]))

    assert "1  data stall" in text
    assert "1: data stall: waiting for data explains 97 %" in text


def test_a_clean_job_takes_two_lines_and_many_jobs_end_in_a_sum(make_job: Any) -> None:
    _, clean = make_job(np.full(100, 0.25))
    slow = make_job(np.r_[np.full(60, 1.0), np.full(40, 2.0)], episodes=[(60, 99, "fail_slow")])

    assert render(analysis_view([clean])).splitlines()[1] == "  no fail-slow"
    assert (
        render(analysis_view([clean, slow[1]])).splitlines()[-1]
        == "2 jobs: 1 hit by fail-slows, 40.0 s lost"
    )
    assert render(analysis_view([clean, clean])).splitlines()[-1] == "2 jobs: no fail-slow"


def test_a_long_warning_is_wrapped_and_never_cut(make_job: Any) -> None:
    warning = "the clock says otherwise " * 12
    _, job = make_job(np.full(30, 1.0), warnings=(warning.strip(),))

    text = render(analysis_view([job]))

    assert text.count("otherwise") == 12


def test_markup_in_names_and_notes_is_text(make_job: Any) -> None:
    _, job = make_job(np.full(30, 1.0), source="[red]x[/red].log", warnings=("[bold]",))

    text = render(analysis_view([job]))

    assert text.startswith("[red]x[/red].log · ")
    assert "warning: [bold]" in text


def test_tables_fit_80_columns(slow_job: tuple[StepSeries, JobAnalysis], make_job: Any) -> None:
    _, changed = make_job(
        np.r_[np.full(60, 1.0), np.full(40, 2.0)] * 997,
        episodes=[(60, 99, "workload_change")],
        start_time=1.7e9,
        iterations=50,
    )
    for view in (analysis_view([changed]), study_view(summarize([slow_job[1], changed]))):
        assert max(map(len, render(view).splitlines())) <= 80


def test_a_study_shows_its_figures_then_its_jobs_the_hardest_hit_first(make_job: Any) -> None:
    slow = np.r_[np.full(60, 1.0), np.full(40, 2.0)]
    jobs = [
        make_job(np.full(100, 1.0), source="clean.log")[1],
        make_job(slow, episodes=[(60, 99, "fail_slow")], source="hit.log")[1],
        make_job(slow + (slow > 1), episodes=[(60, 99, "fail_slow")], source="hard.log")[1],
    ]

    text = render(study_view(summarize(jobs)))

    for figure in (
        "jobs                       3",
        "hit by a fail-slow         2 (67 %)",
        "episodes                   2, 2 ongoing",
        "mean duration              1 min 40 s",
        "longest                    2 min",
        "completion time, hit jobs  +60.0 % (mean)",
        "hit jobs over +50 %        1 (50 %)",
        "completion time, all jobs  +40.0 % (mean)",
        "blamed                     compute 2",
    ):
        assert figure in text
    names = text[text.index("worst") :]
    assert names.index("hard.log") < names.index("hit.log") < names.index("clean.log")


def test_jobs_of_one_folder_are_told_apart_without_it(make_job: Any) -> None:
    jobs = [
        make_job(np.full(100, 1.0), source=f"/data/cluster/runs/{name}/train.log")[1]
        for name in ("a", "b")
    ]

    text = render(study_view(summarize(jobs)))

    assert "\na/train.log" in text
    assert "cluster" not in text


def test_a_study_of_nothing_says_so() -> None:
    assert render(study_view(summarize([]))).startswith("jobs  0")
