"""How slow workers are by their own time, whatever the job as a whole looks like. Pure.

In: the workers' iterations, what they tell of their micro-batches, the layout in force. Out: own
time over the healthy one of whoever had the same part of the model:

    own = OwnTimes(workers)
    own.arrange(facts, in_force, initial)
    own.learn()                             # a suspicion begins: what was healthy until now
    own.slowdown(2)                         # 1.97

Healthy times are kept by position, for a worker that changed its place has another part. Where they
are not known (the program changed, the controller was restarted) peers that nobody blames stand
for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import median

from failslow.decide import InForce
from failslow.pipeline.series import Worker
from failslow.records import Finding, JobFacts

__all__ = ["OWN", "OwnTimes"]

OWN = 5
"""Iterations at least whose median is a worker's own time now..."""
_LONG_S = 3.0
"""...and as many more as are not older: short iterations are noisy ones."""
_LIKELY_FIXED, _MOST_FIXED = 0.03, 0.5
"""Of a worker's time outside of calls: optimizer, reading of data ... One that has a micro-batch
of four left looks 10 % slow for 3 % of it, and would never get the others back."""
_PACES, _PACES_LEAST = 3, 2
"""Last letters of a worker about its pace that count: one comes every second."""
_PACES_KEPT = 64
"""Letters that tell of healthy times. Where an iteration takes seconds, those since the onset are
among them when the suspicion begins: their lower quartile is healthy all the same."""


class OwnTimes:
    """Of the workers of one job."""

    def __init__(self, workers: Mapping[int, Worker]) -> None:
        """workers: those of the job, as they are at any time."""
        self._workers = workers
        self._facts: JobFacts | None = None
        self._in_force = self._initial = InForce()
        self._positions: dict[int, int] = {}
        self._placement: tuple[int, ...] = ()
        self._moved_t: dict[int, float] = {}
        """When each worker (by rank) changed its place last, by its own clock."""
        self._usual_s: dict[int, float] = {}
        """Healthy own seconds per iteration at each position, with the even split."""
        self._usual_microbatch_s: dict[int, float] = {}
        """Healthy seconds of a micro-batch at each position."""
        self._told: dict[int, deque[tuple[float, float]]] = {}
        """(when, by its clock; seconds a micro-batch took it), as each worker (by rank) tells."""
        self._since = 0

    def arrange(
        self, facts: JobFacts | None, in_force: InForce, initial: InForce, *, since: int = 0
    ) -> None:
        """The job runs like this now, and ran like `initial` before anything was done.

        since: iterations for which it has been so.
        """
        self._facts, self._in_force, self._initial = facts, in_force, initial
        self._since = since
        placement = in_force.placement or initial.placement
        if placement is not self._placement:
            for position, rank in enumerate(placement):
                worker = self._workers.get(rank)
                if worker is not None and self._positions.get(rank, position) != position:
                    self._moved_t[rank] = worker.end_t or 0.0
            self._placement = placement
            self._positions = {rank: position for position, rank in enumerate(placement)}

    def tell(self, rank: int, seconds: float) -> None:
        """A worker says what a micro-batch takes it."""
        if seconds > 0.0:
            worker = self._workers.get(rank)
            told_t = (worker.end_t if worker is not None else None) or 0.0
            told = self._told.setdefault(rank, deque(maxlen=_PACES_KEPT))
            told.append((told_t, seconds))

    def learn(self, *, again: bool = False, before_t: float = math.inf) -> None:
        """A suspicion begins; again: it has become an episode, and what was told since is slow.

        before_t: the job's time from which on it has been slow, as after a plan for a culprit that
        is not known was taken back.
        """
        for rank, worker in self._workers.items():
            position = self._position(rank)
            if position is None:
                continue
            since_t = self._moved_t.get(rank, 0.0)
            until_t = before_t + (worker.skew_s or 0.0)
            here = (s.compute_s for s in worker.healthy if since_t < s.end_s <= until_t)
            own = _known(here)
            if len(own) >= OWN and not (again and position in self._usual_s):
                self._usual_s[position] = median(own)
            told = [seconds for t, seconds in self._told.get(rank, ()) if t <= until_t]
            known = position in self._usual_microbatch_s
            if told and (not known or (not again and len(told) >= _PACES)):
                self._usual_microbatch_s[position] = sorted(told)[(len(told) - 1) // 4]

    def forget_told(self) -> None:
        """What was told is of another split, or of slow times."""
        self._told.clear()

    def change(self) -> None:
        """The program is another one: its times do not compare."""
        self._usual_s.clear()
        self._usual_microbatch_s.clear()
        self._told.clear()

    def slowdown(self, rank: int, *, fixed: float = _LIKELY_FIXED) -> float | None:
        """By what the worker tells of its micro-batches, else by its time outside of calls.

        fixed: the share of that time which no number of micro-batches changes.
        """
        position = self._position(rank)
        if position is None:
            return None
        now_s, usual_s = self._told_s(rank), self._usual_microbatch_s.get(position)
        if now_s is not None and usual_s:
            return now_s / usual_s
        now_s, usual_s = self._own_s(rank), self._usual_s.get(position)
        if now_s is None or not usual_s:
            return None
        share = self._share(position)
        fixed = min(fixed, share) if share < 1.0 else 0.0
        return (now_s * share / usual_s - fixed) / ((1.0 - fixed) * share)

    def culprit(
        self, finding: Finding, blamed: Collection[int], *, proved_well: bool = False
    ) -> float | None:
        """How slow a device or host is now; None unknown. blamed: ranks of all culprits.

        proved_well: a pause measured it so. Where it has few micro-batches, what does not depend on
        their number makes it look slow for ever: of that as much is allowed for as can be.
        """
        if finding.what == "link":
            return None
        fixed = _MOST_FIXED if proved_well else _LIKELY_FIXED
        known = _known(self.slowdown(rank, fixed=fixed) for rank in finding.ranks)
        known = known or _known(self._beside_peers(rank, blamed) for rank in finding.ranks)
        return max(known, default=None)

    # -- parts -------------------------------------------------------------------------------------

    def _position(self, rank: int) -> int | None:
        if rank not in self._workers:
            return None
        return rank if self._facts is None else self._positions.get(rank)

    def _told_s(self, rank: int) -> float | None:
        told = [seconds for _, seconds in self._told.get(rank, ())]
        return median(told[-_PACES:]) if len(told) >= _PACES_LEAST else None

    def _own_s(self, rank: int) -> float | None:
        """What an iteration would take it now with the even split."""
        worker, position = self._workers.get(rank), self._position(rank)
        if worker is None or position is None:
            return None
        last, share = self._last(worker), self._share(position)
        return median(last) / share if len(last) >= OWN and share > 0.0 else None

    def _last(self, worker: Worker) -> list[float]:
        """Its own seconds of the iterations that tell how it is now."""
        known = [(s.end_s, s.compute_s) for s in worker.recent if s.compute_s is not None]
        begin_s = known[-1][0] - _LONG_S if known else 0.0
        long = sum(end_s >= begin_s for end_s, _ in known)
        return [own_s for _, own_s in known[-max(OWN, min(long, self._since)) :]]

    def _share(self, position: int) -> float:
        """Micro-batches at a position over those of the even split."""
        facts, counts, even = self._facts, self._in_force.microbatches, self._initial.microbatches
        if facts is None or not counts or not even:
            return 1.0
        replica = position // facts.tp % facts.dp
        return counts[replica] / even[replica] if even[replica] else 1.0

    def _beside_peers(self, rank: int, blamed: Collection[int]) -> float | None:
        """Against others that have the same stage of the model."""
        position, facts = self._position(rank), self._facts
        if position is None or facts is None:
            return None
        stage = facts.dp * facts.tp
        peers = [
            other
            for other, at in self._positions.items()
            if at // stage == position // stage and other not in blamed
        ]
        for measure in (self._told_s, self._own_s):
            mine, theirs = measure(rank), _known(measure(peer) for peer in peers)
            if mine is not None and theirs and (usual_s := median(theirs)) > 0.0:
                return mine / usual_s
        return None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
