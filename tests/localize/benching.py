"""Drives `bench_job.py`: workers that run scripts on demand."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.testbed import TestBed, until
from tests.transport.servers import free_port

from failslow.localize.script import Script, WorkerPlace

__all__ = ["JOB", "Bench", "bench", "is_crowded"]

JOB = Path(__file__).with_name("bench_job.py")
Result = dict[str, Any]


class Bench:
    """The test's side of a running job."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.pids: list[int] = []
        self._count = 0

    def places(self, limit_s: float = 150.0) -> list[WorkerPlace]:
        """Where the workers say they run; waits until all are up."""
        files = [self.folder / f"place-{rank}.json" for rank in range(self.world)]
        until(lambda: all(file.exists() for file in files), limit_s)
        return [WorkerPlace(**json.loads(file.read_text())) for file in files]

    def order(self, script: Script | str, **more: Any) -> int:
        """Give an order; returns its number."""
        number, self._count = self._count, self._count + 1
        path = self.folder / f"order-{number}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"script": script, "name": f"pause-{number}", **more}))
        unfinished.rename(path)
        return number

    def reports(
        self, number: int, ranks: list[int] | None = None, limit_s: float = 40.0
    ) -> list[Result]:
        """What each rank reports of an order."""
        wanted = range(self.world) if ranks is None else ranks
        files = [self.folder / f"result-{number}-{rank}.json" for rank in wanted]
        until(lambda: all(file.exists() for file in files), limit_s)
        return [json.loads(file.read_text()) for file in files]

    def run(self, script: Script, **more: Any) -> list[Result]:
        """The results of all ranks."""
        return [r for report in self.reports(self.order(script, **more)) for r in report["results"]]

    def stop(self) -> None:
        """Tell the workers to end."""
        self.order("stop")


def is_crowded(results: list[dict[str, Any]]) -> bool:
    """Whether workers waited for a core that others had, or stages were not reached in time."""
    shares = [
        (r["queued_s"] - min(r["queued_s"], r["throttled_s"])) / r["wall_s"]
        for r in results
        if r["do"] == "gemm" and not r["error"]
    ]
    links = [r["waited"] for r in results if r["do"] == "p2p" and "waited" in r]
    late = any("no time" in r["error"] for r in results)
    return late or statistics.median(shares) > 0.2 or statistics.median(links) > 0.25


@contextmanager
def bench(folder: Path, world: int) -> Iterator[Bench]:
    """A job of `world` workers on one node; what is left of it is killed.

    On a test bed, if there can be one: its workers outweigh what else the machine does.
    """
    job = Bench(folder, world)
    if TestBed.available() is None:
        with TestBed(nodes=1, folder=folder) as bed:
            workers = bed.launch(JOB, args=[str(folder)], workers_per_node=world)
            job.pids = [worker.pid for worker in workers]
            yield job
            job.stop()
        return
    common = {
        **{k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")},
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = []
    try:
        for rank in range(world):
            with (folder / f"rank{rank}.log").open("wb") as log:
                command = [sys.executable, str(JOB), str(folder)]
                env = {**common, "RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        job.pids = [process.pid for process in processes]
        yield job
        job.stop()
        for process in processes:
            process.wait(30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
