"""Launches the ranks of a real torch job on this machine and always ends them.

In: a script and its arguments. Out: what each rank printed, and the rings they left.

    with launch([str(JOB), "ddp"], world=2, watch=True) as job:
        job.wait(timeout_s=60)
        job.ring(0).read()
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from failslow.capture.reader import RingReader

__all__ = ["Job", "launch"]


class Job:
    """The running ranks of one job."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
        self.ranks = ranks
        self.folder = folder

    def wait(self, timeout_s: float) -> None:
        """Until every rank has ended with 0; AssertionError with the first failing rank's text."""
        deadline = time.monotonic() + timeout_s
        while any(rank.poll() is None for rank in self.ranks):
            failed = [i for i, rank in enumerate(self.ranks) if rank.poll() not in (None, 0)]
            late = time.monotonic() > deadline
            if failed or late:
                which = failed or [i for i, rank in enumerate(self.ranks) if rank.poll() is None]
                raise AssertionError(
                    f"ranks {which} {'failed' if failed else f'still run after {timeout_s} s'}:\n"
                    + self.output(which[0])[-4000:]
                )
            time.sleep(0.05)
        codes = [rank.returncode for rank in self.ranks]
        assert not any(codes), f"exit codes {codes}:\n{self.output(0)[-4000:]}"

    def output(self, rank: int) -> str:
        """What the rank printed so far, stdout and stderr together."""
        return (self.folder / f"rank{rank}.txt").read_text(errors="replace")

    def rings(self) -> dict[int, Path]:
        """{rank: its ring file} of the ranks that have one."""
        found = (self.folder / "rings").glob("failslow-*.ring")
        return {RingReader(path).rank: path for path in found}

    def ring(self, rank: int) -> RingReader:
        """The ring of `rank`."""
        return RingReader(self.rings()[rank])


@contextmanager
def launch(
    command: Sequence[str],
    *,
    world: int,
    watch: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Start `python COMMAND` once a rank with plain RANK variables on a port of its own.

    watch: set FAILSLOW=1, with the rings in a folder of the job. Leaving the block kills what
    still runs and removes the rings.
    """
    with tempfile.TemporaryDirectory(prefix="failslow-test-") as name:
        folder = Path(name)
        (folder / "rings").mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                variables = {
                    **{k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")},
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "FAILSLOW_CAPTURE_FOLDER": str(folder / "rings"),
                    "FAILSLOW_AGENT": "0",
                    **({"FAILSLOW": "1"} if watch else {}),
                    **(environ or {}),
                }
                with (folder / f"rank{rank}.txt").open("wb") as out:
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, *command],
                            env=variables,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            yield Job(ranks, folder)
        finally:
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # data-loader workers with it
                process.wait()
