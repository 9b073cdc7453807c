"""Doctor's own job: two real workers, watched as a user's would be, and a message bus.

In: the environment a job would be started in. Out: checks of what happened:

    Check("records", "pass", "2 workers, 44 records in /dev/shm", remedy="")

Everything runs in processes of its own in a temporary folder, under one time limit, and is ended
by process group whatever happens. The rings are made where a job's would be.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from failslow.capture.cache import COMMAND
from failslow.capture.layout import CALL
from failslow.capture.reader import RingReader
from failslow.capture.ring import find_rings
from failslow.errors import CaptureError
from failslow.journal import read_journal
from failslow.report.livejob import LiveState
from failslow.runtime.doctor.base import OFF, Check, read_text
from failslow.runtime.doctor.running import part_lives, run_folder
from failslow.runtime.folder import RunFolder
from failslow.runtime.runs import JOURNAL

__all__ = ["trial_checks"]

_WORKERS = 2
_AGENT_S = 10.0
"""What agent and controller have to come up at least, whatever is left of the time."""
_LEAVE_S = 15.0
_FIRST = "mend what the checks above say first"
_STAGES = {
    "": "starting Python and importing torch",
    "torch": "joining the process group",
    "group": "training",
}
_LOOPBACK = "tcpstore://127.0.0.1:0"


@dataclass(slots=True)
class _Process:
    """One of ours and what it has said."""

    popen: subprocess.Popen[bytes]
    stderr: IO[bytes]
    said: list[dict[str, Any]] = field(default_factory=list)
    unread: bytes = b""

    @property
    def stage(self) -> str:
        return str(self.said[-1].get("stage", "")) if self.said else ""

    @property
    def done(self) -> bool:
        """It said its last word, or cannot say any more."""
        return self.stage == "trained" or "seconds" in self.last or "error" in self.last

    @property
    def last(self) -> dict[str, Any]:
        return self.said[-1] if self.said else {}

    def hear(self, data: bytes) -> None:
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # somebody's plugin prints, too
                found = json.loads(line)
                if isinstance(found, dict):
                    self.said.append(found)

    def last_words(self) -> str:
        """The last line of its stderr."""
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing said")


def trial_checks(environ: Mapping[str, str], *, timeout_s: float = 60.0) -> list[Check]:
    """Run the job and the bus; their checks: transport, capture, records, monitoring."""
    job = f"doctor-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="failslow-doctor-") as name, ExitStack() as stack:
        folder = Path(name)
        stack.callback(_await_end, job, environ)  # once the workers are ended
        workers = [
            stack.enter_context(
                _start(
                    ["failslow.capture.trial", str(folder / "rendezvous")],
                    folder,
                    _worker_environment(environ, job=job, rank=rank, folder=folder),
                )
            )
            for rank in range(_WORKERS)
        ]
        url = environ.get("FAILSLOW_TRANSPORT", "")
        bus_environ = {
            **environ,
            "FAILSLOW": "0",
            "FAILSLOW_TRANSPORT": _LOOPBACK if url.startswith("tcpstore:") or not url else url,
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        bus = stack.enter_context(
            _start(["failslow.runtime.doctor.roundtrip"], folder, bus_environ)
        )
        deadline_s = time.monotonic() + timeout_s
        _listen([*workers, bus], deadline_s)
        checks = [
            _transport(bus, url, timeout_s),
            _capture(workers, timeout_s),
            _records(job, environ, workers),
        ]
        if checks[-1].status == "pass":
            checks.append(_monitoring(job, folder / "run", environ, deadline_s))
        return checks


def _worker_environment(
    environ: Mapping[str, str], *, job: str, rank: int, folder: Path
) -> dict[str, str]:
    cleared = (
        "FAILSLOW_LAUNCHED",
        "FAILSLOW_METRICS_PORT",
        "FAILSLOW_TRANSPORT",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
    )
    return {name: value for name, value in environ.items() if name not in cleared} | {
        "FAILSLOW": "1",
        "FAILSLOW_CAPTURE_BUILD": "0",
        "FAILSLOW_JOB": job,
        "FAILSLOW_DIR": str(folder / "run"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(_WORKERS),
        "LOCAL_WORLD_SIZE": str(_WORKERS),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def _start(module: list[str], folder: Path, environ: Mapping[str, str]) -> Iterator[_Process]:
    with tempfile.TemporaryFile() as stderr:
        popen = subprocess.Popen(
            [sys.executable, "-m", *module],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        process = _Process(popen, stderr)
        try:
            yield process
        finally:
            _end(popen, 5.0 if process.done else 0.0)


def _end(popen: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let it leave by itself, since its stdin ends; then kill its whole group."""
    assert popen.stdin is not None
    assert popen.stdout is not None
    with contextlib.suppress(OSError):
        popen.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(timeout=grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
    popen.stdout.close()


def _listen(processes: list[_Process], deadline_s: float) -> None:
    """Hear them until each is done, has ended, or time is up."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.popen.stdout is not None
            selector.register(process.popen.stdout, selectors.EVENT_READ, process)
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                process = key.data
                data = os.read(key.fd, 65536)
                process.hear(data)
                if not data or process.done:
                    selector.unregister(key.fileobj)


def _transport(bus: _Process, url: str, timeout_s: float) -> Check:
    kind = url.partition("://")[0] or "tcpstore"
    if "seconds" in bus.last:
        found = f"{kind}: a signed message took {1000 * bus.last['seconds']:.0f} ms"
        return Check("transport", "pass", found)
    reason = bus.last.get("error") or (
        f"nothing came back in {timeout_s:g} s" if bus.popen.poll() is None else bus.last_words()
    )
    remedy = "see that the server runs and can be reached, or unset FAILSLOW_TRANSPORT"
    if kind == "tcpstore":
        remedy = "see that loopback is up, or name a server: FAILSLOW_TRANSPORT=redis://HOST:PORT"
    return Check("transport", "fail", f"{kind}: {reason}", remedy)


def _capture(workers: list[_Process], timeout_s: float) -> Check:
    stuck = next((worker for worker in workers if not worker.done), None)
    if stuck is not None:
        doing = _STAGES[stuck.stage]
        if stuck.popen.poll() is not None:
            found = f"a worker died {doing}: {stuck.last_words()}"
            return Check("capture", "fail", found, "see that torch.distributed works here at all")
        return Check(
            "capture",
            "fail",
            f"a worker was still {doing} after {timeout_s:g} s",
            "raise --timeout on a busy machine; if it hangs, see that gloo works here at all",
        )
    return _captured(workers[0].last["status"], workers[0])


def _captured(status: Mapping[str, Any], worker: _Process) -> Check:
    if not status["active"]:
        # where the hook did not install, the reason is only on the worker's stderr
        reason = worker.last_words() if status["mode"] == "off" else status["reason"]
        return Check("capture", "fail", f"the worker was not watched: {reason}", _FIRST)
    if status["faults"]:
        found = f"samples were lost: {', '.join(status['faults'])}"
        return Check("capture", "warn", found, "report it with the versions above")
    if status["refused"]:
        found = f"mode {status['mode']}, at some ten times the cost: {status['refused']}"
        return Check("capture", "warn", found, COMMAND)
    if status["missed"]:
        return Check(
            "capture",
            "warn",
            f"mode {status['mode']}, which does not see {', '.join(status['missed'])}",
            "mark iterations in the trainer with step(), or use a torch failslow is tested with",
        )
    return Check("capture", "pass", f"mode {status['mode']}: every collective is seen")


def _records(job: str, environ: Mapping[str, str], workers: list[_Process]) -> Check:
    calls: dict[int, int] = {}
    folders = set()
    for path in find_rings(job, environ):
        with contextlib.suppress(CaptureError):  # its worker died meanwhile
            ring = RingReader(path)
            calls[ring.rank] = int(np.count_nonzero(ring.read().records["kind"] == CALL))
            ring.close()
            folders.add(str(path.parent))
    silent = [rank for rank in range(_WORKERS) if not calls.get(rank)]
    if silent:
        ranks = " and ".join(map(str, silent))
        found = f"none came from rank {ranks}: {workers[silent[0]].last_words()}"
        return Check("records", "fail", found, _FIRST)
    where = " and ".join(sorted(folders))
    return Check(
        "records", "pass", f"{_WORKERS} workers made {sum(calls.values())} calls, seen in {where}"
    )


def _monitoring(job_name: str, run: Path, environ: Mapping[str, str], deadline_s: float) -> Check:
    """Whether agent and controller come up and iterations reach the journal."""
    if environ.get("FAILSLOW_AGENT", "").strip().lower() in OFF:
        found = "FAILSLOW_AGENT is off: no agent was started"
        return Check("monitoring", "info", found)
    state = LiveState("doctor")
    stop = threading.Event()
    timer = threading.Timer(max(_AGENT_S, deadline_s - time.monotonic()), stop.set)
    timer.start()
    try:
        for entry in read_journal(run / JOURNAL, follow=True, stop=stop, poll_s=0.1):
            state.observe(entry)
            job = state.look(entry.t)
            if job.step is not None and len(job.workers) == _WORKERS:
                found = f"agent and controller timed {job.iterations} iterations"
                return Check("monitoring", "pass", found)
            if stop.is_set():
                break
    finally:
        timer.cancel()
    folder = run_folder(job_name, environ)
    locks = ("agent-*.lock", "controller.lock")
    if folder is not None and all(any(map(part_lives, folder.glob(lock))) for lock in locks):
        return Check(
            "monitoring",
            "warn",
            "agent and controller run, but came too late to time an iteration: others have the "
            "processor",
            "leave them a little of a core, or lower FAILSLOW_RUNTIME_NICE; --timeout waits longer",
        )
    last = read_text(str(run / "runtime.log")).rpartition("\n")[2]
    found = "no agent or no controller came up" + (f": {last}" if last else "")
    return Check(
        "monitoring", "fail", found, "raise --timeout on a busy machine; see that /bin/sh starts"
    )


def _await_end(job: str, environ: Mapping[str, str]) -> None:
    """Until the agent and the controller, which end after the workers, have left."""
    deadline_s = time.monotonic() + _LEAVE_S
    while run_folder(job, environ) is not None:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    else:
        return
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FAILSLOW_JOB") == job:
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=_LEAVE_S)
    if (left := run_folder(job, environ)) is not None:  # nobody else will
        RunFolder.at(left).tidy()
