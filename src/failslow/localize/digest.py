"""One worker's call records of a window of time -> its `RankProfile`.

In: ring records of every kind in the order of their numbers, the ring's group table, and the
iterations the tracker found in them. Out: medians of each call of the iteration, and of the
worker's own time. Pure numpy; the worker's clock is only ever compared with itself:

    digest(records, ops=OPS, groups=reader.groups(), samples=samples, epoch_s=..., rank=3)
    # RankProfile(rank=3, iterations=20, compute_s=0.051, cells=(CallCell(op="allreduce_", ...
    #   group=(0, 1, 2, 3), position=0, duration_s=0.0042, least_s=0.0031, gap_s=0.0508), ...))

A duration ends with a completion somebody reported or a caller waited for. The host's time inside
a call is none: it may only have enqueued. Where a device measured its calls, the time between
them is taken from the device too, as the host runs ahead of it.

Whether a worker waited for an asynchronous call cannot always be seen (C++ waits unseen). It may
have where the call was complete before the worker's next one (`hidden_s`), and had not where it
went on while the call was under way (`overlap`); comparing the workers settles the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from failslow.capture.calls import CallJoiner
from failslow.capture.layout import DONE
from failslow.localize.digest_line import FOREVER, Line, Used, timeline
from failslow.records import CallCell, RankProfile, StepSample, group_label

__all__ = ["MAX_POSITIONS", "GroupLine", "digest"]

MAX_POSITIONS = 8
"""Places of calls of one kind in an iteration that are told apart; more of them are folded, each
cell then standing for several in a row."""
_MAX_CELLS = 512
_MIN_KNOWN = 0.5
"""Share of a cell's calls whose duration must be known."""
_LEAST_QUANTILE = 0.1

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class GroupLine(Protocol):
    """A process group of the worker (`capture.reader.Group`)."""

    @property
    def name(self) -> str: ...
    @property
    def desc(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...] | None: ...


def digest(
    records: NDArray[np.void],
    *,
    ops: Sequence[str],
    groups: Sequence[GroupLine],
    samples: Iterable[StepSample],
    epoch_s: float = 0.0,
    rank: int,
    node: str = "",
    host: str = "",
    device: str = "",
) -> RankProfile | None:
    """The profile, or None without an iteration to look at.

    records: dtype `capture.reader.RECORD_DTYPE`. samples: `end_s` on the records' clock plus
    `epoch_s`; left out are iterations that begin before the records do, that hold foreign calls,
    or another number of calls than most.
    """
    calls = CallJoiner(hold_ns=0).update(records, now_ns=FOREVER)
    if not len(calls):
        return None
    begins, ends = _iterations(samples, epoch_s)
    whole = begins >= records["start_ns"][records["kind"] != DONE].min()
    begins, ends = begins[whole], ends[whole]
    if not len(begins):
        return None
    line = timeline(calls, records)
    used = Used.find(line.host_ns, begins, ends)
    if used is None:
        return None
    kinds = _Kinds.of(line.calls, used)
    line.settle(kinds.cell, kinds.count)
    own = line.own(used)
    chosen = ends[used.iterations]
    return RankProfile(
        rank=rank,
        node=node,
        host=host,
        device=device,
        start_t=float(begins[used.iterations[0]]) / 1e9 + epoch_s,
        end_t=float(chosen[-1]) / 1e9 + epoch_s,
        iterations=len(used.iterations),
        iteration_s=float(np.median(chosen - begins[used.iterations])) / 1e9,
        compute_s=float(np.median(own)) if len(own) else None,
        compute_spread_s=_spread(own),
        cells=_cells(line, kinds, used, ops, groups),
    )


def _iterations(samples: Iterable[StepSample], epoch_s: float) -> tuple[Ints, Ints]:
    """(begins, ends) of those that are whole and clean, on the records' clock."""
    kept: list[tuple[float, float]] = []
    previous_s: float | None = None
    for sample in samples:
        begin_s = sample.end_s - sample.duration_s
        # a pause left out of the duration shows as a begin after the end before
        whole = previous_s is None or abs(begin_s - previous_s) < 1e-4
        previous_s = sample.end_s
        if whole and sample.iterations == 1 and not sample.foreign_calls:
            kept.append((begin_s - epoch_s, sample.end_s - epoch_s))
    # an epoch time has a quarter of a microsecond: the call that is the boundary begins with it
    edges = np.round(np.array(kept, np.float64).reshape(-1, 2) * 1e9).astype(np.int64) - 1000
    return edges[:, 0], edges[:, 1]


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """Which place of the iteration each call has."""

    cell: Ints
    """Of each call, -1 none."""
    position: Ints
    """Of each cell."""
    varies: NDArray[np.bool_]
    """Of each cell: sizes differ from one iteration to the next."""

    @property
    def count(self) -> int:
        return len(self.position)

    @classmethod
    def of(cls, calls: NDArray[np.void], used: Used) -> _Kinds:
        mine = np.flatnonzero(used.of >= 0)
        calls, iteration = calls[mine], used.of[mine]
        size = calls["size_bytes"]
        base = _codes(calls["group"], calls["op"], calls["peer"])
        full = _codes(base, size)
        seen = np.unique(full * len(used.iterations) + iteration)
        rare = np.bincount(seen // len(used.iterations))[full] * 2 < len(used.iterations)
        kind = _codes(base, np.where(rare, -1, size))
        ordinal = _ordinals(kind * len(used.iterations) + iteration)
        times = np.zeros(int(kind.max(initial=0)) + 1, np.int64)
        np.maximum.at(times, kind, ordinal + 1)
        folds = np.minimum(times, MAX_POSITIONS)[kind]
        fold = ordinal * folds // times[kind]
        cells, inverse = np.unique(kind * MAX_POSITIONS + fold, return_inverse=True)
        first = np.full(len(cells), FOREVER, np.int64)
        inverse = inverse.reshape(-1)
        np.minimum.at(first, inverse, ordinal)
        varies = np.zeros(len(cells), np.bool_)
        varies[inverse[rare]] = True
        cell = np.full(len(used.of), -1, np.int64)
        cell[mine] = inverse
        return cls(cell, first, varies)


def _codes(*columns: NDArray[np.integer]) -> Ints:
    """One number for each combination of values."""
    codes: Ints = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        codes = codes * (len(values) + 1) + inverse.reshape(-1)
    return np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _ordinals(keys: Ints) -> Ints:
    """How many equal keys came before each."""
    order = np.argsort(keys, kind="stable")
    fresh = np.concatenate(([True], np.diff(keys[order]) != 0)) if len(keys) else order > 0
    place = np.arange(len(keys))
    ordinals = np.empty(len(keys), np.int64)
    ordinals[order] = place - np.maximum.accumulate(np.where(fresh, place, 0))
    return ordinals


def _cells(
    line: Line, kinds: _Kinds, used: Used, ops: Sequence[str], groups: Sequence[GroupLine]
) -> tuple[CallCell, ...]:
    """Cells in the order of their first calls; of too many those in which most time went."""
    mine = np.flatnonzero(kinds.cell >= 0)
    order = mine[np.argsort(kinds.cell[mine], kind="stable")]
    members = np.split(order, np.flatnonzero(np.diff(kinds.cell[order])) + 1)
    members = [m for m in members if len(np.unique(used.of[m])) * 2 >= len(used.iterations)]
    if len(members) > _MAX_CELLS:
        taken = [float(line.waited[m].sum()) for m in members]
        members = [members[index] for index in np.argsort(taken)[-_MAX_CELLS:]]
    members.sort(key=lambda m: int(m[0]))
    gaps = line.gaps()
    made = []
    for calls in members:
        call, cell = line.calls[calls[0]], kinds.cell[calls[0]]
        number = int(call["group"])
        group = groups[number] if number < len(groups) else None
        ranks = () if group is None or group.ranks is None else group.ranks
        peer = int(call["peer"])
        exact = calls[line.exact[calls]]
        durations = line.calls["duration_ns"][exact] / 1e9
        known = len(exact) >= _MIN_KNOWN * len(calls)
        waits = line.waited[calls] / 1e9
        made.append(
            CallCell(
                group=ranks,
                label="" if group is None else group_label(group.desc or group.name),
                op=ops[call["op"]] if call["op"] < len(ops) else str(call["op"]),
                size_bytes=0 if kinds.varies[cell] else int(call["size_bytes"]),
                position=int(kinds.position[cell]),
                peer=ranks[peer] if 0 <= peer < len(ranks) else None,
                calls=len(calls),
                duration_s=float(np.median(durations)) if known else None,
                least_s=float(np.quantile(durations, _LEAST_QUANTILE)) if known else None,
                wait_s=float(np.median(waits)),
                gap_s=float(np.median(gaps[calls])) / 1e9,
                spread_s=_spread(durations if known else waits),
                hidden_s=float(np.median(line.hidden[calls])) / 1e9,
                overlap=float(np.mean(line.overlap[calls])),
            )
        )
    return tuple(made)


def _spread(values: Floats) -> float:
    if not len(values):
        return 0.0
    return float(np.median(np.abs(values - np.median(values))))
