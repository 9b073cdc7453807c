"""A million points -> the few thousand a browser draws well, without hiding what matters.

In: the values of a series and the indices that must stay. Out: sorted indices into it: of every
bucket the smallest, the median and the largest value (real samples, so a hover tells the truth),
plus all that must stay. Drawn as a line it looks like the full series at any zoom above a bucket.

    decimate(duration_s, buckets=1500, keep=[13799, 13800, 13841])  ->  array([0, 3, 412, ...])
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["bucket_medians", "decimate", "highest_per_bucket"]

Indices = NDArray[np.int64]


def decimate(values: NDArray[np.float64], *, buckets: int, keep: Iterable[int] = ()) -> Indices:
    """Sorted, unique indices: min, median and max of each bucket, both ends, and `keep`.

    values: (n,) finite. At most 3 · buckets + 2 + len(keep) come back; all n when that is fewer.
    Indices of `keep` outside the series are left out. Raises ValueError when buckets < 1.
    """
    if buckets < 1:
        raise ValueError(f"buckets ({buckets}) must be at least 1")
    n = len(values)
    if n <= 3 * buckets:
        return np.arange(n, dtype=np.int64)
    order, starts, sizes = _sorted_buckets(values, buckets)
    rows = np.arange(len(starts))
    picked = [
        starts + order[rows, 0],
        starts + order[rows, (sizes - 1) // 2],
        starts + order[rows, sizes - 1],
        np.asarray([0, n - 1]),
        _inside(keep, n),
    ]
    return np.unique(np.concatenate(picked)).astype(np.int64)


def bucket_medians(values: NDArray[np.float64], *, buckets: int) -> tuple[Indices, Indices]:
    """Of each bucket the index in its middle and the index of its median value.

    Drawn at the first with the value of the second they give the course without its noise.
    """
    order, starts, sizes = _sorted_buckets(values, buckets)
    rows = np.arange(len(starts))
    return starts + sizes // 2, starts + order[rows, (sizes - 1) // 2]


def highest_per_bucket(
    values: NDArray[np.float64], chosen: Indices, *, buckets: int
) -> tuple[Indices, Indices]:
    """Of the `chosen` indices the highest a bucket, and how many chosen ones it stands for.

    When at most `buckets` are chosen, each stands for itself.
    """
    chosen = np.unique(_inside(chosen, len(values)))
    if len(chosen) <= buckets:
        return chosen, np.ones(len(chosen), dtype=np.int64)
    size = -(-len(values) // buckets)
    bucket = chosen // size
    # by bucket, then height: the last of a bucket is its highest
    order = np.lexsort((values[chosen], bucket))
    _, counts = np.unique(bucket, return_counts=True)
    last = np.cumsum(counts) - 1
    return chosen[order][last], counts.astype(np.int64)


def _sorted_buckets(
    values: NDArray[np.float64], buckets: int
) -> tuple[NDArray[np.intp], Indices, Indices]:
    """Per bucket the order of its values, where it starts, and how many it holds."""
    n = len(values)
    size = -(-n // buckets)
    rows = -(-n // size)
    padded = np.full(rows * size, np.inf)
    padded[:n] = values
    starts = np.arange(rows, dtype=np.int64) * size
    sizes = np.minimum(size, n - starts)
    return np.argsort(padded.reshape(rows, size), axis=1, kind="stable"), starts, sizes


def _inside(indices: Iterable[int] | Indices, n: int) -> Indices:
    found = np.asarray(list(indices) if not isinstance(indices, np.ndarray) else indices)
    found = found.astype(np.int64).ravel()
    return found[(found >= 0) & (found < n)]
