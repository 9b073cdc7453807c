"""Which links and network cards explain the links that were found slow. Pure.

In: directed links between endpoints, all that were measured and those that were slow. Out: the
fewest culprits that explain them, and only them:

    >>> ends = range(4)
    >>> links = [(a, b) for a in ends for b in ends if a != b]
    >>> explain(links, {(1, 0), (1, 2), (1, 3)})                    # everything 1 sends
    ((Culprit(kind='out', end=1, peer=None),), ())
    >>> explain(links, {(1, 2)})
    ((Culprit(kind='link', end=1, peer=2),), ())
    >>> explain([(0, 1), (0, 2), (2, 1)], {(0, 1), (0, 2), (2, 1)})   # out of 0, into 1: or neither
    ((), ((0, 1), (0, 2), (2, 1)))

A card that sends (or receives) slowly makes every measured link from (or to) it slow; of one link
alone nobody can say whether it is the link or a card, and the link is named.

Senders and receivers are two sides, a slow link joins one of each: the fewest cards are a least
vertex cover of a bipartite graph, so that a switch with hundreds of nodes is resolved at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

__all__ = ["Culprit", "explain"]

E = TypeVar("E", bound=Hashable)
_FREE = -1


@dataclass(frozen=True, slots=True)
class Culprit(Generic[E]):
    """A link from `end` to `peer`; or all that `end` sends (out), or receives (in)."""

    kind: Literal["link", "out", "in"]
    end: E
    peer: E | None = None


def explain(
    measured: Iterable[tuple[E, E]], slow: Collection[tuple[E, E]]
) -> tuple[tuple[Culprit[E], ...], tuple[tuple[E, E], ...]]:
    """(culprits that are certain, slow links of which several explanations are as good)."""
    left = list(dict.fromkeys(slow))
    place = {link: index for index, link in enumerate(left)}
    cards = _cards(list(dict.fromkeys(measured)), place)
    certain, doubtful = _necessary(cards, left)
    covered = {link for card in certain for link in cards[card]}
    sure = sorted(certain, key=lambda card: place[cards[card][0]])
    in_doubt = {link for card in doubtful for link in cards[card]}
    links = tuple(
        Culprit("link", *link) for link in left if link not in covered and link not in in_doubt
    )
    unclear = tuple(link for link in left if link in in_doubt and link not in covered)
    return (*sure, *links), unclear


def _cards(
    measured: Iterable[tuple[E, E]], slow: Collection[tuple[E, E]]
) -> dict[Culprit[E], list[tuple[E, E]]]:
    """Cards all of whose links in one direction are slow, two at least, and these links."""
    sent: dict[Culprit[E], list[tuple[E, E]]] = {}
    for link in measured:
        sent.setdefault(Culprit("out", link[0]), []).append(link)
        sent.setdefault(Culprit("in", link[1]), []).append(link)
    return {
        card: links
        for card, links in sent.items()
        if len(links) > 1 and all(link in slow for link in links)
    }


def _necessary(
    cards: Collection[Culprit[E]], slow: Iterable[tuple[E, E]]
) -> tuple[set[Culprit[E]], set[Culprit[E]]]:
    """(cards of every set with which the fewest culprits remain, those of some such sets only).

    A link of which one end is no card is a culprit itself, and stands for that end.
    """
    ends: list[tuple[Hashable, Hashable]] = []
    for link in slow:
        out, into = Culprit("out", link[0]), Culprit("in", link[1])
        if out in cards or into in cards:
            ends.append((out if out in cards else link, into if into in cards else link))
    if not ends:
        return set(), set()
    senders = list(dict.fromkeys(sender for sender, _ in ends))
    receivers = list(dict.fromkeys(receiver for _, receiver in ends))
    row = {end: index for index, end in enumerate(senders)}
    column = {end: index for index, end in enumerate(receivers)}
    places = [row[sender] for sender, _ in ends], [column[receiver] for _, receiver in ends]
    graph = csr_array((np.ones(len(ends)), places), shape=(len(senders), len(receivers)))
    mates = maximum_bipartite_matching(graph, perm_type="column")
    back = np.full(len(receivers), _FREE)
    back[mates[mates >= 0]] = np.flatnonzero(mates >= 0)
    # by Koenig: from an end without a mate all that can be reached on the other side is in every
    # least cover, and on its own side in none; of the rest there are covers with and without
    unneeded, needed = _reached(graph, mates, back)
    also_unneeded, also_needed = _reached(csr_array(graph.T), back, mates)
    always = {*(receivers[i] for i in needed), *(senders[i] for i in also_needed)}
    never = {*(senders[i] for i in unneeded), *(receivers[i] for i in also_unneeded)}
    certain = {card for card in cards if card in always}
    return certain, {card for card in cards if card not in always and card not in never}


def _reached(
    graph: csr_array, mates: NDArray[np.integer], back: NDArray[np.integer]
) -> tuple[set[int], set[int]]:
    """(rows, columns) reached from rows without a mate: by any link there, by a mate's back."""
    todo = np.flatnonzero(mates == _FREE).tolist()
    rows, columns = set(todo), set[int]()
    while todo:
        row = todo.pop()
        for column in graph.indices[graph.indptr[row] : graph.indptr[row + 1]].tolist():
            if column not in columns:
                columns.add(column)
                rows.add(int(back[column]))
                todo.append(int(back[column]))
    return rows, columns
