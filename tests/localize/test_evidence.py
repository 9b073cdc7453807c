"""Causes from telemetry: the cases of the field study, made up in the agents' shape."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from tests.localize.windows_of import ONSET_T, RELIEF_T, node, step

from failslow.localize.evidence import explain, explain_all, job_cause
from failslow.steering import Finding

HEALTHY: dict[str, list[float | None] | float] = {
    "runqueue_cores": step(0.01, 0.01),
    "throttled_cores": 0.0,
    "stopped_share": 0.0,
}


def _device(
    rank: int = 3,
    device: str = "cpu",
    *,
    what: Literal["device", "host"] = "device",
    slowdown: float = 1.5,
) -> Finding:
    return Finding(what=what, slowdown=slowdown, ranks=(rank,), host="h1", device=device)


def _link() -> Finding:
    return Finding(
        what="link", slowdown=4.0, ranks=(1,), peer_ranks=(0,), host="h1", peer_host="h0"
    )


def _explain(finding: Finding, *nodes: dict[str, Any]) -> Finding:
    told = explain(finding, json.loads(json.dumps(nodes)), onset_t=ONSET_T, relief_t=RELIEF_T)
    for sentence in told.evidence:
        assert sentence.endswith(".")
        assert sentence[0].isupper()
    return told


def _saying(finding: Finding, start: str) -> list[str]:
    return [sentence for sentence in finding.evidence if sentence.startswith(start)]


def test_waiting_for_cores_that_others_use_is_contention_and_the_hosts() -> None:
    told = _explain(
        _device(),
        node(
            "n1",
            series={"cpu/neighbour_cores": step(0.02, 1.9), "cpu/steal_share": 0.0},
            ranks={3: {**HEALTHY, "runqueue_cores": step(0.01, 0.41)}},
        ),
    )
    assert (told.what, told.cause) == ("host", "CPU contention")
    first, second, *_ = _saying(told, "For CPU contention: ")
    assert "rank 3 waited for a core 0.41" in first
    assert "before 0.01" in first
    assert "MADs, r 1.00" in first
    assert "onset" in first
    assert "with relief" in first
    assert "other processes on n1 used" in second
    assert len(_saying(told, "Against device degradation: ")) == 2
    (measured,) = told.measurements
    assert measured.unit == "s/s"
    assert measured.value == pytest.approx(0.41, rel=0.05)
    assert measured.expected == pytest.approx(0.01, rel=0.1)


def test_what_a_quota_holds_back_is_no_waiting_for_cores() -> None:
    """The kernel counts threads that a quota holds among those that wait for a core."""
    told = _explain(
        _device(),
        node(
            "n1",
            series={"cpu/neighbour_cores": step(0.5, 0.5)},
            ranks={
                3: {
                    **HEALTHY,
                    "runqueue_cores": step(0.01, 0.31, seed=1),
                    "throttled_cores": step(0.0, 0.3),
                }
            },
        ),
    )
    assert (told.what, told.cause) == ("device", "device degradation (quota)")
    assert "quota kept from rank 3 0.3" in _saying(told, "For device degradation: ")[0]
    assert "waited for a core" in _saying(told, "Against CPU contention: ")[0]


def test_signals_that_stop_a_worker_stand_for_a_slow_device() -> None:
    told = _explain(
        _device(what="host"), node("n1", ranks={3: {**HEALTHY, "stopped_share": step(0.0, 0.3)}})
    )
    assert (told.what, told.cause) == ("device", "device degradation (stopped by signals)")


def test_a_neighbour_that_takes_no_core_from_the_worker_is_not_the_cause() -> None:
    told = _explain(
        _device(),
        node("n1", series={"cpu/neighbour_cores": step(0.02, 6.0)}, ranks={3: HEALTHY}),
    )
    assert (told.what, told.cause) == ("device", "")
    assert job_cause([told]) == "unknown"


def test_contention_that_was_there_before_explains_no_onset() -> None:
    told = _explain(_device(), node("n1", ranks={3: {**HEALTHY, "runqueue_cores": step(0.4, 0.4)}}))
    assert told.cause == ""


def test_a_gpu_whose_clocks_heat_holds_down_is_thermal() -> None:
    told = _explain(
        _device(device="NVIDIA H200"),
        node(
            "n1",
            series={
                "gpu/0/throttle_thermal": step(0.0, 1.0),
                "gpu/0/sm_mhz": step(1980, 1400, noise=0.001),
                "gpu/0/temperature_c": step(62, 84, noise=0.001),
                "gpu/1/throttle_power": step(0.0, 1.0),  # another worker's
            },
            ranks={3: HEALTHY},
            gpus={0: [3], 1: [4]},
        ),
    )
    assert (told.what, told.cause) == ("device", "device degradation (thermal)")
    assert any("the SMs of GPU 0 ran at" in s for s in _saying(told, "For device degradation:"))
    assert not any("GPU 1" in s for s in told.evidence)


def test_heat_alone_is_never_a_cause() -> None:
    told = _explain(
        _device(device="NVIDIA H200"),
        node(
            "n1",
            series={
                "gpu/0/throttle_thermal": 0.0,
                "gpu/0/sm_mhz": 1980.0,
                "gpu/0/temperature_c": step(62, 84, noise=0.001),
            },
            ranks={3: HEALTHY},
            gpus={0: [3]},
        ),
    )
    assert told.cause == "device degradation"  # its benchmark proved it; nothing tells why
    assert told.measurements == ()
    assert any("heat alone is no cause" in s for s in told.evidence)
    assert _saying(told, "Against device degradation: heat held the clocks")


def test_a_gpu_slow_from_its_start_needs_no_change() -> None:
    """The study's: slow for its first ten minutes, near 70 degrees."""
    body = node(
        "n1",
        series={"gpu/0/throttle_thermal": 1.0, "gpu/0/temperature_c": 70.0},
        ranks={3: HEALTHY},
        gpus={0: [3]},
    )
    told = explain(_device(device="NVIDIA H200"), [body], onset_t=body["t"][0] - 1)
    assert told.cause == "device degradation (thermal)"


def test_a_slow_gpu_with_a_busy_host_stays_a_gpu() -> None:
    told = _explain(
        _device(device="NVIDIA H200"),
        node(
            "n1",
            series={"cpu/neighbour_cores": step(0, 30), "gpu/0/sm_mhz": step(1980, 1500)},
            ranks={3: {**HEALTHY, "runqueue_cores": step(0.01, 0.5)}},
            gpus={0: [3]},
        ),
    )
    assert (told.what, told.cause) == ("device", "device degradation (clocks)")
    assert _saying(told, "For CPU contention: rank 3 waited")  # told, though it is not the cause


def test_a_quota_on_a_gpu_workers_host_is_contention() -> None:
    told = _explain(
        _device(device="NVIDIA H200", what="host"),
        node("n1", ranks={3: {**HEALTHY, "throttled_cores": step(0.0, 0.4)}}, gpus={0: [3]}),
    )
    assert (told.what, told.cause) == ("host", "CPU contention")


def _rdma(name: str, rank: int, **surges: float) -> dict[str, Any]:
    port = "rdma/mlx5_0:1"
    return node(
        name,
        series={
            **{
                f"{port}/{what}_per_s": step(2.0, surges[what]) if what in surges else 0.0
                for what in ("cnp_handled", "cnp_sent", "ecn_marked", "out_of_sequence")
            },
            f"{port}/speed_bits_per_s": 4e11,
            "link/inter/rtt_s": step(1e-4, 4e-4, noise=0.3),
            "link/intra/rtt_s": step(2e-5, 2e-5, noise=0.01),
        },
        ranks={rank: HEALTHY},
    )


def test_congestion_notifications_that_surge_are_congestion() -> None:
    told = _explain(
        _link(),
        _rdma("n1", 1, cnp_handled=9000.0),
        _rdma("n0", 0, cnp_sent=9000.0, ecn_marked=12_000.0),
        _rdma("n2", 2, out_of_sequence=100.0),
    )
    assert (told.what, told.cause) == ("link", "network congestion")
    told_for = _saying(told, "For network congestion: ")
    assert any("n1's mlx5_0:1 was told to slow down (CNPs handled)" in s for s in told_for)
    assert any("n0's mlx5_0:1 received packets marked" in s for s in told_for)
    assert not any("n2" in s for s in told.evidence)
    variation = [s for s in told.evidence if "coefficient of variation" in s]
    assert [s.split(" varied")[0] for s in variation] == [
        "Round trips between hosts",
        "Round trips inside hosts",
    ]


def test_a_full_link_shows_in_the_round_trips_over_it() -> None:
    told = _explain(
        _link(),
        node(
            "n1",
            series={
                "peer/10.0.0.1/rtt_s": step(3e-4, 0.024),
                "peer/10.0.0.1/delivery_bytes_per_s": step(4e9, 7e6),
                "peer/10.0.0.3/rtt_s": step(3e-4, 3e-4),
                "net/eth0/tx_bytes_per_s": step(2e7, 5e6),
                "peer/10.0.0.1/sent_bytes_per_s": step(1.99e7, 4.99e6),
            },
            ranks={1: HEALTHY},
            missing=("no RDMA counters: there is no adapter",),
        ),
        node("n0", ranks={0: HEALTHY}, addresses=("10.0.0.1",)),
    )
    assert told.cause == "network congestion"
    assert "round trips from n1 to n0 took 24" in told.evidence[0]
    assert any("data from n1 to n0 arrived at" in s for s in told.evidence)
    assert not any("10.0.0.3" in s for s in told.evidence)
    assert _saying(told, "Against network congestion: traffic that is not the job's left n1")
    assert _saying(told, "Not seen on n1: no RDMA counters")


def test_other_traffic_on_the_link_is_told() -> None:
    told = _explain(
        _link(),
        node(
            "n1",
            series={
                "net/eth0/tx_bytes_per_s": step(2e7, 1.2e9),
                "peer/10.0.0.1/sent_bytes_per_s": step(1.99e7, 4.99e6),
            },
            ranks={1: HEALTHY},
        ),
    )
    assert told.cause == "network congestion"
    assert "traffic that is not the job's left n1 at 1.2 GB/s" in told.evidence[0]


def test_a_link_that_negotiated_a_lower_speed_is_a_degraded_device() -> None:
    told = _explain(
        _link(),
        node(
            "n1",
            series={"rdma/mlx5_0:1/speed_bits_per_s": step(4e11, 1e11, noise=0.0)},
            ranks={1: HEALTHY},
        ),
    )
    assert told.cause == "device degradation (link speed)"
    assert "n1's mlx5_0:1 ran at 100 Gbit/s, before 400 Gbit/s" in told.evidence[0]


def test_a_slow_link_without_a_sign_is_unknown() -> None:
    told = _explain(_link(), _rdma("n1", 1), _rdma("n0", 0))
    assert told.cause == ""


def test_without_telemetry_it_says_so() -> None:
    told = _explain(_device())
    assert told.cause == ""
    assert told.evidence == ("No telemetry of its node tells why.",)
    assert _explain(_device(device="NVIDIA H200")).cause == "device degradation"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"node": "n", "t": "rubbish", "series": 3, "ranks": []},
        {"t": [1, 2], "ranks": {"3": {"series": {"runqueue_cores": [1]}, "steady": None}}},
        {"t": [[1]], "ranks": {"x": {}}, "gpus": {"0": 3}, "missing": 5, "addresses": 1},
        {"t": [1, 2], "ranks": {"3": {"series": {"runqueue_cores": ["a", {}]}}}},
    ],
)
def test_rubbish_from_another_machine_costs_its_evidence_only(body: dict[str, Any]) -> None:
    told = explain(_device(), [body], onset_t=ONSET_T)
    assert told.cause == ""


def test_two_workers_of_one_contended_host_are_one_finding() -> None:
    body = node(
        "n1",
        series={"cpu/neighbour_cores": step(0.02, 1.9)},
        ranks={
            3: {**HEALTHY, "runqueue_cores": step(0.01, 0.4)},
            4: {**HEALTHY, "runqueue_cores": step(0.01, 0.3)},
            5: {**HEALTHY, "throttled_cores": step(0.0, 0.3)},
        },
    )
    told = explain_all(
        [_device(3, slowdown=1.4), _device(4, slowdown=1.6), _device(5)],
        [body],
        onset_t=ONSET_T,
        relief_t=RELIEF_T,
    )
    assert [(f.what, f.ranks, f.slowdown) for f in told] == [
        ("host", (3, 4), 1.6),
        ("device", (5,), 1.5),
    ]
    assert job_cause(told) == "several at once: CPU contention, device degradation"


def test_a_host_of_workers_is_looked_at_one_by_one() -> None:
    """A benchmark of the host is slow under a quota as well; only the worker it holds is named."""
    host = Finding(what="host", slowdown=1.4, ranks=(3, 4, 5), host="h1")
    body = node(
        "n1",
        ranks={
            3: {**HEALTHY, "throttled_cores": step(0.0, 0.3)},
            4: {**HEALTHY, "runqueue_cores": step(0.01, 0.3)},
            5: HEALTHY,
        },
    )
    told = explain_all([host, _device(3, slowdown=1.6)], [body], onset_t=ONSET_T, relief_t=RELIEF_T)
    assert [(f.what, f.ranks, f.slowdown, f.cause) for f in told] == [
        ("device", (3,), 1.6, "device degradation (quota)"),
        ("host", (4,), 1.4, "CPU contention"),
    ]
    calm = node("n1", ranks=dict.fromkeys((3, 4, 5), HEALTHY))
    (unknown,) = explain_all([host], [calm], onset_t=ONSET_T)
    assert (unknown.what, unknown.ranks, unknown.cause) == ("host", (3, 4, 5), "")


def test_a_host_of_gpus_is_one() -> None:
    host = Finding(what="host", slowdown=1.4, ranks=(3, 4), host="h1")
    body = node(
        "n1",
        ranks={3: {**HEALTHY, "runqueue_cores": step(0.01, 0.3)}, 4: HEALTHY},
        gpus={0: [3], 1: [4]},
    )
    (told,) = explain_all([host], [body], onset_t=ONSET_T, relief_t=RELIEF_T)
    assert (told.what, told.ranks, told.cause) == ("host", (3, 4), "CPU contention")


def test_one_worker_hit_twice_has_several_causes() -> None:
    told = _explain(
        _device(),
        node(
            "n1",
            ranks={
                3: {
                    **HEALTHY,
                    "runqueue_cores": step(0.01, 0.5, seed=2),
                    "throttled_cores": step(0.0, 0.2),
                }
            },
        ),
    )
    assert told.what == "host"
    assert told.cause == "several at once: CPU contention, device degradation (quota)"
