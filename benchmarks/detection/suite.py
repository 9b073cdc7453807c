"""The labelled suite: synthetic jobs as a log would show them, with the truth beside them.

In: a number of jobs and a seed. Out: `LabelledJob`s; job `index` of a seed is always the same,
however many are made, and kinds keep their shares in any stretch of indices.

    LabelledJob(kind="drift", series=StepSeries(…), episodes=(TrueEpisode(first_index=812,
        last_index=1410, slowdown=1.31, …),), noise=Noise(shape="correlated", cv=0.021, rho=0.7))

What is drawn: iteration times of 0.07–30 s (log-uniform); 200–5,000 records, one job in fifty
20,000; records of 1, 10, 50 or 100 iterations; noise of 0.3–5 % (`Noise`); slowdowns of 1.05–4
(log-uniform); warm-up of x2–x100; checkpoints every 10–200 records, or small ones in every record;
spikes of 1–3 iterations of x1.5–x30, at least six records apart; every fifth record a fast one
(0.82); logs with and without clock, pauses, known or fluctuating work, times rounded to 1 or
0.1 ms.

Which truth is scored. An episode's slowdown is the median of its records' true factors.

- below 1.08: no fail-slow. The job is clean in truth.
- 1.08 to 1.13: left out; an alarm is neither right nor wrong.
- from 1.13: scored, when a careful reader can decide it. With sd the standard error of the
  difference of the medians of the episode and of the healthy records before it (correlated noise
  counted), ln(slowdown) >= 6 sd: it is beyond chance; and ln(slowdown / 1.10) >= 3 sd: its
  measured median does not fall below the 10 % of the definition by bad luck. Else it is left out.
- a truth below 1.08 is held against alarms only when ln(1.10 / slowdown) >= 3 sd for its
  worst stretch of `min_slow` iterations, else the job is left out. Jobs without any slowdown are
  always held against alarms, however noisy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from benchmarks.detection.model import (
    EPISODE_FACTOR,
    KINDS,
    Floats,
    Kind,
    Noise,
    Plan,
    Setting,
    Span,
    log_uniform,
)
from benchmarks.detection.render import render
from benchmarks.detection.shapes import PLANNERS

from failslow.records import StepSeries

__all__ = ["SHARES", "LabelledJob", "TrueEpisode", "kind_of", "make_job", "make_jobs", "make_suite"]

SHARES: dict[Kind, float] = {
    "clean": 0.14,
    "short_compute": 0.12,
    "long_communication": 0.12,
    "compound": 0.07,
    "drift": 0.07,
    "flapping": 0.07,
    "spikes": 0.07,
    "workload_ramp": 0.06,
    "workload_step": 0.05,
    "restart": 0.06,
    "partial_recovery": 0.05,
    "bursty": 0.04,
    "never_relieved": 0.05,
    "slow_drift_below_threshold": 0.03,
}
UNSCORED = (1.08, 1.13)
VISIBLE_SD, MARGIN_SD = 6.0, 3.0
GOLDEN = (math.sqrt(5) - 1) / 2
NO_FAULT: tuple[Kind, ...] = ("clean", "spikes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueEpisode:
    """One true fail-slow, in records of the series."""

    first_index: int
    """The first record of which at least half is slow."""
    last_index: int
    """The last such record."""
    onset: tuple[int, int]
    """Any first record from the one to the other (inclusive) is a right answer."""
    relief: tuple[int, int] | None
    """Likewise for the last record; None: it lasts to the end of the job."""
    slowdown: float
    """Median true factor of the records inside."""
    levels: tuple[tuple[int, float], ...]
    """(first record, true factor) of each level."""
    z: float
    """ln(slowdown) in standard errors of the difference of medians."""
    scored: bool
    """Whether missing it counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledJob:
    """A series and its truth."""

    index: int
    seed: int
    kind: Kind
    series: StepSeries
    episodes: tuple[TrueEpisode, ...]
    decidable: bool
    """False when the job has no episode yet comes too near to the threshold to be called clean."""
    noise: Noise
    iteration_s: float
    """Healthy seconds per iteration at the first workload, checkpoints and noise apart."""
    interval: int
    factor: Floats
    """True slowdown of each record."""
    features: tuple[str, ...]

    @property
    def label(self) -> str:
        """`slow` (a scored episode), `clean` (no episode), or `unscored`."""
        if any(e.scored for e in self.episodes):
            return "slow"
        return "clean" if not self.episodes and self.decidable else "unscored"

    def describe(self) -> str:
        """One line that says what the job is made of."""
        slow = ", ".join(
            f"{e.first_index}-{e.last_index} x{e.slowdown:.2f} z={e.z:.0f}"
            f"{'' if e.scored else ' unscored'}"
            for e in self.episodes
        )
        rho = f" rho={self.noise.rho:.2f}" if self.noise.rho else ""
        return (
            f"seed={self.seed} job={self.index} {self.kind} [{self.label}] "
            f"records={len(self.series)} interval={self.interval} "
            f"iteration={self.iteration_s:.3g}s {self.noise.shape} cv={self.noise.cv:.2%}{rho} "
            f"truth=[{slow}] {'; '.join(self.features)}"
        )


def make_suite(jobs: int = 1000, seed: int = 0) -> list[LabelledJob]:
    """The first `jobs` jobs of `seed`; about 80 bytes times 1,400 records each."""
    return list(make_jobs(jobs, seed))


def make_jobs(jobs: int, seed: int) -> Iterator[LabelledJob]:
    """The jobs of `make_suite`, one at a time."""
    for index in range(jobs):
        yield make_job(index, seed)


def kind_of(index: int, seed: int) -> Kind:
    """The kind of a job: a golden-ratio sequence keeps the shares in every stretch of indices."""
    position = (index * GOLDEN + seed * 0.381) % 1.0
    edges = np.cumsum(list(SHARES.values()))
    return KINDS[min(int(np.searchsorted(edges, position, side="right")), len(KINDS) - 1)]


def make_job(index: int, seed: int = 0) -> LabelledJob:
    """Job `index` of the suite of `seed`."""
    kind = kind_of(index, seed)
    rng = np.random.default_rng([seed, index])
    setting = _draw_setting(rng, kind)
    plan = PLANNERS[kind](rng, setting)
    factor = plan.factor.reshape(setting.records, setting.interval).mean(axis=1)
    series, features, wobble = render(rng, setting, plan, kind)
    episodes = tuple(_truth(span, plan, setting, factor, wobble) for span in plan.spans)
    margin = math.log(EPISODE_FACTOR / max(1.0, _worst(factor, setting)))
    sd = _median_sd(setting, setting.min_slow // setting.interval, len(factor) // 2, wobble)
    return LabelledJob(
        index=index,
        seed=seed,
        kind=kind,
        series=series,
        episodes=tuple(e for e in episodes if e.slowdown >= UNSCORED[0]),
        decidable=float(factor.max()) == 1.0 or margin >= MARGIN_SD * sd,
        noise=setting.noise,
        iteration_s=setting.iteration_s,
        interval=setting.interval,
        factor=factor,
        features=(*plan.features, *features),
    )


def _draw_setting(rng: np.random.Generator, kind: Kind) -> Setting:
    interval = int(rng.choice([1, 10, 50, 100], p=[0.55, 0.25, 0.1, 0.1]))
    longest_s = 30.0
    if kind in ("flapping", "bursty"):  # partings of 18 s must hold some records
        interval = min(interval, 50)
        longest_s = 6.0 / interval
    shape = str(rng.choice(["white", "heavy", "correlated"], p=[0.4, 0.15, 0.45]))
    noise = Noise(
        shape="white" if shape == "white" else "heavy" if shape == "heavy" else "correlated",
        cv=log_uniform(rng, 0.003, 0.05),
        rho=float(rng.uniform(0.3, 0.9)) if shape == "correlated" else 0.0,
    )
    records = int(log_uniform(rng, 200, 5000))
    if rng.random() < 0.02:
        records, interval = 20_000, min(interval, 10)
    setting = Setting(
        records=records,
        interval=interval,
        iteration_s=log_uniform(rng, 0.07, longest_s),
        noise=noise,
        warm_iterations=int(rng.integers(1, 21)) if rng.random() < 0.7 else 0,
        fast_every=5 if rng.random() < 0.1 else 0,
    )
    if kind in NO_FAULT:
        return setting
    needed = setting.lead + 6 * setting.min_slow + 2 * setting.tail
    return Setting(
        records=max(records, math.ceil(needed / interval)),
        interval=interval,
        iteration_s=setting.iteration_s,
        noise=noise,
        warm_iterations=setting.warm_iterations,
        fast_every=setting.fast_every,
    )


def _truth(span: Span, plan: Plan, setting: Setting, factor: Floats, wobble: float) -> TrueEpisode:
    """The episode of a span, in records, and whether it can be decided."""
    interval = setting.interval
    begin, end = span.start // interval, (span.stop - 1) // interval
    first = begin + ((begin + 1) * interval - span.start < interval / 2)
    last = end - (span.stop - end * interval < interval / 2)
    rise = span.start if span.rise is None else span.rise
    fall = span.stop if span.fall is None else span.fall
    slowdown = float(np.median(factor[first : last + 1]))
    before = (rise - max(span.since, setting.warm_iterations)) // interval
    sd = _median_sd(setting, last - first + 1, before, wobble)
    scored = (
        slowdown >= UNSCORED[1]
        and math.log(slowdown) >= VISIBLE_SD * sd
        and math.log(slowdown / EPISODE_FACTOR) >= MARGIN_SD * sd
        and span.stop - span.start >= setting.min_slow
    )
    return TrueEpisode(
        first_index=first,
        last_index=last,
        onset=(rise // interval, first),
        relief=None if span.stop == setting.iterations else (last, (fall - 1) // interval),
        slowdown=slowdown,
        levels=tuple(
            (at // interval, level) for at, level in plan.levels if span.start <= at < span.stop
        ),
        z=math.log(slowdown) / sd,
        scored=scored,
    )


def _median_sd(setting: Setting, inside: int, before: int, wobble: float) -> float:
    """Standard error of the difference of the log medians of two stretches of records."""
    noise = setting.noise
    share = 1.0 if noise.shape == "correlated" else 1.0 / setting.interval
    variance = noise.cv**2 * share + wobble**2
    # pi/2: a median is that much less certain than a mean
    spread = _mean_variance(inside, noise.rho) + _mean_variance(before, noise.rho)
    return math.sqrt(math.pi / 2 * variance * spread)


def _mean_variance(count: int, rho: float) -> float:
    """Variance of the mean of `count` unit-variance AR(1) values."""
    count = max(1, count)
    lags = np.arange(1, count)
    return float((count + 2 * np.sum((count - lags) * rho**lags)) / count**2)


def _worst(factor: Floats, setting: Setting) -> float:
    """The greatest mean factor over a stretch of the least length of an episode."""
    width = min(len(factor), max(1, setting.min_slow // setting.interval))
    sums = np.concatenate([[0.0], np.cumsum(factor)])
    return float(np.max(sums[width:] - sums[:-width]) / width)
