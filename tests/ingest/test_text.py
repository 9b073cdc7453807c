"""Lines, prefixes and dates."""

from __future__ import annotations

import gzip
import math
import os
import re
import threading
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.errors import InputError
from failslow.ingest.text import NUMBER, Source, parse_clock, split_prefix


def lines(data: bytes) -> list[str]:
    return list(Source("log", data=data).lines())


def test_lines_lose_ends_colours_and_the_byte_order_mark() -> None:
    data = b"\xef\xbb\xbfone\r\n\x1b[1;31mtwo\x1b[0m\nthree"
    assert lines(data) == ["one", "two", "three"]


def test_a_bar_that_rewrites_its_line_gives_a_line_a_rewrite() -> None:
    assert lines(b"10%\r20%\r30%\ndone\n") == ["10%", "20%", "30%", "done"]


def test_broken_utf8_becomes_replacement_characters() -> None:
    assert lines(b"a\xff\xfeb\nc\n") == ["a��b", "c"]


def test_utf16_is_read_by_its_mark() -> None:
    assert lines("µ\nß\n".encode("utf-16")) == ["µ", "ß"]


def test_a_source_can_be_read_twice() -> None:
    source = Source("log", data=b"a\nb\n")
    assert list(source.lines()) == list(source.lines()) == ["a", "b"]


def test_a_gzip_file_cut_short_gives_what_there_is_and_complains(tmp_path: Path) -> None:
    text = "".join(f"line {number * 7919 % 10_007}\n" for number in range(20_000))
    packed = gzip.compress(text.encode())
    path = tmp_path / "log.gz"
    path.write_bytes(packed[: len(packed) // 2])
    source = Source.from_path(path)
    read = list(source.lines())
    assert 1_000 < len(read) < 20_000
    assert read[:1000] == text.split("\n")[:1000]
    assert source.complaint.startswith("reading stopped before the end")


def test_a_missing_file_and_a_folder_say_which_and_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.log: cannot be read: No such file"):
        Source.from_path(tmp_path / "absent.log").open()
    with pytest.raises(InputError, match="cannot be read: Is a directory; check the path"):
        Source.from_path(tmp_path).open()


def test_a_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"a\nb\n",))
    writer.start()
    source = Source.from_path(pipe)
    writer.join(timeout=10)
    assert list(source.lines()) == list(source.lines()) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "writer", "rest"),
    [
        ("iteration 3", "", "iteration 3"),
        ("55:  [2026-06-26] x", "55", "[2026-06-26] x"),
        (" 9: [default3]:step 1", "9/3", "step 1"),
        ("[rank0]:[titan] x", "0", "[titan] x"),
        ("[1,12]<stdout>:x", "12", "x"),
        ("(TrainWorker pid=4211, ip=10.0.0.7) x", "TrainWorker pid=4211, ip=10.0.0.7", "x"),
        ("worker-3: [2023-04-18] x", "worker-3", "[2023-04-18] x"),
        ("iter 0: loss 3", "", "iter 0: loss 3"),
        ("12:30:01 x", "", "12:30:01 x"),
        ("", "", ""),
    ],
)
def test_prefixes_of_launchers(line: str, writer: str, rest: str) -> None:
    assert split_prefix(line) == (writer, rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2023-04-18 01:46:59,171", 1681782419.171),
        ("2023-04-18 01:46:59.171", 1681782419.171),
        ("2023-04-18T01:46:59", 1681782419.0),
        ("2023/04/18 01:46:59", 1681782419.0),
        ("2023-04-18T01:46:59Z", 1681782419.0),
        ("2023-04-18T03:46:59.5+02:00", 1681782419.5),
        ("2023-04-17 20:16:59 -0530", 1681782419.0),
    ],
)
def test_dates(text: str, expected: float) -> None:
    assert parse_clock(text) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        *("", "01:46:59", "yesterday", "2023-13-01 00:00:00", "2023-04-18 24:00:00"),
        *("2023-04-18 01:46:99", "0000-01-01 00:00:00", "2023-04-18 01:46:nan"),
    ],
)
def test_what_is_no_date_is_nan(text: str) -> None:
    assert math.isnan(parse_clock(text))


@given(st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2100, 1, 1)))
def test_dates_agree_with_the_standard_library(moment: datetime) -> None:
    expected = moment.replace(tzinfo=timezone.utc).timestamp()
    text = moment.isoformat(" ", "microseconds")
    assert parse_clock(text) == pytest.approx(expected, abs=1e-5)


@given(st.text(max_size=40))
def test_no_text_breaks_the_date_parser(text: str) -> None:
    assert isinstance(parse_clock(text), float)
    assert isinstance(parse_clock("2023-04-18 01:46:" + text), float)


@given(st.floats(), st.sampled_from(["{:.4f}", "{:e}", "{!r}", "{:g}"]))
def test_number_pattern_takes_printed_floats(value: float, form: str) -> None:
    text = form.format(value)
    assert re.fullmatch(NUMBER, text) is not None
    assert math.isnan(float(text)) == math.isnan(value)
