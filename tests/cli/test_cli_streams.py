"""Streams that are closed, full or narrow, names that bite, pages that would replace a log."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

MEGATRON = "megatron_slow.log"
TOLD = "1 fail-slow, 2 min 11 s lost"

pytestmark = pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")


def shell(script: str, *arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script whose "$1", "$2" ... are the arguments."""
    done = subprocess.run(
        ["sh", "-c", script, "sh", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("extra", ["", "--json"])
def test_a_closed_stdout_is_one_line_on_stderr(
    command: Sequence[str], examples: Path, extra: str
) -> None:
    code, _, stderr = shell(f'"$1" analyze "$2" {extra} >&-', *command, examples / MEGATRON)

    assert code == 1
    assert stderr == "failslow: standard output is closed; send it to a file, or use --quiet\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line_on_stderr(
    command: Sequence[str], examples: Path
) -> None:
    code, _, stderr = shell('"$1" analyze "$2" --json >/dev/full', *command, examples / MEGATRON)

    assert code == 1
    assert stderr.startswith("failslow: standard output cannot be written: No space left")
    assert len(stderr.splitlines()) == 1


def test_with_stderr_closed_no_error_gets_into_the_json(
    command: Sequence[str], examples: Path, tmp_path: Path
) -> None:
    code, stdout, _ = shell(
        '"$1" analyze "$2" "$3" --json 2>&-', *command, examples / MEGATRON, tmp_path / "gone.log"
    )

    assert code == 1
    assert len(json.loads(stdout)["jobs"]) == 1


@pytest.mark.parametrize(
    ("stdin", "told"), [("<&-", "is closed"), ("</proc/self/mem", "Input/output error")]
)
def test_a_stdin_that_cannot_be_read_is_one_line(
    command: Sequence[str], stdin: str, told: str
) -> None:
    code, stdout, stderr = shell(f'"$1" analyze - {stdin}', *command)

    assert (code, stdout) == (1, "")
    assert stderr.startswith("failslow: <stdin>: ")
    assert told in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("columns", ["0", "20", "45"])
def test_a_narrow_terminal_loses_no_word_of_the_tables(
    command: Sequence[str], examples: Path, columns: str
) -> None:
    _, stdout, _ = shell('"$1" analyze "$2"', *command, examples / MEGATRON, COLUMNS=columns)
    for word in ("fail-slow", "step 920", "slowdown", "×1.40", "time lost", TOLD):
        assert word in stdout
    _, stdout, _ = shell('"$1" study "$2"', *command, examples / MEGATRON, COLUMNS=columns)
    for word in (MEGATRON[:9], "fail-slows", "longest", "×1.40"):
        assert word in stdout
    assert "…" not in stdout


def test_control_characters_of_a_name_do_not_reach_the_terminal(
    run: Any, examples: Path, tmp_path: Path
) -> None:
    log = tmp_path / "a\x1b[31mb\x07c\x9bd.log"
    shutil.copy(examples / MEGATRON, log)

    result = run("analyze", log)
    gone = run("analyze", f"{log}.gone")

    for text in (result.stdout, gone.stderr):
        assert "a\ufffd[31mb" in text
        assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_a_page_never_replaces_what_is_no_page(run: Any, examples: Path, tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("a.log", "b.log")]
    for log in logs:
        shutil.copy(examples / MEGATRON, log)

    result = run("study", "--html", *logs)  # what `study --html *.log` becomes

    assert result.exit_code == 1
    assert "a.log: is there and is no HTML page" in result.stderr
    assert logs[0].read_bytes() == (examples / MEGATRON).read_bytes()
    page = tmp_path / "page.html"
    page.touch()
    for _ in range(2):  # an empty file and a page of ours are replaced
        assert run("analyze", logs[0], "--html", page).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_a_page_goes_into_a_pipe(command: Sequence[str], examples: Path) -> None:
    code, stdout, stderr = shell(
        '"$1" analyze "$2" --quiet --html /dev/stdout | tail -n 1', *command, examples / MEGATRON
    )

    assert (code, stdout, stderr) == (0, "</html>\n", "")


def test_an_empty_path_is_not_the_working_folder(run: Any) -> None:
    result = run("analyze", "")

    assert result.exit_code == 1
    assert result.stderr == (
        "failslow: an empty path; name a file, a folder, a glob, or - for stdin\n"
    )


def test_a_log_is_one_job_however_it_is_named(run: Any, examples: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    shutil.copy(examples / MEGATRON, log)
    (tmp_path / "latest.log").symlink_to(log)

    again = tmp_path / ".." / tmp_path.name / "*.log"
    document = json.loads(run("analyze", tmp_path, log, again, "--json").stdout)

    assert [job["source"] for job in document["jobs"]] == [str(log)]
