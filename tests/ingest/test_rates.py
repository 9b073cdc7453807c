"""Durations from totals, running means and rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.ingest.base import SeriesBuilder, undo_cumulative, undo_running_mean
from failslow.ingest.rates import RateRecords, work_by_clock
from failslow.records import StepSeries

times = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


@given(times, st.integers(1, 50))
def test_running_means_are_undone(truth: list[float], every: int) -> None:
    values = np.array(truth)
    count = every * np.arange(1, len(values) + 1)
    mean = np.cumsum(values * every) / count
    np.testing.assert_allclose(undo_running_mean(mean, count), values, rtol=1e-6)


def test_a_running_mean_that_starts_anew_is_taken_as_it_stands() -> None:
    undone = undo_running_mean(np.array([2.0, 3.0, 5.0, 4.0]), np.array([10, 20, 10, 20]))
    assert undone.tolist() == [2.0, 4.0, 5.0, 3.0]


@given(times, st.integers(1, 50))
def test_totals_are_undone(truth: list[float], every: int) -> None:
    values = np.array(truth)
    step = every * np.arange(1, len(values) + 1)
    iterations, duration_s = undo_cumulative(step, np.cumsum(values * every))
    if len(values) > 1:
        assert set(iterations) == {every}
        np.testing.assert_allclose(duration_s, values, rtol=1e-6)


def test_a_timer_set_back_counts_from_the_step_before() -> None:
    iterations, duration_s = undo_cumulative(np.array([9, 10, 11, 12]), np.array([90.0, 100, 1, 3]))
    assert iterations.tolist() == [1, 1, 1, 1]
    assert duration_s.tolist() == [90.0, 10.0, 1.0, 2.0]


def test_a_resumed_job_does_not_divide_its_first_time_by_its_step() -> None:
    iterations, duration_s = undo_cumulative(np.array([5010, 5020, 5030]), np.array([5.0, 10, 15]))
    assert iterations.tolist() == [10, 10, 10]
    assert duration_s.tolist() == [0.5, 0.5, 0.5]


def test_a_step_printed_again_has_no_time_and_one_that_goes_back_starts_anew() -> None:
    _, duration_s = undo_cumulative(np.array([1, 2, 2, 3, 1, 2]), np.array([1.0, 2, 2, 3, 4, 8]))
    np.testing.assert_array_equal(duration_s, [1.0, 1.0, np.nan, 1.0, 4.0, 4.0])


def test_no_totals_give_no_durations() -> None:
    iterations, duration_s = undo_cumulative(np.zeros(0, np.int64), np.zeros(0))
    assert len(iterations) == len(duration_s) == 0


def rates(
    rows: list[tuple[int, float, float]], stated: float, *, whole: bool = True, size: float = 1.0
) -> StepSeries:
    builder = SeriesBuilder("train.log", "test")
    records = RateRecords(builder, "sample", whole=whole)
    for step, rate, clock_s in rows:
        records.add(step=step, rate=rate, clock_s=clock_s, stated=stated, step_size=size)
    records.flush()
    return builder.finish()


NO_CLOCK = [(10, 128.0, np.nan), (20, 64.0, np.nan)]
CLOCKED = [(10 * i, 128.0 + i / 10, 1000.0 + 5 * i) for i in range(1, 6)]


def test_stated_work_divided_by_the_rate_is_the_time() -> None:
    series = rates(NO_CLOCK, 64.0)
    assert series.duration_s.tolist() == [0.5, 1.0]
    assert series.work.tolist() == [64.0, 64.0]


def test_the_clock_tells_the_work_that_is_not_stated() -> None:
    series = rates(CLOCKED, np.nan)
    assert series.work.tolist() == [64.0] * 5
    assert series.duration_s[2] == pytest.approx(64 / 128.3)
    assert series.warnings == ()


def test_the_clock_overrules_work_stated_in_another_unit() -> None:
    assert rates(CLOCKED, 8.0).work.tolist() == [64.0] * 5
    assert rates(CLOCKED, 64.0 * 1.1).work.tolist() == [64.0 * 1.1] * 5  # overheads, not units


def test_without_work_and_clock_times_are_per_unit_and_it_says_so() -> None:
    series = rates(NO_CLOCK, np.nan)
    assert series.duration_s.tolist() == [1 / 128, 1 / 64]
    assert np.isnan(series.work).all()
    assert "times are seconds per sample" in series.warnings[0]


def test_a_rate_of_too_few_digits_gives_way_to_the_clock() -> None:
    rows = [(i, 4.0, 60.5 * i) for i in range(1, 7)]
    series = rates(rows, 242.0)
    assert series.duration_s.tolist() == [60.5] * 6
    assert "too few digits" in series.warnings[0]


def test_steps_that_count_samples_are_turned_into_iterations() -> None:
    rows = [(64 * i, 128.0 + i / 10, 1000 + 0.5 * i) for i in range(1, 6)]
    series = rates(rows, 64.0, size=64.0)
    assert series.iterations.tolist() == [1] * 5
    assert series.step.tolist() == [64, 128, 192, 256, 320]
    assert series.duration_s[0] == pytest.approx(64 / 128.1)


@pytest.mark.parametrize("bad", [0.0, -3.0, np.nan, np.inf])
def test_an_unusable_rate_costs_its_record(bad: float) -> None:
    rows = [*CLOCKED[:2], (30, bad, 1015.0), *CLOCKED[3:]]
    assert rates(rows, 64.0).step.tolist() == [10, 20, 40, 50]


def test_work_by_clock_ignores_pauses_and_needs_a_clock() -> None:
    rate, step = np.full(6, 128.0), np.arange(10.0, 70.0, 10.0)
    clock_s = np.array([0.0, 5, 10, 900, 905, 910])
    assert work_by_clock(rate, step, clock_s) == 64.0
    assert np.isnan(work_by_clock(rate, step, np.full(6, np.nan)))
