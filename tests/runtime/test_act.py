"""A person's order: left in the run's folder, taken by the controller, answered in the journal."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from failslow.cli import app
from failslow.errors import InputError
from failslow.journal import JournalWriter
from failslow.records import Decision, Rung
from failslow.runtime.acts import take_order, waiting, withdraw, write_order


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a journal."""
    folder = tmp_path / "failslow-runs" / "pretrain7"
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("")
    return folder


def test_an_order_is_taken_once(run: Path) -> None:
    number = write_order(run, "S2")
    assert waiting(run, number)
    order = take_order(run)
    assert order is not None
    assert (order["id"], order["order"]) == (number, "S2")
    assert take_order(run) is None
    assert not waiting(run, number)
    assert [path.name for path in run.iterdir()] == ["journal.jsonl"]


def test_a_second_order_waits_for_the_first_and_one_may_be_withdrawn(run: Path) -> None:
    number = write_order(run, "S2")
    with pytest.raises(InputError, match="another order waits"):
        write_order(run, "resume")
    withdraw(run, "something else")
    assert waiting(run, number)
    withdraw(run, number)
    assert write_order(run, "resume") != number


@pytest.mark.parametrize("text", ["", "{", "[]", '{"order":"S9"}', '{"order":["S2"]}', "x" * 9999])
def test_what_is_no_order_is_removed_and_not_followed(run: Path, text: str) -> None:
    (run / "orders.json").write_text(text)
    assert take_order(run) is None
    assert not (run / "orders.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_order_is_not_followed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_order(run, "S4")
    os.chown(run / "orders.json", 1234, 1234)
    assert take_order(run) is None


def test_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"id":"1","order":"S4","by":"x"}')
    (run / "orders.json").symlink_to(tmp_path / "elsewhere")
    assert take_order(run) is None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be left there"):
        write_order(tmp_path / "missing", "S2")


def controller(run: Path, decision: Decision | None) -> threading.Thread:
    """Answers one order as a controller does."""

    def answer() -> None:
        deadline_s = time.monotonic() + 10.0
        journal = JournalWriter(run / "journal.jsonl")
        while time.monotonic() < deadline_s:
            order = take_order(run)
            if order is not None:
                journal.append({"what": "act", **order}, t=time.time(), kind="action")
                if decision is not None:
                    journal.append(decision, t=time.time())
                break
            time.sleep(0.02)
        journal.close()

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def decided(action: str, level: Rung = "S2") -> Decision:
    return Decision(
        episode="e1",
        action=action,  # type: ignore[arg-type]  # a parameter of the test
        level=level,
        from_level="S1",
        mode="auto",
        apply=action == "obey",
        culprits=("device rank 2",),
        lost_s=3.0,
        threshold_s=None,
        options=(),
        reason="S2 was asked for",
    )


@pytest.mark.parametrize(("action", "code"), [("obey", 0), ("stay", 1)])
def test_the_command_tells_what_was_decided(
    run: Path, monkeypatch: pytest.MonkeyPatch, action: str, code: int
) -> None:
    monkeypatch.chdir(run.parent.parent)
    thread = controller(run, decided(action))
    result = CliRunner().invoke(app, ["act", "s2", "--json"])
    thread.join()
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    assert answer["followed"] is (action == "obey")
    assert answer["reason"] == "S2 was asked for"


@pytest.mark.parametrize(
    ("action", "said"), [("obey", "taken: S2 was asked"), ("stay", "refused: S2 was asked")]
)
def test_a_person_is_told_whether_the_order_was_taken(run: Path, action: str, said: str) -> None:
    thread = controller(run, decided(action))
    result = CliRunner().invoke(app, ["act", "S2", str(run)])
    thread.join()
    assert result.stderr.startswith(said)


@pytest.mark.parametrize(("level", "stays"), [("S1", False), ("S2", True)])
def test_a_person_is_told_that_ignoring_a_culprit_takes_no_plan_back(
    run: Path, level: Rung, stays: bool
) -> None:
    thread = controller(run, decided("obey", level))
    result = CliRunner().invoke(app, ["act", "ignore", str(run)])
    thread.join()
    assert ("a plan in force stays as it is until then" in result.stderr) is stays
    assert ("`failslow act resume`" in result.stderr) is stays


def test_without_a_fault_there_is_nothing_to_do(run: Path) -> None:
    thread = controller(run, None)
    result = CliRunner().invoke(app, ["act", "resume", str(run)])
    thread.join()
    assert result.exit_code == 1
    assert result.stderr.startswith("refused: ")
    assert "nothing to do" in result.stderr


def test_nothing_is_left_in_a_folder_that_is_no_run_s(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["act", "S2", str(tmp_path)])
    assert result.exit_code == 1
    assert f"no watched job at {tmp_path}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("failslow.cli.act._ANSWER_S", 0.2)
    for arguments, text in (
        (["S7", str(run)], "'S7' is no order"),
        (["S2", str(tmp_path / "none")], "no watched job"),
        (["S2", str(run)], "no controller took the order"),
    ):
        result = CliRunner().invoke(app, ["act", *arguments])
        assert result.exit_code == 1
        assert text in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (run / "orders.json").exists()
