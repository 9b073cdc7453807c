"""Workers that are threads of one process: a `Wire` without a network, with faults on demand.

In: how many workers, and which of them fails when. Out: a wire each.

    hub = ThreadHub(4, faults={2: Fault("die", at=7)})
    results = hub.run(lambda wire: swap_state(states[wire.rank], group=wire, …))
    # results[2] is a WorkerDied, the others' are MoveErrors

Events are counted for each worker: every `post`, `gather` and `settle` is one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from failslow.mitigate.move_wire import Pending

__all__ = ["Fault", "ThreadHub", "ThreadWire", "WorkerDied"]


class WorkerDied(BaseException):
    """Ends the thread of a worker that dies: nothing catches it, as nothing outlives SIGKILL."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls one worker at its event number `at`, counted from 0."""

    kind: Literal["die", "corrupt", "hang", "error"]
    """die: the worker is gone, its peers notice · corrupt: one byte it sends is another · hang: it
    does nothing until the others have given up · error: its network reports one."""
    at: int
    seen_by: frozenset[int] = frozenset()
    """Where it dies in a gather: the workers that had got all words before."""


class ThreadHub:
    """The network between the threads."""

    def __init__(self, size: int, *, faults: Mapping[int, Fault] | None = None) -> None:
        self.size = size
        self.faults = dict(faults or {})
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self.broken = threading.Event()
        self.decision: bool | None = None
        self.lock = threading.Condition()
        self.words: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (source, to): queue.Queue() for source in range(size) for to in range(size)
        }

    def run(self, work: Callable[[ThreadWire], Any], limit_s: float = 60.0) -> list[Any]:
        """`work` in a thread for each worker: what it returned, or the exception that ended it."""
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            try:
                results[rank] = work(ThreadWire(self, rank))
            except BaseException as error:
                results[rank] = error
                with self.lock:
                    self.dead.add(rank)  # it has left: whoever waits for it waits in vain
                    self.lock.notify_all()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s)
            assert not thread.is_alive(), f"a worker still waits after {limit_s} s"
        return results


class ThreadWire:
    """One worker's end."""

    device = torch.device("cpu")

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self.rank, self.size = rank, hub.size
        self._events = 0
        self._gathers = 0

    def _event(self) -> Fault | None:
        """The fault that is due, if any; one that ends the call has already done so."""
        fault = self._hub.faults.get(self.rank)
        due = fault is not None and fault.at == self._events
        self._events += 1
        if fault is None or not due:
            return None
        if fault.kind == "error":
            raise RuntimeError("an injected network error")
        if fault.kind == "hang":
            self._hub.broken.wait(30.0)
            raise RuntimeError("an injected hang is over")
        return fault

    def _die(self) -> None:
        with self._hub.lock:
            self._hub.dead.add(self.rank)
            self._hub.lock.notify_all()
        raise WorkerDied

    def post(
        self, outgoing: tuple[torch.Tensor, int] | None, incoming: tuple[torch.Tensor, int] | None
    ) -> tuple[Pending | None, Pending | None]:
        """Sending copies; receiving waits for the copy."""
        fault = self._event()
        if fault is not None and fault.kind == "die":
            self._die()
        if outgoing is not None:
            data, to = outgoing
            copy = data.clone()
            if fault is not None and fault.kind == "corrupt" and copy.numel():
                copy[copy.numel() // 2] ^= 0x10
            self._hub.queues[self.rank, to].put(copy)
        sent = None if outgoing is None else _Nothing()
        received = None if incoming is None else _Arrival(self._hub, self.rank, *incoming)
        return sent, received

    def gather(self, mine: bytes, limit_s: float) -> Sequence[bytes]:
        """Everybody's words, once all are there."""
        fault = self._event()
        dying = fault is not None and fault.kind == "die"
        hub, number = self._hub, self._gathers
        self._gathers += 1
        deadline_s = time.monotonic() + limit_s
        with hub.lock:
            words = hub.words[number]
            if not dying or (fault is not None and fault.seen_by):
                words[self.rank] = mine
            hub.lock.notify_all()
        if dying:
            self._die()
        with hub.lock:
            while True:
                blind = [
                    rank
                    for rank in hub.dead | hub.gone
                    if rank not in words
                    or (rank in hub.dead and self.rank not in _seers(hub, rank))
                ]
                if blind:
                    raise ConnectionError(f"worker {blind[0]} has gone")
                if len(words) == hub.size:
                    return [words[rank] for rank in range(hub.size)]
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0 or not hub.lock.wait(left_s):
                    hub.broken.set()
                    raise TimeoutError("not all workers came")

    def drop(self) -> None:
        """Those who wait for its chunks or its word wait in vain."""
        with self._hub.lock:
            self._hub.gone.add(self.rank)
            self._hub.lock.notify_all()

    def settle(self, *, commit: bool) -> bool:
        """The first wish counts."""
        fault = self._event()
        if fault is not None and fault.kind == "die":
            self._die()
        with self._hub.lock:
            if self._hub.decision is None:
                self._hub.decision = commit
            return self._hub.decision


def _seers(hub: ThreadHub, rank: int) -> frozenset[int]:
    """Who had its word before it died; all, of one that ended without dying."""
    fault = hub.faults.get(rank)
    if fault is None or fault.kind != "die":
        return frozenset(range(hub.size))
    return fault.seen_by


class _Nothing:
    def wait(self, limit_s: float) -> None:
        del limit_s


class _Arrival:
    def __init__(self, hub: ThreadHub, rank: int, home: torch.Tensor, source: int) -> None:
        self._hub, self._rank, self._home, self._source = hub, rank, home, source

    def wait(self, limit_s: float) -> None:
        arrivals = self._hub.queues[self._source, self._rank]
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                data = arrivals.get(timeout=0.01)
            except queue.Empty:
                if self._source in self._hub.dead | self._hub.gone:
                    raise ConnectionError(f"worker {self._source} has gone") from None
                if time.monotonic() > deadline_s:
                    self._hub.broken.set()
                    raise TimeoutError(f"nothing from worker {self._source}") from None
                continue
            if data.numel() != self._home.numel():
                raise ValueError(f"{data.numel()} bytes came where {self._home.numel()} were due")
            self._home.copy_(data)
            return
