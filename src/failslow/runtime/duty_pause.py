"""The agent's side of a pause: hands words on between the controller and its node's workers.

In: orders of topic "pause", the workers' counts and letters. Out: letters, the attention word,
reports (`localize.pause_node` decides which):

    Order(topic="pause", body={"do":"arm","id":81,"group":"0 default_pg gloo","at":812,…})
    Report(node="gpu-17", rank=3, topic="pause", body={"say":"armed","id":81,"count":806})
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from failslow.capture.layout import COUNTED_GROUPS
from failslow.localize.pause_node import Attend, GroupCount, PauseNode, Post, Tell, WorkerView
from failslow.localize.pause_worker import TOPIC
from failslow.pipeline import Order, Report
from failslow.runtime.duties import Duty, WatchedWorker

__all__ = ["PauseDuty"]

_ROUNDS = 3
"""Turns of the node in one of the agent: armed workers are looked at again at once."""


class PauseDuty(Duty):
    """Of one agent.

    node: the agent's name.
    """

    topic: ClassVar[str] = TOPIC
    acts: ClassVar[bool] = True
    """A bus that outlives jobs keeps an earlier start's orders: workers would stop for nobody."""

    def __init__(self, node: str) -> None:
        self._name = node
        self._node = PauseNode()
        self._steps: dict[int, int] = {}

    def order(self, order: Order, now_s: float) -> None:
        """Take an order; one that makes no sense raises, and the agent says so."""
        self._node.order(order.body, now_s)

    def observe(self, worker: WatchedWorker) -> None:
        """Remember which iteration the worker is in."""
        if worker.samples:
            self._steps[worker.rank] = worker.samples[-1].step

    def letter(self, worker: WatchedWorker, letter: dict[str, Any], now_s: float) -> None:
        """Pass a worker's word on, with the iteration it came in."""
        step = self._steps.get(worker.rank)
        more = {} if step is None else {"step": step + 1}
        self._node.letter(worker.rank, {**letter, **more}, now_s)

    def turn(self, workers: Sequence[WatchedWorker], now_s: float) -> Iterable[Report]:
        """Do what is due."""
        living: dict[int, WatchedWorker] = {}
        for worker in workers:
            if worker.rank not in living or not worker.ended:
                living[worker.rank] = worker
        for _ in range(_ROUNDS):
            posted = False
            for action in self._node.turn([_view(worker) for worker in living.values()], now_s):
                if isinstance(action, Tell):
                    yield Report(node=self._name, rank=action.rank, topic=TOPIC, body=action.body)
                    continue
                mailbox = living[action.rank].mailbox if action.rank in living else None
                if isinstance(action, Attend):
                    if mailbox is not None:  # the worker reads from it when its agent last lived
                        mailbox.attention = int(time.monotonic() * 1e3)
                elif mailbox is None or not mailbox.send(action.letter):
                    self._node.refused(action.rank, action.letter)
                posted = posted or isinstance(action, Post)
            if not posted:
                break

    @property
    def urgent(self) -> bool:
        """From the order to arm until all is told."""
        return self._node.busy

    @property
    def pace_s(self) -> float:
        """While workers stand and wait for a word, turns follow one another closely."""
        return self._node.pace_s


def _view(worker: WatchedWorker) -> WorkerView:
    counts = tuple(
        GroupCount(
            group.number, f"{group.name} {group.desc} {group.backend}", worker.count(group.number)
        )
        for group in worker.groups
        if group.size == worker.world_size and group.number < COUNTED_GROUPS
    )
    return WorkerView(
        rank=worker.rank,
        alive=not worker.ended,
        speaks=worker.mailbox is not None,
        counts=counts,
    )
