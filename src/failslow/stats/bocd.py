"""Bayesian online change-point detection (Adams & MacKay 2007, arXiv 0710.3742).

In: logarithms of iteration times, one number a sample. Out: the posterior over the run length r,
the number of samples since the last change. Runs are Gaussian with unknown mean and variance
under a Normal-Inverse-Gamma prior, so a sample is predicted by a Student-t; a change comes with
constant hazard.

    >>> import numpy as np
    >>> quiet, slow = np.log(0.50), np.log(0.65)
    >>> stream = BocdStream(recent=4)
    >>> _ = stream.extend(np.full(40, quiet))
    >>> result = stream.extend([slow, slow, slow])
    >>> result.recent_probability.round(3).tolist()
    [1.0, 1.0, 1.0]
    >>> result.map_run_length.tolist()
    [1, 2, 3]

`BocdStream` follows one long series in float64. Conventions are the paper's: r = 0 means that
the next sample starts a new run, and always has the posterior probability `hazard`.

**Bounded run length.** Hypotheses r = 0 … `max_run` are kept. The last one stands for "`max_run`
samples or more": it takes in the weight of every older run, and predicts from the last `max_run`
samples only. So nothing is approximated for the first `max_run` samples.

**Variance floor.** The scale of the predictive is at least `noise_floor`: a series without any
noise (times printed with two digits) does not turn every flicker into a change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

__all__ = ["BocdPrior", "BocdResult", "BocdStream"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BocdPrior:
    """What is believed of a run before its first sample. Defaults suit log iteration times with
    0.3–5 % noise and shifts of 10 % and more."""

    mu0: float | None = None
    """Expected level (log seconds); None: the first sample of the series."""
    kappa0: float = 0.01
    """How many samples the belief in `mu0` is worth: the spread of levels is
    sqrt(beta0 / alpha0 / kappa0), 10 % by default."""
    alpha0: float = 1.0
    """Half the samples that the belief in the noise is worth."""
    beta0: float = 1e-4
    """`alpha0` times the expected noise variance: 1 % noise by default."""
    hazard: float = 1 / 250
    """Probability of a change between two samples."""
    noise_floor: float = 0.005
    """Smallest scale of a predictive, in log time: 0.5 %."""

    def __post_init__(self) -> None:
        for name in ("kappa0", "alpha0", "beta0", "noise_floor"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0 and finite")
        if not 0 < self.hazard < 1:
            raise ValueError(f"hazard ({self.hazard}) must lie between 0 and 1")
        if self.mu0 is not None and not np.isfinite(self.mu0):
            raise ValueError(f"mu0 ({self.mu0}) must be finite; None takes the first sample")

    def recentred(self, level: float) -> BocdPrior:
        """The same prior around another level (log seconds)."""
        return replace(self, mu0=float(level))


DEFAULT_PRIOR = BocdPrior()


class _RunConstants:
    """What the predictive of a run of r samples needs and no sample changes; arrays over r = 0 … R.

    With kappa = kappa0 + r, nu = 2 alpha0 + r, the run's doubled beta m and its mean mu, the
    predictive times (1 - hazard) of x is

        gain · (1 + q)^power / sqrt(b),  b = max(m, floor),  q = kappa/(kappa + 1) (x - mu)² / b
    """

    def __init__(self, prior: BocdPrior, max_run: int) -> None:
        if max_run < 2:
            raise ValueError(f"max_run ({max_run}) must be at least 2; raise max_run")
        run = np.arange(max_run + 1.0)
        nu = 2 * prior.alpha0 + run
        self.kappa: Floats = prior.kappa0 + run
        self.power: Floats = -(nu + 1) / 2
        shrink = self.kappa / (self.kappa + 1)
        self.floor: Floats = nu * prior.noise_floor**2 * shrink
        self.log_gain: Floats = (
            gammaln((nu + 1) / 2)
            - gammaln(nu / 2)
            + np.log(shrink / np.pi) / 2
            + np.log1p(-prior.hazard)
        )


@dataclass(frozen=True, slots=True, eq=False)
class BocdResult:
    """What `BocdStream.extend` found after each of the n samples it was given."""

    recent_probability: Floats = field(repr=False)
    """P(run length < `recent`), shape (n,)."""
    map_run_length: NDArray[np.int64] = field(repr=False)
    """The most probable run length, shape (n,); `max_run` stands for that or more."""


class BocdStream:
    """Change-point detection over one series, fed in blocks of any size.

    The numbers that come out do not depend, to the last bit, on how the series is cut into
    blocks: a sample's predictives are computed from the `max_run` samples before it and from
    nothing carried, and only the weights are a recursion.
    """

    _CHUNK = 64  # samples worked on at once: four buffers of 64 x 201 float64 stay in a 1 MB L2

    def __init__(
        self, prior: BocdPrior = DEFAULT_PRIOR, *, max_run: int = 200, recent: int = 8
    ) -> None:
        if not 1 <= recent <= max_run:
            raise ValueError(
                f"recent ({recent}) must lie between 1 and max_run ({max_run}); "
                "lower recent or raise max_run"
            )
        self._constants = c = _RunConstants(prior, max_run)
        self._inverse_kappa = 1 / c.kappa
        self._inverse_next = 1 / (c.kappa + 1)
        self._prior = prior
        self._mu0 = prior.mu0
        self._restart = prior.hazard / (1 - prior.hazard)
        self._recent = recent
        self._max_run = max_run
        self._seen = 0
        width = max_run + 1
        self._history = np.zeros(max_run + self._CHUNK)
        self._windows = sliding_window_view(self._history, max_run)[:, ::-1]
        self._sum, self._square, self._density, self._scale = np.zeros((4, self._CHUNK, width))
        # Row i + 1 is row i moved by one and weighted; the last column spills over the bound.
        self._weights = np.zeros((self._CHUNK + 1, width + 1))
        self._weights[0, 0] = 1.0
        self._totals = np.zeros(self._CHUNK)
        self._rows = [
            (self._weights[i, :-1], self._density[i], self._weights[i + 1])
            for i in range(self._CHUNK)
        ]

    @property
    def samples(self) -> int:
        """Samples seen so far."""
        return self._seen

    def extend(self, x: ArrayLike) -> BocdResult:
        """Take in the next n samples of the series, shape (n,); n may be 1 or 0.

        Raises ValueError when a sample is not a finite log time (|x| ≤ 1000).
        """
        values = np.asarray(x, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(f"x has shape {values.shape}; give one series, shape (n,)")
        _check_log_times(values)
        n = len(values)
        if self._mu0 is None and n:
            self._mu0 = float(values[0])
        recent, run_length = np.empty(n), np.empty(n, dtype=np.int64)
        for start in range(0, n, self._CHUNK):
            part = slice(start, min(start + self._CHUNK, n))
            self._predict(values[part])
            self._weigh(recent[part], run_length[part])
        self._seen += n
        return BocdResult(recent, run_length)

    def posterior(self) -> Floats:
        """P(run length = r) after the last sample, shape (max_run + 1,)."""
        weights = self._weights[0, :-1]
        share: Floats = weights / weights.sum()
        return share

    def change_probability(self, k: int) -> float:
        """P(run length < k) after the last sample."""
        return float(self.posterior()[:k].sum())

    def map_run_length(self) -> int:
        """The most probable run length; `max_run` stands for that or more."""
        return int(self._weights[0, :-1].argmax())

    def _predict(self, x: Floats) -> None:
        """Fill row i of `_density` with the predictives of x[i] under r = 0 … max_run.

        The samples before are taken relative to x[i]: nothing cancels but the step between them.
        """
        prior, c, n = self._prior, self._constants, len(x)
        total, square = self._sum[:n], self._square[:n]
        density, scale = self._density[:n], self._scale[:n]
        self._history[self._max_run : self._max_run + n] = x
        level = self._mu0 - x  # type: ignore[operator]  # set with the first sample
        np.subtract(self._windows[:n], x[:, None], out=total[:, 1:])
        np.multiply(total, total, out=square)
        total[:, 0] = prior.kappa0 * level
        square[:, 0] = 2 * prior.beta0 + prior.kappa0 * level * level
        np.add.accumulate(total, axis=1, out=density)
        np.add.accumulate(square, axis=1, out=scale)
        np.multiply(density, density, out=density)
        density *= self._inverse_kappa
        scale -= density
        np.maximum(scale, c.floor, out=scale)
        density *= self._inverse_next
        density /= scale
        np.log1p(density, out=density)
        density *= c.power
        density += c.log_gain
        np.exp(density, out=density)
        np.sqrt(scale, out=scale)
        density /= scale
        self._history[: self._max_run] = self._history[n : n + self._max_run].copy()

    def _weigh(self, recent: Floats, run_length: NDArray[np.int64]) -> None:
        """Run the weight recursion over the predictives; the last row becomes row 0."""
        n, restart, last = len(recent), self._restart, self._max_run
        totals = self._totals
        for i, (weights, density, grown) in enumerate(self._rows[:n]):
            np.multiply(weights, density, out=grown[1:])
            evidence = weights.dot(density)
            grown[last] += grown[last + 1]
            grown[0] = restart * evidence
            if not 1e-100 < evidence < 1e100:
                # A power of two: rescaling is exact, so it changes nothing but the exponent.
                factor = 2.0 ** -np.frexp(evidence)[1]
                np.multiply(grown, factor, out=grown)
                evidence *= factor
            totals[i] = evidence
        rows = self._weights[1 : n + 1, :-1]
        np.add.reduce(rows[:, : self._recent], axis=1, out=recent)
        recent /= (1 + restart) * totals[:n]
        np.argmax(rows, axis=1, out=run_length)
        self._weights[0] = self._weights[n]


def _check_log_times(values: Floats) -> None:
    bad = ~(np.abs(values) <= 1000)
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"sample {where} is {values.flat[where]}; give finite logarithms of times (|x| <= 1000)"
        )
