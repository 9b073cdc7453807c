"""Carries orders to the training loop's Coordinator, and its answers back.

In: `Order(topic="steer", body={"id":7,"level":"S2","plan":{…}})`, letters of workers here. Out:
the order as a letter in rank 0's mailbox, and every letter as a `Report` without its topic
(`mitigate.steer_letters` has their forms):

    Report(node="gpu-17", rank=0, topic="steer", body={"what":"facts","pp":2,"dp":4,…})
    Report(node="gpu-17", rank=0, topic="steer", body={"what":"outcome","id":7,"ok":true,…})
    Report(node="gpu-17", rank=3, topic="steer", body={"what":"pace","rank":3,…})

Only the node of rank 0 acts on an order. A loop without a Coordinator never sends facts: an order
waits for them for a while and is then answered here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from failslow.pipeline import Order, Report
from failslow.records import Outcome
from failslow.runtime.duties import Duty, WatchedWorker

__all__ = ["SteerDuty"]

_FACTS_WAIT_S = 45.0
"""Facts come again every 30 s, for an agent that was started anew."""
_KEPT = 256


class SteerDuty(Duty):
    """Knows no plan: it only carries."""

    topic: ClassVar[str] = "steer"
    acts: ClassVar[bool] = True

    def __init__(self, node: str) -> None:
        self._node = node
        self._orders: deque[tuple[dict[str, Any], float]] = deque(maxlen=_KEPT)
        """What waits to be delivered, and since when."""
        self._reports: deque[Report] = deque(maxlen=_KEPT)
        self._coordinated: set[str] = set()
        """Workers whose loops have a Coordinator."""

    def order(self, order: Order, now_s: float) -> None:
        """Keep it until rank 0 can have it."""
        self._orders.append((dict(order.body), now_s))

    def letter(self, worker: WatchedWorker, letter: dict[str, Any], now_s: float) -> None:
        """Pass it on."""
        del now_s
        if letter.get("what") == "facts":
            self._coordinated.add(worker.worker)
        body = {key: value for key, value in letter.items() if key != "topic"}
        self._reports.append(Report(node=self._node, rank=worker.rank, topic=self.topic, body=body))

    def turn(self, workers: Sequence[WatchedWorker], now_s: float) -> Iterable[Report]:
        """Deliver what waits, in order."""
        first = next((w for w in workers if w.rank == 0 and not w.ended), None)
        while self._orders:
            body, since_s = self._orders[0]
            if first is not None and self._deliver(first, body):
                self._orders.popleft()
            elif now_s - since_s > _FACTS_WAIT_S:
                self._orders.popleft()
                if first is not None:  # else the order is another node's
                    self._reports.append(self._undelivered(first, body))
            else:
                break
        reports, self._reports = self._reports, deque(maxlen=_KEPT)
        return reports

    def _deliver(self, worker: WatchedWorker, body: dict[str, Any]) -> bool:
        box = worker.mailbox
        if box is None or worker.worker not in self._coordinated:
            return False
        return box.send({**body, "topic": self.topic})

    def _undelivered(self, worker: WatchedWorker, body: dict[str, Any]) -> Report:
        if worker.worker in self._coordinated:
            error = "rank 0 reads no orders: its mailbox is full"
        else:
            error = "no failslow.Coordinator in the training loop has spoken up; see docs"
        outcome = Outcome(
            episode=str(body.get("episode", "")),
            level=body.get("level", "S1"),
            ok=False,
            cost_s=0.0,
            error=error,
        )
        answer = {"what": "outcome", "id": body.get("id"), **asdict(outcome)}
        return Report(node=self._node, rank=worker.rank, topic=self.topic, body=answer)
