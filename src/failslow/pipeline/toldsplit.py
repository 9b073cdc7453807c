"""Whether the workers run the split they are believed to run, by what they tell. Pure.

In: the micro-batches of each letter of pace. Out: the split they all tell of, where it is another:

    told.tell(3, 8)                             # rank 3 runs eight
    told.other(facts, in_force, now_s)          # (8, 8, 8, 8), once they have told so for a while

An answer to an order may be lost on its way, or another training may have begun that nobody spoke
of. Letters from before a plan may come after its outcome, so one round of them proves nothing.
"""

from __future__ import annotations

from failslow.decide import InForce
from failslow.records import JobFacts

__all__ = ["ToldSplit"]

_EVERY_S = 5.0
_ROUNDS = 3
"""So many rounds of letters, all of which tell of the same other split, are believed."""


class ToldSplit:
    """Of one job."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self._other: tuple[int, ...] = ()
        self._rounds = 0
        """In which they told of that one."""
        self._looked_s = 0.0

    def tell(self, rank: int, microbatches: object) -> None:
        """A worker tells how many it runs."""
        if isinstance(microbatches, int):
            self._told[rank] = microbatches

    def forget(self) -> None:
        """It is another split since, as far as is known."""
        self._told.clear()
        self._other, self._rounds = (), 0

    def other(self, facts: JobFacts, in_force: InForce, now_s: float) -> tuple[int, ...] | None:
        """The split they run, if it is not the one in force."""
        if not self._told or now_s - self._looked_s < _EVERY_S:
            return None
        self._looked_s = now_s
        split = self._split(facts, in_force.placement)
        if split is None:
            return None
        self._told.clear()
        if split != self._other:
            self._other, self._rounds = split, 0
        self._rounds += 1
        is_other = split != in_force.microbatches and sum(split) == facts.microbatches
        return split if is_other and self._rounds >= _ROUNDS else None

    def _split(self, facts: JobFacts, placement: tuple[int, ...]) -> tuple[int, ...] | None:
        """As told of each replica by any of its workers; None: not of all, or not alike."""
        counts: dict[int, int] = {}
        for position, rank in enumerate(placement):
            told = self._told.get(rank)
            if told is None:
                continue
            if counts.setdefault(position // facts.tp % facts.dp, told) != told:
                self._told.clear()
                return None
        if len(counts) < facts.dp:
            return None
        return tuple(counts[replica] for replica in range(facts.dp))
