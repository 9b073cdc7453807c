"""From a journal to a probe's result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.probe.made_journal import (
    BEGIN_T,
    HEALTHY_S,
    Made,
    device,
    diagnosis,
    link,
    suspect,
    verdict,
)

from failslow.probe import ProbeResult, ProbeSpec
from failslow.probe.fleet import FleetReference
from failslow.probe.measures import node_series
from failslow.probe.reading import Ending, read_result
from failslow.records import Verdict

SPEC = ProbeSpec(probe_id="p1", campaign="c1", nodes=4, workers_per_node=1)
FLEET = FleetReference(iteration_s=HEALTHY_S, limit=1.10, probes=12)
DONE = Ending(begin_t=BEGIN_T - 5.0, end_t=BEGIN_T + 200.0, state="done")


def read(
    made: Made, folder: Path, *, ending: Ending = DONE, fleet: FleetReference | None = None
) -> ProbeResult:
    result = read_result(made.entries(folder), SPEC, ending, fleet)
    assert ProbeResult.from_json(result.to_json()) == result
    return result


def test_healthy(tmp_path: Path) -> None:
    made = Made()
    made.train(200, HEALTHY_S)
    result = read(made, tmp_path, fleet=FLEET)
    assert (result.result, result.cause, result.is_slow) == ("healthy", "", False)
    assert (result.probe_id, result.campaign, result.state) == ("p1", "c1", "done")
    assert result.nodes == ("n0", "n1", "n2", "n3")
    assert (result.tp, result.pp, result.dp) == (1, 2, 2)
    assert result.iterations == 200
    assert result.healthy_iteration_s == result.reference_iteration_s == HEALTHY_S
    assert (result.reference_source, result.fleet_iteration_s) == ("own start", HEALTHY_S)
    assert (result.slow_s, result.slowdown, result.jct_increase_share) == (0.0, 1.0, 0.0)
    assert result.onset_delay_s is None


def test_a_slow_device(tmp_path: Path) -> None:
    made = Made()
    made.train(100, HEALTHY_S)
    made.slow(60, 1.6, verdict("e1", device(2)), id="e1")
    made.train(50, HEALTHY_S)
    result = read(made, tmp_path)
    assert (result.result, result.cause) == ("compute", "device degradation")
    assert result.culprits == ("device rank 2 of n2",)
    assert result.culprit_causes == ("device degradation (thermal)",)
    assert result.culprit_nodes == ("n2",)
    assert result.onset_delay_s == pytest.approx(10.0, rel=0.02)
    assert result.slow_s == pytest.approx(9.6, rel=0.02)
    assert result.slowdown == pytest.approx(1.6)
    assert result.lost_s == pytest.approx(3.6, rel=0.02)
    # 210 iterations of 0.1 s would have taken 21 s
    assert result.jct_increase_share == pytest.approx(3.6 / 21.0, rel=0.02)
    assert result.evidence[0] == "device rank 2 of n2 x1.60: device degradation (thermal)."
    assert "For device degradation: heat held the clocks down." in result.evidence


def test_a_slow_link_and_a_cause_that_telemetry_does_not_tell(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(60, 2.0, verdict("e1"), verdict("e1", link(3, 2, cause="")), id="e1")
    result = read(made, tmp_path)
    assert (result.result, result.cause) == ("communication", "network congestion")
    assert result.culprits == ("link n3>n2",)
    assert result.culprit_nodes == ("n2", "n3")
    assert any("counts as congested" in text for text in result.evidence)


def test_both_at_once_and_one_after_the_other(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(60, 2.0, verdict("e1", link(3, 2)), verdict("e1", link(3, 2), device(1)), id="e1")
    made.train(60, HEALTHY_S)
    made.slow(30, 1.5, verdict("e2", device(0, cause="CPU contention")), id="e2")
    result = read(made, tmp_path)
    assert result.result == "both"
    assert result.cause == (
        "several at once: CPU contention, device degradation, network congestion"
    )
    assert result.culprits == ("link n3>n2", "device rank 1 of n1", "device rank 0 of n0")
    assert result.slowdown == pytest.approx(2.0)
    assert result.slow_s == pytest.approx(12.0 + 4.5, rel=0.02)


def test_one_verdict_of_many_that_differs_is_left_out(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    right = verdict("e1", link(3, 2))
    made.slow(90, 2.0, right, verdict("e1", link(3, 2), device(1)), right, right, id="e1")
    assert read(made, tmp_path).culprits == ("link n3>n2",)


def test_slow_without_a_verdict_is_only_classed(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(40, 1.5, diagnosis("e1", suspect("compute", (1,))), verdict("e1"), id="e1")
    result = read(made, tmp_path)
    assert (result.result, result.cause, result.culprits) == ("compute", "unknown", ())
    assert result.evidence == ("Not proved by benchmarks; suspects: compute of rank 1 x1.60.",)


def test_slow_by_nobody_in_particular_is_unknown(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    told = diagnosis("e1", suspect("compute", (0, 1, 2, 3)), everyone=True)
    made.slow(40, 1.5, told, id="e1")
    result = read(made, tmp_path)
    assert (result.result, result.is_slow, result.culprits) == ("unknown", True, ())


def well(*keys: str) -> Verdict:
    return replace(verdict("e1"), well=keys)


def test_a_little_unrest_that_nobody_is_to_blame_for_does_not_count(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    told = diagnosis("e1", suspect("compute", (1,)))
    made.slow(400, 1.12, told, well("device rank 0", "device rank 1"), id="e1")
    made.train(60, HEALTHY_S)
    result = read(made, tmp_path, fleet=FLEET)
    assert (result.result, result.is_slow, result.slow_s) == ("healthy", False, 0.0)
    assert result.evidence == (
        "Not counted: 45 s at ×1.12 at most; none of the suspects was found slow.",
    )
    assert result.worth_keeping  # somebody may want to look


ALL_WELL = tuple(f"device rank {rank}" for rank in range(4))
LINK = diagnosis("e1", suspect("link", (1,), (2,)))


@pytest.mark.parametrize(
    ("iterations", "slowdown", "said", "result"),
    [
        (60, 1.12, [], "healthy"),  # soon over, and nothing was measured
        (60, 1.30, [well(*ALL_WELL)], "unknown"),  # not small
        (400, 1.12, [], "unknown"),  # goes on and on
        (60, 1.12, [verdict("e1", device(2))], "compute"),  # somebody is to blame
        (400, 1.12, [well(*ALL_WELL)], "healthy"),
        (400, 1.12, [well("device rank 0")], "unknown"),  # others were not measured
        (400, 1.12, [diagnosis("e1", suspect("compute", (1,))), well("device rank 0")], "compute"),
        (400, 1.12, [LINK, well(*ALL_WELL)], "communication"),
        (400, 1.12, [LINK, well("link n1>n2")], "healthy"),
    ],
)
def test_small_and_well_or_soon_over_makes_unrest(
    tmp_path: Path, iterations: int, slowdown: float, said: list[Verdict], result: str
) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(iterations, slowdown, *said, id="e1")
    made.train(60, HEALTHY_S)
    assert read(made, tmp_path).result == result


def test_many_short_ones_are_not_soon_over(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    for number in range(4):
        id = f"e{number}"
        made.slow(100, 1.15, diagnosis(id, suspect("compute", (2,))), id=id)
        made.train(60, HEALTHY_S)
    result = read(made, tmp_path)
    assert (result.result, result.cause) == ("compute", "unknown")
    assert result.slow_s == pytest.approx(46.0, rel=0.02)


def test_of_a_short_probe_half_is_long(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(100, 1.15, id="e1", ends=False)
    assert read(made, tmp_path).result == "unknown"


def test_how_much_probes_differ_says_nothing_of_a_change_within_one(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(60, 1.6, diagnosis("e1", suspect("compute", (2,))), well(*ALL_WELL), id="e1")
    wide = replace(FLEET, limit=2.0)
    result = read(made, tmp_path, fleet=wide)
    assert (result.result, result.is_slow) == ("compute", True)


def test_unrest_beside_a_fault_leaves_the_fault(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(60, 1.12, id="e1")
    made.train(60, HEALTHY_S)
    made.slow(60, 1.6, verdict("e2", device(2)), id="e2")
    result = read(made, tmp_path)
    assert (result.result, result.slowdown) == ("compute", 1.6)
    assert result.slow_s == pytest.approx(9.6, rel=0.02)
    assert result.evidence[-1].startswith("Not counted: 7 s at ×1.12")


def test_an_episode_that_was_taken_back_never_was(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(20, 1.0, id="e1")
    assert read(made, tmp_path).result == "healthy"


def test_a_name_that_comes_again_is_another_fail_slow(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(40, 1.5, verdict("e1", device(2)), id="e1")
    made.train(30, HEALTHY_S)
    made.slow(20, 1.8, id="e1")
    result = read(made, tmp_path)
    assert result.slow_s == pytest.approx(6.0 + 3.6, rel=0.02)
    assert result.slowdown == pytest.approx(1.8)


def test_a_slow_link_inside_a_node_is_no_congested_network(tmp_path: Path) -> None:
    for host in ("n2", ""):
        made = Made(hosts=("n2",) * 4)
        made.train(60, HEALTHY_S)
        found = link(3, 2, cause="")
        made.slow(60, 2.0, verdict("e1", replace(found, host=host, peer_host=host)), id="e1")
        result = read(made, tmp_path)
        assert (result.result, result.cause) == ("communication", "unknown")
        assert (result.culprit_causes, result.culprit_nodes) == (("",), ("n2",))
        assert not any("congested" in text for text in result.evidence)


def test_all_that_a_node_sends_slow_is_a_congested_network(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    sent = replace(link(3, 2, cause=""), peer_ranks=(), peer_host="")
    made.slow(60, 2.0, verdict("e1", sent), id="e1")
    assert read(made, tmp_path).cause == "network congestion"


def stopped(made: Made, shares: dict[int, float]) -> None:
    """Telemetry of the last ten seconds: who was stopped for which share."""
    for rank in range(4):
        x = [shares.get(rank, 0.0)] * 10
        ranks = {str(rank): {"series": {"stopped_share": x}, "steady": {"runqueue_cores": 0.01}}}
        made.telemetry(f"n{rank}", {"cpu/busy_share": [0.5] * 10}, ranks=ranks)


def test_a_cause_is_looked_for_while_it_was_slow(tmp_path: Path) -> None:
    """10 s of 40: its median over the whole probe is 0."""
    made = Made()
    for _ in range(2):
        made.train(100, HEALTHY_S)
        stopped(made, {})
    made.slow(50, 2.0, verdict("e1", device(2, cause="")), id="e1")
    stopped(made, {2: 0.5})
    made.train(100, HEALTHY_S)
    stopped(made, {})
    result = read(made, tmp_path)
    assert (result.result, result.cause) == ("compute", "device degradation")
    assert result.culprit_causes == ("device degradation (stopped by signals)",)
    assert result.evidence[-1] == (
        "For device degradation (stopped by signals): rank 2 was stopped by signals 0.5 s/s while "
        "it was slow, 0 s/s at other times, its peers 0 s/s."
    )


@pytest.mark.parametrize(
    ("before", "during"),
    [
        ({2: 0.5}, {2: 0.5}),  # it was so when all was well
        ({2: 0.5}, {}),  # it was so only then
        ({}, {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}),  # its peers were as well
    ],
)
def test_what_was_so_at_other_times_or_of_peers_is_no_cause(
    tmp_path: Path, before: dict[int, float], during: dict[int, float]
) -> None:
    made = Made()
    made.train(100, HEALTHY_S)
    stopped(made, before)
    made.slow(50, 2.0, verdict("e1", device(2, cause="")), id="e1")
    stopped(made, during)
    assert read(made, tmp_path).culprit_causes == ("",)


def start(made: Made) -> None:
    """What a probe whose link is slow from its start says of its start."""
    made.train(20, 1.7 * HEALTHY_S, healthy_s=1.7 * HEALTHY_S)
    made.add(diagnosis("", suspect("link", (3,), (2,))))
    # by its peers; the device is slower too, but nobody waits for it
    made.add(verdict("", link(3, 2, cause=""), device(0, cause="")))
    made.train(80, 1.7 * HEALTHY_S, healthy_s=1.7 * HEALTHY_S)


def test_slow_from_the_start_shows_only_against_the_fleet(tmp_path: Path) -> None:
    made = Made()
    start(made)
    assert read(made, tmp_path).result == "healthy"
    result = read(made, tmp_path, fleet=FLEET)
    assert (result.result, result.cause) == ("communication", "network congestion")
    assert result.culprits == ("link n3>n2",)
    assert result.onset_delay_s == 0.0
    assert (result.reference_source, result.reference_iteration_s) == ("fleet", HEALTHY_S)
    assert result.healthy_iteration_s is None
    assert result.slowdown == pytest.approx(1.7, rel=0.01)
    assert result.slow_s == pytest.approx(17.0, rel=0.02)
    assert result.jct_increase_share == pytest.approx(0.7, rel=0.02)
    assert result.evidence[0].startswith("Slow from its first iteration: 170 ms, where 12 probes")


def test_a_little_slower_than_the_fleet_needs_somebody_who_is_slow(tmp_path: Path) -> None:
    made = Made()
    made.train(100, 1.15 * HEALTHY_S, healthy_s=1.15 * HEALTHY_S)
    assert read(made, tmp_path, fleet=FLEET).result == "healthy"
    made.add(diagnosis("", suspect("compute", (1,))))
    assert read(made, tmp_path, fleet=FLEET).result == "compute"

    made = Made()
    made.train(100, 1.3 * HEALTHY_S, healthy_s=1.3 * HEALTHY_S)
    result = read(made, tmp_path, fleet=FLEET)
    assert (result.result, result.cause, result.is_slow) == ("unknown", "unknown", True)


def test_slow_from_the_start_and_well_again(tmp_path: Path) -> None:
    made = Made()
    start(made)
    made.train(60, HEALTHY_S)
    made.slow(30, 1.5, verdict("e1", device(1)), id="e1")
    result = read(made, tmp_path, fleet=FLEET)
    assert result.slow_s == pytest.approx(17.0 + 4.5, rel=0.03)
    assert result.healthy_iteration_s == pytest.approx(HEALTHY_S, rel=0.02)
    assert result.culprits == ("link n3>n2", "device rank 1 of n1")
    assert result.result == "both"


def test_a_warm_up_is_no_fail_slow(tmp_path: Path) -> None:
    made = Made()
    made.train(8, 8 * HEALTHY_S)
    made.train(100, HEALTHY_S)
    assert read(made, tmp_path, fleet=FLEET).result == "healthy"


def test_who_waits_more_than_its_peers_all_along_is_contended(tmp_path: Path) -> None:
    made = Made()
    made.add(diagnosis("", suspect("compute", (2,))))
    made.add(verdict("", replace(device(2, cause=""), device="cpu", what="host")))
    made.train(100, 1.5 * HEALTHY_S, healthy_s=1.5 * HEALTHY_S)
    for rank in range(4):
        waiting = [0.4 if rank == 2 else 0.02] * 5
        ranks = {str(rank): {"series": {"runqueue_cores": waiting}, "steady": {}}}
        made.telemetry(f"n{rank}", {"cpu/busy_share": [0.5] * 5}, ranks=ranks)
    result = read(made, tmp_path, fleet=FLEET)
    assert (result.result, result.cause) == ("compute", "CPU contention")
    assert result.culprits == ("host n2",)
    assert "For CPU contention: rank 2 waited for a core 0.4 s/s all along" in result.evidence[-1]


def test_a_preempted_probe_counts_what_it_saw(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(40, 1.5, verdict("e1", device(2)), id="e1", ends=False)
    ending = replace(DONE, state="preempted")
    result = read(made, tmp_path, ending=ending)
    assert (result.state, result.result, result.cause) == (
        "preempted",
        "compute",
        "device degradation",
    )
    assert result.slow_s == pytest.approx(6.0, rel=0.02)


def test_a_torn_journal_gives_what_is_whole(tmp_path: Path) -> None:
    made = Made()
    made.train(60, HEALTHY_S)
    made.slow(40, 1.5, verdict("e1", device(2)), id="e1")
    torn = [i for i, line in enumerate(made.lines) if b'"workers":4' in line][30]
    made.lines[torn] = made.lines[torn][: len(made.lines[torn]) // 2]
    made.lines.insert(50, b"\x00\xff\x00")
    made.lines.append(made.lines[-1][:20])
    result = read(made, tmp_path)
    assert (result.result, result.iterations) == ("compute", 99)


def test_too_few_iterations_say_nothing(tmp_path: Path) -> None:
    made = Made()
    made.train(5, HEALTHY_S)
    result = read(made, tmp_path, ending=replace(DONE, state="failed", error="worker 1 ended"))
    assert (result.state, result.result, result.is_slow) == ("failed", "unknown", False)
    assert (result.error, result.evidence) == (
        "worker 1 ended",
        ("Only 5 iterations were seen.",),
    )
    assert read_result([], SPEC, DONE).nodes == ("node 0", "node 1", "node 2", "node 3")


def test_measures_are_those_of_all_nodes_and_each_time_once(tmp_path: Path) -> None:
    made = Made()
    made.train(50, HEALTHY_S)
    gpus = {"gpus": {"0": {"name": "NVIDIA H200", "ranks": [0]}, "1": {"ranks": []}}}
    for _ in range(2):  # what was told twice counts once
        made.telemetry(
            "n0",
            {
                "gpu/0/sm_share": [0.9, 0.7, None],
                "gpu/0/temperature_c": [60.0, 64.0, 65.0],
                "gpu/1/temperature_c": [90.0, 90.0, 90.0],  # of somebody else
                "rdma/mlx5_0:1/cnp_handled_per_s": [0.0, 30.0, 0.0],
                "rdma/mlx5_1:1/cnp_handled_per_s": [3.0, 3.0, 3.0],
                "link/inter/rtt_s": [0.001, 0.0015, 0.0005],
            },
            **gpus,
            ranks={"0": {"series": {}, "steady": {"runqueue_cores": 0.0}}},
        )
    # further away, which is no variation
    made.telemetry("n1", {"link/inter/rtt_s": [0.003, 0.003, 0.003]})
    made.telemetry("n2", {"link/inter/rtt_s": [9.0, 1.0]})
    result = read(made, tmp_path)
    assert result.sm_utilisation_share == pytest.approx(0.8)
    assert result.temperature_c == pytest.approx(63.0)
    assert result.temperature_max_c == 65.0
    assert result.cnp_per_s == pytest.approx(13.0)
    assert result.latency_cv_inter_node == pytest.approx(0.5 / 3**0.5)
    assert result.latency_cv_intra_node is None


def test_what_was_told_before_a_node_s_clock_was_known_is_mended_afterwards(tmp_path: Path) -> None:
    made = Made()
    made.train(50, HEALTHY_S)
    ahead_s = 120.0
    late_t = made.now_t - 1.0
    wrong = [late_t - 2.0 + ahead_s, late_t - 1.0 + ahead_s]
    made.telemetry("n1", {"link/inter/rtt_s": [0.001, 0.002]}, t=wrong, ahead_s=None)
    made.telemetry("n1", {"link/inter/rtt_s": [0.003]}, t=[late_t], ahead_s=ahead_s)
    made.telemetry("n2", {"link/inter/rtt_s": [0.004]}, t=[late_t], ahead_s=None)
    series = node_series(made.entries(tmp_path))
    assert series["n1"].values["link/inter/rtt_s"] == {
        late_t - 2.0: 0.001,
        late_t - 1.0: 0.002,
        late_t: 0.003,
    }
    assert list(series["n2"].of("link/inter/rtt_s")) == [0.004]  # nothing better is known
