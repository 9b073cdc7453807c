"""`failslow report`, as users have it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.report.sample_journals import dp4, write
from tests.report.sample_script import Script
from typer.testing import CliRunner, Result

from failslow.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no run named by the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FAILSLOW_DIR", raising=False)
    return tmp_path


@pytest.fixture
def newest(folder: Path) -> Path:
    """Two runs, of which the second is the newest."""
    old = Script(2, 1, 0.1)
    old.steps(30)
    write(old.finish(), folder / "failslow-runs" / "old")
    path = write(dp4(), folder / "failslow-runs" / "pretrain7")
    os.utime(folder / "failslow-runs" / "old" / "journal.jsonl", (1.0, 1.0))
    return path


def test_the_newest_run_is_told_and_its_page_written(newest: Path, folder: Path) -> None:
    result = run()

    assert result.exit_code == 0
    assert "pretrain7 · 4 workers on 2 nodes" in result.stdout
    assert "proven: device of rank 2" in result.stdout
    assert result.stderr == "wrote failslow-report.html\n"
    assert (folder / "failslow-report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("named", ["old", "failslow-runs/old", "failslow-runs/old/journal.jsonl"])
def test_a_run_is_named_by_job_folder_or_journal(newest: Path, named: str) -> None:
    result = run(named, "--no-html", "--fail-on-slow")

    assert result.exit_code == 0
    assert result.stdout.startswith("old · 2 workers on 2 nodes · 30 iterations")
    assert result.stderr == ""


def test_a_probes_folder_has_its_run_inside(newest: Path, folder: Path) -> None:
    probe = folder / "store" / "probes" / "4n-0007.1"
    probe.mkdir(parents=True)
    newest.parent.rename(probe / "run")

    told = run(probe, "--no-html", "--fail-on-slow")
    assert told.exit_code == 3
    assert told.stdout.startswith("4n-0007.1 · 4 workers on 2 nodes")
    for command in (["status"], ["replay", "--quiet"]):
        shown = CliRunner().invoke(app, [*command, str(probe)])
        assert shown.exit_code == 0, shown.output


def test_a_folders_own_journal_comes_first(newest: Path, folder: Path) -> None:
    (folder / "failslow-runs" / "old").rename(newest.parent / "run")

    assert run(newest.parent, "--no-html").stdout.startswith("pretrain7 · ")


def test_a_journal_of_any_name_is_read(newest: Path, folder: Path) -> None:
    newest.rename(folder / "kept.jsonl")

    assert run("kept.jsonl", "--no-html").stdout.startswith("kept.jsonl · 4 workers")


def test_json_is_the_schema_and_nothing_else(newest: Path, folder: Path) -> None:
    result = run("--json")

    found = json.loads(result.stdout)
    assert (found["schema"], found["job"]) == ("failslow.report/1", "pretrain7")
    assert result.stderr == ""
    assert not (folder / "failslow-report.html").exists()
    assert run("--json", "--html", "x.html").stderr == "wrote x.html\n"


def test_a_fail_slow_is_exit_code_3_when_asked_for(newest: Path) -> None:
    assert run("--quiet", "--no-html", "--fail-on-slow").exit_code == 3
    assert run("--quiet", "--no-html").exit_code == 0


def one_line(result: Result) -> str:
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("failslow: ")
    return line


def test_what_cannot_be_told_is_one_line(folder: Path) -> None:
    assert "failslow-runs/: no watched job there" in one_line(run())
    assert "nope: no watched job there" in one_line(run("nope"))
    (folder / "empty.jsonl").touch()
    assert "empty.jsonl: the journal is empty" in one_line(run("empty.jsonl"))
    (folder / "notes.txt").write_text("hello\n")
    assert "1 line that no journal has" in one_line(run("notes.txt"))


def test_a_page_replaces_no_other_file(newest: Path, folder: Path) -> None:
    (folder / "train.log").write_text("step 1\n")

    result = run("--quiet", "--html", "train.log")
    assert result.exit_code == 1
    assert "train.log: is there and is no HTML page" in result.stderr
    assert (folder / "train.log").read_text() == "step 1\n"
    assert "there is no such folder" in one_line(run("--html", "no/such/folder.html"))


def test_a_job_that_never_iterated_still_has_its_page(folder: Path) -> None:
    write(Script(2, 1, 0.1), folder / "failslow-runs" / "stuck")
    result = run()

    assert result.exit_code == 0
    assert "no iteration was seen" in result.stdout
    assert (folder / "failslow-report.html").exists()
