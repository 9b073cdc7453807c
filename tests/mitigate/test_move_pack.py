"""State as a manifest and tensors: everything comes back as it was, and no code travels."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch", reason="moving state needs torch")

import torch
from hypothesis import given
from tests.mitigate.made_states import same_bits, states
from torch.testing._internal.two_tensor import TwoTensor

from failslow.errors import MoveError
from failslow.mitigate.move_pack import (
    Packed,
    allocate,
    pack,
    physical,
    read_manifest,
    unpack,
)

CPU = torch.device("cpu")


def travelled(packed: Packed) -> Any:
    """The state as it would arrive: nothing but bytes is used."""
    tree, specs = read_manifest(packed.manifest)
    arrived = []
    for tensor, spec in zip(packed.tensors, specs, strict=True):
        copy = allocate(spec, CPU)
        physical(copy, spec).copy_(physical(tensor, spec))
        arrived.append(copy)
    return unpack(tree, arrived)


@given(states())
def test_any_state_comes_back_bit_for_bit(state: Any) -> None:
    back = travelled(pack(state))
    assert same_bits(state, back)
    tied = back["tied"]
    assert tied[0] is tied[1]["again"] or not tied[0].numel()


def test_the_manifest_is_as_documented() -> None:
    state = {
        "weight": torch.zeros(64, 32, dtype=torch.bfloat16).T,
        "step": torch.tensor(1.0),
        "lr": 0.001,
    }
    assert json.loads(pack(state).manifest) == {
        "tree": {"d": [["weight", {"x": 0}], ["step", {"x": 1}], ["lr", 0.001]]},
        "tensors": [
            {"dtype": "bfloat16", "shape": [32, 64], "order": [1, 0], "at": "cpu"},
            {"dtype": "float32", "shape": [], "order": [], "at": "cpu"},
        ],
    }


def test_a_tensor_lies_afterwards_as_it_lay() -> None:
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = travelled(pack([image, image.mT]))
    assert back[0].stride() == image.stride()
    assert back[1].stride() == image.mT.stride()


def test_parameters_and_their_optimizer_come_back() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    adam = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    adam.step()
    sgd.step()
    state = {"model": model.state_dict(), "adam": adam.state_dict(), "sgd": sgd.state_dict()}
    back = travelled(pack(state))
    assert back["model"]["0.weight"] is back["model"]["1.weight"]
    assert same_bits(back["adam"], state["adam"])
    assert same_bits(back["sgd"], state["sgd"])
    adam.load_state_dict(back["adam"])
    assert not back["model"]["0.weight"].requires_grad


def test_a_conjugate_travels_as_what_it_shows() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(travelled(pack(numbers.conj())), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(travelled(pack(numbers.conj().imag)), torch.tensor([-2.0, 4.0]))


def _two() -> torch.Tensor:
    two: torch.Tensor = TwoTensor(torch.ones(3), torch.ones(3))  # type: ignore[no-untyped-call]
    return two


def _freed(size: int) -> torch.Tensor:
    tensor = torch.zeros(size)
    tensor.untyped_storage().resize_(0)  # as FSDP1 does between two uses of a parameter
    return tensor


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": [object()]}, r"state\['a'\]\[0\] is a object"),
        ({"f": len}, r"state\['f'\] is a builtin_function_or_method"),
        ({(1, 2): 3}, "a key of state is a tuple"),
        ([torch.zeros(3).to_sparse()], r"state\[0\] is a torch.sparse_coo Tensor"),
        ([torch.zeros(3, device="meta")], r"state\[0\] is a .* on meta"),
        # its parts hold the values
        ([_two()], "TwoTensor .* with memory of their own"),
        ([_freed(3)], "with memory of their own"),
        ({1}, "state is a set"),
    ],
)
def test_what_cannot_travel_is_named(state: Any, told: str) -> None:
    with pytest.raises(MoveError, match=told) as caught:
        pack(state)
    assert caught.value.refused


@pytest.mark.parametrize(
    "manifest",
    [
        b"\x80\x04.",
        b"[]",
        b'{"tree":null}',
        b'{"tree":null,"tensors":[{}]}',
        b'{"tree":null,"tensors":[{"dtype":"nn","shape":[],"order":[],"at":"cpu"}]}',
        b'{"tree":null,"tensors":[{"dtype":"int8","shape":[-1],"order":[0],"at":"cpu"}]}',
        b'{"tree":null,"tensors":[{"dtype":"int8","shape":[2],"order":[1],"at":"cpu"}]}',
        b'{"tree":null,"tensors":[{"dtype":"int8","shape":["2"],"order":[0],"at":"cpu"}]}',
    ],
)
def test_a_manifest_that_is_none_is_refused(manifest: bytes) -> None:
    with pytest.raises(MoveError, match="the manifest received is none"):
        read_manifest(manifest)


@pytest.mark.parametrize(
    "tree",
    [{"x": 1}, {"x": "0"}, {"d": 3}, {"d": [[1]]}, {"q": 1}, {}, {"d": [], "l": []}, {"b": 7}],
)
def test_a_tree_that_does_not_fit_is_refused(tree: Any) -> None:
    with pytest.raises(MoveError, match="manifest received"):
        unpack(tree, [torch.zeros(1)])
