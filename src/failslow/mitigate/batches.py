"""Which micro-batches of the global batch each data-parallel replica runs.

In: micro-batches of each replica. Out: each replica's part, in the order of the global batch,
whose content and order never change. A step whose global batch is of another size (the last one of
an epoch, a ramp) is split in the same proportions:

    >>> split = Split(counts=(9, 5, 9, 9), least=1)
    >>> split.part(1)
    range(9, 14)
    >>> split.scaled(13).counts
    (4, 2, 4, 3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from failslow.errors import PlanError

__all__ = ["Split", "even"]


def even(size: int, replicas: int, least: int = 1) -> Split:
    """The even split, the first replicas taking the remainder. Raises PlanError as `Split`."""
    each, more = divmod(size, replicas)
    return Split(counts=(each + 1,) * more + (each,) * (replicas - more), least=least)


@dataclass(frozen=True, slots=True)
class Split:
    """A global batch over replicas. Raises PlanError where a replica gets less than `least`."""

    counts: tuple[int, ...]
    """Micro-batches of each replica; they take theirs one after the other."""
    least: int = 1
    """Fewest a replica can run."""

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < max(self.least, 1):
            raise PlanError(
                f"{sum(self.counts)} micro-batches as {list(self.counts)}: every replica needs at "
                f"least {max(self.least, 1)}; train with more micro-batches or fewer replicas"
            )

    @property
    def size(self) -> int:
        """Micro-batches of the global batch."""
        return sum(self.counts)

    def part(self, replica: int) -> range:
        """The micro-batches of one replica."""
        first = sum(self.counts[:replica])
        return range(first, first + self.counts[replica])

    def scaled(self, size: int, most: int | None = None) -> Split:
        """The same proportions for a global batch of another size.

        One after the other goes to the replica that will have the smallest share of what it has
        now, so that the largest share is as small as can be, but none gets more than `most`. What
        is even stays even. Raises PlanError for a size that leaves a replica with too little, or
        that is more than all can run.
        """
        if size == self.size:
            return self
        if most is not None and size > most * len(self.counts):
            raise PlanError(
                f"a global batch of {size} micro-batches is too large for {len(self.counts)} "
                f"replicas with at most {most} each; make it smaller, or `most` larger"
            )
        if max(self.counts) - min(self.counts) <= 1:
            return even(size, len(self.counts), self.least)
        counts = [max(self.least, 1)] * len(self.counts)
        next_share = [((counts[i] + 1) / of, i) for i, of in enumerate(self.counts)]
        heapify(next_share)
        for _ in range(size - sum(counts)):
            _, replica = next_share[0]
            counts[replica] += 1
            share = (counts[replica] + 1) / self.counts[replica]
            # whoever is full is last in the queue: all others are full before it gets another
            full = most is not None and counts[replica] >= most
            heapreplace(next_share, (math.inf if full else share, replica))
        if sum(counts) != size:
            raise PlanError(
                f"a global batch of {size} micro-batches is too small for {len(counts)} replicas "
                f"with at least {max(self.least, 1)} each; skip it, or make it larger"
            )
        return Split(counts=tuple(counts), least=self.least)

    def problem(self, counts: Sequence[int], most: int | None = None) -> str:
        """Why another split of the same global batch cannot be used; "" it can."""
        if len(counts) != len(self.counts):
            return f"{len(counts)} counts for {len(self.counts)} replicas"
        if sum(counts) != self.size:
            return f"{list(counts)} make {sum(counts)} micro-batches, not {self.size}"
        if min(counts) < max(self.least, 1):
            return f"a replica needs {max(self.least, 1)} micro-batches or more, not {min(counts)}"
        if most is not None and max(counts) > most:
            return f"a replica can run {most} micro-batches at most, not {max(counts)}"
        return ""
