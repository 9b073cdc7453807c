"""The split of a global batch: nothing lost, nothing twice, order kept, proportions kept."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from failslow.decide import even_split
from failslow.errors import PlanError
from failslow.mitigate.batches import Split, even
from failslow.mitigate.grid import Place

_COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(_COUNTS, st.integers(0, 200))
def test_every_microbatch_is_run_once_and_in_order(counts: list[int], more: int) -> None:
    size = len(counts) + more
    split = Split(counts=tuple(counts)).scaled(size)
    run = [index for replica in range(len(counts)) for index in split.part(replica)]
    assert run == list(range(size))


@given(_COUNTS, st.integers(0, 200))
def test_the_largest_relative_share_is_the_smallest_possible(counts: list[int], more: int) -> None:
    size = len(counts) + more
    scaled = Split(counts=tuple(counts)).scaled(size).counts
    assume(max(counts) - min(counts) > 1)
    # fewer for the replica with the largest share would mean more than that for another
    worst = max([n / of for n, of in zip(scaled, counts, strict=True) if n > 1], default=0.0)
    assert all((n + 1) / of >= worst for n, of in zip(scaled, counts, strict=True))


@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 60))
def test_even_stays_even_at_every_size(replicas: int, one: int, other: int) -> None:
    split = even(replicas + one, replicas)
    assert split.counts == even_split(replicas + one, replicas)
    assert split.scaled(replicas + other).counts == even_split(replicas + other, replicas)


@given(_COUNTS, st.integers(0, 200), st.integers(0, 8))
def test_no_replica_gets_more_than_it_can_run(counts: list[int], more: int, above: int) -> None:
    size, most = len(counts) + more, max(counts) + above
    split = Split(counts=tuple(counts))
    if size > most * len(counts):
        with pytest.raises(PlanError, match=f"too large for {len(counts)} replicas"):
            split.scaled(size, most)
        return
    scaled, free = split.scaled(size, most).counts, split.scaled(size).counts
    assert sum(scaled) == size
    assert max(scaled) <= most
    assert scaled == free or max(free) > most


def test_a_step_that_is_a_little_larger_keeps_to_the_most_a_replica_can_run() -> None:
    split = Split(counts=(10, 6, 8, 8))
    assert max(split.scaled(36).counts) == 11
    assert split.scaled(36, most=10).counts == (10, 7, 10, 9)
    assert split.scaled(40, most=10).counts == (10, 10, 10, 10)


def test_too_few_micro_batches_are_refused_with_the_number_needed() -> None:
    with pytest.raises(PlanError, match="at least 2"):
        even(7, 4, least=2)
    with pytest.raises(PlanError, match="too small for 4 replicas"):
        Split(counts=(5, 1, 5, 5)).scaled(3)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ((9, 5, 9, 9), ""),
        ((9, 5, 9), "3 counts for 4 replicas"),
        ((9, 5, 9, 8), "make 31 micro-batches, not 32"),
        ((20, 1, 2, 9), "needs 2 micro-batches"),
        ((14, 4, 7, 7), "can run 12"),
    ],
)
def test_a_plan_is_checked(counts: tuple[int, ...], problem: str) -> None:
    found = even(32, 4, least=2).problem(counts, most=12)
    assert problem in found
    assert bool(problem) == bool(found)


def test_positions_are_numbered_row_major() -> None:
    places = [Place.at(i, (2, 3, 2)) for i in range(12)]
    assert [place.position for place in places] == list(range(12))
    assert places[7] == Place(stage=1, replica=0, shard=1, grid=(2, 3, 2))
    with pytest.raises(PlanError, match="no place in a grid of 2 x 3 x 2"):
        Place(stage=0, replica=3, shard=0, grid=(2, 3, 2))
