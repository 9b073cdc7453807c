"""Random states of workers, and whether two are the same to the bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

__all__ = ["DTYPES", "same_bits", "states", "tensors"]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]
LAYOUTS = ["plain", "transposed", "sliced", "expanded", "flipped order"]


def made_tensor(dtype: torch.dtype, shape: list[int], layout: str, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs of every kind too, lying in memory as `layout` says."""
    generator = torch.Generator().manual_seed(seed)
    wide = [2 * n for n in shape] if layout == "sliced" else shape
    high = 2 if dtype is torch.bool else 256
    size = math.prod(wide) * dtype.itemsize
    data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    data = data.view(dtype).reshape(wide)
    if not wide:
        return data
    if layout == "transposed" and len(shape) >= 2:
        return data.transpose(0, -1)
    if layout == "flipped order":
        return data.permute(list(range(len(shape)))[::-1])
    if layout == "sliced":
        return data[tuple(slice(0, 2 * n, 2) for n in shape)]
    if layout == "expanded":
        return data[:1].expand(shape)
    return data


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any kind, empty and without dimensions too."""
    return made_tensor(
        draw(st.sampled_from(DTYPES)),
        draw(st.lists(st.integers(0, 9), max_size=3)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 1 << 30)),
    )


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
)
_KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 9))


def states() -> st.SearchStrategy[Any]:
    """Trees of everything that can travel, some with the same tensor in two places."""
    trees = st.recursive(
        st.one_of(_SCALARS, tensors()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(_KEYS, inner, max_size=3),
        ),
        max_leaves=5,
    )
    large = st.builds(
        lambda rows, seed: made_tensor(torch.float32, [rows, 100], "plain", seed),
        st.integers(170, 400),
        st.integers(0, 1 << 30),
    )
    return st.builds(
        lambda tree, tied, big: {"tree": tree, "tied": [tied, {"again": tied}], "big": big},
        trees,
        tensors(),
        st.lists(large, max_size=2),
    )


def same_bits(one: Any, other: Any) -> bool:
    """Equal in kind, order, shape and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(_bits(one), _bits(other))
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            same_bits(a, b) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float):
        return one.hex() == float(other).hex()
    return repr(one) == repr(other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.reshape(-1).cpu(), tensor.reshape(-1).cpu()]).view(torch.uint8)
