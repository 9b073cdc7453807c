"""Simulated jobs: exact without noise, equal for equal seeds, and found by the detector."""

from __future__ import annotations

import numpy as np
import pytest

from failslow.detect import analyze
from failslow.simulate import Cluster, NodeGroup, Noise, Scenario, Workload, score, simulate
from failslow.simulate.costs import Costs
from failslow.simulate.faults import Effects
from failslow.simulate.job import iteration_s

QUIET = Scenario(noise=Noise.none(), iterations=300)
SMALL = Workload(layers=8, hidden=1024, vocabulary=0, tp=2, pp=2, dp=4, micro_batches=8)


def test_without_noise_every_iteration_is_the_same() -> None:
    job = simulate(QUIET)

    assert np.ptp(job.series.duration_s) == 0
    assert np.array_equal(job.series.duration_s, job.healthy_s)
    assert job.series.end_s == pytest.approx(np.cumsum(job.series.duration_s))
    assert job.truth == ()


def test_an_iteration_takes_what_its_parts_take() -> None:
    """One device: as long as its computation; a pipeline: (M + pp - 1) micro-batches."""
    one = Scenario(
        cluster=Cluster(groups=(NodeGroup(nodes=1, tflops=100),), devices_per_node=1),
        workload=Workload(
            layers=4,
            hidden=512,
            sequence=1024,
            vocabulary=0,
            tp=1,
            pp=1,
            dp=1,
            micro_batches=3,
            efficiency=0.5,
            optimizer_ms=7,
        ),
        noise=Noise.none(),
        iterations=1,
    )
    layer_flop = 24 * 1024 * 512**2 + 4 * 1024**2 * 512
    forward_s = 4 * layer_flop / (0.5 * 100e12)

    assert simulate(one).series.duration_s[0] == pytest.approx(3 * 3 * forward_s + 0.007)

    piped = one.but(
        cluster=Cluster(
            groups=(NodeGroup(nodes=1, tflops=100),),
            devices_per_node=4,
            node_gbyte_per_s=1e9,
            network_latency_us=0,
        ),
        workload=one.workload.model_copy(update={"pp": 4}),
    )
    expected_s = (3 + 4 - 1) * 3 * forward_s / 4 + 0.007
    assert simulate(piped).series.duration_s[0] == pytest.approx(expected_s, rel=1e-6)


def test_equal_scenarios_give_equal_jobs_and_other_seeds_others() -> None:
    scenario = Scenario(iterations=400).slow_device(rank=3, from_s=20, for_s=60, factor=1.4)

    first, again = simulate(scenario), simulate(scenario)
    other = simulate(scenario.but(seed=1))

    assert np.array_equal(first.series.duration_s, again.series.duration_s)
    assert np.array_equal(first.worker_compute_s, again.worker_compute_s)
    assert not np.array_equal(first.series.duration_s, other.series.duration_s)


def test_the_length_of_a_job_changes_none_of_its_iterations() -> None:
    scenario = Scenario(workload=SMALL, noise=Noise(iteration_cv=0, drift_cv=0, spikes_per_1000=0))

    short = simulate(scenario.but(iterations=50))
    long = simulate(scenario.but(iterations=900))

    assert np.array_equal(short.series.duration_s, long.series.duration_s[:50])


def test_a_fault_acts_from_its_first_second_to_its_last() -> None:
    healthy_s = simulate(QUIET).series.duration_s[0]
    scenario = QUIET.slow_device(rank=11, from_s=20, for_s=15, factor=1.5)

    job = simulate(scenario)

    begins_s = job.series.end_s - job.series.duration_s
    acting = (begins_s >= 20) & (begins_s < 35)
    assert np.array_equal(job.series.duration_s > healthy_s, acting)
    truth = job.truth[0]
    first = int(np.flatnonzero(acting)[0])
    assert (truth.start_step, truth.end_step) == (first + 1, first + int(acting.sum()) + 1)
    assert truth.slowdown == pytest.approx(job.series.duration_s[first] / healthy_s)
    assert truth.counts


def test_a_slow_device_slows_its_worker_and_no_other() -> None:
    job = simulate(QUIET.slow_device(rank=5, from_s=0, factor=1.5))
    healthy = simulate(QUIET)

    ratio = job.worker_compute_s[0] / healthy.worker_compute_s[0]

    # ranks 4 and 5 are replica 2 of stage 0
    expected = np.ones((2, 4))
    expected[0, 2] = 1.5
    assert ratio == pytest.approx(expected, rel=1e-5)


def test_a_fault_that_never_comes_is_told_as_such() -> None:
    truth = simulate(QUIET.congest(node=1, from_s=1e6, factor=5)).truth[0]

    assert (truth.start_step, truth.end_step, truth.counts) == (None, None, False)


def test_a_flapping_link_is_slow_for_its_share_of_the_time() -> None:
    job = simulate(
        QUIET.but(iterations=1000).flap(link=(0, 1), from_s=0, factor=200, period_s=20, duty=0.3)
    )

    slow = job.series.duration_s > 1.5 * job.healthy_s
    assert job.series.duration_s[slow].sum() / job.series.end_s[-1] == pytest.approx(0.3, abs=0.05)


def test_a_node_that_heats_up_gets_slower_step_by_step() -> None:
    job = simulate(QUIET.thermal(node=1, from_s=10, factor=2, ramp_s=60))

    late = job.series.duration_s[np.searchsorted(job.series.end_s, 10) :]
    assert (np.diff(late) >= 0).all()
    assert len(np.unique(late.round(9))) > 10
    assert job.worker_compute_s[-1].max() == pytest.approx(2 * job.worker_compute_s[0].max())


def test_faults_add_up() -> None:
    one = simulate(QUIET.slow_device(rank=0, from_s=0, factor=1.5)).worker_compute_s[0, 0, 0]
    both = simulate(
        QUIET.slow_device(rank=0, from_s=0, factor=1.5).cpu_contention(node=0, from_s=0, factor=1.2)
    ).worker_compute_s[0, 0, 0]

    assert both == pytest.approx(1.2 * one)


def cluster_of(nodes: int, **settings: float) -> Cluster:
    groups = (NodeGroup(nodes=nodes),)
    return Cluster(groups=groups, devices_per_node=2, network_latency_us=0, **settings)


def test_congestion_slows_the_transfers_that_cross_it_and_no_others() -> None:
    workload = Workload(layers=4, tp=2, pp=4, dp=2, vocabulary=0)
    cluster = cluster_of(8)
    costs = Costs(cluster, workload)
    healthy, slow = costs.step(Effects.none(cluster)), Effects.none(cluster)
    slow.link[(0, 2)] = 4.0  # stage 0 to stage 1 of replica 0: nodes are stage · 2 + replica

    now = costs.step(slow)

    ratio = now.onward_s / healthy.onward_s
    assert ratio[0, 0] == pytest.approx(4.0, rel=0.01)
    assert np.delete(ratio.ravel(), 0) == pytest.approx([1.0] * 5)
    assert np.array_equal(now.back_s, healthy.back_s)
    assert np.array_equal(now.reduce_s, healthy.reduce_s)


def test_a_congested_leaf_slows_only_what_leaves_it() -> None:
    workload = Workload(layers=4, tp=2, pp=4, dp=2, vocabulary=0)
    cluster = cluster_of(8, nodes_per_leaf=4)
    costs = Costs(cluster, workload)
    healthy, slow = costs.step(Effects.none(cluster)), Effects.none(cluster)
    slow.leaf[0] = 4.0

    ratio = costs.step(slow).onward_s / healthy.onward_s

    # stages 0 and 1 are on leaf 0, stages 2 and 3 on leaf 1
    assert ratio[:, 0] == pytest.approx([1.0, 4.0, 1.0], rel=0.01)


def test_a_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    workload = Workload(layers=4, tp=2, pp=1, dp=8, vocabulary=0, hidden=4096)
    cluster = cluster_of(8)
    costs = Costs(cluster, workload)
    slow = Effects.none(cluster)
    slow.node[3] = 5.0

    ratio = costs.step(slow).reduce_s / costs.step(Effects.none(cluster)).reduce_s

    assert ratio == pytest.approx([5.0], rel=0.01)


def test_overlapped_gradients_cost_less_than_reduced_afterwards() -> None:
    def iteration_s(**settings: object) -> float:
        workload = Workload(
            **{**SMALL.model_dump(), "hidden": 4096, "micro_batches": 4, **settings}
        )
        return float(simulate(QUIET.but(workload=workload, iterations=1)).series.duration_s[0])

    after, once = iteration_s(overlap_gradients=False), iteration_s(gradient_buckets=1)
    assert iteration_s(gradient_buckets=8) < once
    assert once == pytest.approx(after)


def test_two_kinds_of_devices_go_at_the_pace_of_the_slower_and_accuse_nobody() -> None:
    groups = (NodeGroup(nodes=1, tflops=990), NodeGroup(nodes=1, device="A100", tflops=312))
    mixed = Scenario(cluster=Cluster(groups=groups), iterations=1500)

    job = simulate(mixed)
    analysis = analyze(job.series)

    assert np.median(job.series.duration_s) > 1.5 * np.median(simulate(Scenario()).healthy_s)
    assert analysis.fail_slows == ()


def test_the_detector_finds_a_fault_where_the_truth_has_it() -> None:
    scenario = Scenario(iterations=2000).slow_device(rank=11, from_s=200, for_s=300, factor=1.4)

    job = simulate(scenario)
    result = score(job, analyze(job.series))

    fault = result.faults[0]
    assert fault.found
    assert abs(fault.onset_error or 0) <= 2
    assert (result.missed, result.false_alarms) == (0, 0)
    assert result.true_lost_s == pytest.approx(analyze(job.series).lost_s, rel=0.1)


def test_a_false_alarm_and_a_miss_are_counted() -> None:
    slow = simulate(Scenario(iterations=1500).slow_device(rank=11, from_s=200, factor=1.5))
    calm = simulate(Scenario(iterations=1500))

    missed = score(slow, analyze(calm.series))
    false = score(calm, analyze(slow.series))

    assert (missed.missed, missed.faults[0].found) == (1, False)
    assert false.false_alarms == 1


def test_checkpoints_are_spikes() -> None:
    job = simulate(Scenario(iterations=1000, checkpoint_every=100, checkpoint_s=5))

    analysis = analyze(job.series)

    assert analysis.fail_slows == ()
    assert {99, 199, 299} <= set(analysis.spike_index)


def test_noise_is_as_strong_as_asked_for() -> None:
    noise = Noise(iteration_cv=0.02, drift_cv=0, worker_cv=0, network_cv=0, spikes_per_1000=20)
    job = simulate(Scenario(iterations=20_000, workload=SMALL, noise=noise))

    ratio = job.series.duration_s / np.median(job.series.duration_s)
    spread = 1.4826 * np.median(abs(ratio - 1))
    assert spread == pytest.approx(0.02, rel=0.1)
    assert np.mean(ratio > 1.15) == pytest.approx(0.015, abs=0.005)


def test_a_job_can_be_placed_so_that_it_does_not_use_a_bad_link() -> None:
    """Four nodes, replicas 0 and 1 of two stages: the ring of stage 0 uses the link 0 → 1."""
    workload = Workload(layers=4, tp=2, pp=2, dp=2, vocabulary=0)
    bad = Scenario(cluster=cluster_of(4), workload=workload, noise=Noise.none(), iterations=1)
    healthy_s = iteration_s(bad)
    bad = bad.congest(link=(0, 1), from_s=0, factor=50)

    assert iteration_s(bad) > 1.5 * healthy_s
    assert iteration_s(bad.but(placement=(0, 3, 2, 1))) == pytest.approx(healthy_s)


def test_a_slow_device_stays_slow_wherever_the_job_has_it() -> None:
    slow = QUIET.slow_device(rank=0, from_s=0, factor=1.5)

    moved = simulate(slow.but(placement=(1, 0), iterations=1)).worker_compute_s[0]

    usual = simulate(QUIET.but(iterations=1)).worker_compute_s[0]
    assert np.argwhere(moved > 1.4 * usual).tolist() == [[1, 0]]
