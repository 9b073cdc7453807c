"""What planning must know of a job's times, from profiles of its healthy workers. Pure.

In: a job's `JobFacts`, its healthy `RankProfile`s. Out: the facts with `stage_s`, `dp_s`, `pp_s`
and `iteration_s` as measured:

    JobFacts(pp=2, dp=2, …, stage_s=(0.021, 0.024), dp_s=0.034, pp_s=0.002, iteration_s=0.231)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from failslow.records import CallCell, JobFacts, RankProfile

__all__ = ["calibrate"]


def calibrate(facts: JobFacts, profiles: Sequence[RankProfile]) -> JobFacts:
    """`facts` with what the profiles tell; what they do not tell stays as it is."""
    by_rank = {profile.rank: profile for profile in profiles}
    world = facts.pp * facts.dp * facts.tp
    ranks = facts.ranks or tuple(range(world))
    if len(ranks) != world or not by_rank.keys() >= set(ranks):
        return facts
    stage_s = _stages(facts, ranks, by_rank)
    iteration_s = median(by_rank[rank].iteration_s for rank in ranks)
    return replace(
        facts,
        stage_s=stage_s or facts.stage_s,
        dp_s=_rings(facts, ranks, by_rank) or facts.dp_s,
        pp_s=_handovers(facts, ranks, by_rank) or facts.pp_s,
        iteration_s=iteration_s or facts.iteration_s,
    )


def _stages(
    facts: JobFacts, ranks: Sequence[int], by_rank: Mapping[int, RankProfile]
) -> tuple[float, ...]:
    """Own time per micro-batch of each stage: the median over its workers."""
    share = facts.microbatches / facts.dp
    stages = []
    for stage in range(facts.pp):
        own = [by_rank[rank].compute_s for rank in _of_stage(facts, ranks, stage)]
        known = [seconds for seconds in own if seconds is not None]
        if not known:
            return ()
        stages.append(median(known) / share)
    return tuple(stages)


def _rings(facts: JobFacts, ranks: Sequence[int], by_rank: Mapping[int, RankProfile]) -> float:
    """Seconds an iteration spends in the transfers of the slowest gradient ring."""
    if facts.dp < 2:
        return 0.0
    slowest = 0.0
    for stage in range(facts.pp):
        for shard in range(facts.tp):
            ring = frozenset(_of_stage(facts, ranks, stage)[shard :: facts.tp])
            transfers: dict[tuple[str, int, int], list[float]] = {}
            for rank in ring:
                for cell in by_rank[rank].cells:
                    seconds = _seconds(cell)
                    if cell.peer is not None or seconds is None or len(cell.group) != len(ring):
                        continue  # the lengths first: a set of all ranks takes long to make
                    if frozenset(cell.group) == ring:
                        key = (cell.op, cell.size_bytes, cell.position)
                        transfers.setdefault(key, []).append(
                            seconds * cell.calls / max(1, by_rank[rank].iterations)
                        )
            # who arrived last waited for nobody: the least is the transfer
            total_s = sum(min(of) for of in transfers.values() if len(of) == len(ring))
            slowest = max(slowest, total_s)
    return slowest


def _handovers(facts: JobFacts, ranks: Sequence[int], by_rank: Mapping[int, RankProfile]) -> float:
    """Seconds in which a micro-batch's activations and gradients pass from stage to stage."""
    if facts.pp < 2:
        return 0.0
    stage_of = {rank: stage for stage in range(facts.pp) for rank in _of_stage(facts, ranks, stage)}
    seconds = [
        took_s
        for rank in ranks
        for cell in by_rank[rank].cells
        if cell.peer in stage_of
        and stage_of[cell.peer] != stage_of[rank]
        and (took_s := _seconds(cell)) is not None
    ]
    return 2.0 * min(seconds) if seconds else 0.0


def _seconds(cell: CallCell) -> float | None:
    return cell.least_s if cell.least_s is not None else cell.duration_s


def _of_stage(facts: JobFacts, ranks: Sequence[int], stage: int) -> Sequence[int]:
    """The workers of a stage, replica by replica."""
    return ranks[stage * facts.dp * facts.tp : (stage + 1) * facts.dp * facts.tp]
