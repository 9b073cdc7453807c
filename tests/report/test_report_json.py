"""The JSON documents: their keys are a promise, and NaN never gets out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np

from failslow.records import JobAnalysis, StepSeries
from failslow.report import analysis_document, dumps, study_document, summarize

JOB_KEYS = [
    "source",
    "format",
    "iterations",
    "first_step",
    "last_step",
    "start_time",
    "healthy_iteration_s",
    "wall_s",
    "lost_s",
    "jct_increase_pct",
    "episodes",
    "spikes",
    "spike_lost_s",
    "warnings",
]
EPISODE_KEYS = [
    "start_step",
    "end_step",
    "start_s",
    "end_s",
    "duration_s",
    "iteration_s",
    "baseline_s",
    "slowdown",
    "peak_slowdown",
    "lost_s",
    "confidence",
    "kind",
    "culprits",
    "levels",
    "note",
]


def test_an_analysis_has_exactly_the_keys_of_its_schema(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    document = analysis_document([slow_job[1]])

    assert list(document) == ["schema", "jobs"]
    assert document["schema"] == "failslow.analysis/1"
    (job,) = document["jobs"]
    assert list(job) == JOB_KEYS
    (episode,) = job["episodes"]
    assert list(episode) == EPISODE_KEYS
    assert episode["culprits"] == [{"rank": 3, "what": "compute", "slowdown": 2.3}]
    assert episode["levels"] == [{"start_step": 15010, "slowdown": episode["slowdown"]}]
    assert (job["spikes"], job["warnings"]) == (3, ["3 lines without a time"])


def test_an_ongoing_episode_and_an_unknown_clock_are_null(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    analysis = slow_job[1]
    ongoing = replace(analysis.episodes[0], end_step=None, end_s=None)
    document = analysis_document([replace(analysis, start_time=None, episodes=(ongoing,))])

    job = json.loads(dumps(document))["jobs"][0]

    assert job["start_time"] is None
    assert job["episodes"][0]["end_step"] is None
    assert job["episodes"][0]["end_s"] is None


def test_numbers_that_are_not_finite_become_null_and_numpy_numbers_plain() -> None:
    document = {"a": [math.nan, np.float64("inf"), np.float32(0.5)], "b": (np.int64(7), True)}

    assert json.loads(dumps(document)) == {"a": [None, None, 0.5], "b": [7, True]}


def test_numbers_lose_the_noise_of_binary_fractions_and_keep_milliseconds() -> None:
    document = {"lost_s": 130.65600000000003, "start_time": 1745735250.942}

    assert json.loads(dumps(document)) == {"lost_s": 130.656, "start_time": 1745735250.942}


def test_the_text_is_ascii_even_for_names_that_are_not(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    text = dumps(analysis_document([replace(slow_job[1], source="träin\udcff.log")]))

    assert text.isascii()
    assert json.loads(text)["jobs"][0]["source"] == "träin\udcff.log"


def test_a_study_has_exactly_the_keys_its_docstring_names(
    slow_job: tuple[StepSeries, JobAnalysis],
) -> None:
    document = study_document(summarize([slow_job[1]], unreadable=[("x.log", "x.log: empty")]))

    assert document["schema"] == "failslow.study/1"
    doc = study_document.__doc__ or ""
    for key in (*document, *document["per_job"][0]):
        assert key == "schema" or key in doc, key
    assert document["unreadable"] == [{"source": "x.log", "error": "x.log: empty"}]
    assert document["per_job"][0]["hit"] is True


def test_a_study_of_nothing_has_no_means() -> None:
    document = json.loads(dumps(study_document(summarize([]))))

    assert document["jobs"] == 0
    assert document["hit_pct"] is None
    assert document["duration_s"] == {"mean": None, "median": None, "longest": None}
