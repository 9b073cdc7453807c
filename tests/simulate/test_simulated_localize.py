"""What localize makes of simulated jobs: profiles, benchmarks and telemetry against the truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from failslow.localize.profile import diagnose
from failslow.records import RankProfile
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload
from failslow.simulate.inquire import locate
from failslow.simulate.job import iteration_s
from failslow.simulate.streams import job_profiles

JOB = Scenario(
    cluster=Cluster(groups=(NodeGroup(nodes=8),)),
    workload=Workload(layers=32, hidden=8192, tp=8, pp=2, dp=4, micro_batches=16),
)
"""64 devices."""
SLOW_AT, NOW = 100.0, 200.0


@pytest.mark.parametrize(
    ("strike", "keys", "cause"),
    [
        (lambda j: j.slow_device(rank=35, from_s=SLOW_AT, factor=1.5), {"device rank 35"},
         "device degradation (clocks)"),
        (lambda j: j.thermal(rank=9, from_s=SLOW_AT, factor=1.4, ramp_s=0), {"device rank 9"},
         "device degradation (thermal)"),
        (lambda j: j.cpu_contention(node=6, from_s=SLOW_AT, factor=1.6), {"host node6"},
         "CPU contention"),
        (lambda j: j.congest(link=(4, 5), from_s=SLOW_AT, factor=30), {"link node4>node5"},
         "network congestion"),
        (lambda j: j.congest(node=4, from_s=SLOW_AT, factor=30), {"link node4>", "link >node4"},
         "network congestion"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_the_scenario_made_slow(
    strike: Callable[[Scenario], Scenario], keys: set[str], cause: str
) -> None:
    located = locate(strike(JOB), at_s=NOW, onset_s=SLOW_AT)

    assert {finding.key for finding in located.verdict.findings} == keys
    assert {finding.cause for finding in located.verdict.findings} == {cause}


def test_two_faults_at_once_are_both_named() -> None:
    both = JOB.slow_device(rank=35, from_s=SLOW_AT, factor=1.5).congest(
        link=(0, 1), from_s=SLOW_AT, factor=12
    )

    located = locate(both, at_s=NOW, onset_s=SLOW_AT)

    assert {f.key for f in located.verdict.findings} == {"device rank 35", "link node0>node1"}


@pytest.mark.parametrize("tflops", [312.0, 800.0])
def test_two_device_models_accuse_nobody_with_or_without_healthy_times(tflops: float) -> None:
    groups = (NodeGroup(nodes=4), NodeGroup(nodes=4, device="A100", tflops=tflops))
    mixed = JOB.but(cluster=Cluster(groups=groups))
    now = job_profiles(mixed, at_s=NOW, window=1)

    alone = diagnose(now, [], episode="", slowdown=1.0)
    located = locate(mixed, at_s=NOW)

    assert not alone.suspects
    assert not located.diagnosis.suspects
    assert not located.verdict.findings


def test_a_slow_device_among_two_models_is_found() -> None:
    groups = (NodeGroup(nodes=4), NodeGroup(nodes=4, device="A100", tflops=312))
    mixed = JOB.but(cluster=Cluster(groups=groups)).slow_device(rank=40, from_s=SLOW_AT, factor=1.5)

    located = locate(mixed, at_s=NOW, onset_s=SLOW_AT)

    assert {f.key for f in located.verdict.findings} == {"device rank 40"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp": 2, "cp": 2, "pp": 4, "dp": 4},
        {"tp": 1, "pp": 1, "dp": 64},
        {"tp": 8, "pp": 2, "dp": 4, "schedule": "interleaved", "vpp": 2},
        {"tp": 8, "pp": 8, "dp": 1, "schedule": "gpipe"},
        {"tp": 4, "pp": 2, "dp": 8, "ep": 4, "experts": 8},
        {"distributed_optimizer": False, "overlap_gradients": False},
    ],
)
def test_profiles_of_any_layout_add_up_and_a_healthy_job_has_no_suspects(
    changes: dict[str, object],
) -> None:
    workload = Workload(**{**JOB.workload.model_dump(), **changes})
    job = JOB.but(workload=workload)

    before, now = (job_profiles(job, at_s=0.0, window=window) for window in (0, 1))

    assert [profile.rank for profile in now] == list(range(64))
    for profile in now:
        own = profile.compute_s or 0.0
        assert 0 < own < profile.iteration_s
        assert {profile.rank} <= set(profile.cells[0].group)
        # overlapped reductions and sends are waited for beside other things
        assert own + _blocked(profile) <= 1.25 * profile.iteration_s
    assert not diagnose(now, before, episode="", slowdown=1.0).suspects


def _blocked(profile: RankProfile) -> float:
    return sum(
        cell.wait_s * cell.calls / profile.iterations for cell in profile.cells if cell.op != "send"
    )


def test_an_uneven_split_is_as_fast_as_its_slowest_replica() -> None:
    plain = JOB.but(workload=Workload(layers=32, hidden=4096, tp=8, pp=1, dp=8, micro_batches=16))
    slow = plain.slow_device(rank=9, from_s=0, factor=1.5)
    healthy_s, slow_s = iteration_s(plain), iteration_s(slow)

    split = slow.but(split=(17, 11, 17, 17, 17, 17, 16, 16))

    assert iteration_s(plain.but(split=(16,) * 8)) == healthy_s
    assert slow_s > 1.3 * healthy_s
    assert healthy_s < iteration_s(split) < healthy_s + 0.25 * (slow_s - healthy_s)


def test_a_split_must_be_of_the_whole_batch() -> None:
    with pytest.raises(Exception, match="must give dp"):
        JOB.but(split=(16, 16, 16, 15))
