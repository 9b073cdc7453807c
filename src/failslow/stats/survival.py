"""How long things last, learned also from those that were not seen to end (Kaplan & Meier 1958).

In: durations, and whether the end of each was seen. Out: the share that lasts longer than t.

    >>> curve = SurvivalCurve.fit([60.0, 120.0, 300.0, 600.0], observed=[True, True, False, True])
    >>> [round(curve.survival(t), 3) for t in (0.0, 60.0, 200.0, 600.0)]
    [1.0, 0.75, 0.5, 0.0]
    >>> durations_s, weights = curve.masses()
    >>> durations_s.tolist(), weights.tolist()
    ([60.0, 120.0, 600.0], [0.25, 0.25, 0.5])

The one cut short at 300 s is worth what those still lasting at 300 s went on to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["SurvivalCurve"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurvivalCurve:
    """The Kaplan–Meier estimate: a falling staircase."""

    times_s: Floats
    """(n,): durations at which at least one was seen to end, rising."""
    survivors: Floats
    """(n,): share that lasts longer than each."""
    longest_s: float
    """The longest duration seen, ended or not."""
    count: int
    """Durations it was learned from."""

    @classmethod
    def fit(cls, durations_s: ArrayLike, observed: ArrayLike | None = None) -> SurvivalCurve:
        """From durations, shape (n,), finite and >= 0; `observed` False: not seen to end.

        The product-limit estimate: at each time of an end, the share of those still lasting that
        does not end then. One cut short at the very time of an end still lasts at it. Raises
        ValueError without any duration, or where one is none.
        """
        durations = np.asarray(durations_s, dtype=np.float64)
        if durations.ndim != 1 or not len(durations):
            raise ValueError(f"durations of shape {durations.shape}; give at least one, in a row")
        if not (np.isfinite(durations) & (durations >= 0.0)).all():
            raise ValueError("durations must be finite and >= 0; leave out what was not measured")
        ended = np.ones(len(durations), bool) if observed is None else np.asarray(observed, bool)
        if ended.shape != durations.shape:
            raise ValueError(f"observed has shape {ended.shape}; give one for each duration")
        times, ends = np.unique(durations[ended], return_counts=True)
        lasting = len(durations) - np.searchsorted(np.sort(durations), times)
        return cls(
            times_s=times,
            survivors=np.cumprod(1.0 - ends / lasting).astype(np.float64),
            longest_s=float(durations.max()),
            count=len(durations),
        )

    def survival(self, t_s: float) -> float:
        """Share that lasts longer than t_s seconds."""
        at = int(np.searchsorted(self.times_s, t_s, side="right"))
        return 1.0 if at == 0 else float(self.survivors[at - 1])

    def mean_s(self) -> float:
        """Mean of the distribution that `masses` gives."""
        times, weights = self.masses()
        return float(times @ weights)

    def masses(self) -> tuple[Floats, Floats]:
        """(durations_s, weights that sum to 1): the curve as a distribution.

        What outlived the data, if the longest was not seen to end, is taken to last twice as long
        as the longest: more is not known, and less would ignore it.
        """
        before = np.concatenate([[1.0], self.survivors])
        weights = before[:-1] - before[1:]
        left = float(before[-1])
        times = self.times_s
        if left > 1e-12:
            times = np.append(times, 2.0 * self.longest_s)
            weights = np.append(weights, left)
        kept = weights > 0.0
        return times[kept], weights[kept] / weights[kept].sum()
