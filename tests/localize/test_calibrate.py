"""A job's times for planning, from profiles of its healthy workers."""

from __future__ import annotations

import pytest

from failslow.localize.calibrate import calibrate
from failslow.records import CallCell, JobFacts, RankProfile

FACTS = JobFacts(pp=2, dp=2, microbatches=8)


def cell(group: tuple[int, ...], least_s: float, **more: object) -> CallCell:
    values = {
        "group": group,
        "label": "dp",
        "op": "allreduce_",
        "size_bytes": 1000,
        "position": 0,
        "calls": 10,
        "duration_s": least_s * 3.0,
        "wait_s": least_s,
        "gap_s": 0.01,
        "least_s": least_s,
    } | more
    return CallCell(**values)  # type: ignore[arg-type]  # of the values above


def profiles(compute_s: tuple[float, ...] = (0.08, 0.08, 0.12, 0.12)) -> list[RankProfile]:
    """pp 2 × dp 2: rings (0, 1) and (2, 3), stages handing over 0 -> 2 and 1 -> 3."""
    found = []
    for rank in range(4):
        ring = (0, 1) if rank < 2 else (2, 3)
        other = (rank + 2) % 4
        cells = (
            cell(ring, 0.010 + 0.005 * rank),
            cell(ring, 0.002, position=1, calls=20),
            cell((0, 1, 2, 3), 0.5, op="barrier"),
            cell(tuple(sorted((rank, other))), 0.003, op="send", peer=other),
        )
        found.append(
            RankProfile(
                rank=rank,
                node=f"n{rank}",
                start_t=0.0,
                end_t=1.0,
                iterations=10,
                iteration_s=0.2 + 0.01 * rank,
                compute_s=compute_s[rank],
                cells=cells,
            )
        )
    return found


def test_stages_rings_and_handovers_are_measured() -> None:
    facts = calibrate(FACTS, profiles())
    assert facts.stage_s == pytest.approx((0.02, 0.03))
    # the slower ring: the least over its ranks of each call, as often as it is made
    assert facts.dp_s == pytest.approx(0.020 + 2 * 0.002)
    assert facts.pp_s == pytest.approx(2 * 0.003)
    assert facts.iteration_s == pytest.approx(0.215)


def test_what_is_not_known_stays_as_it_was() -> None:
    facts = JobFacts(pp=2, dp=2, microbatches=8, stage_s=(1.0, 2.0), dp_s=3.0)
    assert calibrate(facts, profiles()[:3]) == facts
    unknown = [*profiles()[:2], *(p for p in profiles()[2:])]
    bare = [
        RankProfile(
            rank=p.rank, node=p.node, start_t=0.0, end_t=1.0, iterations=10, iteration_s=0.3,
            compute_s=None, cells=(),
        )
        for p in unknown
    ]  # fmt: skip
    told = calibrate(facts, bare)
    assert (told.stage_s, told.dp_s, told.iteration_s) == ((1.0, 2.0), 3.0, 0.3)


def test_workers_may_stand_anywhere_in_the_grid() -> None:
    facts = JobFacts(pp=2, dp=2, microbatches=8, ranks=(2, 3, 0, 1))
    assert calibrate(facts, profiles()).stage_s == pytest.approx((0.03, 0.02))


def test_one_replica_has_no_ring() -> None:
    facts = JobFacts(pp=4, dp=1, microbatches=8)
    assert calibrate(facts, profiles()).dp_s == 0.0
