"""Real torch jobs whose workers are profiled while one of them is throttled."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="real jobs need torch")

from tests.localize.profiled import Profiled, profiled

from failslow.inject import throttle
from failslow.localize.profile import diagnose
from failslow.records import Diagnosis, RankProfile

_SETTLE_S = 1.0
"""What was under way when the fault came is over."""


def named(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    return [(suspect.what, suspect.ranks) for suspect in diagnosis.suspects]


def nobody_is_named(job: Profiled) -> list[RankProfile]:
    healthy = job.profiles("healthy")
    assert [p.rank for p in healthy] == list(range(job.world))
    again = job.order("again")
    for known in (healthy, []):
        nobody = diagnose(again, known, episode="e", slowdown=1.0)
        assert not nobody.suspects, nobody
    return healthy


def slow_worker_is_named(job: Profiled, rank: int, healthy: list[RankProfile]) -> None:
    with throttle(job.pids[rank], to=0.5, method="signal"):
        time.sleep(_SETTLE_S)
        slow = job.order("suspicion")
    for known in (healthy, []):
        found = diagnose(slow, known, episode="e", slowdown=1.5)
        assert named(found) == [("compute", (rank,))], found
        assert found.suspects[0].slowdown > 1.3
        assert not found.everyone
        assert found.ranks == tuple(range(job.world))
        assert not found.missing


def test_data_parallel() -> None:
    with profiled("dp", world=4) as job:
        slow_worker_is_named(job, 2, nobody_is_named(job))


@pytest.mark.slow
def test_stages_times_replicas() -> None:
    with profiled("pp-dp", world=4) as job:
        slow_worker_is_named(job, 1, job.profiles("healthy"))


@pytest.mark.slow
def test_completions_that_must_be_asked_for() -> None:
    """Python's kernels tell them while profiling only; without them no own time is known."""
    with profiled("dp", world=4, capture="dispatcher") as job:
        slow_worker_is_named(job, 0, nobody_is_named(job))


@pytest.mark.slow
def test_tensor_shards_times_replicas() -> None:
    with profiled("tp-dp", world=4) as job:
        slow_worker_is_named(job, 3, nobody_is_named(job))


@pytest.mark.slow
def test_fully_sharded() -> None:
    with profiled("fsdp", world=4) as job:
        slow_worker_is_named(job, 0, nobody_is_named(job))
