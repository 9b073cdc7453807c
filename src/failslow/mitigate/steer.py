"""The watched job's side of steering: what happens between two steps of a training loop.

In: letters from rank 0's agent. Out: plans carried out by all workers at the same step, and letters
back (`steer_letters`). A round: rank 0 says what is ordered, every worker gets ready, all vote, and
only where all are ready is the plan in force. Rank 0 also says after how many steps the next round
is, so that rounds cost next to nothing and nobody comes to one alone.

When the workers cannot be reached the round is given up, training goes on as it was, and this
worker takes no orders any more: the training's own exchange will tell what is wrong.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from failslow.capture import hook
from failslow.comeback import against, least_hosts, meets_here
from failslow.errors import PlanError
from failslow.mailbox import MAX_LETTER
from failslow.mitigate.share import Share
from failslow.mitigate.steer_apply import Hands, refused
from failslow.mitigate.steer_group import SteerGroup
from failslow.mitigate.steer_letters import (
    TOPIC,
    Instructed,
    facts_letter,
    outcome_letter,
    pace_letter,
    read_order,
)
from failslow.records import JobFacts, Outcome
from failslow.saying import say

__all__ = ["Steering"]

_MOST_STEPS = 16
"""Orders are looked for after so many steps at the latest."""
_WARM_UP, _LEARN = 3, 12
"""Steps left out of the healthy iteration time, and steps that make it."""
_FACTS_S, _PACE_S = 30.0, 1.0
_FACTS_GROW = 256
"""Bytes by which a facts letter may become longer: an iteration time is learned."""


class Steering:
    """Made by all workers together, in a watched job only."""

    def __init__(
        self,
        hands: Hands,
        *,
        why_equal: Callable[[list[int]], str],
        listen_s: float,
        limit_s: float,
    ) -> None:
        """why_equal: tells from the replica of each rank why their counts must be equal."""
        self._hands, self._listen_s = hands, listen_s
        self._meeting: tuple[int, ...] = ()
        self._rank = dist.get_rank()
        group = SteerGroup(limit_s)
        try:
            self._hosts = self._meet(group, why_equal)
        except BaseException:
            group.close()  # so that the others do not wait for this worker
            raise
        self._ranks = hands.placement  # whoever changes places later: plans say who is where
        self._group: SteerGroup | None = group
        self._wait = 1
        """Steps until the next round."""
        self._begun_s: float | None = None
        self._steps = 0
        self._recent_s: deque[float] = deque(maxlen=9)
        self._healthy_s: list[float] = []
        self._orders: deque[Instructed] = deque()
        self._answers: deque[dict[str, Any]] = deque(maxlen=64)
        self._facts_s = self._pace_s = -1e9
        self._left_out = self._too_long()
        self._paces: deque[float] = deque(maxlen=64)
        self._behind: Share | None = None

    @property
    def facts(self) -> JobFacts:
        """What planning must know of the job."""
        hands, (pp, dp, tp) = self._hands, self._hands.place.grid
        return JobFacts(
            pp=pp,
            dp=dp,
            tp=tp,
            microbatches=hands.split.size,
            least_microbatches=max(hands.split.least, 1),
            most_microbatches=hands.most,
            ranks=self._ranks,
            hosts=self._hosts,
            iteration_s=statistics.median(self._healthy_s)
            if len(self._healthy_s) == _LEARN
            else 0.0,
            no_redistribution=hands.no_redistribution,
            no_topology_change=hands.no_topology_change,
            no_restart=hands.no_restart,
            meeting=self._meeting,
            least_hosts=least_hosts(os.environ),
        )

    def between(self, step: int) -> None:
        """All workers call it before each step. Raises only where a plan is half carried out."""
        now_s = time.monotonic()
        self._observe(now_s)
        self._wait -= 1
        if self._wait > 0 or self._group is None:
            return
        try:
            order = self._hear(self._group)
        except Exception as error:
            self._give_up(error)
            return
        if order is not None:
            self._carry_out(self._group, order, step)
        try:
            if self._rank == 0:
                self._post(time.monotonic())
            self._tell_pace(step, now_s)
        except Exception as error:  # a letter less, not a step
            say(f"a letter could not be sent: {error!r}")

    def ended(self, share: Share) -> None:
        """A step is over. A device may be behind: it is asked for the step before this one."""
        told, self._behind = self._behind, share
        pace_s = None if told is None else told.microbatch_s
        if pace_s is not None:
            self._paces.append(pace_s)

    # -- a round -----------------------------------------------------------------------------------

    def _hear(self, group: SteerGroup) -> Instructed | None:
        order: dict[str, Any] | None = None
        wait = 1
        if self._rank == 0:
            try:
                self._read()
                order = self._orders.popleft().to_plain() if self._orders else None
                wait = 1 if self._orders else self._steps_to_next()
            except Exception as error:  # whatever is wrong here, the others wait to be told
                say(f"orders could not be read: {error!r}")
        self._wait, heard = group.hear(wait, order)
        return None if heard is None else read_order(heard)

    def _read(self) -> None:
        """New orders, those that cannot be carried out answered at once."""
        box = hook.mailbox()
        for letter in box.receive(TOPIC) if box is not None else ():
            try:
                order = read_order(letter)
            except PlanError as error:
                say(f"an order is not understood: {error}")
                continue
            problem, never = self._hands.problem(order.plan)
            if problem:
                self._answer(order, error=problem, refused=never)
            else:
                self._orders.append(order)

    def _carry_out(self, group: SteerGroup, order: Instructed, step: int) -> None:
        begin_s, problem, never = time.monotonic(), "", False
        try:
            self._hands.prepare(order.plan, step)
        except Exception as error:
            problem, never = _text(error), refused(error)
        failed_s = min(self._hands.failed_s, time.monotonic())
        against = group.vote(problem, failed_s - begin_s)
        if against:
            self._hands.roll_back()
        else:
            self._hands.commit()
        self._begun_s = None  # the round is no part of a step
        if self._rank == 0:
            self._answer(order, error=against, refused=never, cost_s=time.monotonic() - begin_s)

    def _give_up(self, error: Exception) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()  # so that the others give up too, instead of waiting
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            say(
                f"rank {self._rank} takes no orders any more, as the others cannot be reached "
                f"({reason}); training goes on"
            )

    # -- letters -----------------------------------------------------------------------------------

    def _answer(
        self, order: Instructed, *, error: str, refused: bool = False, cost_s: float = 0.0
    ) -> None:
        outcome = Outcome(
            episode=order.episode,
            level=order.plan.level,
            ok=not error,
            cost_s=cost_s,
            error=error,
            refused=bool(error) and refused,
        )
        self._answers.append(outcome_letter(order.id, outcome))

    def _post(self, now_s: float) -> None:
        """Send what waits; what finds no room is sent next time."""
        box = hook.mailbox()
        if box is None:
            return
        if now_s - self._facts_s >= _FACTS_S:
            # always with the same fields, however full the box: others mean another training
            letter = {**facts_letter(self.facts), **self._left_out}
            self._facts_s = now_s if box.send(letter) else self._facts_s
        while self._answers and box.send(self._answers[0]):
            self._answers.popleft()

    def _too_long(self) -> dict[str, Any]:
        """What of a very large job's facts does not fit a letter: its hosts, and who is at each
        position, where everybody is at his own."""
        facts = facts_letter(self.facts)
        left_out: dict[str, Any] = {}
        for name in ("hosts", "ranks"):
            text = json.dumps({**facts, **left_out}, separators=(",", ":"))
            if len(text) <= MAX_LETTER - _FACTS_GROW:
                break
            if name == "hosts" or self._ranks == tuple(range(len(self._ranks))):
                left_out[name] = ()
        return left_out

    def _tell_pace(self, step: int, now_s: float) -> None:
        box = hook.mailbox()
        if box is None or not self._paces or now_s - self._pace_s < _PACE_S:
            return
        place, counts = self._hands.place, self._hands.split.counts
        letter = pace_letter(
            rank=self._rank,
            step=step,
            microbatches=counts[place.replica],
            microbatch_s=statistics.median(self._paces),
        )
        self._paces.clear()
        self._pace_s = now_s
        box.send(letter)

    # -- what is known -----------------------------------------------------------------------------

    def _meet(self, group: SteerGroup, why_equal: Callable[[list[int]], str]) -> tuple[str, ...]:
        """Learn of the others; the host of each rank. It raises as making a group does."""
        place = self._hands.place
        words = group.gather(
            host=socket.gethostname(),
            at=place.position,
            of=place.grid,
            meets=meets_here(os.environ),
        )
        ranks = [-1] * len(words)
        for rank, told in enumerate(words):
            if told.get("of") != list(place.grid):
                raise PlanError(
                    f"rank {rank} is in a grid of {told.get('of')} and rank {self._rank} in one of "
                    f"{list(place.grid)}; give all the same"
                )
            ranks[told["at"]] = rank
        if -1 in ranks:
            raise PlanError(
                f"no rank is at position {ranks.index(-1)} of a grid of {list(place.grid)}; give "
                "each rank its own place"
            )
        self._hands.placement = tuple(ranks)
        dp, tp = place.grid[1:]
        replica_of = [told["at"] // tp % dp for told in words]
        reason = why_equal(replica_of)
        hands = self._hands
        told_all = group.gather(
            why=reason[:250],
            stays=against(os.environ)[:200],
            # without a callback it never comes where the others wait for it
            moves=hands.no_topology_change,
            saves=hands.no_restart,
        )
        # a record that did not fit is a reason, too
        reasons = [str(told.get("why") or told.get("no") or "") for told in told_all]
        hands.no_redistribution = next((why for why in reasons if why), "")
        stays = (str(told.get("stays", "")) for told in told_all)
        hands.no_comeback = next((why for why in stays if why), "")
        hands.others_stay = _first(told_all, "moves")
        hands.others_lose = _first(told_all, "saves")
        self._meeting = tuple(rank for rank, told in enumerate(words) if told.get("meets"))
        return tuple(str(told["host"]) for told in words)

    def _observe(self, now_s: float) -> None:
        """Learn how long steps take."""
        if self._begun_s is not None:
            took_s = now_s - self._begun_s
            self._recent_s.append(took_s)
            self._steps += 1
            if self._steps > _WARM_UP and len(self._healthy_s) < _LEARN:
                self._healthy_s.append(took_s)
                if len(self._healthy_s) == _LEARN:
                    self._facts_s = -1e9  # tell them anew
        self._begun_s = now_s

    def _steps_to_next(self) -> int:
        if not self._recent_s:
            return 1
        typical_s = max(statistics.median(self._recent_s), 1e-6)
        return max(1, min(_MOST_STEPS, round(self._listen_s / typical_s)))


def _first(told_all: Sequence[dict[str, Any]], what: str) -> str:
    """Who told a reason first."""
    reasons = (f"rank {r}: {told[what]}" for r, told in enumerate(told_all) if told.get(what))
    return next(reasons, "")


def _text(error: Exception) -> str:
    """Of a trainer's own exception, too, that cannot tell it: the others wait for the vote."""
    try:
        return f"{error}" or repr(error)
    except Exception:
        return type(error).__name__
