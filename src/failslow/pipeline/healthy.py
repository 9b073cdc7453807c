"""What is kept of healthy times to compare and plan by: each worker's profile. Pure.

In: profiles that agents made in healthy times, what changes. Out: those to compare with, those to
plan by, and when agents are to be asked for them:

    Order(topic="profile", body={"why": "healthy", "for_s": 3.0, "min_iterations": 8, …})

An agent makes one by itself, once its worker's iterations have been told apart for a while; it is
asked where a suspicion came first, or where the program has changed since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from failslow.pipeline.case import profile_order
from failslow.pipeline.messages import Order
from failslow.records import RankProfile

__all__ = ["AGAIN_S", "SOON_S", "HealthyProfiles"]

SOON_S, AGAIN_S = 5.0, 60.0
"""How long after a suspicion or a change of the program profiles are asked for, and again, then
after twice as long, and so on: a worker may never give one."""
_MOST_AGAIN_S = 3600.0


class HealthyProfiles:
    """Those of one job's workers."""

    def __init__(self, profiles: Mapping[int, RankProfile] | None = None) -> None:
        self.known: dict[int, RankProfile] = dict(profiles or {})
        """By rank; some may be of an earlier program. Any are better to plan by than none."""
        self._earlier: set[int] = set()
        self._due_s: float | None = None
        self._again_s = AGAIN_S

    @property
    def of_now(self) -> dict[int, RankProfile]:
        """Those of the present program: the calls of another do not compare."""
        return {rank: p for rank, p in self.known.items() if rank not in self._earlier}

    def are_of(self, ranks: Collection[int]) -> bool:
        """They are there, of the present program, of all of these workers, if there are any."""
        if not ranks or len(self.known) - len(self._earlier) < len(ranks):
            return False  # asked for each profile that comes, and sets of all ranks take long
        return self.known.keys() - self._earlier >= set(ranks)

    def take(self, profile: RankProfile) -> bool:
        """One has come; whether it was lacking."""
        rank = profile.rank
        lacking = rank not in self.known or rank in self._earlier
        self.known[rank] = profile
        self._earlier.discard(rank)
        return lacking

    def change(self, now_s: float) -> None:
        """The program is another one from here on."""
        self._earlier = set(self.known)
        self.want(now_s + SOON_S)

    def want(self, due_s: float | None) -> None:
        """Ask for them then, where some lack; None: not."""
        self._due_s, self._again_s = due_s, AGAIN_S

    def due(self, now_s: float) -> bool:
        """It is time to ask, if any lack."""
        return self._due_s is not None and now_s >= self._due_s

    def order(self, now_s: float) -> Order:
        """All agents are to make them; due again after a while."""
        self._due_s = now_s + self._again_s
        self._again_s = min(_MOST_AGAIN_S, 2.0 * self._again_s)
        return profile_order("healthy")
