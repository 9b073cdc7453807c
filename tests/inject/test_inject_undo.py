"""Whatever ends an injector, the machine is as it was: every kind of fault, every kind of end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from tests.inject.conftest import WAIT, Start, processes_of
from tests.testbed import TestBed, until

from failslow.errors import InjectError
from failslow.inject import burn, throttle, undo_leftovers
from failslow.inject.cgroups import CpuGroup
from failslow.inject.ledger import Ledger, ledger_folder
from failslow.inject.namespaces import namespace_path, run_in

KINDS = ("quota", "signal", "cpu", "link", "flood")


_OWNER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from failslow.inject import *
with eval(sys.argv[2]) as injection:
    print(json.dumps({"event": "applied", "guard_pid": injection.guard_pid}), flush=True)
    injection.wait(60)
"""


class Victims:
    """What the faults of these tests hit, and whether it is as it was."""

    def __init__(self, bed: TestBed, pid: int, group: CpuGroup) -> None:
        self.bed, self.pid, self.group = bed, pid, group
        self._before = self._state()

    def command_line(self, kind: str) -> list[str]:
        """A fault by the command."""
        a, b = self.bed.nodes[0].namespace, self.bed.nodes[1].namespace
        pid = str(self.pid)
        words = {
            "quota": ["throttle", "--pid", pid, "--to", "0.5"],
            "signal": ["throttle", "--pid", pid, "--to", "0.5", "--method", "signal"],
            "cpu": ["cpu", "--cores", "0", "--load", "0.1"],
            "link": ["link", "--from", a, "--to", b, "--rate", "50mbit"],
            "flood": ["flood", "--from", a, "--to", b, "--rate", "10mbit"],
        }
        return [str(Path(sys.executable).with_name("failslow")), "inject", *words[kind], "--json"]

    def program(self, kind: str) -> list[str]:
        """The same fault by a program that uses the library."""
        a, b = self.bed.nodes[:2]
        call = {
            "quota": f"throttle({self.pid}, to=0.5)",
            "signal": f"throttle({self.pid}, to=0.5, method='signal')",
            "cpu": "burn([0], load=0.1)",
            "link": f"congest({a.namespace!r}, 'eth0', 50, dst={b.address!r})",
            "flood": f"flood({a.namespace!r}, {b.namespace!r}, rate_mbit=10)",
        }
        return [sys.executable, "-I", "-S", "-c", _OWNER, json.dumps(sys.path), call[kind]]

    def _state(self) -> str:
        nets = [namespace_path(node.namespace) for node in self.bed.nodes]
        shaping = [run_in(net, "tc", "qdisc", "show") for net in nets]
        return f"{shaping} {self.group.members()} {self.group.limit_cores()}"

    def are_well(self) -> bool:
        """As before, and the process is not stopped."""
        state = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
        return state.split()[0] in "RS" and self._state() == self._before


@pytest.fixture
def victims(bed: TestBed, start: Start, heavy_group: CpuGroup) -> Victims:
    """A process, a control group and two namespaces."""
    return Victims(bed, start(WAIT).pid, heavy_group)


@contextmanager
def _injector(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The injector with its fault in force, and the pid of its guard."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = _stdout(process).readline()
        assert line, process.communicate()[1]
        applied = json.loads(line)
        assert applied["event"] == "applied"
        yield process, applied["guard_pid"]
    finally:
        process.kill()
        process.communicate()


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


@pytest.mark.parametrize(
    ("kind", "number"), [*((kind, signal.SIGINT) for kind in KINDS), ("quota", signal.SIGTERM)]
)
def test_the_command_undoes_its_fault_when_interrupted(
    kind: str, number: signal.Signals, victims: Victims, nothing_left: Callable[[], None]
) -> None:
    with _injector(victims.command_line(kind)) as (process, _):
        process.send_signal(number)
        undone = json.loads(_stdout(process).read().splitlines()[-1])
        code = process.wait(20)

    nothing_left()
    assert victims.are_well()
    assert undone["event"] == "undone"
    assert undone["reason"] == {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "a signal"}[number]
    assert code == {signal.SIGINT: 0, signal.SIGTERM: 143}[number]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_injector_leaves_no_fault(
    kind: str, victims: Victims, nothing_left: Callable[[], None]
) -> None:
    with _injector(victims.program(kind)) as (process, _):
        process.kill()

    nothing_left()
    assert victims.are_well()


def test_the_killed_command_leaves_no_fault(
    victims: Victims, nothing_left: Callable[[], None]
) -> None:
    with _injector(victims.command_line("link")) as (process, _):
        process.kill()

    nothing_left()
    assert victims.are_well()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_crash_of_both_leaves_is_found_and_undone(
    kind: str, victims: Victims, nothing_left: Callable[[], None]
) -> None:
    with _injector(victims.program(kind)) as (process, guard):
        _crash(process, guard)

    (record,) = undo_leftovers()

    assert record.kind == {"quota": "throttle", "signal": "throttle"}.get(kind, kind)
    nothing_left()
    assert victims.are_well()


def _crash(process: subprocess.Popen[str], guard: int) -> None:
    """SIGKILL for both, so that neither undoes the fault for the other."""
    process.send_signal(signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    process.kill()
    until(lambda: not Ledger(ledger_folder()).records()[0].in_force)


def test_the_command_undoes_leftovers_and_with_all_what_is_in_force(
    victims: Victims, command: list[str], nothing_left: Callable[[], None]
) -> None:
    def undo(*words: str) -> str:
        done = subprocess.run(
            [*command, "undo", *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    with _injector(victims.command_line("quota")) as (process, _):
        assert undo() == "nothing to undo\n"
        assert victims.group.limit_cores() == 0.5
        pid = victims.pid
        assert undo("--all") == f"undone: throttle of process {pid} to 0.50 of a core\n"
        assert json.loads(_stdout(process).read())["reason"] == "it was told to by another process"
        assert process.wait(20) == 0
    nothing_left()
    assert victims.are_well()
    assert json.loads(undo("--json")) == {"event": "undone", "injections": []}


def test_a_leftover_in_the_way_is_undone_first(
    victims: Victims, nothing_left: Callable[[], None]
) -> None:
    with _injector(victims.program("quota")) as (process, guard):
        _crash(process, guard)

    with throttle(victims.pid, to=0.3):
        assert victims.group.limit_cores() == pytest.approx(0.3)

    nothing_left()
    assert victims.are_well()


def test_the_owner_undoes_what_its_killed_guard_cannot(
    victims: Victims, nothing_left: Callable[[], None]
) -> None:
    with throttle(victims.pid, to=0.5) as injection:
        assert injection.guard_pid is not None
        os.kill(injection.guard_pid, signal.SIGKILL)
    assert injection.ended == "its guard was killed"
    nothing_left()
    assert victims.are_well()


def test_a_child_forked_meanwhile_does_not_keep_the_fault_alive(
    nothing_left: Callable[[], None],
) -> None:
    with burn([0], load=0.05) as injection:
        child = os.fork()
        if child == 0:  # pragma: no cover  it holds copies of all pipes
            signal.pause()
            os._exit(0)
    try:
        assert injection.ended == "it was asked to"
        nothing_left()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_guard_is_not_in_the_injectors_session() -> None:
    with burn([0], load=0.05) as injection:
        assert injection.guard_pid is not None
        assert os.getsid(injection.guard_pid) != os.getsid(0)


def test_starting_nothing_leaves_nothing(records: Path) -> None:
    burn([0])
    assert list(records.iterdir()) == []
    assert undo_leftovers() == ()


def test_an_injection_is_started_once() -> None:
    injection = burn([0], load=0.05)
    with injection, pytest.raises(InjectError, match="started before; make a new one"):
        injection.start()
    injection.stop()


def test_records_that_others_could_write_are_not_trusted(records: Path) -> None:
    records.chmod(0o777)
    with pytest.raises(InjectError, match="can be written by others; chmod 700 it"):
        burn([0], load=0.05).start()
    assert processes_of(records) == []


def test_a_record_that_makes_no_sense_is_named(records: Path) -> None:
    (records / "cpu-1-1.json").write_text("{}")
    with pytest.raises(InjectError, match=r"cpu-1-1\.json is no record of an injection"):
        undo_leftovers()
