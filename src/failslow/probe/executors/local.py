"""Probes as processes of this machine, the default: nothing to install, no cluster needed.

In: specs. Out: `failslow probe run`, one process a node. The machine is one node; a test bed can
lend several seats, each behind a command that leads to it:

    LocalExecutor()
    LocalExecutor([Seat(name="node0", address="10.0.0.1", prefix=("ip", "netns", "exec", "node0")),
                   Seat(name="node1", address="10.0.0.2", prefix=("ip", "netns", "exec", "node1"))])

A seat holds one probe at a time: two on a node would measure each other. When this process dies,
whatever kills it, its probes are told to end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from failslow.errors import ProbeError
from failslow.probe.executors.base import RESULT_FILE, Command, JobState, last_line, read_result
from failslow.probe.executors.leash import leashed
from failslow.probe.result import ProbeResult, ProbeSpec, command

__all__ = ["LocalExecutor", "LocalJob", "Seat"]

_FIRST_PORT, _PORTS = 29400, 500
_LEFT_BEHIND_S = 30.0
"""How long the other nodes of a probe may go on when one has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A node that a probe can have."""

    name: str = "this machine"
    address: str = "127.0.0.1"
    """At which other seats reach it."""
    prefix: tuple[str, ...] = ()
    """What leads to it: arguments before those of the command, replaced by it at last (exec)."""


class LocalJob:
    """The processes of one probe."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        """processes: by node rank; the leaders of sessions of their own."""
        self._processes, self._folder = tuple(processes), folder
        self._stopped = False
        self._first_end_s: float | None = None

    @property
    def folder(self) -> Path:
        """Of its journal, its logs, and the pids of its workers."""
        return self._folder

    def state(self) -> JobState:
        running = [p for p in self._processes if p.poll() is None]
        if not running:
            return "ended"
        if len(running) < len(self._processes):
            now_s = time.monotonic()
            self._first_end_s = self._first_end_s or now_s
            if now_s - self._first_end_s > _LEFT_BEHIND_S:
                self.kill()
        return "running"

    def stop(self) -> None:
        if self._stopped:
            return  # a second SIGTERM would cost the result
        self._stopped = True
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def result(self) -> ProbeResult | None:
        return read_result(self._folder / RESULT_FILE)[0]

    def why(self) -> str:
        found, why = read_result(self._folder / RESULT_FILE)
        if found is not None:
            return ""
        for rank, process in enumerate(self._processes):
            if process.poll():
                code = process.returncode
                how = f"exit code {code}" if code > 0 else f"signal {-code}"
                said = last_line(_log(self._folder, rank))
                return f"{why}: node {rank} ended with {how}" + (f": {said}" if said else "")
        return why

    def preempted(self) -> bool:
        return any(process.returncode == -signal.SIGTERM for process in self._processes)

    def wait(self) -> None:
        """Until nothing of it runs."""
        for process in self._processes:
            process.wait()


class LocalExecutor:
    """Runs probes on its seats; those that rested longest come first."""

    name = "local"

    def __init__(
        self,
        seats: Sequence[Seat] = (Seat(),),
        *,
        environ: Mapping[str, str] | None = None,
        command: Command = command,
    ) -> None:
        """environ: of the probes; this process's if left out."""
        self.nodes = len(seats)
        self._environ = dict(os.environ if environ is None else environ)
        self._command = command
        self._resting = list(seats)
        self._taken: dict[LocalJob, list[Seat]] = {}
        self._started = 0

    def start(self, spec: ProbeSpec, folder: Path, *, history: Sequence[Path] = ()) -> LocalJob:
        self._free()
        if spec.nodes > self.nodes:
            raise ProbeError(
                f"a probe of {spec.nodes} nodes does not fit on {self.nodes}; run it with "
                "--executor slurm or ray"
            )
        if spec.nodes > len(self._resting):
            raise ProbeError(
                f"a probe of {spec.nodes} nodes does not fit: {len(self._resting)} of "
                f"{self.nodes} are free; start fewer at the same time"
            )
        seats, self._resting = self._resting[: spec.nodes], self._resting[spec.nodes :]
        try:
            job = LocalJob(self._spawn(spec, folder.absolute(), seats, history), folder.absolute())
        except OSError as error:
            self._resting += seats
            raise ProbeError(f"a probe cannot be started: {error}") from None
        self._taken[job] = seats
        return job

    def close(self) -> None:
        for job in self._taken:
            job.kill()
        for job in self._taken:
            job.wait()
        self._free()

    def seats(self, job: LocalJob) -> tuple[Seat, ...]:
        """Those it has, by node rank."""
        return tuple(self._taken[job])

    def _free(self) -> None:
        for job in [job for job in self._taken if job.state() == "ended"]:
            self._resting += self._taken.pop(job)

    def _spawn(
        self, spec: ProbeSpec, folder: Path, seats: Sequence[Seat], history: Sequence[Path]
    ) -> list[subprocess.Popen[bytes]]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).unlink(missing_ok=True)
        environ, rendezvous = self._environ, None
        if spec.nodes > 1:
            environ = environ | {"FAILSLOW_TOKEN": secrets.token_hex(32)}
            rendezvous = f"{seats[0].address}:{_FIRST_PORT + self._started % _PORTS}"
        self._started += 1
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, seat in enumerate(seats):
                argv = self._command(
                    spec,
                    out=folder / RESULT_FILE,
                    folder=folder,
                    history=[path.absolute() for path in history],
                    node_rank=rank if rendezvous else None,
                    rendezvous=rendezvous,
                )
                with _log(folder, rank).open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            leashed([*seat.prefix, *argv]),
                            env=environ,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # Ctrl-C is the campaign's to pass on
                        )
                    )
        except OSError:
            for process in processes:
                process.kill()
                process.wait()
            raise
        return processes


def _log(folder: Path, rank: int) -> Path:
    return folder / f"node{rank}.log"
