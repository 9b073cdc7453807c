"""Whether a series changed when the job became slow: a robust step statistic.

In: times, values (NaN where unknown), the time of onset, perhaps that of relief. Out: an
`OnsetStep`, or None where there are too few samples on either side.

    >>> t = np.arange(30.0)
    >>> waiting = np.where(t < 20, 0.01, 0.45) + 0.01 * np.sin(t)
    >>> step = onset_step(t, waiting, onset_t=19.5)
    >>> round(step.before, 2), round(step.during, 2), step.clear, step.lag_s
    (0.0, 0.45, True, 0.0)

The levels are those of the samples next to onset, about as many on both sides and 30 at most; the
noise is that of all samples before. So a series that merely drifts is no step: its noise before is
nearly as large as what it moves, and a straight line fits it better than two levels do. Effects
are in median absolute deviations scaled to a Gaussian's sigma.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from failslow.stats.robust import mad

__all__ = ["OnsetStep", "onset_step"]

Floats = NDArray[np.float64]
_FEWEST = 3
_NEAR = 30
_LEAST_NEAR = 8
_CLEAR_EFFECT = 4.0
_CLEAR_ORDER = 0.85
_LAGS_S = 10.0
_CAP = 999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnsetStep:
    """How a series went over onset; levels are medians."""

    before: float
    during: float
    after: float | None = None
    """After relief."""
    effect: float
    """(during - before) / noise before, from -999 to 999."""
    order: float
    """Share of the pairs (before, during) of which the second is larger; equal ones count half.
    0.5: no difference; 1: every sample is above all those before."""
    correlation: float
    """Point-biserial, of the values with "after onset"; -1..1."""
    lag_s: float
    """Where one step fits best, seconds after onset; at most 10 either way, 0 unless `clear`."""
    levels: bool = True
    """Two levels describe it better than a straight line."""
    samples: tuple[int, int]
    """Before and during."""

    @property
    def clear(self) -> bool:
        """A change far out of the noise in which nearly all samples take part."""
        ordered = max(self.order, 1 - self.order) >= _CLEAR_ORDER
        return ordered and self.levels and abs(self.effect) >= _CLEAR_EFFECT

    @property
    def returned(self) -> bool | None:
        """After relief it was back: nearer to the level before than to that during."""
        if self.after is None:
            return None
        return abs(self.after - self.before) < abs(self.after - self.during)


def onset_step(
    t: ArrayLike,
    x: ArrayLike,
    onset_t: float,
    relief_t: float | None = None,
    *,
    least: float = 0.0,
) -> OnsetStep | None:
    """The change of `x`, shape (n,), at times `t`, rising, shape (n,), with onset.

    least: the smallest change that means anything, in the unit of x; a quarter of it is taken as
    noise where a series shows less (counters that stood at 0). None with fewer than 3 samples
    before or during.
    """
    times, values = np.asarray(t, dtype=np.float64), np.asarray(x, dtype=np.float64)
    if times.shape != values.shape or times.ndim != 1:
        raise ValueError(f"t has shape {times.shape}, x {values.shape}; give both shape (n,)")
    known = np.isfinite(values)
    times, values = times[known], values[known]
    end_t = np.inf if relief_t is None else relief_t
    early = values[times <= onset_t]
    inside = (times > onset_t) & (times <= end_t)
    during = values[inside]
    if len(during) > _FEWEST:
        during = during[1:]  # a rate over the second in which onset fell is half of each
    if len(early) < _FEWEST or len(during) < _FEWEST:
        return None
    if len(early) > _LEAST_NEAR:
        early = early[:-1]  # the first slow iteration began before it was over
    near = early[-min(max(len(during), _LEAST_NEAR), _NEAR) :]
    during = during[: max(len(near), _LEAST_NEAR)]
    late = values[times > end_t]
    if len(late) > _FEWEST:
        late = late[1:]
    before, level = float(np.median(near)), float(np.median(during))
    noise = max(mad(early), mad(near), least / 4, 0.005 * abs(before), 1e-12)
    found = OnsetStep(
        before=before,
        during=level,
        after=float(np.median(late)) if len(late) >= _FEWEST else None,
        effect=float(np.clip((level - before) / noise, -_CAP, _CAP)),
        order=_order(near, during),
        correlation=_correlation(near, during),
        lag_s=0.0,
        levels=_levels(near, during),
        samples=(len(early), len(during)),
    )
    if not found.clear:
        return found
    slow = times <= end_t
    return replace(found, lag_s=_lag(times[slow], values[slow], onset_t))


def _levels(before: Floats, during: Floats) -> bool:
    """Two levels fit at least as well as one line, by absolute distances."""
    x = np.concatenate([before, during])
    place = np.arange(len(x)) - (len(x) - 1) / 2
    line = x.mean() + place * (place @ x) / (place @ place)
    steps = np.abs(before - np.median(before)).sum() + np.abs(during - np.median(during)).sum()
    return bool(steps <= np.abs(x - line).sum())


def _order(before: Floats, during: Floats) -> float:
    above = np.sign(during[:, None] - before[None, :])
    return float((above.mean() + 1) / 2)


def _correlation(before: Floats, during: Floats) -> float:
    values = np.concatenate([before, during])
    spread = float(values.std())
    if spread == 0:
        return 0.0
    share = len(during) / len(values)
    difference = float(during.mean() - before.mean())
    return float(np.clip(difference / spread * np.sqrt(share * (1 - share)), -1, 1))


def _lag(t: Floats, x: Floats, onset_t: float) -> float:
    """Where one step, by absolute distances, fits best near onset; ties go to the nearest."""
    within = np.abs(t - onset_t) <= 3 * _LAGS_S
    t, x = t[within], x[within]
    best, lag_s = np.inf, 0.0
    # a step between two samples may be anywhere between them: nearest to onset
    for i in range(2, len(t) - 1):
        at = float(np.clip(onset_t, t[i - 1], t[i])) - onset_t
        if abs(at) > _LAGS_S:
            continue
        left, right = x[:i], x[i:]
        cost = float(np.abs(left - np.median(left)).sum() + np.abs(right - np.median(right)).sum())
        if cost < best or (cost == best and abs(at) < abs(lag_s)):
            best, lag_s = cost, at
    return lag_s
