"""Online equals batch, however the series is cut; parts against brute force."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.detection.suite import make_job
from hypothesis import given, settings
from hypothesis import strategies as st

from failslow.detect import DetectEvent, Detector
from failslow.detect.windows import locate_fall, locate_rise, majority_ends, run_lengths
from failslow.records import StepSeries


def _same(one: list[DetectEvent], other: list[DetectEvent]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert dataclasses.replace(a, slowdown=0, base_log_s=0, confidence=0) == (
            dataclasses.replace(b, slowdown=0, base_log_s=0, confidence=0)
        )
        assert a.slowdown == pytest.approx(b.slowdown, rel=1e-9)
        assert a.base_log_s == pytest.approx(b.base_log_s, abs=1e-9)
        assert a.confidence == pytest.approx(b.confidence, abs=1e-9)


def _part(series: StepSeries, begin: int, end: int) -> StepSeries:
    columns = ("step", "duration_s", "end_s", "iterations", "work", "data_s", "run")
    return dataclasses.replace(
        series, **{name: getattr(series, name)[begin:end] for name in columns}
    )


@settings(max_examples=25)
@given(index=st.integers(0, 10_000))
def test_one_sample_at_a_time_equals_the_whole_series(index: int) -> None:
    series = make_job(index, 3).series
    series = _part(series, 0, min(len(series), 1500))
    batch, _ = Detector().extend(series)
    online = Detector()
    events: list[DetectEvent] = []
    for i in range(len(series)):
        sample = series.sample(i)
        events += online.update(sample, series.runs[sample.run])
    _same(events, batch)


@settings(max_examples=25)
@given(index=st.integers(0, 10_000), data=st.data())
def test_the_cut_into_blocks_does_not_matter(index: int, data: st.DataObject) -> None:
    series = make_job(index, 4).series
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(series) - 1)), max_size=8)))
    batch, correction = Detector().extend(series)
    blocks = Detector()
    events: list[DetectEvent] = []
    corrections = []
    for begin, end in zip([0, *cuts], [*cuts, len(series)], strict=True):
        got, part = blocks.extend(_part(series, begin, end))
        events += got
        corrections.append(part)
    _same(events, batch)
    np.testing.assert_allclose(np.concatenate(corrections), correction, atol=1e-12)


@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=60),
    windows=st.sets(st.integers(1, 20), min_size=1),
    begin=st.integers(0, 59),
)
def test_majority_ends_equals_counting(flags: list[bool], windows: set[int], begin: int) -> None:
    begin = min(begin, len(flags) - 1)
    got = majority_ends(np.array(flags), begin, tuple(sorted(windows)))
    for offset, hit in enumerate(got):
        end = begin + offset + 1
        expected = any(2 * sum(flags[end - w : end]) >= w for w in windows if w <= end)
        assert hit == expected


@given(st.lists(st.booleans(), max_size=50))
def test_run_lengths_cover_the_flags(flags: list[bool]) -> None:
    lengths = run_lengths(np.array(flags, dtype=np.bool_))
    assert lengths.sum() == sum(flags)
    text = "".join("x" if f else " " for f in flags)
    assert lengths.tolist() == [len(part) for part in text.split()]


@given(before=st.integers(5, 100), after=st.integers(5, 100), seed=st.integers(0, 1000))
def test_a_change_is_located_within_two_records(before: int, after: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    excess = np.concatenate([np.zeros(before), np.full(after, 0.3)])
    excess += rng.normal(0, 0.03, len(excess))
    assert abs(locate_rise(excess, 0.3) - before) <= 2
    assert abs(locate_fall(0.3 - excess, 0.3, 0.0) - before) <= 2


def test_memory_stays_bounded_over_a_long_job() -> None:
    detector = Detector()
    series = make_job(0, 3).series
    for _ in range(3):
        for begin in range(0, len(series), 500):
            detector.extend(_part(series, begin, min(begin + 500, len(series))))
    sizes = [
        value.nbytes
        for part in (detector._history, detector._level)
        for value in vars(part).values()
        if isinstance(value, np.ndarray)
    ]
    assert sum(sizes) < 2_000_000
