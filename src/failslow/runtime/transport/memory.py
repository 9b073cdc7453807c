"""The bus inside one process: for tests, simulations and `memory://name`.

In and out as for every transport; publishing is visible to the next poll at once, and there are
no threads. `MemoryHub` is the server, and can be killed, restarted, stalled and resumed, so that
agents and controllers are tested against a failing bus without a socket:

    hub = memory_hub("job")
    a, b = (memory_transport("job") for _ in "ab")
    hub.kill(); a.publish("steps", b"kept"); hub.restart()
    b.poll("steps", timeout_s=1)                    # -> [b"kept"]
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal
from weakref import WeakSet, WeakValueDictionary

from failslow.runtime.transport.base import Fetched, Limits, LinkError
from failslow.runtime.transport.pump import PumpTransport

__all__ = ["MemoryHub", "memory_hub", "memory_transport"]


class MemoryHub:
    """The topics of one bus; lives as long as a transport or the caller holds it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.state: Literal["up", "stalled", "dead"] = "up"
        self._starts = 1
        self._topics: dict[str, tuple[int, deque[bytes]]] = {}
        self.transports: WeakSet[PumpTransport] = WeakSet()

    @property
    def incarnation(self) -> str:
        """Changes at each restart."""
        return str(self._starts)

    def kill(self) -> None:
        """Lose all data and refuse connections until `restart`."""
        with self.condition:
            self.state = "dead"
            self._topics.clear()

    def restart(self) -> None:
        """Come back empty."""
        with self.condition:
            self._starts += 1
            self._come_back()

    def stall(self) -> None:
        """Answer nothing until `resume`; the data stays."""
        with self.condition:
            self.state = "stalled"

    def resume(self) -> None:
        """Answer again."""
        with self.condition:
            self._come_back()

    def _come_back(self) -> None:
        self.state = "up"
        for transport in list(self.transports):
            transport.nudge()
        self.condition.notify_all()

    def append(self, topic: str, message: bytes, capacity: int) -> None:
        """Keep `message` as the newest of `topic`, and of all at most `capacity`."""
        end, kept = self._topics.get(topic, (0, deque()))
        kept.append(message)
        while len(kept) > capacity:
            kept.popleft()
        self._topics[topic] = (end + 1, kept)

    def read(self, topic: str, cursor: int, limit: int) -> tuple[list[bytes], int, int]:
        """Messages after the first `cursor` ever, the new cursor, and how many were lost."""
        end, kept = self._topics.get(topic, (0, deque()))
        first = end - len(kept)
        start = max(cursor, first)
        messages = [kept[i - first] for i in range(start, min(end, start + limit))]
        return messages, start + len(messages), start - cursor


class _MemoryLink:
    def __init__(self, hub: MemoryHub, capacity: int) -> None:
        self._hub, self._capacity = hub, capacity
        self._check()
        self.incarnation = hub.incarnation

    def send(self, batch: Sequence[tuple[str, bytes]]) -> None:
        self._check()
        for topic, message in batch:
            self._hub.append(topic, message, self._capacity)
        self._hub.condition.notify_all()

    def fetch(self, topic: str, cursor: str, limit: int) -> Fetched:
        self._check()
        messages, end, lost = self._hub.read(topic, int(cursor or 0), limit)
        # a late subscriber has lost nothing it was there for
        return Fetched(messages, str(end), lost if cursor else 0)

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._hub.state != "up":
            raise LinkError(f"the hub is {self._hub.state}")
        if getattr(self, "incarnation", self._hub.incarnation) != self._hub.incarnation:
            raise LinkError("the hub was restarted")


_hubs: WeakValueDictionary[str, MemoryHub] = WeakValueDictionary()
_hubs_lock = threading.Lock()


def memory_hub(name: str) -> MemoryHub:
    """The hub of that name in this process, made when there is none."""
    with _hubs_lock:
        hub = _hubs.get(name)
        if hub is None:
            hub = _hubs[name] = MemoryHub()
        return hub


def memory_transport(name: str, limits: Limits | None = None) -> PumpTransport:
    """A transport on the hub of that name."""
    hub, limits = memory_hub(name), limits or Limits()
    transport = PumpTransport(
        lambda: _MemoryLink(hub, limits.capacity),
        name=f"memory://{name}",
        limits=limits,
        condition=hub.condition,
    )
    hub.transports.add(transport)
    return transport
