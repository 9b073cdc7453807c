"""What only the TCPStore transport does: where it listens, holes, left threads, errors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.transport.servers import (
    ProcessServer,
    accepts,
    free_port,
    listening_addresses,
    tcpstore_server,
    until,
)

from failslow.errors import MissingDependencyError, TransportError
from failslow.runtime.transport import Limits, from_url, tcpstore
from failslow.runtime.transport.tcpstore import TcpStoreServer, serve

pytest.importorskip("torch", reason="torch is not installed: pip install 'failslow[torch]'")


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    server = serve("tcpstore://127.0.0.1:0", capacity=8)
    yield server
    server.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ProcessServer]:
    server = tcpstore_server(tmp_path)
    yield server
    server.resume()
    server.close()


def test_the_server_listens_on_the_given_address_alone() -> None:
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    before = listening_addresses(os.getpid())
    for host in ["127.0.0.1", *own[:1]]:
        server = serve(f"tcpstore://{host}:0")
        assert server.url.startswith(f"tcpstore://{host}:")
        assert listening_addresses(os.getpid()) == before | {host}
        transport = from_url(server.url)
        transport.publish("steps", b"0")
        assert transport.poll("steps", timeout_s=20) == [b"0"]
        transport.close()
        server.close()
        server.close()
        until(lambda: listening_addresses(os.getpid()) == before)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match="every interface; name the address of one"):
        serve(f"tcpstore://{host}:0")


def test_an_address_that_cannot_be_bound_is_refused(server: TcpStoreServer) -> None:
    with pytest.raises(TransportError, match=r"cannot listen there: Address already in use"):
        serve(server.url)
    with pytest.raises(TransportError, match="cannot listen there"):
        serve("tcpstore://192.0.2.1:0")  # reserved for documentation, no machine has it


@pytest.mark.parametrize(
    "url", ["tcpstore://", "tcpstore://host", "tcpstore://host:port", "tcpstore://host:0"]
)
def test_an_unusable_address_is_refused(url: str) -> None:
    with pytest.raises(TransportError, match="write tcpstore://HOST:PORT"):
        from_url(url)


def test_a_port_is_free_again_after_close(server: TcpStoreServer) -> None:
    port = int(server.url.rpartition(":")[2])
    assert accepts(port)
    server.close()
    until(lambda: not accepts(port))
    serve(server.url).close()


def test_more_messages_than_the_ring_holds_wrap_around(server: TcpStoreServer) -> None:
    reader, sender = from_url(server.url), from_url(server.url, Limits(retain=0))
    assert reader.poll("steps", timeout_s=0.1) == []
    for n in range(30):
        sender.publish("steps", b"%d" % n)
        assert reader.poll("steps", timeout_s=20) == [b"%d" % n]
    late = from_url(server.url)
    found = late.poll("steps", timeout_s=20)
    assert found == [b"%d" % n for n in range(22, 30)]
    assert late.health().dropped_unread == 0
    for transport in (reader, sender, late):
        transport.close()


def test_a_number_whose_writer_died_is_skipped(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcpstore, "_HOLE_GRACE_S", 0.5)
    sender, reader = from_url(server.url), from_url(server.url)
    sender.publish("steps", b"before")
    assert reader.poll("steps", timeout_s=20) == [b"before"]
    port = int(server.url.rpartition(":")[2])
    store = tcpstore._tcp_store(host_name="127.0.0.1", port=port, is_master=False)
    assert store.add("steps/head", 1) == 2  # and dies before it writes
    sender.publish("steps", b"after")
    assert reader.poll("steps", timeout_s=0.2) == []
    assert reader.poll("steps", timeout_s=20) == [b"after"]
    for _ in range(6):
        sender.publish("steps", b"filler")
        assert reader.poll("steps", timeout_s=20) == [b"filler"]
    assert store.add("steps/head", 1) == 10  # a hole that still holds message 2
    sender.publish("steps", b"again")
    assert reader.poll("steps", timeout_s=20) == [b"again"]
    sender.close()
    reader.close()


@pytest.mark.parametrize(
    ("taken", "grace_s"),
    [(7, 0.5), (10**6, 60.0)],
    ids=["one grace for all of them", "no grace for more than a topic holds"],
)
def test_numbers_that_nobody_writes_blind_no_reader(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch, taken: int, grace_s: float
) -> None:
    monkeypatch.setattr(tcpstore, "_HOLE_GRACE_S", grace_s)
    sender, reader = from_url(server.url), from_url(server.url)
    sender.publish("steps", b"before")
    assert reader.poll("steps", timeout_s=20) == [b"before"]
    port = int(server.url.rpartition(":")[2])
    stranger = tcpstore._tcp_store(host_name="127.0.0.1", port=port, is_master=False)
    stranger.add("steps/head", taken)
    assert reader.poll("steps", timeout_s=0.3) == []  # it has seen the head
    sender.publish("steps", b"after")
    assert reader.poll("steps", timeout_s=2.5) == [b"after"]
    stranger.add("steps/head", 1)  # a later one has a grace of its own
    sender.publish("steps", b"last")
    if grace_s < 1:
        assert reader.poll("steps", timeout_s=0.1) == []
        assert reader.poll("steps", timeout_s=20) == [b"last"]
    sender.close()
    reader.close()


def test_a_stopped_server_costs_threads_only_while_it_is_stopped(process: ProcessServer) -> None:
    transport = from_url(process.url, Limits(interval_s=0.02, stall_s=0.3, connect_s=0.3))
    transport.publish("steps", b"0")
    assert transport.poll("steps", timeout_s=20) == [b"0"]
    threads = threading.active_count()
    process.stop()
    transport.publish("steps", b"1")
    until(lambda: transport.poll("steps", 0.1) or transport.health().abandoned >= 2)
    process.resume()
    until(lambda: b"1" in transport.poll("steps", 0.1))
    until(lambda: threading.active_count() == threads)
    assert transport.health().connected
    transport.close()


def test_a_store_of_somebody_else_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpstore, "_TIMEOUT_S", 0.5)
    port = free_port()
    foreign = tcpstore._tcp_store(host_name="127.0.0.1", port=port, is_master=True)
    transport = from_url(f"tcpstore://127.0.0.1:{port}")
    until(lambda: transport.poll("steps", 0.1) or transport.health().last_error)
    assert "not a failslow server" in transport.health().last_error
    transport.close()
    del foreign


def test_a_dead_port_is_reported_at_once_and_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    transport = from_url(f"tcpstore://127.0.0.1:{free_port()}")
    transport.publish("steps", b"0")
    until(lambda: "refused" in transport.health().last_error, 2)
    transport.close(linger_s=0)
    assert capfd.readouterr().err == ""


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    for make in (from_url, serve):
        with pytest.raises(MissingDependencyError, match=r"failslow\[torch\]"):
            make("tcpstore://127.0.0.1:29400")


def test_importing_the_transports_imports_neither_torch_nor_redis() -> None:
    code = (
        "import sys\n"
        "import failslow.runtime.transport.redis, failslow.runtime.transport.tcpstore\n"
        "from failslow.runtime.transport import from_url\n"
        "from_url('memory://name').publish('steps', b'')\n"
        "sys.exit(bool({'torch', 'redis'} & sys.modules.keys()))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
