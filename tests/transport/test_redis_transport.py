"""What only the Redis transport does, against a real server: passwords, loading, memory, bounds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.transport.servers import (
    ProcessServer,
    free_port,
    redis_server,
    skip_without_redis,
    until,
)

from failslow.errors import MissingDependencyError, TransportError
from failslow.runtime.transport import Limits, Transport, from_url

Serve = Callable[..., ProcessServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    skip_without_redis()
    made: list[ProcessServer] = []

    def serve(*options: str) -> ProcessServer:
        made.append(redis_server(tmp_path, *options))
        return made[-1]

    yield serve
    for server in made:
        server.close()


def client(server: ProcessServer, password: str | None = None) -> Any:
    redis = importlib.import_module("redis")
    return redis.Redis(port=server.port, password=password, socket_timeout=20)


def failed(transport: Transport, error: str) -> None:
    until(lambda: error in transport.health().last_error)


def polled(transport: Transport, count: int) -> list[bytes]:
    """The first messages of the topic, each once: a restarted server's come again."""
    found: dict[bytes, None] = {}

    def enough() -> bool:
        found.update(dict.fromkeys(transport.poll("steps", 0.1)))
        return len(found) >= count

    until(enough)
    return list(found)


def test_user_and_password_come_from_the_address(serve: Serve) -> None:
    server = serve("--requirepass", "open sesame", "--save", "")
    url = f"redis://:open%20sesame@127.0.0.1:{server.port}/0"
    transport = from_url(url)
    transport.publish("steps", b"0")
    assert transport.poll("steps", timeout_s=20) == [b"0"]
    transport.close()


def test_a_wrong_password_is_reported_without_showing_it(serve: Serve) -> None:
    server = serve("--requirepass", "open sesame", "--save", "")
    for user in (":wr0ng@", ""):
        transport = from_url(f"redis://{user}127.0.0.1:{server.port}")
        transport.publish("steps", b"0")
        failed(transport, "Authentication")
        assert "wr0ng" not in transport.health().last_error + repr(transport)
        transport.close(linger_s=0)


def test_a_topic_is_bounded_and_expires(serve: Serve) -> None:
    server = serve("--save", "")
    transport = from_url(server.url, Limits(capacity=500, backlog=5_000))
    for n in range(3_000):
        transport.publish("job/steps", b"%d" % n)
    until(lambda: transport.health().sent == 3_000)
    with client(server) as redis:
        assert redis.keys("*") == [b"failslow:job/steps"]
        assert 500 <= redis.xlen("failslow:job/steps") <= 700
        assert 0 < redis.ttl("failslow:job/steps") <= 86_400
    transport.close()


def test_a_server_loading_its_data_is_waited_for(serve: Serve) -> None:
    slow = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    server = serve("--save", "", "--appendonly", "no", *slow)
    with client(server) as redis:
        redis.mset({f"key-{n}": "x" * 100 for n in range(1_000)})
        redis.save()
    transport = from_url(server.url, Limits(interval_s=0.02))
    transport.publish("steps", b"0")
    until(lambda: transport.health().sent == 1)
    server.kill()
    transport.publish("steps", b"1")
    server.restart()  # answers LOADING for 1,000 × 2 ms
    failed(transport, "BusyLoading")
    until(lambda: transport.health().waiting == 0, 20)
    assert polled(transport, 2) == [b"0", b"1"]
    transport.close()


def test_what_a_persistent_server_acknowledged_survives_a_kill(serve: Serve) -> None:
    server = serve("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")
    sender = from_url(server.url, Limits(retain=0))
    for n in range(100):
        sender.publish("steps", b"%d" % n)
    until(lambda: sender.health().sent == 100)
    server.kill()
    server.restart()
    reader = from_url(server.url)
    assert polled(reader, 100) == [b"%d" % n for n in range(100)]
    sender.close()
    reader.close()


def test_a_server_out_of_memory_is_waited_out(serve: Serve) -> None:
    server = serve("--save", "")
    transport = from_url(server.url)
    with client(server) as redis:
        redis.config_set("maxmemory", 1)
        transport.publish("steps", b"0")
        failed(transport, "OutOfMemory")
        assert transport.health().waiting == 1
        redis.config_set("maxmemory", 0)
    assert transport.poll("steps", timeout_s=20) == [b"0"]
    transport.close()


def test_a_dead_port_is_reported() -> None:
    skip_without_redis()
    transport = from_url(f"redis://127.0.0.1:{free_port()}")
    transport.publish("steps", b"0")
    failed(transport, "ConnectionError")
    transport.close(linger_s=0)


@pytest.mark.parametrize("url", ["redis://host:port", "kafka://host:1", "memory://", "host:6379"])
def test_an_unreadable_address_is_refused(url: str) -> None:
    skip_without_redis()
    with pytest.raises(TransportError, match="write "):
        from_url(url)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependencyError, match=r"failslow\[redis\]"):
        from_url("redis://127.0.0.1:6379")
