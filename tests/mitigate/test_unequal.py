"""Global batches that cannot be split evenly, and tokens counted on grids: rank 0 of four."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.mitigate.faked import faked_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import failslow
from failslow.errors import PlanError
from failslow.mitigate.steer_refuse import why_equal


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with faked_world(4):
        yield


def _counts(coordinator: failslow.Coordinator, size: int | None = None) -> int:
    share = coordinator.begin(0, size)
    coordinator.end()
    return share.count


def test_an_uneven_batch_that_would_deadlock_is_refused_instead() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    coordinator = failslow.Coordinator(16, model=model)
    assert _counts(coordinator) == 4
    with pytest.raises(PlanError, match=r"11 micro-batches are \[3, 3, 3, 2\].*SyncBatchNorm: 1"):
        coordinator.begin(1, 11)
    with pytest.raises(PlanError, match="give a multiple of 4"):
        failslow.Coordinator(18, model=model).begin(0)
    other = nn.Linear(4, 4)
    coordinator.use(other)  # what was found at first may be of its groups, too
    with pytest.raises(PlanError):
        coordinator.begin(1, 11)


def test_shards_over_replicas_are_refused_and_those_within_one_are_not() -> None:
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = nn.Linear(8, 8)
    fully_shard(whole, mesh=everyone)
    with pytest.raises(PlanError, match="FSDP shard axis: parameter weight is sharded"):
        failslow.Coordinator(6, mesh=everyone, model=whole).begin(0)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = nn.Linear(8, 8)
    fully_shard(hybrid, mesh=pairs)
    assert _counts(failslow.Coordinator(5, mesh=pairs, model=hybrid)) == 3


def test_where_nobody_tells_who_is_where_nothing_is_refused() -> None:
    coordinator = failslow.Coordinator(
        17, grid=(2, 2, 1), place=(0, 0, 0), model=nn.SyncBatchNorm(4)
    )
    assert _counts(coordinator) == 9


def test_a_model_without_exchanges_has_uneven_batches() -> None:
    model = nn.Linear(4, 4)
    coordinator = failslow.Coordinator(16, model=model)
    assert [_counts(coordinator, size) for size in (11, 16, 7)] == [3, 4, 2]
    other = nn.SyncBatchNorm(4)
    coordinator.use(other)
    with pytest.raises(PlanError, match="SyncBatchNorm"):
        coordinator.begin(3, 11)


def test_ddp_within_join_tells_others_of_every_micro_batch() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    replicas = [0, 1, 2, 3]
    assert why_equal(replicas, model=model) == ""
    with model.join(enable=True):
        assert why_equal(replicas, model=model) == (
            "join(): the model tells that it goes on over replicas 0 to 3"
        )
    assert why_equal([0] * 4, model=model) == ""


def test_fp8_layers_that_compare_maxima_over_replicas_are_found() -> None:
    """As Transformer Engine's say it; that itself is NOT RUN here."""
    model: Any = nn.Linear(4, 4)
    meta: dict[str, Any] = {"recipe": SimpleNamespace(reduce_amax=True), "fp8_group": None}
    model.fp8_meta = meta
    assert why_equal([0, 1, 2, 3], model=model) == ""
    meta["fp8_group"] = torch.distributed.group.WORLD  # once it has run
    assert why_equal([0, 1, 2, 3], model=model).startswith("FP8's delayed scaling: the model")
    meta["recipe"] = SimpleNamespace()  # current scaling
    assert why_equal([0, 1, 2, 3], model=model) == ""


@pytest.mark.parametrize(("grid", "holders"), [((1, 4, 1), 1), ((2, 2, 1), 2), ((1, 1, 4), 4)])
def test_a_replica_s_tokens_count_once_however_many_workers_it_has(
    grid: tuple[int, int, int], holders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(value: torch.Tensor, group: object = None) -> None:
        value *= 4 if group is None else grid[1]  # all count as many

    coordinator = failslow.Coordinator(8, grid=grid)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    assert coordinator.total(7.0) == 7.0 * 4 / holders == 7.0 * grid[1]
    assert coordinator.total(7.0, torch.distributed.group.WORLD) == 7.0 * grid[1]
