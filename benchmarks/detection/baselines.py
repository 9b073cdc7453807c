"""The two detectors of the paper failslow is measured against, plain and as good as they get.

In: a `StepSeries`. Out: `DetectedEpisode`s. Both look at the record times alone, as in the paper
(arXiv 2410.12588, detection): neither verifies, merges, knows of spikes nor of work.

Their parameters are the best of a grid, by FPR + FNR per job on a suite of another seed than the
one they are judged on (300 jobs of seed 1000): `python -m benchmarks.detection.tune`.
"""

from __future__ import annotations

import numpy as np
from benchmarks.detection.score import DetectedEpisode
from numpy.typing import NDArray

from failslow.records import StepSeries
from failslow.stats.bocd import BocdPrior, BocdStream

__all__ = [
    "BOCD_HAZARD",
    "BOCD_NOISE",
    "BOCD_RECENT",
    "SLIDING_RATIO",
    "SLIDING_WINDOW",
    "plain_bocd",
    "sliding_window",
]

Floats = NDArray[np.float64]

SLIDING_WINDOW = 50
SLIDING_RATIO = 1.2
BOCD_HAZARD = 1e-32
BOCD_NOISE = 0.1
BOCD_RECENT = 32


def sliding_window(
    series: StepSeries, window: int = SLIDING_WINDOW, ratio: float = SLIDING_RATIO
) -> list[DetectedEpisode]:
    """Mean of the last `window` records against the mean of the `window` before.

    An episode opens where the quotient first exceeds `ratio` and closes where it first falls
    below 1 / ratio, each dated to the most extreme quotient of that excursion.
    """
    time = series.duration_s
    n = len(time)
    if n < 2 * window:
        return []
    sums = np.concatenate([[0.0], np.cumsum(time)])
    middle = np.arange(window, n - window + 1)
    before = sums[middle] - sums[middle - window]
    quotient = np.log((sums[middle + window] - sums[middle]) / before)
    side = np.where(quotient > np.log(ratio), 1, np.where(quotient < -np.log(ratio), -1, 0))
    edges = np.flatnonzero(np.diff(side, prepend=0, append=0))
    found: list[DetectedEpisode] = []
    onset: int | None = None
    heard = 0
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        sign = int(side[start])
        if sign > 0 and onset is None:
            onset = int(middle[start + int(np.argmax(quotient[start:stop]))])
            heard = int(middle[start]) + window - 1
        elif sign < 0 and onset is not None:
            end = int(middle[start + int(np.argmin(quotient[start:stop]))])
            found.append(_episode(sums, onset, end, window, heard))
            onset = None
    if onset is not None:
        found.append(_episode(sums, onset, n, window, heard))
    return found


def plain_bocd(
    series: StepSeries,
    hazard: float = BOCD_HAZARD,
    noise: float = BOCD_NOISE,
    recent: int = BOCD_RECENT,
) -> list[DetectedEpisode]:
    """Every change point with P(run length < `recent`) > 0.9 counts, without verification.

    An episode opens at a change point after which the times are longer than before and closes at
    one after which they are shorter; a stretch is what lies between two change points.
    """
    time = series.duration_s
    prior = BocdPrior(hazard=hazard, alpha0=1.0, beta0=noise**2)
    result = BocdStream(prior, recent=recent).extend(np.log(time))
    changed = result.recent_probability > 0.9
    changed[: 2 * recent] = False  # the first run is short without being a change
    heard = np.flatnonzero(changed & ~np.roll(changed, 1))
    begins = heard - result.map_run_length[heard] + 1
    edges = [0]
    told = [0]
    for begin, when in zip(begins.tolist(), heard.tolist(), strict=True):
        if begin > edges[-1] and begin < len(time):
            edges.append(begin)
            told.append(when)
    levels = [float(time[a:b].mean()) for a, b in zip(edges, [*edges[1:], len(time)], strict=True)]
    sums = np.concatenate([[0.0], np.cumsum(time)])
    found: list[DetectedEpisode] = []
    opened: int | None = None
    for i in range(1, len(edges)):
        if levels[i] > levels[i - 1] and opened is None:
            opened = i
        elif levels[i] < levels[i - 1] and opened is not None:
            width = edges[opened] - edges[opened - 1]
            found.append(_episode(sums, edges[opened], edges[i], width, told[opened]))
            opened = None
    if opened is not None:
        width = edges[opened] - edges[opened - 1]
        found.append(_episode(sums, edges[opened], len(time), width, told[opened]))
    return found


def _episode(sums: Floats, first: int, stop: int, width: int, heard: int) -> DetectedEpisode:
    """The episode [first, stop), as slow as its mean against that of `width` records before."""
    stop = max(stop, first + 1)
    inside = (sums[stop] - sums[first]) / (stop - first)
    before = (sums[first] - sums[first - width]) / width
    return DetectedEpisode(
        first_index=first,
        last_index=stop - 1,
        slowdown=float(inside / before),
        suspected_index=heard,
    )
