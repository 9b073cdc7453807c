"""Decimation keeps what an eye must find: extremes, medians, and what it is told to keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from failslow.report.decimate import bucket_medians, decimate, highest_per_bucket

SERIES = hnp.arrays(np.float64, st.integers(1, 400), elements=st.floats(1e-6, 1e6))


@given(SERIES, st.integers(1, 40), st.lists(st.integers(-5, 500), max_size=8))
def test_every_bucket_keeps_its_extremes_and_median_and_all_that_must_stay(
    values: np.ndarray, buckets: int, keep: list[int]
) -> None:
    kept = decimate(values, buckets=buckets, keep=keep)

    assert np.array_equal(kept, np.unique(kept))
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert {k for k in keep if 0 <= k < len(values)} <= set(kept.tolist())
    assert len(kept) <= min(len(values), 3 * buckets + 2 + len(keep))
    size = -(-len(values) // buckets)
    for start in range(0, len(values), size):
        bucket = values[start : start + size]
        shown = values[kept[(kept >= start) & (kept < start + size)]]
        assert shown.min() == bucket.min()
        assert shown.max() == bucket.max()
        assert np.sort(bucket)[(len(bucket) - 1) // 2] in shown


def test_a_short_series_stays_whole() -> None:
    assert decimate(np.ones(30), buckets=10).tolist() == list(range(30))


def test_no_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"buckets \(0\) must be at least 1"):
        decimate(np.ones(3), buckets=0)


@given(SERIES, st.integers(1, 40))
def test_bucket_medians_are_samples_of_their_bucket(values: np.ndarray, buckets: int) -> None:
    middle, median = bucket_medians(values, buckets=buckets)

    size = -(-len(values) // buckets)
    assert (middle // size == median // size).all()
    for index in median.tolist():
        bucket = values[index // size * size :][:size]
        assert values[index] == np.sort(bucket)[(len(bucket) - 1) // 2]


@given(SERIES, st.integers(1, 20), st.data())
def test_no_chosen_sample_is_lost_uncounted_and_each_bucket_shows_its_highest(
    values: np.ndarray, buckets: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(values) - 1)))

    shown, counts = highest_per_bucket(values, np.array(sorted(chosen), np.int64), buckets=buckets)

    assert counts.sum() == len(chosen)
    assert set(shown.tolist()) <= chosen
    if chosen:
        assert values[shown].max() == max(values[i] for i in chosen)
    if len(chosen) <= buckets:
        assert set(shown.tolist()) == chosen
