"""The even split, ordered by a controller that knows no reason for another one, until it is there.

In: what the journal says was in force, or workers tell, and answers to the order. Out: when to give
it again:

    back = left_by(past, (8, 8, 8, 8), "auto")      # None: the split is even
    back.fail(now_s)                                # True while it is to be tried again
    back.is_due(now_s + 30.0)                       # True
"""

from __future__ import annotations

from failslow.pipeline.past import Past
from failslow.records import Decision, Plan, SteerMode

__all__ = ["TakeBack", "even_again", "left_by"]

_TRIES = 4
_RETRY_S = 30.0
"""After the first failure; twice as long after each further one."""


class TakeBack:
    """decision: to order the even split. split: in force until then, as far as is known."""

    def __init__(self, decision: Decision, split: tuple[int, ...]) -> None:
        self.decision, self.split = decision, split
        self._failures = 0
        self._due_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """It is to be ordered again."""
        return self._due_s is not None and now_s >= self._due_s

    def order(self) -> Decision:
        """It is ordered now."""
        self._due_s = None
        return self.decision

    def fail(self, now_s: float) -> bool:
        """It was not carried out; whether that is tried again."""
        self._due_s = now_s + _RETRY_S * 2.0**self._failures
        self._failures += 1
        return self._failures < _TRIES

    def defer(self, now_s: float) -> None:
        """Another order was given meanwhile; if that fails this one is due again."""
        self._due_s = now_s


def left_by(past: Past, even: tuple[int, ...], mode: SteerMode) -> TakeBack | None:
    """What an earlier controller left to be taken back: a split that is in force, or may be by an
    order nobody answered."""
    plans = [decision.plan for decision, _ in past.unanswered.values()]
    splits = [past.microbatches, *(plan.microbatches for plan in plans if plan is not None)]
    if all(split in ((), even) for split in splits):
        return None
    episode = "" if past.episode is None else str(past.episode.tags.get("id", ""))
    return TakeBack(even_again(even, mode, episode), past.microbatches or even)


def even_again(
    even: tuple[int, ...],
    mode: SteerMode,
    episode: str = "",
    why: str = "the controller was restarted and knows no culprit",
) -> Decision:
    """Back to the even split, for no culprit's sake."""
    return Decision(
        episode=episode,
        action="restore",
        level="S1",
        from_level="S2",
        mode=mode,
        apply=True,
        culprits=(),
        lost_s=0.0,
        threshold_s=None,
        options=(),
        plan=Plan(level="S1", predicted_slowdown=1.0, microbatches=even),
        reason=f"{why}; the even split is restored",
    )
