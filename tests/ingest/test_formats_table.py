"""CSV and JSON lines: obvious names, named columns, units."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cases import SAMPLES

from failslow.errors import InputError, UnknownFormatError
from failslow.ingest import Source, read_log
from failslow.ingest.formats.table import CsvReader, JsonLinesReader, TableColumns
from failslow.records import StepSeries


def read(text: str, columns: TableColumns | None = None, *, lines: bool = False) -> StepSeries:
    reader = None if columns is None else (JsonLinesReader if lines else CsvReader)(columns)
    return read_log(Source("runs.csv", data=text.encode()), format=reader)


@pytest.mark.parametrize("name", ["table.csv", "table.tsv", "table.jsonl"])
def test_obvious_names_are_found(name: str) -> None:
    series = read_log(SAMPLES / name)
    assert series.step.tolist() == [10, 20, 30, 40, 50]
    np.testing.assert_allclose(series.duration_s, [0.5713, 0.57225, 0.5705, 0.80175, 0.57075])
    assert set(series.iterations) == {10}
    assert set(series.work) == {524_288.0}
    assert series.start_time == pytest.approx(1_741_082_400.0)


def test_data_loading_time_is_kept() -> None:
    assert set(read_log(SAMPLES / "table.csv").data_s) == {0.0125}


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("step_time", 2.0),
        ("Step Time (ms)", 0.002),
        ("iteration_time_s", 2.0),
        ("iter_time_ms", 0.002),
        ("train/step_time_us", 0.000002),
        ("perf.batch_time", 2.0),
        ("ms_per_step", 0.002),
        ("seconds_per_iteration", 2.0),
        ("time_per_step_seconds", 2.0),
        ("train_step_timing in s", 2.0),
        ("duration_ms", 0.002),
        ("dt_ms", 0.002),
    ],
)
def test_time_columns_and_their_units(name: str, seconds: float) -> None:
    series = read_log(Source("x", data=f"step,{name}\n1,2\n2,2.0\n".encode()), format="csv")
    np.testing.assert_allclose(series.duration_s, seconds)


@pytest.mark.parametrize("name", ["time", "loss", "lr", "runtime", "wall_time_total", "timeout"])
def test_other_columns_are_not_taken_for_a_time(name: str) -> None:
    with pytest.raises(UnknownFormatError):
        read(f"step,{name}\n1,2\n2,2\n")


def test_named_columns_and_unit() -> None:
    text = "n;t;when;toks;wait\n5;200;100.0;64;20\n10;400;102.0;64;30\n"
    columns = TableColumns(time="t", step="n", work="toks", timestamp="when", time_unit="ms")
    series = read(text, columns)
    assert series.step.tolist() == [5, 10]
    assert series.duration_s.tolist() == [0.2, 0.4]
    assert series.work.tolist() == [64.0, 64.0]
    assert series.end_s.tolist() == [1.0, 3.0]
    assert np.isnan(series.data_s).all()
    assert read(text, TableColumns(time="t", data="wait")).data_s.tolist() == [20.0, 30.0]


def test_a_table_without_steps_counts_its_rows() -> None:
    assert read("t\n1\n2\n3\n", TableColumns(time="t")).step.tolist() == [1, 2, 3]


def test_names_match_whatever_their_case_and_punctuation() -> None:
    assert len(read("Step,My Time\n1,2\n2,3\n", TableColumns(time="my_time"))) == 2


def test_timestamps_alone_give_times_by_difference() -> None:
    text = "step,when\n10,2025-03-04 10:00:00\n20,2025-03-04 10:00:05\n30,2025-03-04 10:00:11\n"
    series = read(text, TableColumns(timestamp="when"))
    assert series.step.tolist() == [20, 30]
    np.testing.assert_allclose(series.duration_s, [0.5, 0.6])
    assert series.start_time == 1_741_082_400.0


@pytest.mark.parametrize(("factor", "unit"), [(1, "s"), (1_000, "ms"), (1_000_000, "us")])
def test_epoch_timestamps_of_any_unit(factor: int, unit: str) -> None:
    rows = "".join(f"{i},1.0,{(1_741_082_400 + i) * factor}\n" for i in range(1, 4))
    assert read("step,step_time,timestamp\n" + rows).start_time == 1_741_082_400.0


def test_a_missing_column_is_told_with_the_ones_there_are() -> None:
    with pytest.raises(InputError) as caught:
        read("step,loss,elapsed\n1,2,3\n", TableColumns(time="t"))
    assert str(caught.value) == (
        "runs.csv: no column 't' in the table; its first line has: step, loss, elapsed; "
        "name the right one with --time-column NAME"
    )
    with pytest.raises(InputError, match="no column 'n' in the table; its first line has: t, x"):
        read('{"t": 1, "x": 2}\n', TableColumns(time="t", step="n"), lines=True)


def test_empty_times_are_validation_rows_and_odd_ones_are_counted() -> None:
    series = read("step,step_time\n1,0.5\n2,\n3,oops\n4,nan\n5,0.5\nx,0.5\n")
    assert series.step.tolist() == [1, 5]
    assert series.warnings == (
        "a row whose step is no number was skipped",
        "2 records whose time is NaN, infinite, zero or negative were dropped",
    )


def test_quoted_cells_and_comment_headers() -> None:
    text = '"step","note, free","step_time"\n1,"a, b",0.5\n2,"c",0.75\n'
    assert read(text).duration_s.tolist() == [0.5, 0.75]
    assert read("# step, step_time\n1, 0.5\n2, 0.75\n").duration_s.tolist() == [0.5, 0.75]


def test_a_header_printed_again_starts_a_run() -> None:
    part = "step,step_time\n1,0.5\n2,0.5\n"
    series = read(part + part.replace("0.5", "0.7"))
    assert series.run.tolist() == [0, 0, 1, 1]
    assert series.runs[1].note == "the header is printed again"


def test_a_row_cut_short_is_left_out() -> None:
    assert read("step,step_time,loss\n1,0.5,3\n2,0.51,3\n3,0.5").step.tolist() == [1, 2]


def test_a_quoted_cell_cut_short_is_left_out() -> None:
    whole = '"step","step time (ms)"\n"1","501.5"\n"2","499.5"'
    for cut in range(whole.rindex('"499') + 1, len(whole)):
        assert read(whole[:cut]).step.tolist() == [1]


def test_nested_fields_of_json_lines() -> None:
    rows = [{"step": i, "perf": {"iter_time_ms": 250.0 + i}} for i in range(1, 4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    np.testing.assert_allclose(read(text).duration_s, [0.251, 0.252, 0.253])
    columns = TableColumns(time="perf.iter_time_ms")
    np.testing.assert_allclose(read(text, columns, lines=True).duration_s, [0.251, 0.252, 0.253])
