"""Kill -9 of every part of the monitoring of a real job: training goes on, and so does watching."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from statistics import median

import psutil
import pytest
from tests.runtime.watched import WatchedJob, watched
from tests.transport.servers import (
    free_port,
    listening_addresses,
    redis_server,
    skip_without_redis,
    until,
)

SETTINGS = {"FAILSLOW_RUNTIME_BLIND_AFTER_S": "3", "FAILSLOW_RUNTIME_POLL_S": "0.05"}


def advance(job: WatchedJob, by: int, workers: int) -> None:
    """Wait until `by` more iterations are journaled that all workers reported."""
    before = len(job.steps())
    job.until(
        lambda: sum(e.tags["workers"] == workers for e in job.steps()[before:]) >= by,
    )


def training_was_unaffected(job: WatchedJob, work_s: float) -> None:
    """Every iteration of the script's own record took its ordinary time."""
    for ends in job.own_ends():
        durations_s = [later - sooner for sooner, later in pairwise(ends)][5:]
        assert median(durations_s) < 2.0 * work_s
        assert max(durations_s) < 20.0 * work_s


def losses_of(job: WatchedJob) -> list[list[str]]:
    """Each rank's losses, one an iteration, bit for bit."""
    return [json.loads(path.read_text()) for path in sorted(job.folder.glob("losses*.json"))]


def losses_unwatched(iterations: int) -> list[list[str]]:
    """Those of the same job without failslow."""
    environ = {"FAILSLOW": "0", "TRAIN_ITERATIONS": str(iterations)}
    with watched(world=2, work_ms=1.0, environ=environ) as job:
        until(lambda: all(p.poll() is not None for p in job.processes), 100.0)
        return losses_of(job)


def restarts(job: WatchedJob) -> int:
    return sum("was restarted" in h["message"] for h in job.health("agent"))


@pytest.mark.timeout(300)
def test_the_parts_are_killed_and_come_back_or_are_missed() -> None:
    with watched(world=2, environ=SETTINGS) as job:
        advance(job, 30, workers=2)
        agent, controller, supervisor = job.pid("agent"), job.pid("controller"), job.supervisor()
        assert listening_addresses(controller) == {"127.0.0.1"}
        assert listening_addresses(agent) == set()
        for process in job.processes:
            assert listening_addresses(process.pid) <= {"127.0.0.1", "::ffff:127.0.0.1", "::"}

        os.kill(agent, signal.SIGKILL)
        job.until(lambda: restarts(job) == 1)
        advance(job, 20, workers=2)

        os.kill(controller, signal.SIGKILL)
        job.until(lambda: job.health("controller", event="resumed"))
        advance(job, 20, workers=2)
        steps = [e.record.step for e in job.steps()]
        assert steps == sorted(set(steps))

        # the worker itself will start them again; until then it must be said
        os.kill(supervisor, signal.SIGKILL)
        os.kill(job.pid("agent"), signal.SIGKILL)
        job.until(lambda: job.health("agent", ok=False))
        assert "is blind since" in job.health("agent", ok=False)[-1]["message"]
        job.until(lambda: restarts(job) == 2, 120.0)
        assert job.supervisor() != supervisor
        advance(job, 20, workers=2)
        assert not {"onset", "level"} & set(job.events())
        job.stop()
        training_was_unaffected(job, 0.06)
        until(lambda: not job.ours(), 20.0)
        assert job.health("controller")[-1]["event"] == "ended"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_supervisor_and_controller_are_killed_beside_an_agent_and_come_back() -> None:
    with watched(world=2, environ=SETTINGS) as job:
        advance(job, 30, workers=2)
        supervisor = job.supervisor()
        os.kill(supervisor, signal.SIGKILL)
        os.kill(job.pid("controller"), signal.SIGKILL)
        job.until(lambda: job.health("controller", event="resumed"), 120.0)
        assert job.supervisor() != supervisor, "init has adopted the agent"
        advance(job, 20, workers=2)
        job.stop()
        training_was_unaffected(job, 0.06)
        until(lambda: not job.ours(), 20.0)


@pytest.mark.timeout(300)
def test_a_killed_message_bus_is_missed_and_found_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    skip_without_redis()
    server = redis_server(tmp_path_factory.mktemp("redis"))
    try:
        with watched(world=2, environ={**SETTINGS, "FAILSLOW_TRANSPORT": server.url}) as job:
            advance(job, 20, workers=2)
            assert listening_addresses(job.pid("controller")) == set()
            server.kill()
            job.until(lambda: job.health("bus", ok=False))
            assert all(psutil.pid_exists(p.pid) for p in job.processes)
            server.restart()
            job.until(lambda: job.health("bus", ok=True))
            advance(job, 20, workers=2)
            os.kill(job.pid("controller"), signal.SIGKILL)
            job.until(lambda: job.health("controller", event="resumed"))
            advance(job, 20, workers=2)
            job.stop()
            training_was_unaffected(job, 0.06)
            losses = losses_of(job)
            until(lambda: not job.ours(), 20.0)
        assert losses_unwatched(len(losses[0])) == losses
        assert len({*losses[0]}) > 50, "they change, so that they tell something"
        assert not {"onset", "level"} & set(job.events())
    finally:
        server.close()


@pytest.mark.slow
def test_an_agent_nobody_hears_says_so_in_a_journal_of_its_own() -> None:
    nowhere = f"tcpstore://192.0.2.1:{free_port()}"  # not of this machine: nobody can serve there
    with watched(world=1, environ={**SETTINGS, "FAILSLOW_TRANSPORT": nowhere}) as job:
        job.until(lambda: job.health("controller", ok=False))
        assert "cannot listen there" in job.health("controller", ok=False)[0]["message"]
        job.until(lambda: any((job.folder / "run").glob("agent-*.jsonl")))
        (file,) = (job.folder / "run").glob("agent-*.jsonl")
        assert "reports to nobody" in file.read_text()
        job.stop()
        training_was_unaffected(job, 0.06)
        until(lambda: not job.ours(), 30.0)
