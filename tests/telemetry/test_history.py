"""The bounded history of series."""

from __future__ import annotations

import doctest
import importlib
from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.telemetry.history import History, Window


@pytest.mark.parametrize(
    "module",
    [
        "failslow.localize.correlation",
        "failslow.localize.evidence",
        "failslow.localize.facts",
        "failslow.localize.windows",
        "failslow.telemetry.base",
        "failslow.telemetry.history",
    ],
)
def test_the_examples_in_the_docstrings_are_true(module: str) -> None:
    found = importlib.import_module(module)
    assert doctest.testmod(found, extraglobs={"np": np}).failed == 0


@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from("abcde"), st.integers(-1000, 1000), max_size=5), max_size=40
    ),
    keep=st.integers(1, 12),
    since=st.integers(-1, 41),
    length=st.integers(0, 41),
)
def test_a_window_is_what_was_added_last(
    rows: list[dict[str, int]], keep: int, since: int, length: int
) -> None:
    history = History(keep)
    for t, row in enumerate(rows):
        history.add(float(t), row)
    window = history.window(since, since + length)
    kept = [(t, row) for t, row in list(enumerate(rows))[-keep:] if since <= t <= since + length]
    assert list(window.t) == [t for t, _ in kept]
    assert set(window.series) == {name for _, row in kept for name in row}
    for name, x in window.series.items():
        assert [None if isnan(v) else v for v in x] == [row.get(name) for _, row in kept]


def test_memory_is_bounded_and_names_that_come_and_go_do_not_fill_it() -> None:
    history = History(keep=10)
    for t in range(5000):
        history.add(float(t), {f"peer/{t}": 1.0, "always": float(t)})
    assert history.size_bytes < 20_000
    assert len(history.window().series) == 11
    assert list(history.window().series["always"]) == list(range(4990, 5000))


def test_many_series_find_room() -> None:
    history = History(keep=2)
    history.add(0.0, {f"s{i}": float(i) for i in range(1000)})
    history.add(1.0, {f"s{i}": float(-i) for i in range(1000)})
    series = history.window().series
    assert all(list(series[f"s{i}"]) == [i, -i] for i in range(1000))


def test_a_flood_of_names_is_cut_off() -> None:
    history = History(keep=1)
    history.add(0.0, {f"s{i}": 0.0 for i in range(10_000)})
    assert len(history.window().series) == 4096


def test_shrinking_averages_what_is_old_and_skips_gaps() -> None:
    x = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 8.0, 9.0, np.nan, 11.0])
    window = Window(np.arange(10.0), {"x": x}).shrunk(6)
    assert list(window.t) == [1.0, 4.0, 6.0, 7.0, 8.0, 9.0]
    assert list(window.series["x"][:2]) == [2.0, 5.0]
    assert list(window.series["x"][2:4]) == [8.0, 9.0]
    assert isnan(window.series["x"][4])
    assert window.series["x"][5] == 11.0


@given(n=st.integers(0, 700), points=st.integers(2, 150))
def test_a_shrunk_window_is_short_enough_and_keeps_the_newest(n: int, points: int) -> None:
    t = np.arange(float(n))
    window = Window(t, {"x": 2 * t}).shrunk(points)
    assert len(window.t) <= points
    assert n <= points or len(window.t) > points // 2
    assert list(window.t[-(points // 2) :]) == list(t[-(points // 2) :])
    assert list(window.series["x"]) == list(2 * window.t)
    assert list(window.t) == sorted(set(window.t))


def test_an_empty_history_gives_an_empty_window() -> None:
    window = History(keep=3).window().shrunk(10)
    assert len(window.t) == 0
    assert window.series == {}


def test_keep_must_be_something() -> None:
    with pytest.raises(ValueError, match=r"keep \(0\) must be at least 1"):
        History(0)
