"""Follows the calls of a known program and tells where its iterations begin.

In: rows and their symbols, a `Unit`. Out: a `Crossing` each time the anchor call goes by:

    Crossing(at_ns=81_231_004_112, calls=306, ..., foreign=0, clean=True)

On track each call is the one expected. A call that is not sends the follower astray, until the
last few calls again match a place in the unit: the very place it left (calls were inserted) or
another one (records were lost, an iteration was cut short).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from failslow.track.rows import Rows
from failslow.track.units import Unit

__all__ = ["Crossing", "Follower", "crossings"]

_GRAM = 8
"""Calls in a row that must match to be back on track."""
_REACH = 4096
"""Calls kept while astray: how far back a regained track is followed."""
_PIECE = 64
"""Calls looked at at once while astray: the track is mostly found again soon."""
_SLIPS = 4
"""Bursts in a row that do not begin after a long gap: they are cut at the wrong place."""
_PRIME = 0x100000001B3
_WORD = (1 << 64) - 1


class Crossing(NamedTuple):
    """The anchor call, or a step mark, went by."""

    at_ns: int
    """When the caller came back from it. A call starts when its rank happens to be ready; all
    ranks return when the last one was, and what is left of the iteration is short."""
    calls: int
    moved_bytes: int
    blocked_ns: int
    unwaited: int
    foreign: int = 0
    """Calls since the crossing before that are not of the iteration."""
    clean: bool = True
    """On track all the way since the crossing before."""
    opens: bool = False
    """What went before is unknown: it ends no iteration."""
    work: int = 0
    """Tokens or samples of the iteration it ends, if the trainer told; 0 unknown."""


def crossings(rows: Rows) -> list[Crossing]:
    """One for each row."""
    blocked_ns = rows["blocked_ns"] + rows["own_ns"]
    columns = (rows["until_ns"], rows["calls"], rows["moved_bytes"], blocked_ns, rows["unwaited"])
    return [Crossing(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class Follower:
    """The place in the unit, call by call. Starts astray: anywhere in an iteration."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.length = len(unit.keys)
        self._tile = np.tile(unit.keys, 1 + -(-_REACH // self.length))
        self._gram = min(_GRAM, self.length)
        self._places = _unique_grams(self._tile, self.length, self._gram)
        self._alphabet = np.unique(unit.keys)
        self._position: int | None = None
        self._expected: int | None = None
        self._recent: deque[tuple[int, Crossing]] = deque(maxlen=_REACH + self._gram)
        self._fed = 0
        self._last_anchor: int | None = None
        self._clean = False
        self._misses = 0
        self.astray = 0
        """Calls since the track was lost; 0 on track."""
        self.found: list[Crossing] = []
        """Crossings since the list was last taken."""

    @property
    def on_track(self) -> bool:
        """The next call is known."""
        return self._position is not None

    def lose(self) -> None:
        """Records were lost: the place is unknown, and so is the iteration under way."""
        self._position = self._expected = self._last_anchor = None
        self._recent.clear()
        self._clean = False
        self._misses = self.astray = 0

    def feed(self, rows: Rows, keys: NDArray[np.uint64]) -> int:
        """Take rows and add to `found`; returns how many were taken, perhaps not all.

        It stops after the row that regains the track and before the one that leaves it.
        """
        return self._search(rows, keys) if self._position is None else self._go(rows, keys)

    def _go(self, rows: Rows, keys: NDArray[np.uint64]) -> int:
        taken, position, length = 0, self._position or 0, self.length
        while taken < len(keys):
            count = min(len(keys) - taken, len(self._tile) - position)
            equal = keys[taken : taken + count] == self._tile[position : position + count]
            good = count if equal.all() else int(np.argmin(equal))
            slip = self._slip(rows[taken : taken + good], -position % length)
            good = good if slip is None else slip + 1
            passed = np.arange((self.unit.anchor - position) % length, good, length)
            if len(passed):
                self._cross(crossings(rows[taken + passed]), self._fed + passed)
            taken += good
            self._fed += good
            if slip is not None:
                self.lose()
                return taken
            position = (position + good) % length
            if good < count:
                self._position, self._expected = None, position
                self._recent.clear()
                self._clean = False
                self.astray = 0
                return taken
        self._position = position
        return taken

    def _slip(self, rows: Rows, first: int) -> int | None:
        """The call that shows that bursts are cut at the wrong place, if one does.

        Bursts begin at `first` and then every `length` calls.
        """
        if not self.unit.burst_ns:
            return None
        for index, gap_ns in enumerate(rows["gap_ns"][first :: self.length].tolist()):
            self._misses = 0 if gap_ns >= self.unit.burst_ns else self._misses + 1
            if self._misses == _SLIPS:
                return first + index * self.length
        return None

    def _search(self, rows: Rows, keys: NDArray[np.uint64]) -> int:
        rows, keys = rows[:_PIECE], keys[:_PIECE]
        known = np.isin(keys, self._alphabet).tolist()
        for index, (key, row) in enumerate(zip(keys.tolist(), crossings(rows), strict=True)):
            self._recent.append((key, row))
            self._fed += 1
            self.astray += 1
            if known[index]:
                found = self._place(int(rows["gap_ns"][index]))
                if found is not None:
                    self._regain(*found)
                    return index + 1
        return len(keys)

    def _place(self, gap_ns: int) -> tuple[int, int] | None:
        """(place in the unit, how many calls ago it was), if the last calls tell it."""
        gram, recent = self._gram, self._recent
        if self._expected is None and self.unit.burst_ns:
            return (0, 1) if gap_ns >= self.unit.burst_ns else None
        if len(recent) < gram:
            return None
        last = [recent[index][0] for index in range(-gram, 0)]
        if self._expected is not None:
            places = [self._expected]
            if self.astray <= 2 * gram:  # a call or two were others, or in another order
                places.append((self._expected + self.astray - gram) % self.length)
            for place in places:
                if last == self._tile[place : place + gram].tolist():
                    return place, gram
        value = 0
        for key in last:
            value = (value * _PRIME + key) & _WORD
        hashes, starts = self._places
        index = int(np.searchsorted(hashes, np.uint64(value)))
        if index < len(hashes) and int(hashes[index]) == value:
            return int(starts[index]), gram
        return None

    def _regain(self, place: int, back: int) -> None:
        """On track again from `place` on; what matches just before was on track already."""
        kept = len(self._recent)
        if self.unit.burst_ns and self._expected is None:
            kept = back  # calls are alike: all before would match, whether they belong or not
        while back < kept and back < self.length:
            if self._recent[-back - 1][0] != int(self._tile[(place - 1) % self.length]):
                break
            place = (place - 1) % self.length
            back += 1
        first = (self.unit.anchor - place) % self.length
        # Where the track was not left here, an anchor at the very begin may be a foreign call
        # that looks like it, before the first that really is on track.
        sure = place == self._expected
        for offset in range(first, back, self.length):
            if offset < 2 and not sure:
                continue
            self._cross([self._recent[offset - back][1]], np.array([self._fed - back + offset]))
        self._position = (place + back) % self.length
        self._recent.clear()
        self.astray = 0

    def _cross(self, passed: list[Crossing], at: NDArray[np.int64]) -> None:
        for crossing, index in zip(passed, at.tolist(), strict=True):
            last, self._last_anchor = self._last_anchor, index
            if last is None:
                self.found.append(crossing._replace(opens=True, clean=self._clean))
            elif self._clean:
                self.found.append(crossing)
            else:
                foreign = max(0, index - last - self.length)
                self.found.append(crossing._replace(foreign=foreign, clean=False))
            self._clean = True


def _unique_grams(
    tile: NDArray[np.uint64], length: int, gram: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes, ascending, of the runs of `gram` symbols found at one place only; those places."""
    with np.errstate(over="ignore"):
        hashes = np.zeros(length, np.uint64)
        for offset in range(gram):
            hashes = hashes * np.uint64(_PRIME) + tile[offset : offset + length]
    values, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return values[counts == 1], first[counts == 1]
