"""A worker is killed and torchrun starts all of them again: the watching goes on in one journal."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tests.runtime.watched import TRAIN, WatchedJob, watched
from tests.transport.servers import free_port, until

FIRST = (
    ["sh", "-c", 'echo -15 > /proc/self/autogroup; exec "$@"', "sh"] if os.geteuid() == 0 else []
)
"""torchrun gives each worker a session, which must not wait for what else the machine does."""


def workers(job: WatchedJob) -> dict[int, int]:
    """{rank: pid} of those whose rings are there."""
    found = {}
    for path in (job.folder / "rings").glob("*.ring"):
        match = re.search(r"-r(\d+)-p(\d+)\.ring", path.name)
        if match and Path(f"/proc/{match[2]}").exists():
            found[int(match[1])] = int(match[2])
    return found


def started_anew(job: WatchedJob, first: dict[int, int]) -> bool:
    now = workers(job)
    return now.keys() == first.keys() and not {*now.values()} & {*first.values()}


@pytest.mark.slow  # test_restart_torchrun.py is the short one
@pytest.mark.timeout(400)
def test_restarted_workers_are_watched_on_in_the_same_journal() -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [
        # workers started anew in the launcher's store may meet the addresses of those before them,
        # watched or not ("Connection refused", torch 2.13 with gloo): they get a store of their own
        "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        torchrun, "--max-restarts", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"localhost:{free_port()}", "--no-python", *FIRST, sys.executable,
        str(TRAIN),
    ]  # fmt: skip
    with watched(world=2, command=command) as job:
        job.until(lambda: len(job.steps()) >= 20, 150.0)
        first = workers(job)
        assert sorted(first) == [0, 1]
        killed_t = time.time()
        os.kill(first[1], signal.SIGKILL)
        job.until(partial(started_anew, job, first), 100.0)
        known, restarted = len(job.steps()), workers(job)
        job.until(lambda: sum(e.tags["workers"] == 2 for e in job.steps()[known:]) >= 20, 150.0)

        assert workers(job) == restarted, "torchrun restarts once"
        assert list((job.folder / "run").glob("*journal*")) == [job.journal_path]
        steps = [e.record.step for e in job.steps()]
        assert steps == sorted(set(steps)), "one story, no iteration told twice"
        first_after = job.steps()[known]
        outage_s = first_after.t - killed_t
        assert first_after.record.duration_s < 0.5 * outage_s, "the outage is in no iteration"
        assert {e.rank for e in job.entries("step")} == {None, 0, 1}
        job.stop()
        until(lambda: not job.ours(), 30.0)
        assert not list((job.folder / "rings").iterdir())
        assert job.health("controller")[-1]["event"] == "ended"
