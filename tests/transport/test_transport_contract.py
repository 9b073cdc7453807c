"""What every transport must do, under the signed endpoint that agents and controllers hold."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from tests.transport.servers import (
    CAPACITY,
    TOKEN,
    Connect,
    Server,
    listening_addresses,
    until,
)

from failslow.errors import MessageTooLargeError, TransportError
from failslow.runtime.security import Message, Sealer
from failslow.runtime.transport import MAX_MESSAGE_BYTES, Endpoint, Limits, from_url


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [str(n).encode() for n in range(start, start + count)]


def collect(
    endpoint: Endpoint, topic: str, enough: Callable[[list[Message]], object], limit_s: float = 20.0
) -> list[Message]:
    """Poll `topic` until `enough` holds of all that came."""
    messages: list[Message] = []
    deadline_s = time.monotonic() + limit_s
    while not enough(messages):
        assert time.monotonic() < deadline_s, f"{len(messages)} came; {endpoint.health()}"
        messages += endpoint.poll(topic, timeout_s=0.5)
    return messages


def payloads(endpoint: Endpoint, topic: str, count: int) -> list[bytes]:
    found = collect(endpoint, topic, lambda messages: len(messages) >= count)
    return [message.payload for message in found]


@pytest.fixture
def stopped(server: Server) -> Iterator[Callable[[], None]]:
    yield server.stop
    server.resume()


def test_messages_of_each_sender_come_in_order_and_once(connect: Connect) -> None:
    reader, senders = connect(), [connect(f"node-{n}") for n in range(3)]
    for payload in numbered(200):
        for sender in senders:
            sender.publish("steps", payload)
    messages = collect(reader, "steps", lambda found: len(found) >= 600)
    assert len(messages) == 600
    for n in range(3):
        own = [m for m in messages if m.sender == f"node-{n}"]
        assert [m.payload for m in own] == numbered(200)
        assert [m.sequence for m in own] == list(range(1, 201))
    assert reader.poll("steps", timeout_s=0.1) == []
    assert reader.health().missed == 0


def test_messages_travel_both_ways(connect: Connect) -> None:
    agent, controller = connect("agent"), connect("controller")
    agent.publish("steps", b"up")
    assert payloads(controller, "steps", 1) == [b"up"]
    controller.publish("instructions", b"down")
    assert payloads(agent, "instructions", 1) == [b"down"]


def test_every_reader_gets_every_message(connect: Connect) -> None:
    readers = [connect(f"reader-{n}") for n in range(3)]
    connect("sender").publish("instructions", b"pause")
    assert [payloads(reader, "instructions", 1) for reader in readers] == [[b"pause"]] * 3


def test_topics_are_independent(connect: Connect) -> None:
    reader, sender = connect(), connect("sender")
    sender.publish("steps", b"a step")
    sender.publish("health", b"a pulse")
    assert payloads(reader, "health", 1) == [b"a pulse"]
    assert payloads(reader, "steps", 1) == [b"a step"]
    assert reader.health().missed == 0


def test_jobs_on_one_server_do_not_meet(connect: Connect) -> None:
    mine, other = connect(job="mine"), connect(job="other")
    connect("sender", job="mine").publish("steps", b"mine")
    assert payloads(mine, "steps", 1) == [b"mine"]
    assert other.poll("steps", timeout_s=0.1) == []
    assert other.health().refused == 0


def test_a_late_subscriber_reads_what_is_kept(connect: Connect) -> None:
    early, sender = connect("early"), connect("sender")
    for payload in numbered(50):
        sender.publish("steps", payload)
    assert payloads(early, "steps", 50) == numbered(50)
    assert payloads(connect("late"), "steps", 50) == numbered(50)


def test_any_bytes_pass(connect: Connect) -> None:
    payload = bytes(range(256)) + b"\x00\n\r" + "grün".encode()
    connect("sender").publish("steps", payload)
    connect("empty").publish("steps", b"")
    assert sorted(payloads(connect(), "steps", 2)) == [b"", payload]


def test_poll_waits_for_its_time_out_and_wakes_on_a_message(connect: Connect) -> None:
    reader, sender = connect(), connect("sender")
    began_s = time.monotonic()
    assert reader.poll("steps", timeout_s=0.3) == []
    assert 0.3 <= time.monotonic() - began_s < 2.0
    thread = threading.Timer(0.1, lambda: sender.publish("steps", b"wake"))
    thread.start()
    began_s = time.monotonic()
    assert [m.payload for m in reader.poll("steps", timeout_s=20)] == [b"wake"]
    assert time.monotonic() - began_s < 5.0
    thread.join()


def test_after_a_kill_and_a_restart_messages_flow_and_nothing_is_lost(
    connect: Connect, server: Server
) -> None:
    reader, sender = connect(), connect("sender")
    for payload in numbered(20):
        sender.publish("steps", payload)
    assert payloads(reader, "steps", 20) == numbered(20)
    for payload in numbered(20, 20):  # perhaps on the server when it dies, not read yet
        sender.publish("steps", payload)
    server.kill()
    for payload in numbered(20, 40):  # while it is dead
        sender.publish("steps", payload)
    began_s = time.monotonic()
    before = reader.poll("steps", timeout_s=0.5)
    assert time.monotonic() - began_s < 5.0
    until(lambda: sender.poll("probe", 0.01) or not sender.health().transport.connected)
    until(lambda: sender.health().transport.outage_s > 0)
    server.restart()
    after = collect(reader, "steps", lambda found: found and found[-1].payload == b"59")
    assert [m.payload for m in before + after] == numbered(40, 20)
    sender.publish("steps", b"60")
    assert payloads(reader, "steps", 1) == [b"60"]
    health = reader.health()
    assert (health.missed, health.transport.incarnations) == (0, 2)
    assert health.transport.reconnects >= 1
    assert health.transport.connected
    assert health.transport.outage_s == 0.0


def test_a_stopped_server_holds_nobody_and_loses_nothing(
    connect: Connect, stopped: Callable[[], None], server: Server
) -> None:
    reader, sender = connect(), connect("sender")
    sender.publish("steps", b"0")
    assert payloads(reader, "steps", 1) == [b"0"]
    stopped()
    began_s = time.monotonic()
    for payload in numbered(100, 1):
        sender.publish("steps", payload)
    assert time.monotonic() - began_s < 1.0
    began_s = time.monotonic()
    assert reader.poll("steps", timeout_s=0.5) == []
    assert reader.poll("other", timeout_s=0.5) == []
    assert time.monotonic() - began_s < 2.0
    until(lambda: not sender.health().transport.connected)
    assert sender.health().transport.waiting > 0
    server.resume()
    assert payloads(reader, "steps", 100) == numbered(100, 1)
    assert reader.health().missed == 0


def test_close_returns_in_time_while_the_server_is_stopped(
    connect: Connect, stopped: Callable[[], None]
) -> None:
    sender = connect("sender")
    sender.publish("steps", b"0")
    until(lambda: sender.health().transport.sent == 1)
    stopped()
    sender.publish("steps", b"1")
    began_s = time.monotonic()
    sender.close(linger_s=0.3)
    assert time.monotonic() - began_s < 2.0


def test_a_slow_reader_loses_the_oldest_and_is_told_how_many(connect: Connect) -> None:
    limits = Limits(backlog=10_000, interval_s=0.02, capacity=CAPACITY)
    reader = connect(limits=Limits(backlog=100, interval_s=0.02, capacity=CAPACITY))
    sender = connect("sender", limits=limits)
    sender.publish("steps", b"0")
    assert payloads(reader, "steps", 1) == [b"0"]
    for payload in numbered(5_000, 1):
        sender.publish("steps", payload)
    until(lambda: sender.health().transport.waiting == 0)
    found = collect(
        reader, "steps", lambda messages: messages[-1:] and messages[-1].payload == b"5000"
    )
    numbers = [int(message.payload) for message in found]
    assert numbers == sorted(set(numbers))
    assert len(numbers) <= CAPACITY + 400  # a Redis stream is trimmed by the hundred
    assert reader.health().missed == 5_000 - len(numbers) > 0
    assert sender.health().transport.dropped_unsent == 0


def test_a_full_outbox_drops_the_oldest_and_counts_them(
    connect: Connect, stopped: Callable[[], None], server: Server
) -> None:
    reader = connect()
    sender = connect("sender", limits=Limits(backlog=50, interval_s=0.02))
    sender.publish("steps", b"0")
    assert payloads(reader, "steps", 1) == [b"0"]
    until(lambda: sender.health().transport.sent == 1)
    stopped()
    for payload in numbered(200, 1):
        sender.publish("steps", payload)
    health = sender.health().transport
    assert (health.waiting, health.dropped_unsent) == (50, 150)
    server.resume()
    found = collect(
        reader, "steps", lambda messages: messages[-1:] and messages[-1].payload == b"200"
    )
    # the batch in flight when the server stopped may still have arrived
    assert [m.payload for m in found][-50:] == numbered(50, 151)
    assert reader.health().missed == 200 - len(found)


def test_a_message_of_a_megabyte_is_refused_with_value_limit_and_remedy(connect: Connect) -> None:
    reader, sender = connect(), connect("sender")
    with pytest.raises(MessageTooLargeError, match=r"1,000,000 bytes.*'steps'.*limit of.*split it"):
        sender.publish("steps", bytes(1_000_000))
    sender.publish("steps", bytes(200_000))
    assert payloads(reader, "steps", 1) == [bytes(200_000)]
    assert reader.health().missed == 0


def test_a_raw_message_over_the_limit_is_refused(server: Server) -> None:
    transport = from_url(server.url)
    with pytest.raises(MessageTooLargeError):
        transport.publish("steps", bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(TransportError, match="topic"):
        transport.publish("no spaces", b"")
    transport.close()


def test_a_thousand_senders_reach_one_reader(connect: Connect) -> None:
    reader = connect()
    assert reader.poll("steps", timeout_s=0.1) == []
    senders = [connect(f"node-{n}") for n in range(1_000)]
    for round_ in (b"first", b"second"):
        for sender in senders:
            sender.publish("steps", round_)
    found = collect(reader, "steps", lambda messages: len(messages) >= 2_000, limit_s=60)
    by_sender: dict[str, list[bytes]] = {}
    for message in found:
        by_sender.setdefault(message.sender, []).append(message.payload)
    assert len(by_sender) == 1_000
    assert all(own == [b"first", b"second"] for own in by_sender.values())
    assert reader.health().missed == 0


def test_a_wrong_token_is_refused_and_counted(connect: Connect) -> None:
    reader = connect()
    connect("intruder", token="another token of thirty-two chars").publish("steps", b"forged")
    connect("sender").publish("steps", b"real")
    assert payloads(reader, "steps", 1) == [b"real"]
    until(lambda: reader.poll("steps", 0.01) or reader.health().refused == 1)


def test_a_replayed_a_moved_and_an_old_message_are_refused(
    connect: Connect, server: Server, request: pytest.FixtureRequest
) -> None:
    job = "replays-" + request.node.callspec.id
    reader, attacker = connect(job=job), from_url(server.url)
    sealer = Sealer(TOKEN, job=job, sender="node-1", session=1)
    now_s = time.time()
    sealed = sealer.seal("steps", b"real", now_s=now_s)
    old = Sealer(TOKEN, job=job, sender="node-2", session=1).seal(
        "steps", b"old", now_s=now_s - 900
    )
    for _ in range(3):
        attacker.publish(f"{job}/steps", sealed)
    attacker.publish(f"{job}/steps", old)
    attacker.publish(f"{job}/steps", b"noise")
    attacker.publish(f"{job}/instructions", sealed)
    attacker.publish(f"{job}/steps", sealer.seal("steps", b"next", now_s=now_s))
    assert payloads(reader, "steps", 2) == [b"real", b"next"]
    assert reader.health().duplicates == 2
    assert (reader.health().refused, reader.health().stale) == (1, 1)
    assert reader.poll("instructions", timeout_s=0.2) == []
    until(lambda: reader.poll("instructions", 0.01) or reader.health().refused == 2)
    attacker.close()


def test_a_restarted_sender_is_heard_at_once(connect: Connect) -> None:
    reader = connect()
    for life in numbered(3):
        sender = connect("node-1")
        sender.publish("steps", life)
        sender.close()
        assert payloads(reader, "steps", 1) == [life]
    assert reader.health().duplicates == 0


def test_close_sends_what_waits_and_is_idempotent(connect: Connect) -> None:
    sender = connect("sender")
    sender.publish("steps", b"last words")
    sender.close(linger_s=10)
    sender.close()
    assert payloads(connect(), "steps", 1) == [b"last words"]
    with pytest.raises(TransportError, match="closed"):
        sender.publish("steps", b"too late")
    with pytest.raises(TransportError, match="closed"):
        sender.poll("steps", timeout_s=0)


def test_close_wakes_a_waiting_poll(connect: Connect) -> None:
    reader = connect()
    results: list[list[Message] | str] = []

    def wait() -> None:
        try:
            results.append(reader.poll("steps", timeout_s=60))
        except TransportError as error:
            results.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    reader.close()
    thread.join(5)
    assert len(results) == 1


def test_closing_leaves_no_thread_and_no_socket(connect: Connect) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(psutil.Process().net_connections("inet"))

    before = held()
    endpoints = [connect(f"node-{n}") for n in range(5)]
    for endpoint in endpoints:
        endpoint.publish("steps", b"")
        endpoint.poll("steps", timeout_s=0.05)
    for endpoint in endpoints:
        endpoint.close()
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_two_threads_may_share_an_endpoint(connect: Connect) -> None:
    reader, sender = connect(), connect("sender")

    def publish() -> None:
        for payload in numbered(300):
            sender.publish("steps", payload)

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = collect(reader, "steps", lambda messages: len(messages) >= 900)
    assert [message.sequence for message in found] == list(range(1, 901))


def test_nothing_listens_beyond_loopback(connect: Connect, server: Server) -> None:
    before = listening_addresses(os.getpid())
    sender = connect("sender")
    sender.publish("steps", b"0")
    assert payloads(connect(), "steps", 1) == [b"0"]
    assert listening_addresses(os.getpid()) == before
    assert server.listening() <= {"127.0.0.1"}


def test_a_process_ends_cleanly_while_its_transport_hangs(
    server: Server, stopped: Callable[[], None]
) -> None:
    if not server.needs_threads:
        pytest.skip("the memory transport has no other process")
    code = (
        "import sys\n"
        "from failslow.runtime.transport import from_url\n"
        "transport = from_url(sys.argv[1])\n"
        "transport.publish('steps', b'0')\n"
        "transport.poll('steps', 1.0)\n"
        "transport.close(0.1)\n"
        "print('done')\n"
    )
    stopped()
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, server.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
