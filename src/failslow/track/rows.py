"""Calls as track sees them: a symbol each, and running totals up to each.

In: rows with `failslow.records.CALL_COLUMNS`, as one rank made them. Out: rows of `ROW`, the
collectives and the step marks, where a difference of two rows tells what lies between them:

    key  kind op group  size_bytes  start_ns       calls  moved_bytes  blocked_ns  unwaited ...
    …af   1    1    0        33280  81_231_004_112   306   10_183_680  12_400_112         2
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.records import (
    KIND_CALL,
    KIND_OPTIMIZER_STEP,
    KIND_TRAINER_STEP,
    KIND_WAIT,
)

__all__ = ["ROW", "RowMaker", "Rows"]

Rows = NDArray[np.void]
"""A structured array of dtype `ROW`."""

ROW = np.dtype(
    [
        ("key", np.uint64),
        ("kind_key", np.uint64),
        ("kind", np.uint8),
        ("op", np.uint8),
        ("group", np.uint16),
        ("group_size", np.uint32),
        ("size_bytes", np.int64),
        ("start_ns", np.int64),
        ("until_ns", np.int64),
        ("gap_ns", np.int64),
        ("calls", np.int64),
        ("moved_bytes", np.int64),
        ("blocked_ns", np.int64),
        ("unwaited", np.int64),
        ("own_ns", np.int64),
        ("work", np.int64),
    ]
)
"""key hashes op, group, peer and size, kind_key the same without the size. until_ns: when the
caller came back from the call and its wait for it; the start where it was not seen to wait.
gap_ns: since the collective before it began. Totals over all before the row: collectives, their
bytes, time the caller was blocked, and collectives less those somebody was seen to wait for.
own_ns: what of start_ns to until_ns adds to blocked_ns. work: what a trainer's step mark tells."""

_ODD = tuple(
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class RowMaker:
    """Turns calls into rows, block by block; the division into blocks leaves no trace."""

    def __init__(self) -> None:
        self._calls = self._moved_bytes = self._blocked_ns = self._unwaited = 0
        self._last_call_ns: int | None = None
        self._busy_until_ns = -(1 << 62)
        self._open: tuple[Any, ...] | None = None
        """The newest row: blocked from, until, when complete, unwaited, names a call, group."""
        self._hidden: Counter[int] = Counter()
        """By group: calls since the last mark that nobody was seen to wait for."""

    def rows(self, calls: NDArray[Any]) -> Rows:
        """The collectives and step marks among `calls`, in the order given."""
        kind = calls["kind"]
        is_call, is_wait = kind == KIND_CALL, kind == KIND_WAIT
        is_mark = (kind == KIND_OPTIMIZER_STEP) | (kind == KIND_TRAINER_STEP)
        if not (is_call | is_wait | is_mark).all():
            return self.rows(calls[is_call | is_wait | is_mark])
        rows = np.zeros(len(calls), ROW)
        if not len(calls):
            return rows
        for name in ("kind", "op", "group", "group_size", "size_bytes", "start_ns"):
            rows[name] = calls[name]
        rows["work"] = np.where(kind == KIND_TRAINER_STEP, calls["wait_ns"], 0)
        rows["kind_key"], rows["key"] = _keys(calls)
        self._totals(rows, is_call)
        self._blocked(rows, calls, is_call, is_mark)
        kept: Rows = rows[~is_wait]
        return kept

    def _totals(self, rows: Rows, is_call: NDArray[np.bool_]) -> None:
        rows["calls"] = self._calls + _before(is_call.astype(np.int64))
        self._calls += int(np.count_nonzero(is_call))
        moved = np.where(is_call, rows["size_bytes"], 0)
        rows["moved_bytes"] = self._moved_bytes + _before(moved)
        self._moved_bytes += int(moved.sum())
        starts = rows["start_ns"][is_call]
        if len(starts):
            first = starts[0] if self._last_call_ns is None else self._last_call_ns
            rows["gap_ns"][is_call] = np.diff(starts, prepend=first)
            self._last_call_ns = int(starts[-1])

    def _blocked(
        self,
        rows: Rows,
        calls: NDArray[Any],
        is_call: NDArray[np.bool_],
        is_mark: NDArray[np.bool_],
    ) -> None:
        """How long the caller was blocked before each row: the union of what rows tell.

        A call blocks while the host is inside it and while it is waited for. Of one that nobody
        was seen to wait for: where it was complete before the next row began, the caller may
        have waited for it (C++ code does so unseen); where not, the caller went on without it;
        and a step mark says that all before it was waited for: right before it, that is, and of
        the last call's group. Who waits unseen for another group's calls, as tensor parallelism
        does, does so in the middle of the iteration: how long is not known.
        """
        start = rows["start_ns"]
        end = (
            start + np.where(is_call, calls["call_ns"], 0) + np.where(is_mark, 0, calls["wait_ns"])
        )
        done = np.where(is_call, calls["end_ns"], 0)
        unwaited = is_call & (calls["wait_ns"] == 0)
        # a wait row that names its call accounts for a call counted as unwaited before
        found = ((calls["kind"] == KIND_WAIT) & (calls["size_bytes"] > 0)).astype(np.int64)
        columns: tuple[NDArray[Any], ...] = (start, end, done, unwaited, found, rows["group"])
        if self._open is not None:
            columns = tuple(
                np.concatenate(([carried], column))
                for carried, column in zip(self._open, columns, strict=True)
            )
            is_mark = np.concatenate(([False], is_mark))
        start, end, done, unwaited, found, group = columns
        self._open = tuple(column[-1] for column in columns)
        follower, ends = start[1:], end[:-1].copy()
        known = done[:-1] > 0
        waited = unwaited[:-1] & known & (done[:-1] <= follower)
        ends[waited] = np.maximum(ends, done[:-1])[waited]
        marked = unwaited[:-1] & is_mark[1:] & ~waited
        ends[marked] = np.maximum(ends, follower)[marked]
        until = np.maximum.accumulate(np.concatenate(([self._busy_until_ns], ends)))
        fresh = np.maximum(ends - np.maximum(start[:-1], until[:-1]), 0)
        blocked = self._blocked_ns + np.cumsum(fresh)
        new = slice(len(start) - len(rows), None)
        back = is_call & ((calls["wait_ns"] > 0) | (calls["end_ns"] > 0))
        rows["until_ns"] = np.where(back, end[new], rows["start_ns"])
        rows["own_ns"] = np.where(back, np.maximum(end - np.maximum(start, until), 0)[new], 0)
        less = (unwaited[:-1] & ~known & ~marked).astype(np.int64) - found[:-1]
        self._credit(less, group, is_mark, closing=unwaited[:-1] & is_mark[1:])
        hidden = self._unwaited + np.cumsum(less)
        rows["blocked_ns"][len(rows) - len(blocked) :] = blocked
        rows["unwaited"][len(rows) - len(blocked) :] = hidden
        self._busy_until_ns = int(until[-1])
        if len(blocked):
            self._blocked_ns, self._unwaited = int(blocked[-1]), int(hidden[-1])

    def _credit(
        self,
        hidden: NDArray[np.int64],
        group: NDArray[Any],
        is_mark: NDArray[np.bool_],
        *,
        closing: NDArray[np.bool_],
    ) -> None:
        """Take the calls off `hidden` that a mark accounts for. Both go on from block to block."""
        begin = 0
        for mark in np.flatnonzero(is_mark[1:]).tolist():
            own = int(group[mark])
            self._count(hidden[begin : mark + 1], group[begin : mark + 1])
            if closing[mark]:
                hidden[mark] -= max(0, min(self._hidden[own], self._hidden.total()))
            self._hidden.clear()
            begin = mark + 1
        self._count(hidden[begin:], group[begin:])

    def _count(self, hidden: NDArray[np.int64], group: NDArray[Any]) -> None:
        (changed,) = np.nonzero(hidden)
        for number, more in zip(group[changed].tolist(), hidden[changed].tolist(), strict=True):
            self._hidden[number] += more


def _before(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exclusive running sum."""
    return np.cumsum(values) - values


def _keys(calls: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(without the size, with it): 64-bit hashes, so that no table of symbols need be kept."""
    with np.errstate(over="ignore"):
        where = calls["op"].astype(np.uint64) << np.uint64(16) | calls["group"].astype(np.uint64)
        where = where << np.uint64(32) | calls["peer"].astype(np.uint32).astype(np.uint64)
        kind_key = _mix(where + np.uint64(1))
        return kind_key, _mix(kind_key + calls["size_bytes"].astype(np.uint64) * _ODD[0])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014, OOPSLA)."""
    values = (values ^ values >> np.uint64(30)) * _ODD[1]
    values = (values ^ values >> np.uint64(27)) * _ODD[2]
    mixed: NDArray[np.uint64] = values ^ values >> np.uint64(31)
    return mixed
