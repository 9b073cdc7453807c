"""A profile of collectives that complete long after they were enqueued."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch
import torch.distributed as dist
from hooked import replaced, until

from failslow.capture import hook
from failslow.capture.layout import CALL, DONE, TRAINER_STEP
from failslow.capture.reader import RingReader
from failslow.localize.digest import digest
from failslow.records import RankProfile
from failslow.track import Tracker

pytest_plugins = ("hooked",)

LATE_S = 0.02
ITERATIONS = 12
c10d: Any = vars(torch._C)["_distributed_c10d"]


class Stream:
    """Takes collectives at once, completes each a while later."""

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        future: Any = torch.futures.Future()
        threading.Timer(LATE_S, lambda: future.set_result(tensors)).start()
        return tensors, c10d._create_work_from_future(future).boxed()


class Device:
    """The same with a clock of its own, by which each takes `LATE_S` and begins a while later."""

    def __init__(self) -> None:
        self._free_ns = 0

    def about(self) -> dict[str, str]:
        return {}

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        self._free_ns = max(self._free_ns, time.monotonic_ns()) + int(LATE_S * 1e9)
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return tensors, c10d._create_work_from_future(future).boxed()

    def mark(self) -> Any:
        return max(self._free_ns, time.monotonic_ns())

    def reached(self, event: Any) -> bool:
        return bool(time.monotonic_ns() >= event)

    def elapsed_ns(self, earlier: Any, later: Any) -> int:
        return int(later - earlier)


def iterate(device: str, between_s: float) -> None:
    """Enqueue one collective an iteration and go on."""
    for index in range(ITERATIONS):
        dist.all_reduce(torch.ones(4, device=device), async_op=True)
        time.sleep(between_s)
        hook.mark_step(index)


def profile(reader: RingReader, done: int) -> RankProfile:
    """Of everything so far, once so many completions are there."""
    got: list[np.ndarray] = []

    def enough() -> bool:
        got.append(reader.read().records)
        kinds = np.concatenate(got)["kind"]
        return bool((kinds == DONE).sum() >= done and (kinds == TRAINER_STEP).sum() >= ITERATIONS)

    until(enough)
    records = np.concatenate(got)
    ops = reader.description["ops"]
    calls = records[records["kind"] == CALL]
    assert np.median(calls["call_ns"]) < LATE_S * 1e9 / 4, "the host must only enqueue"
    samples = Tracker(ops=ops).update(records)
    made = digest(records, ops=ops, groups=reader.groups(), samples=samples, rank=0)
    assert made is not None
    return made


def test_unknown_durations_stay_unknown(late_group: None, folder: Any) -> None:
    hook.install("dispatcher")  # which asks for completions while profiling only
    with replaced("CPU", Stream().allreduce):
        iterate("cpu", 1.5 * LATE_S)
        made = profile(RingReader(next(folder.glob("*.ring"))), done=0)
    (cell,) = made.cells
    assert cell.duration_s is None
    assert cell.least_s is None
    assert made.compute_s is None, "when it waited is unknown, and so is its own time"


def test_enqueueing_is_not_the_duration(
    late_group: None, watched: Callable[[], RingReader]
) -> None:
    with replaced("CPU", Stream().allreduce):
        dist.all_reduce(torch.ones(1))
        reader = watched()
        reader.set_profile(True)
        reader.read()
        iterate("cpu", 1.5 * LATE_S)
        made = profile(reader, done=ITERATIONS)
    (cell,) = made.cells
    assert cell.duration_s is not None
    assert cell.duration_s > 0.9 * LATE_S
    assert cell.least_s is not None
    assert cell.least_s > 0.9 * LATE_S


def test_a_device_s_clock_tells_its_own_time(folder: Any, late_group: None, mode: str) -> None:
    """The device computes nothing between its collectives; the host sleeps, which is not time of
    its device's own unless the device runs dry."""
    device = Device()
    hook.install(mode, device=device)
    with replaced("Meta", device.allreduce):
        dist.all_reduce(torch.ones(4, device="meta"))
        reader = RingReader(next(folder.glob("*.ring")))
        reader.set_profile(True)
        reader.read()
        iterate("meta", LATE_S / 4)
        made = profile(reader, done=ITERATIONS)
    (cell,) = made.cells
    assert cell.duration_s == pytest.approx(LATE_S, rel=0.1)
    assert made.compute_s is not None
    assert made.compute_s < LATE_S / 4
