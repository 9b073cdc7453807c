"""The agent's telemetry duty: samples by itself, answers with a window that fits a message."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tests.telemetry.fake_nvml import FakeGpu, FakeNvml
from tests.transport.servers import until

from failslow.pipeline import Order, Report
from failslow.runtime.duty_telemetry import TelemetryDuty
from failslow.runtime.transport.base import MAX_MESSAGE_BYTES
from failslow.runtime.wire import decode, encode_report
from failslow.telemetry.collect import Collector


def _worker(
    rank: int, pid: int, *, ended: bool = False, ahead_s: float = 0.0, gpu: str = ""
) -> Any:
    """ahead_s: of its clock, by which its iterations are timed."""
    epoch_s = time.time() - time.monotonic() + ahead_s
    device = {"id": gpu, "model": "NVIDIA H200"} if gpu else {}
    told = {"rank": rank, "pid": pid, "ended": ended, "description": {"device": device}}
    return SimpleNamespace(**told, to_epoch_s=lambda monotonic_ns: epoch_s + monotonic_ns / 1e9)


class Scripted:
    """A sampler that gives what it is told."""

    def __init__(self, give: Callable[[float], Mapping[str, float]], missing: str = "") -> None:
        self._give = give
        self.missing: tuple[str, ...] = (missing,) if missing else ()

    def sample(self, now_s: float) -> Mapping[str, float]:
        return self._give(now_s)


def test_a_workers_gpu_is_known_though_nvml_sees_no_process_of_this_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml(FakeGpu(id="GPU-0"), FakeGpu(id="GPU-1", pids=(99_001,)))
    monkeypatch.setattr("failslow.telemetry.nvml.import_module", lambda _: nvml)
    duty = TelemetryDuty(node="n1", job="j", interval_s=0.05)
    workers = [_worker(3, os.getpid(), gpu="GPU-1"), _worker(4, os.getpid())]

    def gpus() -> list[list[int]]:
        duty.order(Order(topic="telemetry", body={"last_s": 60.0}), time.monotonic())
        (report,) = duty.turn(workers, time.monotonic())
        time.sleep(0.01)
        return [gpu["ranks"] for gpu in report.body["gpus"].values()]

    try:
        until(lambda: gpus() == [[], [3]])
    finally:
        duty.close()


def test_a_real_process_is_sampled_and_reported() -> None:
    said: list[str] = []
    duty = TelemetryDuty(node="n1", job="j", say=said.append, interval_s=0.1)
    workers = [_worker(3, os.getpid(), ahead_s=120.0), _worker(4, 1, ended=True)]
    begin_s = time.monotonic()
    try:
        deadline_s = time.monotonic() + 30
        while len(duty.collector.window().t) < 6:
            assert list(duty.turn(workers, time.monotonic())) == []
            assert time.monotonic() < deadline_s
            sum(range(200_000))  # something to see...
            time.sleep(0.01)  # ...and room for the duty's thread, which needs the interpreter too
        asked_s = time.monotonic()
        duty.order(Order(topic="telemetry", body={"last_s": asked_s - begin_s}), asked_s)
        (report,) = duty.turn(workers, time.monotonic())
        assert list(duty.turn(workers, time.monotonic())) == []
    finally:
        duty.close()

    assert (report.node, report.rank, report.topic) == ("n1", None, "telemetry")
    assert decode(encode_report(report)) == [report]
    body = report.body
    assert body["interval_s"] == 0.1
    # by the clock of its workers, two minutes ahead of this test's
    begin_t = time.time() + 120.0 - (time.monotonic() - begin_s)
    assert body["since_t"] == pytest.approx(begin_t, abs=0.5)
    assert body["until_t"] - body["since_t"] == pytest.approx(asked_s - begin_s)
    assert all(body["since_t"] <= t <= body["until_t"] for t in body["t"])
    assert list(body["ranks"]) == ["3"]
    mine = body["ranks"]["3"]
    for part in (body, mine):
        assert all(len(x) == len(body["t"]) for x in part["series"].values())
    cores = mine["series"]["cpu_cores"]
    assert cores[0] is None  # a rate needs two readings
    assert max(c for c in cores if c is not None) > 0.05
    assert {"cpu/busy_share", "cpu/neighbour_cores"} <= {*body["series"], *body["steady"]}
    assert mine["steady"].get("stopped_share") == 0.0
    assert len(said) == len(set(said))
    assert set(said) <= set(body["missing"])


def test_a_window_is_what_was_asked_for() -> None:
    collector = Collector([Scripted(lambda now_s: {"x": now_s, "one": 1.0})], keep=600)
    for second in range(300):
        collector.take(float(second), t=1000.0 + second)
    body = collector.report(since_t=1100.0, until_t=1199.0, interval_s=1.0)
    assert body["t"] == [1000.0 + s for s in range(100, 200)]
    assert body["series"] == {"x": [float(s) for s in range(100, 200)]}
    assert body["steady"] == {"one": 1.0}
    whole = collector.report(since_t=None, until_t=None, interval_s=1.0)
    assert len(whole["t"]) == 120
    assert whole["series"]["x"][0] == 1.5  # of the first four
    assert whole["series"]["x"][60:] == [float(s) for s in range(240, 300)]


def test_ranks_stand_apart() -> None:
    collector = Collector([Scripted(lambda s: {"rank/12/a/b": s, "rank/2/a": 7.0})], keep=9)
    collector.take(0.0, t=0.0)
    collector.take(1.0, t=1.0)
    body = collector.report(since_t=None, until_t=None, interval_s=1.0)
    assert body["ranks"] == {
        "12": {"series": {"a/b": [0.0, 1.0]}, "steady": {}},
        "2": {"series": {}, "steady": {"a": 7.0}},
    }


@pytest.mark.parametrize("count", [1500, 4000])
def test_a_report_of_thousands_of_series_fits_a_message(count: int) -> None:
    names = ["rank/3/cpu_cores", *(f"rdma/mlx5_{i}:1/some_per_s" for i in range(count - 1))]

    def give(now_s: float) -> dict[str, float]:
        return {name: (now_s + i) / 7 for i, name in enumerate(names)}

    collector = Collector([Scripted(give)], keep=60)
    for second in range(60):
        collector.take(float(second), t=1.7e9 + second)
    body = collector.report(since_t=None, until_t=None, interval_s=1.0)
    assert len(encode_report(Report(node="n", topic="telemetry", body=body))) < MAX_MESSAGE_BYTES
    assert len(body["t"]) >= 8
    assert "cpu_cores" in body["ranks"]["3"]["series"]
    left_out = count - 1 - len(body["series"])
    assert [t for t in body["missing"] if "left out" in t] == (
        [f"{left_out} series, left out of a report too long"] if left_out else []
    )
    assert (left_out > 0) == (count == 4000)


def test_a_sampler_that_fails_is_left_out_and_said() -> None:
    def fail(now_s: float) -> Mapping[str, float]:
        raise RuntimeError("bug")

    collector = Collector([Scripted(fail), Scripted(lambda s: {"x": s})], keep=5)
    collector.take(0.0, t=0.0)
    collector.take(1.0, t=1.0)
    assert collector.missing == ("Scripted failed and is left out: RuntimeError('bug')",)
    assert list(collector.window().series["x"]) == [0.0, 1.0]


def test_a_sampler_that_hangs_holds_no_turn_up() -> None:
    may_end, asked = threading.Event(), threading.Event()

    def hang(now_s: float) -> Mapping[str, float]:
        asked.set()
        may_end.wait(30)
        return {}

    duty = TelemetryDuty(node="n", samplers=lambda _: [Scripted(hang, "no such thing")])
    said: list[str] = []
    duty._say = said.append
    workers = [_worker(0, os.getpid())]
    assert list(duty.turn(workers, 0.0)) == []
    assert asked.wait(30)
    duty.order(Order(topic="telemetry", body={}), 0.0)
    (report,) = duty.turn(workers, 100.0)
    assert report.body["t"] == []
    assert said == ["no such thing"]
    may_end.set()
    duty.close()
    assert duty._thread is not None
    assert not duty._thread.is_alive()


def test_without_workers_nothing_is_sampled() -> None:
    duty = TelemetryDuty(node="n", samplers=lambda _: [Scripted(lambda s: {"x": s})])
    assert list(duty.turn([], 0.0)) == []
    assert duty._thread is None
    duty.order(Order(topic="telemetry", body={"last_s": "rubbish"}), 0.0)
    (report,) = duty.turn([], 0.0)
    assert json.loads(json.dumps(report.body))["t"] == []
    duty.close()


def test_an_interval_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interval_s \(0\) must be from 0.05 to 60"):
        TelemetryDuty(node="n", interval_s=0)
