"""Robust statistics against numpy and scipy oracles, and under spikes."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import signal, stats

from failslow.stats import robust

Floats = NDArray[np.float64]

finite = st.floats(-1e6, 1e6)
samples = st.lists(finite, min_size=1, max_size=60)


def ar1(rng: np.random.Generator, n: int, rho: float, sigma: float) -> Floats:
    """Stationary AR(1) noise of standard deviation sigma, shape (n,)."""
    shocks = rng.standard_normal(n + 500) * sigma * np.sqrt(1 - rho**2)
    noise: Floats = signal.lfilter([1.0], [1.0, -rho], shocks)[500:]
    return noise


@given(st.lists(st.tuples(finite, st.integers(0, 5)), min_size=1, max_size=40))
def test_weighted_median_is_the_median_of_repeated_samples(pairs: list[tuple[float, int]]) -> None:
    values, weights = zip(*pairs, strict=True)
    if sum(weights) == 0:
        with pytest.raises(ValueError, match="all weights are 0"):
            robust.median(values, weights)
    else:
        assert robust.median(values, weights) == np.median(np.repeat(values, weights))


@given(samples)
def test_median_and_mad_match_scipy(values: list[float]) -> None:
    assert robust.median(values) == np.median(values)
    expected = stats.median_abs_deviation(values, scale="normal")
    assert robust.mad(values) == pytest.approx(expected, rel=1e-9)
    assert robust.mad(values, centre=0.0) == pytest.approx(
        np.median(np.abs(values)) * 1.4826022, rel=1e-6
    )


@given(samples, st.integers(1, 12), st.integers(1, 12))
def test_rolling_median_matches_numpy_on_every_prefix(
    values: list[float], window: int, minimum: int
) -> None:
    minimum = min(minimum, window)
    rolling = robust.RollingMedian(window, minimum=minimum)
    assert rolling.get() is None
    for n, value in enumerate(values, 1):
        rolling.update(value)
        if n < minimum:
            assert rolling.get() is None
        else:
            assert rolling.get() == np.median(values[max(0, n - window) : n])


@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.05])
def test_moments_survive_two_percent_spikes(sigma: float) -> None:
    rng = np.random.default_rng(1)
    clean = np.log(0.5) + sigma * rng.standard_normal(2000)
    spiked = clean.copy()
    spiked[rng.choice(2000, 40, replace=False)] += np.log(rng.uniform(1.5, 30, 40))
    moments = robust.robust_moments(spiked)
    assert moments.sigma == pytest.approx(clean.std(), rel=0.03)
    assert moments.mean == pytest.approx(clean.mean(), abs=0.1 * sigma)
    assert moments.outliers == pytest.approx(40, abs=3)
    assert robust.mad(spiked) == pytest.approx(clean.std(), rel=0.08)
    assert robust.noise_sigma(spiked) == pytest.approx(clean.std(), rel=0.10)
    assert np.std(spiked) > 3 * sigma  # what the plain moment makes of it


def test_moments_are_plain_moments_on_clean_data() -> None:
    x = np.random.default_rng(2).uniform(-1, 1, 500)
    moments = robust.robust_moments(x)
    assert (moments.mean, moments.sigma, moments.outliers) == (x.mean(), x.std(ddof=1), 0)


def test_sigma_is_not_lost_when_a_log_prints_two_digits() -> None:
    rng = np.random.default_rng(3)
    times = np.round(0.57 * np.exp(0.006 * rng.standard_normal(3000)), 2)
    assert stats.median_abs_deviation(times) == 0
    assert robust.robust_moments(np.log(times)).sigma == pytest.approx(np.log(times).std(), rel=0.1)
    assert robust.noise_sigma(np.log(times)) == pytest.approx(np.log(times).std(), rel=0.1)


@pytest.mark.parametrize("level", ["steps", "drift", "flat"])
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_noise_sigma_ignores_what_the_level_does(level: str, rho: float) -> None:
    noise = ar1(np.random.default_rng(4), 3000, rho, 0.01)
    shape = {
        "steps": 0.4 * (np.arange(3000) // 300 % 2),
        "drift": np.linspace(0, 1, 3000),
        "flat": np.zeros(3000),
    }
    assert robust.noise_sigma(noise + shape[level]) == pytest.approx(0.01, rel=0.1)


def test_noise_sigma_of_few_samples() -> None:
    assert robust.noise_sigma([1.0]) == 0.0
    assert robust.noise_sigma(np.full(20, 3.0)) == 0.0
    rng = np.random.default_rng(5)
    estimates = [robust.noise_sigma(rng.standard_normal(50)) for _ in range(400)]
    assert np.mean(estimates) == pytest.approx(1.07, abs=0.03)


@pytest.mark.parametrize("rho", [-0.4, 0.0, 0.5, 0.9])
@pytest.mark.parametrize("spikes", [0, 400])
def test_autocorrelation_of_ar1_noise_with_and_without_spikes(rho: float, spikes: int) -> None:
    rng = np.random.default_rng(6)
    x = ar1(rng, 20_000, rho, 0.01)
    x[rng.choice(len(x), spikes, replace=False)] += 3.4
    expected = rho ** np.arange(1, 4)
    np.testing.assert_allclose(robust.autocorrelation(x, 3), expected, atol=0.04)


@given(hnp.arrays(np.float64, st.integers(3, 50), elements=st.floats(-1, 1)))
def test_autocorrelation_is_a_correlation(x: Floats) -> None:
    lags = robust.autocorrelation(x, len(x) - 2)
    assert np.all(np.abs(lags) <= 1)


def test_a_constant_series_has_no_autocorrelation() -> None:
    assert robust.autocorrelation(np.ones(10), 2).tolist() == [0.0, 0.0]


@given(st.integers(1, 60), st.floats(0, 0.99))
def test_effective_count_is_exact_for_the_mean_of_ar1_noise(n: int, rho: float) -> None:
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    variance_of_mean = (rho**lag).sum() / n**2
    assert robust.effective_count(n, rho) == pytest.approx(1 / variance_of_mean, rel=1e-9)


def test_effective_count_stays_within_its_bounds() -> None:
    assert robust.effective_count(50, 1.0) == 1.0
    assert robust.effective_count(50, -0.5) == 50.0
    with pytest.raises(ValueError, match="n \\(0\\)"):
        robust.effective_count(0, 0.1)
    with pytest.raises(ValueError, match="rho"):
        robust.effective_count(5, float("nan"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: robust.median([]), "at least one sample"),
        (lambda: robust.mad(np.ones((2, 2))), "shape \\(2, 2\\)"),
        (lambda: robust.median([1.0, 2.0], weights=[1.0]), "weights must be 2"),
        (lambda: robust.median([1.0], weights=[-1.0]), "weights must be 1"),
        (lambda: robust.autocorrelation([1.0, 2.0], 1), "2 samples are too few for 1 lags"),
        (lambda: robust.RollingMedian(3, minimum=4), "minimum \\(4\\)"),
        (lambda: robust.RollingMedian(3).update(float("nan")), "NaN"),
    ],
)
def test_bad_input_names_the_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
