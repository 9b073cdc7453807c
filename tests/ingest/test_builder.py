"""SeriesBuilder: the mending every reader relies on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.errors import InputError
from failslow.ingest.base import RunHeader, SeriesBuilder
from failslow.records import Run, StepSeries

EPOCH_S = 1_741_082_400.0


def series(*records: Mapping[str, Any]) -> StepSeries:
    builder = SeriesBuilder("train.log", "test")
    for record in records:
        builder.add(**{"duration_s": 1.0, **record})
    return builder.finish()


def steps(*numbers: int, duration_s: float = 1.0) -> StepSeries:
    return series(*({"step": number, "duration_s": duration_s} for number in numbers))


def test_nothing_added_is_an_error_of_one_line() -> None:
    with pytest.raises(InputError, match=r"^train\.log: no timing record of format test in it;"):
        SeriesBuilder("train.log", "test").finish()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e12])
def test_unusable_times_are_dropped_with_their_number(bad: float) -> None:
    result = series({"step": 1}, {"step": 2, "duration_s": bad}, {"step": 3})
    assert result.step.tolist() == [1, 3]
    assert result.iterations.tolist() == [1, 1]  # the lost one stands for its own
    assert result.warnings == (
        "1 record whose time is NaN, infinite, zero or negative was dropped",
    )


def test_only_unusable_times_are_an_error() -> None:
    with pytest.raises(InputError, match="none of its 2 test timing records has a usable time"):
        series({"step": 1, "duration_s": 0.0}, {"step": 2, "duration_s": math.nan})


def test_iterations_are_the_step_distances_and_the_first_takes_the_usual_one() -> None:
    assert steps(100, 110, 120, 130, 135, 145).iterations.tolist() == [10, 10, 10, 10, 5, 10]


def test_first_record_covers_no_more_iterations_than_its_step() -> None:
    assert steps(1, 10, 20, 30).iterations.tolist() == [1, 9, 10, 10]
    assert steps(0, 10, 20, 30).iterations.tolist() == [1, 10, 10, 10]


def test_given_iterations_are_kept() -> None:
    result = series({"step": 10, "iterations": 4}, {"step": 20}, {"step": 30, "iterations": 3})
    assert result.iterations.tolist() == [4, 10, 3]


def test_a_lone_record_is_one_iteration() -> None:
    assert steps(5000).iterations.tolist() == [1]


def test_a_jump_far_ahead_counts_as_the_usual_distance() -> None:
    result = steps(10, 20, 30, 5000, 5010)
    assert result.iterations.tolist() == [10, 10, 10, 10, 10]
    assert result.warnings == (
        "step numbers jump ahead once (first from 30 to 5000): counted as the usual 10",
    )


def test_step_numbers_that_go_back_start_a_run_and_rerun_steps_stay() -> None:
    result = steps(10, 20, 30, 40, 20, 30, 40, 50)
    assert result.step.tolist() == [10, 20, 30, 40, 20, 30, 40, 50]
    assert result.run.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert result.runs == (Run(), Run(note="step numbers restart at 20"))
    assert result.iterations.tolist() == [10] * 8


def test_each_run_has_its_own_usual_distance() -> None:
    result = steps(100, 200, 300, 10, 20, 30, 5)
    assert result.iterations.tolist() == [100, 100, 100, 10, 10, 10, 5]


def test_a_header_starts_a_run_even_where_steps_go_on() -> None:
    builder = SeriesBuilder("train.log", "test")
    builder.new_run("before the first record: ignored")
    for step in (1, 2, 3):
        builder.add(step=step, duration_s=1.0)
    builder.new_run("batch 8 -> 16", config_changed=True)
    builder.new_run("an empty run: ignored")
    for step in (4, 5):
        builder.add(step=step, duration_s=2.0)
    result = builder.finish()
    assert result.run.tolist() == [0, 0, 0, 1, 1]
    assert result.runs == (Run(), Run(note="batch 8 -> 16", config_changed=True))


def test_runs_without_a_usable_record_disappear() -> None:
    result = series(
        {"step": 1}, {"step": 2}, {"step": 1, "duration_s": math.nan}, {"step": 0}, {"step": 1}
    )
    assert result.run.tolist() == [0, 0, 1, 1]
    assert len(result.runs) == 2


def test_copies_with_a_clock_are_dropped_wherever_they_are() -> None:
    rows = [{"step": step, "clock_s": EPOCH_S + step} for step in range(1, 20)]
    result = series(*rows, *rows)
    assert result.step.tolist() == list(range(1, 20))
    assert result.warnings == ("19 records printed twice: the copies were dropped",)


def test_copies_without_a_clock_are_dropped_only_side_by_side() -> None:
    assert len(steps(1, 1, 2, 2, 3, 3)) == 3
    assert len(steps(*range(1, 20), *range(1, 20))) == 38  # a restarted job


def test_of_ranks_that_print_the_same_steps_the_fullest_is_kept() -> None:
    rows = [
        {"step": step, "duration_s": 1.0 + rank, "writer": f"{rank}"}
        for step in range(1, 9)
        for rank in range(3)
        if (rank, step) != (0, 5)
    ]
    result = series(*rows)
    assert result.step.tolist() == list(range(1, 9))
    assert set(result.duration_s) == {2.0}
    assert result.warnings == (
        "3 writers print the same steps: kept writer 1 (8 records), left out 15 records of the "
        "others",
    )


def test_ranks_that_print_in_turn_are_joined_in_step_order() -> None:
    order = [(2, "b"), (1, "a"), (3, "a"), (4, "b"), (6, "b"), (5, "a")]
    result = series(*({"step": step, "writer": writer} for step, writer in order))
    assert result.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert result.warnings == ()


def test_a_restart_that_another_rank_logs_is_a_run_of_the_same_job() -> None:
    rows = [{"step": step, "writer": "55"} for step in range(1, 31)]
    rows += [{"step": step, "writer": "63"} for step in range(21, 51)]
    result = series(*rows)
    assert len(result) == 60
    assert result.runs[1].note == "step numbers restart at 21"


def test_ranks_without_a_label_give_one_record_a_step() -> None:
    order = [1, 1, 1, 2, 2, 3, 2, 3, 3, 4, 4, 5, 4, 5, 5, 6, 6, 6]  # slightly out of order
    result = series(*({"step": step, "duration_s": 1 + i / 100} for i, step in enumerate(order)))
    assert result.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert result.duration_s[0] == 1.0
    assert "several lines for one step (12 records)" in result.warnings[0]


@pytest.mark.parametrize("back", [2, 3, 4])
def test_a_restart_a_few_steps_back_is_not_taken_for_ranks(back: int) -> None:
    assert len(steps(*range(1, 21), *range(21 - back, 41), duration_s=1.5)) == 40 + back


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_lines_out_of_order_are_sorted_by_their_clock(seed: int | None) -> None:
    rows = [{"step": i, "duration_s": 1 + i / 100, "clock_s": EPOCH_S + i} for i in range(1, 60)]
    mixed = rows[::-1]  # as a log service exports them
    if seed is not None:
        np.random.default_rng(seed).shuffle(mixed)
    ordered, result = series(*rows), series(*mixed)
    assert result.step.tolist() == ordered.step.tolist()
    assert result.end_s.tolist() == ordered.end_s.tolist()
    assert "sorted by their clock" in result.warnings[0]
    assert len(result.warnings) == 1


def test_a_log_from_the_last_to_the_first_line_needs_no_clock() -> None:
    result = steps(*range(600, 0, -10))
    assert result.step.tolist() == list(range(10, 610, 10))
    assert "read from the last to the first" in result.warnings[0]


def test_ranks_without_a_label_that_come_late_are_put_in_order() -> None:
    order = [step for i in range(1, 40) for step in ((i, i - 2) if i > 2 else (i,))]
    result = series(*({"step": step} for step in [*order, 38, 39]))
    assert result.step.tolist() == list(range(1, 40))
    assert "sorted by their step" in result.warnings[0]


def test_steps_that_count_anew_in_short_epochs_or_after_crashes_stay_in_order() -> None:
    epochs = [1, 2, 3] * 20
    assert steps(*epochs).step.tolist() == epochs
    crashes = [step for at in range(1, 60, 2) for step in (at, at + 1, at + 2, at + 3)]
    result = series(*({"step": s, "clock_s": EPOCH_S + i} for i, s in enumerate(crashes)))
    assert result.step.tolist() == crashes


def test_a_clock_that_often_runs_back_is_not_used() -> None:
    result = series(*({"step": i, "clock_s": 10.0 * i - 25 * (i % 2)} for i in range(1, 30)))
    assert not result.clocked
    assert result.end_s.tolist() == list(range(1, 30))
    assert result.warnings == ("the clock runs back 14 times: the clock was not used",)


def test_time_without_a_clock_is_the_sum_of_durations() -> None:
    result = steps(10, 20, 30, duration_s=0.5)
    assert result.end_s.tolist() == [5.0, 10.0, 15.0]
    assert not result.clocked
    assert result.start_time is None


def test_time_with_a_clock_counts_from_the_start_of_the_first_record() -> None:
    rows = [{"step": 10 * i, "clock_s": EPOCH_S + 10.0 * i} for i in (1, 2, 3)]
    result = series(*rows)
    assert result.end_s.tolist() == [10.0, 20.0, 30.0]
    assert result.clocked
    assert result.start_time == EPOCH_S


def test_a_clock_that_only_counts_gives_no_start_time() -> None:
    result = series(*({"step": i, "clock_s": 100.0 + i} for i in (1, 2, 3)))
    assert result.end_s.tolist() == [1.0, 2.0, 3.0]
    assert result.clocked
    assert result.start_time is None


def test_pauses_stay_in_time_and_long_ones_are_told() -> None:
    clocks = [1.0, 2.0, 302.0, 303.0, 1003.0]
    result = series(*({"step": i, "clock_s": c} for i, c in enumerate(clocks, start=1)))
    assert result.end_s.tolist() == clocks
    assert result.warnings == (
        "the log pauses 2 times, 998 s in all; the longest pause is 699 s after step 4",
    )


def test_a_short_pause_needs_no_word() -> None:
    assert series({"step": 1, "clock_s": 1.0}, {"step": 2, "clock_s": 31.0}).warnings == ()


def test_a_clock_that_runs_back_goes_on_by_summed_durations() -> None:
    clocks = [10.0, 11.0, 12.0, 3.0, 4.0, 5.5]
    result = series(*({"step": i, "clock_s": c} for i, c in enumerate(clocks, start=1)))
    assert result.end_s.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.5]
    assert result.warnings == (
        "the clock runs back by 9 s after step 3: time goes on from there by summed durations",
    )


def test_a_clock_that_trembles_never_goes_back() -> None:
    result = series(*({"step": i, "clock_s": c} for i, c in enumerate([1, 3, 2.5, 4], start=1)))
    assert result.end_s.tolist() == [1.0, 3.0, 3.0, 4.0]
    assert result.warnings == ()


def test_records_without_a_clock_among_others_end_their_own_time_later() -> None:
    clocks = [math.nan, 12.0, math.nan, 20.0]
    result = series(*({"step": i, "clock_s": c} for i, c in enumerate(clocks, start=1)))
    assert result.end_s.tolist() == [1.0, 2.0, 3.0, 10.0]


def test_a_clock_that_stands_still_is_not_used() -> None:
    result = series(*({"step": i, "clock_s": EPOCH_S} for i in range(1, 11)))
    assert result.end_s.tolist() == [float(i) for i in range(1, 11)]
    assert not result.clocked
    assert result.warnings == (
        "the log's clock advances 0 s while its iterations add up to 9 s: the clock was not used",
    )


def test_step_numbers_that_count_samples_are_put_right_by_the_clock() -> None:
    result = series(*({"step": 512 * i, "clock_s": EPOCH_S + i} for i in range(1, 9)))
    assert result.iterations.tolist() == [1] * 8
    assert result.end_s[-1] == 8.0
    assert "step numbers advance by 512 a record" in result.warnings[0]


def test_unknown_work_and_data_time_are_nan() -> None:
    result = series(
        {"step": 1, "work": 64.0, "data_s": 0.1},
        {"step": 2, "work": -1.0, "data_s": -0.1},
        {"step": 3, "work": math.inf, "data_s": 0.0},
    )
    np.testing.assert_array_equal(result.work, [64.0, np.nan, np.nan])
    np.testing.assert_array_equal(result.data_s, [0.1, np.nan, 0.0])


def test_equal_warnings_are_told_once_with_their_number() -> None:
    builder = SeriesBuilder("train.log", "test")
    builder.add(step=1, duration_s=1.0)
    builder.warn("odd line")
    builder.warn("odd line")
    builder.warn("other line")
    builder.add(step=10**30, duration_s=1.0)
    assert builder.finish().warnings == (
        "odd line (2 times)",
        "other line",
        "a record with an impossible step number was dropped",
    )


def test_a_changed_setting_in_a_header_is_a_run_of_another_configuration() -> None:
    builder, header = SeriesBuilder("train.log", "test"), RunHeader()
    for batch, step in (("8", 1), ("8", 5), ("16", 9)):
        header.note("batch", batch)
        for offset in range(3):
            header.open_run(builder)
            builder.add(step=step + offset, duration_s=1.0)
    assert header.get("batch") == 16.0
    assert math.isnan(header.get("unheard of"))
    assert builder.finish().runs == (
        Run(),
        Run(note="the program started anew"),
        Run(note="batch 8 -> 16", config_changed=True),
    )


number = st.one_of(
    st.floats(1e-3, 1e3), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e300, 1e-300])
)
record = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(0, 40), st.integers(-(2**63), 2**63))},
    optional={
        "duration_s": number,
        "iterations": st.integers(0, 5),
        "clock_s": st.one_of(number, st.floats(EPOCH_S, EPOCH_S + 100)),
        "work": number,
        "data_s": number,
        "writer": st.sampled_from(["", "0", "1"]),
    },
)


@given(st.lists(record, min_size=1, max_size=60))
def test_whatever_is_added_the_series_keeps_its_promises(rows: list[dict[str, Any]]) -> None:
    try:
        result = series(*rows)
    except InputError:
        return
    columns = ("step", "duration_s", "end_s", "iterations", "work", "data_s", "run")
    assert {len(getattr(result, name)) for name in columns} == {len(result)}
    assert len(result) >= 1
    assert np.isfinite(result.duration_s).all()
    assert (result.duration_s > 0).all()
    assert np.isfinite(result.end_s).all()
    assert (np.diff(result.end_s) >= 0).all()
    assert (result.iterations >= 1).all()
    assert ((np.isnan(result.work)) | (result.work > 0)).all()
    assert result.run[0] == 0
    assert set(np.diff(result.run)) <= {0, 1}
    assert result.run[-1] == len(result.runs) - 1
    assert (np.diff(result.step)[np.diff(result.run) == 0] >= 0).all()


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=50),
    st.integers(1, 20),
    st.integers(1, 1000),
)
def test_a_clean_log_is_left_as_it_is(times: list[float], distance: int, first: int) -> None:
    builder = SeriesBuilder("train.log", "test")
    clock_s = EPOCH_S
    for index, duration_s in enumerate(times):
        clock_s += duration_s * distance
        builder.add(
            step=(first + index) * distance, duration_s=duration_s, clock_s=clock_s, work=8.0
        )
    result = builder.finish()
    assert result.warnings == ()
    assert result.duration_s.tolist() == times
    assert set(result.iterations) == {distance}
    np.testing.assert_allclose(result.end_s, np.cumsum(times) * distance, rtol=1e-6)
