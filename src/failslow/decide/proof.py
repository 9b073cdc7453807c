"""Whether a placement is the fastest there is, for a few hosts that hold several blocks each.

In: a `TopologyModel` and the seconds a placement takes. Out: a faster placement, or none; then
`complete` says whether none can be, or it only took too long to find out:

    proof = Proof(model)
    proof.faster(model.predict(placement))    # array (pp, dp), or None
    proof.complete                            # True: every placement was excluded

An iteration is the slowest replica and the slowest ring. Rings take one of a few times (a stage's
`dp_s` times a link), so each is tried as a limit: which links a stage's ring may use, and what is
left for a replica. Within it replicas are put together one after the other, in the order of the
rings; what cannot be kept any more ends a branch. Two things keep that small: hosts whose exchange
makes no difference are tried once, and so is what is left of the blocks after some replicas, with
those ends of the rings that are not free to go anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from failslow.decide.topology import Blocks, Floats, TopologyModel

__all__ = ["Proof"]

_SAME = 1e-9
"""Iteration times closer than this share are equal."""
_WORK = 200_000
"""Blocks tried at places, by default: about a second."""

Column = tuple[int, ...]
"""The kind of block at each stage of a replica."""


class _Spent(Exception):
    """The work allowed is done."""


class Proof:
    """A search for faster placements. work: how many blocks it may try at places altogether.

    `faster` is asked for ever shorter times: what was hopeless stays so.
    """

    def __init__(self, model: TopologyModel, work: int = _WORK) -> None:
        self._model, self._left = model, work
        self._pp, self._dp, self._rounds = model.pp, model.dp, model.microbatches - 1
        self._stock = _Stock(model)
        hosts = self._stock.hosts
        self._link: list[list[float]] = model.link[np.ix_(hosts, hosts)].tolist()
        self._stage_s = [float(seconds) for seconds in model.stage_s]
        self._half_s = 0.5 * float(model.pp_s)
        self._rings = np.multiply.outer(
            np.asarray(model.dp_s, dtype=np.float64), model.link[np.ix_(hosts, hosts)]
        )
        self._hopeless: dict[float, set[tuple[object, ...]]] = {}
        """By the rings' limit: states that had no way on, and have none under a lower limit."""
        self.complete = self._dp == 1 or math.gcd(model.ring_step, self._dp) == 1
        """Nothing was left out so far."""

    def faster(self, time_s: float) -> Blocks | None:
        """A placement that takes less than `time_s`."""
        limit_s = time_s * (1.0 - _SAME) - self._model.other_s
        levels = np.unique(self._rings) if self._dp > 1 else np.zeros(1)
        try:
            for ring_s in levels.tolist() if self.complete else ():
                columns = self._within(ring_s, limit_s - ring_s)
                if columns:
                    return self._placed(columns)
        except _Spent:
            self.complete = False
        return None

    def _within(self, ring_s: float, replica_s: float) -> list[Column]:
        """Replicas that each take less than `replica_s`, their rings at most `ring_s`."""
        if replica_s <= 0.0:
            return []
        allowed = self._rings <= ring_s if self._dp > 1 else np.ones(self._rings.shape, np.bool_)
        hopeless = self._hopeless.setdefault(ring_s, set())
        level = _Level(self._stock, allowed, self._dp, hopeless)
        level.heads = self._ideal_heads(level.room)
        for kinds in self._stock.orbits:  # one that fits nowhere ends the search at once
            if next(self._columns(level, replica_s, level.start(kinds)), None) is None:
                return []
            self._stock.refill()
        columns: list[Column] = []
        self._fill(level, replica_s, columns)
        self._stock.refill()
        return columns

    def _fill(self, level: _Level, replica_s: float, columns: list[Column]) -> bool:
        """Add the replicas that are missing; whether that was possible."""
        if len(columns) == self._dp:
            return True
        ends = level.ends(columns, closing=len(columns) == self._dp - 1)
        state = level.state(ends)
        if state in level.hopeless:
            return False
        for column in self._columns(level, replica_s, ends):
            columns.append(column)
            if self._fill(level, replica_s, columns):
                return True
            columns.pop()
        level.hopeless.add(state)
        return False

    def _columns(self, level: _Level, replica_s: float, ends: _Ends) -> Iterator[Column]:
        """Every replica that can come next, its blocks taken from the stock meanwhile.

        From the last stage to the first, for what is in flight counts from a stage on.
        """
        stock, left = self._stock, self._stock.left
        touched = set(ends.touched)
        wanted_slowdown = stock.slowdown[min(ends.wanted)] if ends.wanted else 0.0

        def longer(
            stage: int, tail: Column, tail_s: float, period_s: float, wanted: bool
        ) -> Iterator[Column]:
            if stage < 0:
                yield tail
                return
            for kind in stock.different(touched):
                self._left -= 1
                if self._left < 0:
                    raise _Spent
                host, found = stock.host[kind], wanted or kind in ends.wanted
                if not found and stage == 0:
                    continue
                if not level.fits(stage, host, ends) or not level.holds(tail, host, ends):
                    continue
                stage_s = self._stage_s[stage] * stock.slowdown[kind]
                total_s, longest_s = tail_s + stage_s, max(period_s, stage_s)
                if tail:
                    there = stock.host[tail[0]]
                    ahead_s = self._half_s * self._link[host][there]
                    back_s = self._half_s * self._link[there][host]
                    total_s, longest_s = total_s + ahead_s + back_s, max(longest_s, ahead_s, back_s)
                head_s, head_period_s = level.heads[stage][min(level.room, stock.held(host)) - 1]
                if not found:  # it is still to come, and as slow as it is
                    soonest_s = min(self._stage_s[:stage])
                    head_s += soonest_s * (wanted_slowdown - stock.quickest)
                    head_period_s = max(head_period_s, soonest_s * wanted_slowdown)
                if (inside := self._pp - stage) <= self._rounds:
                    longest_s = max(longest_s, total_s / inside)
                fill_s, least_s = total_s + head_s, max(longest_s, head_period_s)
                if self._pp <= self._rounds:
                    least_s = max(least_s, fill_s / self._pp)
                if fill_s + self._rounds * least_s >= replica_s:
                    continue
                first = host not in touched
                touched.add(host)
                left[kind] -= 1
                yield from longer(stage - 1, (kind, *tail), total_s, longest_s, found)
                left[kind] += 1
                if first:
                    touched.discard(host)

        return longer(self._pp - 1, (), 0.0, 0.0, not ends.wanted)

    def _ideal_heads(self, room: int) -> list[list[tuple[float, float]]]:
        """(all time, longest time) of the stages before each and of the transfers from them, if the
        best blocks and links there are were theirs, by how many of them may share its host; no
        more than `room` in a row may share any."""
        quickest = self._stock.quickest
        near = min(map(min, self._link))
        away = min(
            (x for a, row in enumerate(self._link) for b, x in enumerate(row) if a != b),
            default=near,
        )
        near, away = min(near, away) * self._half_s, away * self._half_s
        heads = []
        for stage in range(self._pp):
            best_s = [stage_s * quickest for stage_s in self._stage_s[:stage]]
            head = []
            for same in range(room):
                hops = math.ceil(max(0, stage - same) / room)
                total_s = sum(best_s) + 2.0 * (hops * away + (stage - hops) * near)
                head.append((total_s, max([*best_s, away * (hops > 0), near * (stage > 0)])))
            heads.append(head)
        return heads

    def _placed(self, columns: list[Column]) -> Blocks:
        """The blocks of those kinds; one replica after the other as the rings go."""
        blocks = [list(of_kind) for of_kind in self._stock.blocks]
        placement = np.empty((self._pp, self._dp), dtype=np.int64)
        for number, column in enumerate(columns):
            at = number * self._model.ring_step % self._dp
            placement[:, at] = [blocks[kind].pop() for kind in column]
        return placement


class _Stock:
    """The blocks, by kind: those of one host that are as slow as one another."""

    def __init__(self, model: TopologyModel) -> None:
        self.hosts = np.unique(model.host)
        """Those that hold a block; from here on by their number among these."""
        own = np.searchsorted(self.hosts, model.host)
        kinds = sorted(
            {*zip(own.tolist(), model.slowdown.tolist(), strict=True)},
            key=lambda kind: (-kind[1], kind[0]),
        )
        self.host = [host for host, _ in kinds]
        self.slowdown = [slowdown for _, slowdown in kinds]
        self.blocks = [
            np.flatnonzero((own == host) & (model.slowdown == slowdown)).tolist()
            for host, slowdown in kinds
        ]
        self.of_host = [
            [kind for kind, (of, _) in enumerate(kinds) if of == host]
            for host in range(len(self.hosts))
        ]
        self.group = self._groups(model.link[np.ix_(self.hosts, self.hosts)])
        """Of each host; any two hosts of a group can be exchanged without any difference."""
        self._rank = [self.of_host[host].index(kind) for kind, host in enumerate(self.host)]
        orbits: dict[tuple[int, int], list[int]] = {}
        for kind, host in enumerate(self.host):
            orbits.setdefault((self.group[host], self._rank[kind]), []).append(kind)
        self.orbits = sorted(
            map(frozenset, orbits.values()), key=lambda kinds: -self.slowdown[min(kinds)]
        )
        """Kinds that such exchanges turn into one another, the slowest first."""
        self.left = [len(of_kind) for of_kind in self.blocks]
        self.counts = np.bincount(own)
        """Blocks of each host."""
        self.quickest = min(self.slowdown)

    def refill(self) -> None:
        """All blocks are there again."""
        self.left[:] = [len(of_kind) for of_kind in self.blocks]

    def different(self, touched: set[int]) -> Iterator[int]:
        """The kinds there are; of hosts that nothing tells apart one's only."""
        seen = set()
        for kind, count in enumerate(self.left):
            if not count:
                continue
            host = self.host[kind]
            if host not in touched:
                alike = (self.group[host], self._rank[kind], self.of(host))
                if alike in seen:
                    continue
                seen.add(alike)
            yield kind

    def of(self, host: int) -> tuple[int, ...]:
        """How many blocks of each kind a host has left."""
        return tuple(self.left[kind] for kind in self.of_host[host])

    def held(self, host: int) -> int:
        """How many blocks a host has left."""
        return sum(self.of(host))

    def _groups(self, link: Floats) -> list[int]:
        """(a b) and (b c) changing nothing, neither does (a c) = (a b)(b c)(a b)."""
        groups: list[int] = []
        firsts: list[int] = []
        holds = [
            [(self.slowdown[kind], len(self.blocks[kind])) for kind in kinds]
            for kinds in self.of_host
        ]
        for host in range(len(holds)):
            for number, first in enumerate(firsts):
                order = np.arange(len(holds))
                order[[host, first]] = first, host
                swapped = link[np.ix_(order, order)]
                if holds[host] == holds[first] and np.array_equal(swapped, link):
                    groups.append(number)
                    break
            else:
                groups.append(len(firsts))
                firsts.append(host)
        return groups


class _Ends:
    """What the next replica has to fit to: by stage, the hosts where rings began and are now."""

    def __init__(
        self,
        first: list[int],
        last: list[int],
        *,
        fresh: bool,
        closing: bool,
        wanted: frozenset[int],
    ) -> None:
        self.first, self.last = first, last
        """A host, or -1: any will do."""
        self.fresh, self.closing = fresh, closing
        """There is none yet; it is the last one."""
        self.wanted = wanted
        """Kinds of which it holds one; empty: any."""
        self.touched = {host for host in (*first, *last) if host >= 0}


class _Level:
    """The links that rings may use: `allowed`, (stages, hosts, hosts). hopeless: states known."""

    def __init__(
        self,
        stock: _Stock,
        allowed: NDArray[np.bool_],
        replicas: int,
        hopeless: set[tuple[object, ...]],
    ) -> None:
        self._stock, self.hopeless = stock, hopeless
        self._allowed: list[list[list[bool]]] = allowed.tolist()
        self._leaves_free: list[list[bool]] = np.all(allowed, axis=2).tolist()
        self._enters_free: list[list[bool]] = np.all(allowed, axis=1).tolist()
        self._all_free = bool(allowed.all())
        self._any = [-1] * len(self._allowed)
        self._replicas = replicas
        self._pool = _pools(allowed) if replicas > 1 else [[~0] * len(stock.counts)] * len(allowed)
        """By stage and host, as bits: the hosts a ring can go to from one and come back."""
        self._room = {
            pool: sum(n for host, n in enumerate(stock.counts) if pool >> host & 1)
            for pool in {pool for pools in self._pool for pool in pools}
        }
        self._apart = not self._all_free and len(self._room) > 1
        alone = [
            all(pools[host] in (0, 1 << host) for pools in self._pool)
            for host in range(len(stock.counts))
        ]
        self.room = max(
            1, *(n // replicas if one else n for one, n in zip(alone, stock.counts, strict=True))
        )
        """So many blocks of one replica at most can be on one host."""
        self.heads: list[list[tuple[float, float]]] = []

    def start(self, wanted: frozenset[int]) -> _Ends:
        """Of a replica that holds one of those kinds, beside any."""
        return _Ends(self._any, self._any, fresh=True, closing=False, wanted=wanted)

    def ends(self, columns: list[Column], *, closing: bool) -> _Ends:
        """After those replicas. A ring may begin anywhere: with a slowest block; and where every
        link may be used the order of replicas makes no difference."""
        if not columns or self._all_free:
            left = self._stock.left
            return self.start(next(o for o in self._stock.orbits if any(left[k] for k in o)))
        first = self._bound(columns[0], self._enters_free)
        last = self._bound(columns[-1], self._leaves_free)
        return _Ends(first, last, fresh=False, closing=closing, wanted=frozenset())

    def fits(self, stage: int, host: int, ends: _Ends) -> bool:
        """Whether the ring of a stage may go there."""
        allowed, first, last = self._allowed[stage], ends.first[stage], ends.last[stage]
        if self._room[self._pool[stage][host]] < self._replicas:
            return False
        if last >= 0 and not allowed[last][host]:
            return False
        return not ends.closing or first < 0 or allowed[host][first]

    def holds(self, tail: Column, host: int, ends: _Ends) -> bool:
        """Whether the hosts that rings cannot leave have blocks enough for those that pass them.

        tail: the later stages' blocks, `host` being the next one's."""
        if not self._apart or not ends.fresh:
            return True
        kinds = self._stock.host
        first = len(self._pool) - len(tail)
        pools = [self._pool[first - 1][host]]
        pools += [self._pool[first + at][kinds[kind]] for at, kind in enumerate(tail)]
        return all(
            self._replicas * sum(inside & ~pool == 0 for inside in pools) <= self._room[pool]
            for pool in pools
        )

    def state(self, ends: _Ends) -> tuple[object, ...]:
        """Equal for what only exchanges of hosts without any difference tell apart."""
        firsts: list[tuple[int, ...]] = [()] * len(self._stock.group)
        lasts = firsts.copy()
        for stage, (first, last) in enumerate(zip(ends.first, ends.last, strict=True)):
            if first >= 0:
                firsts[first] = (*firsts[first], stage)
            if last >= 0:
                lasts[last] = (*lasts[last], stage)
        held = map(self._stock.of, range(len(firsts)))
        return tuple(sorted(zip(self._stock.group, held, firsts, lasts, strict=True)))

    def _bound(self, column: Column, free: list[list[bool]]) -> list[int]:
        hosts = [self._stock.host[kind] for kind in column]
        return [-1 if free[stage][host] else host for stage, host in enumerate(hosts)]


def _pools(allowed: NDArray[np.bool_]) -> list[list[int]]:
    """(stages, hosts): the hosts, as bits, that can be gone to from each and come back from."""
    reached = allowed.astype(np.int64)
    for _ in range(allowed.shape[1].bit_length()):
        reached = np.minimum(1, reached + reached @ reached)
    there_and_back = reached * reached.swapaxes(1, 2)
    pools: list[list[int]] = (there_and_back << np.arange(allowed.shape[1])).sum(axis=2).tolist()
    return pools
