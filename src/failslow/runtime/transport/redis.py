"""The bus on a Redis server (5 or later): for large jobs, or one bus for many jobs.

In and out as for every transport. A topic is the stream `failslow:TOPIC` with one field `m` per
entry, trimmed to about the capacity and expiring a day after its last message.

    transport = redis_transport("redis://:secret@10.0.0.1:6379/0")

Acknowledged messages survive the server's restart where it persists them (appendonly); where it
does not, the run id of the server tells that it is another one, and the last ones are sent again.
A server still loading its data (BusyLoadingError) counts as not there yet. The user needs
XADD, XREAD, EXPIRE and INFO.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from failslow.errors import MissingDependencyError, TransportError
from failslow.runtime.transport.base import Fetched, Limits, LinkError
from failslow.runtime.transport.pump import PumpTransport

__all__ = ["redis_transport"]

_TIMEOUT_S = 5.0
_EXPIRE_S = 86_400


def redis_transport(url: str, limits: Limits | None = None) -> PumpTransport:
    """A transport to the server at `url` (redis://, rediss:// or unix://, user and password in it).

    Connects at the first use. Raises TransportError for a bad address and
    MissingDependencyError without the redis package.
    """
    limits = limits or Limits()
    redis = _redis()
    try:
        redis.Redis.from_url(url).close()  # parses, opens nothing
    except ValueError as error:
        raise TransportError(
            f"{_shown(url)}: {error}; write redis://[USER:PASSWORD@]HOST:PORT[/DB]"
        ) from None
    return PumpTransport(lambda: _RedisLink(url, limits.capacity), name=_shown(url), limits=limits)


class _RedisLink:
    def __init__(self, url: str, capacity: int) -> None:
        redis = _redis()
        self._capacity = capacity
        self._failures = (redis.RedisError, OSError)
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            decode_responses=False,
            retry=None,  # the pump retries, and counts it
        )
        try:
            self.incarnation = str(self._client.info("server")["run_id"])
        except self._failures as error:
            self.close()
            raise LinkError(_reason(error)) from None

    def send(self, batch: Sequence[tuple[str, bytes]]) -> None:
        try:
            pipeline = self._client.pipeline(transaction=False)
            for topic, message in batch:
                pipeline.xadd(
                    _stream(topic), {"m": message}, maxlen=self._capacity, approximate=True
                )
            for topic in {topic for topic, _ in batch}:
                pipeline.expire(_stream(topic), _EXPIRE_S)
            pipeline.execute()
        except self._failures as error:
            raise LinkError(_reason(error)) from None

    def fetch(self, topic: str, cursor: str, limit: int) -> Fetched:
        try:
            found = self._client.xread({_stream(topic): cursor or "0-0"}, count=limit)
        except self._failures as error:
            raise LinkError(_reason(error)) from None
        if isinstance(found, dict):  # protocol 3 answers {stream: [entries]}, 2 [[stream, entries]]
            entries = [entry for page in found.values() for part in page for entry in part]
        else:
            entries = [entry for _, page in found for entry in page]
        if not entries:
            return Fetched([], cursor, 0)
        messages = [fields[b"m"] for _, fields in entries if b"m" in fields]
        # Redis does not say what it trimmed; receivers see it as gaps in the senders' numbers
        return Fetched(messages, entries[-1][0].decode(), 0)

    def close(self) -> None:
        try:
            self._client.close()
        except self._failures:
            return


def _redis() -> Any:
    try:
        return import_module("redis")
    except ImportError:
        raise MissingDependencyError(
            "the redis transport needs the redis package; pip install 'failslow[redis]'"
        ) from None


def _stream(topic: str) -> str:
    return f"failslow:{topic}"


def _shown(url: str) -> str:
    """`url` without its password, for messages and logs."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return url.partition("://")[0] + "://…"
    return url.replace(f":{password}@", ":***@") if password else url


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
