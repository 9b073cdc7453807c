"""Trace and layout files: every format gives the same trace, and bad ones one clear line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.simulate.made_traces import Job, Row, make_trace, rows_of, write_csv, write_json_lines

from failslow.errors import InputError, MissingDependencyError
from failslow.ingest.traces import read_layout, read_trace
from failslow.records import OperationTrace, ParallelLayout
from failslow.simulate.schedule import Computation

JOB = Job(schedule="interleaved", dp=2, pp=2, vpp=2, micro_batches=2, steps=2)


def own(step: int, dp: int, c: Computation) -> float:
    return 0.1 * (1 + c.chunk) + 0.01 * c.micro_batch


@pytest.fixture(scope="module")
def trace() -> OperationTrace:
    """A small trace made for the purpose."""
    return make_trace(JOB, own)[0]


@pytest.fixture(scope="module")
def rows(trace: OperationTrace) -> list[Row]:
    """Its rows."""
    return rows_of(trace)


def write_parquet(path: Path, rows: list[Row]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    table = pa.table(
        {
            **{name: pa.array(values) for name, values in columns.items()},
            "optype": pa.array(columns["optype"]).dictionary_encode(),
            "dp_rank": pa.array(columns["dp_rank"], pa.int8()),
        }
    )
    parquet.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("trace.parquet", write_parquet),
        ("trace.csv", write_csv),
        ("trace.csv.gz", write_csv),
        ("trace.jsonl", write_json_lines),
    ],
)
def test_every_format_gives_the_same_trace(
    tmp_path: Path,
    trace: OperationTrace,
    rows: list[Row],
    name: str,
    write: Callable[[Path, list[Row]], Path],
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")

    read = read_trace(write(tmp_path / name, rows))

    for column in ("step", "dp", "stage", "rank", "seq", "chunk", "microbatch", "global_chunk"):
        assert np.array_equal(getattr(read, column), getattr(trace, column)), column
    assert read.start_s == pytest.approx(trace.start_s)
    assert read.duration_s == pytest.approx(trace.duration_s)
    assert np.array_equal(np.array(read.kinds)[read.kind], np.array(trace.kinds)[trace.kind])
    assert read.layout == ParallelLayout(dp=2, pp=2, vpp=2)


def test_columns_that_can_be_worked_out_may_be_missing(
    tmp_path: Path, trace: OperationTrace, rows: list[Row]
) -> None:
    needed = ["step", "stage", "dp_rank", "optype", "duration", "start_ts", "mc", "mb_id"]

    read = read_trace(write_csv(tmp_path / "trace.csv", rows, needed))

    assert np.array_equal(read.seq, trace.seq)
    assert np.array_equal(read.global_chunk, trace.global_chunk)
    assert np.array_equal(read.rank, trace.rank)


def changed(rows: list[Row], **cells: float | str) -> list[Row]:
    """The rows, the third with other cells."""
    return [*rows[:2], {**rows[2], **cells}, *rows[3:]]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"duration": -0.5}, r"row 3: duration is -0\.5; it must not be negative"),
        ({"duration": "soon"}, r"row 3: duration is 'soon', not a number"),
        ({"start_ts": "nan"}, "row 3: start_ts is not finite"),
        ({"stage": 0.5}, r"row 3: stage is 0\.5, not a whole number"),
        ({"dp_rank": -1}, "row 3: dp_rank is -1"),
    ],
)
def test_impossible_values_are_refused_with_their_row(
    tmp_path: Path, rows: list[Row], cells: dict[str, float | str], message: str
) -> None:
    path = write_csv(tmp_path / "trace.csv", changed(rows, **cells))

    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_what_is_no_trace_is_refused(tmp_path: Path, rows: list[Row]) -> None:
    other = tmp_path / "other.csv"
    other.write_text("step,loss\n1,2.5\n")
    with pytest.raises(InputError, match="lacks the columns dp_rank, stage, optype"):
        read_trace(other)
    empty = write_csv(tmp_path / "empty.csv", rows)
    empty.write_text(empty.read_text().splitlines()[0] + "\n")
    with pytest.raises(InputError, match="no operation in it"):
        read_trace(empty)
    with pytest.raises(InputError, match=r"known endings: \.parquet, \.csv"):
        read_trace(tmp_path / "trace.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "missing.csv")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(write_json_lines(tmp_path / "whole.jsonl", rows).read_text() + "{\n")
    with pytest.raises(InputError, match=f"line {len(rows) + 1} is not JSON"):
        read_trace(broken)
    fake = tmp_path / "fake.parquet"
    fake.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="cannot be read as parquet"):
        read_trace(fake)


def test_parquet_without_pyarrow_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'failslow\[traces\]'"):
        read_trace(tmp_path / "trace.parquet")


def test_a_layout_that_does_not_fit_the_trace_is_refused(tmp_path: Path, rows: list[Row]) -> None:
    path = write_csv(tmp_path / "trace.csv", rows)

    with pytest.raises(InputError, match="stage goes up to 1, but the layout says pp_size: 1"):
        read_trace(path, ParallelLayout(dp=2, pp=1, vpp=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_size: 2\n", r"pp_size \(missing\)"),
        ("dp_size: 0\npp_size: 2\n", r"dp_size \(0\): Input should be greater"),
        ("- 1\n", "not a layout"),
        ("dp_size: [\n", "not YAML"),
    ],
)
def test_bad_layout_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text(text)

    with pytest.raises(InputError, match=message):
        read_layout(path)


def test_a_layout_file_may_hold_more_than_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text("trial_name: ST\ndp_size: 2\npp_size: 4\nworld_size: 8\n")

    assert read_layout(path) == ParallelLayout(dp=2, pp=4, name="ST")
