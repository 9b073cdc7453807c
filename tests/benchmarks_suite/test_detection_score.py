"""Scores of hand-made claims on hand-made truth."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.detection.model import Noise
from benchmarks.detection.score import DetectedEpisode, score_job, tally, wilson
from benchmarks.detection.suite import LabelledJob, TrueEpisode
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from failslow.records import StepSeries


def _truth(
    first: int, last: int, *, slowdown: float = 1.5, scored: bool = True, ongoing: bool = False
) -> TrueEpisode:
    return TrueEpisode(
        first_index=first,
        last_index=last,
        onset=(first - 1, first),
        relief=None if ongoing else (last, last + 1),
        slowdown=slowdown,
        levels=((first, slowdown),),
        z=50.0,
        scored=scored,
    )


def _job(*episodes: TrueEpisode, decidable: bool = True, interval: int = 10) -> LabelledJob:
    n = 200
    series = StepSeries(
        source="hand",
        format="suite",
        step=np.arange(n, dtype=np.int64),
        duration_s=np.ones(n),
        end_s=np.arange(1.0, n + 1),
        iterations=np.full(n, interval, dtype=np.int64),
        work=np.full(n, np.nan),
        data_s=np.full(n, np.nan),
        run=np.zeros(n, dtype=np.int64),
    )
    return LabelledJob(
        index=0,
        seed=0,
        kind="short_compute",
        series=series,
        episodes=episodes,
        decidable=decidable,
        noise=Noise(shape="white", cv=0.01),
        iteration_s=1.0,
        interval=interval,
        factor=np.ones(n),
        features=(),
    )


def _found(first: int, last: int, slowdown: float = 1.5) -> DetectedEpisode:
    return DetectedEpisode(first_index=first, last_index=last, slowdown=slowdown)


def test_exact_claim_is_right_without_errors() -> None:
    score = score_job(_job(_truth(50, 99)), [_found(50, 99)])
    assert score.outcome == "right"
    (match,) = score.matches
    assert (match.onset_error, match.relief_error, match.pieces) == (0, 0, 1)
    assert match.iou == 1.0
    assert match.slowdown_error == 0.0


def test_errors_are_distances_to_the_nearest_right_answer() -> None:
    job = _job(_truth(50, 99))
    late = score_job(job, [_found(53, 104, slowdown=1.65)]).matches[0]
    assert (late.onset_error, late.relief_error) == (3, 4)
    assert late.slowdown_error == pytest.approx(0.1)
    early = score_job(job, [_found(47, 95)]).matches[0]
    assert (early.onset_error, early.relief_error) == (2, 4)
    assert score_job(job, [_found(49, 100)]).matches[0].onset_error == 0


def test_an_alarm_on_a_clean_job_is_a_false_alarm() -> None:
    score = score_job(_job(), [_found(10, 20)])
    assert (score.outcome, score.alarms, score.strays) == ("false_alarm", 1, 1)


def test_a_workload_change_is_no_alarm_but_is_counted() -> None:
    change = DetectedEpisode(first_index=10, last_index=20, slowdown=1.5, kind="workload_change")
    score = score_job(_job(), [change])
    assert (score.outcome, score.workload_changes) == ("right", 1)


def test_a_workload_change_does_not_find_a_fail_slow() -> None:
    change = DetectedEpisode(first_index=50, last_index=99, slowdown=1.5, kind="workload_change")
    assert score_job(_job(_truth(50, 99)), [change]).outcome == "missed"


def test_one_of_two_found_is_a_missed_job_with_half_the_recall() -> None:
    score = score_job(_job(_truth(50, 69), _truth(120, 139)), [_found(50, 69)])
    assert score.outcome == "missed"
    assert tally([score]).recall.share == 0.5


def test_an_alarm_beside_the_truth_is_stray_and_the_truth_missed() -> None:
    score = score_job(_job(_truth(50, 69)), [_found(90, 99)])
    assert (score.outcome, score.strays) == ("missed", 1)
    total = tally([score])
    assert total.precision.share == 0.0
    assert total.stray_jobs.share == 1.0


def test_unscored_truth_makes_alarms_on_it_neither_right_nor_wrong() -> None:
    job = _job(_truth(50, 69, scored=False))
    for found in ([], [_found(50, 69)], [_found(150, 160)]):
        score = score_job(job, found)
        assert score.outcome == "unscored"
        assert (score.alarms, score.strays) == (0, 0)
    mixed = score_job(
        _job(_truth(50, 69, scored=False), _truth(100, 120)), [_found(50, 69), _found(100, 120)]
    )
    assert (mixed.outcome, mixed.alarms, mixed.strays) == ("right", 1, 0)


def test_a_clean_job_too_near_the_threshold_is_unscored() -> None:
    assert score_job(_job(decidable=False), [_found(10, 20)]).outcome == "unscored"


def test_pieces_of_one_episode_count_and_share_its_edges() -> None:
    (match,) = score_job(_job(_truth(50, 99)), [_found(50, 59), _found(80, 99)]).matches
    assert (match.pieces, match.onset_error, match.relief_error) == (2, 0, 0)
    assert match.iou == pytest.approx(0.6)


def test_an_ongoing_episode_has_no_relief_error() -> None:
    (match,) = score_job(_job(_truth(150, 199, ongoing=True)), [_found(150, 180)]).matches
    assert match.relief_error is None
    assert tally([]).relief_median is None


def test_delay_counts_iterations_up_to_and_with_the_record_that_told() -> None:
    told = DetectedEpisode(first_index=50, last_index=99, slowdown=1.5, suspected_index=54)
    (match,) = score_job(_job(_truth(50, 99), interval=10), [told]).matches
    assert match.delay_iterations == 50


def test_a_suspicion_before_the_onset_is_no_delay() -> None:
    told = DetectedEpisode(first_index=20, last_index=99, slowdown=1.5, suspected_index=30)
    assert score_job(_job(_truth(50, 99)), [told]).matches[0].delay_iterations is None


def test_tally_adds_up_rates_over_their_own_jobs() -> None:
    scores = [
        score_job(_job(), []),
        score_job(_job(), [_found(1, 2)]),
        score_job(_job(_truth(50, 99)), [_found(52, 99)]),
        score_job(_job(_truth(50, 99)), []),
        score_job(_job(_truth(50, 99, scored=False)), []),
    ]
    total = tally(scores)
    assert (total.fpr.hits, total.fpr.of) == (1, 2)
    assert (total.fnr.hits, total.fnr.of) == (1, 2)
    assert (total.precision.hits, total.precision.of) == (1, 2)
    assert (total.jobs, total.unscored, total.onset_median) == (5, 1, 2.0)


def test_rates_of_nothing_are_unknown_not_zero() -> None:
    total = tally([])
    assert total.fpr.share is None
    assert total.fpr.interval == (0.0, 1.0)


@given(of=st.integers(1, 2000), data=st.data())
def test_wilson_interval_is_that_of_scipy(of: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, of))
    expected = binomtest(hits, of).proportion_ci(0.95, method="wilson")
    assert wilson(hits, of) == pytest.approx((expected.low, expected.high), abs=1e-6)
