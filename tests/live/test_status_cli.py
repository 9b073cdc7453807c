"""`failslow status` as a process, on journals that are really written meanwhile."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from failslow.journal import JournalWriter
from failslow.records import Episode, StepSample

SCRIPT = str(Path(sys.executable).with_name("failslow"))
PATIENCE_S = 60.0
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Job:
    """Writes the journal of a running job of two workers, as its controller does."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.writer = JournalWriter(folder / "journal.jsonl", **settings)
        self.step = 0
        self.health("controller", event="started", launch="1-2")

    def health(self, what: str, ok: bool = True, **more: Any) -> None:
        record = {"what": what, "ok": ok, "message": what, **more}
        self.writer.append(record, t=time.time(), kind="health")

    def steps(self, count: int, duration_s: float = 0.1) -> None:
        for _ in range(count):
            self.step += 1
            sample = StepSample(step=self.step, duration_s=duration_s, end_s=0.1 * self.step)
            self.writer.append(sample, t=time.time(), workers=2, healthy_s=0.1)
        for rank in (0, 1):
            tags: dict[str, Any] = {"rank": rank, "node": "gpu-17", "healthy_s": 0.1, "state": "ok"}
            self.writer.append(sample, t=time.time(), **tags)

    def slow(self) -> None:
        episode = Episode(
            start_step=self.step - 10,
            end_step=None,
            start_s=1.0,
            end_s=None,
            duration_s=1.0,
            iteration_s=0.14,
            baseline_s=0.1,
            slowdown=1.4,
            peak_slowdown=1.5,
            lost_s=0.4,
            confidence=0.99,
        )
        tags: dict[str, Any] = {
            "event": "onset",
            "id": "e1",
            "start_t": time.time(),
            "slowdown_now": 1.4,
        }
        self.writer.append(episode, t=time.time(), **tags)


def status(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")}
    return subprocess.run(
        [SCRIPT, "status", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=plain | environ,
        timeout=PATIENCE_S,
        check=False,
    )


def run_folder(tmp_path: Path, name: str = "pretrain7") -> Path:
    folder = tmp_path / "failslow-runs" / name
    folder.mkdir(parents=True)
    return folder


def test_it_prints_the_newest_run_once(tmp_path: Path) -> None:
    for name in ("older", "newer"):
        job = Job(run_folder(tmp_path, name))
        job.steps(20)
    os.utime(tmp_path / "failslow-runs" / "older" / "journal.jsonl", (1, 1))
    done = status(cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("newer · healthy · step 20")
    assert "monitoring: healthy" in done.stdout
    assert "gpu-17" in done.stdout


@pytest.mark.parametrize("named", ["pretrain7", "failslow-runs/pretrain7", "absolute", "variable"])
def test_a_run_is_found_by_name_folder_or_variable(tmp_path: Path, named: str) -> None:
    folder = run_folder(tmp_path)
    Job(folder).steps(20)
    Job(run_folder(tmp_path, "another")).steps(3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if named == "absolute":
        done = status(str(folder), "--json", cwd=elsewhere)
    elif named == "variable":
        done = status("--json", cwd=elsewhere, FAILSLOW_DIR=str(folder))
    else:
        done = status(named, "--json", cwd=tmp_path)

    found = json.loads(done.stdout)
    assert (found["job"], found["phase"], found["step"]) == ("pretrain7", "healthy", 20)


def test_a_slow_job_exits_with_3_when_asked(tmp_path: Path) -> None:
    job = Job(run_folder(tmp_path))
    job.steps(20)
    assert status("--fail-on-slow", cwd=tmp_path).returncode == 0
    job.steps(20, 0.14)
    job.slow()
    assert status(cwd=tmp_path).returncode == 0
    done = status("--fail-on-slow", "--json", cwd=tmp_path)

    assert done.returncode == 3
    assert json.loads(done.stdout)["slow"]["slowdown"] == 1.4


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["."]])
def test_no_run_is_one_line_with_a_hint(tmp_path: Path, arguments: list[str]) -> None:
    done = status(*arguments, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "failslow doctor" in done.stderr


def test_of_a_run_without_an_entry_nothing_is_said_to_be_well(tmp_path: Path) -> None:
    journal = run_folder(tmp_path) / "journal.jsonl"
    journal.touch()
    done = status("pretrain7", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pretrain7 · nothing was written yet\n")
    assert "healthy" not in done.stdout

    journal.write_bytes(b"\x00\xff\nno journal\n")
    done = status("pretrain7", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "pretrain7/journal.jsonl: the journal is 2 lines that no journal has" in line


class Terminal:
    """A terminal of 100 × 30 with a command in it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.shown = b""

    def read_until(self, wanted: bytes) -> None:
        """Until what is shown from now on holds `wanted`."""
        shown = b""
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in shown:
            ready, _, _ = select.select([self._descriptor], [], [], deadline - time.monotonic())
            assert ready, f"{wanted!r} never came; seen: {(self.shown + shown)[-3000:]!r}"
            shown += os.read(self._descriptor, 65536)
        self.shown += shown

    def read_rest(self) -> None:
        """Until the terminal is closed."""
        try:
            while piece := os.read(self._descriptor, 65536):
                self.shown += piece
        except OSError:  # how a pty says that its other end is closed
            pass

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)


@contextmanager
def watching(*arguments: str, cwd: Path) -> Iterator[Terminal]:
    main, worker = pty.openpty()
    plain = {k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")}
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _TAKE_TERMINAL),
            *(SCRIPT, "status", "--watch", "--interval", "0.1", *arguments),
        ],
        stdin=worker,
        stdout=worker,
        stderr=worker,
        cwd=cwd,
        env=plain | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(worker)
    try:
        yield Terminal(process, main)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(main)


def test_watching_follows_a_job_from_before_its_start_to_q(tmp_path: Path) -> None:
    with watching(cwd=tmp_path) as terminal:
        terminal.read_until(b"failslow doctor")
        job = Job(run_folder(tmp_path))
        job.steps(20)
        terminal.read_until(b"step 20")
        job.steps(20, 0.14)
        job.slow()
        terminal.read_until(b"fail-slow")
        terminal.press(b"q")
        terminal.read_rest()
        code = terminal.process.wait(timeout=PATIENCE_S)

    assert code == 0
    assert b"Traceback" not in terminal.shown


def test_watching_ends_with_the_job_and_says_so(tmp_path: Path) -> None:
    job = Job(run_folder(tmp_path))
    job.steps(20)
    job.health("controller", event="ended", launch="1-2")
    job.health("controller", event="started", launch="1-3")  # again: that was not the end
    with watching(cwd=tmp_path) as terminal:
        job.steps(5)
        terminal.read_until(b"step 25")
        job.steps(5)
        job.health("controller", event="ended", launch="1-3")
        terminal.read_rest()
        code = terminal.process.wait(timeout=PATIENCE_S)

    assert code == 0
    last, _, said = terminal.shown.rpartition(b"step 30")
    assert last
    assert said.endswith(b"the job has ended\r\n")


@pytest.mark.parametrize("way", ["key", "signal"])
def test_ctrl_c_leaves_quietly(tmp_path: Path, way: str) -> None:
    Job(run_folder(tmp_path)).steps(20)
    with watching(cwd=tmp_path) as terminal:
        terminal.read_until(b"step 20")
        if way == "key":
            terminal.press(b"\x03")
        else:
            terminal.process.send_signal(signal.SIGINT)
        terminal.read_rest()
        code = terminal.process.wait(timeout=PATIENCE_S)

    assert code == 0
    assert b"Traceback" not in terminal.shown
    assert b"Abort" not in terminal.shown


def test_watching_outlives_rotation_truncation_and_removal(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    job = Job(folder, max_bytes=4000)
    job.steps(20)
    with watching(cwd=tmp_path) as terminal:
        terminal.read_until(b"step 20")
        for _ in range(10):  # rotates several times
            job.steps(20)
        terminal.read_until(b"step 220")
        os.truncate(folder / "journal.jsonl", 0)
        job.steps(5)
        terminal.read_until(b"step 225")
        (folder / "journal.jsonl").unlink()
        job.steps(5)
        terminal.read_until(b"step 230")
        terminal.press(b"q")
        terminal.read_rest()
        assert terminal.process.wait(timeout=PATIENCE_S) == 0


def test_watched_json_is_one_line_a_change_and_ends_with_its_reader(tmp_path: Path) -> None:
    job = Job(run_folder(tmp_path))
    job.steps(20)
    process = subprocess.Popen(
        [SCRIPT, "status", "pretrain7", "--watch", "--interval", "0.1", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        while json.loads(process.stdout.readline())["step"] != 20:
            pass
        job.steps(5)
        while json.loads(process.stdout.readline())["step"] != 25:
            pass
        process.stdout.close()
        job.steps(5)
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            job.steps(1)
            time.sleep(0.05)
        assert process.wait(timeout=1) == 0
        assert process.stderr.read() == b""
