"""RDMA ports: what they moved, and what congestion did to them.

In: /sys/class/infiniband/DEVICE/ports/N/{counters,hw_counters,state,rate}. Out, of each port,

    {"rdma/mlx5_0:1/cnp_handled_per_s": 1204.0, "rdma/mlx5_0:1/tx_bytes_per_s": 2.1e10, …}

Names of the counters differ by driver: mlx5, bnxt_re (Broadcom) and irdma (Intel) are known. Not
run against a real adapter: tests read trees in the format of mlx5.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from failslow.telemetry.base import Rates, read, read_number

__all__ = ["RdmaSampler"]

_WORD_BYTES = 4
"""port_xmit_data and port_rcv_data count 32-bit words (InfiniBand specification, PortCounters)."""
_DISCOVER_S = 30.0
_HARDWARE: dict[str, tuple[str, ...]] = {
    "cnp_sent": ("np_cnp_sent", "tx_cnp_pkts", "cnpSent"),
    "cnp_handled": ("rp_cnp_handled", "rx_cnp_pkts", "cnpHandled"),
    "ecn_marked": ("np_ecn_marked_roce_packets", "rx_ecn_marked_pkts", "RxECNMrkd"),
    "out_of_sequence": ("out_of_sequence", "packet_seq_err", "oos_drop_count"),
    "retransmits": ("roce_adp_retrans", "to_retransmits", "seq_err_naks_rcvd", "RetransSegs"),
    "timeouts": ("local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans_to"),
    "no_buffer": ("out_of_buffer", "rx_out_of_buffer"),
}
"""What is reported: the counters under hw_counters that are summed for it."""
_PORT: dict[str, tuple[str, ...]] = {
    "wait_ticks": ("port_xmit_wait",),
    "discards": ("port_xmit_discards",),
    "errors": (
        "symbol_error",
        "port_rcv_errors",
        "local_link_integrity_errors",
        "link_error_recovery",
        "link_downed",
    ),
}
"""The same under counters. A tick of port_xmit_wait is as long as the device likes."""


@dataclass
class _Port:
    name: str
    path: Path
    files: list[tuple[str, Path, float, int]] = field(default_factory=list)
    """What, where, factor, bits at which it wraps."""


class RdmaSampler:
    """root: where /sys is."""

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._base = root / "sys/class/infiniband"
        self._rates = Rates()
        self._ports: list[_Port] = []
        self._discovered_s = -1e9

    @property
    def missing(self) -> tuple[str, ...]:
        """One sentence where there is no RDMA adapter to be seen."""
        if self._base.is_dir() and any(self._base.iterdir()):
            return ()
        return (f"no RDMA counters: {self._base} shows no adapter",)

    def sample(self, now_s: float) -> Mapping[str, float]:
        """As `Sampler.sample`."""
        if now_s - self._discovered_s >= _DISCOVER_S:
            self._discovered_s = now_s
            self._ports = self._discover()
        values: dict[str, float] = {}
        for port in self._ports:
            sums: dict[str, float] = {}
            for what, file, factor, bits in port.files:
                count = read_number(file)
                if count is None:
                    continue
                rate = self._rates.update(str(file), count, now_s, wrap_bits=bits)
                if rate is not None:
                    sums[what] = sums.get(what, 0.0) + rate * factor
            for what, rate in sums.items():
                values[f"{port.name}/{what}_per_s"] = rate
            values.update(_link(port))
        return values

    def _discover(self) -> list[_Port]:
        found = []
        for ports in sorted(self._base.glob("*/ports")):
            for path in sorted(ports.iterdir()):
                port = _Port(f"rdma/{ports.parent.name}:{path.name}", path)
                for folder, names, bits in (
                    ("hw_counters", _HARDWARE, 32),
                    ("counters", _PORT, 64),
                ):
                    there = set(_names(path / folder))
                    for what, files in names.items():
                        port.files += [
                            (what, path / folder / file, 1.0, bits)
                            for file in files
                            if file in there
                        ]
                    for what, file in (
                        ("tx_bytes", "port_xmit_data"),
                        ("rx_bytes", "port_rcv_data"),
                    ):
                        if file in there:
                            port.files.append((what, path / folder / file, _WORD_BYTES, bits))
                found.append(port)
        return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _link(port: _Port) -> dict[str, float]:
    """From `state` ("4: ACTIVE") and `rate` ("400 Gb/sec (4X NDR)")."""
    values = {}
    state = read(port.path / "state")
    if state:
        values[f"{port.name}/active"] = float(state.startswith(b"4:"))
    rate = re.match(rb"\s*([\d.]+) Gb/sec \((\d+)X", read(port.path / "rate") or b"")
    if rate:
        values[f"{port.name}/speed_bits_per_s"] = float(rate[1]) * 1e9
        values[f"{port.name}/width"] = float(rate[2])
    return values
