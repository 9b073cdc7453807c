"""Brings up the monitoring of a job from inside its workers. Standard library only, and cheap.

In: a worker's environment. Out: on each node one detached supervisor (`supervise.py`), which
runs the node's agent, and on rank 0's node the job's controller:

    trainer (LOCAL_RANK 0) ── sh ── supervisor, nice 19, session of its own
                                     ├── agent        reads this node's rings
                                     └── controller   RANK 0 only

The trainer is never forked in Python: one `sh` is spawned, which leaves the supervisor to init
and ends, within milliseconds; nothing of it is left for the trainer to wait for. FAILSLOW_AGENT=0
keeps it from happening. Where the supervisor is killed, the worker that started it starts it again
(`Keeper`, called now and then at an optimizer's step).

Workers that no launcher numbered on their node (`mp.spawn`) agree which of them does it; rank 0
does in any case, as the controller is its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from failslow.capture.origin import Origin, process_identity
from failslow.capture.ring import job_name
from failslow.errors import ConfigError, FailslowError
from failslow.ownfiles import check_folder, open_own
from failslow.runtime.claim import Claim, pid_namespace
from failslow.runtime.folder import RunFolder
from failslow.runtime.rendezvous import is_loopback, is_single_node, node_name
from failslow.saying import say

__all__ = ["Keeper", "launch", "run_dir"]

_OFF = ("0", "false", "no", "off")
_MARK = "FAILSLOW_LAUNCHED"
_SPAWN_S = 5.0
_FREE, _FREE_AT_FIRST = 2, 12
"""Looks in a row that find nobody before it is started again; at first, or just after that."""
_MOST_OF_A_NAME = 16
_SETTINGS = (
    "FAILSLOW_CONFIG", "FAILSLOW_DECIDE_", "FAILSLOW_DETECT_", "FAILSLOW_LOCALIZE_",
    "FAILSLOW_MODE", "FAILSLOW_RUNTIME_", "FAILSLOW_TELEMETRY_", "FAILSLOW_TRACK_",
)  # fmt: skip
_PATHS = ("FAILSLOW_CONFIG", "FAILSLOW_CAPTURE_FOLDER", "FAILSLOW_DIR")


@dataclass(frozen=True, slots=True)
class _Supervisor:
    """How it is started; the trainer may change folder and environment meanwhile."""

    command: tuple[str, ...]
    folder: Path
    environ: Mapping[str, str]

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            log: int = subprocess.DEVNULL
            with contextlib.suppress(OSError):  # a folder that cannot be written: no log
                self.folder.mkdir(parents=True, exist_ok=True)
                check_folder(self.folder)
                log = open_own(self.folder / "runtime.log", os.O_WRONLY | os.O_APPEND)
                stack.callback(os.close, log)
            process = subprocess.Popen(
                # the shell ends at once and init adopts the supervisor: the trainer, which may
                # wait for children of its own, has none of ours
                ["/bin/sh", "-c", '"$@" &', "failslow", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",  # a module in the working folder must not shadow one of ours
                env=dict(self.environ),
                start_new_session=True,  # neither Ctrl-C nor the end of the worker's group gets it
            )
            try:
                process.wait(_SPAWN_S)
            except subprocess.TimeoutExpired:
                raise FailslowError(
                    f"the agent could not be started within {_SPAWN_S:g} s"
                ) from None


class Keeper:
    """Starts the supervisor again where it was killed; the new one leaves alone who still lives.

    A supervisor that was told to end (SIGTERM) takes the run folder with it: then nothing is
    started again. `look` is to be called every `EVERY_S` seconds and costs microseconds.
    """

    EVERY_S = 10.0

    def __init__(self, supervisor: _Supervisor, path: Path) -> None:
        """path: the run folder."""
        self._supervisor, self._path = supervisor, path
        self._lock: Path | None = None
        self._seen = self._over = False
        self._free = 0

    def look(self) -> bool:
        """Whether it was started again. Raises FailslowError or OSError when it cannot be."""
        self._over = self._over or not self._path.is_dir()
        if self._over:
            return False
        if self._held():
            self._seen, self._free = True, 0
            return False
        self._free += 1
        # one that has yet to come up may take long on a busy machine
        if self._free < (_FREE if self._seen else _FREE_AT_FIRST):
            return False
        self._seen, self._free = False, 0
        self._supervisor.start()
        return True

    def _held(self) -> bool:
        """Whether a supervisor lives. An agent that outlives it can bring back no controller."""
        if self._lock is None:
            self._lock = self._path / f"supervisor-{node_name(self._supervisor.environ)}.lock"
        try:
            handle = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False


def launch(
    environ: MutableMapping[str, str] = os.environ, *, joined: bool = False
) -> Keeper | None:
    """Start the supervisor if this worker is the one to do so; who looks after it, else None.

    joined: it is known to be a worker as it joined a process group, whoever started it. Raises
    FailslowError or OSError when it should be and cannot. Sets FAILSLOW_LAUNCHED to the job's
    name, so that no process started by the trainer does it again, unless it is of another job.
    """
    job, outer = job_name(environ), environ.get(_MARK)
    if (
        environ.get("LOCAL_RANK", "0") != "0"
        or environ.get("FAILSLOW_AGENT", "").lower() in _OFF
        or outer == job
        or (not joined and multiprocessing.parent_process() is not None)
        or (joined and not _is_its_own(job, environ))
    ):
        return None
    if outer and environ.get("FAILSLOW_DIR"):  # that is the journal of the job around this one
        environ["FAILSLOW_DIR"] = str(run_dir(job, environ) / job)
    environ[_MARK] = job
    origin = Origin.of(environ)
    run, folder = _enter(job, origin, environ)
    if run.name != job:
        say(
            f"another job called {job} runs here; this one is watched as {run.name}, its journal "
            f"is in {folder}; set FAILSLOW_JOB to name it yourself"
        )
    with contextlib.suppress(OSError):  # doctor will not find the job by its journal's folder
        run.write("journal", str(folder))
    worker = process_identity(os.getpid())
    # of one start of the job: torchrun's process, which restarts workers, else this worker
    started = origin.launcher if origin.elastic else worker
    arguments = ["--worker", worker, "--launch", started]
    if environ.get("RANK", "0") == "0":
        arguments.append("--controller")
        _warn(environ)
    supervisor = _Supervisor(
        command=(sys.executable, "-m", "failslow.runtime.supervise", *arguments),
        folder=folder,
        environ=_environment(job, folder, environ)
        | {"FAILSLOW_RUN": run.name, "FAILSLOW_ORIGIN": origin.text},
    )
    try:
        supervisor.start()
    except Exception:
        run.tidy(leaving=worker)
        raise
    return Keeper(supervisor, run.path)


def _warn(environ: Mapping[str, str]) -> None:
    """Say that the controller will refuse its settings: its journal says so too, to who looks."""
    if not any(name.startswith(_SETTINGS) for name in environ):
        return
    try:
        from failslow.config import check_settings  # takes a tenth of a second

        check_settings(environ)
    except Exception as error:  # even without what reads settings the training must go on
        say(f"the job is not watched: {error}")


def _is_its_own(job: str, environ: Mapping[str, str]) -> bool:
    """Whether a worker whose launcher numbered none on its node is the one to start it.

    Rank 0 is, and the first to come where rank 0 may be on another node: until it ends it holds
    a name that the kernel gives to one process of a network namespace.
    """
    if "LOCAL_RANK" in environ:
        return True
    is_zero = environ.get("RANK", "0") == "0"
    if not is_zero and is_loopback(environ.get("MASTER_ADDR", "")):
        return False  # rank 0 is here too
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told = f"{os.getuid()} {job} {node_name(environ)} {Origin.of(environ).text}"
    try:
        holder.bind(f"\0failslow-{hashlib.sha256(told.encode()).hexdigest()}")
    except OSError:
        holder.close()
        return is_zero
    holder.detach()  # never closed
    return True


def _enter(job: str, origin: Origin, environ: Mapping[str, str]) -> tuple[RunFolder, Path]:
    """The run folder and the journal's, both no other job's. Raises FailslowError."""
    taken: set[str] = set()
    for number in range(1, _MOST_OF_A_NAME + 1):
        name = job if number == 1 else f"{job}-{number}"
        run, folder = RunFolder(name, environ), run_dir(name, environ)
        if str(folder) in taken:
            folder = folder.with_name(f"{folder.name}-{number}")
        mine = Claim(
            job=job,
            origin=origin.text,
            worker=process_identity(os.getpid()),
            node=node_name(environ),
            several=not is_single_node(environ),
            journal=str(folder),
            namespace=pid_namespace(),
        )
        others = run.enter(mine)
        if not others:
            return run, folder
        taken |= {claim.journal for claim in others}
    raise ConfigError(
        f"{_MOST_OF_A_NAME} other jobs called {job} run here; set FAILSLOW_JOB to another name"
    )


def run_dir(job: str, environ: Mapping[str, str]) -> Path:
    """The folder of the journal: FAILSLOW_DIR, else failslow-runs/JOB in the working folder."""
    return Path(environ.get("FAILSLOW_DIR") or Path("failslow-runs") / job).absolute()


def _environment(job: str, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The supervisor's: the job's, with all that would make it a trainer taken out."""
    child = dict(environ)
    for name in _PATHS:
        if child.get(name):
            child[name] = str(Path(child[name]).absolute())
    if child.get("PYTHONPATH"):
        parts = child["PYTHONPATH"].split(os.pathsep)
        child["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in parts if part)
    return child | {
        "FAILSLOW": "0",
        "FAILSLOW_JOB": job,
        "FAILSLOW_DIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # a TCPStore's client says at length on stderr that its server died
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        # ...and looks names up by a resolver that may not answer
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONUNBUFFERED": "1",
    }
