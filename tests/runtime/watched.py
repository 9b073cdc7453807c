"""Starts a real watched job on this machine, with its agents, and always ends all of it.

with watched(world=2, environ={...}) as job:
    job.until(lambda: len(job.steps()) > 30)
    os.kill(job.pid("agent"), signal.SIGKILL)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.transport.servers import free_port, until

from failslow.journal import GrowingJournal, JournalEntry

__all__ = ["AT_ONCE", "TRAIN", "WatchedJob", "clean_environ", "watched"]

TRAIN = Path(__file__).with_name("train.py")
_ROOT = os.geteuid() == 0
_FIRST = (
    ["sh", "-c", 'echo -15 > /proc/self/autogroup; exec nice -n -15 "$@"', "sh"] if _ROOT else []
)
"""Tests of time must not fail because of what else the machine does."""
AT_ONCE = {"FAILSLOW_RUNTIME_NICE": "-15"} if _ROOT else {}
"""...nor wait for agents that leave it to everybody else."""


class WatchedJob:
    """The running job and what its journal says so far."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.folder, self.processes = folder, processes
        self.journal_path = folder / "run" / "journal.jsonl"
        self._journal = GrowingJournal(self.journal_path)

    def entries(self, kind: str = "") -> list[JournalEntry]:
        self._journal.refresh()
        return [e for e in self._journal.entries if kind in ("", e.kind)]

    def steps(self) -> list[JournalEntry]:
        """The job's own iterations."""
        return [e for e in self.entries("step") if e.rank is None]

    def health(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            e.record
            for e in self.entries("health")
            if e.record["what"] == what
            and all(e.record.get(name) == value for name, value in fields.items())
        ]

    def events(self) -> list[str]:
        """What was said of suspicions and episodes, in order."""
        found = []
        for entry in self.entries():
            if entry.kind in ("suspicion", "episode"):
                tags = entry.record if isinstance(entry.record, dict) else entry.tags
                found.append(str(tags["event"]))
        return found

    def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        """Wait for `condition`, as long as the job runs."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert not self.failed(), self.story()
            assert time.monotonic() < deadline_s, f"not within {limit_s} s\n{self.story()}"
            time.sleep(0.1)

    def failed(self) -> bool:
        return any(p.poll() not in (None, 0) for p in self.processes)

    def story(self) -> str:
        """What is worth reading when a test fails."""
        log = self.folder / "run" / "runtime.log"
        lines = [str(e.record) for e in self.entries() if e.kind != "step"][-30:]
        lines.append(f"{len(self.steps())} steps")
        texts = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.txt")]
        return "\n".join([*lines, log.read_text()[-3000:] if log.exists() else "no log", *texts])

    def pid(self, part: str) -> int:
        """Of the "agent" or the "controller"."""
        (lock,) = (self.folder / "rings").glob(f"*.run/{part}*.lock")
        return int(lock.read_text())

    def supervisor(self) -> int:
        parent = psutil.Process(self.pid("agent")).parent()
        assert parent is not None
        return parent.pid

    def ours(self, part: str = "failslow.runtime") -> list[psutil.Process]:
        """Every process of failslow for this job; or those with `part` in their command."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FAILSLOW_DIR") == str(self.folder / "run") and any(
                    part in word for word in process.cmdline()
                ):
                    found.append(process)
        return found

    def stop(self, limit_s: float = 30.0) -> None:
        """Let it end by itself, with exit code 0."""
        (self.folder / "stop").touch()
        until(lambda: all(p.poll() is not None for p in self.processes), limit_s)
        assert [p.returncode for p in self.processes] == [0] * len(self.processes), self.story()

    def own_ends(self) -> list[list[float]]:
        """When each iteration ended, by each rank's own account."""
        files = sorted(self.folder.glob("rank*.json"))
        return [json.loads(path.read_text()) for path in files]


def clean_environ() -> dict[str, str]:
    """This process's environment without what would change how a job is watched."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("FAILSLOW", "TORCH"))}


@contextmanager
def watched(
    *,
    world: int,
    work_ms: float = 60.0,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    script: Path = TRAIN,
) -> Iterator[WatchedJob]:
    """Start the ranks of a script with FAILSLOW=1 in their environment and no more.

    command: started once instead of a Python a rank; a launcher.
    """
    with tempfile.TemporaryDirectory(prefix="failslow-test-") as name:
        folder = Path(name)
        (folder / "rings").mkdir()
        port = str(free_port())
        common = {
            **clean_environ(),
            "FAILSLOW": "1",
            "FAILSLOW_DIR": str(folder / "run"),
            "FAILSLOW_CAPTURE_FOLDER": str(folder / "rings"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TRAIN_FOLDER": str(folder),
            "TRAIN_WORK_MS": str(work_ms),
            **AT_ONCE,
            **(environ or {}),
        }
        ranks = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            for rank in range(world)
        ]
        job = WatchedJob(folder, [])
        try:
            for rank in ranks if command is None else [{}]:
                with (folder / f"out{len(job.processes)}.txt").open("wb") as out:
                    job.processes.append(
                        subprocess.Popen(
                            [*_FIRST, *(command or [sys.executable, str(script)])],
                            env={**common, **rank},
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            yield job
        finally:
            _end(job)


def _end(job: WatchedJob) -> None:
    for worker in job.ours(TRAIN.name):  # a launcher gives them sessions of their own
        with contextlib.suppress(psutil.Error):
            worker.kill()
    for process in job.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline_s = time.monotonic() + 20.0
    while left := job.ours():
        if time.monotonic() > deadline_s:
            for late in left:
                with contextlib.suppress(psutil.Error):
                    late.kill()
        time.sleep(0.1)
