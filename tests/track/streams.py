"""Call streams of made-up training programs, with the true end of each iteration.

An iteration is a list of `Call`s, each after a share of the iteration's time; stretches between
iterations (evaluation, checkpoints) are lists too. `play` puts them on a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from failslow.records import (
    CALL_COLUMNS,
    KIND_CALL,
    KIND_OPTIMIZER_STEP,
    StepSample,
)
from failslow.track import Tracker

OPS = (
    "",
    "allreduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "broadcast_",
    "alltoall_base_",
    "send",
    "recv_",
    "barrier",
    "allgather_",
)
WORLD, TP, PP, DP = range(4)
SIZES = {WORLD: 8, TP: 2, PP: 2, DP: 2}


class Call(NamedTuple):
    """One collective; `weight`: its share of the time, before it."""

    op: str
    size: int
    group: int = WORLD
    weight: float = 1.0
    peer: int = -1


class Stretch(NamedTuple):
    """Calls in a row. An iteration ends with it if `steps`."""

    calls: Sequence[Call]
    seconds: float = 0.1
    steps: bool = True
    rest: float = 1.0
    """Weight of the time after the last call."""


@dataclass(frozen=True)
class Played:
    """A stream and what it really is."""

    calls: NDArray[np.void]
    ends_s: NDArray[np.float64]

    @property
    def unmarked(self) -> NDArray[np.void]:
        """The stream without step marks."""
        calls: NDArray[np.void] = self.calls[self.calls["kind"] == KIND_CALL]
        return calls


def play(stretches: Iterable[Stretch], *, noise: float = 0.02, seed: int = 0) -> Played:
    """Put stretches on a clock: each takes its seconds, give or take `noise` of it."""
    rng = np.random.default_rng(seed)
    now, ends = 1000.0, []
    blocks = []
    stretches = list(stretches)  # kept alive: their calls are told apart by identity
    blank: dict[int, NDArray[np.void]] = {}  # rows without times, of calls met before
    for stretch in stretches:
        count = len(stretch.calls)
        if id(stretch.calls) not in blank:
            blank[id(stretch.calls)] = untimed(stretch.calls)
        block = np.zeros(count + stretch.steps, CALL_COLUMNS)
        block[:count] = blank[id(stretch.calls)]
        weights = np.concatenate((block["call_ns"][:count] / 1e6, [stretch.rest]))
        weights = weights * (1 + noise * rng.standard_normal(count + 1))
        times = stretch.seconds * (1 + noise * rng.standard_normal()) * weights / weights.sum()
        starts = now + np.cumsum(times)
        calls = block[:count]
        calls["start_ns"] = np.round(starts[:-1] * 1e9)
        calls["call_ns"] = 20_000
        calls["wait_ns"] = 30_000
        calls["end_ns"] = calls["start_ns"] + 50_000
        now = starts[-1]
        if stretch.steps:
            block["kind"][-1] = KIND_OPTIMIZER_STEP
            block["start_ns"][-1] = round(now * 1e9)
            ends.append(now)
        blocks.append(block)
    return Played(np.concatenate(blocks), np.array(ends))


def untimed(calls: Sequence[Call]) -> NDArray[np.void]:
    """Rows of `calls` without times; `call_ns` holds their weights in millionths."""
    rows = np.zeros(len(calls), CALL_COLUMNS)
    rows["kind"] = KIND_CALL
    rows["op"] = [OPS.index(call.op) for call in calls]
    rows["group"] = [call.group for call in calls]
    rows["group_size"] = [SIZES[call.group] for call in calls]
    rows["size_bytes"] = [call.size for call in calls]
    rows["peer"] = [call.peer for call in calls]
    rows["call_ns"] = [round(call.weight * 1e6) for call in calls]
    return rows


@dataclass(frozen=True)
class Followed:
    """What a tracker made of a stream."""

    tracker: Tracker
    samples: list[StepSample]
    locked_at: int | None
    """Iterations that had ended when the state first said locked."""
    periods: list[tuple[int, int | None]]
    """(iterations that had ended, calls of an iteration) whenever the latter changed."""

    def first_followed(self, period: int, after: int = 0) -> int:
        """Iterations that had ended when this period was first followed after so many."""
        return min(at for at, calls in self.periods if calls == period and at >= after)


def follow(
    calls: NDArray[np.void], ends_s: NDArray[np.float64], block: int = 7, **more: Any
) -> Followed:
    """Feed a stream in blocks."""
    tracker = Tracker(**{"ops": OPS, **more})
    samples: list[StepSample] = []
    locked_at: int | None = None
    periods: list[tuple[int, int | None]] = []
    for begin in range(0, len(calls), block):
        piece = calls[begin : begin + block]
        samples += tracker.update(piece)
        state = tracker.state
        ended = int(np.searchsorted(ends_s, piece["start_ns"][-1] / 1e9))
        if locked_at is None and state.phase == "locked":
            locked_at = ended
        if not periods or periods[-1][1] != state.period_calls:
            periods.append((ended, state.period_calls))
    return Followed(tracker, samples + tracker.finish(), locked_at, periods)


def iterations_in(sample: StepSample, ends_s: NDArray[np.float64]) -> int:
    """How many iterations really ended within a sample."""
    span = np.array([sample.end_s - sample.duration_s, sample.end_s])
    first, last = np.searchsorted(ends_s, span + 1e-6)  # a mark's own time is rounded to ns
    return int(last - first)


def ddp(buckets: Sequence[int] = (4_000_000, 2_500_000, 900_000), **more: Any) -> Stretch:
    """Gradient buckets reduced in backward."""
    first, *others = buckets
    calls = [Call("allreduce_", first, weight=10.0)]
    calls += [Call("allreduce_", size, weight=2.0) for size in others]
    return Stretch(calls, rest=3.0, **more)


def fsdp(layers: int = 12, *, root: bool = True, reduce: bool = True) -> list[Call]:
    """Gather forward, gather and reduce-scatter backward, layers of one size."""
    outer = [Call("_allgather_base_", 700_000)] if root else []
    forward = [Call("_allgather_base_", 250_000) for _ in range(layers)]
    backward = []
    for _ in range(layers):
        backward.append(Call("_allgather_base_", 250_000))
        if reduce:
            backward.append(Call("_reduce_scatter_base_", 250_000))
    last = [Call("_reduce_scatter_base_", 700_000)] if root and reduce else []
    return outer + forward + backward + last


def hybrid(microbatches: int, *, layers: int = 2, first_stage: bool = True) -> list[Call]:
    """One rank's tensor, pipeline (1F1B, two stages) and data parallel calls."""
    tp = [Call("allreduce_", 65_536, TP) for _ in range(2 * layers)]
    to = [Call("send", 65_536, PP, peer=1)]
    back = [Call("recv_", 65_536, PP, peer=1)]
    calls: list[Call] = []
    if first_stage:
        calls += tp + to
        for _ in range(microbatches - 1):
            calls += tp + to + back + tp
        calls += back + tp
    else:
        for _ in range(microbatches):
            calls += back + tp + tp + to
    gradients = [Call("allreduce_", 3_000_000, DP)]
    return [*calls, *gradients, Call("allreduce_", 4, WORLD)]


def scalars(count: int) -> Stretch:
    """An evaluation that reduces a number a batch."""
    calls = [Call("allreduce_", 8, weight=1.0) for _ in range(count)]
    return Stretch(calls, seconds=0.03 * count, steps=False)


def barrier(seconds: float = 0.4) -> Stretch:
    """A checkpoint: sizes gathered, then a barrier."""
    calls = [Call("allgather_", 16), Call("allgather_", 5_000), Call("barrier", 0, weight=9.0)]
    return Stretch(calls, seconds=seconds, steps=False)


def start_up() -> Stretch:
    """What a job calls before it trains."""
    calls = [Call("broadcast_", 8), Call("allgather_", 16), Call("broadcast_", 7_400_000)]
    return Stretch([*calls, Call("barrier", 0)], seconds=2.0, steps=False)


def every(count: int, period: int, step: Stretch, between: Stretch) -> list[Stretch]:
    """`count` iterations with a stretch between after each `period` of them."""
    out = []
    for index in range(count):
        out.append(step)
        if index % period == period - 1:
            out.append(between)
    return out
