"""Iteration boundaries from the call stream alone: find the period, then follow it.

In: rows of collectives. Out: `Crossing`s. Three things go on, each when there is reason to:

    following   once a unit is known: every call is held against it
    buffering   while there is none, while the one there is may still prove to be a part of a
                longer one, and while the follower is astray: what comes may be a new program
    searching   in all that is kept for a longer unit, in what came since the track was left for
                a new program; at lengths that grow by an eighth or a quarter, so that the work
                stays in proportion to the calls and does not depend on how they are divided

Crossings of a unit that may be a loop inside an iteration are held back until that is settled.
"""

from __future__ import annotations

import numpy as np

from failslow.track.follow import Crossing, Follower
from failslow.track.rows import ROW, Rows
from failslow.track.units import OpKinds, Unit, find_unit

__all__ = ["PeriodFollower"]

_PIECE = 1 << 12
"""Rows handed to the follower at once."""
_FIRST_SEARCH = 9
_PROBATION = 128
"""Repeats for which a unit may still prove to be a part of a longer one,"""
_PROBATION_CALLS = 1 << 13
"""and the least number of calls;"""
_WEAK_PROBATION_CALLS = 1 << 16
"""of calls for one not found from the calls as they are."""
_SHORT = 2
"""Calls of a unit that may easily be a loop inside an iteration. Its iterations, and those of a
unit without a call on the widest group seen, are held back until there were"""
_SHORT_REPEATS = 64
"""of them, for a step mark to come first or a longer unit to show."""
_ESTABLISHED = 16
"""Iterations after which calls that do not fit may be a new program, not a longer unit."""
_WHOLE_ITERATIONS = 3
"""Iterations' worth of calls to see before a loop may be a program of its own."""
_CLEAN_ENOUGH = 3
"""Iterations without a foreign call after which what was astray is forgotten."""
_DIRTY_ENOUGH = 4
"""Iterations in a row with foreign calls after which the program may be a new one."""


class _Buffer:
    """Rows in order; room doubles as needed."""

    def __init__(self) -> None:
        self._room = np.empty(64, ROW)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Rows:
        rows: Rows = self._room[: self._count]
        return rows

    def extend(self, rows: Rows) -> None:
        need = self._count + len(rows)
        if need > len(self._room):
            larger = np.empty(max(need, 2 * len(self._room)), ROW)
            larger[: self._count] = self.rows
            self._room = larger
        self._room[self._count : need] = rows
        self._count = need

    def keep_last(self, count: int) -> None:
        self._room = self.rows[self._count - count :].copy()
        self._count = count


class PeriodFollower:
    """The one source that needs no mark. `feed` takes rows of collectives, in any division."""

    def __init__(self, ops: OpKinds, capacity: int) -> None:
        self.unit: Unit | None = None
        self.generation = 0
        """Grows with every unit that replaces another."""
        self.fed = False
        """Rows have been taken."""
        self._ops, self._capacity = ops, capacity
        self._follower: Follower | None = None
        self._buffer: _Buffer | None = _Buffer()
        self._next_search = _FIRST_SEARCH
        self._left_at: int | None = None
        """Length of the buffer when the track was left, until it is regained for good."""
        self._next_tail_search = 0
        self._probation_calls = 0
        """Length of the buffer at which the unit is past doubt; 0: it is."""
        self._doubt = self._trusted = False
        self._held: list[Crossing] = []
        """Crossings of a unit in doubt, or not yet trusted."""
        self._out: list[tuple[int, Crossing]] = []
        self._given_ns = -(1 << 62)
        self._crossed = self._dirty = self._clean = 0
        self._min_bytes = self._widest = 0

    @property
    def locked(self) -> bool:
        """A unit is known and the calls follow it, foreign stretches allowed."""
        follower = self._follower
        return follower is not None and follower.astray <= 4 * follower.length + 256

    @property
    def buffered(self) -> int:
        """Calls kept."""
        return 0 if self._buffer is None else len(self._buffer)

    def lose(self) -> None:
        """Records were lost here."""
        if self._follower is None:
            self._start_buffer()
        else:
            self._settle()
            self._follower.lose()
            self._drop_buffer()

    def feed(self, rows: Rows) -> list[tuple[int, Crossing]]:
        """The boundaries crossed in `rows`, each with the generation of its unit."""
        taken = 0
        self.fed = self.fed or len(rows) > 0
        while taken < len(rows):
            used = self._take(rows[taken : taken + self._room()])
            if used:
                widest = rows["group_size"][taken : taken + used].max()
                self._widest = max(self._widest, int(widest))
            taken += used
            self._act()
        out, self._out = self._out, []
        return out

    def finish(self) -> list[tuple[int, Crossing]]:
        """No more rows will come: the boundaries held back."""
        if not self._doubt:
            self._settle()
        out, self._out = self._out, []
        return out

    def _room(self) -> int:
        """Calls to take at once: until something is due at a length of the buffer."""
        if self._buffer is None:
            return _PIECE
        due = [self._next_search, self._capacity, len(self._buffer) + _PIECE]
        if self._left_at is not None:
            due.append(self._next_tail_search)
        if self._probation_calls:
            due.append(self._probation_calls)
        return min(due) - len(self._buffer)

    def _take(self, piece: Rows) -> int:
        """Follow and buffer rows until the track is lost or regained; returns how many."""
        follower = self._follower
        if follower is None:
            self._keep(piece)
            return len(piece)
        was_on_track, astray = follower.on_track, follower.astray
        used, fed = _step(follower, piece)
        self._keep(piece[:used])
        if not was_on_track and follower.on_track and self._probation_calls:
            self._doubt = self._doubt or self._is_news(astray + fed)
        self._count(follower)
        if was_on_track and not follower.on_track and self._left_at is None:
            if self._buffer is None:
                self._start_buffer()
            self._left_at = self.buffered
            self._next_tail_search = self._left_at + _FIRST_SEARCH
        return used

    def _count(self, follower: Follower) -> None:
        """Pass crossings on, and forget what was astray once it is on track for good."""
        found, follower.found = follower.found, []
        for crossing in found:
            self._dirty = 0 if crossing.clean else self._dirty + 1
            self._clean = self._clean + 1 if crossing.clean else 0
        self._crossed += len(found)
        self._pass_on(found)
        if follower.on_track and self._clean >= _CLEAN_ENOUGH:
            self._left_at = None
            if not self._probation_calls:
                self._buffer = None

    def _act(self) -> None:
        """Do what is due at this length of the buffer."""
        full = self.buffered >= self._capacity
        if self._buffer is not None and (full or len(self._buffer) >= self._next_search):
            self._next_search = _later(len(self._buffer), len(self._buffer))
            if self._may_search():
                self._search(self._buffer.rows, tail=False)
        if self._buffer is not None and self._left_at is not None:
            tail = len(self._buffer) - self._left_at
            if len(self._buffer) >= self._next_tail_search:
                self._next_tail_search = _later(len(self._buffer), tail)
                if self._may_search_tail():
                    self._search(self._buffer.rows[self._left_at :], tail=True)
        if self._probation_calls and self.buffered >= self._probation_calls:
            self._end_probation()
        if self.buffered >= self._capacity:
            self._shorten_buffer(self._capacity // 2)

    def _may_search(self) -> bool:
        """No unit is known, or the one there is may be a part of a longer one."""
        follower, unit = self._follower, self.unit
        if follower is None or unit is None:
            return True
        unsure = self._doubt or unit.strength < 2 or not follower.on_track
        return bool(self._probation_calls) and unsure

    def _may_search_tail(self) -> bool:
        """An established unit does not fit any more."""
        if self._follower is None or (self._probation_calls and self._crossed < _ESTABLISHED):
            return False
        return not self._follower.on_track or self._dirty >= _DIRTY_ENOUGH

    def _search(self, rows: Rows, *, tail: bool) -> None:
        unit = find_unit(rows, self._ops, min_bytes=self._min_bytes)
        if unit is None:
            return
        old = self.unit
        if old is None:
            self._adopt(unit, rows)
        elif old.same(unit):
            self._dirty = 0
            if not tail:
                self._doubt = False
                self._pass_on([])
        elif self._replaces(unit, old, len(rows), tail):
            if tail and not self._doubt:
                self._settle()  # another program, not a longer unit: what was held is right
            self.generation += 1
            self._adopt(unit, rows)

    def _replaces(self, unit: Unit, old: Unit, count: int, tail: bool) -> bool:
        """Whether a unit found in the last `count` calls is to be followed rather than `old`."""
        if not self.locked:
            return True
        if unit.strength != old.strength:
            return unit.strength > old.strength
        if unit.inside(old):  # perhaps a loop in an iteration of which no more was seen
            return not self._doubt and self._lost and count >= _WHOLE_ITERATIONS * len(old.keys)
        if self._doubt:
            return True
        return not unit.several(old, self._ops) and (tail or self._lost)

    @property
    def _lost(self) -> bool:
        follower = self._follower
        return follower is not None and follower.astray > 2 * follower.length + 32

    def _adopt(self, unit: Unit, rows: Rows) -> None:
        """Follow `unit` from the first of `rows`: what passed while searching is timed too."""
        self.unit = unit
        self._follower = follower = Follower(unit)
        self._min_bytes = unit.weighty_bytes(self._ops)
        self._doubt, self._held = False, []
        self._trusted = (
            len(unit.keys) > _SHORT
            and not unit.burst_ns
            and int(unit.rows["group_size"].max()) >= self._widest
        )
        self._crossed = self._dirty = self._clean = 0
        self._left_at = None
        taken = 0
        while taken < len(rows):
            taken += _step(follower, rows[taken : taken + _PIECE])[0]
        follower.found = [c for c in follower.found if c.at_ns > self._given_ns]
        if follower.found:
            follower.found[0] = follower.found[0]._replace(opens=True)
        least = _PROBATION_CALLS if unit.strength == 2 else _WEAK_PROBATION_CALLS
        self._probation_calls = min(max(_PROBATION * len(unit.keys), least), self._capacity // 2)
        self._count(follower)
        if self.buffered >= self._probation_calls:
            self._end_probation()

    def _is_news(self, count: int) -> bool:
        """Whether the last `count` calls hold work that the unit lacks."""
        if self._buffer is None or self.unit is None:
            return False
        rows = self._buffer.rows[max(0, len(self._buffer) - count) :]
        return bool(self.unit.foreign_work(rows, self._ops).any())

    def _end_probation(self) -> None:
        self._settle()
        self._probation_calls = 0
        if self._follower is not None and self._follower.on_track:
            self._drop_buffer()
        elif self._left_at is not None:
            self._shorten_buffer(self.buffered - self._left_at)

    def _settle(self) -> None:
        """The unit is taken to be right."""
        self._doubt, self._trusted = False, True
        self._pass_on([])

    def _pass_on(self, found: list[Crossing]) -> None:
        """Give out crossings, or hold them while the unit is not sure."""
        self._held += found
        self._trusted = self._trusted or len(self._held) > _SHORT_REPEATS
        if self._held and self._trusted and not self._doubt:
            held, self._held = self._held, []
            self._given_ns = held[-1].at_ns
            self._out += [(self.generation, crossing) for crossing in held]

    def _start_buffer(self) -> None:
        self._buffer = _Buffer()
        self._next_search = _FIRST_SEARCH

    def _drop_buffer(self) -> None:
        self._buffer = self._left_at = None
        self._probation_calls = self._clean = 0

    def _shorten_buffer(self, count: int) -> None:
        if self._buffer is None:
            return
        dropped = len(self._buffer) - count
        self._buffer.keep_last(count)
        if self._left_at is not None:
            self._left_at = max(0, self._left_at - dropped)
            self._next_tail_search = _later(count, count - self._left_at)
        self._next_search = _later(count, count)

    def _keep(self, rows: Rows) -> None:
        if self._buffer is not None:
            self._buffer.extend(rows)


def _later(count: int, searched: int) -> int:
    """When to search next, having searched `searched` calls at `count`."""
    return count + max(1, searched // (8 if searched < 1 << 14 else 4))


def _step(follower: Follower, rows: Rows) -> tuple[int, int]:
    """(rows taken, calls fed): the follower sees only what its unit's view selects."""
    selected = np.flatnonzero(follower.unit.view.selects(rows))
    chosen = rows[selected]
    fed = follower.feed(chosen, follower.unit.view.keys(chosen))
    return (len(rows) if fed == len(selected) else int(selected[fed])), fed
