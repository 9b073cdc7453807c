"""The process that applies a fault, watches over it and undoes it, whatever becomes of its owner.

In, on stdin: one line of JSON, the order; afterwards any byte, or the end, says "undo it". Out, on
stdout: one line when the fault is in force or refused, one when it is undone:

    {"applied": "cgroup quota in /sys/fs/cgroup/cpu/job7"}      or {"refused": "no process 4711 …"}
    {"undone": "time is up"}                                     or {"stuck": "cannot undo …"}

It runs in a session of its own, so Ctrl-C at the terminal passes it by, and ends the fault when it
is told to, when its time is up, or when the owner, the target or one of its actors has ended. What
undoes the fault is on disk before the fault is made (`failslow.inject.ledger`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import failslow
from failslow.errors import FailslowError, InjectError
from failslow.inject.burn import Burn
from failslow.inject.congest import Congest
from failslow.inject.fault import Fault
from failslow.inject.flood import Flood
from failslow.inject.ledger import Ledger, Record
from failslow.inject.namespaces import command_in
from failslow.inject.processes import ProcessId, boot_id, identify, is_alive
from failslow.inject.steps import EndProcess, Step
from failslow.inject.throttle import Throttle

__all__ = ["Guard", "fault_from_json", "fault_to_json", "main", "python_command"]

_CHECK_S = 0.5
"""How often to look at the watched processes where the kernel has no pidfd to wake us."""
_ACTOR_START_S = 30.0
_FAULTS: dict[str, type[Any]] = {cls.kind: cls for cls in (Burn, Congest, Flood, Throttle)}


def fault_to_json(fault: Fault) -> dict[str, Any]:
    """The fault as it travels to its guard."""
    assert isinstance(fault, Burn | Congest | Flood | Throttle)
    return {"kind": fault.kind, **asdict(fault)}


def fault_from_json(data: Mapping[str, Any]) -> Fault:
    """The fault that was sent."""
    fields = {name: value for name, value in data.items() if name != "kind"}
    if data["kind"] == Burn.kind:
        fields["cores"] = tuple(fields["cores"])
    fault: Fault = _FAULTS[data["kind"]](**fields)
    return fault


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `main` of one of our modules in a bare, quickly started interpreter."""
    root = str(Path(failslow.__file__).resolve().parents[1])
    code = f"import sys; sys.path.append(sys.argv.pop(1)); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, root, *arguments]


@dataclass
class Guard:
    """What a fault works with while it starts: records, actors, the lock."""

    ledger: Ledger
    record: Record
    actors: list[subprocess.Popen[str]]

    def promise(self, step: Step) -> None:
        """Write down what undoes the change that is made next."""
        self.record = replace(self.record, steps=(*self.record.steps, step))
        self.ledger.write(self.record)

    def promised(self, step: Step) -> bool:
        """Whether another injection that is not yet undone has promised the same."""
        return any(
            step in record.steps
            for record in self.ledger.records()
            if record.guard != self.record.guard
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """No other injection starts or ends meanwhile."""
        with self.ledger.lock():
            yield

    def act(self, *arguments: str, namespace: str | None = None) -> str:
        """Start an actor; its first line. Raises InjectError where it cannot work."""
        name, *rest = arguments
        words = python_command("failslow.inject.actors", name, str(os.getpid()), *rest)
        actor = subprocess.Popen(
            command_in(namespace, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.actors.append(actor)
        with suppress(InjectError):  # it has ended already: the line below says why
            self.promise(EndProcess(identify(actor.pid)))
        assert actor.stdout is not None
        readable = select.select([actor.stdout], [], [], _ACTOR_START_S)[0]
        line = actor.stdout.readline().strip() if readable else ""
        if not line or line.startswith("failed:"):
            why = line.removeprefix("failed:").strip() or "it does not start"
            raise InjectError(f"the {name} process ({' '.join(rest)}) cannot work: {why}")
        return line

    def undo(self) -> None:
        """Carry out the promises and strike the record out. Raises InjectError."""
        with self.lock():
            self.record.undo()
            self.ledger.remove(self.record)
        for actor in self.actors:
            actor.wait()


def main() -> None:
    """Serve the one order on stdin; exit code 0 once undone, 1 refused or stuck."""
    # Ctrl-C and a closed terminal are the owner's business; SIGTERM asks to undo
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    asleep, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    order = json.loads(_first_line())
    fault = fault_from_json(order["fault"])
    owner = ProcessId(**order["owner"])
    guard = Guard(Ledger(Path(order["folder"])), _record(fault, owner), [])
    try:
        watched = _start(guard, fault)
    except (FailslowError, OSError) as error:
        told = _undone(guard, {"refused": str(error)})
    else:
        for_s = order.get("for_s")
        deadline_s = None if for_s is None else time.monotonic() + for_s
        _say({"applied": watched.how})
        told = _undone(guard, {"undone": _wait(guard, watched, owner, deadline_s, asleep)})
    _say(told)
    sys.exit("undone" not in told)


def _first_line() -> bytes:
    """The order and not a byte more: what follows must stay for `poll` to see."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return bytes(line)


@dataclass(frozen=True)
class _Watched:
    how: str
    target: ProcessId | None


def _record(fault: Fault, owner: ProcessId) -> Record:
    return Record(
        kind=fault.kind,
        targets=fault.targets(),
        summary=fault.summary(),
        guard=identify(os.getpid()),
        owner=owner,
        boot_id=boot_id(),
    )


def _start(guard: Guard, fault: Fault) -> _Watched:
    with guard.lock():
        guard.ledger.claim(guard.record)
    target = fault.target_pid()
    watched = None if target is None else identify(target)
    return _Watched(fault.start(guard), watched)


def _undone(guard: Guard, told: dict[str, Any]) -> dict[str, Any]:
    """Undo; what to tell the owner."""
    try:
        guard.undo()
    except (InjectError, OSError) as error:
        if guard.record.steps:
            return {"stuck": str(error)}
    return told


def _say(message: dict[str, Any]) -> None:
    # nobody may be left to hear it
    with suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def _wait(
    guard: Guard, watched: _Watched, owner: ProcessId, deadline_s: float | None, asleep: int
) -> str:
    """Until the fault is to end; why it is."""
    ends = {owner: "its owner ended"}
    for actor in guard.actors:
        with suppress(InjectError):
            ends[identify(actor.pid)] = "its process was killed"
    if watched.target is not None:
        ends[watched.target] = "its target ended"
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    poll.register(asleep, select.POLLIN)
    handles = _handles(ends)
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while True:
        gone = [why for process, why in ends.items() if not is_alive(process)]
        if gone:
            return gone[0]
        if any(actor.poll() is not None for actor in guard.actors):
            return "its process was killed"
        left_s = _CHECK_S if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            return "time is up"
        for handle, _ in poll.poll(1000 * min(left_s, _CHECK_S)):
            if handle == sys.stdin.fileno():
                return "it was asked to"
            if handle == asleep:
                return "it was told to by another process"


def _handles(processes: Iterable[ProcessId]) -> list[int]:
    """A pidfd each, where the kernel has them: readable when the process ends."""
    handles = []
    for process in processes:
        with suppress(OSError):
            handles.append(os.pidfd_open(process.pid))
    return handles
