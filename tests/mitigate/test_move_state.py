"""State taken from a model and put into another: the next step is the same, chance included."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("torch", reason="moving state needs torch")

import torch
from tests.mitigate.faked import faked_world
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from failslow.errors import MoveError
from failslow.mitigate.move_pack import pack, read_manifest, unpack
from failslow.mitigate.move_room import Need, free_bytes, lacking
from failslow.mitigate.move_route import Route, check_placements, find_route
from failslow.mitigate.move_state import put_rng, put_state, take_rng, take_state


class Net(nn.Module):
    """Tied weights, a buffer, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.rand(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.second(self.first(x).relu())) * self.scale
        return y


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05)),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.rand(8, 6)).square().sum() + float(np.random.rand()) + random.random()  # noqa: NPY002
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sent(state: Any) -> Any:
    """As it is after a journey."""
    packed = pack(state)
    tree, _ = read_manifest(packed.manifest)
    return unpack(tree, [tensor.clone() for tensor in packed.tensors])


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_another_worker_goes_on_exactly(kind: str) -> None:
    torch.manual_seed(1)
    here = Net()
    optimizer = OPTIMIZERS[kind](here)
    train(here, optimizer, 3)
    optimizer.param_groups[0]["lr"] *= 0.5
    state = sent(take_state(here, optimizer, rng=take_rng(), sampler=17))
    expected = train(here, optimizer, 3)

    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 - the global one is what is tested
    random.seed(99)
    there = Net()
    other = OPTIMIZERS[kind](there)
    put_state(state, there, other)
    put_rng(state["extras"]["rng"])
    assert state["extras"]["sampler"] == 17
    assert there.second.weight is there.first.weight
    assert train(there, other, 3) == expected


class Masters(torch.optim.SGD):
    """Steps copies in single precision, and counts its steps beside all parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.low = list(model.parameters())
        masters = [nn.Parameter(p.detach().float()) for p in self.low]
        super().__init__(masters, lr=torch.tensor(0.01).item(), momentum=0.9)
        self.state["steps"] = 0  # type: ignore[index]  # some optimizers do

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never a loss
        for group in self.param_groups:
            for low, master in zip(self.low, group["params"], strict=True):
                assert low.grad is not None
                master.grad, low.grad = low.grad.float(), None
        super().step(closure)
        self.state["steps"] += 1  # type: ignore[index]  # as above
        with torch.no_grad():
            for low, master in zip(self.low, self.param_groups[0]["params"], strict=True):
                low.copy_(master)


class Lazy(nn.Module):
    """Makes a buffer when it first runs, and keeps a sum there."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(6), persistent=False)
        y: torch.Tensor = self.line(x.bfloat16()).float()
        self.seen += y.detach().sum(0)
        return y + 0.01 * self.seen


def test_masters_state_of_no_parameter_and_lazy_buffers_go_along() -> None:
    """What rounding to 16 bits hides would be lost with the masters: the losses drift apart."""
    torch.manual_seed(1)
    here = Lazy()
    optimizer = Masters(here)
    optimizer.param_groups[0]["lr"] = np.float64(0.003)  # refused once, for good
    train(here, optimizer, 5)
    state = sent(take_state(here, optimizer, rng=take_rng()))
    expected = train(here, optimizer, 5)

    there = Lazy()
    other = Masters(there)
    put_state(state, there, other)
    put_rng(state["extras"]["rng"])
    assert train(there, other, 5) == expected
    assert other.state["steps"] == 10  # type: ignore[index]  # as above
    assert "seen" not in there.state_dict()
    with pytest.raises(MoveError, match="copies the optimizer holds"):
        put_state(state, there, torch.optim.SGD(there.parameters(), lr=1.0))


def test_state_of_another_place_is_refused() -> None:
    here, there = nn.Linear(4, 4), nn.Linear(4, 5)
    state = take_state(here, torch.optim.SGD(here.parameters(), lr=1.0))
    with pytest.raises(MoveError, match=r"shape of weight: \(5, 4\) here and \(4, 4\)"):
        put_state(state, there, torch.optim.SGD(there.parameters(), lr=1.0))
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(MoveError, match="parameters of the model"):
        put_state(state, two, torch.optim.SGD(two.parameters(), lr=1.0))
    with pytest.raises(MoveError, match="parameters of the optimizer: 1 here and 2"):
        put_state(state, here, torch.optim.SGD([here.weight], lr=1.0))
    apart: list[dict[str, Any]] = [{"params": [here.weight]}, {"params": [here.bias]}]
    with pytest.raises(MoveError, match=r"each group of the optimizer: \[1, 1\] here and \[2\]"):
        put_state(state, here, torch.optim.SGD(apart, lr=1.0))


class Rotary(nn.Module):
    """A table that has grown with the sequences, and one that was computed in double precision."""

    table: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.register_buffer("sums", torch.zeros(2))
        self.held = self.table  # as DDP holds on to what it broadcasts


def test_buffers_that_became_others_in_training_go_along() -> None:
    """They cannot be refused: whoever goes back builds the same small table again."""
    here, there = Rotary(), Rotary()
    here.table, here.sums = torch.arange(9.0), torch.tensor([1 / 3, 2.0], dtype=torch.float64)
    state = sent(take_state(here, torch.optim.SGD(here.parameters(), lr=1.0)))
    put_state(state, there, torch.optim.SGD(there.parameters(), lr=1.0))
    assert there.table.tolist() == list(range(9))
    assert there.held is there.table
    assert torch.equal(there.sums, here.sums)
    assert set(there.state_dict()) == {"line.weight", "line.bias", "sums"}


def test_what_is_trained_is_what_was_trained() -> None:
    """Layers are thawed as training goes on, and built frozen."""
    here, there = nn.Linear(2, 2), nn.Linear(2, 2)
    here.bias.requires_grad_(False)
    there.weight.requires_grad_(False)
    state = sent(take_state(here, torch.optim.SGD(here.parameters(), lr=1.0)))
    put_state(state, there, torch.optim.SGD(there.parameters(), lr=1.0))
    assert [p.requires_grad for p in there.parameters()] == [True, False]
    assert [p.requires_grad for p in here.parameters()] == [True, False]


def test_within_ddp_it_is_told_where_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients of a parameter that DDP has not seen would not be exchanged, and none know it."""
    line = nn.Linear(2, 2)
    line.weight.requires_grad_(False)
    with faked_world(1):
        here, there = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(line)
    state = sent(take_state(here, torch.optim.SGD(here.parameters(), lr=1.0)))
    put_state(state, there, torch.optim.SGD(there.parameters(), lr=1.0))
    assert not line.weight.requires_grad
    assert "weight was trained before places were changed" in capsys.readouterr().err


class Around(torch.optim.SGD):
    """As ZeroRedundancyOptimizer: another one within it has the moments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never a loss
        self.optim.step(closure)


def test_an_optimizer_around_another_is_refused_and_not_emptied() -> None:
    model = nn.Linear(6, 6)
    optimizer = Around(model)
    train(model, optimizer, 1)
    with pytest.raises(MoveError, match=r"Around keeps its state in its \.optim") as caught:
        take_state(model, optimizer)
    assert caught.value.refused
    assert "momentum_buffer" in take_state(model, optimizer.optim)["optimizer"][0]


def test_room_is_counted_once_for_workers_that_share_it() -> None:
    apart = [Need(r, f"cuda {r}", 80, 100) for r in range(3)]
    assert lacking(apart) is None
    together = [Need(r, "host a", 31, 100) for r in range(3)]
    assert lacking(together[:2]) is None
    assert "0.0 MB of host memory for ranks 0, 1, 2" in (lacking(together) or "")
    assert "ranks 7" in (lacking([*apart, Need(7, "cuda x", 91, 100)]) or "")


def test_free_memory_is_what_the_machine_or_its_group_has() -> None:
    free = free_bytes(torch.device("cpu"))
    assert 0 < free <= psutil.virtual_memory().total


def test_a_route_goes_from_holder_to_holder() -> None:
    now, new = (0, 1, 2, 3), (0, 2, 3, 1)
    check_placements(now, new)
    assert find_route(0, now=now, new=new) == Route(0, 0, to=0, source=0)
    routes = [find_route(rank, now=now, new=new) for rank in range(4)]
    assert [r.moves for r in routes] == [False, True, True, True]
    for rank, route in enumerate(routes):
        assert routes[route.to].source == rank  # what is sent is received
        assert new[route.position_new] == rank
        assert new[route.position_now] == route.to
    with pytest.raises(MoveError, match=r"rank 9 has no position in \(0, 1, 2, 3\)"):
        find_route(9, now=now, new=new)
