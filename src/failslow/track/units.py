"""The program of one iteration, found in a stretch of a call stream.

In: rows. Out: a `Unit`, the calls of one iteration in order, or None while there is none to be
sure of. A program nests: FSDP gathers layer by layer, a pipeline sends micro-batch by
micro-batch, all inside an iteration, and a job evaluates every so many iterations. Each loop is
one level of repetition; `find_unit` picks the one that is an iteration:

    level   the block that repeats               how it is judged
    2       gather, reduce-scatter               its gathers also occur elsewhere: no
    99      all layers forward and backward      reduces gradients, nothing reduced outside: yes
    995     ten of them and an evaluation        not looked at: a smaller one is an iteration
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from failslow.stats.period import Level, repeat_levels
from failslow.track.rows import Rows

__all__ = ["OpKinds", "Unit", "View", "find_unit"]

_MIN_REPEATS = 8
"""Repeats before a unit is believed: an inner loop of up to so many turns never is."""
_MIN_LONG_REPEATS = 4
"""The same for units longer than `_LONG` calls: those do not repeat by chance."""
_LONG = 4096
_SHORT = 4
"""Calls of a unit that may well be a loop: sizes and counts are looked at closely."""
_MIN_SINGLE_REPEATS = 9
"""...for a unit of one call."""
_MIN_UNREDUCED_REPEATS = 64
"""...for one without a reduction: training reduces gradients, so it is hardly an iteration."""
_MIN_GATHER_REPEATS = 1024
"""...for one that neither reduces nor sends: a part of FSDP's."""
_MIN_VARYING_REPEATS = 10
"""...for one found without looking at sizes,"""
_MIN_VARYING_CALLS = 64
"""which is not tried in fewer calls than these;"""
_MIN_GROUP_REPEATS = 16
"""...for one of a single group's calls,"""
_MIN_GROUP_CALLS = 512
"""which is not tried in fewer calls than these."""
_SCALAR_BYTES = 64
"""A reduction up to this size carries metrics, not gradients."""
_RARE_CALLS = 64
"""Calls between foreign stretches, on average, that make them sporadic."""
_BURST_RATIO = 4.0
"""Gaps between equal calls that differ by this factor part bursts of them."""


@dataclass(frozen=True, slots=True, eq=False)
class OpKinds:
    """What each op code stands for; arrays indexed by the code."""

    reduces: NDArray[np.bool_]
    sends: NDArray[np.bool_]
    """Send, receive, all-to-all."""

    @classmethod
    def of(cls, names: Sequence[str]) -> OpKinds:
        """From op names of torch's c10d dispatcher, index = code; unknown codes are neither."""
        reduces = np.zeros(256, np.bool_)
        sends = np.zeros(256, np.bool_)
        for code, name in enumerate(names):
            reduces[code] = "reduce" in name
            sends[code] = name.startswith(("send", "recv", "alltoall"))
        return cls(reduces, sends)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Which calls are looked at and what of each makes its symbol."""

    group: int | None = None
    """Calls of this group only: within one, all ranks keep the same order."""
    sizeless: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """`kind_key`s of calls whose sizes vary, and so tell nothing."""

    def selects(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows are looked at."""
        if self.group is None:
            return np.ones(len(rows), np.bool_)
        chosen: NDArray[np.bool_] = rows["group"] == self.group
        return chosen

    def keys(self, rows: Rows) -> NDArray[np.uint64]:
        """Symbols of selected rows."""
        keys: NDArray[np.uint64] = rows["key"]
        if len(self.sizeless):
            keys = np.where(np.isin(rows["kind_key"], self.sizeless), rows["kind_key"], keys)
        return keys


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The calls of one iteration, from some point of it on."""

    view: View
    rows: Rows
    """One iteration's rows."""
    keys: NDArray[np.uint64]
    """Their symbols."""
    anchor: int
    """Index of the call whose return to its caller is taken for the boundary of iterations."""
    burst_ns: int = 0
    """All calls are alike; the iteration begins with one after at least this gap. 0: unused."""

    def same(self, other: Unit) -> bool:
        """The same calls, wherever the iteration is cut."""
        return len(self.keys) == len(other.keys) and np.array_equal(
            np.sort(self.keys), np.sort(other.keys)
        )

    def inside(self, other: Unit) -> bool:
        """Shorter than the other, and of calls the other makes too: perhaps a loop in it."""
        return len(self.keys) < len(other.keys) and bool(
            np.isin(self.rows["kind_key"], other.rows["kind_key"]).all()
        )

    def several(self, other: Unit, ops: OpKinds) -> bool:
        """Two or more of the other's iterations, and no more work than theirs besides."""
        anchor = other.keys[other.anchor]
        times = int(np.count_nonzero(self.keys == anchor)) // int(
            np.count_nonzero(other.keys == anchor)
        )
        least = other.weighty_bytes(ops)
        mine, its = (
            np.count_nonzero(ops.reduces[rows["op"]] & (rows["size_bytes"] >= least))
            for rows in (self.rows, other.rows)
        )
        return times > 1 and bool(mine <= times * its)

    @property
    def anchor_occurs_once(self) -> bool:
        """The anchor is known by its symbol, not only by its position."""
        return int(np.count_nonzero(self.keys == self.keys[self.anchor])) == 1

    @property
    def strength(self) -> int:
        """2: from calls as they are; 1: from gaps, without sizes, or of one group; 0: one call."""
        if len(self.keys) == 1:
            return 0
        return 1 if self.burst_ns or len(self.view.sizeless) or self.view.group is not None else 2

    def weighty_bytes(self, ops: OpKinds) -> int:
        """Bytes from which a reduction counts as one of gradients."""
        return _weighty(self.rows, ops)

    def foreign_work(self, rows: Rows, ops: OpKinds) -> NDArray[np.bool_]:
        """Which of `rows` are reductions or sends of more than metrics that the unit lacks.

        Such calls belong to an iteration of which this unit is a part. In a unit of few calls
        the size counts, in a longer one a call of the same op on the same group is no news.
        """
        name = "key" if len(self.rows) <= _SHORT and not len(self.view.sizeless) else "kind_key"
        working = ops.reduces[rows["op"]] | ops.sends[rows["op"]]
        news: NDArray[np.bool_] = (
            working
            & (rows["size_bytes"] >= _weighty(self.rows, ops))
            & ~np.isin(rows[name], self.rows[name])
        )
        return news


def find_unit(rows: Rows, ops: OpKinds, *, min_bytes: int = 0) -> Unit | None:
    """The unit of the program in `rows`, or None; O(n log n).

    min_bytes: what a reduction must weigh at least to be one of gradients, as seen before.
    """
    least = max(min_bytes, _weighty(rows, ops))
    working = ops.reduces[rows["op"]] & (rows["size_bytes"] >= least)
    if min_bytes and len(rows) < _MIN_GATHER_REPEATS and not working.any():
        return None  # an evaluation; not worth the search
    for view in _views(rows, ops):
        stretch = _Stretch(rows[view.selects(rows)], view, ops, least, known=min_bytes > 0)
        unit, waits = stretch.find()
        if unit is not None or waits:
            return unit
    return None


def _views(rows: Rows, ops: OpKinds) -> Iterator[View]:
    """Views to try in turn, each only if nothing promising repeats in those before."""
    yield View()
    if len(rows) < _MIN_VARYING_CALLS:
        return
    varying: list[np.uint64] = []
    repeating: list[np.uint64] = []
    kinds, which = np.unique(rows["kind_key"], return_inverse=True)
    for index, kind_key in enumerate(kinds):
        sizes = rows["size_bytes"][which.reshape(-1) == index]
        codes = np.unique(sizes, return_inverse=True)[1].reshape(-1)
        if codes.max() > 0:
            levels = repeat_levels(codes)
            repeats = any(level.explained * 2 >= len(sizes) for level in levels)
            (repeating if repeats else varying).append(kind_key)
    if varying:
        yield View(sizeless=np.array(varying, np.uint64))
    if repeating:
        yield View(sizeless=np.array(varying + repeating, np.uint64))
    reductions = rows[ops.reduces[rows["op"]]]
    if len(rows) >= _MIN_GROUP_CALLS and len(reductions) and np.ptp(rows["group"]):
        largest = np.lexsort((reductions["size_bytes"], reductions["group_size"]))[-1]
        yield View(group=int(reductions["group"][largest]))


class _Stretch:
    """A stretch of the stream in one view, and the search for the unit in it."""

    def __init__(
        self, rows: Rows, view: View, ops: OpKinds, min_bytes: int, *, known: bool = False
    ) -> None:
        self.rows, self.view, self.ops, self.min_bytes = rows, view, ops, min_bytes
        self.known = known
        """The job is known to reduce gradients of `min_bytes`."""
        self.keys = view.keys(rows)

    def find(self) -> tuple[Unit | None, bool]:
        """(the unit, whether to wait for more calls rather than to look otherwise)."""
        codes: NDArray[np.int64] = np.unique(self.keys, return_inverse=True)[1].reshape(-1)
        waits: bool = False
        half = len(codes) // 2
        for level in repeat_levels(codes):
            unit = self._judge(codes, level)
            if unit is None:
                continue
            if level.explained < level.lag * self._repeats(level.lag):
                later = int(np.count_nonzero(level.mask[half:]))
                waits = waits or later * 2 >= len(codes) - half
            elif level.lag == 1 and self.view.group is None:
                return self._by_bursts(unit), True
            else:
                return unit, True
        return None, waits

    def _repeats(self, lag: int) -> int:
        """How often a unit must have been seen."""
        if self.view.group is not None:
            return _MIN_GROUP_REPEATS
        if len(self.view.sizeless):
            return _MIN_VARYING_REPEATS
        if lag == 1:
            return _MIN_SINGLE_REPEATS
        return _MIN_REPEATS if lag <= _LONG else _MIN_LONG_REPEATS

    def _judge(self, codes: NDArray[np.int64], level: Level) -> Unit | None:
        """The unit of `level` unless it is no iteration."""
        rows, ops, lag, mask = self.rows, self.ops, level.lag, level.mask
        if lag == 1 and len(self.view.sizeless):
            return None
        end = int(np.flatnonzero(mask)[-1]) + 1
        block = rows[end - lag : end].copy()
        alphabet = np.zeros(int(codes.max()) + 1, np.bool_)
        alphabet[codes[end - lag : end]] = True
        others = rows[~mask]
        elsewhere = np.count_nonzero(alphabet[codes]) - level.explained
        alike = np.isin(others["kind_key"], block["kind_key"])
        resized = np.count_nonzero(alike & (others["size_bytes"] >= self.min_bytes))
        if max(elsewhere, resized) * 3 > level.explained:
            return None  # its calls are also made in another arrangement: a part of something
        reduced = int(block["size_bytes"][ops.reduces[block["op"]]].max(initial=0))
        if reduced < self.min_bytes:
            if self.known and 0 < reduced <= _SCALAR_BYTES:
                return None  # an evaluation's metrics
            sends = bool(ops.sends[block["op"]].any())
            if level.explained < lag * (_MIN_UNREDUCED_REPEATS if sends else _MIN_GATHER_REPEATS):
                return None
        keys = self.keys[end - lag : end].copy()
        unit = Unit(self.view, block, keys, _anchor(block, keys, ops))
        begin = int(np.argmax(mask))
        if lag <= _SHORT:
            work = ops.reduces[rows["op"]] & (rows["size_bytes"] >= self.min_bytes)
            left = work[begin:].sum() - work[end - lag : end].sum() * level.explained / lag
            if left > max(lag, work[begin:].sum() / 16):
                return None  # the same work is also done outside: of a longer iteration
        news = np.flatnonzero(~mask & unit.foreign_work(rows, ops))
        return unit if _sporadic(news[news > begin] - begin, lag, len(rows) - begin) else None

    def _by_bursts(self, single: Unit) -> Unit | None:
        """One call over and over: an iteration may make it several times in a burst.

        Gradient buckets of one size do. Gaps then are of two kinds and come in a fixed pattern;
        None while a pattern is there but not yet sure.
        """
        rows = self.rows[self.keys == single.keys[0]]
        gaps = np.sort(rows["gap_ns"])[1:].astype(np.float64)
        if len(gaps) < 6:
            return single
        # at least three gaps on either side, so that a pause or two make no kind of their own
        ratios = np.maximum(gaps[3:-2], 1.0) / np.maximum(gaps[2:-3], 1.0)
        at = int(np.argmax(ratios))
        if ratios[at] < _BURST_RATIO:
            return single
        burst_ns = int(np.sqrt(max(gaps[at + 2], 1.0) * gaps[at + 3]))
        lengths = np.diff(np.flatnonzero(rows["gap_ns"] >= burst_ns))
        length, bursts = np.bincount(lengths).argmax(), len(lengths)
        if length == 1 or np.count_nonzero(lengths == length) * 4 < 3 * bursts:
            return single
        if bursts < _MIN_REPEATS:
            return None
        block, keys = np.repeat(single.rows, length), np.repeat(single.keys, length)
        return Unit(self.view, block, keys, int(length) - 1, burst_ns)


def _sporadic(positions: NDArray[np.int64], lag: int, count: int) -> bool:
    """Whether calls at `positions` of `count` come now and then, not once every so many."""
    if not len(positions):
        return True
    events = positions[np.concatenate(([True], np.diff(positions) > lag))]
    since = count - int(positions[-1])
    if len(events) * max(_MIN_REPEATS * lag, _RARE_CALLS) > count:
        return False  # so often that they are of every iteration
    if len(events) == 1:
        return since > 2 * int(events[0]) + lag
    gaps = np.diff(events)
    usual = float(np.median(gaps))
    alike = np.count_nonzero(np.abs(gaps - usual) <= 0.25 * usual + lag)
    return bool(alike * 2 < len(gaps) or since > 2 * gaps.max() + lag)


def _weighty(rows: Rows, ops: OpKinds) -> int:
    """Bytes from which a reduction counts as one of gradients, judged by the largest there is."""
    sizes = rows["size_bytes"][ops.reduces[rows["op"]]]
    largest = int(sizes.max()) if len(sizes) else 0
    return max(largest // 1000, _SCALAR_BYTES + 1) if largest > _SCALAR_BYTES else 1


def _anchor(block: Rows, keys: NDArray[np.uint64], ops: OpKinds) -> int:
    """The call to take for the boundary: one of its kind, on the widest group, a reduction.

    Among equals the last before the step: no reduction follows it for longest, then no call.
    Where every symbol occurs more than once the position in the unit has to do.
    """
    _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    reduces = ops.reduces[block["op"]]
    places = np.flatnonzero(reduces)
    quiet = np.zeros(len(block), np.int64)
    quiet[places] = np.diff(places, append=places[:1] + len(block))
    order = np.lexsort(
        (
            np.roll(block["gap_ns"], -1),
            quiet,
            reduces,
            block["group_size"],
            counts[which.reshape(-1)] == 1,
        )
    )
    return int(order[-1])
