"""A plan as a log shows it: noise, warm-up, spikes, checkpoints, clock, rounding, step numbers.

In: `Setting` and `Plan` of a job. Out: a `StepSeries` such as a reader of a log would build, what
was put into it in words, and the noise a reader who divides by a fluctuating work is left with.
"""

from __future__ import annotations

import math

import numpy as np
from benchmarks.detection.model import Floats, Kind, Plan, Setting, log_uniform
from numpy.typing import NDArray

from failslow.records import Run, StepSeries

__all__ = ["render"]


def render(
    rng: np.random.Generator, setting: Setting, plan: Plan, kind: Kind
) -> tuple[StepSeries, tuple[str, ...], float]:
    """The series as a log shows it, what was put in, and the noise that plain division by a
    fluctuating work leaves (log standard deviation a record)."""
    records, interval = setting.records, setting.interval
    features: list[str] = []
    relative, overhead, wobble, shown = _work(rng, setting, plan, features)
    load = overhead + (1 - overhead) * relative
    healthy = setting.iteration_s * load * plan.factor * _noise(rng, setting)
    time = healthy * _warm_up(rng, setting, plan)
    time += _spikes(rng, setting, kind, features) * healthy
    pauses = np.zeros(records)
    checkpoints = _checkpoints(rng, setting, features)
    clocked = bool(rng.random() < 0.5)
    if clocked and rng.random() < 0.3:  # some logs leave checkpoints out of the iteration time
        pauses += checkpoints.reshape(records, interval).sum(axis=1)
    else:
        time += checkpoints
    duration = time.reshape(records, interval).mean(axis=1)
    if setting.fast_every:
        duration[:: setting.fast_every] *= 0.82
        features.append("every 5th record 0.82")
    resolution = float(rng.choice([0.0, 1e-4, 1e-3]))
    if 0 < resolution <= 0.02 * setting.iteration_s:
        duration = np.maximum(np.round(duration / resolution), 1) * resolution
        features.append(f"rounded to {resolution * 1e3:g} ms")
    run, step = _steps(rng, setting, plan)
    if clocked:
        pauses[1:][np.diff(run) > 0] += float(rng.uniform(30, 3600))
        if kind != "flapping" and rng.random() < 0.1:
            pauses[int(rng.integers(1, records))] += float(rng.uniform(60, 7200))
            features.append("a pause")
    end_s = np.cumsum(duration * interval + pauses)
    if clocked and rng.random() < 0.5:
        end_s = np.floor(end_s)
        features.append("clock in whole seconds")
    runs = [Run()]
    for mark in plan.restarts:
        note = "new header" if plan.config_changed else f"step numbers restart before {mark}"
        runs.append(Run(note=note, config_changed=plan.config_changed))
    unit = float(2 ** rng.integers(8, 23))
    series = StepSeries(
        source="benchmark",
        format="suite",
        step=step,
        duration_s=duration,
        end_s=end_s,
        iterations=np.full(records, interval, dtype=np.int64),
        work=relative.reshape(records, interval).mean(axis=1) * unit
        if shown
        else np.full(records, np.nan),
        data_s=np.full(records, np.nan),
        run=run,
        runs=tuple(runs),
        start_time=1.7e9 if clocked else None,
        clocked=clocked,
        planned_ramp=plan.planned_ramp,
    )
    if clocked:
        features.append("clock")
    if shown:
        features.append(f"work known, overhead {overhead:.2f}")
    return series, tuple(features), wobble


def _work(
    rng: np.random.Generator, setting: Setting, plan: Plan, features: list[str]
) -> tuple[Floats, float, float, bool]:
    """Relative work of each iteration, overhead, wobble, and whether the log tells it."""
    n = setting.iterations
    shown = bool(rng.random() < 0.5) if plan.show_work is None else plan.show_work
    if plan.work is not None:
        return plan.work, plan.overhead, 0.0, shown
    if not shown or rng.random() < 0.7:
        return np.ones(n), 0.0, 0.0, shown
    cv, overhead = float(rng.uniform(0.02, 0.1)), float(rng.choice([0.0, rng.uniform(0.03, 0.15)]))
    each = np.clip(rng.normal(1.0, cv, setting.records), 0.5, 1.5)
    features.append(f"work fluctuates by {cv:.0%}")
    return np.repeat(each, setting.interval), overhead, overhead * cv, True


def _noise(rng: np.random.Generator, setting: Setting) -> Floats:
    """Multiplicative noise of each iteration."""
    noise = setting.noise
    if noise.shape == "white":
        draws = rng.normal(size=setting.iterations)
    elif noise.shape == "heavy":
        draws = rng.standard_t(5, size=setting.iterations) / math.sqrt(5 / 3)
    else:
        innovations = rng.normal(size=setting.records) * math.sqrt(1 - noise.rho**2)
        value = float(rng.normal())
        values = np.empty(setting.records)
        for i, innovation in enumerate(innovations.tolist()):
            value = noise.rho * value + innovation
            values[i] = value
        draws = np.repeat(values, setting.interval)
    return np.asarray(np.exp(math.sqrt(math.log1p(noise.cv**2)) * draws))


def _warm_up(rng: np.random.Generator, setting: Setting, plan: Plan) -> Floats:
    """Slow first iterations of the job and, 1–5 of them, of each restart."""
    factor = np.ones(setting.iterations)
    starts = [(0, setting.warm_iterations)]
    starts += [(mark, int(rng.integers(1, 6))) for mark in plan.restarts]
    for at, count in starts:
        if count:
            worst = log_uniform(rng, 2.0, 100.0)
            factor[at : at + count] = 1 + (worst - 1) * np.geomspace(1.0, 0.02, count)
    return factor


def _spikes(rng: np.random.Generator, setting: Setting, kind: Kind, features: list[str]) -> Floats:
    """Time added to each iteration by spikes, relative to its own."""
    extra = np.zeros(setting.iterations)
    if kind != "spikes" and rng.random() < 0.5:
        return extra
    rate = float(rng.uniform(0.01, 0.03)) if kind == "spikes" else log_uniform(rng, 5e-4, 0.01)
    count = int(rng.binomial(setting.records, rate))
    free = 0
    for at in np.sort(rng.integers(0, setting.iterations, count)).tolist():
        if at < free:  # two spikes in a row would be a slow stretch longer than a spike
            continue
        extra[at : at + int(rng.integers(1, 4))] = log_uniform(rng, 1.5, 30.0) - 1
        free = at + max(10, 6 * setting.interval)
    features.append(f"{count} spikes")
    return extra


def _checkpoints(rng: np.random.Generator, setting: Setting, features: list[str]) -> Floats:
    """Seconds added to iterations by periodic checkpoints or evaluations."""
    extra = np.zeros(setting.iterations)
    if rng.random() < 0.6:
        return extra
    if setting.interval > 1 and rng.random() < 0.3:
        # Alike in every record, and small: a fault does not slow it, so it dilutes the slowdown.
        period = setting.interval // int(rng.choice([1, 2, 5]))
        worth = period * float(rng.uniform(0.005, 0.03))
    else:
        period = int(setting.interval * rng.integers(10, 201) + rng.integers(0, setting.interval))
        worth = log_uniform(rng, 0.5, 19.0)
    extra[period - 1 :: period] = worth * setting.iteration_s
    features.append(f"checkpoint every {period} it. of {worth:.1f} it.")
    return extra


def _steps(
    rng: np.random.Generator, setting: Setting, plan: Plan
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run index and step number of each record; a restart goes back to an earlier checkpoint."""
    records, interval = setting.records, setting.interval
    run = np.zeros(records, dtype=np.int64)
    step = np.arange(1, records + 1, dtype=np.int64) * interval
    for mark in plan.restarts:
        at = mark // interval
        run[at:] += 1
        back = int(rng.integers(1, at)) if not plan.config_changed else at
        step[at:] -= back * interval
    return run, np.maximum(step, interval)
