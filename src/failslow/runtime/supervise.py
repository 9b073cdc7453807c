"""Keeps a node's agent, and on rank 0's node the controller, running while the job runs.

In: `--worker PID-TICKS --launch ID [--controller]` and the job's environment. Out: the two as
processes, restarted when they are killed; ended when they end by themselves.

A part starts at the trainers' priority, which takes seconds, and goes down to the lowest once it is
at work: on a node whose every core trains, the lowest priority does not even get to its imports.
One that ends again and again starts at the lowest, and ever later.

Each part is played once a node (a lock in the run folder, shared with the child, so that neither
a dead supervisor nor a dead child alone frees it). A supervisor that comes second waits: workers
which torchrun restarts bring theirs while the old one is still about to leave.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from failslow.capture.builder import build_later
from failslow.capture.origin import worker_lives
from failslow.errors import FailslowError
from failslow.runtime.folder import RunFolder
from failslow.runtime.rendezvous import node_name

__all__ = ["NICE", "StepBack", "main", "worker_lives"]

NICE = 19
"""Priority of agent and controller at work, unless FAILSLOW_RUNTIME_NICE says otherwise."""
_LINGER_S = 30.0
_STARVED_S = 0.3
"""A turn of an agent takes milliseconds, ten times a second."""
_START_S = 60.0
"""What a part has for its start at most before it goes down in priority."""
_LOOK_S = 0.5
_QUICK_S = 5.0
"""A part that ends so soon will do so again: it is started low at once."""
_SETTLED_S = 300.0
"""A part that ran so long is sound, whatever ended it."""
_LEAVE_S = 5.0
_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 30.0


@dataclass(slots=True)
class _Part:
    """The agent or the controller."""

    name: str
    lock_name: str
    lock: int | None = None
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    failures: int = 0
    """Ends in a row, none of them after it had settled."""
    low: bool = False
    """It starts at the priority of the monitoring: the trainers do not pay for its failures."""
    retry_s: float = 0.0
    done: bool = False

    def start(self, arguments: list[str], now_s: float, nice: int) -> None:
        assert self.lock is not None
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"failslow.runtime.{self.name}", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[self.lock],
        )
        self.started_s = now_s
        if self.low:
            _set_priority(self.process.pid, nice)
        with contextlib.suppress(OSError):  # a full disk: the pid is for people, the lock counts
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, f"{self.process.pid}\n".encode(), 0)

    def look(self, now_s: float) -> None:
        """Note whether the process ended, and how."""
        if self.process is None or self.process.poll() is None:
            return
        code, self.process = self.process.returncode, None
        self.done = code == 0
        if not self.done:
            lived_s = now_s - self.started_s
            self.failures = 0 if lived_s >= _SETTLED_S else self.failures + 1
            self.low = self.failures > 1 or lived_s < _QUICK_S
            wait_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2**self.failures)
            self.retry_s = now_s + wait_s
            _say(f"{self.name} ended with {code}; it is started again in {wait_s:g} s")

    def starts(self, nice: int, now_s: float) -> bool:
        """Whether it runs and is not yet at work."""
        if self.process is None or now_s - self.started_s > _START_S:
            return False
        with contextlib.suppress(OSError):
            return os.getpriority(os.PRIO_PROCESS, self.process.pid) < nice
        return False

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run until all parts are played; the exit code."""
    parser = argparse.ArgumentParser(prog="failslow.runtime.supervise")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--launch", required=True)
    parser.add_argument("--controller", action="store_true")
    options = parser.parse_args(argv)
    environ = os.environ
    nice = _nice(environ)
    _spread(environ)
    _offer()
    resting = nice <= os.getpriority(os.PRIO_PROCESS, 0)
    if resting:
        _give_way(nice)
    folder = RunFolder.given(environ)
    node, own = node_name(environ), None
    parts = [_Part("agent", f"agent-{node}")]
    if options.controller:
        parts.insert(0, _Part("controller", "controller"))
    arguments = ["--worker", options.worker, "--launch", options.launch]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
    _build(environ)
    while any(not part.done for part in parts):
        now_s, lives = time.monotonic(), worker_lives(options.worker)
        # by this one the worker that started us sees that we live
        own = _lock(folder, f"supervisor-{node}") if own is None else own
        for part in parts:
            part.look(now_s)
            if part.process is None and not part.done:
                if not lives:
                    part.done = True  # nothing to watch, or somebody else does
                elif part.lock is None:
                    part.lock = _lock(folder, part.lock_name)
                if part.lock is not None and not part.done and now_s >= part.retry_s:
                    part.start(arguments, now_s, nice)
            if part.done:
                part.release()
        if nice > 0 and resting == any(part.starts(nice, now_s) for part in parts):
            resting = not resting
            _set_group_priority(nice if resting else 0)
        # a child's end wakes it at once
        caught = signal.sigtimedwait([signal.SIGTERM, signal.SIGCHLD], _LOOK_S)
        if caught is not None and caught.si_signo == signal.SIGTERM:
            _end(part.process for part in parts)
            break
    if own is not None:
        os.close(own)  # or `tidy` takes us for somebody who needs the folder
    folder.tidy(leaving=options.worker)
    return 0


def _lock(folder: RunFolder, name: str) -> int | None:
    """The lock, if it is to be had now."""
    with contextlib.suppress(OSError):  # no room for its file
        return folder.lock(name)
    return None


def _end(processes: Iterable[subprocess.Popen[bytes] | None]) -> None:
    """Ask them to leave, and let them send what they have."""
    running = [process for process in processes if process is not None]
    for process in running:
        process.terminate()
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_S)


class StepBack:
    """Goes down to the priority of the monitoring when a part is at work.

    It goes up again while a culprit is looked for or workers stand still, and a little longer, as
    one word follows another, but only where it has waited for a core so long that its words come
    late: elsewhere that would do nothing but disturb. Going up needs a privilege; without it the
    part stays down.
    """

    def __init__(self, now_s: float, waited_s: Callable[[], float] | None = None) -> None:
        """waited_s: what this process has waited for a core; by default what Linux says."""
        self._limit_s = now_s + _START_S
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._nice: int | None = None
        self._up_until_s = 0.0
        self._waited = waited_s or _waited_s
        self._waited_s = self._waited()
        self._starved_s = -_LINGER_S
        """When a turn last waited too long."""

    def look(self, now_s: float, *, at_work: bool, urgent: bool = False) -> None:
        """at_work: the part has started and done its first work. Times are CLOCK_MONOTONIC."""
        before_s, self._waited_s = self._waited_s, self._waited()
        is_first = self._nice is None
        if self._waited_s - before_s >= _STARVED_S and not is_first:  # to start takes seconds
            self._starved_s = now_s
        if is_first and not at_work and now_s <= self._limit_s:
            return
        if urgent and now_s - self._starved_s < _LINGER_S:
            self._up_until_s = now_s + _LINGER_S
        nice = self._usual if now_s < self._up_until_s else _nice(os.environ)
        if nice != self._nice:
            self._nice = nice
            if not is_first:  # until then the supervisor sees to it
                _set_group_priority(nice)
            for thread in os.listdir("/proc/self/task"):  # Linux keeps a priority a thread
                _set_priority(int(thread), nice)


def _waited_s() -> float:
    """Seconds the main thread was ready to run and did not."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def _nice(environ: Mapping[str, str]) -> int:
    with contextlib.suppress(ValueError):  # the agent will say what is wrong with it
        return int(environ.get("FAILSLOW_RUNTIME_NICE", str(NICE)))
    return NICE


def _give_way(nice: int) -> None:
    _set_priority(0, nice)
    _set_group_priority(nice)


def _set_priority(pid: int, nice: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)


def _set_group_priority(nice: int) -> None:
    """Where Linux shares the processor among sessions first, ours counts as much as a trainer's,
    whatever the priority of its processes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def _spread(environ: Mapping[str, str]) -> None:
    """Not the trainer's cores alone, or those asked for."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if wanted := environ.get("FAILSLOW_RUNTIME_CORES"):
        from failslow.inject.burn import parse_cores

        try:
            os.sched_setaffinity(0, parse_cores(wanted))
            return
        except (FailslowError, OSError) as error:
            _say(f"FAILSLOW_RUNTIME_CORES={wanted} is passed over: {error}")
    with contextlib.suppress(OSError):  # not all of them are ours: keep what was inherited
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _offer() -> None:
    """Where memory runs out the kernel shall take this and its parts, before any trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _build(environ: Mapping[str, str]) -> None:
    """Have the compiled capture built for the next start; never in a trainer's way."""
    try:
        told = build_later(environ)
    except Exception as error:  # the watching does not depend on it
        told = f"the compiled capture cannot be built: {error!r}"
    if told:
        _say(told)


def _say(text: str) -> None:
    print(f"failslow supervisor: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
