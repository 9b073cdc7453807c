"""Congesting a real link between namespaces: the rate left, in one direction, beside other shaping,
and the interface as it was afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.testbed import Node, TestBed, until

from failslow.errors import InjectError
from failslow.inject import congest, find_place, parse_rate_bits
from failslow.inject.namespaces import is_host_network, namespace_path, run_in

_SINK = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
buffer = bytearray(1 << 20)
while True:
    link, _ = server.accept()
    begun = total = 0
    while count := link.recv_into(buffer):
        total += count
    link.sendall(b"done")
    link.close()
"""
_SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
size = int(sys.argv[3])
begin_s = time.monotonic()
link.sendall(bytes(size))
link.shutdown(socket.SHUT_WR)
link.recv(4)
print(8e-6 * size / (time.monotonic() - begin_s))
"""


def _python(node: Node, code: str, *arguments: str) -> list[str]:
    net = f"--net=/run/netns/{node.namespace}"
    return ["nsenter", net, sys.executable, "-I", "-S", "-c", code, *arguments]


@contextmanager
def _sink(node: Node) -> Iterator[str]:
    process = subprocess.Popen(_python(node, _SINK), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _mbit(source: Node, sink: Node, *, size_bytes: int = 1_000_000) -> float:
    """Measured rate of one TCP transfer, in Mbit/s."""
    with _sink(sink) as port:
        words = _python(source, _SEND, sink.address, port, str(size_bytes))
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def _assert_limited(source: Node, sink: Node, mbit: float) -> None:
    """The rate is `mbit`; a busy machine may spoil two transfers, but speeds none up."""
    rates = [_mbit(source, sink)]
    while len(rates) < 3 and max(rates) < 0.7 * mbit:
        rates.append(_mbit(source, sink))
    assert 0.7 * mbit < max(rates) < 1.3 * mbit, rates


def _assert_free(source: Node, sink: Node) -> None:
    """The rate is far above every limit of these tests, as soon as the machine has time for it."""
    until(lambda: _mbit(source, sink) > 150)


def _shaping(node: Node) -> str:
    """Everything tc knows of the node's interface, without its counters."""
    path = namespace_path(node.namespace)
    return "".join(
        run_in(path, "tc", what, "show", "dev", "eth0") for what in ("qdisc", "class", "filter")
    )


def test_a_directed_link_keeps_the_rate_asked_for_and_other_paths_theirs(
    bed: TestBed, nothing_left: Callable[[], None]
) -> None:
    source, sink, other = bed.nodes
    before = _shaping(source)

    with congest(source.namespace, "eth0", 50, dst=sink.address):
        _assert_limited(source, sink, 50)
        _assert_free(source, other)
        _assert_free(sink, source)

    _assert_free(source, sink)
    assert _shaping(source) == before
    nothing_left()


def test_a_whole_egress_keeps_the_rate_asked_for(bed: TestBed) -> None:
    source, sink, other = bed.nodes
    before = _shaping(source)

    with congest(source.namespace, "eth0", 40):
        _assert_limited(source, sink, 40)
        _assert_limited(source, other, 40)

    assert _shaping(source) == before


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_limits_on_one_interface_stand_side_by_side(bed: TestBed, first_ends_first: bool) -> None:
    source, sink, other = bed.nodes
    before = _shaping(source)
    first = congest(source.namespace, "eth0", 50, dst=sink.address)
    second = congest(source.namespace, "eth0", 20)

    with first, second:
        _assert_limited(source, sink, 50)
        _assert_limited(source, other, 20)
        ended, left = (first, second) if first_ends_first else (second, first)
        ended.stop()
        target = other if left is second else sink
        _assert_limited(source, target, 20 if left is second else 50)

    assert _shaping(source) == before


def test_a_shaped_card_keeps_its_shape(bed: TestBed) -> None:
    node, sink, _ = bed.nodes
    bed.shape(node, 100)
    try:
        before = _shaping(node)
        with congest(node.namespace, "eth0", 30, dst=sink.address):
            _assert_limited(node, sink, 30)
        assert _shaping(node) == before
        _assert_limited(node, sink, 100)
    finally:
        run_in(namespace_path(node.namespace), "tc", "qdisc", "del", "dev", "eth0", "root")


def test_queueing_that_cannot_be_shared_is_refused_and_left_alone(bed: TestBed) -> None:
    node = bed.nodes[0]
    path = namespace_path(node.namespace)
    tbf = ["root", "tbf", "rate", "1gbit", "burst", "64kb", "latency", "50ms"]
    run_in(path, "tc", "qdisc", "add", "dev", "eth0", *tbf)
    try:
        before = _shaping(node)
        with pytest.raises(InjectError, match=r"already has a tbf .*remove it first: tc qdisc del"):
            congest(node.namespace, "eth0", 30).start()
        assert _shaping(node) == before
    finally:
        run_in(path, "tc", "qdisc", "del", "dev", "eth0", "root")


def test_filters_that_would_go_first_are_refused(bed: TestBed) -> None:
    node = bed.nodes[0]
    path = namespace_path(node.namespace)
    bed.shape(node, 200)
    match = ["protocol", "ip", "u32", "match", "ip", "dst", "10.77.0.9/32", "flowid", "1:1"]
    run_in(path, "tc", "filter", "add", "dev", "eth0", "parent", "1:", "pref", "7", *match)
    try:
        with pytest.raises(InjectError, match=r"filters \(preference 7\).*remove them first"):
            congest(node.namespace, "eth0", 30).start()
    finally:
        run_in(path, "tc", "qdisc", "del", "dev", "eth0", "root")


def test_the_same_link_is_congested_once(bed: TestBed) -> None:
    node, sink, _ = bed.nodes
    with congest(node.namespace, "eth0", 50, dst=sink.address):
        told = f"{node.namespace}/eth0 to {sink.address} already has a link injection in force"
        with pytest.raises(InjectError, match=told):
            congest(node.namespace, "eth0", 20, dst=sink.address).start()


def test_a_namespace_that_is_gone_took_its_limit_along(nothing_left: Callable[[], None]) -> None:
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=1) as short:
        injection = congest(short.nodes[0].namespace, "eth0", 50).start()
    injection.stop()
    assert injection.ended == "it was asked to"
    nothing_left()


_HOLD = "import signal; print(flush=True); signal.pause()"


@contextmanager
def _holder(*before: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the network namespace that `before` makes or enters."""
    words = [*before, sys.executable, "-I", "-S", "-c", _HOLD]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n", "it cannot be made here"
        process.stdout.close()
        yield process
    finally:
        process.kill()
        process.wait()


def _shaping_of(process: subprocess.Popen[bytes]) -> str:
    path = f"/proc/{process.pid}/ns/net"
    return run_in(path, "tc", "qdisc", "show", "dev", "lo") + run_in(
        path, "tc", "class", "show", "dev", "lo"
    )


@pytest.mark.parametrize("crash", [False, True])
def test_a_limit_goes_though_the_process_its_namespace_was_named_by_has_ended(
    crash: bool, nothing_left: Callable[[], None]
) -> None:
    if reason := TestBed.available():
        pytest.skip(reason)
    with (
        _holder("unshare", "--net") as named,
        _holder("nsenter", f"--net=/proc/{named.pid}/ns/net") as other,
    ):
        before = _shaping_of(other)
        injection = congest(f"pid:{named.pid}", "lo", 50).start()
        assert "htb" in _shaping_of(other)
        named.kill()
        named.wait()
        if crash:
            assert injection.guard_pid is not None
            os.kill(injection.guard_pid, signal.SIGKILL)
        injection.stop()
        assert injection.ended == ("its guard was killed" if crash else "it was asked to")
        assert _shaping_of(other) == before
    nothing_left()


def test_where_nobody_can_tell_whether_the_namespace_is_gone_that_is_said() -> None:
    if os.geteuid() != 0:
        pytest.skip("root sees every namespace, and only root can become somebody who does not")
    code = (
        "import os, sys; sys.path[:] = sys.argv[1:]\n"
        "from failslow.errors import InjectError\n"
        "from failslow.inject.shaping import Shape, remove_shape\n"
        "shape = Shape('/proc/999999999/ns/net', 1, 'eth0', 'fa15', 'f000', 64000, own_root=True)\n"
        "remove_shape(shape)\n"  # as root: gone
        "os.setuid(12345)\n"
        "try:\n    remove_shape(shape)\n"
        "except InjectError as error:\n    print(error)\n"
    )
    words = [sys.executable, "-S", "-c", code, *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the namespace net:[1] with the limit on eth0 is not found, and ")


def test_the_machines_own_network_is_refused_unless_forced() -> None:
    with pytest.raises(InjectError, match=r"this machine's own network.*insist with --force"):
        congest(None, "lo", 50).start()


def test_a_namespace_counts_as_ones_own_network_and_a_shell_inside_it_does_too(
    bed: TestBed,
) -> None:
    path = namespace_path(bed.nodes[0].namespace)
    assert is_host_network(None)
    assert not is_host_network(path)
    code = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from failslow.inject.namespaces import is_host_network\n"
        "print(is_host_network(None))"
    )
    words = _python(bed.nodes[0], code, *sys.path)
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"


def test_names_of_all_kinds_find_their_interface(bed: TestBed) -> None:
    node, other, _ = bed.nodes
    by_name = find_place(node.namespace)
    assert (by_name.interface, by_name.address) == ("eth0", node.address)
    assert by_name.name == f"{node.namespace}/eth0"
    assert find_place(f"{node.namespace}/eth0") == by_name
    assert find_place(node.namespace, towards=other.address) == by_name
    assert find_place(f"{node.namespace}/lo").interface == "lo"
    assert find_place("lo") == find_place("127.0.0.1")
    assert find_place("203.0.113.7").interface is None
    sleeper = subprocess.Popen(_python(node, "import signal; print(flush=True); signal.pause()"),
                               stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        assert find_place(f"pid:{sleeper.pid}").address == node.address
        assert find_place(f"pid:{sleeper.pid}").name == f"pid:{sleeper.pid}/eth0"
        sleeper.stdout.close()
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", "no namespace, interface or address 'nowhere'; here are: .*lo"),
        ("pid:0", "pid:0: no such process"),
        ("{}/eth7", "no namespace, interface or address .*; here are: lo, eth0"),
        ("{}sw", "has several interfaces .* name one as"),
    ],
)
def test_names_of_nothing_are_refused_with_what_there_is(
    bed: TestBed, name: str, told: str
) -> None:
    prefix = bed.name if name.endswith("sw") else bed.nodes[0].namespace
    with pytest.raises(InjectError, match=told):
        find_place(name.format(prefix))


@pytest.mark.parametrize("rate", [0.001, 10**8, -5.0])
def test_rates_out_of_range_are_refused(bed: TestBed, rate: float) -> None:
    with pytest.raises(InjectError, match="must be from 8kbit to 10tbit"):
        congest(bed.nodes[0].namespace, "eth0", rate).start()


@pytest.mark.parametrize(
    ("text", "bits"),
    [("50mbit", 50e6), ("1.5Gbit", 1.5e9), ("100 kbit", 1e5), ("1mbps", 8e6), ("9000bit", 9e3)],
)
def test_rates_are_read_in_the_units_of_tc(text: str, bits: float) -> None:
    assert parse_rate_bits(text) == bits


@pytest.mark.parametrize("text", ["", "50", "mbit", "-1mbit", "1mb", "7bit", "1e3mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(InjectError, match="write it as 50mbit or 1gbit"):
        parse_rate_bits(text)
