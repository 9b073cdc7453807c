"""Kaplan–Meier against scipy, plain shares and its own definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from failslow.stats.survival import SurvivalCurve

lives = st.lists(st.tuples(st.integers(0, 20).map(float), st.booleans()), min_size=1, max_size=40)


@given(lives)
def test_curve_is_that_of_scipy(seen: list[tuple[float, bool]]) -> None:
    durations, ended = (np.array(column) for column in zip(*seen, strict=True))
    curve = SurvivalCurve.fit(durations, ended)
    data = stats.CensoredData(uncensored=durations[ended], right=durations[~ended])
    expected = stats.ecdf(data).sf
    for t in np.arange(-1.0, 22.0, 0.5):
        assert curve.survival(t) == pytest.approx(expected.evaluate(t), abs=1e-12)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50), st.floats(0.0, 1e6))
def test_without_cut_ones_it_is_the_share_that_lasts_longer(
    durations: list[float], t_s: float
) -> None:
    curve = SurvivalCurve.fit(durations)
    assert curve.survival(t_s) == pytest.approx(np.mean(np.array(durations) > t_s), abs=1e-12)
    assert curve.count == len(durations)


@given(lives)
def test_masses_are_a_distribution_with_that_curve(seen: list[tuple[float, bool]]) -> None:
    durations, ended = zip(*seen, strict=True)
    curve = SurvivalCurve.fit(durations, ended)
    times, weights = curve.masses()
    assert weights.sum() == pytest.approx(1.0)
    assert (weights > 0).all()
    assert (np.diff(times) >= 0).all()
    for t in np.arange(0.0, curve.longest_s, 0.5):
        assert weights[times > t].sum() == pytest.approx(curve.survival(t), abs=1e-12)


def test_what_outlived_the_data_lasts_twice_as_long_as_the_longest() -> None:
    times, weights = SurvivalCurve.fit([10.0, 40.0], [True, False]).masses()
    assert times.tolist() == [10.0, 80.0]
    assert weights.tolist() == [0.5, 0.5]


def test_curve_of_many_cut_durations_comes_near_the_truth() -> None:
    rng = np.random.default_rng(0)
    truth, cut = rng.exponential(600.0, 4000), rng.exponential(900.0, 4000)
    curve = SurvivalCurve.fit(np.minimum(truth, cut), truth <= cut)
    for t in (60.0, 300.0, 600.0, 1200.0):
        assert curve.survival(t) == pytest.approx(np.exp(-t / 600.0), abs=0.03)


@pytest.mark.parametrize(
    ("durations", "observed", "told"),
    [
        ([], None, "give at least one"),
        ([1.0, -1.0], None, "finite and >= 0"),
        ([1.0, np.inf], None, "finite and >= 0"),
        ([1.0, 2.0], [True], r"observed has shape \(1,\)"),
    ],
)
def test_what_is_no_duration_is_refused(
    durations: list[float], observed: list[bool] | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        SurvivalCurve.fit(durations, observed)
