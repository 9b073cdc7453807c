"""What an agent does besides watching: each duty takes orders of one topic and reports on it.

In: `Order`s of the controller, the node's workers. Out: `Report`s to the controller:

    Order(topic="profile", body={"for_s": 20.0})
    Report(node="gpu-17", rank=3, topic="profile", body={"rank":3,"iterations":20,"cells":[…]})

A duty that fails is said once and costs its own reports; the watching goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from failslow.mailbox import Mailbox
from failslow.pipeline import Order, Report
from failslow.records import StepSample

__all__ = ["Duty", "WatchedWorker"]


class WatchedWorker(Protocol):
    """One worker of the node, as a duty sees it (`runtime.node.Follower`)."""

    rank: int
    pid: int
    worker: str
    """Its pid and start time."""
    world_size: int
    ended: bool
    fresh: NDArray[np.void]
    """The records of the last read, of all kinds (`capture.layout`), and..."""
    samples: list[StepSample]
    """...the iterations they ended (`end_s`: epoch seconds)."""

    @property
    def mailbox(self) -> Mailbox | None:
        """None when it has none, or it could not be opened."""
        ...

    @property
    def groups(self) -> Sequence[Any]:
        """Its process groups so far (`capture.reader.Group`), by their number."""
        ...

    @property
    def description(self) -> dict[str, Any]:
        """What its ring says of it: host, op names, capture mode, clock anchors, device."""
        ...

    def count(self, number: int) -> int:
        """Collectives it has begun on a group that spans all workers; 0 for others."""
        ...

    def set_profile(self, on: bool) -> None:
        """Have completions recorded although that costs more a call, or no longer."""
        ...

    def to_epoch_s(self, monotonic_ns: float) -> float:
        """A time of its records on the epoch clock."""
        ...


class Duty:
    """A real one overrides what it needs. Times are CLOCK_MONOTONIC seconds."""

    topic: ClassVar[str] = ""
    """Of the orders it takes."""
    acts: ClassVar[bool] = False
    """They move or stop a job: one carried out twice would be worse than one that was not."""

    @property
    def pace_s(self) -> float:
        """How soon it wants its next turn."""
        return math.inf

    @property
    def urgent(self) -> bool:
        """Whether workers stand and wait for it, or a slow job for its culprit's name."""
        return False

    def order(self, order: Order, now_s: float) -> None:
        """An order of its topic came."""

    def observe(self, worker: WatchedWorker) -> None:
        """A worker's ring was read: see its `fresh` records and the `samples` found in them."""

    def letter(self, worker: WatchedWorker, letter: dict[str, Any], now_s: float) -> None:
        """A worker's letter of its topic came."""

    def turn(self, workers: Sequence[WatchedWorker], now_s: float) -> Iterable[Report]:
        """Do what is due; called about ten times a second. A duty without reports returns none."""
        del workers, now_s
        return ()

    def close(self) -> None:
        """The agent ends: undo what must not outlive it."""
