"""The command as a process: start-up time, pipes that close, streams, help."""

from __future__ import annotations

import json
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import failslow


def test_help_is_quick_and_imports_nothing_heavy(command: Sequence[str]) -> None:
    code = (
        "import sys; from failslow.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print([m for m in ('numpy', 'scipy', 'plotly', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"

    # processor time, and the best of a few: the machine may be busy with something else
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--help"], capture_output=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(costs) < 0.5


def test_analysing_does_not_import_plotly_or_torch(examples: Path) -> None:
    code = (
        "import sys; from failslow.cli import app\n"
        "app(['analyze', sys.argv[1], '--quiet'], standalone_mode=False)\n"
        "print([m for m in ('plotly', 'torch', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(examples)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["analyze"], ["study"], ["analyze", "--json"]])
def test_a_reader_that_leaves_is_no_error(
    command: Sequence[str], examples: Path, arguments: list[str]
) -> None:
    process = subprocess.Popen(
        [*command, *arguments, str(examples)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    code = process.wait(timeout=60)

    assert stderr == b""
    assert code == 0


def test_help_into_a_closed_pipe_is_quiet(command: Sequence[str]) -> None:
    process = subprocess.Popen(
        [*command, "analyze", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)

    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


def test_a_terminal_that_knows_only_ascii_gets_question_marks(
    command: Sequence[str], examples: Path
) -> None:
    done = subprocess.run(
        [*command, "analyze", str(examples / "megatron_slow.log")],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        timeout=60,
        check=True,
    )

    assert b"?1.40" in done.stdout


def read_until(descriptor: int, wanted: bytes) -> bytes:
    """What a terminal shows up to `wanted`, or up to its end."""
    shown = b""
    while wanted not in shown:
        ready, _, _ = select.select([descriptor], [], [], 60)
        assert ready, f"nothing more came after {shown!r}"
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # how a pty says that its other end is closed
            break
        if not piece:
            break
        shown += piece
    return shown


def test_progress_appears_on_a_terminal_once_it_takes_long_and_stdout_stays_pure(
    command: Sequence[str], examples: Path
) -> None:
    main, worker = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(
        [*command, "analyze", "-", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=worker,
        env=environment,
    ) as process:
        os.close(worker)
        shown = read_until(main, b"0/1")  # it waits for us, so a second passes
        stdout, _ = process.communicate((examples / "megatron_slow.log").read_bytes(), timeout=60)
    read_until(main, b"nothing more")
    os.close(main)

    assert b"0/1" in shown
    assert json.loads(stdout)["jobs"][0]["source"] == "<stdin>"
    assert process.returncode == 0


def test_ctrl_c_leaves_quietly_with_130(command: Sequence[str]) -> None:
    main, worker = pty.openpty()
    with subprocess.Popen(
        [*command, "analyze", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=worker,
        # tests started by a shell in the background inherit that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no other thread runs
    ) as process:
        os.close(worker)
        read_until(main, b"0/1")  # it is at work, reading
        # a signal just before read() blocks is noticed with the next one: Python's own race
        for _ in range(6):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
                break
        shown = read_until(main, b"no such words")
        assert process.wait(timeout=60) == 130
    os.close(main)

    assert b"Traceback" not in shown


def test_ctrl_c_during_the_imports_leaves_quietly_with_130(command: Sequence[str]) -> None:
    interrupted = (
        "import runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", interrupted, *command, "version"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_colours_are_for_terminals_only(command: Sequence[str], examples: Path) -> None:
    log = str(examples / "megatron_slow.log")
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"}
    main, worker = pty.openpty()
    with subprocess.Popen(
        [*command, "analyze", log], stdout=worker, stderr=worker, env=environment
    ) as process:
        os.close(worker)
        shown = read_until(main, b"no such words")
        assert process.wait(timeout=60) == 0
    os.close(main)
    piped = subprocess.run(
        [*command, "analyze", log], capture_output=True, env=environment, timeout=60, check=True
    )

    assert b"\x1b[" in shown
    assert b"\x1b[" not in piped.stdout


def test_the_version_is_that_of_the_package(run: Any) -> None:
    for arguments in (["version"], ["--version"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert result.stdout == f"failslow {failslow.__version__}\n"


@pytest.mark.parametrize("command_name", ["analyze", "study", "version"])
def test_every_command_shows_an_example_in_its_help(run: Any, command_name: str) -> None:
    result = run(command_name, "--help")

    assert result.exit_code == 0
    assert f"failslow {command_name}" in result.stdout.split("Example", 1)[1]


def test_no_arguments_show_the_help(run: Any) -> None:
    assert run().stdout == run("--help").stdout


def test_an_unknown_command_is_one_line(run: Any) -> None:
    result = run("analyse")

    assert result.exit_code == 1
    assert result.stderr.startswith("failslow: No such command 'analyse'")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_head_of_a_long_output_is_quiet(command: Sequence[str], examples: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{command[0]}' analyze '{examples}' --json | head -n 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert (done.stdout, done.stderr) == ("{\n", "")
