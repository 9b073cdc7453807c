"""The words of a finding, shared by the terminal and the page.

In: an `Episode` or a `JobAnalysis`. Out: short phrases such as "fail-slow", "2 h 11 min in",
"rank 3 (compute ×2.30)".
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from failslow.records import Episode, JobAnalysis
from failslow.report import units

__all__ = [
    "blame",
    "headline",
    "kind",
    "length",
    "short_names",
    "start_clock",
    "start_offset",
    "verdict",
]


def kind(episode: Episode) -> str:
    """What the episode is: "fail-slow", "data stall", "workload change"."""
    if episode.kind == "workload_change":
        return "workload change"
    blamed = {c.what for c in episode.culprits}
    stalled = episode.note.startswith("data stall") or "; data stall" in episode.note
    return "data stall" if blamed == {"data"} or (stalled and not blamed) else "fail-slow"


def length(episode: Episode) -> str:
    """How long it lasted; "ongoing" where the log ends first."""
    text = units.duration(episode.duration_s)
    return f"{text}, ongoing" if episode.end_step is None else text


def start_offset(episode: Episode) -> str:
    """When it began: "at the start", "2 h 11 min in"."""
    if episode.start_s <= 0:
        return "at the start"
    return f"{units.duration(episode.start_s)} in"


def start_clock(episode: Episode, start_time: float | None) -> str:
    """The wall-clock time at which it began, or "" when the log has no clock."""
    return "" if start_time is None else units.clock(start_time + episode.start_s)


def blame(episode: Episode) -> str:
    """The culprits, worst first: "rank 3 (compute ×2.30), rank 5 (host ×1.20)"."""
    worst = sorted(episode.culprits, key=lambda c: -c.slowdown)
    return ", ".join(f"rank {c.rank} ({c.what} {units.slowdown(c.slowdown)})" for c in worst)


def short_names(sources: Sequence[str]) -> list[str]:
    """The sources without the folder they all share; one alone keeps its own name."""
    folders = {os.path.dirname(source) for source in sources}
    if not all(folders):
        return list(sources)
    shared = os.path.commonpath(folders) if len({os.path.isabs(f) for f in folders}) == 1 else ""
    return [os.path.relpath(source, shared) if shared else source for source in sources]


def verdict(analysis: JobAnalysis) -> str:
    """One sentence: what the fail-slows cost this job."""
    slow = analysis.fail_slows
    if not slow:
        return "no fail-slow"
    lost = units.duration(analysis.lost_s)
    return (
        f"{units.plural(len(slow), 'fail-slow')}, {lost} lost: "
        f"completion time {units.percent(analysis.jct_increase_pct)}"
    )


def headline(analyses: Sequence[JobAnalysis]) -> str:
    """One sentence over all jobs: "4 jobs: 1 hit by fail-slows, 2 min 1 s lost"."""
    hit = [a for a in analyses if a.fail_slows]
    jobs = units.plural(len(analyses), "job")
    if not hit:
        return f"{jobs}: no fail-slow"
    lost = units.duration(sum(a.lost_s for a in hit))
    return f"{jobs}: {units.count(len(hit))} hit by fail-slows, {lost} lost"
