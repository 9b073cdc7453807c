"""What collectives cost: bandwidth and latency terms (Thakur, Rabenseifner, Gropp, IJHPCA 2005).

In: bytes a rank holds, ranks, bandwidth of the slowest link on the way, latency of a hop. Out:
seconds. Bandwidth and latency may be arrays.

    ring_all_reduce_s(1e9, ranks=8, bytes_per_s=25e9, latency_s=5e-6)      # 0.0701
"""

from __future__ import annotations

import math
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_to_all_s", "ring_all_reduce_s", "ring_half_s", "transfer_s", "tree_all_reduce_s"]

Number: TypeAlias = "float | NDArray[np.float64]"
T = TypeVar("T", float, NDArray[np.float64])


def transfer_s(size_bytes: float, *, bytes_per_s: T, latency_s: float) -> T:
    """From one rank to another."""
    return latency_s + size_bytes / bytes_per_s


def ring_half_s(size_bytes: float, *, ranks: int, bytes_per_s: T, latency_s: float) -> T:
    """A ring reduce-scatter, or a ring all-gather, of `size_bytes` in all."""
    return (ranks - 1) * (latency_s + size_bytes / ranks / bytes_per_s)


def ring_all_reduce_s(size_bytes: float, *, ranks: int, bytes_per_s: T, latency_s: float) -> T:
    """A ring reduce-scatter and a ring all-gather."""
    return 2 * ring_half_s(size_bytes, ranks=ranks, bytes_per_s=bytes_per_s, latency_s=latency_s)


def tree_all_reduce_s(size_bytes: float, *, ranks: int, bytes_per_s: T, latency_s: float) -> T:
    """A double binary tree, as NCCL's: all bytes go up and down each link once (Sanders et al.,
    Parallel Computing 35, 2009); few hops."""
    if ranks == 1:
        return 0.0 * size_bytes / bytes_per_s
    return 2 * (math.ceil(math.log2(ranks)) * latency_s + size_bytes / bytes_per_s)


def all_to_all_s(size_bytes: float, *, ranks: int, bytes_per_s: T, latency_s: float) -> T:
    """Every rank sends each other one its share of the `size_bytes` it holds."""
    return (ranks - 1) * (latency_s + size_bytes / ranks / bytes_per_s)
