"""The agent's part in a restart without a slow host: the order goes to this node's `failslow run`.

In: Order(topic="restart", body={"id": "e17-4", "evict": ["gpu-3"], "why": "device rank 25"})
Out: `restart-<node>.json` in the run's folder (`runtime.restart`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from failslow.pipeline import Order, Report
from failslow.runtime.duties import Duty, WatchedWorker
from failslow.runtime.restart import RestartOrder, leave_order

__all__ = ["RestartDuty"]


class RestartDuty(Duty):
    """Leaves orders in `folder` for the node's launcher."""

    topic: ClassVar[str] = "restart"
    acts: ClassVar[bool] = True

    def __init__(self, node: str, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._reports: list[Report] = []

    def order(self, order: Order, now_s: float) -> None:
        """Hand it on; the controller is told when that cannot be done."""
        del now_s
        body = order.body
        evict = tuple(str(name) for name in body["evict"])
        wanted = RestartOrder(id=str(body["id"]), evict=evict, why=str(body.get("why", "")))
        error = ""
        try:
            leave_order(self._folder, self._node, wanted)
        except OSError as failure:
            error = f"{self._folder}: {failure.strerror or failure}"
        self._reports.append(
            Report(node=self._node, topic=self.topic, body={"id": wanted.id, "error": error})
        )

    def turn(self, workers: Sequence[WatchedWorker], now_s: float) -> Iterable[Report]:
        """The answers to orders."""
        del workers, now_s
        reports, self._reports = self._reports, []
        return reports
