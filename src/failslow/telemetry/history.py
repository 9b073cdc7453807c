"""The last minutes of every series, in memory of a fixed size.

In: what the samplers gave at a time. Out: windows of it.

    >>> history = History(keep=600)
    >>> history.add(1745735241.0, {"cpu/busy_share": 0.5})
    >>> history.add(1745735242.0, {"cpu/busy_share": 0.75, "cpu/steal_share": 0.0})
    >>> window = history.window()
    >>> window.t, window.series["cpu/steal_share"]
    (array([1.74573524e+09, 1.74573524e+09]), array([nan,  0.]))
    >>> history.window(1745735242.0).shrunk(120).series["cpu/busy_share"]
    array([0.75])
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["History", "Window"]

Floats = NDArray[np.float64]
_COLUMNS = 64
_MOST_SERIES = 4096


@dataclass(frozen=True)
class Window:
    """Some minutes of telemetry."""

    t: Floats
    """Epoch seconds, rising, shape (n,)."""
    series: Mapping[str, Floats]
    """By name, shape (n,); NaN where there was no value."""

    def shrunk(self, points: int) -> Window:
        """At most `points` times, at least 2: of what is too long the newest half of the points
        stays as it is, and the older is averaged over equal numbers of neighbours. An onset is
        explained seconds after it, with minutes before to compare to."""
        n = len(self.t)
        if n <= points:
            return self
        fine = points // 2
        each = -(-(n - fine) // (points - fine))
        rows = np.array([self.t, *self.series.values()])
        old = np.full((len(rows), -(-(n - fine) // each) * each), np.nan)
        old[:, : n - fine] = rows[:, : n - fine]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a mean of nothing is nothing
            means = np.nanmean(old.reshape(len(rows), -1, each), axis=2)
        joined = np.concatenate([means, rows[:, n - fine :]], axis=1)
        return Window(joined[0], dict(zip(self.series, joined[1:], strict=True)))


class History:
    """keep: samples. A series that has no value in any of them is forgotten."""

    def __init__(self, keep: int = 600) -> None:
        if keep < 1:
            raise ValueError(f"keep ({keep}) must be at least 1: how many samples stay")
        self._keep = keep
        self._t = np.full(keep, np.nan)
        self._values = np.full((keep, _COLUMNS), np.nan, dtype=np.float32)
        self._columns: dict[str, int] = {}
        self._free = list(range(_COLUMNS))
        self._next = self._count = 0

    def add(self, t: float, values: Mapping[str, float]) -> None:
        """The sample of time `t`, epoch seconds; beyond `keep` the oldest goes."""
        row = self._next
        self._t[row] = t
        self._values[row] = np.nan
        self._next = (row + 1) % self._keep
        self._count = min(self._count + 1, self._keep)
        fresh = [name for name in values if name not in self._columns]
        if len(fresh) > len(self._free):
            self._make_room(len(fresh), keep=values)
        for name, column in zip(fresh, self._free, strict=False):
            self._columns[name] = column
        del self._free[: len(fresh)]
        for name, value in values.items():
            if name in self._columns:
                self._values[row, self._columns[name]] = value

    def window(self, since_t: float | None = None, until_t: float | None = None) -> Window:
        """Samples from `since_t` to `until_t`, both included; None: as far as there are any.

        Series without any value in it are left out.
        """
        order = (np.arange(self._count) + self._next - self._count) % self._keep
        t = self._t[order]
        inside = np.ones(len(t), dtype=bool)
        if since_t is not None:
            inside &= t >= since_t
        if until_t is not None:
            inside &= t <= until_t
        rows = order[inside]
        names = sorted(self._columns)
        columns = np.array([self._columns[name] for name in names], dtype=np.intp)
        block = self._values[np.ix_(rows, columns)]
        series = {
            name: block[:, i].astype(np.float64)
            for i, name in enumerate(names)
            if not np.isnan(block[:, i]).all()
        }
        return Window(t[inside], series)

    @property
    def size_bytes(self) -> int:
        """What is allocated."""
        return self._t.nbytes + self._values.nbytes

    def _make_room(self, wanted: int, *, keep: Mapping[str, float]) -> None:
        """For new series, up to 4,096 in all, more than any node has by rights."""
        empty = set(np.flatnonzero(np.isnan(self._values).all(axis=0)).tolist())
        for name, column in list(self._columns.items()):
            if column in empty and name not in keep:
                del self._columns[name]
                self._free.append(column)
        width = self._values.shape[1]
        wider = width
        while wider - width + len(self._free) < wanted and wider < _MOST_SERIES:
            wider *= 2
        if wider > width:
            values = np.full((self._keep, wider), np.nan, dtype=np.float32)
            values[:, :width] = self._values
            self._values = values
            self._free += range(width, wider)
