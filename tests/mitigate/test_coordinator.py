"""Real training on four gloo processes, steered by orders: it must go as it would have gone."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from job_launch import launch

from failslow.decide import even_split
from failslow.errors import PlanError
from failslow.mitigate.steer_letters import read_order

_JOB = Path(__file__).with_name("steered.py")
_WORLD, _TOLERANCE = 4, 1e-5

Reports = list[dict[str, Any]]


def _run(folder: Path, *scenarios: str, steps: int, limit_s: float) -> Reports:
    command = [str(_JOB), *scenarios, "--steps", str(steps), "--out", str(folder)]
    with launch(command, world=_WORLD) as job:
        job.wait(limit_s)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(_WORLD)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Every scenario once, short, in one job."""
    folder = tmp_path_factory.mktemp("steered")
    moved = ("moving", "stumbling", "wrapping", "printed")
    few = ("fsdp", "reasons", "renewed", "failing", "parted", "parting")
    scenarios = ("ddp", "hsdp", "hybrid", *moved, *few)
    return _run(folder, *scenarios, steps=24, limit_s=280.0)


def _assert_trained_alike(reports: Reports, scenario: str, replicas: int) -> None:
    """Counts changed, at the same step everywhere; batch, order and losses did not change."""
    mine = [report[scenario] for report in reports]
    even, steered = mine[0]["even"], mine[0]["steered"]
    assert len({json.dumps(m["steered"]["counts"]) for m in mine}) == 1
    assert all(outcome["ok"] for outcome in steered["outcomes"])
    assert len({tuple(counts) for counts in steered["counts"]}) >= 3
    assert {tuple(counts) for counts in even["counts"]} == {even_split(16, replicas)}
    for step in range(len(steered["losses"])):
        runs = {tuple(m["steered"]["indices"][step]) for m in mine}  # a replica's workers agree
        assert sorted(i for run in runs for i in run) == list(range(16 if step % 5 != 4 else 11))
        assert all(list(run) == list(range(run[0], run[-1] + 1)) for run in runs)
        assert len(runs) == replicas
    apart = [abs(a - b) for a, b in zip(even["losses"], steered["losses"], strict=True)]
    assert max(apart) < _TOLERANCE
    assert even["losses"][-1] < 0.9 * even["losses"][0]  # it did learn


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("scenario", "replicas"), [("ddp", 4), ("hsdp", 2), ("hybrid", 2)])
def test_losses_are_those_of_the_even_split(reports: Reports, scenario: str, replicas: int) -> None:
    _assert_trained_alike(reports, scenario, replicas)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_stay_those_of_the_even_split_over_200_steps(tmp_path: Path) -> None:
    reports = _run(tmp_path, "ddp", "hsdp", "hybrid", steps=200, limit_s=800.0)
    for scenario, replicas in (("ddp", 4), ("hsdp", 2), ("hybrid", 2)):
        _assert_trained_alike(reports, scenario, replicas)
        assert len(reports[0][scenario]["even"]["losses"]) == 200


def test_the_printed_program_changes_places(reports: Reports) -> None:
    """docs/coordinator.md: weights, and each replica's own noise, are those of who stayed."""
    mine = [report["printed"] for report in reports]
    assert mine[0]["outcomes"] == [True, True]
    assert [m["before"][2] for m in mine] == [[0, 1, 2, 3]] * _WORLD
    assert [m["after"][2] for m in mine] == [[3, 0, 1, 2]] * _WORLD
    assert max(m["apart"] for m in mine) < _TOLERANCE
    assert [m["after"][0] for m in mine] == [1, 2, 3, 0]
    noise = {replica: drawn for replica, drawn, _ in (m["before"] for m in mine)}
    assert {replica: drawn for replica, drawn, _ in (m["after"] for m in mine)} == noise
    assert len(set(noise.values())) == _WORLD


def test_workers_that_change_places_train_on_alike(reports: Reports) -> None:
    mine = [report["moving"] for report in reports]
    steered = mine[0]["steered"]
    assert [outcome["ok"] for outcome in steered["outcomes"]] == [True, True]
    assert mine[0]["placements"] == [[0, 1, 2, 3], [3, 1, 0, 2], [2, 1, 0, 3]]
    # the split that was planned with the places is in force with them, and only then
    assert [c for c, _ in groupby(steered["counts"])] == [[8, 8], [6, 10], [8, 8]]
    # whoever holds a position runs its micro-batches
    step = next(i for i, c in enumerate(steered["counts"]) if c == [6, 10] and i % 5 != 4)
    assert [tuple(m["steered"]["indices"][step]) for m in mine] == [
        tuple(range(6)), tuple(range(6, 16)), tuple(range(6, 16)), tuple(range(6))
    ]  # fmt: skip
    assert [tuple(m["steered"]["indices"][-2]) for m in mine] == [
        tuple(range(8)), tuple(range(8, 16)), tuple(range(8)), tuple(range(8, 16))
    ]  # fmt: skip
    even = mine[0]["even"]["losses"]
    first = steered["counts"].index([6, 10])
    assert even[:first] == steered["losses"][:first]
    apart = [abs(a - b) for a, b in zip(even, steered["losses"], strict=True)]
    assert max(apart) < _TOLERANCE
    assert mine[0]["facts heard"][-1]["ranks"] == [0, 1, 2, 3]  # at the start


def test_a_move_that_fails_half_way_is_undone_and_can_be_made_again(reports: Reports) -> None:
    mine = [report["stumbling"] for report in reports]
    stateless, failed, done = mine[0]["steered"]["outcomes"]
    assert not stateless["ok"]
    assert stateless["cost_s"] < 20.0  # nobody waits until the time limit
    assert (failed["ok"], failed["error"]) == (False, "rank 2: no room for the model")
    assert done["ok"]
    assert all(m["steered"]["placement"] == [2, 1, 0, 3] for m in mine)
    assert {tuple(counts) for counts in mine[0]["steered"]["counts"]} == {(8, 8)}
    assert mine[0]["even"]["losses"] == mine[0]["steered"]["losses"]


def test_a_worker_that_fails_while_others_wait_for_it_is_not_waited_for(reports: Reports) -> None:
    """They would be as long as a collective may take, half an hour."""
    mine = [report["wrapping"] for report in reports]
    _, failed, done = mine[0]["steered"]["outcomes"]
    assert (failed["ok"], failed["error"]) == (False, "rank 1: no room for the model")
    assert failed["cost_s"] < 20.0
    assert done["ok"]
    counts = [c for c, _ in groupby(mine[0]["steered"]["counts"])]
    assert counts == [[4, 4, 4, 4], [7, 1, 4, 4], [3, 2, 6, 5]]
    losses = zip(mine[0]["even"]["losses"], mine[0]["steered"]["losses"], strict=True)
    assert max(abs(a - b) for a, b in losses) < _TOLERANCE


def test_the_controller_is_told_what_planning_needs(reports: Reports) -> None:
    heard = reports[0]["hybrid"]["facts heard"]
    assert heard[0]["iteration_s"] == 0.0
    assert max(facts["iteration_s"] for facts in heard) > 0.0
    expected = {"pp": 2, "dp": 2, "tp": 1, "microbatches": 16, "least_microbatches": 2}
    assert expected.items() <= heard[-1].items()
    assert heard[-1]["ranks"] == [0, 1, 2, 3]
    assert len(heard[-1]["hosts"]) == 4
    assert heard[-1]["no_redistribution"] == ""
    assert all(not report["hybrid"]["facts heard"] for report in reports[1:])
    assert reports[0]["hsdp"]["facts"]["tp"] == 2
    assert reports[0]["hsdp"]["tokens"] == 6.0


def test_unequal_counts_are_refused_where_they_would_deadlock(reports: Reports) -> None:
    mine = reports[0]["fsdp"]
    refused, restored = mine["steered"]["outcomes"]
    assert refused["refused"]
    assert not refused["ok"]
    assert "FSDP shard axis" in refused["error"]
    assert restored["ok"]  # the even split can always be had
    assert {tuple(counts) for counts in mine["steered"]["counts"]} == {(4, 4, 4, 4)}
    assert len(mine["steered"]["losses"]) == 24
    assert "FSDP shard axis" in mine["facts"]["no_redistribution"]


def test_a_model_taken_into_use_later_is_asked_too(reports: Reports) -> None:
    refused, restored = reports[0]["renewed"]["steered"]["outcomes"]
    assert (refused["ok"], refused["refused"], restored["ok"]) == (False, True, True)
    assert "SyncBatchNorm: 1 averages over replicas 0 to 3" in refused["error"]


def test_every_reason_for_equal_counts_is_found_and_no_other(reports: Reports) -> None:
    found = reports[3]["reasons"]["reasons"]
    assert found.pop("sync batch norm").startswith("SyncBatchNorm: 1 averages over replicas")
    assert found.pop("experts").startswith("expert parallel: the model")
    assert found.pop("expert axis").startswith("expert parallel: mesh axis ep")
    assert found.pop("named group").startswith("my own gather")
    assert found == {"sync batch norm within a replica": "", "nothing": ""}


def test_a_plan_one_worker_cannot_follow_is_followed_by_none(reports: Reports) -> None:
    mine = [report["failing"] for report in reports]
    failed, misfit, refused, done = mine[0]["steered"]["outcomes"]
    assert (failed["ok"], failed["error"]) == (False, "rank 2: no memory for six")
    assert "3 counts for 4 replicas" in misfit["error"]
    assert (refused["level"], refused["refused"]) == ("S3", True)
    assert done["ok"]
    # the one that failed and those that had got ready are back at four at once
    for m, wanted in zip(mine, (3, 3, 6, 4), strict=True):
        calls = m["steered"]["calls"]
        assert calls[calls.index(wanted, 1) + 1] == 4 or wanted == 4
    assert all(6 not in m["steered"]["calls"] for m in mine if m is not mine[2])
    apart = [
        abs(a - b)
        for a, b in zip(mine[0]["even"]["losses"], mine[0]["steered"]["losses"], strict=True)
    ]
    assert max(apart) < _TOLERANCE


def test_a_vote_that_one_worker_cannot_see_keeps_nobody_waiting(reports: Reports) -> None:
    mine = [report["parting"] for report in reports]
    (failed,) = mine[0]["steered"]["outcomes"]
    assert not failed["ok"]
    assert mine[0]["steered"]["took_s"] < 30.0  # some waited as long as they may, here 60 s
    assert all(m["steered"]["counts"] == m["even"]["counts"] for m in mine)
    assert mine[0]["steered"]["losses"] == mine[0]["even"]["losses"]


def test_training_goes_on_when_the_workers_cannot_agree_any_more(reports: Reports) -> None:
    for report in reports:
        mine = report["parted"]
        assert mine["even"]["listens"]
        assert not mine["steered"]["listens"]
        apart = zip(mine["even"]["losses"], mine["steered"]["losses"], strict=True)
        assert max(abs(a - b) for a, b in apart) < _TOLERANCE


_UNWATCHED = """
import time, torch, torch.distributed as dist, failslow
dist.init_process_group("gloo")
groups = len(dist.distributed_c10d._world.pg_map)
coordinator = failslow.Coordinator(microbatches=32)
times = []
for step in range(3000):
    begin = time.perf_counter()
    with coordinator.step(step) as share:
        weight = share.weight * share.count
    times.append(time.perf_counter() - begin)
assert len(dist.distributed_c10d._world.pg_map) == groups
assert coordinator.facts is None and coordinator.counts == (16, 16) and weight == 1.0
print(f"{sorted(times)[len(times) // 2] * 1e6:.2f}")
dist.barrier()
time.sleep(0.2)
import os, sys; sys.stdout.flush(); os._exit(0)
"""


def test_unwatched_it_communicates_nothing_and_costs_next_to_nothing() -> None:
    with launch(["-c", _UNWATCHED], world=2, watch=False) as job:
        job.wait(100.0)
        assert max(float(job.output(rank)) for rank in range(2)) < 20.0  # µs a step


def test_it_is_had_from_the_package_without_importing_torch() -> None:
    code = (
        "import sys, failslow; assert 'Coordinator' in failslow.__all__; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "letter",
    [
        {"id": 1, "level": "S2"},
        {"id": "1", "level": "S2", "plan": {"level": "S2", "predicted_slowdown": 1.0}},
        {"id": 1, "level": "S3", "plan": {"level": "S2", "predicted_slowdown": 1.0}},
    ],
)
def test_what_is_no_order_is_told_apart(letter: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        read_order(letter)
