"""RDMA ports from trees in the format of mlx5 (made up: there is no adapter here)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.telemetry.trees import RdmaPort, write

from failslow.telemetry.rdma import RdmaSampler

P = "rdma/mlx5_0:1"


def test_no_adapter_is_said(tmp_path: Path) -> None:
    sampler = RdmaSampler(root=tmp_path)
    assert sampler.sample(0.0) == {}
    (text,) = sampler.missing
    assert text.startswith("no RDMA counters")


def test_congestion_counters_and_bytes_become_rates(tmp_path: Path) -> None:
    port = RdmaPort(tmp_path)
    port.counts()
    sampler = RdmaSampler(root=tmp_path)
    assert sampler.missing == ()
    assert sampler.sample(0.0) == {
        f"{P}/active": 1.0,
        f"{P}/speed_bits_per_s": 4e11,
        f"{P}/width": 4.0,
    }
    port.counts(
        np_cnp_sent=100,
        rp_cnp_handled=200,
        np_ecn_marked_roce_packets=300,
        out_of_sequence=10,
        packet_seq_err=4,
        roce_adp_retrans=8,
        local_ack_timeout_err=2,
        out_of_buffer=6,
        port_xmit_wait=1000,
        port_xmit_data=10**9,
        port_rcv_data=2 * 10**9,
        port_xmit_discards=12,
        symbol_error=16,
        port_rcv_errors=2,
    )
    values = sampler.sample(2.0)
    rates = {k.removeprefix(f"{P}/"): v for k, v in values.items() if k.endswith("_per_s")}
    del rates["speed_bits_per_s"]
    assert rates == {
        "cnp_sent_per_s": 50.0,
        "cnp_handled_per_s": 100.0,
        "ecn_marked_per_s": 150.0,
        "out_of_sequence_per_s": 7.0,
        "retransmits_per_s": 4.0,
        "timeouts_per_s": 1.0,
        "no_buffer_per_s": 3.0,
        "wait_ticks_per_s": 500.0,
        "tx_bytes_per_s": 2e9,  # the files count words of 4 bytes
        "rx_bytes_per_s": 4e9,
        "discards_per_s": 6.0,
        "errors_per_s": 9.0,
    }


def test_a_hardware_counter_wraps_at_32_bits(tmp_path: Path) -> None:
    port = RdmaPort(tmp_path)
    sampler = RdmaSampler(root=tmp_path)
    port.counts(rp_cnp_handled=2**32 - 50)
    sampler.sample(0.0)
    port.counts(rp_cnp_handled=50)
    assert sampler.sample(1.0)[f"{P}/cnp_handled_per_s"] == 100.0


def test_every_device_and_port_has_a_name_and_a_link_that_degrades_shows(tmp_path: Path) -> None:
    ports = [RdmaPort(tmp_path, device, n) for device in ("mlx5_0", "mlx5_1") for n in (1, 2)]
    for port in ports:
        port.counts()
    sampler = RdmaSampler(root=tmp_path)
    sampler.sample(0.0)
    ports[3].link(state="1: DOWN", rate="10 Gb/sec (1X SDR)")
    values = sampler.sample(1.0)
    assert {n.split("/")[1] for n in values} == {"mlx5_0:1", "mlx5_0:2", "mlx5_1:1", "mlx5_1:2"}
    assert values["rdma/mlx5_1:2/active"] == 0.0
    assert values["rdma/mlx5_1:2/speed_bits_per_s"] == 1e10
    assert values["rdma/mlx5_1:2/width"] == 1.0


@pytest.mark.parametrize(
    ("names", "driver"),
    [
        (("tx_cnp_pkts", "rx_cnp_pkts", "rx_ecn_marked_pkts"), "bnxt_re"),
        (("cnpSent", "cnpHandled", "RxECNMrkd"), "irdma"),
    ],
)
def test_other_drivers_names_are_known(tmp_path: Path, names: tuple[str, ...], driver: str) -> None:
    folder = f"sys/class/infiniband/{driver}0/ports/1/hw_counters"
    sampler = RdmaSampler(root=tmp_path)
    write(tmp_path, {f"{folder}/{name}": "0\n" for name in names})
    sampler.sample(0.0)
    write(tmp_path, {f"{folder}/{name}": "7\n" for name in names})
    values = sampler.sample(1.0)
    for what in ("cnp_sent", "cnp_handled", "ecn_marked"):
        assert values[f"rdma/{driver}0:1/{what}_per_s"] == 7.0


def test_counters_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    port = RdmaPort(tmp_path)
    port.counts()
    sampler = RdmaSampler(root=tmp_path)
    sampler.sample(0.0)
    (tmp_path / port.folder / "hw_counters/np_cnp_sent").write_text("N/A\n")
    values = sampler.sample(1.0)
    assert f"{P}/cnp_sent_per_s" not in values
    assert values[f"{P}/cnp_handled_per_s"] == 0.0
