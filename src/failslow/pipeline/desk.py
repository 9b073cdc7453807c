"""Which orders the job's Coordinator has, and which of them may be carried out yet. Pure.

In: orders as they are given, answers by their numbers. Out: what each answer is about:

    desk.give(ordered)              # desk.asked is it, until it is answered or given up
    desk.answered(3, ok=True)       # the Ordered, or None: of no order that still counts

An order that is given up as not answered may be carried out after all, and is known then.
"""

from __future__ import annotations

from failslow.pipeline.orders import Ordered
from failslow.pipeline.takeback import TakeBack

__all__ = ["Desk"]

_MOST_UNANSWERED = 64


class Desk:
    """The orders of one job."""

    def __init__(self) -> None:
        self.asked: Ordered | None = None
        """The order that is being carried out."""
        self.unanswered: dict[int, Ordered] = {}
        """Those before it that were given up, by their ids: they may be carried out yet."""
        self.back: TakeBack | None = None
        """The split that an earlier controller left, until it is taken back."""
        self.next_id = 1
        self._settled = 0
        """The latest order that was carried out: what is in force is not of one before it."""

    @property
    def busy(self) -> bool:
        """The job may run by another plan soon, or by one that is not known."""
        return self.asked is not None or self.back is not None

    def give(self, ordered: Ordered) -> None:
        """It goes out now, and takes the place of the one before it."""
        self.next_id = max(self.next_id, ordered.number + 1)
        if self.asked is not None and self.back is not None:
            self.back.defer(ordered.asked_s)  # if this one fails, it is due again
        self.give_up()
        self.asked = ordered

    def give_up(self) -> None:
        """No answer came, which does not mean that it is not carried out yet."""
        asked, self.asked = self.asked, None
        if asked is not None:
            self.unanswered[asked.number] = asked
        for number in [*self.unanswered][:-_MOST_UNANSWERED]:
            del self.unanswered[number]

    def answered(self, number: object, *, ok: bool) -> Ordered | None:
        """The order that `number` is; None: none that is known, or answered before."""
        asked = self.asked
        if asked is not None and number == asked.number:
            self.asked = None
            ordered: Ordered | None = asked
        else:
            ordered = self.unanswered.pop(number, None) if isinstance(number, int) else None
        if ordered is not None and ok and ordered.decision.level == "S4":
            self.clear()  # the job they were for has ended
        return ordered

    def settle(self, ordered: Ordered) -> bool:
        """It was carried out; False: something else is in force since."""
        if ordered.number < self._settled:
            return False
        self._settled = ordered.number
        plan = ordered.decision.plan
        if plan is not None and plan.microbatches:
            self.back = None  # the split is known now
        return True

    def clear(self) -> None:
        """None of them counts any more."""
        self.asked, self.back = None, None
        self.unanswered = {}
