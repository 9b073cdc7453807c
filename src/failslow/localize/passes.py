"""Who talks to whom when: links of a topology in passes of disjoint pairs.

In: a number of members. Out: passes; within one each member is in one pair at most, so that no
transfer shares its ends with another. A constant number of passes, whatever the size (FALCON,
arXiv 2410.12588, section 5.2):

    >>> ring_passes(4)
    (((0, 1), (2, 3)), ((1, 2), (3, 0)))
    >>> tree_passes(4)
    (((2, 1),), ((0, 2),), ((2, 3),))
    >>> both_ways(ring_passes(2))
    (((0, 1),), ((1, 0),))
    >>> len(ring_passes(7)), len(tree_passes(500)), len(tournament(6))
    (3, 4, 5)
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "Pass",
    "both_ways",
    "double_tree_passes",
    "names_tree",
    "ring_passes",
    "tournament",
    "tree_passes",
]

Pass = tuple[tuple[int, int], ...]
"""Pairs (sender, receiver) that no member has two of."""


def ring_passes(size: int) -> tuple[Pass, ...]:
    """Links i -> i+1 of a ring: 2 passes for an even size (1 for two members), 3 for an odd one."""
    if size < 2:
        return ()
    if size == 2:
        return (((0, 1),),)
    links = [(i, (i + 1) % size) for i in range(size)]
    if size % 2 == 0:
        return tuple(links[0::2]), tuple(links[1::2])
    return tuple(links[0:-1:2]), tuple(links[1:-1:2]), (links[-1],)


def tree_passes(size: int) -> tuple[Pass, ...]:
    """Links parent -> child of the binary tree that NCCL makes of its nodes, in up to 4 passes.

    One for each of first and second children at odd and at even depth: a member's own parent is
    in a pass of the other parity than its children.
    """
    passes: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for child in range(1, size):
        parent, depth = _parent(child, size), 1
        above = parent
        while above:
            above, depth = _parent(above, size), depth + 1
        passes.setdefault((depth % 2, child > parent > 0), []).append((parent, child))
    return tuple(map(tuple, passes.values()))


def _parent(member: int, size: int) -> int:
    """Odd members are leaves; a member's lowest bit says how high it is in the tree."""
    lowest = member & -member
    above = member ^ lowest | lowest << 1
    return above if above < size else member ^ lowest


def double_tree_passes(size: int) -> tuple[Pass, ...]:
    """Links of both trees between which NCCL halves the data, in up to 8 passes.

    The second one is the first turned round, or moved on by one where the size is odd: its inner
    members are leaves of the other.
    """
    first = tree_passes(size)
    if size % 2:
        second = [(member + 1) % size for member in range(size)]
    else:
        second = list(range(size))[::-1]
    return first + tuple(tuple((second[a], second[b]) for a, b in links) for links in first)


def names_tree(algorithms: str) -> bool:
    """Whether NCCL_ALGO makes all-reduces trees, and never rings.

    >>> names_tree("Tree"), names_tree("allreduce:tree;allgather:ring"), names_tree("^ring")
    (True, True, True)
    >>> names_tree("Ring,Tree"), names_tree("^tree"), names_tree("allgather:ring"), names_tree("")
    (False, False, False, False)
    """
    for rule in algorithms.lower().split(";"):
        of, colon, names = rule.rpartition(":")
        if colon and of.strip() != "allreduce":
            continue
        excluded = names.strip().startswith("^")
        listed = {name.strip() for name in names.strip().lstrip("^").split(",")}
        trees = {"tree", "nvlstree"} & listed
        if ("ring" in listed and not trees) if excluded else (bool(trees) and "ring" not in listed):
            return True
    return False


def tournament(size: int) -> tuple[Pass, ...]:
    """Every pair of members once, in the fewest passes: size - 1 if even, else size.

    The circle method: one member stays, the others move round it.
    """
    if size < 2:
        return ()
    seats = size + size % 2  # an odd one out sits opposite an empty seat
    moving = seats - 1
    passes = []
    for turn in range(moving):
        pairs = [(moving, turn)] + [
            ((turn + k) % moving, (turn - k) % moving) for k in range(1, seats // 2)
        ]
        passes.append(tuple((min(p), max(p)) for p in pairs if max(p) < size))
    return tuple(passes)


def both_ways(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Each pass, followed by the same pairs the other way round."""
    return tuple(
        way for links in passes for way in (links, tuple((there, here) for here, there in links))
    )
