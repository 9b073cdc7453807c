"""The JSON documents of `failslow analyze --json` and `failslow study --json`.

In: `JobAnalysis` records, a `Study`. Out: plain dicts, and text that never holds NaN. Keys are
stable; keys may be added. Both are pinned by tests.

    {"schema": "failslow.analysis/1", "jobs": [{"source": "train.log", "format": "megatron",
      "iterations": 4800, "first_step": 10, "last_step": 48000, "start_time": null,
      "healthy_iteration_s": 0.571, "wall_s": 2741.2, "lost_s": 319.6, "jct_increase_pct": 13.2,
      "episodes": [{"start_step": 13800, "end_step": null, "start_s": 7880.1, "end_s": null,
        "duration_s": 190.4, "iteration_s": 0.794, "baseline_s": 0.571, "slowdown": 1.39,
        "peak_slowdown": 1.6, "lost_s": 53.4, "confidence": 0.999, "kind": "fail_slow",
        "culprits": [{"rank": 3, "what": "compute", "slowdown": 2.3}],
        "levels": [{"start_step": 13800, "slowdown": 1.39}], "note": ""}],
      "spikes": 12, "spike_lost_s": 64.0, "warnings": []}]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from failslow.records import Episode, JobAnalysis
from failslow.report.study import JobRow, Study

__all__ = ["analysis_document", "dumps", "study_document"]


def analysis_document(analyses: Sequence[JobAnalysis]) -> dict[str, Any]:
    """Schema failslow.analysis/1: one entry a job, in the order given."""
    return {"schema": "failslow.analysis/1", "jobs": [_job(a) for a in analyses]}


def study_document(study: Study) -> dict[str, Any]:
    """Schema failslow.study/1: a characterisation study over many jobs.

    jobs, hit, hit_pct              how many jobs, how many with at least one fail-slow
    episodes, ongoing               fail-slow episodes; how many still went on at the log's end
    workload_changes, spikes        what else was seen; neither counts as a fail-slow
    wall_s, lost_s                  summed over the jobs
    duration_s                      {mean, median, longest} of the episodes; null without any
    slowdown                        {mean, worst} of the episodes; null without any
    jct_increase_pct                {mean_hit, mean_all, worst} completion-time increase
    over_50_pct                     {jobs, share_of_hit_pct} of hit jobs over +50 %
    culprits                        {what: episodes} where an input names a culprit
    per_job                         one row a job: source, format, iterations, wall_s,
                                    healthy_iteration_s, episodes, longest_s, worst_slowdown,
                                    lost_s, jct_increase_pct, spikes, workload_changes, hit
    unreadable                      [{source, error}] files that could not be studied
    """
    return {
        "schema": "failslow.study/1",
        "jobs": study.jobs,
        "hit": study.hit,
        "hit_pct": study.hit_pct,
        "episodes": study.episodes,
        "ongoing": study.ongoing,
        "workload_changes": study.workload_changes,
        "spikes": study.spikes,
        "wall_s": study.wall_s,
        "lost_s": study.lost_s,
        "duration_s": {
            "mean": study.mean_duration_s,
            "median": study.median_duration_s,
            "longest": study.longest_duration_s,
        },
        "slowdown": {"mean": study.mean_slowdown, "worst": study.worst_slowdown},
        "jct_increase_pct": {
            "mean_hit": study.mean_jct_increase_hit_pct,
            "mean_all": study.mean_jct_increase_all_pct,
            "worst": study.worst_jct_increase_pct,
        },
        "over_50_pct": {
            "jobs": study.over_50_jobs,
            "share_of_hit_pct": study.over_50_share_of_hit_pct,
        },
        "culprits": dict(study.culprits),
        "per_job": [_row(row) for row in study.per_job],
        "unreadable": [{"source": s, "error": e} for s, e in study.unreadable],
    }


def dumps(document: dict[str, Any], *, indent: int | None = 2) -> str:
    """Strict ASCII JSON: what is not a finite number becomes null, 13 figures of the others."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _job(analysis: JobAnalysis) -> dict[str, Any]:
    return {
        "source": analysis.source,
        "format": analysis.format,
        "iterations": analysis.iterations,
        "first_step": analysis.first_step,
        "last_step": analysis.last_step,
        "start_time": analysis.start_time,
        "healthy_iteration_s": analysis.healthy_iteration_s,
        "wall_s": analysis.wall_s,
        "lost_s": analysis.lost_s,
        "jct_increase_pct": analysis.jct_increase_pct,
        "episodes": [_episode(e) for e in analysis.episodes],
        "spikes": analysis.spikes,
        "spike_lost_s": analysis.spike_lost_s,
        "warnings": list(analysis.warnings),
    }


def _episode(episode: Episode) -> dict[str, Any]:
    return {
        "start_step": episode.start_step,
        "end_step": episode.end_step,
        "start_s": episode.start_s,
        "end_s": episode.end_s,
        "duration_s": episode.duration_s,
        "iteration_s": episode.iteration_s,
        "baseline_s": episode.baseline_s,
        "slowdown": episode.slowdown,
        "peak_slowdown": episode.peak_slowdown,
        "lost_s": episode.lost_s,
        "confidence": episode.confidence,
        "kind": episode.kind,
        "culprits": [
            {"rank": c.rank, "what": c.what, "slowdown": c.slowdown} for c in episode.culprits
        ],
        "levels": [{"start_step": v.start_step, "slowdown": v.slowdown} for v in episode.levels],
        "note": episode.note,
    }


def _row(row: JobRow) -> dict[str, Any]:
    return {
        "source": row.source,
        "format": row.format,
        "iterations": row.iterations,
        "wall_s": row.wall_s,
        "healthy_iteration_s": row.healthy_iteration_s,
        "episodes": row.episodes,
        "longest_s": row.longest_s,
        "worst_slowdown": row.worst_slowdown,
        "lost_s": row.lost_s,
        "jct_increase_pct": row.jct_increase_pct,
        "spikes": row.spikes,
        "workload_changes": row.workload_changes,
        "hit": row.hit,
    }


def _finite(value: Any) -> Any:
    """`value` for strict JSON: numpy scalars as Python numbers, NaN and infinities as null.

    13 figures keep milliseconds of epoch times and drop the noise of binary fractions.
    """
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.13g}") if math.isfinite(value) else None
    return value
