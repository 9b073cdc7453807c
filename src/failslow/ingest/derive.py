"""Seconds per iteration where a log prints totals or running means.

In: columns of one writer's records. Out: durations, by differences.

    undo_cumulative([10, 20, 30], [4.0, 8.0, 12.5])   # 10 iterations each: 0.4, 0.4, 0.45 s
    undo_running_mean([0.20, 0.20, 0.23], [10, 20, 30])   # 0.20, 0.20, 0.29 s
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["undo_cumulative", "undo_running_mean"]


def undo_running_mean(mean: NDArray[np.float64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean over each interval, from means over everything so far.

    mean[i] is over the first count[i] values. Where `count` does not grow the mean started
    anew and is taken as it stands. Printed digits limit the result: an error e in `mean` becomes
    about 2·e·count/(count step).
    """
    total = mean * count
    grown = np.diff(count)
    fresh = np.concatenate([[True], grown <= 0])
    interval = np.concatenate([mean[:1], np.diff(total) / np.where(grown > 0, grown, 1)])
    return np.where(fresh, mean, interval)


def undo_cumulative(
    step: NDArray[np.int64], elapsed_s: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(iterations, mean seconds per iteration) of each record, from time elapsed so far.

    A timer set back counts from the step before it. The first record, and one whose step jumps
    back, cover the usual step distance (a resumed job starts its timer at its first step), or
    `step` iterations where those are fewer. A step printed again has the duration NaN.
    """
    if len(step) == 0:
        return np.zeros(0, np.int64), np.zeros(0)
    grown = np.diff(step)
    positive = grown[grown > 0]
    usual = int(np.bincount(np.minimum(positive, 1_000_000)).argmax()) if len(positive) else 1
    anew = np.concatenate([[True], grown < 0])
    opening = np.minimum(usual, np.maximum(step, 1))
    iterations = np.where(anew, opening, np.concatenate([[1], grown]))
    elapsed_before = np.concatenate([[0.0], elapsed_s[:-1]])
    set_back = anew | (elapsed_s < elapsed_before)
    spent = elapsed_s - np.where(set_back, 0.0, elapsed_before)
    return np.maximum(iterations, 1), np.where(
        iterations > 0, spent / np.maximum(iterations, 1), np.nan
    )
