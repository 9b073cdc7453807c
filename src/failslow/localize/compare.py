"""The profiles of a job's workers, now and in healthy times, as one table that can be compared.

In: `RankProfile`s. Out: arrays of a row a worker, a call, or a link; durations only, as the clocks
of hosts are never compared:

    table = Table(now, healthy)
    table.own(NOW)          # seconds per iteration each worker spent by itself
    table.roles             # workers of equal number do the same work on the same device model
    table.lateness          # seconds per iteration others waited for each worker
    table.transfers()       # what each group or directed pair takes when nobody is late

Of a synchronous call the worker that arrives last waits least: the transfer takes the least
duration over the ranks, and a rank is late by what it waits less than the others. (A pair's send
and recv are such a call of two.) Where a root gives to all, only the root is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from failslow.localize.compare_links import Transfers, judge, mix, numbers, unique
from failslow.localize.digest_line import OVERLAP_SHARE
from failslow.records import CallCell, RankProfile

__all__ = ["HEALTHY", "NOW", "Table"]

NOW, HEALTHY = 0, 1
_SENDS, _RECVS = ("send",), ("recv_",)
_GIVES = ("broadcast_", "scatter_")
"""Ops in which all wait for the root and the root for nobody."""
_UNCOMPARED = ("reduce_", "gather_", "barrier", "monitored_barrier_", "recv_any_source_")
"""Ops of which neither the time of the transfer nor who was late can be told."""

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_NONE = -1


class Table:
    """Both sets of profiles. Workers are numbered by the order of `profiles`: now, then healthy."""

    def __init__(self, now: Sequence[RankProfile], healthy: Sequence[RankProfile]) -> None:
        """Raises ValueError when a rank has two profiles of one time."""
        for profiles in (now, healthy):
            if len({p.rank for p in profiles}) < len(profiles):
                raise ValueError("a rank has two profiles; give one for each")
        self.profiles = [*now, *healthy]
        self.count = len(now)
        self.rank = np.array([p.rank for p in self.profiles], np.int64)
        self.era = (np.arange(len(self.profiles)) >= self.count).astype(np.int64)
        self.iteration_s = np.array([p.iteration_s for p in self.profiles], np.float64)
        self._device = numbers(p.device for p in self.profiles)
        self._host = numbers(p.host or p.node for p in self.profiles)
        self.groups: list[tuple[int, ...]] = []
        """Global ranks of each group met."""
        self.ops: list[str] = []
        self._flatten()
        self._keys()
        self.stage, self.stages = self._stages()
        """(place in its pipeline, -1 none; stages of that pipeline) of each worker."""
        self.roles = unique(mix(self._signature, self.stage, self._device))
        self.lateness, self.lateness_known = self._lateness()

    # -- workers -------------------------------------------------------------------------------

    def own(self) -> tuple[Floats, Floats]:
        """(seconds of its own per iteration, their standard error) of each worker; nan unknown.

        An unseen wait counts as waiting unless somebody, now or in healthy times, was seen to go
        on while the same call was under way.
        """
        own = np.array([_nan(p.compute_s) for p in self.profiles])
        if self.hidden_s.any():
            call = unique(self._eraless)
            told = np.zeros(len(call), np.bool_)
            told[call[self.overlap >= OVERLAP_SHARE]] = True
            shown = np.where(told[call], self.hidden_s * self.times, 0.0)
            own += np.bincount(self.who, weights=shown, minlength=len(own))
        spread = np.array([p.compute_spread_s for p in self.profiles])
        count = np.array([max(p.iterations, 1) for p in self.profiles])
        return own, 1.2533 * 1.4826 * spread / np.sqrt(count)  # of the median of Gaussian values

    def before(self) -> Ints:
        """Index of each worker's healthy profile, -1 where it has none of the same work."""
        places = {int(rank): i for i, rank in enumerate(self.rank) if i >= self.count}
        found = np.full(self.count, _NONE, np.int64)
        for index in range(self.count):
            place = places.get(int(self.rank[index]), _NONE)
            if place >= 0 and self.roles[place] == self.roles[index]:
                found[index] = place
        return found

    @property
    def mentioned(self) -> set[int]:
        """All ranks that are in some group."""
        return {rank for group in self.groups for rank in group}

    # -- calls ---------------------------------------------------------------------------------

    def _flatten(self) -> None:
        """Columns of a row a cell."""
        cells = [cell for profile in self.profiles for cell in profile.cells]
        counts = [len(profile.cells) for profile in self.profiles]
        self.who = np.repeat(np.arange(len(counts)), counts)
        self.index = np.arange(len(cells)) - np.repeat(np.cumsum([0, *counts])[:-1], counts)
        """Place among its worker's cells."""
        self.gid = self._group_numbers([cell.group for cell in cells])
        first = np.unique(self.gid, return_index=True)[1].tolist()
        self.labels = [cells[index].label for index in first]
        """What torch calls each group."""
        self.op = numbers(map(attrgetter("op"), cells), self.ops)
        self.size = _column(cells, "size_bytes", np.int64)
        self.place = _column(cells, "position", np.int64)
        peers = [_NONE if cell.peer is None else cell.peer for cell in cells]
        self.peer = np.fromiter(peers, np.int64, len(peers))
        iterations = np.array([max(p.iterations, 1) for p in self.profiles], np.int64)
        self.times = _column(cells, "calls", np.float64) / iterations[self.who]
        """Calls an iteration makes of it."""
        self.duration_s = _column(cells, "duration_s", np.float64)
        self.least_s = _column(cells, "least_s", np.float64)
        self.wait_s = _column(cells, "wait_s", np.float64)
        self.hidden_s = _column(cells, "hidden_s", np.float64)
        self.overlap = _column(cells, "overlap", np.float64)

    def _group_numbers(self, column: Sequence[tuple[int, ...]]) -> Ints:
        """A world of 10,000 is hashed once, not once a cell: equal groups mostly are one object."""
        _, first, which = np.unique(
            np.fromiter(map(id, column), np.int64, len(column)),
            return_index=True,
            return_inverse=True,
        )
        coded = numbers([column[index] for index in first.tolist()], self.groups)
        return np.asarray(coded[which.reshape(-1)], np.int64)

    def _keys(self) -> None:
        """Number the calls: cells of equal number are one call as its ranks saw it."""
        kinds = {name: self._is(names) for name, names in (("s", _SENDS), ("r", _RECVS))}
        me = self.rank[self.who]
        self.paired = (kinds["s"] | kinds["r"]) & (self.peer >= 0)
        self.src = np.where(self.paired, np.where(kinds["s"], me, self.peer), _NONE)
        self.dst = np.where(self.paired, np.where(kinds["s"], self.peer, me), _NONE)
        self._op_or_pair = np.where(self.paired, len(self.ops), self.op)
        self._sizes = np.array([len(g) for g in self.groups] or [0], np.int64)
        gsize = self._sizes[self.gid] if len(self.gid) else self.gid
        pair = (self.src, self.dst)
        key = mix(self.gid, self._op_or_pair, self.size, self.place, *pair, self.era[self.who])
        self._by_call = np.argsort(key, kind="stable")
        edges = np.diff(key[self._by_call], prepend=key[self._by_call[:1]]) != 0
        self.call = np.empty(len(key), np.int64)
        self.call[self._by_call] = np.cumsum(edges)
        self._eraless = mix(self.gid, self._op_or_pair, self.size, self.place, *pair)
        kind = mix(self.op, self.size, gsize, np.round(self.times).astype(np.int64))
        self._signature = self._summed(kind)

    def _summed(self, hashes: Words) -> Words:
        """Of each worker's cells, whatever their order."""
        total = np.zeros(len(self.profiles), np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(total, self.who, hashes)
        return total

    def _is(self, names: Sequence[str]) -> Bools:
        return np.array([op in names for op in self.ops] or [False], np.bool_)[self.op]

    def _stages(self) -> tuple[Ints, Ints]:
        """Place of each worker among those it passes messages with, and how many these are.

        Stages of a pipeline do other work even where they make the same calls; in a ring, where
        all make the same calls in the same order, there are none.
        """
        if not self.paired.any():
            return np.full(len(self.rank), _NONE, np.int64), np.zeros(len(self.rank), np.int64)
        ranks, ends = np.unique(
            np.concatenate((self.src[self.paired], self.dst[self.paired])), return_inverse=True
        )
        ends = ends.reshape(2, -1)
        graph = coo_array((np.ones(ends.shape[1]), (ends[0], ends[1])), shape=(len(ranks),) * 2)
        part = connected_components(graph, directed=False)[1]
        sequence = self._summed(mix(self.op, self.size, self.index) * self.paired)
        order_of = dict(zip(self.rank.tolist(), sequence.tolist(), strict=True))
        orders = {frozenset(group): group for group in self.groups if len(group) <= len(ranks)}
        place: dict[int, tuple[int, int]] = {}
        order = np.argsort(part, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(part[order])) + 1):
            together = ranks[members].tolist()
            if len({order_of.get(rank) for rank in together}) == 1:
                continue
            line = orders.get(frozenset(together), together)
            place |= {rank: (index, len(line)) for index, rank in enumerate(line)}
        found = [place.get(rank, (_NONE, 0)) for rank in self.rank.tolist()]
        columns = np.array(found, np.int64)
        return columns[:, 0], columns[:, 1]

    def _lateness(self) -> tuple[Floats, Bools]:
        """(seconds per iteration others waited for each worker at least, whether that is known).

        In each call the last one to come is waited for by who waits longest.
        """
        duration = np.where(self._is(_UNCOMPARED), np.nan, self.duration_s)
        # groups of which nobody knows who is in them are not one group
        duration = np.where(self._sizes[self.gid] == 0, np.nan, duration)
        longest = self._of_call(np.fmax, duration)[self.call] if len(self.call) else duration
        behind = longest - duration
        gives = self._is(_GIVES)
        root = gives & (self.peer == self.rank[self.who])
        behind = np.where(gives & ~root, np.nan, behind)
        known = np.isfinite(behind)
        size = len(self.profiles)
        late = np.bincount(
            self.who, weights=np.where(known, behind * self.times, 0.0), minlength=size
        )
        told: Bools = np.bincount(self.who, weights=known, minlength=size) > 0
        return late.astype(np.float64), told

    def _of_call(self, how: np.ufunc, values: Floats) -> Floats:
        """`how` over the cells of each call."""
        order = self._by_call
        starts = np.flatnonzero(np.diff(self.call[order], prepend=-1))
        return np.asarray(how.reduceat(values[order], starts), np.float64)

    # -- transfers -----------------------------------------------------------------------------

    def transfers(self) -> Transfers:
        """What groups and pairs take now: against their healthy times, else against others."""
        usable = ~self._is(_UNCOMPARED) & ~self._is(_GIVES) & (self.size != 0)
        usable &= self._sizes[self.gid] != 1  # who is alone in a group sends nobody anything
        order = self._by_call
        cells = order[usable[order]]
        if not len(cells):
            return Transfers.none()
        starts = np.flatnonzero(np.diff(self.call[cells], prepend=-1))
        present = np.diff(np.append(starts, len(cells)))
        first = cells[starts]
        whole = np.where(self.paired[first], 2, self._sizes[self.gid[first]]) == present
        # nan where a rank's time is unknown: it may be the last one's
        took_s = np.minimum.reduceat(self.least_s[cells], starts)
        row = np.repeat(np.arange(len(starts)), present)
        good = whole & np.isfinite(took_s)
        renumbered = np.cumsum(good) - 1
        kept = good[row]
        first = first[good]
        return judge(
            unit=unique(mix(self.gid[first], self.src[first], self.dst[first])),
            call=self._eraless[first],
            healthy=self.era[self.who[first]] == HEALTHY,
            kind=self._comparable(first),
            took_s=took_s[good],
            times=self.times[first],
            ends=(self.gid[first], self.src[first], self.dst[first]),
            cell_row=renumbered[row[kept]],
            cell_rank=self.rank[self.who[cells[kept]]],
            cell_wait_s=(self.wait_s * self.times)[cells[kept]],
        )

    def _comparable(self, cells: Ints) -> Words:
        """Calls of equal number compare: the same message among as many workers, of the same
        device models, on as many hosts; of pairs, between workers of the same roles."""
        hosts = dict(zip(self.rank.tolist(), self._host.tolist(), strict=True))
        devices = dict(zip(self.rank.tolist(), self._device.tolist(), strict=True))
        span = np.array([len({hosts.get(r, _NONE) for r in group}) for group in self.groups])
        model = numbers(frozenset(devices.get(r, _NONE) for r in group) for group in self.groups)
        paired = self.paired[cells]
        src, dst = self._worker_of(self.src[cells]), self._worker_of(self.dst[cells])
        roles, on = np.append(self.roles, _NONE), np.append(self._host, _NONE)
        near = on[src] == on[dst]
        gid = self.gid[cells]
        return mix(
            self._op_or_pair[cells],
            self.size[cells],
            self.place[cells],
            np.where(paired, 2, self._sizes[gid]),
            np.where(paired, near, span[gid]),
            model[gid],
            roles[src],
            roles[dst],
        )

    def _worker_of(self, ranks: Ints) -> Ints:
        """A profile of each rank, -1 where there is none."""
        order = np.argsort(self.rank, kind="stable")
        place = np.minimum(np.searchsorted(self.rank[order], ranks), len(order) - 1)
        found = order[place]
        return np.where(self.rank[found] == ranks, found, _NONE)


def _column(cells: Sequence[CallCell], name: str, kind: type[np.generic]) -> NDArray[Any]:
    """One field of all cells, without a list between: there are millions. None becomes nan."""
    try:
        return np.fromiter(map(attrgetter(name), cells), kind, len(cells))
    except TypeError:
        return np.array([getattr(cell, name) for cell in cells], kind)


def _nan(value: float | None) -> float:
    return np.nan if value is None else value
