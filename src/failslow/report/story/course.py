"""The course of a job: its series with what happened on it, what actions removed, who was slow.

In: the step columns and the cases of a journal. Out: the parts of a `Story` that need both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from failslow.records import Episode, JobAnalysis, Run, StepSeries
from failslow.report.story.links import Pause
from failslow.report.story.model import Case, Mark, MarkKind, OwnTime, Removal, Stretch, Worker
from failslow.report.story.restarts import restart_text
from failslow.report.story.steps import JobColumns, StepLines
from failslow.report.words import decision_text, diagnosis_text, outcome_text, verdict_text

__all__ = ["Course", "in_force", "job_course", "marks", "own_time", "removal", "workers"]

Floats = NDArray[np.float64]
_SPIKE = 2.0
"""Times the level of the time: the same as in an episode's lost time."""
_FEW = 3
"""Iterations a median needs."""
_COLUMNS, _ROWS = 160, 1024
"""Of the picture of the workers' own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The job's series, and epoch times beside it."""

    series: StepSeries
    analysis: JobAnalysis
    t: Floats
    """(n,): epoch seconds at the end of each iteration."""


def job_course(
    source: str,
    steps: StepLines,
    cases: Sequence[Case],
    *,
    skipped: int,
    unknown: Mapping[str, int],
    ended: bool,
) -> Course:
    """The series and its figures; without a single iteration both are empty."""
    columns, warnings = _columns(steps)
    t = np.maximum.accumulate(np.asarray(columns.t, dtype=np.float64))
    duration_s = np.asarray(columns.duration_s, dtype=np.float64)
    iterations = np.asarray(columns.iterations, dtype=np.int64)
    begin_t = float(t[0] - duration_s[0] * iterations[0]) if len(t) else None
    starts, own_run = np.asarray(columns.start), np.asarray(columns.run)
    changed = (np.diff(starts, prepend=starts[:1]) != 0) | (
        np.diff(own_run, prepend=own_run[:1]) != 0
    )
    run = np.cumsum(changed).astype(np.int64)
    series = StepSeries(
        source=source,
        format="journal",
        step=np.asarray(columns.step, dtype=np.int64),
        duration_s=duration_s,
        end_s=t - (begin_t or 0.0),
        iterations=iterations,
        work=np.asarray(columns.work, dtype=np.float64),
        data_s=np.asarray(columns.data_s, dtype=np.float64),
        run=run,
        runs=tuple(Run() for _ in range(int(run[-1]) + 1 if len(run) else 1)),
        start_time=begin_t,
        clocked=True,
    )
    if skipped:
        lines = (
            "1 line of the journal is no entry"
            if skipped == 1
            else (f"{skipped:,} lines of the journal are no entries")
        )
        warnings.append(f"{lines}: cut short by a crash")
    if unknown:
        kinds = ", ".join(f"{kind} ({number:,})" for kind, number in sorted(unknown.items()))
        warnings.append(f"entries of another version are left out: {kinds}")
    if not len(t):
        warnings.append("no iteration was seen: the job did not get so far, or cannot be followed")
    elif not ended:
        warnings.append("the journal has no end: the job still runs, or it was killed")
    analysis = _analysis(series, t, columns, cases, tuple(warnings))
    return Course(series=series, analysis=analysis, t=t)


def _columns(steps: StepLines) -> tuple[JobColumns, list[str]]:
    """The job's own iterations, else those of the worker that wrote most."""
    if len(steps.job) or not steps.workers:
        return steps.job, []
    rank = max(steps.workers, key=lambda rank: (len(steps.workers[rank].t), -rank))
    return steps.workers[rank].steps, [
        f"the job's own iterations are missing: those of rank {rank}"
    ]


def _analysis(
    series: StepSeries,
    t: Floats,
    columns: JobColumns,
    cases: Sequence[Case],
    warnings: tuple[str, ...],
) -> JobAnalysis:
    n = len(series)
    healthy = _filled(np.asarray(columns.healthy_s, dtype=np.float64), series.duration_s)
    level, inside = healthy.copy(), np.zeros(n, dtype=np.bool_)
    episodes = []
    for case in cases:
        for stretch in case.stretches:
            episode, first, last = _placed(stretch, t, series)
            episodes.append(episode)
            if n and episode.kind == "fail_slow":
                span = slice(first, last + 1)
                peak = episode.peak_slowdown if len(episode.levels) > 1 else 1.0
                top_s = max(episode.iteration_s, peak * episode.baseline_s)
                level[span] = np.maximum(level[span], top_s)
                inside[span] = True
    spikes = np.flatnonzero(
        (series.duration_s > _SPIKE * level) | (np.asarray(columns.foreign) > 0)
    )
    plain = ~inside
    plain[spikes] = False
    usual = series.duration_s[plain] if plain.any() else series.duration_s
    lost_s = sum(case.lost_s for case in cases if case.is_fault)
    wall_s = 0.0
    starts = np.asarray(columns.start)
    for start in np.unique(starts):
        mine = np.flatnonzero(starts == start)
        first_s = series.duration_s[mine[0]] * series.iterations[mine[0]]
        wall_s += float(t[mine[-1]] - t[mine[0]] + first_s)
    net_s = wall_s - lost_s
    over = np.maximum(0.0, series.duration_s[spikes] - level[spikes]) * series.iterations[spikes]
    return JobAnalysis(
        source=series.source,
        format="journal",
        iterations=int(series.iterations.sum()),
        first_step=int(series.step[0]) if n else 0,
        last_step=int(series.step[-1]) if n else 0,
        start_time=series.start_time,
        healthy_iteration_s=float(np.median(usual)) if n else float("nan"),
        wall_s=wall_s,
        lost_s=lost_s,
        jct_increase_pct=100.0 * lost_s / net_s if net_s > 0 else 0.0,
        episodes=tuple(episodes),
        spikes=len(spikes),
        spike_lost_s=float(over.sum()),
        warnings=warnings,
        spike_index=tuple(spikes.tolist()),
    )


def _filled(values: Floats, instead: Floats) -> Floats:
    """NaN filled with the value before, at the start with the first known."""
    known = np.isfinite(values)
    if not known.any():
        return np.full(len(values), float(np.median(instead)) if len(instead) else 1.0)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return values[np.where(last < 0, int(np.argmax(known)), last)]


def _placed(stretch: Stretch, t: Floats, series: StepSeries) -> tuple[Episode, int, int]:
    """The episode with its place in this series; the detector counts otherwise."""
    n = len(t)
    if not n:
        return replace(stretch.episode, first_index=0, last_index=0), 0, 0
    first = int(np.searchsorted(t, stretch.start_t + 1e-3, side="right"))
    until_t = stretch.end_t
    if until_t is None:
        until_t = stretch.seen_t if stretch.event == "abandoned" else np.inf
    last = int(np.searchsorted(t, until_t + 1e-3, side="right")) - 1
    first = min(first, n - 1)
    last = min(max(last, first), n - 1)
    start_s = max(0.0, stretch.start_t - (series.start_time or 0.0))
    length_s = stretch.episode.duration_s
    episode = replace(
        stretch.episode,
        first_index=first,
        last_index=last,
        start_s=start_s,
        end_s=None if stretch.end_t is None else start_s + length_s,
    )
    return episode, first, last


def removal(course: Course, case: Case, *, until_t: float | None) -> Removal | None:
    """What the actions of a case took away; None where nothing was done, or too little seen."""
    done = [(t, outcome) for t, outcome in case.outcomes if outcome.ok]
    acted = [(t, outcome) for t, outcome in done if outcome.level != "S1"]
    if not acted or not case.is_fault or case.episode is None:
        return None
    first_t = acted[0][0] - acted[0][1].cost_s
    last_t = acted[-1][0]
    ends = [t for t, outcome in done if outcome.level == "S1" and t > last_t]
    well = [t for t, pace in case.paces if t > last_t and pace.slowdown <= 1.05]
    ends += well[:1] if until_t is None else [*well[:1], until_t]
    slow = _between(course, case.start_t, first_t)
    after = _between(course, last_t, min(ends, default=np.inf))
    if len(slow) < _FEW or len(after) < _FEW:
        return None
    healthy_s, slow_s = case.stretches[0].episode.baseline_s, float(np.median(slow))
    if slow_s <= 1.02 * healthy_s:
        return None
    return Removal(
        healthy_s=healthy_s,
        slow_s=slow_s,
        after_s=float(np.median(after)),
        iterations=len(after),
    )


def _between(course: Course, from_t: float, to_t: float) -> Floats:
    """Durations of the iterations that lie whole between two moments."""
    began = course.t - course.series.duration_s
    mine = (began >= from_t - 1e-3) & (course.t <= to_t + 1e-3)
    return course.series.duration_s[mine]


def marks(
    cases: Sequence[Case],
    pauses: Sequence[Pause],
    watch: Sequence[tuple[float, str, str]],
    course: Course,
) -> Iterator[Mark]:
    """What happened, in order."""
    found = [
        Mark(t=t, kind="watch", text=message or f"controller {event}")
        for t, event, message in watch
    ]
    for case in cases:
        for t, suspicion in case.suspicions:
            cleared = suspicion.get("event") == "cleared"
            ratio = suspicion.get("slowdown")
            slow = f" ×{ratio:.2f}" if isinstance(ratio, float) and not cleared else ""
            text = f"suspicion cleared ({case.id})" if cleared else f"suspected{slow} ({case.id})"
            found.append(Mark(t=t, kind="cleared" if cleared else "suspicion", text=text))
        for t, diagnosis in case.diagnoses:
            found.append(Mark(t=t, kind="diagnosis", text=diagnosis_text(diagnosis)))
        for t, verdict in case.verdicts:
            found.append(Mark(t=t, kind="verdict", text=f"verdict: {verdict_text(verdict)}"))
        for t, decision in case.decisions:
            found.append(Mark(t=t, kind="decision", text=decision_text(decision)))
        for t, outcome in case.outcomes:
            kind: MarkKind = "action" if outcome.ok else "failed"
            found.append(Mark(t=t, kind=kind, text=outcome_text(outcome)))
        for restart in case.restarts:
            mood: MarkKind = "failed" if restart.back_t is None else "action"
            found.append(Mark(t=restart.t, kind=mood, text=restart_text(restart)))
    for pause in pauses:
        begin_t = _pause_begin(course, pause.step, pause.t - pause.pause_s)
        what = "the reference" if pause.why == "reference" else "validation"
        text = f"paused {pause.pause_s:.2f} s for {what}"
        if not pause.ok:
            text = f"not paused for {what}" + (f": {pause.reason}" if pause.reason else "")
        until_t = begin_t + pause.pause_s if pause.pause_s > 0 else None
        found.append(Mark(t=begin_t, kind="pause", text=text, until_t=until_t))
    yield from sorted(found, key=lambda mark: mark.t)


def _pause_begin(course: Course, step: int | None, otherwise_t: float) -> float:
    """The pause comes at the boundary of the step the verdict names, if that is near it."""
    if step is not None:
        for place in np.flatnonzero(course.series.step == step)[::-1].tolist():
            if abs(course.t[place] - otherwise_t) < 60.0:
                return float(course.t[place])
    return otherwise_t


def in_force(
    cases: Sequence[Case], watch: Sequence[tuple[float, str, str]]
) -> Iterator[tuple[float, str]]:
    """(t, level) at each change; a new start of the job has the even split again."""
    events = [(t, "S1") for t, event, _ in watch if event == "started"]
    events += [(t, outcome.level) for case in cases for t, outcome in case.outcomes if outcome.ok]
    level = "S1"
    for t, new in sorted(events):
        if new != level:
            level = new
            yield t, level


def workers(steps: StepLines, nodes: Mapping[int, str]) -> tuple[Worker, ...]:
    """By rank: those that wrote records, and those only a profile or an agent names."""
    found = []
    for rank in sorted({*steps.workers, *nodes}):
        own = steps.workers.get(rank)
        compute = np.asarray(own.compute_s) if own else np.empty(0)
        compute = compute[np.isfinite(compute)]
        found.append(
            Worker(
                rank=rank,
                node=nodes.get(rank, ""),
                nodes=tuple(own.nodes) if own else (),
                iterations=own.iterations if own else 0,
                last_t=own.t[-1] if own and len(own.t) else float("nan"),
                compute_s=float(np.median(compute)) if len(compute) else None,
            )
        )
    return tuple(found)


def own_time(steps: StepLines, cases: Sequence[Case]) -> OwnTime | None:
    """Each worker's own time over the job; None where nobody knows it or there is one column."""
    lengths = [len(worker.t) for worker in steps.workers.values()]
    columns = min(_COLUMNS, int(np.median(lengths)) if lengths else 0)
    if columns < 2:
        return None
    low = min(worker.t[0] for worker in steps.workers.values() if len(worker.t))
    high = max(worker.t[-1] for worker in steps.workers.values() if len(worker.t))
    if high <= low:
        return None
    spans = [(c.start_t, np.inf if c.end_t is None else c.end_t) for c in cases if c.is_fault]
    edges = np.linspace(low, high, columns + 1)
    rows = {rank: _own_row(np.asarray(w.t), np.asarray(w.compute_s), edges, spans)
            for rank, w in steps.workers.items()}  # fmt: skip
    known = {rank: row for rank, row in rows.items() if np.isfinite(row).any()}
    if not known:
        return None
    worst = sorted(known, key=lambda rank: -float(np.nanmax(known[rank])))[:_ROWS]
    ranks = tuple(sorted(worst))
    return OwnTime(
        ranks=ranks,
        t=(edges[:-1] + edges[1:]) / 2,
        ratio=np.stack([known[rank] for rank in ranks]),
        left_out=len(known) - len(ranks),
    )


def _own_row(
    t: Floats, compute_s: Floats, edges: Floats, spans: Sequence[tuple[float, float]]
) -> Floats:
    """(columns,): mean own time in each over the median in healthy times."""
    usable = np.isfinite(compute_s) & (compute_s > 0)
    t, compute_s = t[usable], compute_s[usable]
    columns = len(edges) - 1
    if not len(t):
        return np.full(columns, np.nan)
    healthy = np.ones(len(t), dtype=np.bool_)
    for begin, end in spans:
        healthy &= (t < begin) | (t > end)
    usual_s = float(np.median(compute_s[healthy] if healthy.any() else compute_s))
    place = np.clip(np.searchsorted(edges, t, side="right") - 1, 0, columns - 1)
    total = np.bincount(place, weights=compute_s, minlength=columns)
    count = np.bincount(place, minlength=columns)
    with np.errstate(invalid="ignore"):
        row: Floats = total / count / usual_s
    # a record sums up what went before it, so a short gap has the value that follows
    gap = max(2, 3 * int(np.ceil(columns / max(1, len(t)))))
    for at in np.flatnonzero(np.isnan(row)).tolist():
        ahead = row[at : at + gap + 1]
        known = ahead[np.isfinite(ahead)]
        if len(known):
            row[at] = known[0]
    return row
