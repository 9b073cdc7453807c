"""Iteration boundaries from step marks: torch's optimizer hook, or the trainer's own `step()`.

In: the mark rows of one kind. Out: a `Crossing` an iteration. Several optimizers may step in an
iteration, or only now and then:

    0 1 0 1 …         a GAN's, or one for each layer: any of them bounds iterations
    0 0 0 0 0 1 …     critic and generator, each with its own collectives: the generator's steps
    0 0 0 … 0 1 0 …   an auxiliary one, once in 5 or in 200: the main one's steps

The boundary is the one that steps most often. One that steps once every few (2 to 8) of its steps
takes its place if it brings a good part more collectives: the job's usual ones then repeat between
*its* steps. Both are told from hundreds of marks, and what bounds iterations stays so until another
is clearly better: each change ends all comparison with what was before.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

from failslow.track.follow import Crossing

__all__ = ["MarkFollower"]

_WINDOW = 512
"""Marks looked back at."""
_ENOUGH = 3
"""Steps of an optimizer among them before it may become the boundary; its turns are counted
between four."""
_EACH = 32
"""So many marks are judged one by one, later ones every `_NOW_AND_THEN`."""
_NOW_AND_THEN = 16
_ENDED = 6
"""Marks of others, and twice as many as ever lay between two of its steps, after which an optimizer
has stopped."""
_CLEARLY = 1.5
"""Times as many steps, and two more, or collectives: no accident of where the window begins."""
_MOST_TURNS, _KEPT_TURNS = 8, 12
"""Steps of the main optimizer to one of the boundary: to become it, to stay it."""
_WAVERING = 4
"""Changes of the boundary within the window that are trouble."""
_STALE_CALLS = 4096
"""Calls without a mark, 16 iterations' worth on top, after which marks have ended;"""
_STALE_MOST = 1 << 18
"""and as many as marks have bounded, up to so many: a long evaluation is no end of them."""


class MarkFollower:
    """Follows marks of one kind; `number` tells optimizers apart."""

    def __init__(self) -> None:
        self.boundary: int | None = None
        """Number of the optimizer whose steps are boundaries."""
        self._main: int | None = None
        self._window: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        """(optimizer, collectives before) of the last marks."""
        self._marks = 0
        self._patience = _ENDED
        self._boundary_mark = 0
        """Of how many marks the last of the boundary was the last."""
        self._changes: deque[int] = deque(maxlen=_WAVERING)
        """Marks at which the boundary changed."""
        self._last: Crossing | None = None
        self._first_calls = 0
        self._seen_calls: int | None = None
        self._usual_calls: int | None = None
        self._last_calls: int | None = None

    @property
    def locked(self) -> bool:
        """An iteration has been seen whole."""
        return self._last_calls is not None

    @property
    def wavers(self) -> bool:
        """What bounds iterations has changed again and again: they hardly compare."""
        changes = self._changes
        return len(changes) == _WAVERING and self._marks - changes[0] <= _WINDOW

    def lose(self) -> None:
        """Records were lost, marks perhaps among them."""
        self._last = None

    @property
    def ends_at_calls(self) -> int:
        """Collectives after which, without a boundary, the marks must have ended; 0: none came."""
        if self._seen_calls is None:
            return 0
        bounded = self._seen_calls - self._first_calls
        return (
            self._seen_calls
            + _STALE_CALLS
            + 16 * (self._usual_calls or 0)
            + min(_STALE_MOST, bounded)
        )

    @property
    def usual_calls(self) -> int:
        """Collectives an iteration makes, 0 unknown."""
        return self._usual_calls or 0

    def mark(self, crossing: Crossing, number: int) -> Crossing | None:
        """The boundary this mark is, or None."""
        self._window.append((number, crossing.calls))
        self._marks += 1
        self._judge()
        if number != self.boundary:
            return None
        self._boundary_mark = self._marks
        last, self._last = self._last, crossing
        if self._seen_calls is None:
            self._first_calls = crossing.calls
        self._seen_calls = crossing.calls
        if last is None:
            return crossing._replace(opens=True)
        calls = crossing.calls - last.calls
        if self._usual_calls is None or calls == self._last_calls:
            self._usual_calls = calls
        self._last_calls = calls
        return crossing._replace(foreign=max(0, calls - self._usual_calls))

    # -- which optimizer ---------------------------------------------------------------------------

    def _judge(self) -> None:
        """Look at the marks again, where that may change what bounds iterations."""
        due = self._marks <= _EACH or self._marks % _NOW_AND_THEN == 0
        missing = self._marks - self._boundary_mark > self._patience
        if not (due or missing):
            return
        boundary = self._find()
        if boundary == self.boundary:
            return
        if self.boundary is not None:
            self._changes.append(self._marks)
        self.boundary, self._boundary_mark = boundary, self._marks
        self._last = self._usual_calls = self._last_calls = None

    def _find(self) -> int:
        numbers = [number for number, _ in self._window]
        if self.boundary is None or numbers.count(self.boundary) == len(numbers):
            self._main = numbers[-1]
            return numbers[-1]
        counts, waits = Counter(numbers), self._waits(numbers)
        self._patience = waits.get(self.boundary, len(numbers))
        since = {number: len(numbers) - 1 - index for index, number in enumerate(numbers)}
        going = {n: count for n, count in counts.items() if since[n] <= waits[n]}
        enough = {n: count for n, count in going.items() if count >= _ENOUGH}
        main = self._main if self._main in going else None
        if enough:
            most = max(enough, key=lambda n: (enough[n], -n))
            if main is None or enough[most] >= _CLEARLY * going[main] + 2:
                main = most
        if main is None:
            return self.boundary  # nothing better is known
        self._main = main
        rare = [n for n, count in sorted(enough.items()) if 2 * count <= going[main] + 2]
        turns = [n for n in rare if n != main and self._takes_turns(n, main)]
        if self.boundary in turns:
            return self.boundary
        return min(turns, key=lambda n: (enough[n], n), default=main)

    @staticmethod
    def _waits(numbers: list[int]) -> dict[int, int]:
        """Of each optimizer: for how many marks of others it is waited."""
        last: dict[int, int] = {}
        longest: Counter[int] = Counter()
        for index, number in enumerate(numbers):
            if number in last:
                longest[number] = max(longest[number], index - last[number] - 1)
            last[number] = index
        # of one that stepped once nothing is known
        once = {n for n, count in Counter(numbers).items() if count == 1}
        return {n: len(numbers) if n in once else _ENDED + 2 * longest[n] for n in last}

    def _takes_turns(self, other: int, main: int) -> bool:
        """Whether it steps once every few steps of the main one, with collectives of its own."""
        turns: list[int] = []
        with_it: list[int] = []
        without: list[int] = []
        count, begun, inside, last_calls = 0, False, False, -1
        for number, calls in self._window:
            if number == other:
                if begun:
                    turns.append(count)
                count, begun, inside = 0, True, True
            elif number == main:
                if last_calls >= 0:
                    (with_it if inside else without).append(calls - last_calls)
                count, inside, last_calls = count + 1, False, calls
        if len(turns) < _ENOUGH or not (with_it and without):
            return False
        usual, stays = median(turns), other == self.boundary
        alike = turns.count(int(usual)) / len(turns)
        if not 2 <= usual <= (_KEPT_TURNS if stays else _MOST_TURNS):
            return False
        plain = median(without)
        more = median(with_it) / plain if plain > 0 else 0.0
        clearly = (1.0 + _CLEARLY) / 2 if stays else _CLEARLY
        return alike >= (0.5 if stays else 0.75) and more >= clearly
