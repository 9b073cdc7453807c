"""Interfaces and TCP from the kernel's formats, and connections of this very machine."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Container, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.telemetry.trees import write

from failslow.telemetry.net import ConnectionSampler, InterfaceSampler
from failslow.telemetry.sockets import Connection, connections

_HEAD = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop "
    "fifo colls carrier compressed\n"
)


def _net(root: Path, n: int) -> None:
    """Counts after n seconds."""
    write(
        root,
        {
            "proc/net/dev": _HEAD + "    lo: 99 9 0 0 0 0 0 0 99 9 0 0 0 0 0 0\n"
            f"  eth0:{1000 * n:8d} {10 * n} {n} {2 * n} {n} {n} 0 5 "
            f"{(2**32 - 2000 + 2000 * n) % 2**32} {20 * n} {n} {4 * n} 0 0 {n} 0\n"
            "  ifb0:       0       0    0    0    0     0          0         0        0       0    "
            "0    0    0     0       0          0\n",
            "proc/net/snmp": "Ip: Forwarding DefaultTTL\nIp: 1 64\n"
            "Tcp: RtoAlgorithm RtoMin RetransSegs InErrs\n"
            f"Tcp: 1 200 {7 * n} 0\n",
            "proc/net/netstat": "TcpExt: SyncookiesSent TCPTimeouts TCPOFOQueue\n"
            f"TcpExt: 0 {3 * n} {5 * n}\n"
            f"IpExt: InNoRoutes InCEPkts\nIpExt: 0 {9 * n}\n",
        },
    )


def test_interfaces_and_tcp_become_rates(tmp_path: Path) -> None:
    sampler = InterfaceSampler(root=tmp_path, speeds=lambda: {"eth0": 1e10})
    _net(tmp_path, 1)
    assert sampler.sample(1.0) == {"net/eth0/speed_bits_per_s": 1e10}
    _net(tmp_path, 3)
    assert sampler.sample(3.0) == {
        "net/eth0/speed_bits_per_s": 1e10,
        "net/eth0/rx_bytes_per_s": 1000.0,
        "net/eth0/rx_packets_per_s": 10.0,
        "net/eth0/rx_errors_per_s": 3.0,
        "net/eth0/rx_drops_per_s": 2.0,
        "net/eth0/tx_bytes_per_s": 2000.0,  # of a counter that wrapped
        "net/eth0/tx_packets_per_s": 20.0,
        "net/eth0/tx_errors_per_s": 2.0,
        "net/eth0/tx_drops_per_s": 4.0,
        "tcp/retransmits_per_s": 7.0,
        "tcp/timeouts_per_s": 3.0,
        "tcp/out_of_order_per_s": 5.0,
        "tcp/ecn_marked_per_s": 9.0,
    }


def test_hidden_counters_are_said(tmp_path: Path) -> None:
    sampler = InterfaceSampler(root=tmp_path)
    assert sampler.sample(0.0) == {}
    assert len(sampler.missing) == 1


def test_this_machine_shows_its_interfaces() -> None:
    sampler = InterfaceSampler()
    sampler.sample(0.0)
    values = sampler.sample(1.0)
    assert "tcp/retransmits_per_s" in values
    assert all(value >= 0 for value in values.values())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(socket.create_connection(server.getsockname())) as near,
    ):
        far, _ = server.accept()
        with closing(far):
            yield near, far


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def test_the_kernel_tells_of_a_connection_what_the_socket_itself_tells(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    near.sendall(b"x" * 10_000)
    received = 0
    while received < 10_000:
        received += len(far.recv(20_000))
    deadline_s = time.monotonic() + 10
    while True:
        found = {c.inode: c for c in connections()}
        info = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        mine = found[_inode(near)]
        rtt_us, total_retrans = struct.unpack_from("=I", info, 68)[0], info[100]
        if mine.rtt_s == rtt_us / 1e6 and mine.acked_bytes > 10_000:
            break
        assert time.monotonic() < deadline_s, (mine, rtt_us)
    assert mine.local == mine.remote == "127.0.0.1"
    assert mine.retransmits == total_retrans == 0
    assert mine.acked_bytes == 10_001  # the handshake counts as one
    assert found[_inode(far)].received_bytes == 10_000
    assert [c.inode for c in connections([_inode(far)])] == [_inode(far)]
    assert mine.rtt_s > 0
    assert mine.queued_bytes == 0


def test_version_6_addresses_are_told() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server, closing(socket.create_connection(server.getsockname()[:2])) as near:
        mine = {c.inode: c for c in connections()}[_inode(near)]
    assert mine.local == mine.remote == "::1"


def test_a_workers_connections_are_found_by_its_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    sampler = ConnectionSampler(lambda: {2: os.getpid()})
    near.sendall(b"x")
    far.recv(1)
    values = sampler.sample(0.0)
    assert values["link/intra/rtt_s"] > 0
    assert "link/inter/rtt_s" not in values
    assert sampler.missing == ()


def _connection(inode: int, remote: str, n: float, **changes: float) -> Connection:
    """One of a worker at 10.0.0.1 after n seconds."""
    values = {"rtt_s": 0.002, "delivery_bytes_per_s": 1e9, "idle_s": 0.01, **changes}
    return Connection(
        inode=inode,
        cookie=inode,
        local="10.0.0.1",
        remote=remote,
        min_rtt_s=0.001,
        retransmits=int(2 * n),
        acked_bytes=int(1000 * n),
        received_bytes=int(500 * n),
        busy_s=0.25 * n,
        queued_bytes=300,
        rtt_s=values["rtt_s"],
        delivery_bytes_per_s=values["delivery_bytes_per_s"],
        idle_s=values["idle_s"],
    )


def _holding(root: Path, pid: int, inodes: list[int]) -> None:
    folder = root / f"proc/{pid}/fd"
    folder.mkdir(parents=True, exist_ok=True)
    for inode in inodes:
        (folder / str(inode)).symlink_to(f"socket:[{inode}]")
    (folder / "1").symlink_to("/dev/null")


def test_peers_ranks_and_link_classes_are_told_apart(tmp_path: Path) -> None:
    _holding(tmp_path, 50, [11, 12, 13])
    _holding(tmp_path, 60, [14])
    now: list[Connection] = []
    sampler = ConnectionSampler(
        lambda: {0: 50, 1: 60},
        root=tmp_path,
        look=lambda inodes: [c for c in now if c.inode in inodes],
    )

    def at(n: int) -> dict[str, float]:
        now[:] = [
            _connection(11, "10.0.0.2", n, rtt_s=0.003),
            _connection(12, "10.0.0.3", n, rtt_s=0.001),
            _connection(13, "10.0.0.1", n, rtt_s=0.0001),  # to this host itself
            _connection(14, "10.0.0.2", n, rtt_s=0.5, idle_s=60.0),  # an old round trip
            _connection(99, "10.0.0.9", n),  # nobody's of the job
        ]
        return dict(sampler.sample(float(n)))

    at(1)
    values = at(2)
    assert values["link/intra/rtt_s"] == 0.0001
    assert values["link/inter/rtt_s"] == pytest.approx(0.002)
    assert values["link/inter/rtt_cv"] == pytest.approx(0.5)
    assert values["peer/10.0.0.2/rtt_s"] == 0.003
    assert values["peer/10.0.0.2/sent_bytes_per_s"] == 2000.0
    assert values["peer/10.0.0.2/retransmits_per_s"] == 4.0
    assert values["peer/10.0.0.2/busy_share"] == 0.25
    assert values["peer/10.0.0.2/queued_bytes"] == 600.0
    assert values["rank/0/rtt_s"] == 0.003
    assert values["rank/0/delivery_bytes_per_s"] == 1e9
    assert values["rank/1/sent_bytes_per_s"] == 1000.0
    assert "rank/1/rtt_s" not in values
    assert not any("10.0.0.9" in name for name in values)
    assert sampler.addresses == {"10.0.0.1"}


def test_a_kernel_that_refuses_is_asked_once(tmp_path: Path) -> None:
    asked = []

    def look(inodes: Container[int]) -> list[Connection]:
        asked.append(1)
        raise OSError(1, "Operation not permitted")

    sampler = ConnectionSampler(lambda: {0: 50}, root=tmp_path, look=look)
    assert sampler.sample(0.0) == sampler.sample(1.0) == {}
    assert len(asked) == 1
    assert len(sampler.missing) == 1
