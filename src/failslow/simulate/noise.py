"""Why no two iterations of a healthy job are equal: noise, drift, spikes.

In: settings, a seed. Out: factors for iterations and workers. The defaults are what healthy
stretches of real training logs show (a 10,752-GPU GPT-3 run, a 1,536-GPU Llama run, llm.c,
Megatron, DeepSpeed-Chat, MXNet): iteration times vary by 0.2 to 1.7 %, nearly white (correlation
of neighbours at most 0.2), around a level that wanders by 0.4 %; 14 to 35 of 1,000 iterations are
spikes, of ×1.2 to ×1.6 in the median and ×34 at most.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from failslow.config import StageConfig

__all__ = ["Noise", "iteration_factors", "worker_noise"]

Floats: TypeAlias = "NDArray[np.float64]"

_WANDERING = 300
"""Iterations over which the level forgets where it was."""
_ITERATIONS, _SPIKES, _WORKERS = 0, 1, 2
"""Streams of random numbers, so that one setting does not change the others' draws."""


class Noise(StageConfig):
    """How much varies by itself; all zero for a job that repeats exactly."""

    iteration_cv: float = Field(0.008, ge=0, lt=0.5)
    """Of whole iterations, beyond what workers add."""
    correlation: float = Field(0.1, ge=0, lt=1)
    """Of neighbouring iterations."""
    drift_cv: float = Field(0.004, ge=0, lt=0.5)
    """Of the level the iterations vary around."""
    worker_cv: float = Field(0.01, ge=0, lt=0.5)
    """Of a worker's computation, iteration by iteration."""
    network_cv: float = Field(0.02, ge=0, lt=0.5)
    """Of transfer times, iteration by iteration."""
    spikes_per_1000: float = Field(15.0, ge=0, le=500)
    spike_excess: float = Field(0.3, gt=0)
    """What a spike takes more, in iterations: the median; one in ten takes four times that."""

    @classmethod
    def none(cls) -> Noise:
        """No noise at all."""
        return cls(iteration_cv=0, drift_cv=0, worker_cv=0, network_cv=0, spikes_per_1000=0)


def iteration_factors(noise: Noise, iterations: int, seed: int) -> tuple[Floats, Floats]:
    """(factor on each iteration, excess of each as a spike, 0 for most)."""
    from scipy.signal import lfilter

    rng = np.random.default_rng([seed, _ITERATIONS])
    white, slow = rng.standard_normal((2, iterations))

    def correlated(innovations: Floats, correlation: float) -> Floats:
        """An AR(1) of unit variance that starts anywhere on its course."""
        scaled = innovations * np.sqrt(1 - correlation**2)
        scaled[:1] = innovations[:1]
        result: Floats = lfilter([1.0], [1.0, -correlation], scaled)
        return result

    log_factor = noise.iteration_cv * correlated(white, noise.correlation)
    log_factor += noise.drift_cv * correlated(slow, 1 - 1 / _WANDERING)
    rng = np.random.default_rng([seed, _SPIKES])
    struck = rng.random(iterations) < noise.spikes_per_1000 / 1000
    # ln 4 / 1.2816: the 90th percentile is four times the median
    excess = noise.spike_excess * np.exp(1.0817 * rng.standard_normal(iterations))
    return np.exp(log_factor), np.where(struck, excess, 0.0)


def worker_noise(
    noise: Noise, seed: int, block: int, shape: tuple[int, int, int]
) -> tuple[Floats, Floats]:
    """For a block of iterations: (iterations, stages, replicas) factors on computation, and
    (iterations,) on transfers. A block's draws do not depend on the others'."""
    rng = np.random.default_rng([seed, _WORKERS, block])
    compute = np.exp(noise.worker_cv * rng.standard_normal(shape, dtype=np.float32))
    network = np.exp(noise.network_cv * rng.standard_normal(shape[0]))
    return compute.astype(np.float64), network
