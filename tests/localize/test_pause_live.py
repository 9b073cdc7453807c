"""Real jobs are paused, with real agents and a real bus; and parts of them killed meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.localize.paused import JOB, SCRIPT, Control, Told, advance
from tests.runtime.watched import WatchedJob, watched
from tests.transport.servers import redis_server, skip_without_redis

from failslow.capture import builder
from failslow.localize.script import ScriptSettings, WorkerPlace, reference_script

HOLD_S = 2.0
LONGEST_S = HOLD_S + 2.0 + 4.0
"""A hold, a script at its limit, and what a busy machine adds."""


@contextmanager
def training(
    scenario: str, mode: str = "native", *, work_ms: float = 20.0, bus: str = ""
) -> Iterator[WatchedJob]:
    """Four workers. mode: of capture; "" = not watched at all. bus: its address; "" the job's."""
    if mode == "native" and not builder.extension_path().exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    environ = {"PAUSE_SCENARIO": scenario, "PAUSE_STUB": "0.1"}
    environ |= {"FAILSLOW_CAPTURE_MODE": mode} if mode else {"FAILSLOW": "0", "PAUSE_STUB": ""}
    environ |= {"FAILSLOW_TRANSPORT": bus} if bus else {}
    with watched(world=4, work_ms=work_ms, script=JOB, environ=environ) as job:
        yield job


@functools.cache
def undisturbed(scenario: str, iterations: int = 200) -> Told:
    """The same training, not watched."""
    with training(scenario, "", work_ms=0.0) as job:
        advance(job, iterations, limit_s=100.0)
        job.stop()
        return Told(job)


def control_of(job: WatchedJob, bus: str = "") -> Control:
    """Once the agents know the pace of the calls."""
    control = Control(job, bus=bus, ready_timeout_s=HOLD_S, prepare_timeout_s=10.0)
    job.until(lambda: len(job.steps()) > 30)
    return control


def paused(scenario: str, mode: str) -> tuple[Told, WatchedJob, list[float]]:
    """Trained with three pauses, and one more with the real benchmarks; what the ranks say, and
    how long each of the three was."""
    lengths = []
    with training(scenario, mode) as job:
        control = control_of(job)
        first = job.steps()[-1].record.step
        for number in range(3):
            result = control.pause()
            assert result.ok, (result, control.said)
            assert result.missing == ()
            assert not result.errors
            assert {r: body[0]["rank"] for r, body in result.results.items()} == {
                0: 0, 1: 1, 2: 2, 3: 3
            }  # fmt: skip
            assert result.step is not None
            lengths.append(result.pause_s)
            advance(job, 20 + 20 * number)
        benchmarks_are_run(control)
        advance(job, 40)
        # every rank stood before the same call
        stood: dict[int, set[int]] = {}
        for body in control.heard("ready"):
            stood.setdefault(body["id"], set()).add(body["count"])
        assert [len(counts) for counts in stood.values()] == [1] * len(stood)
        control.close()
        steps = [e.record.step for e in job.steps() if e.record.step >= first]
        job.stop()
        told = Told(job)
        for rank in told.ranks:
            assert rank["status"]["mode"] == mode
            assert rank["status"]["faults"] == {}
            assert rank["scripts"] == 3
        # a pause loses no step, and no iteration looks long for it
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        return told, job, lengths


def benchmarks_are_run(control: Control) -> None:
    places = [WorkerPlace(rank=rank, node="n", device="cpu") for rank in range(4)]
    result = control.pause(reference_script(places, ScriptSettings(budget_s=1.5)))
    assert result.ok, (result, control.said)
    assert result.missing == ()
    measured = [one for body in result.results.values() for one in body]
    assert {one["do"] for one in measured} >= {"gemm", "p2p"}
    assert all(one["rank"] in range(4) for one in measured)
    assert result.pause_s < HOLD_S + control.config.pause_limit_s + 1.0


CASES = [
    ("ddp", "native"),
    *(
        pytest.param(scenario, mode, marks=pytest.mark.slow)
        for scenario, mode in [
            ("again", "dispatcher"),
            ("pipeline", "python"),
            ("ddp", "dispatcher"),
            ("ddp", "python"),
            ("again", "native"),
            ("again", "python"),
            ("pipeline", "native"),
            ("pipeline", "dispatcher"),
        ]
    ),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("scenario", "mode"), CASES)
def test_training_is_bit_identical_with_pauses_and_without(scenario: str, mode: str) -> None:
    told, _, lengths = paused(scenario, mode)
    assert max(lengths) < HOLD_S + 2.0
    plain = undisturbed(scenario)
    assert told.same_as(plain) >= 100


@pytest.mark.timeout(120)
def test_a_job_without_a_call_on_all_workers_is_not_paused() -> None:
    with training("apart") as job:
        control = Control(job)
        advance(job, 100)
        result = control.pause()
        assert not result.ok
        assert "no collective spans all 4 workers" in result.reason
        refused = Control(job, mode="observe")
        assert not refused.pause().ok
        assert refused.given == []
        refused.close()
        control.close()
        job.stop()
        assert [rank["scripts"] for rank in Told(job).ranks] == [0] * 4


class Harm:
    """What is done to a job's parts; `undo` before its end."""

    def __init__(self, job: WatchedJob) -> None:
        self.job = job
        self.stopped: list[int] = []

    def do(self, part: str, what: signal.Signals) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is just coming up again
            pid = self.job.pid(part)
            os.kill(pid, what)
            if what == signal.SIGSTOP:
                self.stopped.append(pid)

    def undo(self) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()


def try_pause(control: Control, harm: Harm, part: str, what: signal.Signals, after: str) -> None:
    """Harm a part as soon as this word was heard; training goes on although nobody helps."""
    heard = len(control.heard(after)) if after else 0
    control.begin()
    deadline_s = time.monotonic() + 10.0
    while after and control.lead.active and len(control.heard(after)) == heard:
        if time.monotonic() > deadline_s:
            break
        control.turn()
    harm.do(part, what)
    advance(control.job, 60)  # the lead gives no more orders: it is as good as dead
    harm.undo()


def pauses_again(job: WatchedJob, bus: str = "") -> None:
    """Whatever was, a pause works in the end; with a new controller's lead."""
    control = control_of(job, bus)
    deadline_s = time.monotonic() + 60.0
    while True:
        result = control.pause()
        if result.ok and not result.missing:
            break
        assert time.monotonic() < deadline_s, (result, job.story())
        advance(job, 20)
    control.close()


@pytest.mark.timeout(240)
def test_parts_are_killed_or_stopped_in_a_pause_and_training_goes_on() -> None:
    with training("ddp") as job:
        harm = Harm(job)
        for part, what, after in (
            ("agent", signal.SIGSTOP, "armed"),
            ("agent", signal.SIGKILL, "ready"),
            ("controller", signal.SIGKILL, "armed"),
        ):
            control = control_of(job)
            control.pause()
            try_pause(control, harm, part, what, after)
            control.close()
        pauses_again(job)
        job.stop()
        told = Told(job)
        assert told.longest_s() < LONGEST_S
        assert all(rank["status"]["faults"] == {} for rank in told.ranks)
    assert told.same_as(undisturbed("ddp")) >= 200


def _heard_more(control: Control, word: str, count: int) -> bool:
    return len(control.heard(word)) > count


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bus_is_killed_in_a_pause_and_training_goes_on(tmp_path: Path) -> None:
    """Else it is the controller's own, and dies with it."""
    skip_without_redis()
    server = redis_server(tmp_path)
    try:
        with training("ddp", bus=server.url) as job:
            for after in ("armed", "ready"):
                control = control_of(job, server.url)
                control.pause()
                heard = len(control.heard(after))
                control.begin()
                control.until(functools.partial(_heard_more, control, after, heard))
                server.kill()
                advance(job, 60)
                server.restart()
                control.close()
                pauses_again(job, server.url)
            job.stop()
            told = Told(job)
            assert told.longest_s() < LONGEST_S
            assert all(rank["status"]["faults"] == {} for rank in told.ranks)
        assert told.same_as(undisturbed("ddp")) >= 200
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(3))
def test_parts_die_at_random_moments_of_pauses(seed: int) -> None:
    rng = random.Random(seed)
    scenario, mode = [("ddp", "native"), ("pipeline", "dispatcher"), ("again", "python")][seed]
    with training(scenario, mode) as job:
        harm = Harm(job)
        for _ in range(12):
            control = control_of(job)
            control.begin([{**SCRIPT[0], "limit_s": rng.choice([0.05, 1.0])}])
            end_s = time.monotonic() + rng.uniform(0.0, 2.5)
            while time.monotonic() < end_s:
                control.turn()
            part, what = rng.choice(["agent", "controller"]), rng.choice(["SIGKILL", "SIGSTOP"])
            harm.do(part, signal.Signals[what])
            end_s = time.monotonic() + rng.uniform(0.0, 3.0)
            while time.monotonic() < end_s:
                control.turn()
            advance(job, 40)
            harm.undo()
            control.close()
        pauses_again(job)
        job.stop()
        told = Told(job)
        assert told.longest_s() < LONGEST_S
        assert all(rank["status"]["faults"] == {} for rank in told.ranks)
    assert told.same_as(undisturbed(scenario, 600)) >= 600
