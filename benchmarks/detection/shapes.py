"""What happens to a job: for each kind, the slowdown factor of every iteration and the truth.

In: the `Setting` all kinds share (length, record interval, healthy time, noise) and a random
generator. Out: a `Plan`, in iterations: factors, slow spans, relative work, restarts.

A plan of 6,000 iterations slowed by 1.4 from iteration 2,000 for 300:

    Plan(factor=[1, …, 1.4, …, 1], spans=(Span(start=2000, stop=2300),), …)

Rules the truth keeps to (they are those of the product's vocabulary, with a margin):

- A slow stretch lasts at least `Setting.min_slow` iterations: 30 iterations and 15 s of healthy
  time and 30 records (8 where a record averages several iterations, 20 where every fifth record
  is a fast one). Shorter ones are blips by definition and only come as spikes of 1–3 iterations.
- Before the first fault lie at least 40 healthy records after warm-up; a relief is followed by
  at least `min_slow` healthy iterations and 40 records.
- Flapping: slow stretches parted by at most 18 s (and by less than half a slow stretch) are one
  episode, first slow record to last; parted by at least 60 s, `min_slow` iterations and 40 records
  each slow stretch is an episode of its own. Partings in between are not made: the
  merge gap of 30 s makes either reading right.
- Bursty: on for 2–8 records, off for 1–3 records and at most 18 s; one episode.
- Partial recovery and compound faults: one episode as long as the factor stays above 1.13.
- Drift: the episode is where the factor is at least 1.10; an onset is right anywhere between
  the first moment of the drift and that crossing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from benchmarks.detection.model import (
    EPISODE_FACTOR,
    LEAD_RECORDS,
    MAX_OFF_S,
    MIN_APART_S,
    Floats,
    Kind,
    Plan,
    Setting,
    Span,
    log_uniform,
)

__all__ = ["PLANNERS"]


def _length(rng: np.random.Generator, low: int, high: int) -> int:
    return low if high <= low else int(log_uniform(rng, low, high))


def _place(rng: np.random.Generator, setting: Setting, length: int) -> int:
    """A start for a relieved stretch of `length` iterations, with healthy lead and tail."""
    last = setting.iterations - setting.tail - length
    if last < setting.lead:
        raise ValueError(
            f"a slow stretch of {length} iterations does not fit {setting.iterations}; "
            f"raise the records above {setting.records}"
        )
    return int(rng.integers(setting.lead, last + 1))


def _room(setting: Setting) -> int:
    """The longest relieved stretch that fits."""
    return setting.iterations - setting.tail - setting.lead


def _levels(setting: Setting, start: int, parts: list[tuple[int, float]], since: int = 0) -> Plan:
    """One episode of consecutive (length, factor) parts; the last may run to the job's end."""
    factor = np.ones(setting.iterations)
    levels, at = [], start
    for length, slowdown in parts:
        factor[at : at + length] = slowdown
        levels.append((at, slowdown))
        at += length
    span = Span(start=start, stop=min(at, setting.iterations), since=since)
    return Plan(factor=factor, spans=(span,), levels=tuple(levels))


def _healthy(_rng: np.random.Generator, setting: Setting) -> Plan:
    """Nothing happens; a job of spikes differs only in how many the log is given."""
    return Plan(factor=np.ones(setting.iterations))


def _short_compute(rng: np.random.Generator, setting: Setting) -> Plan:
    """One or two short faults, far enough apart to be two episodes."""
    lengths = [_length(rng, setting.min_slow, 4 * setting.min_slow)]
    slowdowns = [log_uniform(rng, 1.05, 4.0)]
    apart = _apart(setting)
    if rng.random() < 0.25:
        second = _length(rng, setting.min_slow, 2 * setting.min_slow)
        if lengths[0] + apart + second <= _room(setting):
            lengths.append(second)
            slowdowns.append(log_uniform(rng, 1.13, 4.0))
            if slowdowns[0] < 1.13:  # two faults of which one counts would blur the label
                slowdowns[0] = log_uniform(rng, 1.13, 4.0)
    lengths[0] = min(lengths[0], _room(setting))
    return _separate(rng, setting, lengths, slowdowns, apart)


def _apart(setting: Setting) -> int:
    """Healthy iterations that make two slow stretches two episodes beyond doubt."""
    return max(math.ceil(MIN_APART_S / setting.iteration_s), setting.tail)


def _separate(
    rng: np.random.Generator,
    setting: Setting,
    lengths: list[int],
    slowdowns: list[float],
    apart: int,
) -> Plan:
    total = sum(lengths) + apart * (len(lengths) - 1)
    at = _place(rng, setting, total)
    factor = np.ones(setting.iterations)
    spans, levels = [], []
    for length, slowdown in zip(lengths, slowdowns, strict=True):
        factor[at : at + length] = slowdown
        spans.append(Span(start=at, stop=at + length))
        levels.append((at, slowdown))
        at += length + apart
    return Plan(factor=factor, spans=tuple(spans), levels=tuple(levels))


def _long_communication(rng: np.random.Generator, setting: Setting) -> Plan:
    room = _room(setting)
    length = _length(rng, max(setting.min_slow, room // 5), max(setting.min_slow, room * 4 // 5))
    return _levels(setting, _place(rng, setting, length), [(length, log_uniform(rng, 1.05, 4.0))])


def _compound(rng: np.random.Generator, setting: Setting) -> Plan:
    """Two faults that overlap: the first, both, then the second or the first alone."""
    first, second = log_uniform(rng, 1.13, 2.0), log_uniform(rng, 1.13, 2.0)
    most = max(setting.min_slow, _room(setting) // 3)
    lengths = [_length(rng, setting.min_slow, most) for _ in range(3)]
    last = second if rng.random() < 0.5 else first
    parts = list(zip(lengths, (first, first * second, last), strict=True))
    return _levels(setting, _place(rng, setting, sum(lengths)), parts)


def _partial_recovery(rng: np.random.Generator, setting: Setting) -> Plan:
    """Comes back to a part of the old speed, often 80 %, and heals later or never."""
    deep = log_uniform(rng, 1.5, 4.0)
    rest = 1.25 if rng.random() < 0.5 else log_uniform(rng, 1.15, 0.85 * deep)
    most = max(setting.min_slow, _room(setting) // 3)
    parts = [
        (_length(rng, setting.min_slow, most), deep),
        (_length(rng, setting.min_slow, most), rest),
    ]
    start = _place(rng, setting, parts[0][0] + parts[1][0])
    if rng.random() < 0.5:
        parts[1] = (setting.iterations - start - parts[0][0], rest)
    return _levels(setting, start, parts)


def _never_relieved(rng: np.random.Generator, setting: Setting) -> Plan:
    start = int(rng.integers(setting.lead, setting.iterations - setting.min_slow + 1))
    return _levels(setting, start, [(setting.iterations - start, log_uniform(rng, 1.05, 4.0))])


def _flapping(rng: np.random.Generator, setting: Setting) -> Plan:
    """On and off: merged when the partings are short, episodes of their own when long."""
    slowdown = log_uniform(rng, 1.13, 4.0)
    merged = rng.random() < 0.7
    room, least = _room(setting), setting.min_slow
    if not merged:
        apart = _apart(setting)
        count = int(np.clip((room + apart) // (least + apart), 1, rng.integers(2, 5)))
        return _separate(rng, setting, [least] * count, [slowdown] * count, apart)
    off = min(int(MAX_OFF_S / setting.iteration_s), least // 2)
    count = int(np.clip(room // (2 * least + off), 2, rng.integers(2, 9)))
    factor = np.ones(setting.iterations)
    ons = [int(rng.integers(least, 2 * least + 1)) for _ in range(count)]
    offs = [int(rng.integers(min(setting.interval, off), off + 1)) for _ in range(count - 1)]
    at = start = _place(rng, setting, sum(ons) + sum(offs))
    for on, gap in zip(ons, [*offs, 0], strict=True):
        factor[at : at + on] = slowdown
        at += on + gap
    return Plan(
        factor=factor,
        spans=(Span(start=start, stop=at),),
        levels=((start, slowdown),),
        features=(f"{count} stretches",),
    )


def _bursty(rng: np.random.Generator, setting: Setting) -> Plan:
    slowdown = log_uniform(rng, 1.2, 4.0)
    room = _room(setting)
    length = _length(rng, 2 * setting.min_slow, max(2 * setting.min_slow, room // 2))
    start = _place(rng, setting, length)
    factor = np.ones(setting.iterations)
    most_off = max(1, min(3, int(MAX_OFF_S / (setting.iteration_s * setting.interval))))
    at = start
    while at < start + length:
        stop = min(at + int(rng.integers(2, 9)) * setting.interval, start + length)
        factor[at:stop] = slowdown
        at = stop + int(rng.integers(1, most_off + 1)) * setting.interval
    stop = int(np.flatnonzero(factor > 1.0)[-1]) + 1
    return Plan(factor=factor, spans=(Span(start=start, stop=stop),), levels=((start, slowdown),))


def _drift(rng: np.random.Generator, setting: Setting) -> Plan:
    """Slower bit by bit, then reset, drifting back, or so to the end."""
    return _drift_to(rng, setting, log_uniform(rng, 1.1, 4.0))


def _slow_drift_below_threshold(rng: np.random.Generator, setting: Setting) -> Plan:
    return _drift_to(rng, setting, float(rng.uniform(1.02, 1.07)))


def _drift_to(rng: np.random.Generator, setting: Setting, peak: float) -> Plan:
    room = _room(setting)
    rise = _length(rng, min(3 * setting.min_slow, room // 2), room // 2)
    hold = _length(rng, setting.min_slow, max(setting.min_slow, room // 4))
    start = _place(rng, setting, rise + hold)
    end = str(rng.choice(["reset", "back", "stay"]))
    back = 0
    if end == "back":
        back = min(rise, setting.iterations - setting.tail - start - rise - hold)
    if end == "stay":
        hold = setting.iterations - start - rise
    bend = float(rng.choice([0.5, 1.0, 2.0]))
    factor = np.ones(setting.iterations)
    factor[start : start + rise] += (peak - 1) * np.linspace(0, 1, rise) ** bend
    factor[start + rise : start + rise + hold] = peak
    factor[start + rise + hold : start + rise + hold + back] += (peak - 1) * np.linspace(1, 0, back)
    slow = np.flatnonzero(factor >= EPISODE_FACTOR)
    if len(slow) == 0:
        return Plan(factor=factor, features=(f"drift to {peak:.3f}",))
    span = Span(
        start=int(slow[0]),
        stop=int(slow[-1]) + 1,
        rise=start,
        fall=start + rise + hold + back if back else None,
    )
    return Plan(
        factor=factor,
        spans=(span,),
        levels=((span.start, peak),),
        features=(f"drift to {peak:.2f} then {end}",),
    )


def _with_fault(rng: np.random.Generator, setting: Setting, start: int, stop: int) -> Plan | None:
    """A fault inside [start, stop), which is at one workload, with lead and tail; None: no room."""
    first, last = start + LEAD_RECORDS * setting.interval, stop - setting.tail
    if last - first < setting.min_slow:
        return None
    length = _length(rng, setting.min_slow, last - first)
    at = int(rng.integers(first, last - length + 1))
    return _levels(setting, at, [(length, log_uniform(rng, 1.2, 4.0))], since=start)


def _merge(change: Plan, fault: Plan | None) -> Plan:
    """The workload change with the fault on top."""
    if fault is None:
        return change
    return Plan(
        factor=fault.factor,
        spans=fault.spans,
        levels=fault.levels,
        work=change.work,
        overhead=change.overhead,
        show_work=change.show_work,
        restarts=change.restarts,
        config_changed=change.config_changed,
        planned_ramp=change.planned_ramp,
        features=(*change.features, "with a fault"),
    )


def _workload_ramp(rng: np.random.Generator, setting: Setting) -> Plan:
    """Work grows (or shrinks) in steps or smoothly; a quarter also have a real fault after it."""
    n = setting.iterations
    start = setting.warm_iterations + int(rng.integers(0, n // 4))
    stop = start + int(rng.integers(n // 8, n // 2))
    planned = rng.random() < 0.2
    top = float(rng.uniform(1.05, 1.25)) if planned else log_uniform(rng, 1.3, 8.0)
    if not planned and rng.random() < 0.25:
        top = 1 / min(top, 4.0)
    ramp = np.clip((np.arange(n) - start) / max(1, stop - start), 0, 1)
    # Planned without a word of the work: no step above 5 %, or it could as well be a fault.
    steps = int(rng.integers(5 if planned else 3, 11)) if rng.random() < 0.5 else 0
    if steps:
        ramp = np.floor(ramp * steps) / steps
    change = Plan(
        factor=np.ones(n),
        work=_per_record(1 + (top - 1) * ramp, setting),
        overhead=float(rng.choice([0.0, rng.uniform(0.05, 0.4)])),
        show_work=not planned,
        planned_ramp="attention window grows" if planned else "",
        features=(f"work x{top:.2f} {f'in {steps} steps' if steps else 'smoothly'}",),
    )
    fault = None if planned or rng.random() > 0.25 else _with_fault(rng, setting, stop, n)
    return _merge(change, fault)


def _workload_step(rng: np.random.Generator, setting: Setting) -> Plan:
    """Another batch size at once: inside a run (told by `work`), or as a run of another header."""
    n = setting.iterations
    at = int(rng.integers(setting.lead, n - setting.lead) // setting.interval * setting.interval)
    top = log_uniform(rng, 0.4, 4.0)
    new_run = bool(rng.random() < 0.5)
    change = Plan(
        factor=np.ones(n),
        work=np.where(np.arange(n) < at, 1.0, top),
        overhead=float(rng.choice([0.0, rng.uniform(0.05, 0.4)])),
        show_work=bool(rng.random() < 0.5) if new_run else True,
        restarts=(at,) if new_run else (),
        config_changed=new_run,
        features=(f"work x{top:.2f} at once{' in a new run' if new_run else ''}",),
    )
    fault = _with_fault(rng, setting, at, n) if rng.random() < 0.25 else None
    return _merge(change, fault)


def _per_record(values: Floats, setting: Setting) -> Floats:
    """A log tells one work a record: hold the mean of each record over its iterations."""
    means = values.reshape(setting.records, setting.interval).mean(axis=1)
    return np.repeat(means, setting.interval)


def _restart(rng: np.random.Generator, setting: Setting) -> Plan:
    """One to four restarts at the same speed; a quarter also have a fault, a quarter of a kind
    that ends with the restart (the job came back on another node)."""
    n, interval = setting.iterations, setting.interval
    count = int(rng.integers(1, 5))
    first = setting.lead + setting.min_slow
    last = setting.records - setting.tail // interval
    marks = rng.integers(first // interval, last, count)
    restarts = tuple(int(m) * interval for m in np.unique(marks))
    change = Plan(factor=np.ones(n), restarts=restarts, features=(f"{len(restarts)} restarts",))
    draw = rng.random()
    if draw < 0.25:
        stop = restarts[0]
        length = _length(rng, setting.min_slow, stop - setting.lead)
        fault = _levels(setting, stop - length, [(length, log_uniform(rng, 1.2, 4.0))])
        return _merge(change, fault)
    if draw < 0.5:
        bounds = [*restarts, n]
        widths = np.diff([0, *bounds])
        longest = int(np.argmax(widths))
        begin = max(setting.warm_iterations, bounds[longest] - int(widths[longest])) + 5
        return _merge(change, _with_fault(rng, setting, begin, bounds[longest]))
    return change


PLANNERS: dict[Kind, Callable[[np.random.Generator, Setting], Plan]] = {
    "clean": _healthy,
    "short_compute": _short_compute,
    "long_communication": _long_communication,
    "compound": _compound,
    "drift": _drift,
    "flapping": _flapping,
    "spikes": _healthy,
    "workload_ramp": _workload_ramp,
    "workload_step": _workload_step,
    "restart": _restart,
    "partial_recovery": _partial_recovery,
    "bursty": _bursty,
    "never_relieved": _never_relieved,
    "slow_drift_below_threshold": _slow_drift_below_threshold,
}
