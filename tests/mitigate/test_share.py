"""What a micro-batch takes, on CPUs and on a device that works behind this process's back.

The device is a made-up one: `_DeviceTimes` was NOT RUN ON GPUS by these tests.
"""

from __future__ import annotations

import time
from collections import deque

import pytest
import torch

import failslow
from failslow.mitigate.share import Share
from failslow.mitigate.steer import Steering


class Device:
    """Does its work one after the other, long after it was handed over."""

    def __init__(self) -> None:
        self.queued_ms = self.done_ms = 0.0
        self.capturing = False

    def work(self, ms: float) -> None:
        self.queued_ms += ms

    def catch_up(self) -> None:
        self.done_ms = self.queued_ms

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ms = device, -1.0

    def record(self) -> None:
        self.at_ms = self.device.queued_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.done_ms

    def elapsed_time(self, other: Event) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("device not ready")
        return other.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


def _share(count: int = 4) -> Share:
    return Share(0, range(3, 3 + count), size=16, replicas=4, scale=1.0, switch=None)


def _train(device: Device, share: Share, *, each_ms: float = 20.0, last_ms: float = 500.0) -> None:
    """The last one exchanges gradients."""
    for index in share:
        device.work(last_ms if index == share.indices[-1] else each_ms)


def test_on_a_cpu_it_is_this_processs_time() -> None:
    share = _share()
    for index in share:
        time.sleep(0.2 if index == share.indices[-1] else 0.01)
    assert share.microbatch_s == pytest.approx(0.01, rel=0.5)


def test_on_a_device_it_is_the_devices_time_once_it_has_come_so_far(device: Device) -> None:
    device.work(1000.0)  # of the step before
    share = _share()
    _train(device, share)
    assert share.microbatch_s is None  # it is not waited for
    device.catch_up()
    assert share.microbatch_s == pytest.approx(0.020)


def test_what_cannot_be_timed_is_not_told(device: Device) -> None:
    one = _share(1)
    _train(device, one)
    taken = _share()  # its indices, to a pipeline's schedule
    assert len(taken.indices) == 4
    left = _share()
    for index in left:
        device.work(20.0)
        if index == left.indices[1]:
            break
    device.capturing = True
    captured = _share()
    _train(device, captured)
    device.catch_up()
    assert [s.microbatch_s for s in (one, taken, left, captured)] == [None] * 4


def test_a_loop_that_only_takes_its_micro_batches_tells_no_pace() -> None:
    taken = _share()
    rows = list(taken)  # read for a pipeline, which then runs them
    time.sleep(0.05)
    taken.ended_s = time.monotonic()
    run = _share()
    for _ in run:
        time.sleep(0.01)
    run.ended_s = time.monotonic()
    assert rows == [3, 4, 5, 6]
    assert taken.microbatch_s is None
    assert run.microbatch_s is not None


def test_a_device_that_fails_costs_a_pace_and_no_step(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**_: object) -> Event:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "Event", failing)
    share = _share()
    _train(device, share)
    device.catch_up()
    assert share.microbatch_s is None


def test_a_step_is_asked_for_after_the_next_one(device: Device) -> None:
    steering = Steering.__new__(Steering)  # no group: only its ears
    steering._behind = None
    steering._paces = paces = deque[float]()
    for each_ms in (20.0, 30.0, 40.0):
        share = _share()
        _train(device, share, each_ms=each_ms)
        steering.ended(share)
        assert share.microbatch_s is None
        device.catch_up()
    assert list(paces) == pytest.approx([0.020, 0.030])


def test_gradients_are_exchanged_in_the_last_one_whoever_keeps_the_time(device: Device) -> None:
    switched: list[bool] = []
    share = Share(0, range(2), size=2, replicas=1, scale=1.0, switch=switched.append)
    _train(device, share)
    assert switched == [False, True, True]


def test_a_loop_that_leaves_before_gradients_are_exchanged_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each replica would go on by its own gradients, and nobody would know."""
    coordinator = failslow.Coordinator(4)
    for switch, last in ((None, 1), (lambda _: None, 3), (lambda _: None, 1)):
        coordinator._switch = switch
        for step in range(2):
            with coordinator.step(step) as share:
                for index in share:
                    if index == last:
                        break
        told = capsys.readouterr().err
        assert told.count("before the last of its 4 micro-batches") == (
            switch is not None and last < 3
        )
