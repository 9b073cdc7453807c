"""Many analysed jobs -> the figures of a characterisation study (FALCON, arXiv 2410.12588, §3).

In: `JobAnalysis` records. Out: a `Study`: how many jobs were hit, how long, how much it cost.

    Study(jobs=27, hit=16, mean_duration_s=4320.0, mean_jct_increase_hit_pct=34.59, ...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from failslow.records import JobAnalysis

__all__ = ["JobRow", "Study", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job of a study."""

    source: str
    format: str
    iterations: int
    wall_s: float
    healthy_iteration_s: float
    episodes: int
    """Fail-slow episodes."""
    longest_s: float | None
    """The longest of them; None without any."""
    worst_slowdown: float | None
    lost_s: float
    jct_increase_pct: float
    spikes: int
    workload_changes: int

    @property
    def hit(self) -> bool:
        """At least one fail-slow."""
        return self.episodes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What happened over many jobs. Means over nothing are None, never 0."""

    jobs: int
    hit: int
    episodes: int
    ongoing: int
    """Episodes that had not ended when the log did: their durations are lower bounds."""
    workload_changes: int
    spikes: int
    wall_s: float
    lost_s: float
    mean_duration_s: float | None
    median_duration_s: float | None
    longest_duration_s: float | None
    mean_slowdown: float | None
    worst_slowdown: float | None
    mean_jct_increase_hit_pct: float | None
    mean_jct_increase_all_pct: float | None
    worst_jct_increase_pct: float | None
    over_50_jobs: int
    culprits: tuple[tuple[str, int], ...]
    """(what, episodes that blame it), most frequent first."""
    per_job: tuple[JobRow, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    """(source, reason) of inputs left out."""

    @property
    def hit_pct(self) -> float | None:
        """Share of the jobs with at least one fail-slow, in percent."""
        return 100.0 * self.hit / self.jobs if self.jobs else None

    @property
    def over_50_share_of_hit_pct(self) -> float | None:
        """Share of the hit jobs that took more than half as long again, in percent."""
        return 100.0 * self.over_50_jobs / self.hit if self.hit else None


def summarize(
    analyses: Sequence[JobAnalysis], *, unreadable: Sequence[tuple[str, str]] = ()
) -> Study:
    """The study over `analyses`; `unreadable` lists (source, reason) of what was left out."""
    rows = tuple(_row(a) for a in analyses)
    hit = [row for row in rows if row.hit]
    episodes = [e for a in analyses for e in a.fail_slows]
    lengths = [e.duration_s for e in episodes]
    slowdowns = [e.slowdown for e in episodes]
    increases = [row.jct_increase_pct for row in rows]
    blamed = Counter(what for e in episodes for what in sorted({c.what for c in e.culprits}))
    return Study(
        jobs=len(rows),
        hit=len(hit),
        episodes=len(episodes),
        ongoing=sum(e.end_step is None for e in episodes),
        workload_changes=sum(row.workload_changes for row in rows),
        spikes=sum(row.spikes for row in rows),
        wall_s=sum(row.wall_s for row in rows),
        lost_s=sum(row.lost_s for row in rows),
        mean_duration_s=fmean(lengths) if lengths else None,
        median_duration_s=median(lengths) if lengths else None,
        longest_duration_s=max(lengths, default=None),
        mean_slowdown=fmean(slowdowns) if slowdowns else None,
        worst_slowdown=max(slowdowns, default=None),
        mean_jct_increase_hit_pct=fmean(r.jct_increase_pct for r in hit) if hit else None,
        mean_jct_increase_all_pct=fmean(increases) if increases else None,
        worst_jct_increase_pct=max(increases, default=None),
        over_50_jobs=sum(row.jct_increase_pct > 50.0 for row in hit),
        culprits=tuple(blamed.most_common()),
        per_job=rows,
        unreadable=tuple(unreadable),
    )


def _row(analysis: JobAnalysis) -> JobRow:
    slow = analysis.fail_slows
    return JobRow(
        source=analysis.source,
        format=analysis.format,
        iterations=analysis.iterations,
        wall_s=analysis.wall_s,
        healthy_iteration_s=analysis.healthy_iteration_s,
        episodes=len(slow),
        longest_s=max((e.duration_s for e in slow), default=None),
        worst_slowdown=max((e.slowdown for e in slow), default=None),
        lost_s=analysis.lost_s,
        jct_increase_pct=analysis.jct_increase_pct,
        spikes=analysis.spikes,
        workload_changes=len(analysis.episodes) - len(slow),
    )
