"""Numbers as people read them."""

from __future__ import annotations

import doctest
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.report import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-5, "42.0 µs"),
        (0.0123, "12.3 ms"),
        (0.571, "571 ms"),
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min"),
        (190.4, "3 min 10 s"),
        (3599.7, "1 h"),
        (4000, "1 h 7 min"),
        (86390, "1 d"),
        (190000, "2 d 5 h"),
        (-2.5, "-2.50 s"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_a_duration_is_in_its_natural_unit(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@given(st.floats(1e-6, 1e9))
def test_a_duration_read_back_is_within_its_rounding(seconds: float) -> None:
    sizes = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"([\d.]+) (\S+)", units.duration(seconds))

    assert sum(float(number) * sizes[unit] for number, unit in parts) == pytest.approx(
        seconds, rel=0.03
    )


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.394, "×1.39"), (17.0, "×17"), (9.999, "×10"), (math.nan, "?")]
)
def test_a_slowdown_has_three_figures(ratio: float, text: str) -> None:
    assert units.slowdown(ratio) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (13.24, "+13.2 %"),
        (0.0, "0 %"),
        (0.0042, "+<0.01 %"),
        (0.05, "+0.05 %"),
        (345.6, "+346 %"),
        (1234.5, "+1,234 %"),
        (-3.0, "-3.00 %"),
        (math.inf, "?"),
    ],
)
def test_an_increase_is_signed(value: float, text: str) -> None:
    assert units.percent(value) == text


def test_counts_and_plurals_and_clocks() -> None:
    assert units.plural(1, "spike") == "1 spike"
    assert units.plural(48000, "job") == "48,000 jobs"
    assert units.plural(2, "entry", "entries") == "2 entries"
    assert units.clock(1_745_735_250.9) == "2025-04-27 06:27:30"
    assert units.clock(1e300) == ""


def test_the_examples_of_the_docstring_hold() -> None:
    result = doctest.testmod(units)
    assert result.attempted
    assert result.failed == 0
