"""Collectives that complete after they were enqueued: enqueueing is not transferring."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch
import torch.distributed as dist
from hooked import records, replaced, until

from failslow.capture import hook
from failslow.capture.calls import CallJoiner
from failslow.capture.completion import Completions
from failslow.capture.layout import DONE, WAIT
from failslow.capture.reader import RingReader

pytest_plugins = ("hooked",)

LATE_S = 0.12
c10d: Any = vars(torch._C)["_distributed_c10d"]


class LateStream:
    """What a stream does with collectives: takes them at once, completes one after the other.

    `completed_ns` lists when each really completed, by this host's clock.
    """

    def __init__(self) -> None:
        self.completed_ns: list[int] = []
        self._free = 0.0

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        future: Any = torch.futures.Future()
        self._free = max(self._free, time.monotonic()) + LATE_S

        def complete() -> None:
            self.completed_ns.append(time.monotonic_ns())
            future.set_result(tensors)

        threading.Timer(self._free - time.monotonic(), complete).start()
        return tensors, c10d._create_work_from_future(future).boxed()


class LateDevice:
    """The same on a device with events: marks are moments of its queue, kept by its clock."""

    def __init__(self) -> None:
        self._free_ns = 0
        self.capturing = False
        self.asked = 0

    def about(self) -> dict[str, str]:
        self.asked += 1
        return {"id": "GPU-7", "model": "Late 100"}

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        self._free_ns = max(self._free_ns, time.monotonic_ns()) + int(LATE_S * 1e9)
        future: Any = torch.futures.Future()
        future.set_result(tensors)  # as on CUDA: its callbacks run when it is enqueued
        return tensors, c10d._create_work_from_future(future).boxed()

    def mark(self) -> Any:
        return None if self.capturing else max(self._free_ns, time.monotonic_ns())

    def reached(self, event: Any) -> bool:
        return bool(time.monotonic_ns() >= event)

    def elapsed_ns(self, earlier: Any, later: Any) -> int:
        return int(later - earlier)


def collect(reader: RingReader, done: int) -> np.ndarray:
    """Everything up to the `done`th completion, calls joined."""
    got: list[np.ndarray] = []

    def enough() -> bool:
        got.append(reader.read().records)
        return sum(int((part["kind"] == DONE).sum()) for part in got) >= done

    until(enough)
    return CallJoiner(hold_ns=0).update(np.concatenate(got), now_ns=time.monotonic_ns())


def test_enqueueing_is_never_taken_for_a_duration(
    late_group: None, watched: Callable[[], RingReader]
) -> None:
    with replaced("CPU", LateStream().allreduce):
        dist.all_reduce(torch.ones(1))  # makes the ring and the first thread
        reader = watched()
        assert len(records(reader)) == 1
        work = dist.all_reduce(torch.ones(4), async_op=True)
        hook.mark_step(0)
        (call,) = records(reader)
        assert call["call_ns"] < LATE_S * 1e9 / 2, "the fake group must return at once"
        joined = CallJoiner(hold_ns=0).update(np.array([call]), now_ns=time.monotonic_ns())
        assert joined["duration_ns"].tolist() == [-1]
        assert joined["end_ns"].tolist() == [0]
        work.wait()
    (wait,) = records(reader, WAIT)
    assert wait["size_bytes"] == call["seq"]
    assert wait["wait_ns"] > LATE_S * 1e9 / 4


def test_while_profiling_a_late_collective_has_its_true_duration(
    late_group: None, watched: Callable[[], RingReader]
) -> None:
    stream = LateStream()
    with replaced("CPU", stream.allreduce):
        dist.all_reduce(torch.ones(1))  # makes the ring
        reader = watched()
        assert len(records(reader)) == 1
        reader.set_profile(True)
        for _ in range(3):
            dist.all_reduce(torch.ones(4), async_op=True)  # nobody waits, as in DDP's reducer
        calls = collect(reader, done=3)
    assert calls["size_bytes"].tolist() == [16, 16, 16]
    assert np.median(calls["call_ns"]) < LATE_S * 1e9 / 2
    expected = np.array(stream.completed_ns[1:]) - calls["start_ns"]
    np.testing.assert_allclose(calls["duration_ns"], expected, atol=LATE_S * 1e9 / 2)
    assert (np.diff(calls["duration_ns"]) > LATE_S * 1e9 / 4).all(), "the queue is in them"


def test_on_a_device_with_events_the_queue_is_not_in_the_durations(
    folder: Path, late_group: None, mode: str
) -> None:
    device = LateDevice()
    hook.install(mode, device=device)
    with replaced("Meta", device.allreduce):  # a tensor that is not on the CPU
        dist.all_reduce(torch.ones(4, device="meta"))
        reader = RingReader(next(folder.glob("*.ring")))
        assert reader.device() == {}
        reader.set_profile(True)
        for _ in range(3):
            dist.all_reduce(torch.ones(4, device="meta"), async_op=True)
        assert reader.device() == {"id": "GPU-7", "model": "Late 100"}
        assert device.asked == 1
        device.capturing = True  # a CUDA graph: events would become part of it
        dist.all_reduce(torch.ones(4, device="meta"), async_op=True)
        calls = collect(reader, done=3)
    durations = calls["duration_ns"][calls["duration_ns"] >= 0]
    np.testing.assert_allclose(durations, [LATE_S * 1e9] * 3, rtol=0.1)
    assert np.median(calls["call_ns"]) < LATE_S * 1e9 / 2


def test_in_python_no_completion_is_asked_for_without_profiling(folder: Path, gloo: None) -> None:
    hook.install("dispatcher")
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert not len(records(RingReader(next(folder.glob("*.ring"))), DONE))
    assert "failslow" not in {thread.name for thread in threading.enumerate()}


def test_a_backend_without_futures_is_asked_by_a_thread_that_ends() -> None:
    class Work:
        finished = False

        def get_future(self) -> Any:
            raise RuntimeError("not implemented")

        def is_completed(self) -> bool:
            return self.finished

    done: list[tuple[Any, int, int]] = []
    completions = Completions(lambda *news: done.append(news), LateDevice())
    first, second = Work(), Work()
    for name, work in (("first", first), ("second", second)):
        completions.follow(name, work, None, on_cpu=True, polls=True)
    completions.follow("gloo", Work(), None, on_cpu=True, polls=False)
    second.finished = True
    until(lambda: len(done) == 1)
    first.finished = True
    until(lambda: len(done) == 2)
    assert [name for name, _, _ in done] == ["second", "first"]
    assert done[0][2] < done[1][2]
    completions.stop()
    assert "failslow" not in {thread.name for thread in threading.enumerate()}
