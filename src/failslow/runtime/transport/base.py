"""The seam between the processes of a job and whatever carries their messages.

In: a topic and bytes. Out: the bytes other processes published on it, each sender's in order.
Every topic is a bounded log on a server: who subscribes late reads what is still kept, who reads
slowly loses the oldest. Nothing here blocks past its time-out or raises because a server is
stopped, dead or restarted: messages wait in a bounded outbox, and `health` says so.

    transport = from_url("tcpstore://10.0.0.1:29400")
    transport.publish("steps", b"...")              # returns at once
    transport.poll("instructions", timeout_s=1.0)   # -> [b"...", ...], [] after a second

A backend is a `Link` (see `pump.py` for what drives it): one connection used by one thread, which
may block and may fail with `LinkError`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from failslow.errors import ConfigError, MessageTooLargeError, TransportError

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Fetched",
    "Limits",
    "Link",
    "LinkError",
    "Transport",
    "TransportHealth",
    "check_size",
    "check_topic",
]

MAX_MESSAGE_BYTES = 262_144
"""The largest message. A topic of `Limits.capacity` messages must fit in the server's memory."""
_TOPIC = re.compile(r"[A-Za-z0-9._%/-]{1,255}")


class LinkError(TransportError):
    """A connection failed; the pump reconnects. Callers of a `Transport` never see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a transport may hold and how long it waits. Raises ConfigError out of range."""

    capacity: int = 16_384
    """Messages a topic keeps on the server; for a TCPStore the server's own setting rules."""
    backlog: int = 8_192
    """Messages waiting to be sent, and waiting to be polled per topic, in this process."""
    retain: int = 256
    """Sent messages kept for sending again to a server that lost its data..."""
    retain_s: float = 10.0
    """...unless sent longer ago than this."""
    interval_s: float = 0.25
    """An idle topic is looked at this often; a busy one up to a hundred times a second."""
    stall_s: float = 10.0
    """An operation that hangs this long is abandoned, its thread with it..."""
    connect_s: float = 60.0
    """...and so is connecting after this long: a resolver that does not answer delays it."""

    def __post_init__(self) -> None:
        for name, low in (("capacity", 1), ("backlog", 1), ("retain", 0), ("retain_s", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least {low}")
        for name in ("interval_s", "stall_s", "connect_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportHealth:
    """Where a transport stands; counts are since it was made."""

    connected: bool
    outage_s: float
    """Seconds since the server last answered while something was asked of it; 0 when it does."""
    sent: int
    """Messages the server acknowledged, those sent again included."""
    received: int
    waiting: int
    """Messages in the outbox."""
    dropped_unsent: int
    """Messages the full outbox gave up, oldest first."""
    dropped_unread: int
    """Messages a topic gave up before this process read them, where the server can tell."""
    incarnations: int
    """Servers seen; when it grows the server lost its data: publish your state afresh."""
    reconnects: int
    abandoned: int
    """Threads left behind in an operation that hung."""
    last_error: str


class Transport(Protocol):
    """Publishes to and polls topics; safe to use from several threads."""

    def publish(self, topic: str, message: bytes) -> None:
        """Queue `message`, never waiting for a server.

        Raises MessageTooLargeError above MAX_MESSAGE_BYTES, TransportError once closed.
        """
        ...

    def poll(self, topic: str, timeout_s: float) -> list[bytes]:
        """What came on `topic` since the last poll, waiting at most `timeout_s` for the first.

        The first poll subscribes and begins with the oldest message kept. A message may come
        twice (`Endpoint` removes those). Raises TransportError once closed.
        """
        ...

    def health(self) -> TransportHealth:
        """Counters and the state of the connection."""
        ...

    def close(self, linger_s: float = 1.0) -> None:
        """Send what waits, for at most `linger_s`, and end. Again: no effect."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Messages of one topic after a cursor."""

    messages: list[bytes]
    cursor: str
    """Where the next fetch goes on."""
    dropped: int
    """Messages after the old cursor which the topic no longer keeps."""


class Link(Protocol):
    """One connection to a server, used by one thread; everything may block or raise LinkError."""

    @property
    def incarnation(self) -> str:
        """Differs whenever the server may have lost data or restarted its cursors."""
        ...

    def send(self, batch: Sequence[tuple[str, bytes]]) -> None:
        """Append (topic, message) pairs in order; returns once the server acknowledged all."""
        ...

    def fetch(self, topic: str, cursor: str, limit: int) -> Fetched:
        """At most `limit` messages after `cursor` ("" = the oldest kept), without waiting."""
        ...

    def close(self) -> None:
        """Release the connection; never raises."""
        ...


def check_topic(topic: str) -> None:
    """Raise TransportError unless `topic` is 1 to 255 letters, digits and `. _ - / %`."""
    if not _TOPIC.fullmatch(topic):
        raise TransportError(
            f"topic {topic[:40]!r}: use 1 to 255 letters, digits, '.', '_', '-', '/' or '%'"
        )


def check_size(topic: str, size_bytes: int, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Raise MessageTooLargeError when `size_bytes` exceeds `limit_bytes`."""
    if size_bytes > limit_bytes:
        raise MessageTooLargeError(
            f"message of {size_bytes:,} bytes for topic {topic!r} exceeds the limit of "
            f"{limit_bytes:,}; split it, or send a summary and keep the rest in the journal"
        )
