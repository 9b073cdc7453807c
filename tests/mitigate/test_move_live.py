"""Real workers change places over gloo: training goes on as if none had moved; faults cost nothing.

One job of four processes runs most scenarios of `move_job.py`; what kills a worker has its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="moving state needs torch")

from job_launch import Job, launch

ROOT = Path(__file__).resolve().parents[2]
JOB = str(Path(__file__).with_name("move_job.py"))
PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'hybrid_gpt'}"}
WORLD, TOLERANCE = 4, 1e-5
SCENARIOS = ("layout 2x2x1", "layout 2x1x2", "layout 1x4x1", "states", "faults", "leaks")

Reports = list[dict[str, Any]]


def run(folder: Path, *scenarios: str, limit_s: float, world: int = WORLD) -> Reports:
    command = [JOB, *scenarios, "--out", str(folder)]
    with launch(command, world=world, watch=False, environ=PATH) as job:
        job.wait(limit_s)
    return read(folder, range(world))


def read(folder: Path, ranks: range) -> Reports:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Every scenario that nobody dies in."""
    return run(tmp_path_factory.mktemp("move"), *SCENARIOS, limit_s=280.0)


def assert_trained_alike(reports: Reports, scenario: str) -> None:
    mine = [report[scenario] for report in reports]
    stayed, moved = mine[0]["stayed"], mine[0]["moved"]
    assert moved["placement"] != list(range(len(reports)))
    assert len(moved["moves_s"]) >= 2
    apart = [abs(a - b) for a, b in zip(stayed["losses"], moved["losses"], strict=True)]
    assert max(apart) < TOLERANCE
    assert len({json.dumps(m["moved"]["losses"]) for m in mine}) == 1
    assert moved["losses"][-1] < 0.8 * moved["losses"][0]  # it did learn
    # gathered shards are the shards: no group has another order than its mesh
    assert [m["moved"]["misplaced"] for m in mine] == [0.0] * len(mine)
    for step in range(len(stayed["losses"])):
        by_place = [
            sorted((stage, replica, drawn) for stage, replica, drawn in _at(mine, kind, step))
            for kind in ("stayed", "moved")
        ]
        assert by_place[0] == by_place[1]  # chance follows the place, not the worker


def _at(mine: Reports, kind: str, step: int) -> list[Any]:
    return [m[kind]["draws"][step] for m in mine]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS[:3])
def test_losses_are_those_of_workers_that_stayed(reports: Reports, scenario: str) -> None:
    assert_trained_alike(reports, scenario)


@pytest.mark.timeout(300)
def test_random_states_arrive_bit_for_bit_over_real_sockets(reports: Reports) -> None:
    for report in reports:
        assert report["states"]["wrong"] == []
        assert report["states"]["moved"] >= 3
        assert report["states"]["received"] > 100_000


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("damage", r"another checksum than when they left"),
        ("stall", r"Timed out|time for moving state is over|Connection closed|could not see"),
        ("memory", r"rank 2: .*memory"),
    ],
)
def test_a_fault_in_a_move_leaves_all_where_they_were(
    reports: Reports, fault: str, told: str
) -> None:
    mine = [report["faults"][fault] for report in reports]
    assert all(m["error"].startswith("nothing was moved") for m in mine), mine
    assert all(m["kept"] for m in mine)

    assert all(re.search(told, m["error"]) for m in mine), mine


@pytest.mark.timeout(300)
def test_training_survives_moves_that_failed(reports: Reports) -> None:
    """The same losses as training in which nothing ever failed or moved, then a move succeeds."""
    mine = [report["faults"] for report in reports]
    assert sorted(m["placement"] for m in mine) == list(range(WORLD))
    assert mine[1]["placement"] == 0
    stayed = reports[0]["layout 2x2x1"]["stayed"]["losses"]
    apart = [abs(a - b) for a, b in zip(stayed, mine[0]["losses"], strict=True)]
    assert max(apart) < TOLERANCE


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "scenario", ["killed", pytest.param("killed near", marks=pytest.mark.slow)]
)
def test_a_worker_killed_in_a_move_leaves_the_others_their_state(
    tmp_path: Path, scenario: str
) -> None:
    command = [JOB, scenario, "--out", str(tmp_path)]
    with launch(command, world=WORLD, watch=False, environ=PATH) as job:
        _wait_for_survivors(job)
    for survivor in read(tmp_path, range(WORLD - 1)):
        told = survivor[scenario]
        assert told["error"].startswith("nothing was moved")
        assert told["kept"]
        assert told["took_s"] < 30.0  # far below the move's own limit of 60 s: they noticed
        assert told["survivors"] == WORLD - 1  # a group without the dead one still works


@pytest.mark.timeout(180)
def test_who_leaves_after_a_death_is_noticed_by_all(tmp_path: Path) -> None:
    with launch(
        [JOB, "dropped", "--out", str(tmp_path)], world=WORLD, watch=False, environ=PATH
    ) as job:
        _wait_for_survivors(job)
    for survivor in read(tmp_path, range(WORLD - 1)):
        assert survivor["dropped"]["error"]
        assert survivor["dropped"]["took_s"] < 30.0  # the limit was 60 s


def _wait_for_survivors(job: Job) -> None:
    for rank, process in enumerate(job.ranks[:-1]):
        assert process.wait(timeout=150) == 0, job.output(rank)[-4000:]
    assert job.ranks[-1].wait(timeout=30) == -9


def assert_no_leak(reports: Reports, scenario: str) -> None:
    """Whatever many changes of place hold, four held already."""
    for report in reports:
        held = report[scenario]["held"]
        early, late = held[3], held[-1]
        assert len(held) >= 9
        assert late["threads"] <= early["threads"] + 2, held
        assert late["descriptors"] <= early["descriptors"] + 4, held
        assert late["groups"] == early["groups"], held
        assert late["rss_kb"] <= early["rss_kb"] + 30_000, held


@pytest.mark.timeout(300)
def test_a_few_moves_leak_nothing(reports: Reports) -> None:
    assert_no_leak(reports, "leaks")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", ["leaks pipeline", "leaks tensor"])
def test_twenty_moves_leak_nothing(tmp_path: Path, scenario: str) -> None:
    assert_no_leak(run(tmp_path, scenario, limit_s=800.0), scenario)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_workers_in_three_dimensions_train_alike(tmp_path: Path) -> None:
    reports = run(tmp_path, "layout 2x2x2", limit_s=800.0, world=8)
    assert_trained_alike(reports, "layout 2x2x2")
