"""Change-point detection against a textbook recursion, ruptures, and its own other face."""

import doctest
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import ruptures
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import signal, stats

from failslow.stats import bocd, robust
from failslow.stats.bocd import Bocd, BocdPrior, BocdStream

Floats = NDArray[np.float64]

log_times = st.lists(st.floats(-0.2, 0.2) | st.floats(-7, 7), min_size=1, max_size=40)


class Run(NamedTuple):
    """A run length with its weight and the parameters of its Normal-Inverse-Gamma posterior."""

    weight: float
    mu: float
    kappa: float
    alpha: float
    beta: float

    def after(self, x: float) -> "Run":
        surprise = self.kappa * (x - self.mu) ** 2 / (2 * (self.kappa + 1))
        mu = (self.kappa * self.mu + x) / (self.kappa + 1)
        return Run(self.weight, mu, self.kappa + 1, self.alpha + 0.5, self.beta + surprise)

    def predictive(self, x: float, floor: float) -> float:
        scale = math.sqrt(self.beta * (self.kappa + 1) / (self.alpha * self.kappa))
        return float(stats.t.pdf(x, 2 * self.alpha, loc=self.mu, scale=max(scale, floor)))


def textbook(x: Floats, prior: BocdPrior, max_run: int | None = None) -> list[list[float]]:
    """Adams & MacKay's algorithm 1: the run-length posterior after every sample.

    With `max_run`, the run that outgrows it gives its weight to the one of that length, which
    has seen the last `max_run` samples.
    """
    mu0 = float(x[0]) if prior.mu0 is None else prior.mu0
    fresh = Run(1.0, mu0, prior.kappa0, prior.alpha0, prior.beta0)
    runs, posteriors = [fresh], []
    for value in x.tolist():
        joint = [run.weight * run.predictive(value, prior.noise_floor) for run in runs]
        evidence = sum(joint)
        grown = [
            run._replace(weight=weight * (1 - prior.hazard) / evidence).after(value)
            for run, weight in zip(runs, joint, strict=True)
        ]
        runs = [fresh._replace(weight=prior.hazard), *grown]
        if max_run is not None and len(runs) == max_run + 2:
            runs[-2] = runs[-2]._replace(weight=runs[-2].weight + runs[-1].weight)
            runs.pop()
        posteriors.append([run.weight for run in runs])
    return posteriors


def noisy(seed: int, n: int, sigma: float, rho: float = 0.0) -> Floats:
    """Log times around 0.5 s with AR(1) noise."""
    shocks = np.random.default_rng(seed).standard_normal(n + 200) * sigma * math.sqrt(1 - rho**2)
    noise: Floats = signal.lfilter([1.0], [1.0, -rho], shocks)[200:]
    return noise + math.log(0.5)


def with_steps(seed: int, n: int, sigma: float, onsets: list[int], factor: float = 1.3) -> Floats:
    """A series that turns slow and healthy again at each onset in turn."""
    slow = np.searchsorted(onsets, np.arange(n), side="right") % 2
    return noisy(seed, n, sigma) + slow * math.log(factor)


def spiked(seed: int) -> Floats:
    x = noisy(seed, 70, 0.01)
    x[[20, 21, 50]] += math.log(30)
    return x


SERIES = {
    "white": noisy(0, 70, 0.02),
    "step": with_steps(1, 70, 0.01, [30, 50]),
    "spikes of 30x": spiked(2),
    "without noise": np.log(np.r_[np.full(40, 0.57), np.full(30, 0.58)]),
    "far from the prior": noisy(3, 70, 0.003) + 6,
}
PRIORS = {
    "default": BocdPrior(),
    "another": BocdPrior(
        mu0=-0.5, kappa0=0.3, alpha0=2.5, beta0=0.01, hazard=0.05, noise_floor=0.02
    ),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
@pytest.mark.parametrize("x", SERIES.values(), ids=SERIES)
def test_posterior_is_the_textbooks_on_every_prefix(x: Floats, prior: BocdPrior) -> None:
    stream = BocdStream(prior, max_run=len(x), recent=5)
    for n, expected in enumerate(textbook(x, prior), 1):
        result = stream.extend(x[n - 1 : n])
        posterior = stream.posterior()
        np.testing.assert_allclose(posterior[: n + 1], expected, rtol=1e-8, atol=1e-12)
        assert not posterior[n + 1 :].any()
        assert result.recent_probability[0] == pytest.approx(sum(expected[:5]), abs=1e-9)
        assert result.map_run_length[0] == np.argmax(expected)
        assert stream.samples == n


@pytest.mark.parametrize("x", SERIES.values(), ids=SERIES)
def test_bounded_posterior_is_the_bounded_textbooks_on_every_prefix(x: Floats) -> None:
    stream = BocdStream(max_run=12)
    for n, expected in enumerate(textbook(x, BocdPrior(), max_run=12), 1):
        stream.extend(x[n - 1 : n])
        np.testing.assert_allclose(stream.posterior()[: n + 1], expected, rtol=1e-8, atol=1e-12)


@settings(max_examples=25)
@given(log_times, st.none() | st.floats(-7, 7), st.floats(0.001, 0.5))
def test_any_series_gives_the_textbooks_posterior(
    values: list[float], mu0: float | None, hazard: float
) -> None:
    x, prior = np.array(values), BocdPrior(mu0=mu0, hazard=hazard)
    stream = BocdStream(prior, max_run=50)
    stream.extend(x)
    expected = textbook(x, prior)[-1]
    np.testing.assert_allclose(stream.posterior()[: len(expected)], expected, rtol=1e-6, atol=1e-9)


@given(
    st.integers(0, 2**32),
    st.integers(1, 200),
    st.lists(st.integers(0, 200), max_size=12),
    st.sampled_from([2, 20, 130]),
)
def test_blocks_of_any_size_give_the_same_bits(
    seed: int, n: int, cuts: list[int], max_run: int
) -> None:
    rng = np.random.default_rng(seed)
    x = 0.01 * rng.standard_normal(n) + rng.choice([0, 0.3, 3.4], n, p=[0.9, 0.07, 0.03])
    whole, cut = BocdStream(max_run=max_run, recent=2), BocdStream(max_run=max_run, recent=2)
    expected = whole.extend(x)
    parts = [cut.extend(part) for part in np.split(x, sorted(min(at, n) for at in cuts))]
    for name in ("recent_probability", "map_run_length"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(expected, name), strict=True)
    np.testing.assert_array_equal(cut.posterior(), whole.posterior())


def test_one_sample_at_a_time_gives_the_same_bits_as_one_block() -> None:
    x = with_steps(4, 1500, 0.01, [400, 900, 950])
    whole, single = BocdStream(), BocdStream()
    expected = whole.extend(x).recent_probability
    found = np.concatenate([single.extend([value]).recent_probability for value in x])
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=50)
@given(log_times)
def test_posterior_is_a_distribution_with_the_hazard_at_zero(values: list[float]) -> None:
    stream = BocdStream(max_run=8, recent=8)
    recent = stream.extend(values).recent_probability
    posterior = stream.posterior()
    assert posterior.sum() == pytest.approx(1, abs=1e-12)
    assert posterior[0] == pytest.approx(1 / 250, rel=1e-9)
    assert np.all((recent >= 0) & (recent <= 1 + 1e-12))
    assert stream.change_probability(8) == pytest.approx(recent[-1], abs=1e-12)


@settings(max_examples=50)
@given(log_times, st.floats(-5, 5), st.floats(0.2, 5))
def test_shifting_and_scaling_series_and_prior_together_changes_nothing(
    values: list[float], shift: float, scale: float
) -> None:
    prior = BocdPrior(mu0=0.1)
    moved = BocdPrior(
        mu0=0.1 * scale + shift,
        beta0=prior.beta0 * scale**2,
        noise_floor=prior.noise_floor * scale,
    )
    x = np.array(values)
    expected = BocdStream(prior, max_run=20).extend(x).recent_probability
    found = BocdStream(moved, max_run=20).extend(x * scale + shift).recent_probability
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_first_sample_stands_in_for_an_unknown_level() -> None:
    x = SERIES["step"]
    unknown, known = BocdStream(), BocdStream(BocdPrior().recentred(x[0]))
    np.testing.assert_array_equal(
        unknown.extend(x).recent_probability, known.extend(x).recent_probability
    )


@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.03])
def test_change_points_agree_with_ruptures_on_clear_steps(sigma: float) -> None:
    onsets = [150, 230, 420, 470]
    x = with_steps(5, 600, sigma, onsets)
    pelt = ruptures.Pelt(model="l2", min_size=5, jump=1).fit(x[:, None])
    expected = pelt.predict(pen=20 * sigma**2 * math.log(len(x)))[:-1]
    assert expected == pytest.approx(onsets, abs=1)
    result = BocdStream(recent=8).extend(x)
    # Five samples after a change the posterior says where it was.
    found = [onset + 4 + 1 - int(result.map_run_length[onset + 4]) for onset in expected]
    assert found == pytest.approx(expected, abs=1)
    alarms = np.flatnonzero(result.recent_probability[8:] > 0.9) + 8
    starts = alarms[np.diff(alarms, prepend=-10) > 1]
    assert all(np.min(np.abs(starts - onset)) <= 2 for onset in expected)


def test_a_fifteen_percent_step_in_three_percent_noise_is_seen_at_once() -> None:
    delays = []
    for seed in range(40):
        result = BocdStream(recent=8).extend(with_steps(seed, 300, 0.03, [200], factor=1.15))
        delays.append(int(np.argmax(result.recent_probability[200:] > 0.9)) + 1)
    assert np.median(delays) == 1
    assert max(delays) <= 6


def test_seeded_stream_alarms_at_exactly_these_samples() -> None:
    x = with_steps(7, 400, 0.02, [200, 300], factor=1.2)
    alarms = np.flatnonzero(BocdStream(recent=6).extend(x).recent_probability > 0.9)
    assert alarms.tolist() == [*range(5), *range(200, 205), *range(300, 305)]


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.05])
@pytest.mark.parametrize("shape", ["flat", "steps", "spikes", "drift"])
def test_bounding_the_run_length_changes_little(shape: str, sigma: float, rho: float) -> None:
    n = 2000
    x = noisy(8, n, sigma, rho)
    if shape == "steps":
        x += (np.arange(n) // 400 % 2) * math.log(1.3)
    elif shape == "spikes":
        x[np.random.default_rng(9).random(n) < 0.02] += math.log(5)
    elif shape == "drift":
        x += np.linspace(0, 0.2, n)
    bounded = BocdStream(max_run=200).extend(x).recent_probability
    unbounded = BocdStream(max_run=n).extend(x).recent_probability
    np.testing.assert_allclose(bounded[:200], unbounded[:200], atol=1e-9)
    assert np.mean(np.abs(bounded - unbounded)) < 0.01
    assert np.mean((bounded > 0.9) != (unbounded > 0.9)) < 0.005


def test_nothing_is_lost_over_a_long_stream() -> None:
    quiet = noisy(10, 60_000, 0.005)
    tail = with_steps(11, 400, 0.005, [50, 300])
    prior = BocdPrior(mu0=math.log(0.5))
    long, fresh = BocdStream(prior), BocdStream(prior)
    long.extend(quiet)
    fresh.extend(quiet[-1000:])
    np.testing.assert_allclose(
        long.extend(tail).recent_probability, fresh.extend(tail).recent_probability, atol=1e-9
    )


def test_a_spike_of_thirty_fold_leaves_finite_weights_and_passes() -> None:
    x = noisy(12, 400, 0.005)
    x[300] += math.log(30)
    recent = BocdStream(recent=8).extend(x).recent_probability
    assert np.isfinite(recent).all()
    assert recent[299] < 0.1
    assert (recent[300:307] > 0.99).all()
    assert (recent[320:] < 0.1).all()


STRONG = BocdPrior(alpha0=300.0, beta0=300 * 1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sample_no_hypothesis_can_explain_starts_a_run(
    dtype: type[np.float32] | type[np.float64],
) -> None:
    x = np.r_[np.zeros(50), 500.0, np.full(5, 500.0)]
    stream, many = BocdStream(STRONG, recent=8), Bocd(2, STRONG, dtype=dtype)
    recent = stream.extend(x).recent_probability
    for value in x:
        many.update([value, 0.0])
    assert recent[49] < 0.1
    assert recent[-1] > 0.9
    assert stream.map_run_length() == many.map_run_length()[0] == 6
    assert many.map_run_length()[1] == 56
    assert np.isfinite(many.posterior()).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 1e-3), (np.float64, 1e-9)], ids=["single", "double"]
)
def test_many_series_equal_as_many_streams(
    dtype: type[np.float32] | type[np.float64], tolerance: float
) -> None:
    columns = np.stack([series[:70] for series in SERIES.values()], axis=1)
    many = Bocd(columns.shape[1], max_run=30, dtype=dtype)
    streams = [BocdStream(max_run=30, recent=4) for _ in SERIES]
    for row in columns:
        many.update(row)
        found = [stream.extend(row[i : i + 1]) for i, stream in enumerate(streams)]
        posterior = many.posterior()
        expected = np.stack([stream.posterior() for stream in streams])
        np.testing.assert_allclose(posterior, expected, atol=tolerance)
        np.testing.assert_allclose(posterior.sum(axis=1), 1, atol=1e-5)
        recent = np.concatenate([result.recent_probability for result in found])
        np.testing.assert_allclose(many.change_probability(4), recent, atol=tolerance)
        best = expected[np.arange(len(streams)), many.map_run_length()]
        np.testing.assert_allclose(best, expected.max(axis=1), atol=tolerance)
    assert many.samples == 70


def test_series_do_not_touch_one_another_across_blocks() -> None:
    rng = np.random.default_rng(13)
    x = 0.01 * rng.standard_normal((40, 1100))
    x[30:, ::7] += 0.3
    many = Bocd(1100, max_run=32)
    for row in x:
        many.update(row)
    slow = many.change_probability(12) > 0.9
    np.testing.assert_array_equal(np.flatnonzero(slow), np.arange(0, 1100, 7))
    chosen = [0, 511, 512, 549, 550, 1099]
    for i in chosen:
        alone = Bocd(1, max_run=32)
        for value in x[:, i]:
            alone.update([value])
        np.testing.assert_allclose(alone.posterior()[0], many.posterior()[i], atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace(BocdPrior(), beta0=0.0), "beta0 \\(0.0\\) must be above 0"),
        (lambda: BocdPrior(hazard=1.0), "hazard \\(1.0\\)"),
        (lambda: BocdPrior(mu0=math.nan), "mu0 \\(nan\\)"),
        (lambda: BocdStream(max_run=1, recent=1), "max_run \\(1\\) must be at least 2"),
        (lambda: BocdStream(max_run=10, recent=11), "recent \\(11\\) must lie between 1 and"),
        (lambda: BocdStream().extend([0.0, math.nan]), "sample 1 is nan"),
        (lambda: BocdStream().extend(np.zeros((2, 2))), "shape \\(2, 2\\)"),
        (lambda: Bocd(0), "series \\(0\\)"),
        (lambda: Bocd(2).update([0.0]), "give shape \\(2,\\)"),
        (lambda: Bocd(2).update([0.0, 1e6]), "sample 1 is 1000000.0"),
        (lambda: Bocd(2).change_probability(0), "k \\(0\\) must lie between 1 and max_run"),
    ],
)
def test_bad_input_names_the_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refused_block_leaves_the_stream_as_it_was() -> None:
    stream = BocdStream()
    stream.extend([0.0, 0.01])
    before = stream.posterior()
    with pytest.raises(ValueError, match="finite logarithms"):
        stream.extend([0.02, math.inf])
    np.testing.assert_array_equal(stream.posterior(), before)


@pytest.mark.parametrize("module", [bocd, robust], ids=["bocd", "robust"])
def test_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]  # a module is an object
