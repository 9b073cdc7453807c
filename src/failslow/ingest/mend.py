"""Raw timing records -> a `StepSeries` that holds its promises; every repair leaves a warning.

In: columns as the log gave them. Out: one writer's records in order, durations finite and > 0,
iterations counted, runs told apart, and a time axis that never decreases.

    "3 records whose time is NaN, infinite, zero or negative were dropped"
    "the log pauses 4 times, 1,830 s in all; the longest pause is 1,200 s after step 3000"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.errors import InputError
from failslow.records import Run, StepSeries

__all__ = ["Columns", "mend"]

_SHORTEST_S, _LONGEST_S = 1e-9, 1e8
"""A mean iteration outside these (a nanosecond, three years) is a broken number."""
_EPOCH = (1e8, 1e11)
"""Clock values in here are epoch seconds (1973 to 5138); others only count."""
_CLOCK_JITTER_S = 2.0
"""A clock may run back this much (lines out of order, coarse stamps) without a word."""
_PAUSE_S, _PAUSE_RECORDS = 30.0, 10.0
"""A pause worth a word: longer than 30 s and than ten times the record's own time."""
_LATE_STEPS = 3
"""Ranks that print without a label are at most this many steps out of order."""
_FEW = 5
"""What happens to fewer lines is an event; to more, and a good part of them, the log's way."""
_JUMP = 10
"""A step distance over ten times the usual one is a resumed log, not one long record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Records as read, in file order; `run` counts headers, `writer` indexes the writers.

    A clock value is a number under 1e12 or NaN; the other floats may be anything.
    """

    step: NDArray[np.int64]
    duration_s: NDArray[np.float64]
    iterations: NDArray[np.int64]
    clock_s: NDArray[np.float64]
    work: NDArray[np.float64]
    data_s: NDArray[np.float64]
    run: NDArray[np.int64]
    writer: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)

    def take(self, index: NDArray[Any]) -> Columns:
        """The records at `index` (a mask or positions)."""
        return Columns(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def mend(
    columns: Columns,
    *,
    source: str,
    format_name: str,
    runs: Sequence[Run],
    writers: Sequence[str],
    planned_ramp: str,
    warnings: Sequence[str],
) -> StepSeries:
    """The series of these records. Raises InputError when none is usable."""
    told = list(warnings)
    columns = _without_copies(columns, told)
    columns = _one_writer(columns, writers, told)
    columns = _in_order(columns, told)
    columns = _without_repeats(columns, told)
    starts, notes = _run_starts(columns, runs)
    iterations = _iterations(columns, starts, told)

    usable = (columns.duration_s > _SHORTEST_S) & (columns.duration_s < _LONGEST_S)
    if not usable.all():
        lost = int(len(usable) - usable.sum())
        told.append(
            f"{_records(lost)} whose time is NaN, infinite, zero or negative "
            f"{'was' if lost == 1 else 'were'} dropped"
        )
    if not usable.any():
        raise InputError(
            f"{source}: none of its {len(usable):,} {format_name} timing records has a usable "
            f"time (all are NaN, infinite, zero or negative)"
        )
    run = np.cumsum(starts) - 1
    if not usable.all():
        columns, iterations, run = columns.take(usable), iterations[usable], run[usable]
    begins = np.diff(run, prepend=-1) > 0
    notes = [notes[index] for index in run[begins]]
    run = np.cumsum(begins) - 1

    iterations = _steps_that_count_samples(columns, iterations, run, told)
    end_s, clocked, start_time = _time_axis(columns, iterations, told)
    work = np.where(np.isfinite(columns.work) & (columns.work > 0), columns.work, np.nan)
    data_s = np.where(np.isfinite(columns.data_s) & (columns.data_s >= 0), columns.data_s, np.nan)
    return StepSeries(
        source=source,
        format=format_name,
        step=columns.step,
        duration_s=columns.duration_s,
        end_s=end_s,
        iterations=iterations,
        work=work,
        data_s=data_s,
        run=run,
        runs=tuple(notes),
        start_time=start_time,
        clocked=clocked,
        planned_ramp=planned_ramp,
        warnings=tuple(told),
    )


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"


def _without_copies(columns: Columns, told: list[str]) -> Columns:
    """Drop a line that is there twice: same step, time and clock, from the same writer.

    Without a clock only neighbours count as copies: a restarted job may well repeat a time.
    """
    if _rises(columns.step):
        return columns
    bits = columns.duration_s.view(np.int64)  # NaN equals itself
    order = np.lexsort((bits, columns.clock_s, columns.writer, columns.step))
    same = np.ones(len(order) - 1, bool)
    for column in (columns.step, columns.writer, columns.clock_s, bits):
        same &= np.diff(column[order]) == 0  # unknown clocks differ here
    keep = np.ones(len(order), bool)
    keep[order[1:][same]] = False
    neighbour = np.isnan(columns.clock_s[1:]) & np.isnan(columns.clock_s[:-1])
    for column in (columns.step, columns.writer, bits):
        neighbour &= np.diff(column) == 0
    keep[1:] &= ~neighbour
    lost = int(len(keep) - keep.sum())
    if lost:
        told.append(f"{_records(lost)} printed twice: the copies were dropped")
    return columns.take(keep) if lost else columns


def _one_writer(columns: Columns, writers: Sequence[str], told: list[str]) -> Columns:
    """Keep one of several writers that print the same steps; join writers that take turns."""
    names, first, counts = np.unique(columns.writer, return_index=True, return_counts=True)
    if len(names) == 1:
        return columns
    order = np.lexsort((first, -counts))
    kept, dropped = [order[0]], []
    mask = columns.writer == names[order[0]]
    for index in order[1:]:
        own = columns.writer == names[index]
        if _compete(columns, mask, own):
            dropped.append(index)
        else:
            kept.append(index)
            mask |= own
    if dropped:
        label = writers[names[kept[0]]] or "without a label"
        told.append(
            f"{len(dropped) + 1} writers print the same steps: kept writer {label} "
            f"({_records(int(mask.sum()))}), left out {_records(int(len(mask) - mask.sum()))} "
            f"of the others"
        )
    columns = columns.take(mask)
    if len(kept) > 1 and not dropped and bool((np.diff(columns.step) < 0).any()):
        ordered = columns.take(np.lexsort((columns.step, columns.run)))
        if len(np.unique(ordered.step)) == len(ordered):
            return ordered
    return columns


def _compete(columns: Columns, kept: NDArray[np.bool_], own: NDArray[np.bool_]) -> bool:
    """Whether two sets of records tell of the same steps at the same time."""
    if not np.isin(columns.step[own], columns.step[kept]).any():
        return False
    theirs, ours = np.flatnonzero(kept), np.flatnonzero(own)
    if theirs[0] < ours[-1] and ours[0] < theirs[-1]:
        return True
    then, now = columns.clock_s[kept], columns.clock_s[own]
    then, now = then[np.isfinite(then)], now[np.isfinite(now)]
    return bool(len(then) and len(now) and then.min() < now.max() and now.min() < then.max())


def _in_order(columns: Columns, told: list[str]) -> Columns:
    """Put lines in order that a collector mixed up, or exported newest first.

    By the clock, if that makes one rising run of steps; without one if the steps only fall; by
    steps where so many lines are a little late that they can be no restarts.
    """
    grown = np.diff(columns.step)
    back = grown < 0
    if not back.any():
        return columns
    one_run = columns.run[0] == columns.run[-1]
    by_clock = np.lexsort((columns.step, columns.clock_s))
    distinct, rank = np.unique(columns.step, return_inverse=True)
    late = np.diff(rank)[back]
    if one_run and np.isfinite(columns.clock_s).all() and _rises(columns.step[by_clock]):
        order, how = by_clock, "sorted by their clock"
    elif one_run and len(grown) >= _FEW and back.all():
        order, how = np.arange(len(grown), -1, -1), "read from the last to the first"
    elif (
        late.min() >= -_LATE_STEPS
        and back.sum() >= max(_FEW, len(grown) // 5)
        and len(distinct) > 4 * _LATE_STEPS  # else it may count anew in every epoch
        and not (np.diff(columns.clock_s) >= 0).all()  # crashes, one soon after the other
    ):
        order, how = np.lexsort((columns.step, columns.run)), "sorted by their step"
    else:
        return columns
    told.append(f"lines out of order ({_records(int(back.sum()))} behind the one before): {how}")
    return columns.take(order)


def _rises(step: NDArray[np.int64]) -> bool:
    return bool((np.diff(step) > 0).all())


def _without_repeats(columns: Columns, told: list[str]) -> Columns:
    """Keep the first of several lines for one step: ranks that print without a label.

    A step repeated far away is a restarted job's and stays: it was run twice.
    """
    if _rises(columns.step):
        return columns
    distinct, rank = np.unique(columns.step, return_inverse=True)
    header = np.diff(columns.run) != 0
    restart = header | (np.diff(rank) < -_LATE_STEPS)
    stretch = np.concatenate([[0], np.cumsum(restart)]) * len(distinct)
    keep = np.ones(len(rank), bool)
    keep[1:] = (np.diff(rank) != 0) | header
    _, first = np.unique(stretch + rank, return_index=True)
    again = np.ones(len(rank), bool)
    again[first] = False
    newest = np.maximum.accumulate(stretch + rank) == stretch + rank
    if again.sum() > len(first) // 2 and (again & newest).sum() > again.sum() // 2:
        keep &= ~again
    lost = int(len(keep) - keep.sum())
    if lost:
        told.append(
            f"several lines for one step ({_records(lost)}): the first of each step was kept"
        )
    return columns.take(keep) if lost else columns


def _run_starts(columns: Columns, runs: Sequence[Run]) -> tuple[NDArray[np.bool_], list[Run]]:
    """Where a run begins (a header, or step numbers that jump back), and what is said of it."""
    header = np.diff(columns.run, prepend=columns.run[0] - 1) != 0
    back = np.diff(columns.step, prepend=columns.step[0]) < 0
    starts = header | back
    notes: list[Run] = []
    for index in np.flatnonzero(starts):
        restarted = Run(note=f"step numbers restart at {columns.step[index]}")
        named = runs[columns.run[index]] if header[index] else restarted
        notes.append(restarted if back[index] and named == Run() else named)
    return starts, notes


def _usual_distance(distance: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
    """The most common step distance in the run of each record (0 marks a run's first record).

    A run of one record takes the run's before it, the first its successor's.
    """
    inside = distance > 0
    usual = np.zeros(int(run[-1]) + 1, np.int64)
    if inside.any():
        pairs = np.stack([run[inside], distance[inside]])
        order = np.lexsort(pairs[::-1])
        pairs = pairs[:, order]
        edge = np.concatenate([[True], (np.diff(pairs) != 0).any(axis=0)])
        group = np.flatnonzero(edge)
        size = np.diff(np.append(group, pairs.shape[1]))
        best = np.lexsort((-pairs[1, group], size, pairs[0, group]))  # last of a run: its largest
        usual[pairs[0, group[best]]] = pairs[1, group[best]]
    known = np.flatnonzero(usual)
    if len(known) == 0:
        return np.ones(len(run), np.int64)
    before = np.searchsorted(known, np.arange(len(usual)), side="right") - 1
    return usual[known[np.maximum(before, 0)]][run]


def _iterations(columns: Columns, starts: NDArray[np.bool_], told: list[str]) -> NDArray[np.int64]:
    """How many iterations each record stands for: as given, or the distance to the one before."""
    given = columns.iterations > 0
    if given.all():
        return columns.iterations
    distance = np.diff(columns.step, prepend=columns.step[0])
    distance[starts] = 0
    usual = _usual_distance(distance, np.cumsum(starts) - 1)
    jump = (distance > _JUMP * usual) & ~given
    if jump.any():
        first = int(np.flatnonzero(jump)[0])
        times = "once" if jump.sum() == 1 else f"{int(jump.sum()):,} times"
        told.append(
            f"step numbers jump ahead {times} (first from {columns.step[first - 1]} to "
            f"{columns.step[first]}): counted as the usual {usual[first]}"
        )
    opening = np.minimum(usual, np.maximum(columns.step, 1))
    inferred = np.where(starts, opening, np.where(jump, usual, np.maximum(distance, 1)))
    return np.where(given, columns.iterations, inferred)


def _steps_that_count_samples(
    columns: Columns, iterations: NDArray[np.int64], run: NDArray[np.int64], told: list[str]
) -> NDArray[np.int64]:
    """Iterations put right by the clock where step numbers count samples or tokens.

    If a record's steps times its duration take far longer than the clock says, a step is not an
    iteration; how many iterations a record covers is then what fits the clock.
    """
    passed = np.diff(columns.clock_s)
    inside = (columns.iterations[1:] == 0) & (iterations[1:] > 1)
    inside &= (np.diff(run) == 0) & (passed > 0)
    if inside.sum() < 3:
        return iterations
    fit = passed[inside] / columns.duration_s[1:][inside]
    fitting = float(np.median(fit))
    usual = float(np.median(iterations[1:][inside]))
    if fitting > usual / 2 or fitting < 0.5:
        return iterations
    covered = max(1, round(fitting))
    told.append(
        f"step numbers advance by {usual:,.0f} a record, but by the clock a record covers "
        f"{covered:,} iteration{'s' if covered > 1 else ''}: counted as that"
    )
    scaled = np.maximum(1, np.rint(iterations / usual * covered)).astype(np.int64)
    return np.where(columns.iterations > 0, iterations, scaled)


def _time_axis(
    columns: Columns, iterations: NDArray[np.int64], told: list[str]
) -> tuple[NDArray[np.float64], bool, float | None]:
    """(end_s, clocked, start_time): when each record ended, from the start of the first."""
    own = columns.duration_s * iterations
    summed = np.cumsum(own)
    clock = columns.clock_s
    known = np.flatnonzero(~np.isnan(clock))
    if len(known) == 0:
        return summed, False, None
    # a record without a clock value ends its own time after the record before it
    anchor = known[np.maximum(np.searchsorted(known, np.arange(len(clock)), side="right") - 1, 0)]
    clock = clock[anchor] + summed - summed[anchor]
    passed = np.diff(clock)
    back = passed < -_CLOCK_JITTER_S
    start_time = float(clock[0] - own[0])
    epoch = start_time if _EPOCH[0] < start_time < _EPOCH[1] else None
    ahead = float(passed[~back].clip(min=0).sum())
    due = float(own[1:][~back].sum())
    if back.sum() >= max(_FEW, len(passed) // 20):
        told.append(f"the clock runs back {int(back.sum()):,} times: the clock was not used")
        return summed, False, epoch
    if len(passed) >= 3 and ahead < due / 4:
        told.append(
            f"the log's clock advances {ahead:,.0f} s while its iterations add up to {due:,.0f} s: "
            f"the clock was not used"
        )
        return summed, False, epoch
    if back.any():
        where = int(np.flatnonzero(back)[0])
        times = "" if back.sum() == 1 else f" {int(back.sum()):,} times, first"
        told.append(
            f"the clock runs back{times} by {-passed[where]:,.0f} s after step "
            f"{columns.step[where]}: time goes on from there by summed durations"
        )
    moved = np.cumsum(np.where(back, own[1:] - passed, 0.0))
    clock[1:] += moved
    clock = np.maximum.accumulate(clock)
    pauses = np.diff(clock) - own[1:]
    pauses = np.where(pauses > np.maximum(_PAUSE_S, _PAUSE_RECORDS * own[1:]), pauses, 0)
    count = int((pauses > 0).sum())
    if count:
        longest = int(pauses.argmax())
        where_text = f"{pauses[longest]:,.0f} s after step {columns.step[longest]}"
        told.append(
            f"the log pauses for {where_text}"
            if count == 1
            else f"the log pauses {count:,} times, {pauses.sum():,.0f} s in all; "
            f"the longest pause is {where_text}"
        )
    return own[0] + (clock - clock[0]), True, epoch
