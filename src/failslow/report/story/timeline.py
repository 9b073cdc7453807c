"""The timeline of a job: its picture as any log's, with what happened under it.

In: a `Story`. Out: a `JobPicture` whose payload also holds

    "lanes": ["watching", "suspicion", …], "began": "watching began",
    "marks": [{"lane": 1, "kind": "suspicion", "x": 812, "time": 48.7, "text": "suspected ×1.41"}],
    "spans": [{"lane": 3, "kind": "pause", "x": [830, 831], "time": [50.1, 52.5], "text": …}],
    "levels": {"x": [812, 853, null, …], "time": […], "y": […]}
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from failslow.report.picture import JobPicture, job_picture, positions
from failslow.report.story.model import MarkKind, Story
from failslow.report.words import LEVELS

__all__ = ["timeline_picture"]

_LANES: dict[MarkKind, str] = {
    "watch": "watching",
    "suspicion": "suspicion",
    "cleared": "suspicion",
    "diagnosis": "profile",
    "verdict": "verdict",
    "pause": "verdict",
    "decision": "decision",
    "action": "action",
    "failed": "action",
}
_IN_FORCE = "in force"
_MOST_MARKS = 2000


def timeline_picture(story: Story) -> JobPicture:
    """The picture of the job; `story.series` must not be empty."""
    picture = job_picture(story.series, story.analysis)
    picture.payload.update(_happened(story))
    return picture


def _happened(story: Story) -> dict[str, Any]:
    series, start_t = story.series, story.series.start_time or 0.0
    place = positions(series).astype(np.float64)

    def at(t: float) -> tuple[float, float]:
        """(position, seconds) of a moment; before the first iteration it is its begin."""
        time_s = min(max(0.0, t - start_t), float(series.end_s[-1]))
        return round(float(np.interp(time_s, series.end_s, place)), 3), round(time_s, 3)

    def span(lane: str, kind: str, from_t: float, to_t: float, text: str) -> dict[str, Any]:
        (x0, t0), (x1, t1) = at(from_t), at(to_t)
        return {"lane": lane, "kind": kind, "x": [x0, x1], "time": [t0, t1], "text": text}

    marks, spans = [], []
    for mark in story.marks[-_MOST_MARKS:]:
        if mark.until_t is not None:
            spans.append(span(_LANES[mark.kind], mark.kind, mark.t, mark.until_t, mark.text))
        x, time_s = at(mark.t)
        kind = mark.kind
        marks.append(
            {"lane": _LANES[kind], "kind": kind, "x": x, "time": time_s, "text": mark.text}
        )
    end_t = start_t + float(series.end_s[-1])
    changes = [*story.in_force, (end_t, "")]
    for (t, level), (until_t, _) in pairwise(changes):
        if level != "S1":
            text = f"{level}: {LEVELS.get(level, level)}"
            spans.append(span(_IN_FORCE, level, t, until_t, text))
    for trouble in story.troubles:
        if trouble.what in ("agent", "worker", "bus", "coverage", "controller"):
            until_t = end_t if trouble.until_t is None else trouble.until_t
            spans.append(span("watching", "blind", trouble.since_t, until_t, trouble.message))
    used = {mark["lane"] for mark in marks} | {one["lane"] for one in spans}
    lanes = [lane for lane in (*dict.fromkeys(_LANES.values()), _IN_FORCE) if lane in used]
    for one in (*marks, *spans):
        one["lane"] = lanes.index(str(one["lane"]))
    return {
        "lanes": lanes,
        "began": "watching began",
        "marks": marks,
        "spans": spans,
        "levels": _levels(story, place),
    }


def _levels(story: Story, place: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, list[Any]]:
    """The levels of each fail-slow as a broken step line."""
    series = story.series
    drawn: dict[str, list[Any]] = {"x": [], "time": [], "y": []}
    for episode in story.analysis.fail_slows:
        first, last = episode.first_index, episode.last_index
        steps = series.step[first : last + 1]
        begins = [first + int(np.searchsorted(steps, v.start_step)) for v in episode.levels]
        for level, begin, end in zip(episode.levels, begins, [*begins[1:], last + 1], strict=True):
            if begin >= end or begin > last:
                continue
            until = min(end, last)
            began_s = float(series.end_s[begin] - series.duration_s[begin])
            drawn["x"] += [float(place[begin]), float(place[until]), None]
            drawn["time"] += [round(began_s, 3), round(float(series.end_s[until]), 3), None]
            drawn["y"] += [level.slowdown * episode.baseline_s] * 2 + [None]
    return drawn
