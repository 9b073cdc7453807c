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
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, Literal, TypeVar

__all__ = ["Culprit", "explain"]

E = TypeVar("E", bound=Hashable)
_MOST_TRIED = 200_000


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
    cards = _cards(list(dict.fromkeys(measured)), set(left))
    best = _covers(cards, left)
    certain = set.intersection(*map(set, best))
    covered = {link for card in certain for link in cards[card]}
    sure = sorted(certain, key=lambda card: left.index(cards[card][0]))
    in_doubt = {link for cover in best for card in cover - certain for link in cards[card]}
    links = tuple(
        Culprit("link", *link) for link in left if link not in covered and link not in in_doubt
    )
    unclear = tuple(link for link in left if link in in_doubt and link not in covered)
    return (*sure, *links), unclear


def _cards(
    measured: Collection[tuple[E, E]], slow: Collection[tuple[E, E]]
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


def _covers(
    cards: dict[Culprit[E], list[tuple[E, E]]], slow: Collection[tuple[E, E]]
) -> list[frozenset[Culprit[E]]]:
    """Every set of cards with which the fewest culprits remain, single links counted."""
    best: list[frozenset[Culprit[E]]] = [frozenset()]
    fewest = len(slow)
    tried = 0
    for count in range(1, len(cards) + 1):
        for chosen in combinations(cards, count):
            tried += 1
            if tried > _MOST_TRIED:  # so many cards at once are no matter of proof any more
                return best
            covered = {link for card in chosen for link in cards[card]}
            culprits = count + len(slow) - len(covered)
            if culprits < fewest:
                best, fewest = [], culprits
            if culprits == fewest:
                best.append(frozenset(chosen))
        if count >= fewest:
            break
    return best
