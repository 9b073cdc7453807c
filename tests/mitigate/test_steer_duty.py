"""Orders reach the training loop's Coordinator, and its answers the controller."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from job_launch import launch

from failslow.capture.ring import find_rings
from failslow.config import TrackConfig
from failslow.mailbox import Mailbox, mail_path
from failslow.pipeline import Order, Report
from failslow.records import Plan
from failslow.runtime.duties import WatchedWorker
from failslow.runtime.duty_steer import SteerDuty
from failslow.runtime.node import NodeWatch

_DDP = Path(__file__).parents[2] / "examples" / "ddp" / "train.py"


def _order(number: int, *counts: int) -> Order:
    plan = Plan(level="S2", predicted_slowdown=1.2, microbatches=counts)
    body = {"id": number, "level": "S2", "episode": "e1", "plan": asdict(plan)}
    return Order(topic="steer", body=body)


class _Worker:
    """A worker with a real mailbox and nothing else."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.worker, self.ended = rank, f"{100 + rank}-1", False
        ring = folder / f"r{rank}.ring"
        self.own = Mailbox.create(ring)
        self.mailbox = Mailbox.open(mail_path(ring))


@pytest.fixture
def worker(tmp_path: Path) -> Callable[[int], Any]:
    return lambda rank: _Worker(tmp_path, rank)


def _turn(duty: SteerDuty, worker: _Worker, now_s: float) -> list[Report]:
    """A turn of the agent's loop."""
    watched = cast(WatchedWorker, worker)
    for letter in worker.mailbox.receive():
        duty.letter(watched, letter, now_s)
    return list(duty.turn([watched], now_s))


def test_an_order_waits_for_the_coordinator_and_is_delivered_once(
    worker: Callable[[int], _Worker],
) -> None:
    duty, first = SteerDuty("gpu-1"), worker(0)
    duty.order(_order(7, 9, 5), 0.0)
    assert _turn(duty, first, 1.0) == []
    assert first.own.receive("steer") == []
    first.own.send({"topic": "steer", "what": "facts", "pp": 1, "dp": 2})
    (facts,) = _turn(duty, first, 2.0)
    assert (facts.node, facts.rank, facts.topic) == ("gpu-1", 0, "steer")
    assert facts.body == {"what": "facts", "pp": 1, "dp": 2}
    (letter,) = first.own.receive("steer")
    assert letter == {"topic": "steer", **_order(7, 9, 5).body, "plan": letter["plan"]}
    assert letter["plan"]["microbatches"] == [9, 5]
    assert _turn(duty, first, 3.0) == []
    assert first.own.receive("steer") == []


def test_an_order_nobody_can_take_is_answered_by_rank_0s_agent_alone(
    worker: Callable[[int], _Worker],
) -> None:
    for rank, answers in ((0, 1), (3, 0)):
        duty, one = SteerDuty("gpu-1"), worker(rank)
        duty.order(_order(7, 9, 5), 0.0)
        assert _turn(duty, one, 44.0) == []
        reports = _turn(duty, one, 46.0)
        assert len(reports) == answers
        for report in reports:
            assert {"what": "outcome", "id": 7, "ok": False, "level": "S2"}.items() <= (
                report.body.items()
            )
            assert "no failslow.Coordinator" in report.body["error"]
        assert _turn(duty, one, 99.0) == []


@pytest.mark.timeout(200)
def test_a_real_loop_takes_an_order_and_answers() -> None:
    """examples/ddp as it is, watched by the duty in this process."""
    steps = 60_000  # ended below
    with launch([str(_DDP), "--steps", str(steps), "--micro-batches", "8"], world=2) as job:
        environ = {"FAILSLOW_CAPTURE_FOLDER": str(job.folder / "rings")}
        find = lambda: find_rings(None, environ)  # noqa: E731
        watch = NodeWatch(node="here", session=1, find=find, config=TrackConfig(), say=print)
        duty, reports = SteerDuty("here"), list[Report]()

        def until(condition: Callable[[], object], limit_s: float) -> None:
            end_s = time.monotonic() + limit_s
            while not condition():
                assert time.monotonic() < end_s, job.output(0)
                now_s = time.monotonic()
                watch.discover()
                watch.read()
                for worker in watch.workers:
                    for letter in worker.mailbox.receive() if worker.mailbox else ():
                        duty.letter(worker, letter, now_s)
                reports.extend(duty.turn(watch.workers, now_s))
                time.sleep(0.05)

        def said(what: str) -> list[Report]:
            return [report for report in reports if report.body["what"] == what]

        duty.order(_order(3, 6, 2), time.monotonic())
        until(lambda: said("outcome"), 90.0)
        (outcome,) = said("outcome")
        assert outcome.body["id"] == 3
        assert outcome.body["ok"]
        assert outcome.body["episode"] == "e1"
        assert 0.0 < outcome.body["cost_s"] < 5.0
        assert outcome.rank == 0
        assert said("facts")[0].body["microbatches"] == 8
        until(lambda: "(6, 2)" in job.output(0), 30.0)
        until(lambda: {report.rank for report in said("pace")} == {0, 1}, 30.0)
        pace = said("pace")[-1].body
        assert 0.0 < pace["microbatch_s"] < 1.0
        losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", job.output(0))]
        assert losses[-1] < losses[0]
