"""The two detectors of the paper failslow is measured against, plain and as good as they get.

In: a `StepSeries`. Out: `DetectedEpisode`s. Both look at the record times alone, as in the paper
(arXiv 2410.12588, §4.2 and table 3): neither verifies, merges, knows of spikes nor of work.
"""

from __future__ import annotations

import numpy as np
from benchmarks.detection.score import DetectedEpisode

from failslow.records import StepSeries

__all__ = ["SLIDING_RATIO", "SLIDING_WINDOW", "sliding_window"]

SLIDING_WINDOW = 50
SLIDING_RATIO = 1.3


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


def _episode(
    sums: np.ndarray[tuple[int], np.dtype[np.float64]],
    first: int,
    stop: int,
    window: int,
    heard: int,
) -> DetectedEpisode:
    stop = max(stop, first + 1)
    inside = (sums[stop] - sums[first]) / (stop - first)
    before = (sums[first] - sums[first - window]) / window
    return DetectedEpisode(
        first_index=first,
        last_index=stop - 1,
        slowdown=float(inside / before),
        suspected_index=heard,
    )
