"""The callbacks for changing places in docs/coordinator.md work as they are printed there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from failslow.mitigate import steer_apply
from failslow.mitigate.move import swap_state, transfer_group
from failslow.mitigate.move_state import put_rng, take_rng
from failslow.records import Plan

_DOCS = Path(__file__).parents[2] / "docs" / "coordinator.md"
_STAY = Plan(level="S3", predicted_slowdown=1.0, placement=(0,))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda _: None)  # for the printed program
    yield
    dist.destroy_process_group()


def _printed(start: str) -> str:
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", _DOCS.read_text(), re.S) if start in c)
    return str(code)


def _trained() -> dict[str, Any]:
    """What the program defines, after a few steps; `test_coordinator` runs it on four workers."""
    names: dict[str, Any] = {}
    exec(_printed("class Worker").replace("range(1000)", "range(2)"), names)
    return names


def _train(worker: Any) -> None:
    worker.model(torch.randn(2, 64)).square().sum().backward()
    worker.optimizer.step()
    worker.optimizer.zero_grad()


def _moments(worker: Any) -> Any:
    return worker.optimizer.state[next(worker.model.parameters())]["exp_avg"].tolist()


def _drawn(worker: Any) -> tuple[float, float]:
    return float(torch.rand(())), float(torch.rand((), generator=worker.noise))


def test_the_printed_callbacks_go_on_where_the_place_was(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _trained()
    worker, hands = names["worker"], names["coordinator"]._hands
    _train(worker)

    def theirs(mine: dict[str, Any], **_: Any) -> SimpleNamespace:
        """The same place, held by another until now."""
        tensors = {name: tensor.clone() for name, tensor in mine["state"]["tensors"].items()}
        return SimpleNamespace(state={**mine, "state": {**mine["state"], "tensors": tensors}})

    monkeypatch.setattr(steer_apply, "swap_state", theirs)
    before = [p.tolist() for p in worker.model.parameters()]
    old, moments = worker.model, _moments(worker)
    generators = take_rng(), worker.noise.get_state()
    expected = _drawn(worker)

    def again() -> None:
        put_rng(generators[0])
        worker.noise.set_state(generators[1])

    again()
    hands.prepare(_STAY, 5)
    hands.commit()
    assert worker.model is not old
    assert [p.tolist() for p in worker.model.parameters()] == before
    assert _moments(worker) == moments
    assert _drawn(worker) == expected
    # a call that fails once the old groups are gone is undone by another
    build, worker.build = worker.build, lambda: 1 / 0
    again()
    with pytest.raises(ZeroDivisionError):
        hands.prepare(_STAY, 6)
    monkeypatch.setattr(type(worker.grid), "build", _failing_once(type(worker.grid).build))
    worker.build = build
    with pytest.raises(MemoryError):
        worker.move((0,), {})
    hands.roll_back()
    assert [p.tolist() for p in worker.model.parameters()] == before
    assert _drawn(worker) == expected
    _train(worker)


def _failing_once(build: Any) -> Any:
    failures = [MemoryError("no groups")]

    def tried(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return build(*args, **kwargs)

    return tried


def test_the_printed_move_without_a_coordinator_works(alone: None) -> None:
    names = _trained()
    _train(names["worker"])
    names |= {
        "device": "cpu", "pp": 1, "dp": 1, "tp": 1,
        "now": (0,), "new": (0,), "take_rng": take_rng, "put_rng": put_rng,
        "swap_state": swap_state, "transfer_group": transfer_group,
    }  # fmt: skip
    before = take_rng()
    expected = float(torch.rand(()))
    put_rng(before)
    exec(_printed("mine = {"), names)
    assert float(torch.rand(())) == expected
    _train(names["worker"])
