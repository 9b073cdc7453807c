"""The picture of a job hides neither an episode nor a spike, however long the series."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failslow.records import JobAnalysis, StepSeries
from failslow.report import job_picture


@st.composite
def places(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[int, int, str]], list[int]]:
    """A noisy series with a few episodes and spikes anywhere."""
    n = draw(st.integers(30, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    seconds = 0.2 * np.exp(0.03 * rng.standard_normal(n))
    cuts = sorted(draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=8)))
    episodes = []
    for first, last in zip(cuts[::2], cuts[1::2], strict=False):
        seconds[first : last + 1] *= 1.5
        episodes.append((first, last, draw(st.sampled_from(["fail_slow", "workload_change"]))))
    spikes = sorted(draw(st.sets(st.integers(0, n - 1), max_size=12)))
    seconds[spikes] *= 8
    return seconds, episodes, spikes


@given(places(), st.integers(1, 60))
@settings(max_examples=60)
def test_every_episodes_peak_and_boundaries_and_all_extremes_survive(
    make_job: Any, made: tuple[np.ndarray, list[tuple[int, int, Any]], list[int]], buckets: int
) -> None:
    seconds, episodes, spikes = made
    series, analysis = make_job(seconds, episodes=episodes, spikes=spikes)

    payload = job_picture(series, analysis, buckets=buckets).payload

    steps = {*payload["line"]["step"], *payload["spikes"]["step"]}
    drawn = dict(zip(payload["line"]["step"], payload["line"]["y"], strict=True))
    drawn |= dict(zip(payload["spikes"]["step"], payload["spikes"]["y"], strict=True))
    for first, last, _ in episodes:
        around = (first - 1, first, last, last + 1)
        assert {int(series.step[i]) for i in around if 0 <= i < len(series)} <= steps
        peak = first + int(np.argmax(seconds[first : last + 1]))
        assert drawn[int(series.step[peak])] == pytest.approx(seconds[peak], rel=1e-5)
    assert max(drawn.values()) == pytest.approx(seconds.max(), rel=1e-5)
    assert min(drawn.values()) == pytest.approx(seconds.min(), rel=1e-5)
    assert sum(payload["spikes"]["count"]) == len(spikes)
    if spikes:
        highest = max(seconds[i] for i in spikes)
        assert max(payload["spikes"]["y"]) == pytest.approx(highest, rel=1e-5)
    assert len(payload["episodes"]) == len(episodes)


def test_an_episode_is_shaded_from_before_its_first_to_after_its_last_record(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    series, analysis = slow_job

    (band,) = job_picture(series, analysis).payload["episodes"]

    assert band["x"] == [15005.0, 20005.0]
    assert band["time"] == pytest.approx(
        [series.end_s[1499:1501].mean(), series.end_s[1999:2001].mean()], rel=1e-6
    )
    assert band["label"].startswith("×1.40 · ")
    assert band["label"].endswith(" lost")


def test_a_million_records_become_a_few_thousand_numbers(make_job: Any) -> None:
    rng = np.random.default_rng(1)
    seconds = 0.5 * np.exp(0.02 * rng.standard_normal(1_000_000))
    seconds[700_000:700_040] *= 1.3  # 40 of a million: half a bucket wide
    spikes = rng.choice(1_000_000, 20_000, replace=False)
    seconds[spikes] *= 5
    series, analysis = make_job(
        seconds, episodes=[(700_000, 700_039, "fail_slow")], spikes=sorted(spikes.tolist())
    )

    picture = job_picture(series, analysis)

    assert picture.records == 1_000_000
    assert picture.drawn < 8_000
    assert len(json.dumps(picture.payload)) < 1_500_000
    steps = set(picture.payload["line"]["step"])
    assert {700_000, 700_001, 700_040, 700_041} <= steps
    assert sum(picture.payload["spikes"]["count"]) == 20_000


def test_runs_whose_steps_restart_are_laid_end_to_end_and_never_joined(make_job: Any) -> None:
    series, analysis = make_job(
        np.full(9, 1.0), runs=[0, 0, 0, 1, 1, 1, 2, 2, 2], steps=[1, 2, 3] * 3
    )

    payload = job_picture(series, analysis).payload

    assert payload["unrolled"]
    assert payload["line"]["x"] == [1, 2, 3, None, 4, 5, 6, None, 7, 8, 9]
    assert payload["line"]["step"] == [1, 2, 3, None, 1, 2, 3, None, 1, 2, 3]
    assert [mark["x"] for mark in payload["restarts"]] == [3.5, 6.5]
    assert [mark["note"] for mark in payload["restarts"]] == ["run 1", "run 2"]


def test_the_healthy_level_follows_the_workload(make_job: Any) -> None:
    seconds = np.r_[np.full(60, 1.0), np.full(30, 2.0), np.full(10, 3.0)]
    series, analysis = make_job(
        seconds, episodes=[(60, 99, "workload_change"), (90, 99, "fail_slow")]
    )

    healthy = job_picture(series, analysis).payload["healthy"]

    assert healthy["y"] == [1.0, 1.0, None, 2.0, 2.0, None, 1.0, 1.0]
    assert healthy["x"] == [0.5, 60.5, None, 60.5, 90.5, None, 90.5, 100.5]


def test_waiting_for_data_is_drawn_only_where_it_matters(make_job: Any) -> None:
    waits = np.full(50, 0.001)
    series, analysis = make_job(np.full(50, 1.0), data_s=waits)
    assert job_picture(series, analysis).payload["data"]["y"] == []

    waits[30:] = 0.4
    series, analysis = make_job(np.full(50, 1.0), data_s=waits)
    assert job_picture(series, analysis).payload["data"]["y"][-1] == 0.4


def test_the_first_view_shows_every_episode_though_spikes_stand_above_it(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    low, high = job_picture(*slow_job).payload["fit"]

    assert low < 0.5
    assert 1.4 * 0.571 < high < 3 * 0.571


def test_one_record_can_be_drawn(make_job: Any) -> None:
    payload = job_picture(*make_job([0.5])).payload

    assert payload["line"]["y"] == [0.5]
    assert payload["healthy"]["x"] == [0.5, 1.5]
