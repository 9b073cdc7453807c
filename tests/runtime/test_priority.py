"""Agent and controller start at the trainers' priority and go down once they are at work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tests.runtime.watched import WatchedJob, watched
from tests.transport.servers import until

WORK = 7
"""Not the lowest, so that the test need not wait for what everybody else leaves."""

QUICK_S = 6.0
"""A part that ends sooner than that after its start is started low."""


def priorities(pid: int) -> set[int]:
    """Of all its threads."""
    threads = os.listdir(f"/proc/{pid}/task")
    return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads}


def works_at(job: WatchedJob, part: str, nice: int) -> bool:
    return priorities(job.pid(part)) == {nice}


def started(job: WatchedJob, part: str) -> int | None:
    for lock in (job.folder / "rings").glob(f"*.run/{part}*.lock"):
        text = lock.read_text()
        return int(text) if text else None
    return None


def test_they_step_back_once_they_are_at_work_and_start_anew_as_at_first() -> None:
    with watched(world=1, environ={"FAILSLOW_RUNTIME_NICE": str(WORK)}) as job:
        until(lambda: started(job, "agent") and started(job, "controller"), 60.0)
        begun_s = time.monotonic()
        trainers = os.getpriority(os.PRIO_PROCESS, job.processes[0].pid)
        for part in ("agent", "controller"):
            assert priorities(job.pid(part)) == {trainers}
        job.until(job.steps)
        for part in ("agent", "controller"):
            job.until(partial(works_at, job, part, WORK))
        assert os.getpriority(os.PRIO_PROCESS, job.supervisor()) == trainers
        group = Path(f"/proc/{job.pid('agent')}/autogroup")
        if group.exists():
            job.until(lambda: group.read_text().split()[-1] == str(WORK))

        job.until(lambda: time.monotonic() - begun_s > QUICK_S)
        agent = job.pid("agent")
        os.kill(agent, 9)
        job.until(lambda: started(job, "agent") not in (None, agent))
        assert works_at(job, "agent", trainers)
        job.until(partial(works_at, job, "agent", WORK))
        job.stop()
        until(lambda: not job.ours(), 30.0)


_UP_AND_DOWN = """
import os
from failslow.runtime.supervise import StepBack
waited = [0.0]
step_back = StepBack(0.0, lambda: waited[0])
looks = [
    # now, more waited, at work, urgent
    (1, 0.0, 0, 0), (2, 0.0, 0, 1),   # not yet at work
    (40, 0.4, 1, 0), (41, 0.2, 1, 1), # a slow start says nothing; words come in time
    (42, 0.4, 1, 0), (43, 0.0, 0, 1), # late, but not urgent; then both
    (44, 0.0, 0, 0), (80, 0.0, 0, 0), # for a while
    (81, 0.0, 0, 1),                  # in time again
]
for now_s, more_s, at_work, urgent in looks:
    waited[0] += more_s
    step_back.look(now_s, at_work=bool(at_work), urgent=bool(urgent))
    print(os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority again")
def test_a_part_goes_up_again_where_its_words_would_come_late() -> None:
    environ = {**os.environ, "FAILSLOW_RUNTIME_NICE": str(WORK)}
    done = subprocess.run(
        [sys.executable, "-c", _UP_AND_DOWN],
        env=environ, capture_output=True, text=True, check=True, start_new_session=True,
    )  # fmt: skip
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    expected = [usual, usual, WORK, WORK, WORK, usual, usual, WORK, WORK]
    assert list(map(int, done.stdout.split())) == expected


_SPREAD = """
import os
from failslow.runtime.supervise import _spread
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
_spread(os.environ)
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize("wanted", ["", "LAST", "none", "9000"])
def test_the_monitoring_runs_on_the_cores_asked_for(wanted: str) -> None:
    every = sorted(os.sched_getaffinity(0))
    cores = wanted.replace("LAST", str(every[-1]))
    done = subprocess.run(
        [sys.executable, "-c", _SPREAD],
        env={**os.environ, "FAILSLOW_RUNTIME_CORES": cores}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    *said, got = done.stdout.splitlines()
    assert got == str(every[-1:] if wanted == "LAST" else every)
    if wanted in ("none", "9000"):
        assert said[0].startswith(f"failslow supervisor: FAILSLOW_RUNTIME_CORES={wanted} is passed")
    else:
        assert said == []
