"""The pipeline model fitted to profiles: does it know what it was not shown?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from failslow.errors import PlanError
from failslow.lab import TestBed
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload
from failslow.simulate.facts import job_facts
from failslow.simulate.fitted import FittedJob, Ring
from failslow.simulate.job import iteration_s
from failslow.simulate.noise import Noise
from failslow.simulate.streams import job_profiles

MBYTE = 1e6
JOB = Scenario(
    cluster=Cluster(groups=(NodeGroup(nodes=8),), devices_per_node=1, network_gbyte_per_s=0.5),
    workload=Workload(
        layers=8,
        hidden=1024,
        vocabulary=0,
        tp=1,
        pp=4,
        dp=2,
        micro_batches=8,
        distributed_optimizer=False,
        overlap_gradients=False,
    ),
    noise=Noise.none(),
)


def fitted() -> FittedJob:
    return FittedJob.of(job_facts(JOB), job_profiles(JOB, at_s=0.0))


def test_a_healthy_iteration_is_as_measured() -> None:
    assert fitted().iteration_s() == pytest.approx(iteration_s(JOB), rel=1e-6)


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("factor", [1.2, 2.0])
def test_a_slow_worker_is_predicted_from_healthy_profiles_alone(rank: int, factor: float) -> None:
    truth_s = iteration_s(JOB.slow_device(rank=rank, from_s=0, factor=factor), 1.0)

    assert fitted().iteration_s(slow={rank: factor}) == pytest.approx(truth_s, rel=0.03)


def test_a_congested_link_of_a_ring_is_predicted_from_healthy_profiles_alone() -> None:
    truth_s = iteration_s(JOB.congest(link=(2, 3), from_s=0, factor=10), 1.0)
    ring = Ring(bytes_per_s=50 * MBYTE, healthy_bytes_per_s=500 * MBYTE)

    assert fitted().iteration_s(rings={1: ring}) == pytest.approx(truth_s, rel=0.03)


def test_workers_without_a_profile_are_named() -> None:
    profiles = job_profiles(JOB, at_s=0.0)
    blind = [replace(profiles[0], compute_s=None), *profiles[1:7]]

    with pytest.raises(PlanError, match=r"ranks \[0, 7\]"):
        FittedJob.of(job_facts(JOB), blind)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_training_is_predicted_within_fifteen_per_cent(tmp_path: Path) -> None:
    from benchmarks import predict_live

    if reason := TestBed.available():
        pytest.skip(reason)
    cases = [predict_live.throttled(1, 0.65), predict_live.congested(2, 3, 10.0)]

    for row in predict_live.measure(cases, iterations=15):
        assert abs(row.off_pct) <= predict_live.TARGET_PCT, row
