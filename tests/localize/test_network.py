"""Which cards explain slow links: against all that could be tried, and for whole switches."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from failslow.localize.network import Culprit, explain
from failslow.localize.passes import both_ways, ring_passes

Link = tuple[int, int]


def _tried(measured: list[Link], slow: list[Link]) -> tuple[set[Culprit[int]], set[Link]]:
    """The same answer by trying every set of cards."""
    cards = {}
    for kind, side in (("out", 0), ("in", 1)):
        for end in {link[side] for link in measured}:
            links = [link for link in measured if link[side] == end]
            if len(links) > 1 and set(links) <= set(slow):
                cards[Culprit(kind, end)] = set(links)  # type: ignore[arg-type]
    least, best = len(slow), [frozenset[Culprit[int]]()]
    for count in range(1, len(cards) + 1):
        for chosen in combinations(cards, count):
            left = set(slow).difference(*(cards[card] for card in chosen))
            cost = count + len(left)
            if cost < least:
                least, best = cost, []
            if cost == least:
                best.append(frozenset(chosen))
    certain = frozenset.intersection(*best)
    covered = {link for card in certain for link in cards[card]}
    doubtful = {link for cover in best for card in cover - certain for link in cards[card]}
    single = {Culprit("link", *link) for link in set(slow) - covered - doubtful}
    return {*certain, *single}, doubtful - covered


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_smaller_set_of_culprits_explains_the_slow_links(data: st.DataObject) -> None:
    ends = range(data.draw(st.integers(2, 5)))
    every = [(a, b) for a in ends for b in ends if a != b]
    measured = data.draw(st.lists(st.sampled_from(every), unique=True))
    slow = data.draw(st.lists(st.sampled_from(measured), unique=True)) if measured else []
    culprits, unclear = explain(measured, slow)
    assert (set(culprits), set(unclear)) == _tried(measured, slow)
    assert len(culprits) + len(unclear) == len({*culprits}) + len({*unclear})


def test_every_card_of_a_slow_switch_is_named_however_many_it_has() -> None:
    """Trying every set of them named none of sixteen, and took seconds."""
    links = [link for links in both_ways(ring_passes(1280)) for link in links]
    bad = range(0, 1280, 8)
    culprits, unclear = explain(links, [link for link in links if {*link} & {*bad}])
    assert {(c.kind, c.end) for c in culprits} == {(way, n) for way in ("out", "in") for n in bad}
    assert unclear == ()
