"""The last records of a series, addressed by their index in the whole series.

    history.push(log_s, iterations); history.values(4000, 4100)  # records 4000..4099

Memory stays bounded for jobs of any length; what is older than `keep` records is gone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["History"]

Floats = NDArray[np.float64]


class History:
    """Two columns, corrected log time and iterations, of at least the last `keep` records."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._columns = np.empty((2, 4 * keep))
        self._first = 0  # index in the series of column 0
        self._size = 0

    def push(self, log_s: Floats, iterations: Floats) -> None:
        """Append records; shapes (n,), n at most `keep`."""
        n = len(log_s)
        if self._size + n > self._columns.shape[1]:
            drop = self._size - self._keep
            self._columns[:, : self._keep] = self._columns[:, drop : self._size]
            self._first += drop
            self._size = self._keep
        self._columns[0, self._size : self._size + n] = log_s
        self._columns[1, self._size : self._size + n] = iterations
        self._size += n

    def values(self, begin: int, end: int) -> Floats:
        """Corrected log times of records begin..end-1, fewer where they are gone or yet to come."""
        return self._columns[0, self._slice(begin, end)]

    def iterations(self, begin: int, end: int) -> Floats:
        """Iterations covered by records begin..end-1, fewer when older ones are gone."""
        return self._columns[1, self._slice(begin, end)]

    def _slice(self, begin: int, end: int) -> slice:
        return slice(max(0, begin - self._first), max(0, min(self._size, end - self._first)))
