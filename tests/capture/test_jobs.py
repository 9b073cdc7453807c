"""Real jobs of several processes, watched and not: the calls captured are those they made."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="capture needs torch")

from job_launch import launch

from failslow.capture.builder import extension_path
from failslow.capture.layout import (  # only where torch is there
    CALL,
    DONE,
    FLAG_ASYNC,
    FLAG_ERROR,
    OPS,
    OPTIMIZER_STEP,
)
from failslow.capture.reader import Group, RingReader

JOB = str(Path(__file__).with_name("job.py"))
TRAINING = ["ddp", "ddp_accumulate", "fsdp", "fsdp_accumulate", "tensor_parallel", "pipeline"]
LAYER = 4 * (64 * 64 + 64)
"""Bytes of one of the four layers of `job.model`."""
ACTIVATION = 4 * 16 * 64


class Rank(NamedTuple):
    """One rank of a finished job: its own report and what was captured of it."""

    said: dict[str, Any]
    records: np.ndarray
    groups: list[Group]
    lost: int
    faults: int


def run(scenarios: list[str], folder: Path, world: int = 2, **environ: str) -> list[Rank]:
    """Run to the end; without FAILSLOW in `environ` the captured parts are empty."""
    watch = environ.get("FAILSLOW") != "0"
    command = [JOB, *scenarios, "--out", str(folder)]
    with launch(command, world=world, watch=watch, environ=environ) as job:
        job.wait(timeout_s=110)
        rings = job.rings()
        assert sorted(rings) == (list(range(world)) if watch else [])
        return [report(folder, rank, rings.get(rank)) for rank in range(world)]


def report(folder: Path, rank: int, ring: Path | None) -> Rank:
    said = json.loads((folder / f"rank{rank}.json").read_text())
    if ring is None:
        return Rank(said, np.empty(0), [], 0, 0)
    reader = RingReader(ring)
    batch = reader.read()
    out = Rank(said, batch.records, reader.groups(), batch.lost, reader.faults)
    reader.close()
    return out


@pytest.fixture(scope="module", params=["native", "dispatcher"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not extension_path().exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    return str(request.param)


@pytest.fixture(scope="module")
def training(mode: str, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    folder = tmp_path_factory.mktemp("watched")
    return run([*TRAINING, "compiled"], folder, FAILSLOW_CAPTURE_MODE=mode)


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run([*TRAINING, "compiled"], tmp_path_factory.mktemp("unwatched"), FAILSLOW="0")


@pytest.fixture(scope="module")
def tour(mode: str, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run(["tour"], tmp_path_factory.mktemp("tour"), FAILSLOW_CAPTURE_MODE=mode)


def calls(rank: Rank) -> np.ndarray:
    return np.asarray(rank.records[rank.records["kind"] == CALL])


def iterations(rank: Rank, scenario: str) -> Iterator[np.ndarray]:
    """The records of each iteration after the first two, which set things up."""
    for start, end in pairwise(rank.said[scenario]["step_end_ns"][1:]):
        at = rank.records["start_ns"]
        yield rank.records[(at >= start) & (at < end)]


def counted(records: np.ndarray) -> Counter[tuple[str, int, int]]:
    """How often each (op, bytes, group size) was called."""
    got = records[records["kind"] == CALL]
    return Counter(
        (OPS[op], int(size), int(members))
        for op, size, members in zip(got["op"], got["size_bytes"], got["group_size"], strict=True)
    )


# ---- every operator, groups, failures, forks


def test_each_call_a_script_makes_is_recorded_once_in_order(tour: list[Rank]) -> None:
    for rank in tour:
        got = calls(rank)
        # but the failed one, which never had a size, and the barrier that ends the job
        got = got[(got["flags"] & FLAG_ERROR == 0) | (got["size_bytes"] > 0)][:-1]
        captured = [
            [OPS[row["op"]], int(row["size_bytes"]), int(row["group_size"]), int(row["peer"])]
            for row in got
        ]
        assert captured == rank.said["tour"]["did"]
        assert (rank.lost, rank.faults) == (0, 0)


def test_each_blocking_call_lies_within_its_record(tour: list[Rank]) -> None:
    for rank in tour:
        got = calls(rank)
        blocking = got[got["flags"] & FLAG_ASYNC == 0]
        assert len(blocking) > 20
        assert (blocking["end_ns"] >= blocking["start_ns"] + blocking["wait_ns"]).all()
        start, end = rank.said["tour"]["start_ns"], rank.said["tour"]["end_ns"]
        assert (got["start_ns"] >= start).all()
        assert (blocking["end_ns"][:-1] <= end).all()


def test_groups_are_listed_with_their_ranks_in_group_order(tour: list[Rank]) -> None:
    for index, rank in enumerate(tour):
        by_desc = {group.desc: group for group in rank.groups}
        assert by_desc["default_pg"].ranks == (0, 1)
        assert by_desc["default_pg"].rank == index
        for desc, ranks in rank.said["tour"]["marks"]["groups"]:
            assert by_desc[desc].ranks == tuple(ranks)
            assert by_desc[desc].size == len(ranks)
            assert by_desc[desc].backend == "gloo"
        assert by_desc["undefined"].backend == "fake"


def test_forked_data_loader_workers_are_never_recorded(tour: list[Rank]) -> None:
    for rank in tour:
        marks = rank.said["tour"]["marks"]
        assert marks["loaded"] == list(range(8))
        assert len(marks["worker_pids"]) == 2
        assert marks["pid"] not in marks["worker_pids"]
        sizes = calls(rank)["size_bytes"].tolist()
        assert sizes.count(36) == 1, "the trainer's own call on that group"
        assert 44 not in sizes, "a call made in a worker"


def test_the_script_sees_torchs_own_exceptions(tour: list[Rank]) -> None:
    first, second = (rank.said["tour"]["marks"]["caught"] for rank in tour)
    assert [kind for kind, _ in first] == ["RuntimeError", "RuntimeError"]
    assert first[0][1].startswith("ProcessGroupGloo::allreduce: invalid tensor size")
    assert second == first[:1]
    waited = calls(tour[0])
    (failed,) = waited[waited["size_bytes"] == 52]
    assert failed["flags"] == FLAG_ERROR
    assert failed["wait_ns"] > 0.1e9


# ---- training


def test_nothing_is_lost_and_nothing_failed(training: list[Rank]) -> None:
    for rank in training:
        assert (rank.lost, rank.faults) == (0, 0)


@pytest.mark.parametrize("scenario", ["ddp", "ddp_accumulate"])
def test_ddp_exchanges_every_gradient_once_an_iteration(
    training: list[Rank], scenario: str
) -> None:
    for rank in training:
        for records in iterations(rank, scenario):
            assert counted(records) == {("allreduce_", 2 * LAYER, 2): 2}


@pytest.mark.parametrize(("scenario", "micro"), [("fsdp", 1), ("fsdp_accumulate", 8)])
def test_fsdp_gathers_each_layer_twice_a_micro_batch_and_scatters_once(
    training: list[Rank], scenario: str, micro: int
) -> None:
    for rank in training:
        for records in iterations(rank, scenario):
            assert counted(records) == {
                ("_allgather_base_", LAYER, 2): 8 * micro,
                ("_reduce_scatter_base_", LAYER, 2): 4,
            }


def test_tensor_parallel_reduces_outputs_and_input_gradients(training: list[Rank]) -> None:
    for rank in training:
        for records in iterations(rank, "tensor_parallel"):
            got = counted(records)
            # forward of both blocks, and backward of the second
            assert got.pop(("allreduce_", ACTIVATION, 2)) == 3
            assert got.pop(("allreduce_", 4, 2)) == 1  # the loss
            ((op, size, members),) = got  # the gradients, over a data-parallel group of one
            assert (op, members) == ("allreduce_", 1)
            # two blocks of 64 x 64 up, 64 x 64 down, and both biases: this rank's share
            assert size == 2 * 4 * (64 * 64 + 64 + 64 * 64 + 64)


def test_a_pipeline_sends_activations_and_gradients_of_each_micro_batch(
    training: list[Rank],
) -> None:
    for index, rank in enumerate(training):
        for records in iterations(rank, "pipeline"):
            got = counted(records)
            assert got[("send", ACTIVATION, 2)] == 4
            assert got[("recv_", ACTIVATION, 2)] == 4
            peers = records["peer"][np.isin(records["op"], [OPS.index("send"), OPS.index("recv_")])]
            peers = peers[peers >= 0]
            assert (peers == 1 - index).all()


def test_compiled_collectives_are_seen(training: list[Rank]) -> None:
    for rank in training:
        for records in iterations(rank, "compiled"):
            assert counted(records) == {
                ("allreduce_", 4 * 64 * 64, 2): 4,
                ("allreduce_", 4 * 64, 2): 4,
            }


def test_each_eager_optimizer_step_is_one_boundary(training: list[Rank]) -> None:
    for rank in training:
        for scenario in TRAINING:
            for records in iterations(rank, scenario):
                assert (records["kind"] == OPTIMIZER_STEP).sum() == 1


def test_groups_made_again_after_destroying_all_keep_apart(training: list[Rank]) -> None:
    for rank in training:
        worlds = {group.number for group in rank.groups if group.desc == "default_pg"}
        assert worlds == {0}, "the same workers under the same name"
        entries = [(group.name, group.desc, group.ranks) for group in rank.groups]
        assert len(set(entries)) == len(entries)
        # the meshes of two scenarios gave the same names to groups that are not the same
        assert len({name for name, _, _ in entries}) < len(entries)


def test_losses_are_bit_identical_with_and_without_failslow(
    training: list[Rank], unwatched: list[Rank]
) -> None:
    for with_it, without in zip(training, unwatched, strict=True):
        for scenario in [*TRAINING, "compiled"]:
            losses = with_it.said[scenario]["losses"]
            assert len(losses) == 6
            assert losses == without.said[scenario]["losses"], scenario
    assert any(training[0].said["ddp"]["losses"])


# ---- other ways to be captured


def test_without_the_dispatcher_python_calls_are_seen_and_ddp_is_not(
    tmp_path: Path,
) -> None:
    for rank in run(["fsdp", "pipeline", "ddp"], tmp_path, FAILSLOW_CAPTURE_MODE="python"):
        for records in iterations(rank, "fsdp"):
            assert counted(records)[("_allgather_base_", LAYER, 2)] == 8
        for records in iterations(rank, "pipeline"):
            assert counted(records)[("send", ACTIVATION, 2)] == 4
        for records in iterations(rank, "ddp"):
            assert counted(records) == {}


def test_while_profiling_the_last_rank_to_come_shows_the_shortest_collectives(
    tmp_path: Path,
) -> None:
    command = [JOB, "profiled", "--out", str(tmp_path)]
    with launch(command, world=2) as job:
        deadline = time.monotonic() + 60
        while len(job.rings()) < 2:
            assert time.monotonic() < deadline, job.output(0)
            time.sleep(0.05)
        readers = [job.ring(rank) for rank in range(2)]
        for reader in readers:
            reader.set_profile(True)
        (tmp_path / "go").touch()
        job.wait(timeout_s=60)
        durations = []
        for reader in readers:
            records = reader.read().records
            reduced = (records["kind"] == CALL) & (records["op"] == OPS.index("allreduce_"))
            (call,) = records[reduced & (records["size_bytes"] == 4 * 17)]
            (done,) = records[(records["kind"] == DONE) & (records["size_bytes"] == call["seq"])]
            durations.append(int(done["end_ns"] - call["start_ns"]))
    assert durations[0] > 0.25e9, "rank 0 waited for rank 1"
    assert durations[1] < durations[0] - 0.1e9


@pytest.mark.slow
def test_four_ranks_of_pipeline_and_tensor_parallel_agree_with_each_other(tmp_path: Path) -> None:
    ranks = run(["hybrid"], tmp_path, world=4)
    assert all(rank.said["hybrid"]["losses"] == ranks[0].said["hybrid"]["losses"] for rank in ranks)
    for rank in ranks:
        (tensor,) = (group for group in rank.groups if group.desc == "mesh_tp")
        (pipe,) = (group for group in rank.groups if group.desc == "mesh_pp")
        for records in iterations(rank, "hybrid"):
            sent = records[(records["kind"] == CALL) & (records["group"] == pipe.number)]
            assert Counter(OPS[op] for op in sent["op"]) == {"send": 4, "recv_": 4}
            reduced = records[(records["kind"] == CALL) & (records["group"] == tensor.number)]
            # the first stage's input needs no gradient
            # forward of two blocks and backward of them; the first stage's input needs none
            assert len(reduced) == 4 * (3 + pipe.rank)
