"""`failslow replay`, as users have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.decide.jobs import Shares, facts, settings
from tests.decide.journals import Recorder, live
from typer.testing import CliRunner, Result

from failslow.cli import app
from failslow.decide.events import Pace, Relieved
from failslow.decide.policy import Policy
from failslow.journal import JournalWriter, read_journal
from failslow.records import Culprit


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "120"})


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A fault of 400 s that was taken to S2 and S3."""
    path = tmp_path / "journal.jsonl"
    live(path)
    return path


def test_table_compares_the_policies(journal: Path) -> None:
    result = run(journal.parent)
    assert result.exit_code == 0
    assert "1 fault, 6 min 40 s slow" in result.stdout
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "×1.00" in rows["clairvoyant"]
    assert "3 min 20 s" in rows["wait"]
    assert "ladder" in rows


def test_json_has_each_decision_with_its_arithmetic(journal: Path) -> None:
    found = document(journal, "--policy", "ladder", "--policy", "clairvoyant")
    assert found["schema"] == "failslow.replay/1"
    assert list(found["totals"]) == ["ladder", "clairvoyant"]
    (fault,) = found["jobs"][0]["faults"]
    assert (fault["duration_s"], fault["slowdown"], fault["ended"]) == (400.0, 2.0, True)
    assert fault["culprits"] == ["device rank 1"]
    decisions = fault["policies"]["ladder"]["decisions"]
    assert [d["level"] for d in decisions] == ["S2", "S3", "S1"]
    assert decisions[0]["threshold_s"] == pytest.approx(0.4)
    total = found["totals"]["ladder"]
    assert total["total_s"] == pytest.approx(total["lost_s"] + total["spent_s"])
    assert 1.0 <= total["of_best"] <= 3.0


def test_costs_given_change_the_decisions(journal: Path) -> None:
    found = document(journal, "--policy", "ladder", "--cost", "S3=1000", "--cost", "S2=2")
    decisions = found["jobs"][0]["faults"][0]["policies"]["ladder"]["decisions"]
    assert [(d["level"], d["threshold_s"]) for d in decisions] == [("S2", 2.0), ("S1", None)]


def test_history_moves_the_thresholds_of_the_learning_policy(journal: Path) -> None:
    found = document(journal, "--policy", "learned", "--history", journal, "--trust", "0.25")
    decision = found["jobs"][0]["faults"][0]["policies"]["learned"]["decisions"][0]
    assert decision["trust_factor"] == 0.25


def test_decisions_are_told_on_demand(journal: Path) -> None:
    assert "ladder after" not in run(journal).stdout
    told = run(journal, "--decisions").stdout
    assert "ladder after" in told
    assert "is worth its 0.4 s" in told


def test_journal_without_the_culprits_own_times_is_said_to_hide_restores(journal: Path) -> None:
    told = "1 of the faults have no own times of their culprits"
    assert told not in run(journal, "--policy", "ladder").stderr
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"kind":"culpritpace"' not in line]
    assert len(kept) == len(lines) - 2
    journal.write_text("".join(kept), encoding="utf-8")
    result = run(journal, "--policy", "ladder")
    assert result.exit_code == 0
    assert told in " ".join(result.stderr.split())


def test_observed_job_is_planned_for_once_its_layout_is_known(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    job = Recorder(path, Policy(Shares({}), settings(mode="observe")))
    culprit = Culprit(rank=1, what="compute", slowdown=2.0)
    job.at(0.0, Pace(episode="e1", slowdown=2.0, lost_s=0.0), culprits=(culprit,))
    job.at(600.0, Relieved(episode="e1", lost_s=300.0))
    blind = document(path, "--policy", "redistribute")["totals"]["redistribute"]
    assert blind == {"lost_s": 300.0, "spent_s": 0.0, "total_s": 300.0, "of_best": None}
    told = document(path, "--policy", "redistribute", "--dp", "4", "--microbatches", "32")
    assert told["totals"]["redistribute"]["lost_s"] == pytest.approx(600.0 * (1 - 1 / 1.25))
    job.write(700.0, facts())
    known = document(path, "--policy", "redistribute")
    assert known["totals"] == told["totals"]
    assert len(list(read_journal(path))) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--policy", "guess"], "'guess' is no policy; choose from recorded, wait"),
        (["--cost", "S1=4"], "'S1=4' is no cost; give one as S3=40"),
        (["--cost", "S3=soon"], "'S3=soon' is no cost"),
        (["--trust", "2"], "trust = 2.0 from --trust"),
    ],
)
def test_bad_option_is_one_line(journal: Path, arguments: list[str], told: str) -> None:
    result = run(journal, *arguments)
    assert result.exit_code == 1
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_missing_journal_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "none.jsonl")
    assert result.exit_code == 1
    assert "no watched job there" in result.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "the journal is empty"), (b"\x00\xff\n# failslow\n", "2 lines that no journal has")],
)
def test_what_is_no_journal_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(content)
    result = run(path, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"failslow: {path}: ")
    assert says in line


def test_a_run_is_named_as_for_the_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "failslow-runs" / "pretrain7"
    folder.mkdir(parents=True)
    live(folder / "journal.jsonl")
    monkeypatch.chdir(tmp_path)
    assert run("pretrain7").stdout.startswith("pretrain7 · 1 fault, 6 min 40 s slow")
    assert document("pretrain7", "--history", "pretrain7")["settings"]["trust"] == 0.5


def test_journal_without_faults_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    JournalWriter(path).append(facts(), t=0.0)
    assert "0 faults" in run(path).stdout
    assert document(path)["jobs"][0]["faults"] == []
