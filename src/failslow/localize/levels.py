"""What is slow among comparable measurements: against each other, and against healthy times.

In: readings of like things now, and the same from healthy times where there are any. Out: for each
its ratio to what was to be expected, and whether that is beyond the noise. Pure.

    >>> now = {rank: Reading(1.0 if rank != 3 else 1.5, noise=0.01) for rank in range(8)}
    >>> {rank: round(c.ratio, 2) for rank, c in compare(now, {}, Limits()).items() if c.is_slow}
    {3: 1.5}

The healthy level is the lower quartile, not the middle: several culprits must not pass for the
norm, and nothing is faster than healthy but by noise. How much noise there is comes from the
samples of each reading, from how far the faster half lies apart, and from how readings changed
since the reference. Two tests: slower than the level of its peers, or slower than it was itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

__all__ = ["Compared", "Limits", "Reading", "common_change", "compare"]

K = TypeVar("K", bound=Hashable)

_LOWEST_MEAN = (0.0, 0.0, 0.56, 0.85, 1.03, 0.50, 0.64, 0.76, 0.85)
"""How many standard deviations the order statistic taken for n = 0, 1, 2 … lies below the mean."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A typical time and how far it can be trusted."""

    value_s: float
    noise: float = 0.0
    """Standard error over the value, by the spread of its samples."""
    doubt: float = 0.0
    """The same of this reading alone, from what else is known about it."""
    low_s: float | None = None
    """The fastest sample: must be slow as well, where it is given."""
    excused: float = 0.0
    """Share of the fastest sample's time that something else took."""
    at_least: bool = False
    """It was cut off: it would have taken longer."""

    def times(self, factor: float) -> Reading:
        """The same, had everything taken so much longer."""
        low_s = None if self.low_s is None else self.low_s * factor
        return replace(self, value_s=self.value_s * factor, low_s=low_s)

    @property
    def log(self) -> float:
        """Ratios become differences."""
        return math.log(self.value_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From when on a ratio counts, however quiet it is; and how far out of the noise."""

    peers: float = 1.15
    """Against peers alone: like devices are not quite alike."""
    reference: float = 1.10
    """Against its own healthy time."""
    sigmas: float = 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One reading against what was to be expected."""

    value_s: float
    expected_s: float
    is_slow: bool
    threshold: float
    """The ratio from which it counts as slow against its peers."""
    is_excused: bool = False
    """It would be slow, had it not waited for a core meanwhile: it says nothing."""

    @property
    def ratio(self) -> float:
        """Above 1 = slower than expected."""
        return self.value_s / self.expected_s

    @property
    def late_s(self) -> float:
        """Above 0 = later than expected."""
        return self.value_s - self.expected_s


@dataclass(frozen=True, slots=True)
class _Level:
    """Where healthy readings lie, in logarithms."""

    center: float
    sigma: float


def compare(
    now: Mapping[K, Reading], reference: Mapping[K, Reading], limits: Limits
) -> dict[K, Compared]:
    """Judge each reading; one with neither a peer nor a reference is left out."""
    keys = list(now)
    common = math.log(common_change(now, reference))
    levels = [_shifted(_level(reference), common)] if len(reference) > 1 else []
    levels += [_level(now)] if len(now) > 1 else []
    # the lower of the two: most may have become slower since the reference
    level = min(levels, key=lambda level: level.center) if levels else None
    changes = {k: now[k].log - reference[k].log - common for k in keys if k in reference}
    drift = _Level(0.0, _noise(now, reference, sorted(changes.values())))
    judged: dict[K, tuple[bool, float]] = {}
    excused: set[K] = set()
    usual_low = _usual_low(now, reference)
    for key in keys:
        reading, before = now[key], reference.get(key)
        threshold, is_slow = math.inf, False
        if level is not None:
            sigma = math.hypot(level.sigma, reading.doubt)
            threshold = max(math.log(limits.peers), limits.sigmas * sigma)
            is_slow = reading.log - level.center > threshold
        if before is not None:
            sigma = math.hypot(drift.sigma, reading.doubt, before.doubt)
            change_limit = max(math.log(limits.reference), limits.sigmas * sigma)
            above = math.inf if level is None else reading.log - level.center
            # "slower than it was" must not mean "it was lucky then"
            is_slow |= changes[key] > change_limit and above > 0.5 * change_limit
            threshold = min(threshold, change_limit)
        if is_slow and reading.low_s is not None:
            least = usual_low + 0.5 * threshold
            is_slow = _low_is_slow(reading.low_s, least, reading.excused)
            if not is_slow and _low_is_slow(reading.low_s, least, 0.0):
                excused.add(key)
        judged[key] = (is_slow, threshold)
    healthy = [now[key].log for key, (is_slow, _) in judged.items() if not is_slow]
    usual = float(np.median(healthy)) if healthy else level.center if level else 0.0
    result = {}
    for key, (is_slow, threshold) in judged.items():
        before = reference.get(key)
        if before is None and level is None:
            continue  # there is nothing to say it is slow or not
        expected = usual
        if before is not None and (
            level is None or before.log + common - level.center <= math.log(limits.peers)
        ):
            expected = before.log + common
        result[key] = Compared(
            value_s=now[key].value_s,
            expected_s=math.exp(expected),
            is_slow=is_slow,
            threshold=math.exp(min(threshold, 700.0)),
            is_excused=key in excused,
        )
    return result


def common_change(now: Mapping[K, Reading], reference: Mapping[K, Reading]) -> float:
    """By what ratio all have become slower alike since the reference; 1.0 where they have not.

    Four and more that do so together are not each at fault.
    """
    if len(now) < 4 or any(key not in reference for key in now):
        return 1.0
    changes = sorted(reading.log - reference[key].log for key, reading in now.items())
    return math.exp(changes[0]) if changes[0] > math.log(1.05) else 1.0


def _shifted(level: _Level, by: float) -> _Level:
    return _Level(level.center + by, level.sigma)


def _usual_low(now: Mapping[K, Reading], reference: Mapping[K, Reading]) -> float:
    """Where fastest samples of healthy readings lie, in logarithms."""
    lows = [
        _quartile(sorted(math.log(r.low_s) for r in readings.values() if r.low_s))
        for readings in (now, reference)
        if any(r.low_s for r in readings.values())
    ]
    return min(lows, default=-math.inf)


def _low_is_slow(low_s: float, least: float, excused: float) -> bool:
    """Whether even the fastest sample is slow: else it was disturbed, as others may be next."""
    sure_s = low_s * (1.0 - excused)
    return sure_s > 0.0 and math.log(sure_s) > least


def _level(readings: Mapping[K, Reading]) -> _Level:
    values = sorted(reading.log for reading in readings.values() if not reading.at_least)
    if not values:
        values = sorted(reading.log for reading in readings.values())
    sigma = max(_within(readings), _spread(values))
    below = _LOWEST_MEAN[len(values)] if len(values) < len(_LOWEST_MEAN) else 0.67
    # the level itself is as uncertain as a mean of its neighbours
    return _Level(
        _quartile(values) + below * sigma, sigma * math.sqrt(1.0 + 1.5 / max(1, len(values)))
    )


def _noise(
    now: Mapping[K, Reading], reference: Mapping[K, Reading], changes: Sequence[float]
) -> float:
    """Of a change since the reference that means nothing."""
    sampled = math.hypot(_within(now), _within(reference))
    return max(sampled, _spread(changes))


def _within(readings: Mapping[K, Reading]) -> float:
    """The noise of a usual reading: a culprit's own may be wild."""
    noises = [reading.noise for reading in readings.values() if not reading.at_least]
    return float(np.median(noises)) if noises else 0.0


def _quartile(ordered: Sequence[float]) -> float:
    return ordered[(len(ordered) - 1) // 4]


def _spread(ordered: Sequence[float]) -> float:
    """Standard deviation by the faster half: culprits are in the other one."""
    if len(ordered) < 3:
        return 0.0
    half = np.asarray(ordered[: (len(ordered) + 1) // 2])
    # mean distance from the middle of the whole, of a half normal distribution: 0.8 sigma
    return 1.25 * float((half[-1] - half).sum()) / (len(half) - 1)
