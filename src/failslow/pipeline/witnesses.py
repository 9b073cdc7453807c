"""Whose telemetry a verdict asks for, what has come, and what of it the journal gets. Pure.

In: nodes, the most concerned first, their agents' reports. Out: `Order`s, windows on the job's
clock:

    witnesses.ask(["gpu-17", "gpu-3"], 137.2, every=4)   # [Order(topic="telemetry", …)]
    witnesses.take("gpu-17", body)
    witnesses.told                                       # all who were asked have answered
    witnesses.windows(ahead_s, first=["gpu-17"])

A node's window has up to 190 KB: of a thousand nodes they would take the bus, the controller and
the journal longer than a verdict may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from failslow.localize.windows import on_job_clock
from failslow.pipeline.messages import Order

__all__ = ["JOURNALED", "Witnesses"]

_MOST = 64
"""Nodes asked at a time; a job of no more is asked as a whole."""
JOURNALED = 16
"""Windows of a verdict that are written down."""


class Witnesses:
    """Of one verdict at a time."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._passed_over: set[str] = set()
        self._windows: dict[str, Mapping[str, Any]] = {}

    def ask(self, nodes: Iterable[str], last_s: float, *, every: Collection[str]) -> list[Order]:
        """Begin anew: of the last seconds until now, whatever a node's clock says. every: the
        nodes there are."""
        self._asked, self._passed_over, self._windows = set(), set(), {}
        if len(every) <= _MOST:
            self._asked.update(every)
            return [_order(last_s)]
        return self.ask_more(nodes, last_s)

    def ask_more(self, nodes: Iterable[str], last_s: float) -> list[Order]:
        """Those, too, that have not been asked yet."""
        new = [node for node in dict.fromkeys(nodes) if node not in self._asked]
        self._asked.update(new[:_MOST])
        self._passed_over.update(new[_MOST:])
        return [_order(last_s, node) for node in new[:_MOST]]

    def lacks(self, nodes: Iterable[str]) -> bool:
        """Whether any of them has not been asked, and was not one too many."""
        return not (self._asked | self._passed_over).issuperset(nodes)

    def take(self, node: str, body: Mapping[str, Any]) -> None:
        """An agent answers."""
        self._windows[node] = body

    @property
    def told(self) -> bool:
        """All who were asked have answered."""
        return self._asked <= self._windows.keys()

    def windows(
        self, ahead_s: Callable[[str], float | None], *, first: Iterable[str] = ()
    ) -> list[dict[str, Any]]:
        """What has come; times are by the job's clock, as hosts' clocks are not trusted."""
        nodes = dict.fromkeys([*(node for node in first if node in self._windows), *self._windows])
        return [on_job_clock(self._windows[node], ahead_s(node)) | {"node": node} for node in nodes]


def _order(last_s: float, node: str = "") -> Order:
    return Order(topic="telemetry", body={"last_s": last_s}, node=node)
