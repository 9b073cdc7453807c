"""One worker's calls on one clock: when it was ready for each, and when it was blocked.

In: joined calls (`capture.calls`) and the records they came from. Out: a `Line` and the iterations
`Used`, from which a digest takes its medians:

    line = timeline(calls, records)
    line.settle(cell, count)         # which unseen waits there were, by the place of each call
    line.gaps(), line.own(used)      # nanoseconds before each call, seconds in each iteration
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from failslow.capture.layout import (
    DONE,
    FLAG_ASYNC,
    FLAG_LATE,
    OPTIMIZER_STEP,
    TRAINER_STEP,
    WAIT,
)

__all__ = ["FOREVER", "OVERLAP_SHARE", "Line", "Used", "timeline"]

OVERLAP_SHARE = 0.3
"""Share of calls the worker went on without from which it never waits for them at once."""
_MAX_UNSEEN = 0.1
"""Share of calls of which nobody knows whether they were waited for, that own time bears."""
_SLACK_NS = 500_000
"""A completion may be reported a little after its waiter woke."""
FOREVER = 1 << 62

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Used:
    """The iterations that are looked at, and the one each call lies in."""

    iterations: Ints
    """Indices of those looked at."""
    begins: Ints
    ends: Ints
    of: Ints
    """For each call its iteration's place in `iterations`, -1 none."""

    @classmethod
    def find(cls, at: Ints, begins: Ints, ends: Ints) -> Used | None:
        """Those with as many calls as most have; `at`: when each call began, ascending."""
        within = np.searchsorted(begins, at, side="right") - 1
        within[(within >= 0) & (at >= ends[within])] = -1
        counts = np.bincount(within[within >= 0], minlength=len(begins))
        if not counts.any():
            return None
        chosen = np.flatnonzero(counts == np.bincount(counts[counts > 0]).argmax())
        place = np.full(len(begins) + 1, -1, np.int64)
        place[chosen] = np.arange(len(chosen))
        return cls(chosen, begins[chosen], ends[chosen], place[within])

    def first_calls(self) -> tuple[Ints, Ints]:
        """(first calls of iterations, those of the next ones) as far as both are known."""
        mine = np.flatnonzero(self.of >= 0)
        firsts = mine[np.concatenate(([True], np.diff(self.of[mine]) != 0))] if len(mine) else mine
        follows = np.diff(self.iterations[self.of[firsts]]) == 1
        return firsts[:-1][follows], firsts[1:][follows]


@dataclass(slots=True, eq=False)
class Line:
    """A worker's calls on one clock, and when it was blocked. Arrays of a row a call."""

    calls: NDArray[np.void]
    start: Ints
    """When it was ready for the call."""
    follower: Ints
    """When it did the next thing that can be seen."""
    marked: NDArray[np.bool_]
    """...and that was a step mark, by when all before was waited for."""
    known: NDArray[np.bool_]
    """Its end is known."""
    exact: NDArray[np.bool_]
    """...and no upper bound."""
    seen: Ints
    """Nanoseconds somebody was seen to be blocked for it."""
    blocked: list[tuple[Ints, Ints]]
    """(from, until) of what was seen."""
    unseen: NDArray[np.bool_]
    """Nobody was seen to wait for it."""
    on_device: bool
    """Times are a device's."""
    overlap: NDArray[np.bool_]
    """It went on while the call was under way."""
    hidden: Ints
    """Nanoseconds it may have waited for it unseen."""
    waited: Ints
    """Nanoseconds it was blocked for it, unseen waits included."""
    steps: tuple[Floats, Floats] = (np.zeros(1), np.zeros(1))
    """(moments, nanoseconds it was blocked before each)."""

    @property
    def host_ns(self) -> Ints:
        starts: Ints = self.calls["start_ns"]
        return starts

    @property
    def end(self) -> Ints:
        ends: Ints = self.calls["end_ns"]
        return ends

    def settle(self, cell: Ints, count: int) -> None:
        """Decide which unseen waits there were; `cell`: of each call, -1 none, < count."""
        loose = self.unseen & self.known
        at_mark = loose & self.marked
        went_on = loose & ~at_mark & (self.end > self.follower + _SLACK_NS)
        of = cell[cell >= 0]
        total = np.maximum(np.bincount(of, minlength=count), 1)
        share = np.bincount(of, weights=went_on[cell >= 0], minlength=count) / total
        free = np.concatenate((share >= OVERLAP_SHARE, [False]))[cell]
        waited = (loose & ~went_on & ~free) | at_mark
        self.overlap = went_on
        length = np.maximum(np.minimum(self.end, self.follower) - self.start, 0)
        self.hidden = np.where(waited & ~at_mark, length, 0)
        self.waited = np.where(waited, np.maximum(length, self.seen), self.seen)
        spans = [
            *self.blocked,
            (self.start[waited], (self.start + length)[waited]),
            self._at_marks(),
        ]
        self.steps = _union(
            np.concatenate([begin for begin, _ in spans]),
            np.concatenate([until for _, until in spans]),
        )

    def _at_marks(self) -> tuple[Ints, Ints]:
        """From the last call before a mark until all before it were complete, by the mark."""
        last = np.flatnonzero(self.marked)
        ends = np.where(self.unseen & self.known, self.end, 0)
        reached = np.minimum(np.maximum.accumulate(ends)[last], self.follower[last])
        return self.start[last], np.maximum(reached, self.start[last])

    def blocked_before(self, at: Ints) -> Floats:
        """Nanoseconds it was blocked before each moment."""
        return np.asarray(np.interp(at, *self.steps), np.float64)

    def gaps(self) -> Floats:
        """Nanoseconds of its own between each call and the one before it; 0 for the first."""
        own = np.diff(self.start) - np.diff(self.blocked_before(self.start))
        return np.concatenate((np.zeros(min(1, len(self.start))), np.maximum(own, 0.0)))

    def own(self, used: Used) -> Floats:
        """Seconds of its own in each iteration; none when too little is known."""
        if np.mean((self.unseen & ~self.known)[used.of >= 0]) > _MAX_UNSEEN:
            return np.empty(0)
        if self.on_device:
            firsts, nexts = used.first_calls()
            begin, end = self.start[firsts], self.start[nexts]
        else:
            begin, end = used.begins, used.ends
        own = (end - begin) - (self.blocked_before(end) - self.blocked_before(begin))
        return np.maximum(own, 0.0) / 1e9


def timeline(calls: NDArray[np.void], records: NDArray[np.void]) -> Line:
    """Calls in the order in which the worker was ready for them."""
    done = records[(records["kind"] == DONE) & (records["start_ns"] > 0)]
    measured = np.isin(calls["seq"].astype(np.int64), done["size_bytes"])
    on_device = bool(measured.any())
    if on_device:
        calls = calls[measured]  # the clock of the others is the host's, which runs ahead
    calls = calls[np.argsort(calls["start_ns"], kind="stable")]
    known = calls["duration_ns"] >= 0
    late = calls["flags"] & FLAG_LATE > 0
    start = calls["end_ns"] - calls["duration_ns"] if on_device else calls["start_ns"].copy()
    waits = records[records["kind"] == WAIT]
    marks = records[(records["kind"] == OPTIMIZER_STEP) | (records["kind"] == TRAINER_STEP)]
    if on_device:
        waits, marks = waits[:0], marks[:0]
    events = np.sort(np.concatenate((start, waits["start_ns"], marks["start_ns"])))
    at = np.searchsorted(events, start, side="right")
    follower = np.concatenate((events, [FOREVER]))[at].astype(np.int64)
    if on_device:
        seen, blocked = np.zeros(len(calls), np.int64), []
        unseen = np.ones(len(calls), np.bool_)
    else:
        seen = calls["call_ns"].astype(np.int64) + calls["wait_ns"]
        inline = (calls["flags"] & FLAG_ASYNC == 0) & (calls["end_ns"] > 0)
        until = np.where(inline, calls["end_ns"], start + calls["call_ns"])
        blocked = [(start, until), (waits["start_ns"], waits["start_ns"] + waits["wait_ns"])]
        unseen = (calls["wait_ns"] == 0) & ~inline
    return Line(
        calls=calls,
        start=start,
        follower=follower,
        marked=np.isin(follower, marks["start_ns"]),
        known=known & ~(late & unseen),
        exact=known & ~late,
        seen=seen,
        blocked=blocked,
        unseen=unseen,
        on_device=on_device,
        overlap=np.zeros(len(calls), np.bool_),
        hidden=np.zeros(len(calls), np.int64),
        waited=seen,
    )


def _union(begin: Ints, until: Ints) -> tuple[Floats, Floats]:
    """Breakpoints of the time blocked so far, by time."""
    order = np.argsort(begin, kind="stable")
    begin, until = begin[order], np.maximum.accumulate(until[order])
    if not len(begin):
        return np.zeros(1), np.zeros(1)
    fresh = np.concatenate(([True], begin[1:] > until[:-1]))
    first = np.flatnonzero(fresh)
    last = np.concatenate((first[1:] - 1, [len(begin) - 1]))
    edges = np.stack((begin[first], until[last]), axis=1).astype(np.float64)
    lengths = edges[:, 1] - edges[:, 0]
    total = np.cumsum(lengths)
    return edges.reshape(-1), np.stack((total - lengths, total), axis=1).reshape(-1)
