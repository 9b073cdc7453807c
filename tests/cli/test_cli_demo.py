"""`failslow demo`: what it reads from a journal, what it prints, and the real thing (slow)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cli.conftest import Run, Spawn
from tests.report.sample_journals import dp4
from tests.report.sample_script import Script, write

from failslow import demo as package
from failslow.cli.demo import _are_equal, _table, shown
from failslow.demo import Drill, Fault, SteeredJob, train_script
from failslow.demo.drill import _Seen, _sum_up
from failslow.lab import TestBed
from failslow.records import Episode

KEYS = [
    *("fault", "target", "onset_delay_s", "verdict_delay_s", "culprit_correct", "named", "cause"),
    *("level", "plan", "iterations_per_s", "removed_pct", "optimum_pct", "pause_s", "action_s"),
    "relieved",
]
LOSSES = [5.5, 4.25, 3.0]


def fault(rank: int) -> Fault:
    return Fault(
        name="throttle",
        target={"rank": rank},
        inject=nullcontext,
        is_culprit=lambda f: f.what == "device" and f.ranks == (rank,),
    )


def recorded(script: Script, folder: Path) -> SteeredJob:
    """A job whose training is over."""
    write(script, folder / "run")
    (folder / "losses.jsonl").write_text("".join(f"{loss!r}\n" for loss in LOSSES))
    return SteeredJob(folder, [], None)


def drilled(job: SteeredJob, of: Fault) -> Drill:
    """What became of the fault that a recorded journal tells of."""
    onset = next(e for e in job.entries("episode") if isinstance(e.record, Episode))
    began_t = onset.tags["start_t"] - 0.5
    ended_t = next(e.t for e in job.entries("culpritpace"))
    return _sum_up(_Seen(job, began_t), of, 0.08, ended_t, relieved=True)


def test_a_drill_is_summed_up_from_the_journal_alone(tmp_path: Path) -> None:
    drill = drilled(recorded(dp4(), tmp_path), fault(2))
    told = drill.document()
    assert list(told) == KEYS
    assert told["culprit_correct"]
    assert told["named"] == ["device rank 2"]
    assert told["cause"] == "device degradation (thermal)"
    assert (told["level"], told["plan"]) == ("S2", [9, 9, 6, 8])
    assert told["onset_delay_s"] == pytest.approx(0.5 + 34 * 1.39 * 0.08, rel=0.02)
    assert told["verdict_delay_s"] == pytest.approx(3 * 1.39 * 0.08 + 0.82, rel=0.05)
    rates = told["iterations_per_s"]
    assert rates["healthy"] == pytest.approx(12.5)
    assert rates["slow"] == pytest.approx(12.5 / 1.39, rel=0.01)
    assert rates["mitigated"] == pytest.approx(12.5 / 1.11, rel=0.01)
    assert told["removed_pct"] == pytest.approx(100 * 0.28 / 0.39, abs=3.0)
    # 32 micro-batches, one of four replicas at 1 / 1.39 of its speed: 9 9 8 6 take ×1.125
    assert told["optimum_pct"] == pytest.approx(100 * (0.39 - 0.125) / 0.39, abs=3.0)
    assert (told["pause_s"], told["action_s"], told["relieved"]) == (0.82, 0.06, True)


def test_a_verdict_against_another_worker_is_wrong(tmp_path: Path) -> None:
    drill = drilled(recorded(dp4(), tmp_path), fault(3))
    assert not drill.culprit_correct


def test_a_fault_nobody_noticed_has_no_numbers(tmp_path: Path) -> None:
    script = Script(ranks=4, per_node=4, healthy_s=0.08)
    script.steps(50)
    job = recorded(script.finish(), tmp_path)
    told = _sum_up(_Seen(job, 0.0), fault(2), 0.08, script.t, relieved=False).document()
    assert told["iterations_per_s"] == {"healthy": 12.5, "slow": None, "mitigated": None}
    assert {told[key] for key in ("onset_delay_s", "verdict_delay_s", "level", "pause_s")} == {None}
    assert (told["culprit_correct"], told["named"], told["removed_pct"]) == (False, [], None)


@pytest.mark.parametrize(
    ("losses", "plain", "equal"),
    [
        ([5.0, 4.0], [5.0, 4.00003], True),
        ([5.0, 4.0], [5.0, 4.0001], False),
        ([5.0, 4.0], [5.0], False),
        ([], [], False),
        ([5.0], [5.0, 4.0], True),
    ],
)
def test_losses_are_equal_up_to_rounding(
    losses: list[float], plain: list[float], equal: bool
) -> None:
    assert _are_equal(losses, plain) is equal


def _played(monkeypatch: pytest.MonkeyPatch, *, root: bool) -> None:
    """The command on a recorded job instead of a training."""
    made: dict[str, Any] = {}

    @contextmanager
    def steered_job(folder: Path, **options: Any) -> Iterator[SteeredJob]:
        made.update(options)
        job = recorded(dp4(), folder)
        (folder / "losses.jsonl").write_text("".join(f"{x!r}\n" for x in LOSSES * 10))
        yield job

    def faults_here(job: SteeredJob) -> list[Fault]:
        return [fault(2)] * (2 if made["lab"] else 1)

    def run_drill(job: SteeredJob, of: Fault, *, say: object) -> Drill:
        return drilled(job, of)

    def losses_without(folder: Path, **options: Any) -> list[float]:
        return LOSSES * 10

    why = None if root else "network namespaces and control groups need root"
    monkeypatch.setattr(TestBed, "available", staticmethod(lambda: why))
    monkeypatch.setattr(package, "steered_job", steered_job)
    monkeypatch.setattr(package, "faults_here", faults_here)
    monkeypatch.setattr(package, "run_drill", run_drill)
    monkeypatch.setattr(package, "losses_without", losses_without)


def test_without_root_it_does_what_it_can_and_says_what_it_leaves_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _played(monkeypatch, root=False)
    page = tmp_path / "demo.html"
    done = run("demo", "--json", "--html", page)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["schema"] == "failslow.demo/1"
    assert [event["fault"] for event in told["events"]] == ["throttle"]
    assert told["skipped"] == ["link: network namespaces and control groups need root"]
    assert told["losses_equal"] is True
    assert told["false_alarms"] == 0
    assert told["report"] == str(page)
    assert "<html" in page.read_text(encoding="utf-8")
    shown = run("demo", "--html", page, "--no-losses")
    assert "skipped link: network namespaces and control groups need root" in shown.output
    assert "losses not compared" in shown.output


def test_with_root_nothing_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _played(monkeypatch, root=True)
    told = json.loads(run("demo", "--json", "--html", tmp_path / "demo.html").stdout)
    assert told["skipped"] == []
    assert len(told["events"]) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_cuts_no_name_and_tells_a_forecast_from_what_came(
    tmp_path: Path, width: int
) -> None:
    drill = drilled(recorded(dp4(), tmp_path), fault(2))
    drill = replace(drill, named=("link fs10845n2>fs10845n1",), target={"rank": 2, "peer": 1})
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(_table([drill]))
    told = " ".join(captured.get().split())
    assert "fs10845n2>" in told
    assert "fs10845n1" in told
    assert "…" not in told
    assert "foreseen" in told
    assert "possible" not in told


def test_on_a_terminal_the_workers_are_shown_live_below_what_is_told(tmp_path: Path) -> None:
    job, screen = recorded(dp4(), tmp_path), StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with shown(job.journal, console) as say:
        say("injected: throttle [rank 2]")
    seen = screen.getvalue()
    assert "injected: throttle [rank 2]" in seen
    table = seen.partition("injected")[2]
    assert all(f" {rank} " in table for rank in range(4))
    assert "healthy 80.0 ms" in table


def test_being_told_to_end_leaves_nothing_behind(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _played(monkeypatch, root=False)
    before = signal.getsignal(signal.SIGTERM)  # another test of this process may have set one
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(package, "run_drill", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert run("demo", "--html", tmp_path / "demo.html").exit_code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_terminal_there_are_lines_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, screen = recorded(dp4(), tmp_path), StringIO()
    with shown(job.journal, Console(file=screen)) as say:
        say("undone")
    assert screen.getvalue() == ""
    assert capsys.readouterr().err == "undone\n"


def test_what_loads_no_failslow_is_refused_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    done = run("demo")
    assert done.exit_code == 1
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps failslow from loading; unset it" in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--html", "nosuch/x.html"], "nosuch/x.html: cannot be written: there is no such folder"),
        (["--html", "file", "--dir", "job"], "file: is there and is no HTML page"),
        (["--dir", "file"], "--dir file: is a file; name a folder"),
        (["--dir", "file/job"], "--dir file/job: cannot be made: Not a directory"),
    ],
)
def test_what_it_could_not_write_is_refused_before_it_trains(
    arguments: list[str],
    says: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    done = run("demo", *arguments)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"failslow: {says}")


def test_a_job_is_ended_as_a_training_ends(tmp_path: Path) -> None:
    script = Script(ranks=1, per_node=1, healthy_s=0.08)
    script.steps(5)
    write(script.finish(), tmp_path / "done")
    lines = (tmp_path / "done" / "journal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "end").write_text(lines[-1])
    trains = "trap 'cat end >> run/journal.jsonl; exit' TERM; echo; while :; do sleep 0.02; done"
    with subprocess.Popen(["sh", "-c", trains], cwd=tmp_path, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        began_s = time.monotonic()
        with closing(SteeredJob(tmp_path, [worker.pid], None)):
            pass
        assert (tmp_path / "run" / "journal.jsonl").read_text() == "".join(lines)
        assert time.monotonic() - began_s < 8.0
        worker.wait(10.0)


def test_the_program_it_trains_is_there() -> None:
    assert train_script().parent.joinpath("trainer.py").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_demonstration_names_and_heals_each_fault(spawn: Spawn, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demonstration trains with torch")
    done = spawn(
        "demo", "--json", "--html", tmp_path / "demo.html", "--dir", tmp_path / "job", limit_s=300
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    told = json.loads(done.stdout)
    assert told["schema"] == "failslow.demo/1"
    expected = ["throttle"] if TestBed.available() else ["throttle", "link"]
    assert [event["fault"] for event in told["events"]] == expected
    assert [text.partition(":")[0] for text in told["skipped"]] == ["throttle", "link"][
        len(expected) :
    ]
    for event, level in zip(told["events"], ("S2", "S3"), strict=False):
        assert list(event) == KEYS
        assert event["culprit_correct"], event
        assert event["level"] == level, event
        assert event["removed_pct"] > 40.0, event
        assert event["pause_s"] < 5.0
        assert event["relieved"]
    assert told["losses_equal"] is True
    assert told["false_alarms"] == 0
    assert (tmp_path / "demo.html").stat().st_size > 100_000
    assert (tmp_path / "job" / "run" / "journal.jsonl").is_file()
