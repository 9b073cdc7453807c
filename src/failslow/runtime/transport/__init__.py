"""Carries messages between the processes of a job; one contract, three backends.

| address | what |
|---|---|
| `tcpstore://HOST:PORT` | a torch TCPStore (`tcpstore.serve` runs it): the default |
| `redis://[USER:PASSWORD@]HOST:PORT[/DB]`, `rediss://…`, `unix://…` | a Redis server |
| `memory://NAME` | inside this process |
"""

from __future__ import annotations

from failslow.errors import TransportError
from failslow.runtime.transport.base import (
    MAX_MESSAGE_BYTES,
    Limits,
    Transport,
    TransportHealth,
)
from failslow.runtime.transport.endpoint import MAX_PAYLOAD_BYTES, Endpoint, EndpointHealth

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_PAYLOAD_BYTES",
    "Endpoint",
    "EndpointHealth",
    "Limits",
    "Transport",
    "TransportHealth",
    "from_url",
]


def from_url(url: str, limits: Limits | None = None) -> Transport:
    """The transport of that address; connects at its first use.

    Raises TransportError for an address it cannot read, MissingDependencyError when the
    backend's library is not installed.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "memory" and rest:
        from failslow.runtime.transport.memory import memory_transport

        return memory_transport(rest, limits)
    if scheme == "tcpstore":
        from failslow.runtime.transport.tcpstore import tcpstore_transport

        return tcpstore_transport(url, limits)
    if scheme in ("redis", "rediss", "unix"):
        from failslow.runtime.transport.redis import redis_transport

        return redis_transport(url, limits)
    raise TransportError(
        f"transport address {url!r}: write tcpstore://HOST:PORT, redis://HOST:PORT or memory://NAME"
    )
