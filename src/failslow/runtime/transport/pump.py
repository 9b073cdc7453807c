"""Drives a `Link`: outbox, subscriptions, reconnecting, sending again, abandoning what hangs.

In: messages to publish and topics to poll, from any thread. Out: the messages of other
processes. One daemon thread owns the connection, because a stopped server hangs some clients
past their time-outs: when an operation hangs for `stall_s` (connecting: `connect_s`) the thread
is left behind, a new one connects anew, and whatever the old one still returns is ignored. A
server found in another incarnation has lost its data: what was sent in the last `retain_s` is
sent again, and reading starts from the oldest message kept.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from failslow.errors import TransportError
from failslow.runtime.transport.base import (
    Limits,
    Link,
    LinkError,
    TransportHealth,
    check_size,
    check_topic,
)

__all__ = ["PumpTransport"]

_BATCH_MESSAGES, _BATCH_BYTES = 256, 1_048_576
_FETCH_MESSAGES = 128
_BUSY_INTERVAL_S = 0.01
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
_MAX_ABANDONED = 8


@dataclass(slots=True)
class _Outgoing:
    number: int
    topic: str
    message: bytes
    sent_s: float = 0.0


@dataclass(slots=True)
class _Subscription:
    cursor: str = ""
    inbox: deque[bytes] = field(default_factory=deque)
    interval_s: float = _BUSY_INTERVAL_S
    due_s: float = 0.0


@dataclass(slots=True)
class _Pump:
    """One generation: a connection and the thread that owns it."""

    link: Link | None = None
    thread: threading.Thread | None = None
    busy_since_s: float | None = None
    patience_s: float = 0.0
    """How long the operation that began at `busy_since_s` may take."""
    failures: int = 0
    retry_s: float = 0.0


class PumpTransport:
    """A `Transport` over any `Link`.

    connect: makes a link, or raises LinkError; called off the caller's thread.
    condition: given, there is no thread: the callers do the work, and `condition` (which the
        server notifies) is what polls wait on. For links that never block.
    Opens nothing until the first publish or poll.
    """

    def __init__(
        self,
        connect: Callable[[], Link],
        *,
        name: str,
        limits: Limits | None = None,
        condition: threading.Condition | None = None,
    ) -> None:
        self._connect, self._name, self._limits = connect, name, limits or Limits()
        self._threaded = condition is None
        self._changed = condition or threading.Condition()
        self._pump = _Pump()
        self._left_behind: list[threading.Thread] = []
        self._outbox: deque[_Outgoing] = deque()
        self._retained: deque[_Outgoing] = deque(maxlen=self._limits.retain)
        self._subscriptions: dict[str, _Subscription] = {}
        self._incarnation = ""
        self._closed = False
        self._published = self._sent = self._received = 0
        self._dropped_unsent = self._dropped_unread = 0
        self._incarnations = self._connections = self._abandoned = 0
        self._answered_s: float | None = None
        self._last_error = ""

    def __repr__(self) -> str:
        return f"PumpTransport({self._name!r})"

    def publish(self, topic: str, message: bytes) -> None:
        check_topic(topic)
        check_size(topic, len(message))
        with self._changed:
            self._check_open()
            if len(self._outbox) >= self._limits.backlog:
                self._outbox.popleft()
                self._dropped_unsent += 1
            self._published += 1
            self._outbox.append(_Outgoing(self._published, topic, message))
            self._work()
            self._changed.notify_all()

    def poll(self, topic: str, timeout_s: float) -> list[bytes]:
        check_topic(topic)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._check_open()
            if topic not in self._subscriptions:
                self._subscriptions[topic] = _Subscription()
                self._changed.notify_all()
            inbox = self._subscriptions[topic].inbox
            self._work()
            while not inbox and not self._closed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, self._limits.stall_s / 4))
                self._work()
            messages = list(inbox)
            inbox.clear()
            if len(messages) >= self._limits.backlog:
                self._changed.notify_all()  # there is room again
            return messages

    def health(self) -> TransportHealth:
        with self._changed:
            now_s = time.monotonic()
            pump = self._pump
            hanging_s = 0.0 if pump.busy_since_s is None else now_s - pump.busy_since_s
            connected = pump.link is not None and hanging_s < 1.0
            wanted = bool(self._outbox or self._subscriptions)
            since_s = now_s if self._answered_s is None else self._answered_s
            return TransportHealth(
                connected=connected,
                outage_s=now_s - since_s if wanted and not connected else 0.0,
                sent=self._sent,
                received=self._received,
                waiting=len(self._outbox),
                dropped_unsent=self._dropped_unsent,
                dropped_unread=self._dropped_unread,
                incarnations=self._incarnations,
                reconnects=max(0, self._connections - 1),
                abandoned=self._abandoned,
                last_error=self._last_error,
            )

    def close(self, linger_s: float = 1.0) -> None:
        deadline_s = time.monotonic() + linger_s
        with self._changed:
            while self._outbox and not self._closed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._work()
                self._changed.wait(left_s)
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            thread = self._pump.thread
        if thread is not None:
            thread.join(max(0.1, deadline_s - time.monotonic()))
        elif self._pump.link is not None:
            self._pump.link.close()

    def nudge(self) -> None:
        """Do what is due; a server that comes back calls it where there is no thread to notice."""
        with self._changed:
            if self._outbox or self._subscriptions:
                self._work()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self._name}: the transport is closed; open a new one")

    def _work(self) -> None:
        """Do a turn here, or see to it that a live thread does. Called with the lock held."""
        if self._closed:
            return
        now_s = time.monotonic()
        if self._answered_s is None:
            self._answered_s = now_s
        if not self._threaded:
            self._turn(self._pump)
            return
        if self._pump.thread is not None:
            self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
            busy_since_s = self._pump.busy_since_s
            # each thread left behind doubles the patience: a server stopped for hours costs few
            patience_s = self._pump.patience_s * 2 ** len(self._left_behind)
            if busy_since_s is None or now_s - busy_since_s < patience_s:
                return
            if len(self._left_behind) >= _MAX_ABANDONED:
                return
            self._left_behind.append(self._pump.thread)
            self._abandoned += 1
            self._last_error = f"no answer for {now_s - busy_since_s:.1f} s"
        self._pump = _Pump()
        self._pump.thread = threading.Thread(
            target=self._run, args=(self._pump,), name=f"failslow {self._name}", daemon=True
        )
        self._pump.thread.start()

    def _run(self, pump: _Pump) -> None:
        while True:
            with self._changed:
                while self._is_current(pump) and (idle_s := self._idle_s(pump)) != 0:
                    self._changed.wait(idle_s)
                if not self._is_current(pump):
                    break
            self._turn(pump)
        if pump.link is not None:
            pump.link.close()

    def _is_current(self, pump: _Pump) -> bool:
        return pump is self._pump and not self._closed

    def _idle_s(self, pump: _Pump) -> float | None:
        """How long nothing is to be done; None: until notified."""
        now_s = time.monotonic()
        due_s = [s.due_s for s in self._subscriptions.values() if self._room(s)]
        if self._outbox:
            due_s.append(now_s)
        if not due_s:
            return None
        earliest_s = min(due_s)
        if pump.link is None:
            earliest_s = max(earliest_s, pump.retry_s)
        return max(0.0, earliest_s - now_s)

    def _room(self, subscription: _Subscription) -> int:
        return max(0, self._limits.backlog - len(subscription.inbox))

    def _turn(self, pump: _Pump) -> None:
        """Connect if need be, send a batch, fetch what is due."""
        try:
            if pump.link is None:
                self._begin(pump, self._limits.connect_s)
                pump.link = self._connect()
                self._adopt(pump, pump.link)
            self._send(pump, pump.link)
            self._fetch(pump, pump.link)
        except LinkError as error:
            self._lost(pump, str(error))
        except Exception as error:  # noqa: BLE001, RUF100  a thread that died unseen would be worse
            self._lost(pump, f"{type(error).__name__}: {error}")
        finally:
            pump.busy_since_s = None

    def _begin(self, pump: _Pump, patience_s: float) -> None:
        """Note that an operation that may hang begins."""
        pump.patience_s = patience_s
        pump.busy_since_s = time.monotonic()

    def _adopt(self, pump: _Pump, link: Link) -> None:
        with self._changed:
            if not self._is_current(pump):
                return
            pump.failures = 0
            self._connections += 1
            # the data was lost somewhere after the old server's last answer
            oldest_s = (self._answered_s or 0.0) - self._limits.retain_s
            self._answered()
            if link.incarnation == self._incarnation:
                return
            self._incarnation = link.incarnation
            self._incarnations += 1
            again = [item for item in self._retained if item.sent_s >= oldest_s]
            self._outbox.extendleft(reversed(again))
            self._retained.clear()
            for subscription in self._subscriptions.values():
                subscription.cursor, subscription.due_s = "", 0.0

    def _send(self, pump: _Pump, link: Link) -> None:
        with self._changed:
            batch: list[_Outgoing] = []
            size_bytes = 0
            for item in self._outbox:
                size_bytes += len(item.message)
                if batch and (size_bytes > _BATCH_BYTES or len(batch) >= _BATCH_MESSAGES):
                    break
                batch.append(item)
        if not batch or not self._is_current(pump):
            return
        self._begin(pump, self._limits.stall_s)
        link.send([(item.topic, item.message) for item in batch])
        with self._changed:
            if not self._is_current(pump):
                return
            self._answered()
            self._sent += len(batch)
            # a full outbox may have given up the first ones meanwhile; numbers only rise
            while self._outbox and self._outbox[0].number <= batch[-1].number:
                self._outbox.popleft()
            now_s = time.monotonic()
            for item in batch:
                item.sent_s = now_s
                self._retained.append(item)
            self._changed.notify_all()

    def _fetch(self, pump: _Pump, link: Link) -> None:
        with self._changed:
            now_s = time.monotonic()
            due = [
                (topic, subscription, min(self._room(subscription), _FETCH_MESSAGES))
                for topic, subscription in self._subscriptions.items()
                if self._room(subscription) and (subscription.due_s <= now_s or not self._threaded)
            ]
        for topic, subscription, limit in due:
            if not self._is_current(pump):
                return
            self._begin(pump, self._limits.stall_s)
            fetched = link.fetch(topic, subscription.cursor, limit)
            with self._changed:
                if not self._is_current(pump):
                    return
                self._answered()
                self._dropped_unread += fetched.dropped
                self._received += len(fetched.messages)
                subscription.cursor = fetched.cursor
                subscription.inbox.extend(fetched.messages)
                if fetched.messages:
                    subscription.interval_s = _BUSY_INTERVAL_S
                    self._changed.notify_all()
                else:
                    subscription.interval_s = min(
                        2 * subscription.interval_s, self._limits.interval_s
                    )
                more = len(fetched.messages) == limit
                subscription.due_s = 0.0 if more else time.monotonic() + subscription.interval_s

    def _answered(self) -> None:
        self._answered_s = time.monotonic()

    def _lost(self, pump: _Pump, error: str) -> None:
        link, pump.link = pump.link, None
        if link is not None:
            link.close()
        with self._changed:
            if not self._is_current(pump):
                return
            self._last_error = error
            backoff_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2**pump.failures)
            pump.failures = min(pump.failures + 1, 16)
            # spread, so that a thousand agents do not all knock at once
            pump.retry_s = time.monotonic() + backoff_s * random.uniform(0.5, 1.0)
            self._changed.notify_all()
