"""Findings -> rich renderables for a terminal of 80 columns or more, or a pipe.

In: `JobAnalysis` records or a `Study`. Out: what `console.print` takes; nothing is printed here.

    train.log · megatron · 48,000 iterations · healthy 571 ms · 7 h 38 min
      #  what       start               length       slowdown   time lost
      1  fail-slow  step 13,810         1 h 18 min   ×1.39      28 min 3 s
                    2 h 24 min in
      1: rank 3 (compute ×2.30)
      1 fail-slow, 28 min 3 s lost: completion time +5.50 % · 40 spikes (5 min 31 s)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.records import Episode, JobAnalysis
from failslow.report import describe, units
from failslow.report.study import JobRow, Study

__all__ = ["analysis_view", "study_view"]

_SLOW, _WORK, _GOOD, _WARN = "bold red", "magenta", "green", "yellow"


def analysis_view(analyses: Sequence[JobAnalysis]) -> RenderableType:
    """Every job with its episodes, what it lost, and its warnings; a line over all at the end."""
    parts: list[RenderableType] = []
    for analysis in analyses:
        parts += _job(analysis)
        parts.append(Text())
    if len(analyses) > 1:
        hit = any(a.fail_slows for a in analyses)
        parts.append(Text(describe.headline(analyses), style=_SLOW if hit else _GOOD))
    elif parts:
        parts.pop()
    return Group(*parts)


def study_view(study: Study) -> RenderableType:
    """The table of a characterisation study, then one row a job, the hardest hit first."""
    table = _table()
    table.add_column("job", overflow="fold", min_width=14)
    table.add_column("fail-slows", justify="right", no_wrap=True)
    table.add_column("longest", justify="right", no_wrap=True)
    table.add_column("worst", justify="right", no_wrap=True)
    table.add_column("lost", justify="right", no_wrap=True)
    table.add_column("JCT", justify="right", no_wrap=True)
    names = describe.short_names([row.source for row in study.per_job])
    rows = zip(names, study.per_job, strict=True)
    for name, row in sorted(rows, key=lambda r: (-r[1].jct_increase_pct, r[0])):
        table.add_row(*_study_row(name, row))
    return Group(_study_figures(study), Text(), table)


def _job(analysis: JobAnalysis) -> Iterator[RenderableType]:
    yield Text.assemble(
        (analysis.source, "bold"),
        f" · {analysis.format} · {units.plural(analysis.iterations, 'iteration')}"
        f" · healthy {units.duration(analysis.healthy_iteration_s)}"
        f" · {units.duration(analysis.wall_s)}",
        no_wrap=True,
        overflow="ignore",
    )
    if analysis.episodes:
        yield Padding(_episodes(analysis), (0, 0, 0, 2))
    for number, episode in enumerate(analysis.episodes, start=1):
        for remark in (describe.blame(episode), episode.note):
            if remark:
                yield Padding(Text(f"{number}: {remark}", style="dim"), (0, 0, 0, 2))
    line = Text("  ", no_wrap=True, overflow="ignore")
    line.append(describe.verdict(analysis), style=_SLOW if analysis.fail_slows else _GOOD)
    if analysis.spikes:
        lost = units.duration(analysis.spike_lost_s)
        line.append(f" · {units.plural(analysis.spikes, 'spike')} ({lost})")
    yield line
    for warning in analysis.warnings:
        yield Padding(Text.assemble(("warning: ", _WARN), warning), (0, 0, 0, 2))


def _episodes(analysis: JobAnalysis) -> Table:
    table = _table()
    table.add_column("#", justify="right")
    table.add_column("what")
    table.add_column("start")
    table.add_column("length")
    table.add_column("slowdown")
    table.add_column("time lost", justify="right")
    for number, episode in enumerate(analysis.episodes, start=1):
        slow = episode.kind == "fail_slow"
        style = _SLOW if slow else _WORK
        table.add_row(
            str(number),
            Text(describe.kind(episode), style=style),
            _start(episode, analysis.start_time),
            describe.length(episode),
            Text(_ratio(episode), style=style),
            units.duration(episode.lost_s) if slow else "–",
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _start(episode: Episode, start_time: float | None) -> str:
    when = describe.start_clock(episode, start_time) or describe.start_offset(episode)
    return f"step {units.count(episode.start_step)}\n{when}"


def _ratio(episode: Episode) -> str:
    ratio = units.slowdown(episode.slowdown)
    if episode.peak_slowdown >= 1.05 * episode.slowdown:
        ratio += f"\npeak {units.slowdown(episode.peak_slowdown)}"
    return ratio


def _study_figures(study: Study) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()

    def add(name: str, value: str, style: str = "") -> None:
        table.add_row(name, Text(value, style=style))

    add("jobs", units.count(study.jobs))
    if study.hit_pct is None:
        return table
    hit = f"{units.count(study.hit)} ({study.hit_pct:.0f} %)"
    add("hit by a fail-slow", hit, _SLOW if study.hit else _GOOD)
    if study.mean_duration_s is not None and study.longest_duration_s is not None:
        open_end = f", {units.count(study.ongoing)} ongoing" if study.ongoing else ""
        add("episodes", units.count(study.episodes) + open_end)
        add("mean duration", units.duration(study.mean_duration_s))
        add("longest", units.duration(study.longest_duration_s))
    if study.mean_jct_increase_hit_pct is not None and study.over_50_share_of_hit_pct is not None:
        add("completion time, hit jobs", f"{units.percent(study.mean_jct_increase_hit_pct)} (mean)")
        add("hit jobs over +50 %", f"{study.over_50_jobs} ({study.over_50_share_of_hit_pct:.0f} %)")
    if study.mean_jct_increase_all_pct is not None:
        add("completion time, all jobs", f"{units.percent(study.mean_jct_increase_all_pct)} (mean)")
    add("time lost", f"{units.duration(study.lost_s)} of {units.duration(study.wall_s)}")
    if study.culprits:
        blamed = ", ".join(f"{what} {units.count(number)}" for what, number in study.culprits)
        add("blamed", blamed)
    if study.workload_changes:
        add("workload changes", f"{units.count(study.workload_changes)} (not fail-slows)")
    return table


def _study_row(name: str, row: JobRow) -> list[str | Text]:
    if not row.hit or row.longest_s is None or row.worst_slowdown is None:
        return [name, Text("–", style=_GOOD), "", "", "", ""]
    return [
        name,
        Text(units.count(row.episodes), style=_SLOW),
        units.duration(row.longest_s),
        units.slowdown(row.worst_slowdown),
        units.duration(row.lost_s),
        units.percent(row.jct_increase_pct),
    ]
