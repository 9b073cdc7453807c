"""One job's series and findings -> the few thousand numbers its picture is drawn from.

In: a `StepSeries` of any length and its `JobAnalysis`. Out: a `JobPicture`, whose `payload` is
what the page's script reads:

    {"records": 1000000, "line": {"step": [10, 20, null, ...], "x": [...], "time": [...],
     "y": [0.571, ...]}, "course": {...}, "spikes": {...}, "healthy": {...}, "data": {...},
     "episodes": [{"number": 1, "kind": "fail_slow", "x": [13795, 13845], "time": [...],
     "label": "×1.39 · 3 min 10 s · 53.4 s lost", ...}], "restarts": [...], "fit": [0.5, 0.9]}

`null` breaks a line. `x` equals `step` unless step numbers restart; then runs lie end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.records import Episode, JobAnalysis, StepSeries
from failslow.report import describe, units
from failslow.report.decimate import bucket_medians, decimate, highest_per_bucket

__all__ = ["JobPicture", "job_picture", "positions"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_DETAIL_BUCKETS = 6000
"""Shared by the episodes: near them the picture keeps more than elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPicture:
    """What the page needs of one job; small however long the series was."""

    analysis: JobAnalysis
    payload: dict[str, Any]
    records: int
    """Samples in the series."""
    drawn: int
    """Samples kept, spikes included."""


def job_picture(series: StepSeries, analysis: JobAnalysis, *, buckets: int = 1500) -> JobPicture:
    """The picture of one job: at most three samples a bucket, more around each episode.

    Every bucket keeps its minimum, median and maximum; every episode its boundaries, its peak and
    the samples beside them; every run its ends. Raises ValueError when buckets < 1.
    """
    y, n = series.duration_s, len(series)
    starts = _run_starts(series)
    position = positions(series)
    plain = np.ones(n, dtype=np.bool_)
    plain[[i for i in analysis.spike_index if 0 <= i < n]] = False
    keep = _must_stay(series, analysis, starts)
    kept = _line(series, analysis, plain, keep[plain[keep]], buckets)
    spikes, stands_for = _spikes(y, plain, keep[~plain[keep]], buckets)
    columns = _Columns(series, position, starts)
    fit, data = _fit(y, analysis), _data(series, columns, kept)
    if data["y"]:
        fit[0] = 0.0
    payload: dict[str, Any] = {
        "records": n,
        "drawn": len(kept) + len(spikes),
        "unrolled": bool(n) and not np.array_equal(position, series.step),
        "start": series.start_time,
        "healthy_s": _round(analysis.healthy_iteration_s),
        "line": columns.at(kept),
        "course": _course(series, analysis, columns, starts),
        "spikes": columns.at(spikes, broken=False) | {"count": stands_for.tolist()},
        "healthy": _healthy(analysis, columns, starts),
        "data": data,
        "episodes": [
            _episode(number, episode, columns, n)
            for number, episode in enumerate(analysis.episodes, start=1)
        ],
        "restarts": [
            {
                "x": columns.edge(position, start),
                "time": columns.edge(series.end_s, start),
                "note": series.runs[series.run[start]].note or "restart",
                "changed": series.runs[series.run[start]].config_changed,
            }
            for start in starts[1:]
        ],
        "fit": fit,
        "above_fit": int(np.count_nonzero(y > fit[1])),
    }
    return JobPicture(analysis=analysis, payload=payload, records=n, drawn=len(kept) + len(spikes))


class _Columns:
    """Turns indices into the columns a trace is drawn from, broken where a run begins."""

    def __init__(self, series: StepSeries, position: Indices, starts: list[int]) -> None:
        self.records = len(series)
        self._series, self._position = series, position
        self._starts = np.asarray(starts[1:], dtype=np.int64)

    def at(
        self, places: Indices, values: Indices | Floats | None = None, *, broken: bool = True
    ) -> dict[str, list[float | None]]:
        """Columns at `places`; `values` are samples to take y from, or y itself."""
        series = self._series
        if values is None:
            y: Floats = series.duration_s[places]
        elif values.dtype.kind == "i":
            y = series.duration_s[values.astype(np.int64)]
        else:
            y = values.astype(np.float64)
        columns: dict[str, list[float | None]] = {
            "step": series.step[places].tolist(),
            "x": self._position[places].tolist(),
            "time": [round(t, 3) for t in series.end_s[places].tolist()],
            "y": [_round(v) for v in y.tolist()],
            "of": series.iterations[places].tolist(),
        }
        if broken and len(self._starts):
            gaps = np.unique(np.searchsorted(places, self._starts))
            for gap in reversed([g for g in gaps.tolist() if 0 < g < len(places)]):
                for column in columns.values():
                    column.insert(gap, None)
        return columns

    def edge(self, column: Indices | Floats, index: int) -> float:
        """Half-way between sample `index` and the one before it, on the axis `column`."""
        n = len(column)
        if index <= 0:
            width = float(column[1] - column[0]) if n > 1 else 1.0
            return _round(float(column[0]) - width / 2)
        if index >= n:
            width = float(column[-1] - column[-2]) if n > 1 else 1.0
            return _round(float(column[-1]) + width / 2, 9)
        return _round((float(column[index - 1]) + float(column[index])) / 2, 9)

    def span(self, first: int, last: int) -> dict[str, list[float]]:
        """From before sample `first` to behind sample `last`, on both axes."""
        return {
            "x": [self.edge(self._position, first), self.edge(self._position, last + 1)],
            "time": [self.edge(self._series.end_s, first), self.edge(self._series.end_s, last + 1)],
        }


def _run_starts(series: StepSeries) -> list[int]:
    """Indices at which a run begins, 0 first."""
    if not len(series):
        return []
    return [0, *(np.flatnonzero(np.diff(series.run)) + 1).tolist()]


def positions(series: StepSeries) -> Indices:
    """The step, or where step numbers jump back the iterations laid end to end."""
    advance = np.diff(series.step, prepend=series.step[:1])
    if not np.any(advance < 0):
        return series.step
    back = advance <= 0
    back[0] = False
    advance[back] = np.maximum(series.iterations[back], 1)
    position: Indices = series.step[0] + np.cumsum(advance)
    return position


def _bounds(episode: Episode, n: int) -> tuple[int, int]:
    first = min(max(episode.first_index, 0), n - 1)
    return first, min(max(episode.last_index, first), n - 1)


def _must_stay(series: StepSeries, analysis: JobAnalysis, starts: list[int]) -> Indices:
    """Both ends of every run; the boundaries of every episode, what is beside them, its peak."""
    y, n = series.duration_s, len(series)
    keep: set[int] = set()
    for start in starts:
        keep.update((start - 1, start))
    for episode in analysis.episodes:
        first, last = _bounds(episode, n)
        keep.update((first - 1, first, last, last + 1))
        keep.add(first + int(np.argmax(y[first : last + 1])))
    return np.array(sorted(i for i in keep if 0 <= i < n), dtype=np.int64)


def _line(
    series: StepSeries,
    analysis: JobAnalysis,
    plain: NDArray[np.bool_],
    keep: Indices,
    buckets: int,
) -> Indices:
    """What the line goes through. Spikes stand apart: a line up to each would hide the rest."""
    y, n = series.duration_s, len(series)
    detail = max(4, min(buckets, _DETAIL_BUCKETS // max(len(analysis.episodes), 1), 300))
    pieces = [keep, _decimated(y, plain, 0, n, buckets)]
    for episode in analysis.episodes:
        first, last = _bounds(episode, n)
        margin = max(50, (last - first) // 2)
        low, high = max(0, first - margin), min(n, last + margin + 1)
        pieces.append(_decimated(y, plain, low, high, detail))
    return np.unique(np.concatenate(pieces))


def _spikes(
    y: Floats, plain: NDArray[np.bool_], keep: Indices, buckets: int
) -> tuple[Indices, Indices]:
    """The spikes to mark, and how many each stands for: the highest of a bucket, and `keep`."""
    others = np.setdiff1d(np.flatnonzero(~plain), keep)
    highest, counts = highest_per_bucket(y, others, buckets=buckets)
    places = np.concatenate([highest, keep])
    order = np.argsort(places)
    counted = np.concatenate([counts, np.ones(len(keep), dtype=np.int64)])
    return places[order], counted[order]


def _decimated(y: Floats, plain: NDArray[np.bool_], low: int, high: int, buckets: int) -> Indices:
    places = np.flatnonzero(plain[low:high]) + low
    return places[decimate(y[places], buckets=buckets)]


def _segments(analysis: JobAnalysis, starts: list[int], n: int) -> Iterable[tuple[int, int]]:
    """The series cut where a run or an episode begins or ends."""
    cuts = {0, n, *starts}
    for episode in analysis.episodes:
        first, last = _bounds(episode, n)
        cuts.update((first, last + 1))
    return pairwise(sorted(cuts))


def _course(
    series: StepSeries, analysis: JobAnalysis, columns: _Columns, starts: list[int]
) -> dict[str, list[float | None]]:
    """The course without its noise: medians of buckets that never straddle a cut."""
    n = len(series)
    places, values = [np.arange(0)], [np.arange(0)]
    if n >= 200:
        for low, high in _segments(analysis, starts, n):
            wanted = min(high - low, max(2, round((high - low) / n * min(400, n // 10))))
            middle, median = bucket_medians(series.duration_s[low:high], buckets=wanted)
            places.append(middle + low)
            values.append(median + low)
    return columns.at(np.concatenate(places), np.concatenate(values))


def _healthy(
    analysis: JobAnalysis, columns: _Columns, starts: list[int]
) -> dict[str, list[float | None]]:
    """The level a healthy iteration would have: a step line over the whole job."""
    n = columns.records
    result: dict[str, list[float | None]] = {"x": [], "time": [], "y": []}
    for low, high in _segments(analysis, starts, n):
        level = analysis.healthy_iteration_s
        # a fail-slow within a changed workload has the changed level as its own baseline
        for episode in sorted(analysis.episodes, key=lambda e: e.kind == "fail_slow"):
            first, last = _bounds(episode, n)
            if first <= low <= last:
                change = episode.kind == "workload_change"
                level = episode.iteration_s if change else episode.baseline_s
        span = columns.span(low, high - 1)
        if not result["y"] or result["y"][-1] != _round(level):
            if result["y"]:
                for column in result.values():
                    column.append(None)
            result["x"] += span["x"]
            result["time"] += span["time"]
            result["y"] += [_round(level)] * 2
        else:
            result["x"][-1], result["time"][-1] = span["x"][1], span["time"][1]
    return result


def _data(series: StepSeries, columns: _Columns, kept: Indices) -> dict[str, list[float | None]]:
    """Seconds an iteration waits for data, where the log tells and it ever matters."""
    waits = np.nan_to_num(series.data_s[kept])
    # more than a tenth of an iteration, and not just now and then
    if not len(kept) or np.mean(waits > 0.1 * series.duration_s[kept]) < 0.02:
        kept, waits = kept[:0], waits[:0]
    return columns.at(kept, waits)


def _episode(number: int, episode: Episode, columns: _Columns, n: int) -> dict[str, Any]:
    first, last = _bounds(episode, n)
    cost = f" · {units.duration(episode.lost_s)} lost" if episode.kind == "fail_slow" else ""
    ratio = units.slowdown(episode.slowdown)
    return {
        "number": number,
        "kind": episode.kind,
        "what": describe.kind(episode),
        "label": f"{ratio} · {describe.length(episode)}{cost}",
        "short": ratio,
        "iteration_s": _round(episode.iteration_s),
        **columns.span(first, last),
    }


def _fit(y: Floats, analysis: JobAnalysis) -> list[float]:
    """A range of y that shows the levels and all episodes; single spikes may stand above it."""
    if not len(y):
        return [0.0, 1.0]
    low, middle, high = np.quantile(y, (0.005, 0.5, 0.98)).tolist()
    levels = [high, middle * 1.25]
    for episode in analysis.episodes:
        first, last = _bounds(episode, len(y))
        inside = y[first : last + 1]
        levels += [episode.iteration_s, float(np.quantile(inside, 0.9))]
    top = min(max(levels), float(y.max()) if y.max() > middle * 1.25 else middle * 1.25)
    room = (top - low) * 0.12
    return [_round(max(0.0, low - 2 * room)), _round(top + 2 * room)]


def _round(value: float, figures: int = 6) -> float:
    return float(f"{value:.{figures}g}")
