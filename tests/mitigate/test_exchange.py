"""Gradients are exchanged in the last micro-batch only, wherever in the model that happens; and
what cannot be held back so forbids unequal counts. One process: gloo of one, or a pretended world.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from failslow.mitigate.share import Share, Witness, exchange_switch
from failslow.mitigate.steer_refuse import why_equal


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def four() -> Iterator[None]:
    """Rank 0 of four, of which three are pretended."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _share(model: nn.Module) -> Share:
    switch = exchange_switch(model)
    return Share(0, range(3), size=3, replicas=1, scale=1.0, switch=switch)


class _Two(nn.Module):
    """DDP around each of two parts, as around the encoder and the decoder."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            rows = part(rows)
        return rows


@pytest.mark.filterwarnings("ignore")  # torch's own, of compiling
@pytest.mark.parametrize(
    ("build", "exchanges"),
    [
        (lambda wrap: wrap(nn.Linear(4, 4)), 1),
        (lambda wrap: torch.compile(wrap(nn.Linear(4, 4)), backend="eager"), 1),
        (lambda wrap: nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4))), 1),
        (lambda wrap: torch.compile(_Two(wrap), backend="eager"), 2),
    ],
    ids=["outermost", "compiled", "inside", "two, compiled"],
)
def test_ddp_exchanges_once_a_step(
    alone: None, build: Callable[[Callable[[nn.Module], nn.Module]], nn.Module], exchanges: int
) -> None:
    seen: list[int] = []
    begun: list[int] = []

    def averaged(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        seen.append(begun[-1])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrap(module: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(None, lambda _, bucket: averaged(bucket))
        return wrapped

    model = build(wrap)
    for index in _share(model):
        begun.append(index)
        model(torch.ones(1, 4)).sum().backward()
    assert seen == [2] * exchanges


@pytest.mark.parametrize("static", [True, False])
def test_gradients_of_any_ddp_are_those_of_all_micro_batches(alone: None, static: bool) -> None:
    """A static graph is learned in the first backward pass: torch fails where that exchanges
    nothing."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(4, 4), static_graph=static)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(model.module.state_dict())
    for count in (4, 1, 3):
        switch = exchange_switch(model)
        share = Share(0, range(count), size=count, replicas=1, scale=1.0, switch=switch)
        for index in share:
            rows = torch.full((1, 4), float(index))
            for net in (model, plain):
                net(rows).square().sum().backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert wanted.grad is not None
            assert torch.equal(mine.grad, wanted.grad)
        model.zero_grad()
        plain.zero_grad()


def _run(model: nn.Module, share: Share, *, first: bool) -> bool:
    """Whether it is seen that all micro-batches are taken before one runs."""
    indices = list(share) if first else share
    for _ in indices:
        model(torch.ones(1, 4)).sum().backward()
    return share.taken_first


def _witnessed(model: nn.Module, count: int = 3) -> Share:
    return Share(
        0, range(count), size=count, replicas=1, scale=1.0,
        switch=exchange_switch(model), witness=Witness(model),
    )  # fmt: skip


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_that_takes_all_micro_batches_before_it_runs_one_is_seen(
    alone: None, set_to_none: bool
) -> None:
    """It exchanges gradients in every one: unequal numbers would wait for ever."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[0].requires_grad_(False)
    model = DistributedDataParallel(inner)
    for _ in range(2):
        assert not _run(model, _witnessed(model), first=False)
        model.zero_grad(set_to_none)
        assert _run(model, _witnessed(model), first=True)
        model.zero_grad(set_to_none)
    assert not _run(model, _witnessed(model, 1), first=True)  # one alone is no news


def test_so_it_is_with_hybrid_sharding(four: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    assert not _run(model, _witnessed(model), first=False)
    assert _run(model, _witnessed(model), first=True)


def test_a_model_that_was_dropped_tells_nothing(alone: None) -> None:
    model = nn.Linear(4, 4)
    share = _witnessed(model)
    del model
    gc.collect()
    assert list(share) == [0, 1, 2]
    assert not share.taken_first
    assert Witness(nn.Tanh()).look() is None


def test_a_gradient_that_cannot_be_looked_at_costs_no_step(alone: None) -> None:
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        unversioned = torch.ones(4, 4)
    model.weight.grad = unversioned
    share = _witnessed(model)
    assert list(share) == [0, 1, 2]
    assert not share.taken_first


def test_hybrid_sharding_of_inner_layers_only_is_switched(four: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    layers: list[Any] = [model[0], model[2]]
    for layer in layers:
        fully_shard(layer, mesh=mesh)

    def on() -> list[bool]:
        groups = [g for layer in layers for g in layer._get_fsdp_state()._fsdp_param_groups]
        assert all(group.reduce_grads for group in groups)  # within a replica, always
        return [group.all_reduce_grads for group in groups]

    assert [on() for _ in _share(model)] == [[False] * 2, [False] * 2, [True] * 2]
    assert why_equal([0, 0, 1, 1], model=model) == ""


def test_torchs_replicate_is_switched(alone: None) -> None:
    model = nn.Sequential(replicate(nn.Linear(4, 4)))
    state = replicate.state(model[0])
    assert [state._no_sync for _ in _share(model)] == [True, True, False]


def test_a_model_that_exchanges_nothing_has_no_switch(alone: None) -> None:
    assert exchange_switch(nn.Sequential(nn.Linear(4, 4))) is None
    assert exchange_switch(None) is None


def test_the_switch_keeps_no_model_alive(alone: None) -> None:
    """Else the groups of a dropped model would outlive a change of places."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    known, switch = weakref.ref(model), exchange_switch(model)
    assert switch is not None
    del model
    gc.collect()
    assert known() is None
    switch(False)


@pytest.mark.filterwarnings("ignore")  # torch's own, of FSDP1's being old
def test_fsdp1_is_refused_where_it_averages_over_replicas(four: None) -> None:
    shard, across = dist.new_group([0, 1]), dist.new_group([0, 2])

    def fsdp1(strategy: ShardingStrategy, group: Any = None) -> nn.Module:
        return nn.Sequential(
            FullyShardedDataParallel(
                nn.Linear(4, 4), group, strategy, device_id=torch.device("cpu")
            )
        )

    hybrid = fsdp1(ShardingStrategy.HYBRID_SHARD, (shard, across))
    why = "FSDP1 gradients: 0 averages them in every micro-batch over replicas"
    assert why_equal([0, 0, 1, 1], model=hybrid) == f"{why} 0 and 1"
    assert why_equal([0, 0, 0, 0], model=hybrid) == ""
    whole = fsdp1(ShardingStrategy.NO_SHARD)
    assert why_equal([0, 1, 2, 3], model=whole) == f"{why} 0 to 3"
    part = fsdp1(ShardingStrategy.FULL_SHARD, shard)
    assert why_equal([0, 0, 1, 1], model=part) == ""
    assert why_equal([0, 1, 2, 3], model=part).startswith("FSDP shard axis: 0 is sharded")
