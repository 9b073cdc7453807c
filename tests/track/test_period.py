"""The period of a symbol sequence against brute force and against what was planted."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from failslow.stats import period
from failslow.stats.period import (
    candidate_lags,
    find_period,
    match_counts,
    repeat_levels,
    repeating,
)

Symbols = NDArray[np.int64]

sequences = st.lists(st.integers(0, 3), min_size=2, max_size=40).map(np.array)


def counted(symbols: Symbols) -> list[int]:
    """Matches at every lag, by loops."""
    n = len(symbols)
    return [sum(int(symbols[i] == symbols[i + lag]) for i in range(n - lag)) for lag in range(n)]


def stretches_of(
    symbols: Symbols, lag: int, repeats: int
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """(start, end) of the stretches that hold `repeats` or more of a block of `lag`, by loops."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    start = 0
    while start + lag < len(symbols):
        end = start + lag
        while end < len(symbols) and symbols[end] == symbols[end - lag]:
            end += 1
        if end - start >= repeats * lag:
            block = [int(x) for x in symbols[start : start + lag]]
            if primitive(block):
                circle = min(tuple(block[k:] + block[:k]) for k in range(lag))
                found.setdefault(circle, []).append((start, end))
        start = end - lag + 1
    return found


def merits(symbols: Symbols, lag: int, repeats: int) -> list[tuple[int, int]]:
    """(positions covered, symbols in whole repeats) of each block of `lag`."""
    out = []
    for stretches in stretches_of(symbols, lag, repeats).values():
        whole, last = 0, 0
        for start, end in stretches:
            length = end - max(start, last)
            cut = start == 0 or end == len(symbols)
            whole += length if cut else length // lag * lag
            last = end
        covered = {at for start, end in stretches for at in range(start, end)}
        out.append((len(covered), whole))
    return out


def primitive(unit: list[int]) -> bool:
    return not any(
        len(unit) % d == 0 and unit[:d] * (len(unit) // d) == unit for d in range(1, len(unit))
    )


@given(sequences)
def test_match_counts_are_those_of_brute_force(symbols: Symbols) -> None:
    assert match_counts(symbols).tolist() == counted(symbols)


@given(sequences)
def test_weighted_counts_are_those_of_brute_force(symbols: Symbols) -> None:
    weights = np.array([0.5, 2.0, 1.0, 3.0])
    n = len(symbols)
    expected = [
        sum(weights[symbols[i]] for i in range(n - lag) if symbols[i] == symbols[i + lag])
        for lag in range(n)
    ]
    assert match_counts(symbols, weights) == pytest.approx(expected, abs=1e-9)


def test_counts_of_a_large_alphabet_are_estimated_closely() -> None:
    unit = np.random.default_rng(1).integers(0, 3000, 1500)
    symbols = np.tile(unit, 8)
    estimate = match_counts(symbols)
    n = len(symbols)
    for lag in (1, 700, 1500, 3000):
        exact = np.count_nonzero(symbols[lag:] == symbols[:-lag])
        assert estimate[lag] == pytest.approx(exact, abs=6 * np.sqrt(n))


@given(sequences, st.integers(1, 10), st.integers(2, 3))
def test_repeating_positions_are_those_of_brute_force(
    symbols: Symbols, lag: int, repeats: int
) -> None:
    if lag * repeats > len(symbols):
        return
    covered = [count for count, _ in merits(symbols, lag, repeats)]
    assert np.count_nonzero(repeating(symbols, lag, repeats)) == max(covered, default=0)


@given(sequences)
def test_the_period_is_the_smallest_lag_that_explains_most(symbols: Symbols) -> None:
    lags = range(1, len(symbols) // 3 + 1)
    found = [(merit, -lag) for lag in lags for merit in merits(symbols, lag, 3)]
    expected = -max(found)[1] if found else None
    assert find_period(symbols, min_explained=0.0) == expected


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60).filter(primitive),
    st.integers(12, 16),
    st.integers(0, 59),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 9)), max_size=2),
)
def test_a_planted_period_is_found_despite_foreign_stretches(
    unit: list[int], times: int, shift: int, foreign: list[tuple[int, int]]
) -> None:
    symbols = np.roll(np.tile(unit, times), shift)
    for number, (at, length) in enumerate(foreign):
        # each stretch is another one, so that no longer lag explains them
        stretch = [100 + number] * min(length, len(unit))
        symbols = np.insert(symbols, at % len(symbols), stretch)
    levels = repeat_levels(np.unique(symbols, return_inverse=True)[1], repeats=2)
    planted = [level for level in levels if level.lag == len(unit)]
    assert planted
    covers = np.count_nonzero(planted[0].mask)
    if all(np.count_nonzero(level.mask) < covers for level in levels if level.lag < len(unit)):
        assert find_period(symbols, repeats=2, min_explained=0.5) == len(unit)


@pytest.mark.parametrize("times", [4, 9])
def test_63_of_64_matching_is_not_a_period(times: int) -> None:
    symbols = np.tile([1] * 63 + [2], times)[20:]
    assert find_period(symbols) == 64


@pytest.mark.parametrize("layers", [5, 32])
@pytest.mark.parametrize("outer", [0, 1])
def test_a_loop_of_layers_is_not_the_period(layers: int, outer: int) -> None:
    unit = [7] * outer + [1] * layers + [1, 3] * layers + [9] * outer
    assert find_period(np.tile(unit, 6)[17:]) == len(unit)


def test_nothing_is_found_in_what_does_not_repeat() -> None:
    assert find_period(np.arange(300)) is None
    assert find_period(np.random.default_rng(5).integers(0, 50, 3000)) is None


def test_candidates_hold_the_period_and_the_loop_inside_it() -> None:
    unit = np.concatenate([np.tile([1, 2, 3], 60), [4, 5]])
    lags = candidate_lags(np.tile(unit, 9), 9 * len(unit) // 2)
    assert 3 in lags
    assert len(unit) in lags
    assert len(lags) <= 48


def test_a_period_of_100_000_symbols_is_found_among_foreign_ones() -> None:
    rng = np.random.default_rng(2)
    unit = rng.integers(0, 400, 100_000)
    symbols = np.concatenate([np.tile(unit, 3)[31_000:], [900] * 77, np.tile(unit, 2)])
    assert find_period(symbols, repeats=2) == 100_000


def test_the_examples_in_the_documentation_hold() -> None:
    assert doctest.testmod(period).failed == 0
