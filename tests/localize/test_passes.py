"""Passes: every link once, nobody in two pairs of a pass, as few passes as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest

from failslow.localize.passes import (
    Pass,
    both_ways,
    double_tree_passes,
    ring_passes,
    tournament,
    tree_passes,
)

Make = Callable[[int], tuple[Pass, ...]]
SIZES = range(2, 513)


def _links(passes: tuple[Pass, ...]) -> Counter[tuple[int, int]]:
    """How often each link is there; AssertionError where a member is in two pairs of a pass."""
    for links in passes:
        members = [member for link in links for member in link]
        assert len(members) == len(set(members)), f"somebody is in two pairs: {links}"
        assert links, "an empty pass costs a time limit for nothing"
    return Counter(link for links in passes for link in links)


def test_a_ring_takes_two_passes_if_even_and_three_if_odd() -> None:
    for size in SIZES:
        passes = ring_passes(size)
        ring = {(i, (i + 1) % size) for i in range(size)} if size > 2 else {(0, 1)}
        assert _links(passes) == Counter(ring)
        assert len(passes) == (1 if size == 2 else 3 if size % 2 else 2)


def test_a_tree_takes_four_passes() -> None:
    for size in SIZES:
        passes = tree_passes(size)
        parents = {child: parent for parent, child in _links(passes)}
        assert sorted(parents) == list(range(1, size))
        assert sum(map(len, passes)) == size - 1
        assert max(Counter(parents.values()).values()) <= 2
        assert all(parent % 2 == 0 for parent in parents.values()), "odd members are leaves"
        assert len(passes) <= 4


def test_a_tree_is_the_one_that_nccl_draws_in_its_sources() -> None:
    drawn = {8: (4, 12), 4: (2, 6), 2: (1, 3), 6: (5, 7), 12: (10, 13), 10: (9, 11), 0: (8,)}
    assert set(_links(tree_passes(14))) == {(up, down) for up in drawn for down in drawn[up]}


def test_who_passes_data_on_in_one_tree_is_a_leaf_of_the_other() -> None:
    for size in SIZES:
        passes = double_tree_passes(size)
        for links in passes:
            _links((links,))
        one, other = passes[: len(passes) // 2], passes[len(passes) // 2 :]
        inner = {parent for parent, _ in _links(one)} & {parent for parent, _ in _links(other)}
        assert len(inner) <= 2, "the roots"
        assert len(passes) <= 8


@pytest.mark.parametrize("size", [*range(2, 66), 127, 128, 511, 512])
def test_a_tournament_takes_as_few_passes_as_can_be(size: int) -> None:
    passes = tournament(size)
    assert _links(passes) == Counter(combinations(range(size), 2))
    assert len(passes) == (size - 1 if size % 2 == 0 else size)


@pytest.mark.parametrize("make", [ring_passes, tree_passes, tournament])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 33])
def test_both_ways_has_every_link_in_each_direction(make: Make, size: int) -> None:
    one_way = make(size)
    there = _links(one_way)
    assert _links(both_ways(one_way)) == there + Counter((b, a) for a, b in there)
    assert len(both_ways(one_way)) == 2 * len(one_way)


@pytest.mark.parametrize("make", [ring_passes, tree_passes, double_tree_passes, tournament])
def test_alone_there_is_nobody_to_talk_to(make: Make) -> None:
    assert make(1) == make(0) == ()
