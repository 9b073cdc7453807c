"""A pipeline simulated event by event: the slow, obvious way the recurrence is compared with.

In: the order of computations of each stage, and how long each takes. Out: when each starts and
ends. Nothing is shared with the product but what a computation is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from failslow.simulate.schedule import Computation

Own = Callable[[Computation], float]


def run_events(
    orders: Sequence[Sequence[Computation]], chunks: int, own_s: Own, transfer_s: Own
) -> dict[Computation, tuple[float, float]]:
    """Start and end of every computation; transfer_s: to pass on what a computation made."""
    next_one = [0] * len(orders)
    busy = [False] * len(orders)
    arrived: set[Computation] = set()
    times: dict[Computation, tuple[float, float]] = {}
    heap: list[tuple[float, int, str, int, Computation]] = []
    ticket = 0

    def push(time_s: float, what: str, stage: int, computation: Computation) -> None:
        nonlocal ticket
        heapq.heappush(heap, (time_s, ticket, what, stage, computation))
        ticket += 1

    def try_start(stage: int, now_s: float) -> None:
        if busy[stage] or next_one[stage] == len(orders[stage]):
            return
        computation = orders[stage][next_one[stage]]
        if needs_message(computation, chunks) and computation not in arrived:
            return
        busy[stage] = True
        next_one[stage] += 1
        end_s = now_s + own_s(computation)
        times[computation] = (now_s, end_s)
        push(end_s, "done", stage, computation)

    for stage in range(len(orders)):
        try_start(stage, 0.0)
    while heap:
        now_s, _, what, stage, computation = heapq.heappop(heap)
        if what == "arrive":
            arrived.add(computation)
        else:
            busy[stage] = False
            receiver = reader_of(computation, chunks)
            if receiver is not None:
                target = receiver.chunk % len(orders)
                push(now_s + transfer_s(computation), "arrive", target, receiver)
        try_start(stage, now_s)
    assert len(times) == sum(map(len, orders)), "the stages wait for each other"
    return times


def needs_message(computation: Computation, chunks: int) -> bool:
    """Whether it waits for another chunk."""
    return computation.chunk > 0 if computation.forward else computation.chunk < chunks - 1


def reader_of(computation: Computation, chunks: int) -> Computation | None:
    """The computation that gets its result, if one does."""
    chunk = computation.chunk + (1 if computation.forward else -1)
    if 0 <= chunk < chunks:
        return Computation(computation.forward, chunk, computation.micro_batch)
    return None
