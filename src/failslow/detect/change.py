"""BOCD's word on one onset: how sure is it that the level changed there?

In: excesses up to now and the index of the supposed onset. Out: P(run length < k), k reaching
just past the onset. The detector asks only where medians already differ by `min_slowdown`, since
that test is the cheaper of the two and both must hold (arXiv 2410.12588 §4.2).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from failslow.detect.windows import Noise
from failslow.stats.bocd import BocdPrior, BocdStream

__all__ = ["onset_posterior"]

_BEFORE = 64
_AFTER = 48
_SLACK = 3  # records by which BOCD may see the onset earlier


def onset_posterior(excess: NDArray[np.float64], onset: int, noise: Noise) -> float:
    """Posterior probability that a new run began at `onset` (±3 records), in [0, 1].

    excess: shape (n,), onset in 0..n-1. Values are clipped to the band of the two levels first:
    a spike is an outlier of its run and must not begin one.
    """
    first = max(0, onset - _BEFORE)
    piece = excess[first : onset + _AFTER]
    after = len(piece) - (onset - first)
    level = float(np.median(piece[-after:]))
    width = 4.0 * noise.sigma
    stream = BocdStream(
        BocdPrior(mu0=0.0, beta0=noise.sigma**2), max_run=_BEFORE + _AFTER + 1, recent=1
    )
    stream.extend(np.clip(piece, -width, max(level, 0.0) + width))
    return stream.change_probability(after + _SLACK + 1)
