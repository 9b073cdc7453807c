"""The pipeline model with the times of a real job: how long would an iteration be if ...?

In: a job's `JobFacts` and the `RankProfile`s of its healthy workers, nothing else. Out: seconds of
an iteration, by the exact recurrence of the schedule, with workers and links as slow as asked:

    fitted = FittedJob.of(facts, profiles)
    fitted.iteration_s()                                    # as measured
    fitted.iteration_s(slow={2: 2.0})                       # rank 2 at half its speed
    fitted.iteration_s(rings={0: Ring(bytes_per_s=2.5e6)})  # a link of stage 0's ring at 20 Mbit/s

What of a healthy iteration the model does not explain (the optimizer, calls, noise) is added to all
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.errors import PlanError
from failslow.localize.calibrate import calibrate
from failslow.records import JobFacts, RankProfile
from failslow.simulate.pipeline import Pipeline

__all__ = ["FittedJob", "Ring"]

Floats: TypeAlias = "NDArray[np.float64]"

_FORWARD_SHARE = 1.0 / 3.0
"""Of a micro-batch's computation, where no call tells forward from backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring with a link that carries only so much."""

    bytes_per_s: float
    """Of the slow link..."""
    healthy_bytes_per_s: float = float("inf")
    """...and of the others, as far as that limits them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedJob:
    """One job's times."""

    facts: JobFacts
    own_s: Floats
    """(stages, replicas): a worker's computation for one micro-batch."""
    forward_share: float
    """Of it."""
    pass_s: float
    """To pass a micro-batch on, one way."""
    ring_s: Floats
    """(stages,): to reduce the gradients when all are there..."""
    ring_bytes: Floats
    """...and what then crosses each link of the ring."""
    rest_s: float
    """Of an iteration, not explained."""

    @classmethod
    def of(cls, facts: JobFacts, profiles: Sequence[RankProfile]) -> FittedJob:
        """Fit. Raises PlanError where a worker's profile is missing or tells no own time."""
        ranks = facts.ranks or tuple(range(facts.pp * facts.dp * facts.tp))
        by_rank = {profile.rank: profile for profile in profiles}
        missing = [r for r in ranks if r not in by_rank or by_rank[r].compute_s is None]
        if missing:
            raise PlanError(f"no own time is known of ranks {missing}; profile them")
        facts = calibrate(facts, profiles)
        shape = (facts.pp, facts.dp, facts.tp)
        own = np.array([by_rank[r].compute_s or 0.0 for r in ranks]).reshape(shape).max(axis=2)
        each = facts.microbatches / facts.dp
        size = np.array(
            [_ring_bytes(facts, ranks, by_rank, stage) for stage in range(facts.pp)], np.float64
        )
        fitted = cls(
            facts=facts,
            own_s=own / each,
            forward_share=_forward_share(facts, ranks, by_rank, own / each),
            pass_s=facts.pp_s / 2.0,
            ring_s=np.full(facts.pp, facts.dp_s),
            ring_bytes=size,
            rest_s=0.0,
        )
        measured_s = median(profile.iteration_s for profile in profiles)
        object.__setattr__(fitted, "rest_s", measured_s - fitted.iteration_s())
        return fitted

    def iteration_s(
        self,
        *,
        slow: Mapping[int, float] | None = None,
        rings: Mapping[int, Ring] | None = None,
    ) -> float:
        """Seconds of an iteration. slow: of ranks, how many times longer they compute. rings: by
        stage."""
        facts, own = self.facts, self.own_s.copy()
        ranks = facts.ranks or tuple(range(facts.pp * facts.dp * facts.tp))
        for rank, factor in (slow or {}).items():
            block = ranks.index(rank) // facts.tp
            own[block // facts.dp, block % facts.dp] *= factor
        passed = np.full((facts.pp - 1, facts.dp), self.pass_s)
        pipeline = Pipeline(
            "1f1b" if facts.pp > 1 else "gpipe",
            stages=facts.pp,
            micro_batches=max(1, facts.microbatches // facts.dp),
        )
        forward = own * self.forward_share
        times = pipeline.run(forward, own - forward, passed, passed)
        ring_s = self.ring_s.copy()
        for stage, ring in (rings or {}).items():
            longer = 1.0 / ring.bytes_per_s - 1.0 / ring.healthy_bytes_per_s
            ring_s[stage] += self.ring_bytes[stage] * max(0.0, longer)
        ends = times.stage_end_s.max(axis=1) + (ring_s if facts.dp > 1 else 0.0)
        return float(ends.max()) + self.rest_s


def _ring_bytes(
    facts: JobFacts, ranks: Sequence[int], by_rank: Mapping[int, RankProfile], stage: int
) -> float:
    """What an all-reduce of the stage's replicas sends over each link of its ring, an iteration."""
    first = stage * facts.dp * facts.tp
    ring = ranks[first : first + facts.dp * facts.tp : facts.tp]
    profile = by_rank[ring[0]]
    size = sum(
        cell.size_bytes * cell.calls / max(1, profile.iterations)
        for cell in profile.cells
        if set(cell.group) == set(ring) and cell.peer is None and "reduce" in cell.op
    )
    return 2.0 * (facts.dp - 1) / facts.dp * size


def _forward_share(
    facts: JobFacts, ranks: Sequence[int], by_rank: Mapping[int, RankProfile], own_s: Floats
) -> float:
    """By the time before a worker of the first stage sends its activations on."""
    if facts.pp == 1:
        return _FORWARD_SHARE
    shares = []
    for replica in range(facts.dp):
        rank = ranks[replica * facts.tp]
        gaps = [
            cell.gap_s
            for cell in by_rank[rank].cells
            if cell.op == "send" and cell.peer is not None
        ]
        if gaps and median(gaps) > 0 and own_s[0, replica] > 0:
            shares.append(median(gaps) / own_s[0, replica])
    return float(np.clip(median(shares), 0.1, 0.9)) if shares else _FORWARD_SHARE
