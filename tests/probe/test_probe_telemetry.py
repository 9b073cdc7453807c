"""Telemetry that nobody asked for goes into the journal, and into no verdict."""

import itertools
import os
import time
from typing import Any, ClassVar

from failslow.capture.ring import process_start_ticks
from failslow.pipeline import Pipeline, Report, Write
from failslow.runtime.duties import WatchedWorker
from failslow.runtime.duty_telemetry import TelemetryDuty
from failslow.runtime.wire import decode, encode_report


class Worker:
    """What a duty sees of one, this very process."""

    rank, pid, ended, mailbox, profiler = 0, os.getpid(), False, None, None
    worker = f"{os.getpid()}-{process_start_ticks(os.getpid())}"
    epoch_s = time.time() - time.monotonic()
    description: ClassVar[dict[str, Any]] = {}

    def to_epoch_s(self, monotonic_ns: float) -> float:
        return self.epoch_s + monotonic_ns / 1e9


class Gone(Worker):
    ended = True


class Ticking:
    missing: tuple[str, ...] = ()

    def sample(self, now_s: float) -> dict[str, float]:
        return {"gpu/0/temperature_c": now_s}


def test_what_was_sampled_comes_unasked_and_without_gaps() -> None:
    duty = TelemetryDuty(node="n", interval_s=0.05, record_s=0.4, samplers=lambda _: [Ticking()])
    worker: WatchedWorker = Worker()  # type: ignore[assignment]  # the little that is looked at
    found: list[Report] = []
    deadline_s = time.monotonic() + 30
    try:
        while len(found) < 3:
            assert time.monotonic() < deadline_s
            found += duty.turn([worker], time.monotonic())
            time.sleep(0.01)
    finally:
        duty.close()
    for before, after in itertools.pairwise(found):
        assert before.body["until_t"] == after.body["since_t"]
    times = [t for report in found for t in report.body["t"]]
    assert len(times) == len(set(times)) > 8
    assert decode(encode_report(found[0])) == [found[0]]


def test_the_last_samples_come_once_the_workers_have_ended() -> None:
    """In time: soon nobody listens any more."""
    duty = TelemetryDuty(node="n", interval_s=0.05, record_s=60.0, samplers=lambda _: [Ticking()])
    worker: WatchedWorker = Worker()  # type: ignore[assignment]  # the little that is looked at
    try:
        deadline_s = time.monotonic() + 30
        while len(duty.collector.window().t) < 3:
            assert time.monotonic() < deadline_s
            assert list(duty.turn([worker], time.monotonic())) == []
            time.sleep(0.01)
        gone: WatchedWorker = Gone()  # type: ignore[assignment]
        (last,) = duty.turn([gone], time.monotonic())
        assert (last.body["why"], len(last.body["t"]) >= 3) == ("record", True)
        assert list(duty.turn([gone], time.monotonic())) == []
        assert list(duty.turn([], time.monotonic())) == []
    finally:
        duty.close()


def test_the_pipeline_writes_it_down_and_does_no_more() -> None:
    pipeline = Pipeline(launch="1-1")
    body = {"why": "record", "t": [1.0], "series": {"cpu/busy_share": [0.5]}}
    (written,) = pipeline.handle(Report(node="n1", topic="telemetry", body=body), 5.0)
    about = {"ahead_s": None, "node": "n1"}  # nobody knows its clock yet
    assert written == Write(kind="telemetry", record=body | about, t=5.0)
    assert pipeline.handle(Report(node="n1", topic="telemetry", body={"t": []}), 5.0) == []
