"""The state of a place in the grid: what a worker hands over and takes on, made and put back.

In: a model (a pipeline stage) and its optimizer. Out: a tree that `swap_state` can move, and the
same model and optimizer elsewhere going on exactly where it left off:

    state = take_state(stage, optimizer, rng=take_rng(device), sampler=17)
    …                                     # moved; model and optimizer of the new place are built
    put_state(moved.state, stage, optimizer)
    put_rng(moved.state["extras"]["rng"], device)
    # {"tensors":{"layers.0.weight":…},"buffers":[["norm.mean",true]],"frozen":[],
    #  "optimizer":[{"step":…,"exp_avg":…},…],"masters":[null,…],"shared":{},
    #  "groups":[{"lr":0.001,…}],"sizes":[12],"extras":{"rng":{"torch":…},"sampler":17}}

What an optimizer holds beside the model's parameters goes along: copies in single precision that it
steps instead (`masters`), and state that is of no parameter (`shared`). A buffer that a model makes
in its forward pass is given to the new one.

Random numbers belong to the place as well: a replica's dropout must not depend on which machine
runs it. DTensors are handed over as their local parts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from failslow.errors import MoveError
from failslow.saying import say

__all__ = ["put_rng", "put_state", "take_rng", "take_state"]


def take_state(model: nn.Module, optimizer: torch.optim.Optimizer, **extras: Any) -> dict[str, Any]:
    """Parameters, buffers, optimizer and `extras`; nothing is copied.

    The optimizer is described in the order of its parameters, which the new place's must share.
    Raises MoveError for one that keeps its state in another within it (ZeroRedundancyOptimizer).
    """
    _check_whole(optimizer)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    of_model = {id(p) for p in model.parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "tensors": {name: _local(tensor.detach()) for name, tensor in own.items()},
        "buffers": [
            [f"{path}.{name}" if path else name, name not in module._non_persistent_buffers_set]
            for path, module in model.named_modules()
            for name in module._buffers
        ],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "masters": [None if id(p) in of_model else _local(p.detach()) for p in parameters],
        "shared": {
            key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)
        },
        "optimizer": [
            {key: _local(value) for key, value in optimizer.state.get(p, {}).items()}
            for p in parameters
        ],
        "groups": groups,
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "extras": extras,
    }


def _check_whole(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer around another shows none of its moments: they would be lost."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
            raise MoveError(
                f"{type(optimizer).__name__} keeps its state in its .{name}; give take_state and "
                "put_state that one",
                refused=True,
            )


@torch.no_grad()
def put_state(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a newly built model and optimizer of that place go on from `state`, whose tensors become
    theirs.

    Raises MoveError where they are not those of that place: other names, shapes, or numbers.
    """
    _put_buffers(state, model)
    of_model = {id(p) for p in model.parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    theirs = sorted(set(state["tensors"]) - {name for name, _ in state["buffers"]})
    _same("parameters of the model", sorted(named), theirs)
    _same("parameters of the optimizer", len(parameters), len(state["optimizer"]))
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    _same("parameters of each group of the optimizer", sizes, state["sizes"])
    beside = [id(p) not in of_model for p in parameters]
    _same("copies the optimizer holds", beside, [m is not None for m in state["masters"]])
    for name, tensor in named.items():
        _become(name, tensor, state["tensors"][name])
    _freeze(state["frozen"], model, named)
    for number, (parameter, there) in enumerate(zip(parameters, state["masters"], strict=True)):
        if there is not None:
            _become(f"copy {number} of the optimizer", parameter, there)
    for key, value in state["shared"].items():
        optimizer.state[key] = value
    for group, values in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(values)
    for parameter, values in zip(parameters, state["optimizer"], strict=True):
        if values:
            optimizer.state[parameter] = {
                key: _like(parameter, value) for key, value in values.items()
            }


def _become(name: str, tensor: torch.Tensor, there: torch.Tensor) -> None:
    here = _local(tensor)
    _same(f"shape of {name}", tuple(here.shape), tuple(there.shape))
    if here is tensor and here.dtype == there.dtype and here.device == there.device:
        tensor.data = there  # what was received is the model's memory from now on
    else:
        here.copy_(there)


def _freeze(frozen: Sequence[str], model: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Train what was trained where the state comes from: layers thawed meanwhile are built frozen.

    DDP exchanges what was to be trained when it was made: within it all stays as it was built.
    """
    wrong = [name for name, p in named.items() if p.requires_grad is (name in set(frozen))]
    if wrong and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        say(
            f"{wrong[0]} was {'frozen' if wrong[0] in frozen else 'trained'} before places were "
            "changed, and is not now; freeze and thaw parameters before DDP wraps a model"
        )
        return
    for name in wrong:
        named[name].requires_grad_(name not in frozen)


def _put_buffers(state: Mapping[str, Any], model: nn.Module) -> None:
    """Those the old model had made by itself too, where the new one has a place for them.

    A buffer may have become another in training, as a table that grows with the longest sequence.
    """
    known, modules = dict(model.named_buffers()), dict(model.named_modules())
    for name, persistent in state["buffers"]:
        path, _, last = name.rpartition(".")
        module, there = modules.get(path), state["tensors"].get(name)
        if module is None or there is None:
            continue
        here = known.get(name)
        if here is None:
            with suppress(KeyError):  # it is another attribute there: the model makes its own
                module.register_buffer(last, there, persistent=persistent)
        elif _local(here) is here and here.device == there.device:
            here.data = there  # the same object of any shape: DDP knows it
        else:
            _become(name, here, there)


def _same(what: str, here: object, there: object) -> None:
    if here != there:
        raise MoveError(f"{what}: {here} here and {there} in the state that was moved")


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _like(parameter: torch.Tensor, value: Any) -> Any:
    """An optimizer's value, split over workers as its parameter is."""
    local = _local(parameter)
    if not isinstance(value, torch.Tensor) or value.shape != local.shape or local is parameter:
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def take_rng(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The states of the random generators of torch (with the device's), numpy and Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - it is the global one
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position],
        "numpy_gauss": [int(has_gauss), float(gauss)],
    }
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def put_rng(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Go on with the random numbers of the place that `take_rng` described."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, position = state["numpy"]
    words = (kind, keys.numpy().astype(np.uint32), position, *state["numpy_gauss"])
    np.random.set_state(words)  # noqa: NPY002 - it is the global one
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
