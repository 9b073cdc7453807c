"""Iteration boundaries from step marks: torch's optimizer hook, or the trainer's own `step()`.

In: the mark rows of one kind. Out: a `Crossing` an iteration. Several optimizers may step in an
iteration (a GAN's, one a layer): the boundary is the one that steps least often.
"""

from __future__ import annotations

from collections import Counter, deque

from failslow.track.follow import Crossing

__all__ = ["MarkFollower"]

_WINDOW = 64
_ENOUGH = 3
"""Steps of an optimizer in the window before it may become the boundary."""
_STALE_CALLS = 4096
"""Calls without a mark, 16 iterations' worth on top, after which marks have ended."""


class MarkFollower:
    """Follows marks of one kind; `number` tells optimizers apart."""

    def __init__(self) -> None:
        self.boundary: int | None = None
        """Number of the optimizer whose steps are boundaries."""
        self.switched = False
        """Whether the last mark changed `boundary`: iterations are others from now on."""
        self._window: deque[int] = deque(maxlen=_WINDOW)
        self._last: Crossing | None = None
        self._seen_calls: int | None = None
        self._usual_calls: int | None = None
        self._last_calls: int | None = None

    @property
    def locked(self) -> bool:
        """An iteration has been seen whole."""
        return self._last_calls is not None

    def lose(self) -> None:
        """Records were lost, marks perhaps among them."""
        self._last = None

    @property
    def ends_at_calls(self) -> int:
        """Collectives after which, without a boundary, the marks must have ended; 0: none came."""
        if self._seen_calls is None:
            return 0
        return self._seen_calls + _STALE_CALLS + 16 * (self._usual_calls or 0)

    @property
    def usual_calls(self) -> int:
        """Collectives an iteration makes, 0 unknown."""
        return self._usual_calls or 0

    def mark(self, crossing: Crossing, number: int) -> Crossing | None:
        """The boundary this mark is, or None."""
        self._window.append(number)
        rarest = self._rarest()
        self.switched = self.boundary not in (None, rarest)
        if rarest != self.boundary:
            self.boundary = rarest
            self._last = self._usual_calls = self._last_calls = None
        if number != self.boundary:
            return None
        last, self._last = self._last, crossing
        self._seen_calls = crossing.calls
        if last is None:
            return crossing._replace(opens=True)
        calls = crossing.calls - last.calls
        if self._usual_calls is None or calls == self._last_calls:
            self._usual_calls = calls
        self._last_calls = calls
        return crossing._replace(foreign=max(0, calls - self._usual_calls))

    def _rarest(self) -> int:
        """The optimizer that steps least often of those that step regularly."""
        window, boundary = tuple(self._window), self.boundary
        last = {number: index for index, number in enumerate(window)}
        regular = {
            number: count
            for number, count in Counter(window).items()
            if count >= _ENOUGH
            and (len(window) - 1 - last[number]) * count <= 2 * len(window) + count
        }
        if not regular:
            return window[0] if boundary is None else boundary
        fewest = min(regular.values())
        # one step more or less is where the window happens to begin
        if boundary is not None and regular.get(boundary, fewest + 2) <= fewest + 1:
            return boundary
        return min(number for number, count in regular.items() if count == fewest)
