"""A real job of `profile_job.py` on this machine, watched by a `ProfileDuty` in this process.

with profiled("dp", world=4) as job:
    healthy = job.profiles("healthy")
    with throttle(job.pids[2], to=0.5, method="signal"):
        slow = job.order("suspicion")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.runtime.watched import clean_environ
from tests.transport.servers import free_port

from failslow.capture.ring import find_rings
from failslow.config import TrackConfig
from failslow.pipeline import Order, Report
from failslow.profile_wire import read_profile_body
from failslow.records import RankProfile
from failslow.runtime.duty_profile import ProfileDuty
from failslow.runtime.node import NodeWatch

__all__ = ["Profiled", "profiled"]

_JOB = Path(__file__).with_name("profile_job.py")
_ROOT = os.geteuid() == 0
_FIRST = (
    ["sh", "-c", 'echo -15 > /proc/self/autogroup; exec nice -n -15 "$@"', "sh"] if _ROOT else []
)
"""What the machine does besides is not to be taken for a fault."""


class Profiled:
    """The job, and what its duty reported."""

    def __init__(self, world: int, folder: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.world, self.folder, self.ranks = world, folder, ranks
        self.duty = ProfileDuty(node="here")
        self.reports: list[Report] = []
        environ = {"FAILSLOW_CAPTURE_FOLDER": str(folder)}
        self._watch = NodeWatch(
            node="here",
            session=1,
            find=partial(find_rings, None, environ),
            config=TrackConfig(),
            say=print,
        )

    @property
    def pids(self) -> dict[int, int]:
        """Of each rank."""
        return {worker.rank: worker.pid for worker in self._watch.workers}

    def profiles(self, why: str, limit_s: float = 60.0) -> list[RankProfile]:
        """Wait for those of all ranks, and take them."""

        def found() -> list[Report]:
            return [report for report in self.reports if report.body["why"] == why]

        self._until(lambda: len(found()) == self.world, limit_s)
        bodies = [json.loads(json.dumps(report.body)) for report in found()]
        self.reports = []
        return sorted((read_profile_body(body) for body in bodies), key=lambda p: p.rank)

    def order(self, why: str, for_s: float = 2.0) -> list[RankProfile]:
        """Order profiles and wait for them."""
        body = {"why": why, "for_s": for_s, "min_iterations": 8}
        self.duty.order(Order(topic="profile", body=body), time.monotonic())
        return self.profiles(why, 25.0)

    def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            ended = [rank.poll() for rank in self.ranks]
            assert not any(ended), f"exit codes {ended}\n{self.story()}"
            assert time.monotonic() < deadline_s, f"not within {limit_s} s\n{self.story()}"
            self._watch.discover()
            for _ in self._watch.read():
                pass
            workers = self._watch.workers
            for worker in workers:
                self.duty.observe(worker)
            self.reports += self.duty.turn(workers, time.monotonic())
            time.sleep(0.1)

    def story(self) -> str:
        texts = [path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.txt")]
        states = [str(state) for state in self._watch.states]
        return "\n".join([*states, *texts])


@contextmanager
def profiled(
    layout: str,
    *,
    world: int,
    work_ms: float = 60.0,
    command: Sequence[str] = (),
    capture: str = "",
) -> Iterator[Profiled]:
    """Start the ranks, each of `command` if one is given; leaving the block ends them.

    capture: the way calls are captured; "" the best there is.
    """
    with tempfile.TemporaryDirectory(prefix="failslow-test-") as name:
        folder, port = Path(name), str(free_port())
        job = Profiled(world, folder, [])
        try:
            for rank in range(world):
                environ = {
                    **clean_environ(),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "FAILSLOW": "1",
                    "FAILSLOW_AGENT": "0",
                    "FAILSLOW_CAPTURE_FOLDER": name,
                    "TRAIN_FOLDER": name,
                    "TRAIN_WORK_MS": str(work_ms),
                    **({"FAILSLOW_CAPTURE_MODE": capture} if capture else {}),
                }
                with (folder / f"rank{rank}.txt").open("wb") as out:
                    job.ranks.append(
                        subprocess.Popen(
                            [*_FIRST, sys.executable, *(command or (str(_JOB), layout))],
                            env=environ,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            yield job
        finally:
            for process in job.ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
