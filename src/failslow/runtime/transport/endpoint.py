"""What agents and controllers hold: a transport whose messages are signed, ordered, never double.

In: a topic and payload bytes (JSON or struct, never pickle). Out: `Message`s of the same job,
proven by the token, each at most once, each sender's in order, missing ones counted.

    endpoint = Endpoint(from_url(url), job="pretrain", sender="node-7", token=load_token())
    endpoint.publish("steps", encode_entry(...))
    for message in endpoint.poll("instructions", timeout_s=1.0): ...
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import quote

from failslow.runtime.security import ENVELOPE_BYTES, Message, Opener, Sealer
from failslow.runtime.transport.base import (
    MAX_MESSAGE_BYTES,
    Transport,
    TransportHealth,
    check_size,
)

__all__ = ["MAX_PAYLOAD_BYTES", "Endpoint", "EndpointHealth"]

MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES - ENVELOPE_BYTES
"""The largest payload, a little under 256 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """Counts since the endpoint was made."""

    transport: TransportHealth
    accepted: int
    missed: int
    """Messages numbered by their senders that never came."""
    duplicates: int
    """Messages that came again, or were replayed: the two cannot be told apart."""
    refused: int
    """Messages that were malformed, or sealed with another token or for another job or topic."""
    stale: int
    """Genuine messages too old, or too far ahead of this machine's clock: compare the clocks."""


class Endpoint:
    """One named participant of a job. Safe to use from several threads; opens nothing until used.

    clock: epoch seconds; the sent time of messages and the age limit are judged by it.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        job: str,
        sender: str,
        token: str,
        max_age_s: float = 300.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._transport, self._clock = transport, clock
        self._prefix = quote(job, safe="")
        self._sealer = Sealer(token, job=job, sender=sender, session=secrets.randbits(64))
        self._opener = Opener(token, job=job, max_age_s=max_age_s)
        self._lock = threading.Lock()
        self._accepted = 0

    def publish(self, topic: str, payload: bytes) -> None:
        """Sign and queue; returns at once.

        Raises MessageTooLargeError above MAX_PAYLOAD_BYTES, TransportError once closed.
        """
        check_size(topic, len(payload), MAX_PAYLOAD_BYTES)
        with self._lock:  # sealing and queueing as one, or two threads would swap their numbers
            sealed = self._sealer.seal(topic, payload, now_s=self._clock())
            self._transport.publish(self._name(topic), sealed)

    def poll(self, topic: str, timeout_s: float) -> list[Message]:
        """New messages on `topic`, waiting at most `timeout_s` for the first that holds."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            sealed = self._transport.poll(self._name(topic), left_s)
            messages = []
            with self._lock:
                now_s = self._clock()
                for item in sealed:
                    message = self._opener.open(topic, item, now_s=now_s)
                    if message is not None:
                        messages.append(message)
                self._accepted += len(messages)
            if messages or time.monotonic() >= deadline_s:
                return messages

    def health(self) -> EndpointHealth:
        """Counters of the signatures and of the transport below."""
        transport = self._transport.health()
        with self._lock:
            rejected = self._opener.rejected
            return EndpointHealth(
                transport=transport,
                accepted=self._accepted,
                missed=self._opener.missed,
                duplicates=rejected["replayed"],
                refused=rejected["malformed"] + rejected["forged"],
                stale=rejected["stale"] + rejected["ahead"],
            )

    def close(self, linger_s: float = 1.0) -> None:
        """Send what waits, for at most `linger_s`, and end. Again: no effect."""
        self._transport.close(linger_s)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _name(self, topic: str) -> str:
        return f"{self._prefix}/{topic}"
