"""Interfaces, TCP as a whole, and the connections of the workers themselves.

In: /proc/net (of the network namespace this runs in), sock_diag, /proc/PID/fd of the workers. Out:
`net/…`, `tcp/…`, `link/…` and `peer/…` of the node and `rank/3/…` (`failslow.telemetry`).

A link whose queue fills shows here first: round trips of the connections over it grow, their data
arrive slower, and they are busy for longer.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

import psutil

from failslow.telemetry.base import Rates, read
from failslow.telemetry.sockets import Connection, connections

__all__ = ["ConnectionSampler", "InterfaceSampler"]

_COLUMNS = {
    "rx_bytes": (0,),
    "rx_packets": (1,),
    "rx_errors": (2, 4, 5),  # errs, fifo, frame
    "rx_drops": (3,),
    "tx_bytes": (8,),
    "tx_packets": (9,),
    "tx_errors": (10, 12, 13, 14),  # errs, fifo, colls, carrier
    "tx_drops": (11,),
}
"""Of a line of /proc/net/dev."""
_TCP = {
    "retransmits": ("snmp", "Tcp", "RetransSegs"),
    "timeouts": ("netstat", "TcpExt", "TCPTimeouts"),
    "ecn_marked": ("netstat", "IpExt", "InCEPkts"),
    "out_of_order": ("netstat", "TcpExt", "TCPOFOQueue"),
}
_SPEED_S = 10.0
_OWNERS_S = 5.0
_MOST_PEERS = 32
_FRESH_S = 3.0
"""The round trip of a connection that has been quiet for longer is an old one."""


def _speeds() -> dict[str, float]:
    return {name: stats.speed * 1e6 for name, stats in psutil.net_if_stats().items() if stats.speed}


class InterfaceSampler:
    """Counters of the node's interfaces and of its TCP.

    root: where /proc is. speeds: bits a second of each interface that knows it.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        speeds: Callable[[], Mapping[str, float]] = _speeds,
    ) -> None:
        self._net, self._find_speeds = root / "proc/net", speeds
        self._rates = Rates()
        self._speeds: Mapping[str, float] = {}
        self._speeds_s = -1e9

    @property
    def missing(self) -> tuple[str, ...]:
        """One sentence where /proc/net is hidden."""
        there = read(self._net / "dev") is not None
        return () if there else (f"no interface counters: {self._net}/dev cannot be read",)

    def sample(self, now_s: float) -> Mapping[str, float]:
        """As `Sampler.sample`."""
        values: dict[str, float] = {}
        for line in (read(self._net / "dev") or b"").splitlines()[2:]:
            name, _, rest = line.decode(errors="replace").partition(":")
            interface, counts = name.strip(), [int(word) for word in rest.split()]
            if interface == "lo" or len(counts) < 16 or not any(counts):
                continue
            for what, columns in _COLUMNS.items():
                self._put(values, f"net/{interface}/{what}", sum(counts[c] for c in columns), now_s)
            if interface in self._known_speeds(now_s):
                values[f"net/{interface}/speed_bits_per_s"] = self._speeds[interface]
        tables = {name: _pairs(read(self._net / name)) for name in ("snmp", "netstat")}
        for what, (file, table, entry) in _TCP.items():
            count = tables[file].get((table, entry))
            if count is not None:
                self._put(values, f"tcp/{what}", count, now_s)
        return values

    def _put(self, values: dict[str, float], key: str, count: float, now_s: float) -> None:
        rate = self._rates.update(key, count, now_s, wrap_bits=32)
        if rate is not None:
            values[f"{key}_per_s"] = rate

    def _known_speeds(self, now_s: float) -> Mapping[str, float]:
        if now_s - self._speeds_s >= _SPEED_S:
            self._speeds_s = now_s
            try:
                self._speeds = self._find_speeds()
            except OSError:
                self._speeds = {}
        return self._speeds


def _pairs(text: bytes | None) -> dict[tuple[str, str], int]:
    """/proc/net/snmp and netstat: a line of names, then one of numbers, each begun by "Tcp:"."""
    values = {}
    lines = (text or b"").decode(errors="replace").splitlines()
    for names, numbers in zip(lines[::2], lines[1::2], strict=False):
        table, *entries = names.split()
        values.update(
            {
                (table.rstrip(":"), entry): int(number)
                for entry, number in zip(entries, numbers.split()[1:], strict=False)
            }
        )
    return values


class ConnectionSampler:
    """The workers' own TCP connections.

    workers: rank -> pid. root: where /proc is. look: the established connections of such inodes.
    """

    def __init__(
        self,
        workers: Callable[[], Mapping[int, int]],
        *,
        root: Path = Path("/"),
        look: Callable[[Container[int]], Iterable[Connection]] = connections,
    ) -> None:
        self._workers, self._proc, self._look = workers, root / "proc", look
        self._rates = Rates()
        self._owners: dict[int, int] = {}
        self._asked: Mapping[int, int] = {}
        self._asked_s = -1e9
        self._error = ""
        self.addresses: set[str] = set()
        """This node's own, as its workers' connections show them."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Why connections cannot be asked for."""
        return (self._error,) if self._error else ()

    def sample(self, now_s: float) -> Mapping[str, float]:
        """As `Sampler.sample`."""
        workers = dict(self._workers())
        if self._error or not workers:
            return {}
        self._find_owners(workers, now_s)
        try:
            found = list(self._look(self._owners))
        except OSError as error:
            self._error = f"no round trips of connections: sock_diag says {error}"
            return {}
        mine = [(self._owners[c.inode], c) for c in found if c.inode in self._owners]
        self.addresses |= {c.local for _, c in mine if not _is_loopback(c.local)}
        values: dict[str, float] = {}
        outside: dict[int, list[Connection]] = {}
        peers: dict[str, list[Connection]] = {}
        links: dict[str, list[Connection]] = {"intra": [], "inter": []}
        for rank, connection in mine:
            remote = connection.remote
            inside = _is_loopback(remote) or remote in self.addresses
            links["intra" if inside else "inter"].append(connection)
            if not inside:
                outside.setdefault(rank, []).append(connection)
                peers.setdefault(remote, []).append(connection)
        for name, group in links.items():
            values.update(_link(f"link/{name}", group))
        for rank, group in outside.items():
            values.update(self._flow(f"rank/{rank}", group, now_s))
        most = sorted(peers, key=lambda p: -sum(c.acked_bytes for c in peers[p]))[:_MOST_PEERS]
        for peer in most:
            values.update(self._flow(f"peer/{peer}", peers[peer], now_s))
        return values

    def _flow(self, key: str, group: list[Connection], now_s: float) -> dict[str, float]:
        """Of the connections to one peer, or of one worker."""
        retransmits = acked = received = busy_s = 0.0
        known = False
        for c in group:
            each = [
                self._rates.update(f"{key}/{c.cookie}/{what}", count, now_s)
                for what, count in (
                    ("retransmits", c.retransmits),
                    ("acked", c.acked_bytes),
                    ("received", c.received_bytes),
                    ("busy", c.busy_s),
                )
            ]
            again, sent, got, busy = each
            if again is not None and sent is not None and got is not None and busy is not None:
                known = True
                retransmits, acked, received = retransmits + again, acked + sent, received + got
                busy_s = max(busy_s, busy)
        values = {f"{key}/queued_bytes": float(sum(c.queued_bytes for c in group))}
        if known:
            values[f"{key}/retransmits_per_s"] = retransmits
            values[f"{key}/sent_bytes_per_s"] = acked
            values[f"{key}/received_bytes_per_s"] = received
            values[f"{key}/busy_share"] = min(1.0, busy_s)
        fresh = [c for c in group if c.idle_s <= _FRESH_S and c.rtt_s > 0]
        if fresh:
            slowest = max(fresh, key=lambda c: c.rtt_s)
            values[f"{key}/rtt_s"] = slowest.rtt_s
            sending = [c for c in fresh if c.delivery_bytes_per_s > 0]
            if sending:
                main = max(sending, key=lambda c: c.acked_bytes)
                values[f"{key}/delivery_bytes_per_s"] = main.delivery_bytes_per_s
        return values

    def _find_owners(self, workers: Mapping[int, int], now_s: float) -> None:
        """Whose each connection is; the processes' descriptors are looked through now and then."""
        if workers == self._asked and now_s - self._asked_s < _OWNERS_S:
            return
        self._asked, self._asked_s = workers, now_s
        owners: dict[int, int] = {}
        for rank, pid in workers.items():
            for inode in _sockets(self._proc / str(pid) / "fd"):
                owners.setdefault(inode, rank)
        self._owners = owners


def _sockets(folder: Path) -> list[int]:
    """Inodes of the sockets a process holds."""
    found = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"{folder}/{name}"))
        except OSError:
            continue
        if match:
            found.append(int(match[1]))
    return found


def _link(key: str, group: list[Connection]) -> dict[str, float]:
    trips = [c.rtt_s for c in group if c.idle_s <= _FRESH_S and c.rtt_s > 0]
    if not trips:
        return {}
    mean = statistics.fmean(trips)
    values = {f"{key}/rtt_s": mean}
    if len(trips) > 1:
        values[f"{key}/rtt_cv"] = statistics.pstdev(trips) / mean
    return values


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
