"""An agent's part in a pause: it knows where its workers are and hands words on. Pure.

In: orders of the controller, letters of its workers, how many calls each has made, time. Out:
letters, signs of life, reports:

    node = PauseNode()
    node.order({"do":"survey","id":81,"lead_s":0.75}, now_s)
    node.turn([WorkerView(rank=3, counts=(GroupCount(0, "0 gloo", 4, 811),), …)], now_s)
    # [Tell(rank=3, body={"say":"groups","id":81,"groups":[["0 gloo",811,9,0.07]],…})]

A worker counts its calls in shared memory before it looks at the attention word. So once the word
is set, a count that is still below the boundary proves that the worker will stop there: the agent
can say "armed" for a worker that makes no call for a minute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from failslow.localize.pause_worker import TOPIC
from failslow.localize.script_wire import share, unpack

__all__ = ["Action", "Attend", "GroupCount", "PauseNode", "Post", "Tell", "WorkerView"]

_FAST_S = 0.01
_KEPT = 256
_CHANGES = 3
"""Times a count must have been seen to rise before its pace is known."""
_GRACE_S = 0.5
"""A worker past the boundary may be about to say that it stands there."""
_SPARE_S = 2.0


class GroupCount(NamedTuple):
    """One process group that spans all workers, as one of them knows it."""

    number: int
    """By which the worker knows it."""
    key: str
    """By which all workers know it."""
    calls: int
    """Collectives the worker has begun on it since it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker of the node at the moment."""

    rank: int
    alive: bool
    speaks: bool
    """It has a mailbox."""
    counts: tuple[GroupCount, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Send the worker a letter."""

    rank: int
    letter: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attend:
    """Give the worker a sign of life, now."""

    rank: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Report to the controller."""

    rank: int
    body: dict[str, Any]


Action = Post | Attend | Tell


class _Pace:
    """How a worker's calls on one group come along."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)
        """(when the count was seen to rise, to what, seconds since it rose before)."""
        self._seen = -1
        self._stood = False

    def see(self, count: int, now_s: float, *, stands: bool) -> None:
        """stands: the worker is held by a pause, which says nothing of its pace."""
        self._stood = self._stood or stands
        if count < self._seen:  # the group was made anew
            self._changes.clear()
            self._seen = -1
        if count != self._seen:
            if self._seen >= 0:
                since_s = now_s - self._changes[-1][0] if self._changes else 0.0
                self._changes.append((now_s, count, 0.0 if self._stood else since_s))
            self._seen, self._stood = count, stands

    def gap_s(self) -> float:
        """The longest time without a call."""
        return max((gap_s for _, _, gap_s in self._changes), default=0.0)

    def moves(self, now_s: float) -> bool:
        """Whether calls can be expected to go on coming."""
        if len(self._changes) < _CHANGES:
            return False
        return now_s - self._changes[-1][0] <= 3.0 * self.gap_s() + 1.0

    def most(self, window_s: float) -> int:
        """The most calls that were made within `window_s`."""
        changes = list(self._changes)
        best, first = 0, 0
        for t, count, _ in changes:
            while t - changes[first][0] > window_s:
                first += 1
            # what rose at `first` was made since the look before it
            before = changes[first - 1][1] if first else changes[0][1] - 1
            best = max(best, count - before)
        return best


@dataclass(slots=True)
class _Part:
    """One worker's part in the pause in hand."""

    at: int
    number: int
    said: set[str] = field(default_factory=set)
    calls: int = 0
    """How many it had made when it was last looked at."""
    past_s: float | None = None
    """Since when its count has been seen beyond the boundary."""
    over: bool = False


class PauseNode:
    """Follows one pause at a time; a newer order replaces an older one."""

    def __init__(self) -> None:
        self._paces: dict[tuple[int, str], _Pace] = {}
        self._views: dict[int, WorkerView] = {}
        self._out: list[Action] = []
        self._surveys: list[Mapping[str, Any]] = []
        self._order: Mapping[str, Any] | None = None
        self._id = 0
        self._until_s = 0.0
        self._parts: dict[int, _Part] = {}
        self._committed = False

    @property
    def busy(self) -> bool:
        """A pause is in hand: turns should follow one another closely."""
        return bool(self._parts or self._order or self._surveys or self._out)

    @property
    def pace_s(self) -> float:
        """How soon the next turn should come."""
        waiting = self._committed or any("ready" in part.said for part in self._parts.values())
        return _FAST_S if self._parts and waiting else math.inf

    def order(self, body: Mapping[str, Any], now_s: float) -> None:
        """Take an order. Raises KeyError, TypeError or ValueError when it is none."""
        what, number = body["do"], int(body["id"])
        if what == "survey":
            self._surveys.append(body)
        elif what == "arm" and number > self._id:
            script = unpack(body["script"])
            self._drop(now_s)
            self._order, self._id, self._committed = {**body, "script": script}, number, False
            self._until_s = now_s + float(body["for_s"])
        elif what == "commit" and number == self._id and not self._committed:
            self._committed = True
            self._until_s = now_s + float(body["limit_s"]) + _SPARE_S
            for rank, part in self._parts.items():
                if not part.over:
                    self._post(rank, {"do": "commit"}, number, now_s)
        elif what == "release" and number == self._id and not self._committed:
            self._drop(now_s)

    def letter(self, rank: int, letter: Mapping[str, Any], now_s: float) -> None:
        """A worker says something of the pause."""
        del now_s
        body = {name: value for name, value in letter.items() if name != "topic"}
        part = self._parts.get(rank)
        if part is not None and body.get("id") == self._id:
            part.said.add(str(body.get("say")))
            if body.get("say") in ("late", "left", "refused", "done"):
                part.over = True
        self._out.append(Tell(rank, body))

    def refused(self, rank: int, letter: Mapping[str, Any]) -> None:
        """There was no room for this letter."""
        if letter.get("do") == "arm" and letter.get("id") == self._id:
            self._fail(rank, "its mailbox is full, or the script too long for it")

    def turn(self, views: Sequence[WorkerView], now_s: float) -> list[Action]:
        """What to do now, in this order. Again at once, with fresh views, after arming."""
        self._views = {view.rank: view for view in views}
        for view in views:
            stands = "ready" in self._parts[view.rank].said if view.rank in self._parts else False
            for group in view.counts:
                pace = self._paces.setdefault((view.rank, group.key), _Pace())
                pace.see(group.calls, now_s, stands=stands)
        for survey in self._surveys:
            for view in views:
                self._answer(view, survey, now_s)
        self._surveys.clear()
        if self._order is not None:
            order, self._order = dict(self._order), None
            order["script"] = share(order["script"], [view.rank for view in views])
            for view in views:
                if view.alive:
                    self._arm(view, order, now_s)
        elif self._parts:
            self._follow(now_s)
        out, self._out = self._out, []
        return out

    # -- parts -------------------------------------------------------------------------------------

    def _answer(self, view: WorkerView, survey: Mapping[str, Any], now_s: float) -> None:
        if not view.alive:
            return
        groups = []
        for group in view.counts:
            pace = self._paces[view.rank, group.key]
            if pace.moves(now_s):
                most = pace.most(float(survey["lead_s"]))
                groups.append([group.key, group.calls, most, round(pace.gap_s(), 3)])
        body = {"say": "groups", "id": int(survey["id"]), "groups": groups, "speaks": view.speaks}
        self._out.append(Tell(view.rank, body))

    def _arm(self, view: WorkerView, order: Mapping[str, Any], now_s: float) -> None:
        number = next((c.number for c in view.counts if c.key == order["group"]), None)
        part = _Part(at=int(order["at"]), number=-1 if number is None else number)
        self._parts[view.rank] = part
        if number is None:
            self._fail(view.rank, f"it has no group {order['group']!r} any more")
            return
        names = ("at", "hold_s", "for_s", "script", "limit_s")
        letter = {"do": "arm", "group": number, **{name: order[name] for name in names}}
        self._post(view.rank, letter, self._id, now_s)

    def _follow(self, now_s: float) -> None:
        for rank, part in self._parts.items():
            if part.over:
                continue
            view = self._views.get(rank)
            if view is None or not view.alive:
                part.over = True
                self._out.append(Tell(rank, {"say": "gone", "id": self._id}))
                continue
            self._out.append(Attend(rank))
            if "ready" not in part.said:
                self._watch(rank, part, view, now_s)
        if now_s > self._until_s and not self._committed:
            self._drop(now_s)
        elif now_s > self._until_s or all(part.over for part in self._parts.values()):
            self._parts.clear()

    def _watch(self, rank: int, part: _Part, view: WorkerView, now_s: float) -> None:
        """Whether the worker was armed in time, by its own count."""
        count = next((c.calls for c in view.counts if c.number == part.number), 0)
        before, part.calls = part.calls, count
        if count < before:  # the group was made anew, and counts begin anew with it
            self._late(rank, part, count, now_s)
        elif "armed" in part.said:
            return
        elif count < part.at:
            part.said.add("armed")
            self._out.append(Tell(rank, {"say": "armed", "id": self._id, "count": count}))
        elif part.past_s is None:
            part.past_s = now_s
        elif now_s - part.past_s > _GRACE_S:
            self._late(rank, part, count, now_s)

    def _late(self, rank: int, part: _Part, count: int, now_s: float) -> None:
        part.over = True
        late = {"say": "late", "id": self._id, "count": count, "at": part.at}
        self._out.append(Tell(rank, late))
        self._post(rank, {"do": "release"}, self._id, now_s)

    def _drop(self, now_s: float) -> None:
        """Let go all who are not yet out of the pause in hand."""
        for rank, part in self._parts.items():
            if not part.over:
                self._post(rank, {"do": "release"}, self._id, now_s)
        self._parts.clear()
        self._order = None

    def _post(self, rank: int, letter: dict[str, Any], number: int, now_s: float) -> None:
        del now_s
        # the letter first: who sees the sign must find it
        self._out += [Post(rank, {"topic": TOPIC, "id": number, **letter}), Attend(rank)]

    def _fail(self, rank: int, why: str) -> None:
        self._parts[rank].over = True
        self._out.append(Tell(rank, {"say": "refused", "id": self._id, "why": why}))
