"""The moves of S3's local search: exchange two blocks, and what that does to the iteration.

In: a `TopologyModel` and a placement. Out: the same placement, improved. An exchange touches two
replicas and two stages, so only these are evaluated, for all partners of a block at once.

    swaps = Swaps(model)
    swaps.improve(placement, swaps.suspects())
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from failslow.decide.topology import SLOW, Blocks, Floats, TopologyModel

__all__ = ["Key", "Swaps"]

_SAME = 1e-9
_SMALL = 64
"""With so few blocks every one is a candidate."""
_RESTART_WORK = 1 << 18
"""Exchanges that restarts may look at, about..."""
_WORK = 1 << 20
"""...and that a search may look at altogether: some seconds for 1,024 blocks."""


class Key(NamedTuple):
    """What a search minimises, in this order."""

    time_s: float
    slow_stages: int
    scatter: int
    """Minus the squares of the stages' stragglers: tells progress towards fewer such stages."""
    total_s: float
    """All replicas and rings together: tells progress where the slowest hides it."""


class _State:
    """A placement with the time of each replica and ring."""

    def __init__(self, model: TopologyModel, placement: Blocks) -> None:
        self.placement = placement.copy()
        self.replica_s = model.replica_s(placement.T)
        self.ring_s = model.ring_s(placement)
        self.slow = model.stragglers()[placement].sum(axis=1)

    def key(self) -> Key:
        return Key(
            float(self.replica_s.max() + self.ring_s.max()),
            int(np.count_nonzero(self.slow)),
            -int(self.slow @ self.slow),
            float(self.replica_s.sum() + self.ring_s.sum()),
        )


class Swaps:
    """Exchanges of two blocks under one model."""

    def __init__(self, model: TopologyModel) -> None:
        self._model = model
        self._straggler = model.stragglers().astype(np.int64)
        self._hosts = _equal_hosts(model.host)
        self._work_left = _WORK

    def suspects(self) -> Blocks:
        """Blocks worth moving, the worst first: stragglers and ends of congested links, or all."""
        model = self._model
        link = model.link.copy()
        np.fill_diagonal(link, 0.0)
        worst_link = np.maximum(link.max(axis=0), link.max(axis=1))[model.host]
        severity = np.maximum(model.slowdown, worst_link)
        order: Blocks = np.argsort(-severity, kind="stable")
        if len(order) <= _SMALL:
            return order
        bad: Blocks = order[severity[order] >= SLOW]
        return bad

    def restarts(self, suspects: int) -> int:
        """How many more starts the budget of work allows."""
        return min(24, max(1, _RESTART_WORK // (3 * suspects * len(self._model.slowdown))))

    def key(self, placement: Blocks) -> Key:
        """What `placement` is worth."""
        return _State(self._model, placement).key()

    @staticmethod
    def better(one: Key, other: Key) -> bool:
        """Whether `one` is smaller by more than rounding."""
        if abs(one.time_s - other.time_s) > _SAME * other.time_s:
            return one.time_s < other.time_s
        if one[1:3] != other[1:3]:
            return one[1:3] < other[1:3]
        return one.total_s < other.total_s * (1.0 - _SAME)

    def improve(self, placement: Blocks, suspects: Blocks) -> Blocks:
        """Exchange `suspects`, and their whole hosts, with the best partners until none helps."""
        while True:
            placement = self._exchange_blocks(placement, suspects)
            exchanged = self._exchange_hosts(placement, suspects)
            if exchanged is None:
                return placement
            placement = exchanged

    def _exchange_blocks(self, placement: Blocks, suspects: Blocks) -> Blocks:
        state = _State(self._model, placement)
        key = state.key()
        idle = 0
        while idle < len(suspects):
            for block in suspects.tolist():
                place = int(np.flatnonzero(state.placement.ravel() == block)[0])
                partner, reached = self._best_partner(state, place)
                if self.better(reached, key):
                    flat = state.placement.ravel()
                    flat[[place, partner]] = flat[[partner, place]]
                    state = _State(self._model, state.placement)
                    key, idle = state.key(), 0
                else:
                    idle += 1
                self._work_left -= state.placement.size
                if idle >= len(suspects) or self._work_left <= 0:
                    return state.placement
        return state.placement

    def _exchange_hosts(self, placement: Blocks, suspects: Blocks) -> Blocks | None:
        """The best exchange of two hosts with all their blocks, if one helps.

        Blocks of one host pass gradients faster among themselves: moving one alone breaks that.
        """
        if self._hosts is None or self._work_left <= 0:
            return None
        best, best_key = None, self.key(placement)
        for host in np.unique(self._model.host[suspects]).tolist():
            mine = self._hosts[host]
            others = np.delete(self._hosts, host, axis=0)
            # row n renames the blocks of this host to those of another, and back
            renamed = np.tile(np.arange(placement.size), (len(others), 1))
            rows = np.arange(len(others))[:, None]
            renamed[rows, mine[None]] = others
            renamed[rows, others] = mine[None]
            candidates = renamed[:, placement]
            self._work_left -= candidates.shape[0] * self._hosts.shape[1]
            fastest = candidates[int(np.argmin(self._model.predict_many(candidates)))]
            reached = self.key(fastest)
            if self.better(reached, best_key):
                best, best_key = fastest, reached
        return best

    def layouts(self) -> list[Blocks]:
        """Placements that keep hosts together, by stages and by replicas, where moving is cheap."""
        if self._hosts is None or self._hosts.size > _SMALL:
            return []
        shape = self._model.pp, self._model.dp
        blocks = self._hosts.ravel()
        return [blocks.reshape(shape), blocks.reshape(shape[::-1]).T.copy()]

    def take_back(self, current: Blocks, found: Blocks) -> Blocks:
        """`found` without the exchanges that gain nothing: as many blocks as possible stay."""
        placement = self._rotated(current, found)
        key = self.key(placement)
        for place in np.flatnonzero(current != placement).tolist():
            flat = placement.copy().ravel()
            other = int(np.flatnonzero(flat == current.ravel()[place])[0])
            flat[[place, other]] = flat[[other, place]]
            candidate = flat.reshape(placement.shape)
            if not self.better(key, reached := self.key(candidate)):
                placement, key = candidate, reached
        return placement

    def _rotated(self, current: Blocks, found: Blocks) -> Blocks:
        """A ring may begin anywhere: the rotation of all of them that moves the fewest blocks."""
        turns = [np.roll(found, turn, axis=1) for turn in range(found.shape[1])]
        stay = [int(np.count_nonzero(turned == current)) for turned in turns]
        return turns[int(np.argmax(stay))]

    def _best_partner(self, state: _State, place: int) -> tuple[int, Key]:
        """The exchange of the block at `place` that leads furthest, and where it leads."""
        model, dp = self._model, self._model.dp
        flat = state.placement.ravel()
        places = np.arange(flat.size)
        stage, replica = places // dp, places % dp
        my_stage, my_replica = divmod(place, dp)

        # two touched replicas and two touched stages of every exchange, after it
        mine, theirs = flat[place], flat
        rows = np.arange(flat.size)
        column_1 = np.repeat(state.placement[None, :, my_replica], flat.size, axis=0)
        column_2 = state.placement.T[replica]
        ring_1 = np.repeat(state.placement[None, my_stage], flat.size, axis=0)
        ring_2 = state.placement[stage]
        column_1[:, my_stage] = theirs
        column_2[rows, stage] = mine
        ring_1[:, my_replica] = theirs
        ring_2[rows, replica] = mine
        same = replica == my_replica
        column_1[rows[same], stage[same]] = mine
        column_2[same] = column_1[same]
        same = stage == my_stage
        ring_1[rows[same], replica[same]] = mine
        ring_2[same] = ring_1[same]

        dp_s = np.asarray(model.dp_s, dtype=np.float64)
        replicas = _replaced(
            state.replica_s,
            my_replica,
            replica,
            model.replica_s(column_1),
            model.replica_s(column_2),
        )
        rings = _replaced(
            state.ring_s,
            my_stage,
            stage,
            model.ring_factor(ring_1) * dp_s[my_stage],
            model.ring_factor(ring_2) * dp_s[stage],
        )
        slow, scatter = self._scattered(state, mine, theirs, my_stage, stage)
        time_s, total_s = replicas[0] + rings[0], replicas[1] + rings[1]
        level = np.flatnonzero(time_s <= time_s.min() * (1.0 + _SAME))
        at = int(level[np.lexsort((total_s[level], scatter[level], slow[level]))[0]])
        return at, Key(float(time_s[at]), int(slow[at]), int(scatter[at]), float(total_s[at]))

    def _scattered(
        self, state: _State, mine: int, theirs: Blocks, my_stage: int, stage: Blocks
    ) -> tuple[Blocks, Blocks]:
        """(stages with stragglers, scatter) after each exchange."""
        change = self._straggler[theirs] - self._straggler[mine]
        change[stage == my_stage] = 0
        here, there = state.slow[my_stage], state.slow[stage]
        slow = np.count_nonzero(state.slow) + np.sign(here + change) - np.sign(here)
        slow = slow + np.sign(there - change) - np.sign(there)
        squares = (here + change) ** 2 - here**2 + (there - change) ** 2 - there**2
        return slow, -(int(state.slow @ state.slow) + squares)


def _equal_hosts(host: Blocks) -> Blocks | None:
    """(hosts, blocks of each), or None where hosts have one block, or not all as many."""
    counts = np.bincount(host)
    if counts.min() != counts.max() or counts[0] == 1 or len(counts) == 1:
        return None
    return np.argsort(host, kind="stable").reshape(len(counts), -1)


def _replaced(
    times_s: Floats, one: int, others: NDArray[np.int64], one_s: Floats, others_s: Floats
) -> tuple[Floats, Floats]:
    """(largest, sum) of `times_s` once entry `one` is `one_s` and entry `others` is `others_s`.

    times_s: (n,); the rest: one for each exchange, (k,). Where one and other are the same entry,
    both give its new time.
    """
    # of the three largest at least one is neither of the two
    top = np.argsort(times_s)[::-1][:3]
    rest = np.full(len(others), -np.inf)
    for index in top[::-1]:
        rest = np.where((index != one) & (index != others), times_s[index], rest)
    total = times_s.sum() - times_s[one] + one_s
    total = total + np.where(others == one, 0.0, others_s - times_s[others])
    return np.maximum(rest, np.maximum(one_s, others_s)), total
