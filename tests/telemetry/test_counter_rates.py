"""Counters become rates, whatever they do."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.telemetry.base import Rates, read, read_number


def test_the_first_reading_and_a_clock_that_stands_give_no_rate() -> None:
    rates = Rates()
    assert rates.update("a", 10, 1.0) is None
    assert rates.update("a", 20, 1.0) is None
    assert rates.update("a", 30, 3.0) == 5.0


def test_series_do_not_mix() -> None:
    rates = Rates()
    rates.update("a", 0, 0.0)
    assert rates.update("b", 1000, 1.0) is None
    assert rates.update("a", 10, 2.0) == 5.0


def test_after_a_process_ended_its_name_begins_anew() -> None:
    rates = Rates()
    rates.update("rank/3/cpu", 50, 0.0)
    rates.update("rank/31/cpu", 50, 0.0)
    rates.forget_all("rank/3/")
    assert rates.update("rank/3/cpu", 60, 1.0) is None
    assert rates.update("rank/31/cpu", 60, 1.0) == 10.0


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2**30), st.floats(0.01, 60.0)), min_size=2, max_size=30
    ),
    start=st.integers(0, 2**32 - 1),
)
def test_a_wrap_at_32_bits_is_no_gap(steps: list[tuple[int, float]], start: int) -> None:
    rates, count, now_s = Rates(), start, 0.0
    rates.update("x", count % 2**32, now_s, wrap_bits=32)
    for moved, passed_s in steps:
        before_s, now_s, count = now_s, now_s + passed_s, count + moved
        rate = rates.update("x", count % 2**32, now_s, wrap_bits=32)
        assert rate == pytest.approx(moved / (now_s - before_s))


@given(
    lives=st.lists(
        st.lists(st.integers(0, 10**9), min_size=1, max_size=10), min_size=1, max_size=5
    ),
    wrap_bits=st.sampled_from([None, 64]),
)
def test_a_reset_costs_one_rate_and_never_gives_a_wrong_one(
    lives: list[list[int]], wrap_bits: int | None
) -> None:
    """Each life counts up from 0; a rate is that of its own second, or is not given."""
    rates, now_s, last = Rates(), 0.0, None
    for life in lives:
        begins = True
        for moved, count in zip(life, itertools.accumulate(life), strict=True):
            now_s += 1.0
            rate = rates.update("x", count, now_s, wrap_bits=wrap_bits)
            if begins and (last is None or count < last):
                assert rate is None
            elif begins:  # what looks like going on is taken for it
                assert last is not None
                assert rate == pytest.approx(count - last)
            else:
                assert rate == pytest.approx(moved)
            begins, last = False, count


def test_a_64_bit_counter_that_falls_is_no_32_bit_one_that_wrapped() -> None:
    rates = Rates()
    rates.update("x", 2**40, 0.0, wrap_bits=32)
    assert rates.update("x", 5, 1.0, wrap_bits=32) is None


def test_files_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert read(tmp_path / "no") is None
    assert read(tmp_path) is None
    assert read_number("/proc/self/status") is None
    most = Path("/proc/sys/kernel/pid_max")
    assert read_number(most) == float(most.read_text(encoding="ascii"))
