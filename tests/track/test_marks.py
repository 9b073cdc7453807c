"""Which optimizer's steps bound iterations, where several step or one steps rarely."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from failslow.track.follow import Crossing
from failslow.track.marks import MarkFollower

CALLS, ITERATION_NS = 4, 100_000_000
Marks = Callable[[int], Iterable[tuple[int, int]]]
"""Of an iteration: (optimizer, collectives made before it steps)."""


def lengths(marks: Marks, iterations: int) -> tuple[MarkFollower, list[tuple[int, float]]]:
    """(follower, [(iteration that ended, how many it took)] of each iteration it saw)."""
    follower, seen, calls, last = MarkFollower(), [], 0, None
    for index in range(iterations):
        steps = list(marks(index))
        for place, (number, before) in enumerate(steps):
            calls += before
            at_ns = index * ITERATION_NS + (place + 1) * ITERATION_NS // len(steps)
            crossed = follower.mark(Crossing(at_ns, calls, 0, 0, 0), number)
            if crossed is None:
                continue
            if last is not None and not crossed.opens:
                seen.append((index, (at_ns - last) / ITERATION_NS))
            last = at_ns
    return follower, seen


def assert_each_once(seen: list[tuple[int, float]], iterations: int, lock: int = 12) -> None:
    late = [(index, length) for index, length in seen if index >= lock]
    assert [index for index, _ in late] == list(range(lock, iterations))
    # its place among the steps of an iteration is not always the same
    assert all(0.3 <= length <= 1.7 for _, length in late)
    assert sum(length for _, length in late) == pytest.approx(len(late), abs=1)


def auxiliary(period: int, *, first: bool, own_calls: int) -> Marks:
    def marks(index: int) -> Iterable[tuple[int, int]]:
        due = index % period == period - 1 if not first else index % period == 0
        if first:
            return [(0, CALLS), (1, 0)] if due else [(1, CALLS)]
        return [(0, CALLS), (1, own_calls)] if due else [(0, CALLS)]

    return marks


@settings(max_examples=20, deadline=None)
@given(period=st.integers(2, 200), first=st.booleans(), own_calls=st.integers(0, 1))
@example(period=22, first=False, own_calls=0)
@example(period=21, first=False, own_calls=1)
@example(period=30, first=True, own_calls=0)
@example(period=5, first=True, own_calls=0)
def test_an_optimizer_that_steps_now_and_then_leaves_iterations_as_they_are(
    period: int, first: bool, own_calls: int
) -> None:
    follower, seen = lengths(auxiliary(period, first=first, own_calls=own_calls), 450)
    assert_each_once(seen, 450)
    assert not follower.wavers


@pytest.mark.parametrize("period", [9, 21, 22, 25, 30, 64])
def test_a_rare_one_with_as_many_collectives_of_its_own_does_so_too(period: int) -> None:
    follower, seen = lengths(auxiliary(period, first=False, own_calls=CALLS), 2000)
    assert_each_once(seen, 2000)
    assert not follower.wavers


@given(second=st.integers(0, 5))
def test_two_that_step_each_iteration_bound_it_together(second: int) -> None:
    follower, seen = lengths(lambda _: [(0, CALLS), (1, second)], 300)
    assert_each_once(seen, 300)
    assert all(length == 1.0 for _, length in seen)
    assert follower.usual_calls == CALLS + second


@given(critics=st.integers(2, 8))
def test_a_generator_bounds_its_critics_steps(critics: int) -> None:
    _, seen = lengths(lambda _: [*[(0, CALLS)] * critics, (1, CALLS)], 100)
    assert_each_once(seen, 100)
    assert all(length == 1.0 for index, length in seen if index >= 12)


@given(micro=st.integers(1, 64))
def test_accumulation_bounds_by_the_only_optimizer(micro: int) -> None:
    _, seen = lengths(lambda _: [(0, micro * CALLS)], 50)
    assert_each_once(seen, 50, lock=1)


def test_layers_with_an_optimizer_each() -> None:
    _, seen = lengths(lambda _: [(0, CALLS), *[(layer, 0) for layer in range(1, 200)]], 30)
    assert_each_once(seen, 30, lock=1)


def test_a_new_optimizer_takes_over_from_one_that_has_stopped() -> None:
    follower, seen = lengths(lambda index: [(index // 300, CALLS)], 900)
    blind = set(range(900)) - {index for index, _ in seen}
    assert len(blind) <= 1 + 2 * 16
    assert not follower.wavers


def test_optimizers_that_come_and_go_are_told() -> None:
    follower, _ = lengths(lambda index: [(index // 40, CALLS)], 400)
    assert follower.wavers
