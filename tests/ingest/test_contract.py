"""What every reader owes, over every sample of `cases.py`."""

from __future__ import annotations

import gzip
import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import CASES, SAMPLES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from failslow.errors import InputError
from failslow.ingest import Source, read_log, readers
from failslow.records import StepSeries

BY_LINE = [case for case in CASES if case.by_line]
TEXT = [case for case in CASES if case.text]
TIMED = [case for case in CASES if case.time]
NOISE = (
    "/usr/lib/python3/site-packages/x.py:61: FutureWarning: The pynvml package is deprecated",
    "node-7:4211:4390 [3] NCCL INFO Channel 12/0 : 3[3] -> 4[0] [send] via NET/IB/0/GDRDMA",
    "+ export MASTER_PORT=29500",
    "step time, as described in the manual: see section 3, page 12",
    '{"level": "info", "time": "12:00:01", "message": "epoch 1 of 3"}',
    "Loading checkpoint shards:  67%|######7   | 2/3 [00:01<00:00,  1.61it/s]",
    "",
)


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest) -> None:
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    if isinstance(case, Case) and case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")


def data_of(case: Case) -> bytes:
    return (SAMPLES / case.sample).read_bytes()


def read(data: bytes) -> StepSeries:
    return read_log(Source("log", data=data))


def assert_same(series: StepSeries, expected: StepSeries) -> None:
    assert series.format == expected.format
    for column in ("step", "iterations", "run"):
        np.testing.assert_array_equal(getattr(series, column), getattr(expected, column))
    for column in ("duration_s", "end_s", "work", "data_s"):
        np.testing.assert_allclose(getattr(series, column), getattr(expected, column), rtol=1e-9)
    assert series.runs == expected.runs


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


def test_every_format_has_a_sample() -> None:
    assert {reader.name for reader in readers()} == {case.format for case in CASES}


def test_every_sample_has_a_case() -> None:
    assert {path.name for path in SAMPLES.iterdir()} == {case.sample for case in CASES}


def test_format_names_are_distinct_and_told_by_a_line() -> None:
    names = [reader.name for reader in readers()]
    assert len(names) == len(set(names))
    assert all(reader.summary for reader in readers())


@each(list(CASES))
def test_is_detected_and_read_whole(case: Case) -> None:
    series = read_log(SAMPLES / case.sample)
    assert series.format == case.format
    assert len(series) == case.records
    assert series.source.endswith(case.sample)
    assert np.isfinite(series.duration_s).all()
    assert (series.duration_s > 0).all()
    assert (np.diff(series.end_s) >= 0).all()
    assert (series.iterations >= 1).all()
    assert series.run[-1] == len(series.runs) - 1


@each(list(CASES))
def test_format_option_gives_the_same_as_detection(case: Case) -> None:
    path = SAMPLES / case.sample
    assert_same(read_log(path, format=case.format), read_log(path))


@each(list(CASES))
def test_gzip_reads_the_same(case: Case, tmp_path: Path) -> None:
    packed = tmp_path / f"{case.sample}.gz"
    packed.write_bytes(gzip.compress(data_of(case)))
    assert_same(read_log(packed), read_log(SAMPLES / case.sample))


@each(list(CASES))
def test_stdin_reads_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with (SAMPLES / case.sample).open("rb") as handle:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(handle))
        series = read_log("-")
    assert_same(series, read_log(SAMPLES / case.sample))
    assert series.source == "<stdin>"


@each(TEXT)
def test_windows_line_ends_read_the_same(case: Case) -> None:
    data = data_of(case)
    assert_same(read(data.replace(b"\n", b"\r\n")), read(data))


@each(TEXT)
def test_utf16_with_a_mark_reads_the_same(case: Case) -> None:
    data = data_of(case)
    assert_same(read(data.decode().encode("utf-16")), read(data))


@each(TEXT)
def test_colours_read_the_same(case: Case) -> None:
    data = data_of(case)
    coloured = b"".join(b"\x1b[1;32m" + line + b"\x1b[0m\n" for line in data.splitlines())
    assert_same(read(coloured), read(data))


@each(BY_LINE)
@pytest.mark.parametrize("prefix", [b" 9: [default3]:", b"[rank0]:", b"12: ", b"[1,0]<stdout>:"])
def test_launcher_prefixes_read_the_same(case: Case, prefix: bytes) -> None:
    data = data_of(case)
    prefixed = b"".join(prefix + line + b"\n" for line in data.splitlines())
    assert_same(read(prefixed), read(data))


@each(BY_LINE)
def test_one_of_several_labelled_ranks_is_kept(case: Case) -> None:
    data = data_of(case)
    both = b"".join(b"0: " + line + b"\n1: " + line + b"\n" for line in data.splitlines())
    series = read(both)
    assert_same(series, read(data))
    assert any("writers print the same steps" in warning for warning in series.warnings)


@each(BY_LINE)
def test_copied_lines_are_dropped(case: Case) -> None:
    data = data_of(case)
    assert_same(
        read(b"".join(line + b"\n" + line + b"\n" for line in data.splitlines())), read(data)
    )


@each(BY_LINE)
def test_noise_before_and_between_is_ignored(case: Case) -> None:
    data = data_of(case)
    noise = "\n".join(NOISE * 300).encode() + b"\n"
    lines = data.splitlines()
    if case.format != "csv":
        lines = [part for line in lines for part in (line, NOISE[1].encode())]
    assert_same(read(noise + b"\n".join(lines)), read(data))


@each(BY_LINE)
def test_invalid_utf8_is_ignored(case: Case) -> None:
    lines = data_of(case).splitlines()
    lines.insert(len(lines) // 2, b"\x80\xff\xfe\xc3( broken")
    assert_same(read(b"\n".join(lines)), read(data_of(case)))


@each(TIMED)
@pytest.mark.parametrize("bad", ["nan", "0.0", "-5"])
def test_an_unusable_time_costs_its_record(case: Case, bad: str) -> None:
    text = data_of(case).decode()
    assert text.count(case.time) == 1
    whole = read(text.encode())
    series = read(text.replace(case.time, case.time[0] + bad).encode())
    assert len(series) == case.records - 1
    assert set(zip(series.step, series.run, strict=True)) < set(
        zip(whole.step, whole.run, strict=True)
    )
    assert (series.duration_s > 0).all()


@each(TEXT)
def test_a_last_line_cut_off_anywhere_costs_at_most_its_record(case: Case) -> None:
    data = data_of(case).rstrip()
    whole = read(data)
    start = data.rfind(b"\n") + 1
    for end in range(start, len(data), 7):
        try:
            series = read(data[:end])
        except InputError:
            assert not case.by_line
            continue
        if case.by_line:
            assert len(whole) - 1 <= len(series) <= len(whole)
        np.testing.assert_allclose(series.duration_s, whole.duration_s[: len(series)])


@each(list(CASES))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_never_a_crash(case: Case, data: st.DataObject) -> None:
    content = bytearray(data_of(case))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 40)))
        content[start:end] = data.draw(
            st.one_of(
                st.binary(max_size=20),
                st.sampled_from(
                    [b"9" * 25, b"-", b"1e999", b"{", b'"', b"\n", b"nan", b"\0", b","]
                ),
            )
        )
    try:
        series = read_log(Source("log", data=bytes(content)), format=case.format)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are fine, each is checked
        return
    assert np.isfinite(series.duration_s).all()
    assert (series.duration_s > 0).all()
    assert (np.diff(series.end_s) >= 0).all()
