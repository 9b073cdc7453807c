"""The step statistic: nothing in noise and drift, the right time in steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.localize.correlation import onset_step

SEEDS = st.integers(0, 2**32 - 1)
BEFORE = st.integers(20, 120)
DURING = st.integers(6, 60)


def _noise(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n)


@pytest.mark.parametrize(("before", "during"), [(60, 10), (30, 5), (20, 40)])
def test_noise_and_drift_hardly_ever_look_like_a_step(before: int, during: int) -> None:
    """300 series of each kind; one of them may."""
    false = dict.fromkeys(("noise", "drift", "falling drift", "spikes"), 0)
    t = np.arange(before + during, dtype=float)
    for seed in range(300):
        x = _noise(seed, len(t))
        spikes = np.where(_noise(seed + 10**6, len(t)) > 2, 50.0, 0.0)
        for name, series in (
            ("noise", x),
            ("drift", x / 10 + 0.3 * t),
            ("falling drift", x - t),
            ("spikes", x + spikes),
        ):
            step = onset_step(t, series, before - 0.5)
            assert step is not None
            false[name] += step.clear
    assert max(false.values()) <= 1, false


@given(slope=st.floats(-100, 100), before=st.integers(30, 120), during=DURING)
def test_a_drift_without_noise_is_no_step(slope: float, before: int, during: int) -> None:
    t = np.arange(before + during, dtype=float)
    step = onset_step(t, slope * t, before - 0.5)
    assert step is not None
    assert not step.clear


@given(
    seed=SEEDS,
    before=BEFORE,
    during=DURING,
    size=st.floats(20, 1000) | st.floats(-1000, -20),
    error_s=st.floats(-2, 2),
)
def test_a_step_is_found_at_its_time_though_onset_is_known_roughly(
    seed: int, before: int, during: int, size: float, error_s: float
) -> None:
    t = np.arange(before + during, dtype=float)
    true_t = before - 0.5
    # bounded: of normal noise three samples may be anything, and one draw in a hundred is no step
    x = np.random.default_rng(seed).uniform(-1.25, 1.25, len(t)) + size * (t > true_t)
    step = onset_step(t, x, true_t + error_s)
    assert step is not None
    assert step.clear
    assert (step.effect > 0) == (size > 0)
    assert (step.correlation > 0) == (size > 0)
    assert abs(true_t + error_s + step.lag_s - true_t) <= 1.01  # between the same two samples
    assert step.during - step.before == pytest.approx(size, abs=2.5)


@given(seed=SEEDS, scale=st.floats(1e-3, 1e6), shift=st.floats(-1e3, 1e3))
def test_units_do_not_matter(seed: int, scale: float, shift: float) -> None:
    t = np.arange(50.0)
    x = _noise(seed, 50) + 8 * (t > 34.5)
    one, two = onset_step(t, x, 34.5), onset_step(t, scale * x, 34.5)
    assert one is not None
    assert two is not None
    assert two.effect == pytest.approx(one.effect, rel=1e-6)
    assert two.order == pytest.approx(one.order)
    assert two.lag_s == one.lag_s
    moved = onset_step(t, x + shift, 34.5, least=0.0)
    assert moved is not None
    assert moved.order == pytest.approx(one.order, abs=0.02)


def test_a_counter_that_stood_at_zero_has_the_noise_of_what_matters() -> None:
    t = np.arange(40.0)
    step = onset_step(t, np.where(t > 29.5, 50.0, 0.0), 29.5, least=10.0)
    assert step is not None
    assert step.effect == 20.0  # 50 over a quarter of 10
    assert step.clear
    small = onset_step(t, np.where(t > 29.5, 5.0, 0.0), 29.5, least=10.0)
    assert small is not None
    assert not small.clear


def test_relief_is_compared_too() -> None:
    t = np.arange(60.0)
    x = np.where((t > 29.5) & (t < 44.5), 5.0, 1.0)
    step = onset_step(t, x, 29.5, 44.5, least=0.1)
    assert step is not None
    assert (step.before, step.during, step.after, step.returned) == (1.0, 5.0, 1.0, True)
    stayed = onset_step(t, np.where(t > 29.5, 5.0, 1.0), 29.5, 44.5, least=0.1)
    assert stayed is not None
    assert stayed.returned is False
    ongoing = onset_step(t, x, 29.5, least=0.1)
    assert ongoing is not None
    assert ongoing.returned is None


@pytest.mark.parametrize(("before", "during"), [(2, 30), (30, 2), (0, 0)])
def test_too_few_samples_tell_nothing(before: int, during: int) -> None:
    t = np.arange(float(before + during))
    assert onset_step(t, t, before - 0.5) is None


def test_gaps_are_skipped() -> None:
    t = np.arange(60.0)
    x = np.where(t > 39.5, 9.0, 1.0) + 0.1 * _noise(1, 60)
    x[::3] = np.nan
    step = onset_step(t, x, 39.5)
    assert step is not None
    assert step.clear
    assert onset_step(t, np.full(60, np.nan), 39.5) is None


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="give both shape"):
        onset_step([1.0, 2.0], [1.0], 1.0)
