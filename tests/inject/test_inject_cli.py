"""`failslow inject` as a person has it: what it says, where, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.inject.conftest import WAIT, Start
from tests.testbed import TestBed, until
from typer.testing import CliRunner

import failslow
from failslow.capture.ring import find_rings
from failslow.cli import app

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(command: list[str]) -> Run:
    """`run("undo")`: the finished command."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=60, check=False
        )

    return call


def test_it_says_what_is_in_force_and_that_it_is_undone(run: Run, start: Start) -> None:
    pid = str(start(WAIT).pid)

    done = run("throttle", "--pid", pid, "--to", "0.7", "--for", "0.2")

    first, last = done.stdout.splitlines()
    assert first == f"throttle: process {pid} to 0.70 of a core for 0.2 s"
    assert last.startswith("undone after 0.")
    assert last.endswith(" s: time is up")
    assert done.stderr.startswith("  cpu quota of 0.70 cores in ")
    assert done.returncode == 0


@pytest.fixture
def worker(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> subprocess.Popen[bytes]:
    """Rank 2 of the watched job exp7, with its ring."""
    monkeypatch.setenv("FAILSLOW_CAPTURE_FOLDER", str(tmp_path))
    made = (
        f"import sys; sys.path.append({str(Path(failslow.__file__).parents[1])!r})\n"
        "from failslow.capture.ring import RingWriter\n"
        "ring = RingWriter.create(job='exp7', rank=2, world_size=4, description={}, capacity=16)\n"
    )
    process = start(made + WAIT)
    until(lambda: find_rings("exp7"))
    return process


def test_a_watched_job_s_worker_is_found_by_its_rank(
    run: Run, worker: subprocess.Popen[bytes]
) -> None:
    done = run("throttle", "--rank", "2", "--job", "exp7", "--to", "0.7", "--for", "0.2")

    assert done.stdout.startswith(f"throttle: process {worker.pid} to 0.70 of a core"), done.stderr


def test_whom_to_throttle_must_be_told(
    worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FAILSLOW_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    for words, said in (
        ((), "throttle whom?"),
        (("--pid", "1", "--rank", "2"), "throttle whom?"),
        (("--rank", "3", "--job", "exp7"), "rank 3 of exp7 is not watched on this machine, only 2"),
        (("--rank", "2", "--job", "exp8"), "rank 2 of exp8 is not watched on this machine, no oth"),
        (("--rank", "2"), "no watched job under failslow-runs/"),
    ):
        result = CliRunner().invoke(app, ["inject", "throttle", "--to", "0.7", *words])
        assert result.exit_code == 1
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    worker.kill()
    worker.wait()
    gone = CliRunner().invoke(
        app, ["inject", "throttle", "--to", "0.7", "--rank", "2", "--job", "exp7"]
    )
    assert "rank 2 of exp7 is not watched" in gone.stderr


def test_json_is_one_object_a_line_and_nothing_else(run: Run, bed: TestBed) -> None:
    a, b = bed.nodes[0].namespace, bed.nodes[1]

    done = run(
        "link", "--from", a, "--to", b.namespace, "--rate", "50mbit", "--for", "0.2", "--json"
    )

    applied, undone = map(json.loads, done.stdout.splitlines())
    assert (done.stderr, done.returncode) == ("", 0)
    assert applied.pop("guard_pid") > 1
    assert applied == {
        "event": "applied",
        "kind": "link",
        "target": f"{a}/eth0 to {b.address}",
        "summary": f"{a}/eth0 to {b.address} at 50 Mbit/s",
        "how": f"htb class fa15:f000 on {a}/eth0",
        "for_s": 0.2,
    }
    assert undone.pop("after_s") >= 0.2
    assert undone == {"event": "undone", "kind": "link", "reason": "time is up"}


def test_a_terminal_shows_the_time_left(command: list[str]) -> None:
    ours, theirs = pty.openpty()
    words = [*command, "cpu", "--cores", "0", "--load", "0.05", "--for", "1.2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # the terminal's other end is closed
    finally:
        os.close(ours)
        process.communicate(timeout=60)

    assert b" s left; Ctrl-C undoes it" in shown
    assert shown.endswith(b"\r\x1b[K")
    assert process.returncode == 0


def test_a_fault_that_is_killed_is_an_error(command: list[str]) -> None:
    words = [*command, "cpu", "--cores", "0", "--load", "0.05", "--json"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        os.kill(json.loads(process.stdout.readline())["guard_pid"], 9)
        out, err = process.communicate(timeout=60)

    assert json.loads(out)["reason"] == "its guard was killed"
    assert err == "failslow: the fault ended too early: its guard was killed\n"
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["throttle", "--pid", "1", "--to", "0.5"], "process 1 runs this machine and is refused"),
        (["throttle", "--pid", "4711"], "Missing option '--to'; see failslow inject"),
        (["cpu", "--cores", "first"], "write it as 0,1 or 0-3"),
        (["link", "--from", "lo", "--rate", "50mbit"], "insist with --force"),
        (["link", "--from", "203.0.113.7", "--rate", "50mbit"], "no interface here has address"),
        (["link", "--from", "nix", "--rate", "50mbit"], "no namespace, interface or address 'nix'"),
        (["flood", "--from", "lo", "--to", "203.0.113.7"], "use --protocol udp"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(words: list[str], told: str) -> None:
    if words[0] in ("link", "flood") and (reason := TestBed.available()):
        pytest.skip(reason)
    done = CliRunner().invoke(app, ["inject", *words])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("failslow: ")
    assert told in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("throttle", "A quota of 0.5 halves what"),
        ("cpu", "Needed to slow a worker"),
    ],
)
def test_help_says_what_a_number_or_a_pid_is_for(command: str, says: str) -> None:
    done = CliRunner().invoke(app, ["inject", command, "--help"], env={"COLUMNS": "400"})
    assert says in " ".join(done.stdout.split())


def test_help_lists_the_faults() -> None:
    done = CliRunner().invoke(app, ["inject", "--help"])
    for name in ("throttle", "cpu", "link", "flood", "undo"):
        assert name in done.stdout
