"""The pump over a link that hangs, fails and forgets on command."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from tests.transport.servers import until

from failslow.errors import ConfigError
from failslow.runtime.transport.base import Fetched, Limits, LinkError
from failslow.runtime.transport.pump import PumpTransport


class Bus:
    """A server whose links block while `open` is clear and raise `error` when there is one."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.incarnation = "1"
        self.messages: list[bytes] = []
        self.connections = self.closed = 0

    def connect(self) -> BusLink:
        self.connections += 1
        self.check()
        return BusLink(self)

    def check(self) -> None:
        self.open.wait()
        if self.error is not None:
            raise self.error


class BusLink:
    def __init__(self, bus: Bus) -> None:
        self._bus, self.incarnation = bus, bus.incarnation

    def send(self, batch: Sequence[tuple[str, bytes]]) -> None:
        self._bus.check()
        self._bus.messages += [message for _, message in batch]

    def fetch(self, topic: str, cursor: str, limit: int) -> Fetched:
        assert topic == "steps"
        self._bus.check()
        start = int(cursor or 0)
        found = self._bus.messages[start : start + limit]
        return Fetched(found, str(start + len(found)), 0)

    def close(self) -> None:
        self._bus.closed += 1


@pytest.fixture
def bus() -> Iterator[Bus]:
    bus = Bus()
    yield bus
    bus.open.set()


def pump(bus: Bus, **limits: float) -> PumpTransport:
    settings = Limits(interval_s=0.01, **limits)  # type: ignore[arg-type]  # ints among the floats
    return PumpTransport(bus.connect, name="bus", limits=settings)


def test_nothing_is_opened_before_the_first_use(bus: Bus) -> None:
    threads = threading.active_count()
    transport = pump(bus)
    assert (bus.connections, threading.active_count()) == (0, threads)
    assert not transport.health().connected
    assert transport.health().outage_s == 0.0
    transport.close()
    assert repr(transport) == "PumpTransport('bus')"


def test_a_hanging_operation_is_left_behind_and_its_result_ignored(bus: Bus) -> None:
    transport = pump(bus, stall_s=0.2)
    transport.publish("steps", b"0")
    assert transport.poll("steps", timeout_s=5) == [b"0"]
    bus.open.clear()
    transport.publish("steps", b"1")
    until(lambda: transport.poll("steps", 0.05) or transport.health().abandoned == 1)
    assert "no answer for" in transport.health().last_error
    assert transport.health().outage_s > 0.1
    bus.open.set()
    until(lambda: b"1" in transport.poll("steps", 0.05))
    until(lambda: transport.health().connected)
    # the thread left behind sent it as well: that is what numbering is for
    assert set(bus.messages) == {b"0", b"1"}
    transport.close()
    until(lambda: bus.closed == bus.connections)


def test_connecting_has_a_patience_of_its_own(bus: Bus) -> None:
    bus.open.clear()
    transport = pump(bus, stall_s=0.05, connect_s=60)
    assert transport.poll("steps", timeout_s=0.5) == []
    assert transport.health().abandoned == 0
    bus.messages.append(b"0")
    bus.open.set()
    assert transport.poll("steps", timeout_s=20) == [b"0"]
    transport.close()


def test_few_threads_are_left_behind_however_long_it_hangs(bus: Bus) -> None:
    bus.open.clear()
    transport = pump(bus, stall_s=0.001, connect_s=0.001)
    until(lambda: transport.poll("steps", 0.02) or transport.health().abandoned == 8)
    for _ in range(50):
        transport.poll("steps", timeout_s=0.01)
    assert transport.health().abandoned == 8
    assert bus.connections == 9
    bus.messages.append(b"0")
    bus.open.set()
    assert transport.poll("steps", timeout_s=5) == [b"0"]
    transport.close()
    until(lambda: not any(thread.name == "failslow bus" for thread in threading.enumerate()))


@pytest.mark.parametrize("error", [LinkError("refused"), KeyError("a bug in a link")])
def test_an_outage_is_waited_out_with_growing_pauses(bus: Bus, error: Exception) -> None:
    bus.error = error
    transport = pump(bus)
    transport.publish("steps", b"0")
    until(lambda: transport.health().outage_s > 1.0)
    assert 3 <= bus.connections <= 10  # 0.05 s, doubling, each shortened at random by up to half
    health = transport.health()
    assert not health.connected
    assert str(error) in health.last_error
    bus.error = None
    assert transport.poll("steps", timeout_s=10) == [b"0"]
    assert transport.health().outage_s == 0.0
    transport.close()


def test_a_lost_server_is_sent_the_last_messages_again(bus: Bus) -> None:
    transport = pump(bus, retain=3)
    for n in range(5):
        transport.publish("steps", b"%d" % n)
    until(lambda: len(bus.messages) == 5)
    until(lambda: transport.health().waiting == 0)
    bus.error, bus.incarnation = LinkError("died"), "2"
    bus.messages.clear()
    transport.publish("steps", b"5")
    until(lambda: not transport.health().connected)
    bus.error = None
    until(lambda: transport.health().waiting == 0 and transport.health().connected)
    assert bus.messages == [b"2", b"3", b"4", b"5"]
    assert transport.health().incarnations == 2
    transport.close()


def test_the_same_server_is_sent_nothing_twice(bus: Bus) -> None:
    transport = pump(bus)
    transport.publish("steps", b"0")
    until(lambda: transport.health().sent == 1)
    bus.error = LinkError("connection reset")
    transport.publish("steps", b"1")
    until(lambda: not transport.health().connected)
    bus.error = None
    until(lambda: transport.health().sent == 2)
    assert bus.messages == [b"0", b"1"]
    assert (transport.health().reconnects, transport.health().incarnations) == (1, 1)
    transport.close()


def test_messages_sent_long_before_the_server_died_are_not_sent_again(bus: Bus) -> None:
    transport = pump(bus, retain_s=0)
    transport.publish("steps", b"0")
    until(lambda: transport.health().sent == 1)
    transport.publish("steps", b"1")
    until(lambda: transport.health().sent == 2)
    bus.error, bus.incarnation = LinkError("died"), "2"
    bus.messages.clear()
    transport.publish("steps", b"2")
    until(lambda: not transport.health().connected)
    bus.error = None
    until(lambda: transport.health().waiting == 0)
    assert b"0" not in bus.messages
    assert bus.messages[-1] == b"2"
    transport.close()


def test_an_idle_transport_asks_seldom(bus: Bus) -> None:
    asked: list[str] = []
    fetch = BusLink.fetch

    class CountingLink(BusLink):
        def fetch(self, topic: str, cursor: str, limit: int) -> Fetched:
            asked.append(topic)
            return fetch(self, topic, cursor, limit)

    transport = PumpTransport(lambda: CountingLink(bus), name="bus", limits=Limits(interval_s=0.25))
    assert transport.poll("steps", timeout_s=1.0) == []
    # 10 ms, doubling to 250 ms: 10 + 20 + … + 160 + 250 × 3
    assert len(asked) <= 10
    transport.close()


@pytest.mark.parametrize(
    "limits", [{"capacity": 0}, {"backlog": 0}, {"retain": -1}, {"interval_s": 0}, {"stall_s": -1}]
)
def test_limits_out_of_range_name_value_and_bound(limits: dict[str, int]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}: it must be"):
        Limits(**limits)
