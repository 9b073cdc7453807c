"""A worker's state as tensors and a manifest without code in it, and back.

In: a tree of dicts, lists, tuples, numbers, strings, bytes and tensors, as `state_dict()` gives
it. Out: one JSON manifest and the tensors it speaks of, each once however often it is named:

    {"tree":{"d":[["weight",{"x":0}],["step",{"x":1}],["lr",0.001]]},
     "tensors":[{"dtype":"bfloat16","shape":[64,32],"order":[1,0],"at":"device"},
                {"dtype":"float32","shape":[],"order":[],"at":"cpu"}]}

Containers are objects with one key: d(ict), l(ist), t(uple), b(ytes), c(omplex), x = the tensor of
that number. `order` are the dimensions from the outermost in memory to the innermost, so that a
transposed or channels-last tensor travels as it lies and arrives as it lay. A DTensor is taken as
its local part. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from failslow.errors import MoveError

__all__ = [
    "Packed",
    "TensorSpec",
    "allocate",
    "is_gapless",
    "pack",
    "physical",
    "read_manifest",
    "unpack",
]

MANIFEST_BYTES = 64 << 20
"""A manifest over this is refused: it describes some hundred thousand tensors."""
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor looks like, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions, from the outermost in memory to the innermost."""
    on_device: bool
    """It lives on an accelerator; else in the host's memory, as an optimizer's step does."""

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Packed:
    """A state ready to travel."""

    manifest: bytes
    tensors: tuple[torch.Tensor, ...]
    specs: tuple[TensorSpec, ...]

    def size_bytes(self, *, on_device: bool) -> int:
        """Of all tensors on the accelerator, or in the host's memory."""
        return sum(s.size_bytes for s in self.specs if s.on_device is on_device)


@dataclass(slots=True)
class _Packing:
    tensors: list[torch.Tensor] = field(default_factory=list)
    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)


def pack(state: Any) -> Packed:
    """`state` as a manifest and its tensors, which are not copied.

    Raises MoveError, naming the place, for what cannot travel: other objects, sparse, quantized
    and meta tensors.
    """
    packing = _Packing()
    tree = _encode(state, "state", packing)
    specs = tuple(_spec(tensor) for tensor in packing.tensors)
    manifest = json.dumps(
        {"tree": tree, "tensors": [_spec_row(spec) for spec in specs]}, separators=(",", ":")
    ).encode()
    if len(manifest) > MANIFEST_BYTES:
        raise MoveError(
            f"the state's manifest has {len(manifest)} bytes, over {MANIFEST_BYTES}; keep large "
            "data in tensors",
            refused=True,
        )
    return Packed(manifest, tuple(packing.tensors), specs)


def _encode(value: Any, path: str, packing: _Packing) -> Any:
    if isinstance(value, np.generic):
        value = value.item()  # a learning rate that numpy computed is a number like any other
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return {"x": _number(value, path, packing)}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _SCALARS and key is not None:
                raise _unfit(f"a key of {path}", key)
        rows = [[key, _encode(v, f"{path}[{key!r}]", packing)] for key, v in value.items()]
        return {"d": rows}
    if isinstance(value, (list, tuple)):
        kind = "t" if isinstance(value, tuple) else "l"
        return {kind: [_encode(v, f"{path}[{i}]", packing) for i, v in enumerate(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    raise _unfit(path, value)


def _unfit(path: str, value: object) -> MoveError:
    return MoveError(
        f"{path} is a {type(value).__name__}; a state is made of dicts, lists, tuples, numbers, "
        "strings, bytes and tensors",
        refused=True,
    )


def _number(value: torch.Tensor, path: str, packing: _Packing) -> int:
    """The tensor's number; the same memory seen the same way is the same tensor."""
    tensor = value.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # the result of a collective still under way
        tensor = tensor.wait()
    if not _is_plain(tensor):
        raise MoveError(
            f"{path} is a {tensor.layout} {type(tensor).__name__} of {tensor.dtype} on "
            f"{tensor.device}; only plain dense ones with memory of their own can move",
            refused=True,
        )
    tensor = tensor.resolve_conj().resolve_neg()
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() and place in packing.numbers:
        return packing.numbers[place]
    packing.tensors.append(tensor)
    packing.numbers[place] = len(packing.tensors) - 1
    return packing.numbers[place]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its values lie in its own memory: a tensor that wraps others (torchao's) has none, nor has
    one whose storage was freed. As their addresses are all 0, they would be taken for one."""
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return dense and (not tensor.numel() or tensor.data_ptr() != 0)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: (-strides[d], d))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.ndim))
    on_device = tensor.device.type != "cpu"
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tuple(order), on_device)


def physical(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor's bytes as they lie, (size,) uint8; a copy only where there are gaps."""
    if not spec.size_bytes:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    lying = tensor.permute(spec.order).contiguous()
    # a single element may have any stride, which `view` does not like
    return lying.as_strided((lying.numel(),), (1,)).view(torch.uint8)


def is_gapless(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether `physical` needs no copy."""
    return tensor.permute(spec.order).is_contiguous()


def allocate(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """An empty tensor like `spec`, on `device` if it belongs on an accelerator."""
    where = device if spec.on_device else torch.device("cpu")
    lying = torch.empty([spec.shape[d] for d in spec.order], dtype=spec.dtype, device=where)
    return lying.permute([spec.order.index(d) for d in range(len(spec.order))])


# -- the manifest ------------------------------------------------------------------------------


def _spec_row(spec: TensorSpec) -> dict[str, Any]:
    return {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "shape": list(spec.shape),
        "order": list(spec.order),
        "at": "device" if spec.on_device else "cpu",
    }


def read_manifest(manifest: bytes) -> tuple[Any, tuple[TensorSpec, ...]]:
    """(tree, tensors) of a manifest from another worker. MoveError where it is none."""
    try:
        content = json.loads(manifest)
        specs = tuple(_read_spec(row) for row in content["tensors"])
        tree = content["tree"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MoveError(f"the manifest received is none: {error}") from None
    return tree, specs


def _read_spec(row: Mapping[str, Any]) -> TensorSpec:
    dtype = getattr(torch, str(row["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{row['dtype']!r} is no dtype")
    shape, order = tuple(row["shape"]), tuple(row["order"])
    sizes_fit = all(isinstance(n, int) and n >= 0 for n in shape)
    if not sizes_fit or sorted(order) != list(range(len(shape))):
        raise ValueError(f"a tensor of shape {shape} and order {order} cannot be")
    return TensorSpec(dtype, shape, order, row["at"] == "device")


def unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The state of which `tree` is the encoded form. MoveError where it is not one."""
    if not isinstance(tree, dict):
        return tree
    try:
        ((kind, content),) = tree.items()
        if kind == "x":
            return tensors[content]
        if kind == "d":
            return {key: unpack(value, tensors) for key, value in content}
        if kind in ("l", "t"):
            rows = [unpack(value, tensors) for value in content]
            return rows if kind == "l" else tuple(rows)
        if kind == "b":
            return base64.b64decode(content)
        if kind == "c":
            return complex(*content)
    except (ValueError, LookupError, TypeError) as error:
        raise MoveError(f"the manifest received does not fit its tensors: {error}") from None
    raise MoveError(f"the manifest received holds a {kind!r}, which is nothing known")
