"""A small GPT in training on this machine, watched and steered.

In: a folder, a layout. Out: its processes, its journal, its losses as they grow:

    with steered_job(folder, layout=("--dp", "4")) as job:
        job.wait_for(lambda: len(job.losses()) > 20, limit_s=60.0)
        job.entries("episode")

Each worker is a node of its own (a network namespace) where that can be had (`lab`), else a process
on loopback.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from failslow.demo.worker import LOOPBACK, STORE_IS_SERVED, training_command
from failslow.errors import LabError
from failslow.journal import GrowingJournal, JournalEntry
from failslow.lab import TestBed
from failslow.records import Decision, Outcome

__all__ = ["SteeredJob", "free_port", "losses_without", "steered_job", "train_script"]

_LOOK_S = 0.05
_LEAVE_S, _LAST = 10.0, 20
_MODEL = ("--width", "64", "--layers", "2", "--sequences", "1", "--length", "32", "--seed", "7")
"""Small, so that what takes time is the work added to it."""


def train_script() -> Path:
    """The training program: examples/hybrid_gpt of the source tree, or the copy in the package.

    Raises LabError where neither is.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "hybrid_gpt", here.parents[2] / "examples" / "hybrid_gpt"):
        if (folder / "train.py").is_file():
            return folder / "train.py"
    raise LabError("the demonstration's training program is missing; install failslow anew")


class SteeredJob:
    """A job in training."""

    def __init__(self, folder: Path, pids: Sequence[int], bed: TestBed | None) -> None:
        self.folder, self.pids, self.bed = folder, tuple(pids), bed
        self.journal = folder / "run" / "journal.jsonl"
        self._growing = GrowingJournal(self.journal)

    def entries(self, *kinds: str) -> list[JournalEntry]:
        """The journal's lines of these kinds, oldest first."""
        self._growing.refresh()
        return [entry for entry in self._growing.entries if entry.kind in kinds]

    def placement(self) -> tuple[int, ...]:
        """The rank at each position: S3 may have changed it."""
        found = planned = tuple(range(len(self.pids)))
        for entry in self.entries("decision", "outcome"):
            record = entry.record
            if isinstance(record, Decision) and record.plan is not None and record.plan.placement:
                planned = record.plan.placement
            elif isinstance(record, Outcome) and record.ok and record.level == "S3":
                found = planned
        return found

    def losses(self) -> list[float]:
        """Of the steps so far."""
        return _read_losses(self.folder / "losses.jsonl")

    def steps_s(self, begin_t: float, end_t: float = float("inf")) -> list[float]:
        """Seconds of the iterations that began and ended in between."""
        return [
            entry.record.duration_s
            for entry in self.entries("step")
            if entry.rank is None
            and begin_t <= entry.t - entry.record.duration_s
            and entry.t <= end_t
        ]

    def own_s(self, begin_t: float, end_t: float) -> list[float]:
        """Median seconds a worker took for itself in such an iteration, by rank; of those told."""
        told: dict[int, list[float]] = {}
        for entry in self.entries("step"):
            record = entry.record
            if entry.rank is None or record.compute_s is None:
                continue
            if begin_t <= entry.t - record.duration_s and entry.t <= end_t:
                told.setdefault(entry.rank, []).append(record.compute_s)
        return [median(told[rank]) for rank in sorted(told)]

    def wait_for(self, condition: Callable[[], object], *, limit_s: float) -> bool:
        """Until `condition` holds; False when it does not within the limit.

        Raises LabError when the training has ended meanwhile.
        """
        deadline_s = time.monotonic() + limit_s
        while not condition():
            self.check()
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """End the training after a step of all, and let agents and controller leave: the journal
        has an end then."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _LEAVE_S
        while self.journal.exists() and not self._has_ended() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)

    def _has_ended(self) -> bool:
        self._growing.refresh()
        return any(
            entry.record.get("what") == "controller" and entry.record.get("event") == "ended"
            for entry in self._growing.entries[-_LAST:]
            if entry.kind == "health"
        )

    def check(self) -> None:
        """LabError with the end of what it printed when a worker is gone."""
        for rank, pid in enumerate(self.pids):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                state = "X"
            if state in "ZX":
                text = (self.folder / f"rank{rank}.log").read_text(errors="replace")[-2000:]
                raise LabError(f"worker {rank} of the training has ended:\n{text}")


@contextmanager
def steered_job(
    folder: Path,
    *,
    layout: Sequence[str],
    lab: bool,
    work_ms: float,
    microbatches: int,
    mode: str = "auto",
    settings: Mapping[str, str] | None = None,
    model: Sequence[str] = _MODEL,
    egress_mbit: float | None = None,
    workers: int = 4,
) -> Iterator[SteeredJob]:
    """Start it; it is ended, with all that belongs to it, when the block is left.

    layout: options of train.py. lab: nodes of their own, for which root is needed. work_ms: of a
    micro-batch, diluted with sleep. settings: FAILSLOW variables beside those of the mode.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [
        *layout,
        *model,
        *("--micro-batches", str(microbatches), "--work-ms", str(work_ms), "--dilute", "6"),
        # with --seconds SIGTERM ends it as a training ends
        *("--steps", "1000000", "--seconds", "1000000"),
        *("--losses", str(folder / "losses.jsonl")),
    ]
    variables = {
        "FAILSLOW": "1",
        "FAILSLOW_CAPTURE_BUILD": "0",  # a compiler beside it is a fault nobody asked for
        "FAILSLOW_MODE": mode,
        "FAILSLOW_DIR": str(folder / "run"),
        **(settings or {}),
    }
    if lab:
        with TestBed(nodes=workers, folder=folder, egress_mbit=egress_mbit) as bed:
            made = bed.launch(train_script(), args=arguments, env=variables)
            job = SteeredJob(folder, [worker.pid for worker in made], bed)
            with contextlib.closing(job):
                yield job
        return
    variables |= {"FAILSLOW_JOB": f"demo-{os.getpid()}-{secrets.token_hex(3)}"}
    processes = _start(arguments, variables, folder, workers)
    with contextlib.ExitStack() as stack:
        stack.callback(_end, processes)
        yield stack.enter_context(
            contextlib.closing(SteeredJob(folder, [process.pid for process in processes], None))
        )


def losses_without(
    folder: Path,
    *,
    layout: Sequence[str],
    microbatches: int,
    steps: int,
    model: Sequence[str] = _MODEL,
    limit_s: float = 120.0,
    workers: int = 4,
) -> list[float]:
    """The losses of the same training without faults, without failslow, and without added work."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plain.jsonl"
    arguments = [
        *layout,
        *model,
        *("--micro-batches", str(microbatches), "--steps", str(steps), "--losses", str(path)),
    ]
    processes = _start(arguments, {"FAILSLOW": "0"}, folder, workers)
    deadline_s = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
    finally:
        _end(processes)
    return _read_losses(path)


def _start(
    arguments: Sequence[str], variables: Mapping[str, str], folder: Path, workers: int
) -> list[subprocess.Popen[bytes]]:
    """Plain processes on loopback."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FAILSLOW")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **LOOPBACK,
        **STORE_IS_SERVED,
        **variables,
    }
    training, meets = [str(train_script()), *arguments], f"127.0.0.1:{environ['MASTER_PORT']}"
    processes = []
    for rank in range(workers):
        with (folder / f"rank{rank}.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    training_command(training, serves="" if rank else meets),
                    env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    for process in processes:
        process.wait()


def free_port() -> int:
    """On loopback, at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read_losses(path: Path) -> list[float]:
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return [float(line) for line in text[: text.rfind("\n") + 1].splitlines()]
