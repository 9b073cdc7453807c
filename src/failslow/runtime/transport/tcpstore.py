"""The bus on a torch `TCPStore`: needs nothing but torch. `serve` runs the server.

In and out as for every transport. A topic is a ring of keys on the store: `TOPIC/head` counts the
messages ever, `TOPIC/n` for n below the capacity holds message n, n + capacity, …, prefixed by its
number. A writer takes numbers by adding to the head, sets the keys, and waits for the answer to
one more addition, because the store does not acknowledge a set. A reader compares numbers: lower
means not yet written, higher overwritten.

The store asks nobody who he is: whoever can connect (on one node any user of it) can read messages,
which are sealed and not secret, can have them lost, and can fill the memory of the server's
process, which the kernel then takes first. He cannot make any up. Numbers taken and never written
cost a reader one grace, however many, and none if there are more at once than a topic holds; keys
with secret names would not help, as the store lists them. Where users of the machine or network
cannot be trusted, use Redis with a password.

    server = serve("tcpstore://10.0.0.1:0")         # listens on 10.0.0.1 alone
    transport = tcpstore_transport(server.url)

What the store does badly, and what is done about it (torch 2.13): with a stopped server any call
hangs past its time-out (the pump leaves the thread behind); a client of a dead server never
recovers (a new client is made); its data is gone (`incarnation`, sent again); connecting to a dead
server retries loudly (a plain socket knocks first); connecting looks the server's name up in DNS
by its address, and fails if that takes longer than the time-out (a long one, for connecting only).
Two variables in a process's environment, set before torch is imported, make this pleasant:
`TORCH_CPP_LOG_LEVEL=FATAL` spares stderr the client's stack traces when a server dies, and
`RES_OPTIONS="timeout:1 attempts:1"` makes a resolver that does not answer cost 1 s and not 10.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import urlsplit

from failslow.errors import MissingDependencyError, TransportError
from failslow.runtime.transport.base import Fetched, Limits, LinkError
from failslow.runtime.transport.pump import PumpTransport

__all__ = ["TcpStoreServer", "serve", "tcpstore_transport"]

_META = "failslow/meta"
_ACK = "failslow/ack"
_NUMBER = struct.Struct(">Q")
_CONNECT_S = 60.0
_TIMEOUT_S = 5.0
_KNOCK_S = 3.0
_HOLE_GRACE_S = 4.0
"""A number taken but not written for this long is skipped: its writer died or will send again."""
_HOLES_AT_ONCE = 512


class _Store(Protocol):
    """What is used of `torch.distributed.TCPStore`; RuntimeError is the base of its errors."""

    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str | bytes) -> None: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def has_extended_api(self) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...


class TcpStoreServer:
    """A running server; lives in this process, in a thread of torch that holds no GIL."""

    def __init__(self, store: _Store, url: str) -> None:
        self._store: _Store | None = store
        self.url = url
        """Where clients connect, the real port in it."""

    def close(self) -> None:
        """Stop listening and drop all data; again: no effect."""
        self._store = None


def serve(url: str, *, capacity: int = 16_384) -> TcpStoreServer:
    """Serve on exactly the address of `url`; port 0 takes a free one.

    Raises TransportError when the address is a wildcard, not of this machine or in use, and
    MissingDependencyError without torch.
    """
    host, port = _address(url)
    _torch_distributed()  # slow to import: who can connect should be served at once
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if address[4][0] in ("0.0.0.0", "::"):
            raise TransportError(
                f"{url}: would listen on every interface; name the address of one, "
                "127.0.0.1 on a single node"
            )
        listener = socket.socket(address[0], socket.SOCK_STREAM)
        try:
            # a restarted server must get its old port though old connections linger
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address[4])
            listener.listen(1024)
            bound_host, bound_port = listener.getsockname()[:2]
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TransportError(
            f"{url}: cannot listen there: {error.strerror or error}; choose an address of this "
            "machine and a free port"
        ) from None
    store = _tcp_store(
        host_name=str(bound_host),
        port=int(bound_port),
        is_master=True,
        master_listen_fd=listener.detach(),  # the store owns and closes it
    )
    store.set(_META, json.dumps({"incarnation": secrets.token_hex(8), "capacity": capacity}))
    shown = f"[{bound_host}]" if ":" in str(bound_host) else bound_host
    return TcpStoreServer(store, f"tcpstore://{shown}:{bound_port}")


def tcpstore_transport(url: str, limits: Limits | None = None) -> PumpTransport:
    """A transport to the server at `url`; connects at the first use.

    Raises TransportError for a bad address and MissingDependencyError without torch.
    """
    host, port = _address(url)
    if port == 0:
        raise TransportError(f"{url}: a port is missing; write tcpstore://HOST:PORT")
    _torch_distributed()
    return PumpTransport(lambda: _TcpStoreLink(host, port), name=url, limits=limits)


@dataclass(frozen=True, slots=True)
class _Hole:
    """Numbers taken and not written."""

    number: int
    """The first."""
    last: int
    """The head when it was first met: later ones were taken later."""
    since_s: float


class _TcpStoreLink:
    def __init__(self, host: str, port: int) -> None:
        try:
            socket.create_connection((host, port), timeout=_KNOCK_S).close()
        except OSError as error:
            raise LinkError(f"{host}:{port}: {error.strerror or error}") from None
        try:
            self._store = _tcp_store(host_name=host, port=port, is_master=False)
            meta = json.loads(self._store.get(_META))
            self.incarnation, self._capacity = str(meta["incarnation"]), int(meta["capacity"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise LinkError(f"{host}:{port}: not a failslow server: {_short(error)}") from None
        self._heads: dict[str, int] = {}
        self._holes: dict[str, _Hole] = {}

    def send(self, batch: Sequence[tuple[str, bytes]]) -> None:
        topics: dict[str, list[bytes]] = {}
        for topic, message in batch:
            topics.setdefault(topic, []).append(message)
        began_s = time.monotonic()
        keys, values = [], []
        try:
            for topic, messages in topics.items():
                # more than a ring of them at once would overwrite one another
                kept = messages[-self._capacity :]
                end = self._store.add(f"{topic}/head", len(kept))
                for number, message in enumerate(kept, end - len(kept) + 1):
                    keys.append(self._key(topic, number))
                    values.append(_NUMBER.pack(number) + message)
            self._set(keys, values)
            self._store.add(_ACK, 0)  # answered after the sets before it were done
        except RuntimeError as error:
            raise LinkError(_short(error)) from None
        if time.monotonic() - began_s > _HOLE_GRACE_S / 2:
            raise LinkError("too slow: readers may have skipped the messages, sending again")

    def fetch(self, topic: str, cursor: str, limit: int) -> Fetched:
        try:
            return self._fetch(topic, int(cursor or 0), limit, late=not cursor)
        except RuntimeError as error:
            raise LinkError(_short(error)) from None

    def close(self) -> None:
        del self._store

    def _fetch(self, topic: str, cursor: int, limit: int, *, late: bool) -> Fetched:
        head = self._store.add(f"{topic}/head", 0)
        start = max(cursor, head - self._capacity)
        dropped = start - cursor
        numbers = range(start + 1, min(head, start + limit) + 1)
        keys = [self._key(topic, number) for number in numbers]
        if keys and not self._store.check(keys):
            # a first-time hole: a get of it would wait for the time-out
            keys = keys[: next(i for i, key in enumerate(keys) if not self._store.check([key]))]
        values = self._get(keys) if keys else []
        messages, end = [], start
        for number, value in zip(numbers, values, strict=False):
            found = _NUMBER.unpack_from(value)[0]
            if found < number:
                break
            end = number
            if found == number:
                messages.append(value[_NUMBER.size :])
            else:
                dropped += 1
        if end == start and end < head:
            end = self._skip(topic, end, head)
        self._heads[topic] = head
        return Fetched(messages, str(end), 0 if late else dropped)

    def _skip(self, topic: str, end: int, head: int) -> int:
        """The new cursor where the number after `end` is not written: `end`, until the grace is
        over; then all such that were taken before it began are passed over."""
        now_s = time.monotonic()
        hole = self._holes.get(topic)
        if hole is None or hole.number != end + 1:
            hole = _Hole(end + 1, head, now_s)
            jumped = head - self._heads.get(topic, head) > self._capacity
            if jumped:  # no writer takes so many
                hole = _Hole(end + 1, head, now_s - 2 * _HOLE_GRACE_S)
            self._holes[topic] = hole
        if now_s - hole.since_s <= _HOLE_GRACE_S:
            return end
        last = min(hole.last, end + _HOLES_AT_ONCE)
        while end < last and not self._is_written(topic, end + 1):
            end += 1
        if end < hole.last:
            self._holes[topic] = _Hole(end + 1, hole.last, hole.since_s)
        else:
            del self._holes[topic]  # what comes next was taken later
        return end

    def _is_written(self, topic: str, number: int) -> bool:
        key = self._key(topic, number)
        if not self._store.check([key]):
            return False
        found: int = _NUMBER.unpack_from(self._store.get(key))[0]
        return found >= number

    def _key(self, topic: str, number: int) -> str:
        return f"{topic}/{number % self._capacity}"

    def _set(self, keys: list[str], values: list[bytes]) -> None:
        if len(keys) > 1 and self._store.has_extended_api():
            self._store.multi_set(keys, values)
        else:
            for key, value in zip(keys, values, strict=True):
                self._store.set(key, value)

    def _get(self, keys: list[str]) -> list[bytes]:
        if len(keys) > 1 and self._store.has_extended_api():
            return self._store.multi_get(keys)
        return [self._store.get(key) for key in keys]


def _tcp_store(**arguments: Any) -> _Store:
    store: _Store = _torch_distributed().TCPStore(
        wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S), **arguments
    )
    store.set_timeout(timedelta(seconds=_TIMEOUT_S))
    return store


def _torch_distributed() -> Any:
    try:
        return import_module("torch.distributed")
    except ImportError:
        raise MissingDependencyError(
            "the tcpstore transport needs torch; pip install 'failslow[torch]', or name another "
            "one with FAILSLOW_TRANSPORT=redis://HOST:PORT"
        ) from None


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransportError(f"{url}: {error}; write tcpstore://HOST:PORT") from None
    if parts.scheme != "tcpstore" or not host or port is None:
        raise TransportError(f"{url}: no address; write tcpstore://HOST:PORT")
    return host, port


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
