"""The fixed training job of a probe: a small GPT, its layout and sizes, and the workers of a node.

In: a `ProbeSpec` and where this node is in the probe. Out: training processes, watched by failslow:

    with ProbeJob(spec, place, folder, environ) as job:
        while job.state() == "running":
            …
        job.reason      # "time", "told", "steps", or "" when a worker failed

One node trains data-parallel replicas; several a pipeline of two stages across them, with replicas
of it (and, on GPUs, two tensor shards inside a node), so that gradients, activations and local
collectives all pass. Compute is real matrix products; on CPUs most of a micro-batch is sleep, which
keeps the iterations of four workers on two cores alike: noise costs more than a larger effect wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, NamedTuple

from failslow.demo.job import free_port, train_script
from failslow.demo.worker import LOOPBACK, STORE_IS_SERVED, training_command
from failslow.errors import ProbeError
from failslow.probe.result import ProbeSpec

__all__ = ["SETTINGS", "Grid", "Place", "ProbeJob", "grid_of"]

SETTINGS = {
    "FAILSLOW_DETECT_MIN_DURATION_S": "3",
    "FAILSLOW_DETECT_MERGE_GAP_S": "3",
    "FAILSLOW_LOCALIZE_PAUSES_PER_HOUR": "100000",
    "FAILSLOW_LOCALIZE_MAX_PAUSE_SHARE": "1",
    "FAILSLOW_LOCALIZE_RECHECK_S": "20",
    "FAILSLOW_TELEMETRY_RECORD_S": "5",
    "FAILSLOW_RUNTIME_UPDATE_S": "2",
    "FAILSLOW_CAPTURE_BUILD": "0",  # a probe measures its node, and loads it with nothing else
}
"""Patience for a minute of training that is there to be paused. What the environment sets outranks
these."""
_MODEL = {
    "cpu": (
        *("--width", "128", "--layers", "2", "--heads", "4"),
        *("--sequences", "1", "--length", "32"),
        *("--work-ms", "40", "--dilute", "4"),
    ),
    "gpu": (
        *("--width", "1536", "--layers", "12", "--heads", "16"),
        *("--sequences", "4", "--length", "512"),
    ),
}
_MICROBATCHES = {"cpu": 2, "gpu": 4}
"""Of a replica."""
_STEPS = 100_000_000
_SPARE_S = 180.0
"""Training goes on for so long beyond its time when nobody ends it."""
_LAST_BYTES = 4096
_STEP = re.compile(r"^step +(\d+) ", re.MULTILINE)
_LINGER_S = 10.0
"""The controller of a probe before, which was killed, may write for so long."""


class Grid(NamedTuple):
    """Sizes of the layout."""

    tp: int
    pp: int
    dp: int


def grid_of(spec: ProbeSpec) -> Grid:
    """tp × pp × dp of a probe.

    >>> grid_of(ProbeSpec(probe_id="a", workers_per_node=4))
    Grid(tp=1, pp=1, dp=4)
    >>> grid_of(ProbeSpec(probe_id="a", nodes=4, workers_per_node=8, preset="gpu"))
    Grid(tp=2, pp=2, dp=8)
    """
    if spec.nodes == 1 or spec.workers % 2 or spec.workers < 4:
        return Grid(tp=1, pp=1, dp=spec.workers)
    shards = spec.preset == "gpu" and spec.workers_per_node % 2 == 0 and spec.workers % 4 == 0
    tp = 2 if shards else 1
    return Grid(tp=tp, pp=2, dp=spec.workers // (2 * tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one node is in a probe."""

    node_rank: int = 0
    host: str = "127.0.0.1"
    """Of the node of rank 0: where workers meet..."""
    port: int = 0
    """...0: any free one, which only a probe on one node can do."""


class ProbeJob:
    """The workers of this node; they end when the block is left, and when this process dies.

    Raises ProbeError when they cannot be started.
    """

    def __init__(
        self,
        spec: ProbeSpec,
        place: Place,
        folder: Path,
        environ: Mapping[str, str],
        *,
        python: str = sys.executable,
    ) -> None:
        self.spec, self.place, self.folder = spec, place, folder
        self._environ, self._python = environ, python
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []

    @property
    def journal(self) -> Path:
        """Of the watching; only the node of rank 0 has one."""
        return self._run / "journal.jsonl"

    @property
    def _run(self) -> Path:
        return self.folder / "run"

    @property
    def ranks(self) -> range:
        """Of this node's workers."""
        first = self.place.node_rank * self.spec.workers_per_node
        return range(first, first + self.spec.workers_per_node)

    @property
    def pids(self) -> tuple[int, ...]:
        """By local rank."""
        return tuple(process.pid for process in self._processes)

    def __enter__(self) -> ProbeJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.place.node_rank == 0:
            _set_aside(self._run, self.journal)
        training = [str(train_script()), *self._arguments()]
        common = self._variables()
        for local, rank in enumerate(self.ranks):
            meets = f"{self.place.host}:{common['MASTER_PORT']}"
            serves = meets if rank == 0 and self.spec.nodes == 1 else ""
            command = training_command(training, serves=serves, python=self._python)
            log = self.folder / f"rank{rank}.log"
            self._logs.append(log)
            try:
                with log.open("wb") as out:
                    self._processes.append(
                        subprocess.Popen(
                            command,
                            env=common | {"RANK": str(rank), "LOCAL_RANK": str(local)},
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # Ctrl-C is ours to pass on
                        )
                    )
            except OSError as error:
                self.kill()
                raise ProbeError(f"worker {rank} cannot be started: {error}") from None
        self._write_pids()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def state(self) -> Literal["running", "ended", "failed"]:
        """failed: a worker has, whatever the others do."""
        codes = [process.poll() for process in self._processes]
        if any(code not in (None, 0) for code in codes):
            return "failed"
        return "running" if None in codes else "ended"

    @property
    def reason(self) -> str:
        """Why training ended: "time", "steps", "told" (some node was); "" as long as unknown."""
        for log in self._logs:
            for line in reversed(_tail(log).splitlines()):
                if line.startswith("ended: "):
                    return line.removeprefix("ended: ").strip()
        return ""

    @property
    def error(self) -> str:
        """The last line of the first worker that failed; "" when none has."""
        for rank, process, log in zip(self.ranks, self._processes, self._logs, strict=True):
            code = process.poll()
            if code in (None, 0):
                continue
            lines = [line.strip() for line in _tail(log).splitlines() if line.strip()]
            how = f"exit code {code}" if code and code > 0 else f"signal {-(code or 0)}"
            said = lines[-1][:300] if lines else "it said nothing"
            return f"worker {rank} ended with {how}: {said}"
        return ""

    @property
    def last_words(self) -> str:
        """The last line of this node's first worker."""
        lines = [line.strip() for log in self._logs[:1] for line in _tail(log).splitlines()]
        said = [line for line in lines if line]
        return f"its last words: {said[-1][:300]}" if said else "its workers said nothing"

    @property
    def steps(self) -> int:
        """That rank 0 says it trained, to ten; 0 on other nodes, where nobody says so."""
        found = [n for log in self._logs[:1] for n in _STEP.findall(_tail(log))]
        return int(found[-1]) + 1 if found else 0

    @property
    def watchers_words(self) -> str:
        """The last line of what agents and controller say."""
        said = [line.strip() for line in _tail(self._run / "runtime.log").splitlines()]
        last = next((line for line in reversed(said) if line), "")
        return f"run/runtime.log: {last[:300]}" if last else "run/runtime.log says nothing"

    def tell(self) -> None:
        """Ask training to end after the step it is at, on all nodes."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End the workers at once, and wait for their end."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _arguments(self) -> list[str]:
        spec, grid = self.spec, grid_of(self.spec)
        return [
            *("--tp", str(grid.tp), "--pp", str(grid.pp), "--dp", str(grid.dp)),
            *_MODEL[spec.preset],
            *("--micro-batches", str(_MICROBATCHES[spec.preset] * grid.dp)),
            *("--steps", str(_STEPS)),
            # whoever watches ends it, by the iterations it saw and when it saw the first
            *("--seconds", f"{spec.duration_s + _SPARE_S:g}"),
            *("--seed", str(spec.seed)),
        ]

    def _variables(self) -> dict[str, str]:
        spec, place = self.spec, self.place
        port = place.port or free_port()
        kept = {n: v for n, v in self._environ.items() if n not in _LAUNCHERS}
        return {
            "OMP_NUM_THREADS": "1",
            **(LOOPBACK if spec.nodes == 1 else {}),
            **SETTINGS,
            **kept,
            **(STORE_IS_SERVED if spec.nodes == 1 else {}),
            "FAILSLOW": "1",
            "FAILSLOW_MODE": "advise",
            "FAILSLOW_JOB": f"probe-{spec.probe_id}",
            "FAILSLOW_DIR": str((self.folder / "run").absolute()),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(spec.workers),
            "LOCAL_WORLD_SIZE": str(spec.workers_per_node),
            "GROUP_RANK": str(place.node_rank),
            "GROUP_WORLD_SIZE": str(spec.nodes),
            "PYTHONUNBUFFERED": "1",
        }

    def _write_pids(self) -> None:
        """Who trains here, for whoever wants to hurt them."""
        about = {"pids": {str(r): pid for r, pid in zip(self.ranks, self.pids, strict=True)}}
        path = self.folder / f"workers-{self.place.node_rank}.json"
        path.write_text(json.dumps(about), encoding="ascii")


_LAUNCHERS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "FAILSLOW_LAUNCHED", "FAILSLOW_AGENT", "FAILSLOW_RESTARTED"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
"""Of whatever started us: they would tell the workers that they are its own."""


def _set_aside(run: Path, journal: Path) -> None:
    """Keep what watched an earlier probe of this folder: `run` becomes `run.1`, `run.2`, ...

    Raises ProbeError where that cannot be, or another probe still writes there.
    """
    deadline_s = time.monotonic() + _LINGER_S
    while _is_written(journal):
        if time.monotonic() > deadline_s:
            raise ProbeError(
                f"{journal}: another probe writes there; wait until it has ended, or give this "
                "one another --dir"
            )
        time.sleep(0.1)
    if not run.exists():
        return
    number = next(n for n in itertools.count(1) if not run.with_name(f"{run.name}.{n}").exists())
    try:
        run.rename(run.with_name(f"{run.name}.{number}"))
    except OSError as error:
        raise ProbeError(
            f"{run}: what an earlier probe left cannot be set aside: {error.strerror or error}; "
            "give this one another --dir"
        ) from None


def _is_written(journal: Path) -> bool:
    """Whether somebody holds it; False where a file system cannot tell."""
    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            _back(file)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _back(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LAST_BYTES))
