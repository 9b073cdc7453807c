"""Flooding a real path: bytes really arrive, no more than asked for, and then no more at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from tests.testbed import Node, TestBed, until

from failslow.errors import InjectError
from failslow.inject import Flood, Injection, congest, flood
from failslow.inject.namespaces import namespace_path, run_in


def _received_bytes(node: Node) -> int:
    listed = json.loads(
        run_in(namespace_path(node.namespace), "ip", "-j", "-s", "link", "show", "eth0")
    )
    return int(next(x for x in listed if x)["stats64"]["rx"]["bytes"])


def _mbit_in(node: Node, *, size_bytes: int) -> float:
    """Rate at which the node receives, over `size_bytes` of it."""
    begin_bytes, begin_s = _received_bytes(node), time.monotonic()
    until(lambda: _received_bytes(node) - begin_bytes >= size_bytes)
    return 8e-6 * (_received_bytes(node) - begin_bytes) / (time.monotonic() - begin_s)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_flood_arrives_at_its_rate_and_ends(
    bed: TestBed, protocol: str, nothing_left: Callable[[], None]
) -> None:
    source, sink, _ = bed.nodes

    with flood(source.namespace, sink.namespace, rate_mbit=80, protocol=protocol):
        _mbit_in(sink, size_bytes=1_000_000)  # what a full buffer let through at once
        # a busy machine lets it fall behind, and it does not catch up
        assert 30 < _mbit_in(sink, size_bytes=4_000_000) < 104

    nothing_left()
    counted = _received_bytes(sink)
    until(lambda: _received_bytes(sink) - counted < 10_000)


def test_a_flood_without_a_rate_takes_all_that_the_link_has(bed: TestBed) -> None:
    source, sink, _ = bed.nodes

    with (
        congest(source.namespace, "eth0", 60),
        flood(source.namespace, sink.namespace, streams=2),
    ):
        _mbit_in(sink, size_bytes=500_000)
        assert 40 < _mbit_in(sink, size_bytes=3_000_000) < 78


def test_the_same_path_is_flooded_once(bed: TestBed) -> None:
    source, sink, _ = bed.nodes
    with (
        flood(source.namespace, sink.namespace, rate_mbit=1),
        pytest.raises(InjectError, match="already has a flood injection in force"),
    ):
        flood(source.namespace, sink.namespace, rate_mbit=1).start()


def test_a_path_without_a_way_is_told_and_nothing_stays(
    bed: TestBed, nothing_left: Callable[[], None]
) -> None:
    source, sink, _ = bed.nodes
    lost = flood(source.namespace, sink.namespace, address="10.99.0.1")
    with pytest.raises(InjectError, match=r"the sink process .*annot assign requested address"):
        lost.start()
    nothing_left()


def test_udp_needs_no_receiver(bed: TestBed) -> None:
    source, sink, _ = bed.nodes
    path = namespace_path(source.namespace)
    blind = Flood(path, None, sink.address, has_sink=False, rate_bits=80_000_000, protocol="udp")
    with Injection(blind):
        assert _mbit_in(sink, size_bytes=2_000_000) > 20


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"protocol": "sctp"}, "none of tcp, udp"),
        ({"streams": 0}, r"streams \(0\) must be from 1 to 64"),
        ({"rate_mbit": 0.001}, "must be from 8kbit"),
        ({"address": "nowhere"}, "is no address"),
    ],
)
def test_values_out_of_range_are_refused(
    bed: TestBed, changes: dict[str, object], told: str
) -> None:
    source, sink, _ = bed.nodes
    with pytest.raises(InjectError, match=told):
        flood(source.namespace, sink.namespace, **changes).start()  # type: ignore[arg-type]  # wrong on purpose


def test_tcp_to_another_machine_and_the_own_network_are_refused() -> None:
    away = Flood(None, None, "203.0.113.7", has_sink=False)
    with pytest.raises(InjectError, match="use --protocol udp, or name a namespace"):
        away.check()
    with pytest.raises(InjectError, match=r"this machine's own network.*--force"):
        Flood(None, None, "127.0.0.1").check()
    with pytest.raises(InjectError, match="no network namespace 'nix'; `ip netns` lists them"):
        flood("nix", "nix", address="127.0.0.1")
    with pytest.raises(InjectError, match="where should the flood go"):
        flood(None, None)
