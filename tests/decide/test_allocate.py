"""The micro-batch solver against brute force, its ties, its refusals, its calm and its speed."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.decide.allocate import allocate, even_split, pipeline_costs, reallocate
from failslow.errors import PlanError

# round numbers make ties; the tiny and huge ones are lost in, or swamp, the last bits of a float
seconds = st.one_of(
    st.integers(0, 4).map(float),
    st.floats(0.0, 10.0),
    st.sampled_from([1e-17, 2.0**-52, 1e-9, 3e5, 1e12]),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[float], int, list[int], list[int]]:
    """Costs, total and bounds of up to four replicas; the bounds can be met."""
    replicas = draw(st.integers(1, 4))
    fixed = draw(st.lists(seconds, min_size=replicas, max_size=replicas))
    slope = draw(st.lists(seconds, min_size=replicas, max_size=replicas))
    least = draw(st.lists(st.integers(0, 3), min_size=replicas, max_size=replicas))
    most = [low + draw(st.integers(0, 7)) for low in least]
    total = draw(st.integers(sum(least), sum(most)))
    return fixed, slope, total, least, most


def splits(total: int, least: list[int], most: list[int]) -> list[tuple[int, ...]]:
    """Every split within the bounds."""
    ranges = [range(low, high + 1) for low, high in zip(least, most, strict=True)]
    return [counts for counts in itertools.product(*ranges) if sum(counts) == total]


def makespan_s(fixed: list[float], slope: list[float], counts: tuple[int, ...]) -> float:
    return float(max(np.array(fixed) + np.array(slope) * np.array(counts)))


def moved(target: tuple[int, ...], counts: tuple[int, ...]) -> int:
    return sum(max(0, before - after) for before, after in zip(target, counts, strict=True))


@given(problems(), st.booleans())
def test_split_is_the_best_of_all_and_of_those_the_nearest_to_the_even_one(
    problem: tuple[list[float], list[float], int, list[int], list[int]], skewed: bool
) -> None:
    fixed, slope, total, least, most = problem
    even = even_split(total, len(fixed))
    target = even[::-1] if skewed else even
    found = allocate(fixed, slope, total, least=least, most=most, near=target if skewed else None)

    every = splits(total, least, most)
    best = min(makespan_s(fixed, slope, counts) for counts in every)
    optimal = [counts for counts in every if makespan_s(fixed, slope, counts) == best]

    assert found.counts in optimal
    assert found.makespan_s == best
    assert found.moved == moved(target, found.counts)
    assert found.moved == min(moved(target, counts) for counts in optimal)


@given(problems())
def test_equal_inputs_give_equal_splits(
    problem: tuple[list[float], list[float], int, list[int], list[int]],
) -> None:
    fixed, slope, total, least, most = problem
    first = allocate(fixed, slope, total, least=least, most=most)
    assert allocate(list(fixed), tuple(slope), total, least=tuple(least), most=most) == first


def test_equal_replicas_keep_the_even_split() -> None:
    found = allocate([0.1] * 5, [0.2] * 5, 33)
    assert found.counts == even_split(33, 5) == (7, 7, 7, 6, 6)
    assert found.moved == 0


def test_slow_replica_gives_up_what_the_others_can_bear() -> None:
    found = allocate([0.0] * 4, [1.0, 2.0, 1.0, 1.0], 32)
    assert found.counts == (9, 5, 9, 9)
    assert found.makespan_s == 10.0


def test_what_must_move_goes_where_it_costs_least() -> None:
    found = allocate([0.0] * 4, [1.0, 3.0, 0.99, 0.98], 16)
    assert found.counts == (5, 1, 5, 5)
    assert allocate([0.0] * 4, [1.0, 3.0, 0.99, 0.98], 15).counts == (4, 1, 5, 5)


def test_pipeline_counts_its_fill_once_and_its_slowest_stage_every_time() -> None:
    stages = np.array([[1.0, 2.0, 1.0], [1.0, 3.0, 1.5]])
    fixed, slope = pipeline_costs(stages)
    for replica, microbatches in itertools.product(range(2), range(1, 6)):
        done = np.zeros(3)
        for _ in range(microbatches):  # the recurrence of a pipeline: a stage waits for both
            ready = 0.0
            for stage, needed in enumerate(stages[replica]):
                ready = done[stage] = max(ready, done[stage]) + needed
        assert fixed[replica] + slope[replica] * microbatches == pytest.approx(done[-1])


def test_bounds_hold_where_the_best_split_would_cross_them() -> None:
    found = allocate([0.0] * 3, [1.0, 10.0, 1.0], 30, least=4, most=[12, 30, 30])
    assert found.counts == (12, 4, 14)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"total": 3}, "3 micro-batches are fewer than the 4 .* lower `least`"),
        ({"total": -1, "least": 0}, "-1 micro-batches"),
        ({"total": 30, "most": 7}, "30 micro-batches are more than the 28 .* raise `most`"),
        ({"total": 8, "least": 3, "most": [3, 3, 2, 3]}, "replica 2 may run 3 to 2"),
        ({"total": 8, "least": [1, 1]}, "one for each of 4 replicas"),
        ({"total": 8, "near": [1, 1]}, "one count for each of 4"),
        ({"total": 8, "fixed_s": [0.0, np.nan, 0.0, 0.0]}, "fixed_s of replica 1 is nan"),
        ({"total": 8, "fixed_s": [0.0, 1e300, 0.0, 0.0]}, "fixed_s of replica 1 is 1e.300"),
        ({"total": 8, "per_microbatch_s": [-1.0] * 4}, "per_microbatch_s of replica 0 is -1"),
        ({"total": 8, "per_microbatch_s": [1.0]}, r"shape \(4,\), per_microbatch_s \(1,\)"),
    ],
)
def test_impossible_request_names_value_limit_and_remedy(
    arguments: dict[str, object], told: str
) -> None:
    given_: dict[str, object] = {"fixed_s": [0.0] * 4, "per_microbatch_s": [1.0] * 4}
    with pytest.raises(PlanError, match=told):
        allocate(**{**given_, **arguments})  # type: ignore[arg-type]  # wrong on purpose


def test_no_replica_has_no_even_split() -> None:
    with pytest.raises(PlanError, match="8 micro-batches over 0 replicas"):
        even_split(8, 0)


@given(
    truths=st.lists(st.lists(st.floats(0.5, 3.0), min_size=4, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    min_gain=st.floats(0.02, 0.3),
)
def test_noise_alone_never_changes_a_split_twice(
    truths: list[list[float]], seed: int, min_gain: float
) -> None:
    rng = np.random.default_rng(seed)
    ratio = np.sqrt(1.0 + min_gain)  # all costs stay within this factor, from below and above
    low, high = 2.0 / (1.0 + ratio), 2.0 * ratio / (1.0 + ratio)
    counts = even_split(32, 4)
    for truth in truths:
        changes = 0
        for _ in range(25):
            measured = np.array(truth) * rng.uniform(low * (1 + 1e-12), high, 4)
            found = reallocate(counts, np.zeros(4), measured, min_gain=min_gain)
            if found.counts != counts:
                changes += 1
                slowest_before = max(np.array(truth) * np.array(counts))
                assert max(np.array(truth) * np.array(found.counts)) < slowest_before
            counts = found.counts
        assert changes <= 1


def test_split_follows_a_real_change_and_comes_back() -> None:
    counts = even_split(32, 4)
    slow = reallocate(counts, [0.0] * 4, [1.0, 2.0, 1.0, 1.0])
    assert slow.counts == (9, 5, 9, 9)
    back = reallocate(slow.counts, [0.0] * 4, [1.0] * 4)
    assert back.counts == (8, 8, 8, 8)


def test_split_outside_the_bounds_is_given_up_whatever_the_gain() -> None:
    found = reallocate([16, 16, 1], [0.0] * 3, [1.0, 1.0, 16.0], least=2)
    assert found.counts == (16, 15, 2)


@pytest.mark.parametrize(("replicas", "limit_s"), [(512, 1e-3), (100_000, 0.1)])
@pytest.mark.parametrize("spread", ["healthy", "one slow", "wild"])
def test_solver_is_fast_enough_for_every_iteration(
    replicas: int, limit_s: float, spread: str
) -> None:
    rng = np.random.default_rng(replicas)
    slope = 0.1 * (1 + 0.01 * rng.standard_normal(replicas))
    if spread == "one slow":
        slope[replicas // 2] *= 2
    elif spread == "wild":
        slope = rng.uniform(0.01, 1.0, replicas)
    fixed = rng.uniform(0.0, 0.3, replicas)
    taken = []
    for _ in range(40 if replicas < 1000 else 5):
        start = time.process_time()
        found = allocate(fixed, slope, 8 * replicas)
        taken.append(time.process_time() - start)
    assert sum(found.counts) == 8 * replicas
    assert min(taken) <= limit_s
