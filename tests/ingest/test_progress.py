"""What readers share about progress: bars, rounded elapsed time, steps over epochs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.ingest import SeriesBuilder
from failslow.ingest.progress import (
    Bar,
    ElapsedRecords,
    EpochSteps,
    clock_in,
    elapsed_seconds,
    json_object,
    number,
    parse_bar,
    whole,
)
from failslow.records import Run


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00", 0),
        ("02:03", 123),
        ("1:02:03", 3723),
        ("43:24:54", 156_294),
        ("1 day, 2:03:04", 93_784),
        ("12 days, 0:00:01", 1_036_801),
    ],
)
def test_elapsed_time_is_read_as_tqdm_and_timedelta_print_it(text: str, seconds: float) -> None:
    assert elapsed_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "?", "12", "1:2:3:4", "None", "1 day"])
def test_other_text_is_no_elapsed_time(text: str) -> None:
    assert math.isnan(elapsed_seconds(text))


def test_a_bar_is_read_with_its_label() -> None:
    line = "Epoch 0: :   1%|▏         | 57/4900 [10:58<15:32:28, v_num=q, loss=6.8]"
    assert parse_bar(line) == Bar("Epoch 0", 57, 4900, 658.0)
    assert parse_bar(" 12%|#2        | 120/1000 [02:03<15:01,  1.02s/it]") == Bar(
        "", 120, 1000, 123.0
    )


@pytest.mark.parametrize("line", ["loss 12% | 3/4", "57/4900 [10:58<15:32]", "5%|▏| 57/4900"])
def test_a_line_without_a_whole_bar_has_none(line: str) -> None:
    assert parse_bar(line) is None


def test_the_clock_of_a_line_stands_at_its_start() -> None:
    assert clock_in("2023-07-27 12:54:51 [INFO] iter") == 1_690_462_491.0
    assert clock_in("[2021/04/12 12:00:00 swin] INFO") == 1_618_228_800.0
    assert math.isnan(clock_in("x" * 130 + "2023-07-27 12:54:51"))


@pytest.mark.parametrize("text", ["", "none", "{", '{"a": 1', "{1}", '{"a":' * 100_000])
def test_broken_json_is_no_object(text: str) -> None:
    assert json_object(text) is None


def test_json_behind_a_prefix_is_found() -> None:
    assert json_object('DLLL {"step": 3}') == {"step": 3}


@pytest.mark.parametrize("value", [None, "x", [1], {}, "", 10**400])
def test_what_is_no_number_is_nan_and_no_step(value: object) -> None:
    assert math.isnan(number(value))
    assert whole(value) is None


def test_step_numbers_out_of_range_are_none() -> None:
    assert whole("inf") is None
    assert whole(1e30) is None
    assert whole("20") == whole(20.0) == 20


@given(
    epochs=st.integers(1, 6),
    length=st.integers(1, 300),
    interval=st.integers(1, 50),
    told=st.booleans(),
)
def test_steps_grow_over_epochs_counted_anew(
    epochs: int, length: int, interval: int, told: bool
) -> None:
    counter = EpochSteps()
    indices = list(range(interval, length + 1, interval))
    steps = [
        counter.step(epoch, index, length if told else 0)
        for epoch in range(1, epochs + 1)
        for index in indices
    ]
    assert (np.diff(steps) > 0).all()
    per_epoch = length if told else (indices[-1] if indices else 0)
    expected = [epoch * per_epoch + index for epoch in range(epochs) for index in indices]
    assert steps == expected


def test_steps_that_already_go_on_over_epochs_stay() -> None:
    counter = EpochSteps()
    assert [counter.step(*pair) for pair in ((1, 100), (1, 200), (2, 300))] == [100, 200, 300]


def test_a_restart_counts_epochs_anew() -> None:
    counter = EpochSteps()
    first = [counter.step(*pair) for pair in ((0, 500), (1, 100), (1, 500))]
    again = [counter.step(*pair) for pair in ((0, 100), (0, 140), (1, 20))]
    assert (first, again) == ([500, 600, 1000], [100, 140, 160])


def _elapsed_series(
    durations_s: list[float], every: int
) -> tuple[list[tuple[int, float, int]], float]:
    """Records from whole seconds printed every `every` steps, and the true time in all."""
    builder = SeriesBuilder("x", "test")
    records = ElapsedRecords(builder)
    records.point(0, 0)
    elapsed_s = 0.0
    for step, duration_s in enumerate(durations_s, start=1):
        elapsed_s += duration_s
        if step % every == 0:
            records.point(step, math.floor(elapsed_s))
    records.close()
    if not len(builder):
        return [], elapsed_s
    series = builder.finish()
    rows = zip(series.step, series.duration_s, series.iterations, strict=True)
    return [(int(a), float(b), int(c)) for a, b, c in rows], elapsed_s


@given(
    duration_s=st.floats(0.05, 30.0),
    steps=st.integers(1, 400),
    every=st.integers(1, 20),
)
def test_rounded_elapsed_time_is_never_off_by_more_than_5_percent(
    duration_s: float, steps: int, every: int
) -> None:
    rows, total_s = _elapsed_series([duration_s] * steps, every)
    if total_s < 21 + every * duration_s:
        return  # too short for one exact record
    assert rows
    for _, mean_s, _ in rows:
        assert duration_s == pytest.approx(mean_s, rel=0.0501)
    assert sum(covered for _, _, covered in rows) == rows[-1][0]


def test_a_slowdown_shows_in_rounded_elapsed_time() -> None:
    rows, _ = _elapsed_series([1.0] * 200 + [1.3] * 100, 10)
    assert rows[0] == (20, 1.0, 20)
    assert [mean_s for step, mean_s, _ in rows if step > 220] == pytest.approx([1.3] * 4, rel=0.05)


def test_a_pause_is_no_iteration_time() -> None:
    builder = SeriesBuilder("x", "test")
    records = ElapsedRecords(builder)
    records.point(0, 0)
    records.point(100, 50)
    records.pause(70)
    records.point(200, 170)
    series = builder.finish()
    assert series.duration_s.tolist() == [0.5, 0.5]
    assert series.end_s.tolist() == [50.0, 170.0]


def test_elapsed_time_set_back_is_a_restart() -> None:
    builder = SeriesBuilder("x", "test")
    records = ElapsedRecords(builder)
    for step, elapsed_s in ((0, 0), (50, 50), (100, 100), (120, 3), (170, 53)):
        records.point(step, elapsed_s)
    series = builder.finish()
    assert series.step.tolist() == [50, 100, 170]
    assert series.duration_s.tolist() == [1.0, 1.0, 1.0]
    assert series.runs == (Run(), Run(note="elapsed time restarts at step 120"))


def test_a_second_process_in_between_is_left_out() -> None:
    builder = SeriesBuilder("x", "test")
    records = ElapsedRecords(builder)
    for step in range(0, 100, 2):
        records.point(step, step)
        records.point(step - 1, step)
    assert set(builder.finish().duration_s.tolist()) == {1.0}


def test_a_short_log_gives_one_record_and_says_so() -> None:
    rows, _ = _elapsed_series([0.5] * 20, 5)
    assert rows == [(20, 0.5, 20)]
    builder = SeriesBuilder("x", "test")
    records = ElapsedRecords(builder)
    records.point(0, 0)
    records.point(10, 5)
    records.close()
    assert "spans only 5 s" in builder.finish().warnings[0]
