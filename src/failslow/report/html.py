"""Findings -> one HTML file that needs nothing else: plotly.js inside, no network, works offline.

In: `JobPicture`s, and the `Study` when there is one. Out: the file, written whole or not at all.
The page carries a content security policy that forbids every request.

    write_html(Path("report.html"), [job_picture(series, analysis)], title="train.log")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from failslow.records import Episode, JobAnalysis
from failslow.report import describe, units
from failslow.report.files import write_atomically
from failslow.report.frame import page_head, page_tail, page_tiles
from failslow.report.picture import JobPicture
from failslow.report.study import Study

__all__ = ["write_html"]

_EPISODE_HEAD = (
    '<div class="scroll"><table class="stack"><thead><tr><th>#</th><th>what</th><th>start</th>'
    '<th>length</th><th class="n">slowdown</th><th class="n">iteration</th>'
    '<th class="n">time lost</th><th class="n">confidence</th></tr></thead><tbody>'
)


def write_html(
    path: Path,
    pictures: Sequence[JobPicture],
    *,
    title: str = "failslow report",
    study: Study | None = None,
    errors: Sequence[tuple[str, str]] = (),
    after_summary: str = "",
    made_at: str = "",
) -> None:
    """Write the page. Raises OutputError when `path` cannot be written.

    errors: (source, message) of inputs that could not be read; shown below the summary.
    after_summary: HTML of our own that stands between the summary and the jobs.
    made_at: printed in the footer; left out of the page when empty.
    """
    write_atomically(
        path, _page(pictures, title, study, errors, after_summary=after_summary, made_at=made_at)
    )


def _page(
    pictures: Sequence[JobPicture],
    title: str,
    study: Study | None,
    errors: Sequence[tuple[str, str]],
    *,
    after_summary: str,
    made_at: str,
) -> Iterator[str]:
    analyses = [p.analysis for p in pictures]
    yield page_head(title, describe.headline(analyses))
    yield page_tiles(_study_tiles(study) if study else _analysis_tiles(analyses))
    yield _summary(analyses)
    for source, message in errors:
        text = message if source in message else f"{source}: {message}"
        yield f'<p class="bad-file">{escape(text)}</p>\n'
    yield after_summary
    yield '<noscript><p class="card">The charts need JavaScript; the tables do not.</p></noscript>'
    for number, picture in enumerate(pictures, start=1):
        yield from _job(number, picture)
    yield page_tail("report.js", made_at=made_at)


def _analysis_tiles(analyses: Sequence[JobAnalysis]) -> list[tuple[str, str, str]]:
    slow = [e for a in analyses for e in a.fail_slows]
    mood = "bad" if slow else "good"
    tiles = [(units.count(len(slow)), "fail-slow episode" + "s" * (len(slow) != 1), mood)]
    if len(analyses) > 1:
        hit = sum(bool(a.fail_slows) for a in analyses)
        tiles.insert(0, (f"{hit} of {units.count(len(analyses))}", "jobs hit", mood))
    if slow:
        worst = max(e.slowdown for e in slow)
        longest = max(e.duration_s for e in slow)
        lost = sum(a.lost_s for a in analyses)
        tiles += [
            (units.slowdown(worst), "worst slowdown", ""),
            (units.duration(longest), "longest episode", ""),
            (units.duration(lost), "time lost", ""),
        ]
    if len(analyses) == 1:
        tiles.append((units.percent(analyses[0].jct_increase_pct), "completion time", ""))
        tiles.append((units.duration(analyses[0].healthy_iteration_s), "healthy iteration", ""))
    changes = sum(len(a.episodes) - len(a.fail_slows) for a in analyses)
    if changes:
        tiles.append((units.count(changes), "workload change" + "s" * (changes != 1), ""))
    tiles.append((units.count(sum(a.spikes for a in analyses)), "spikes, not counted", ""))
    return tiles


def _study_tiles(study: Study) -> list[tuple[str, str, str]]:
    def shown(value: float | None, form: Any) -> str:
        return "–" if value is None else form(value)

    return [
        (f"{study.hit} of {study.jobs}", "jobs hit", "bad" if study.hit else "good"),
        (units.count(study.episodes), "fail-slow episodes", ""),
        (shown(study.mean_duration_s, units.duration), "mean duration", ""),
        (shown(study.longest_duration_s, units.duration), "longest", ""),
        (shown(study.mean_jct_increase_hit_pct, units.percent), "completion time, hit jobs", ""),
        (shown(study.mean_jct_increase_all_pct, units.percent), "completion time, all jobs", ""),
        (
            shown(study.over_50_share_of_hit_pct, lambda v: f"{v:.0f} %"),
            "of hit jobs over +50 %",
            "",
        ),
    ]


def _summary(analyses: Sequence[JobAnalysis]) -> str:
    rows = []
    names = describe.short_names([a.source for a in analyses])
    for number, (name, a) in enumerate(zip(names, analyses, strict=True), start=1):
        slow, changes = len(a.fail_slows), len(a.episodes) - len(a.fail_slows)
        found = f'<span class="tag fail_slow">{units.plural(slow, "fail-slow")}</span>'
        if not slow:
            found = '<span class="tag ok">no fail-slow</span>'
        if changes:
            found += f' <span class="tag workload_change">{_changes(changes)}</span>'
        worst = max((e.slowdown for e in a.fail_slows), default=None)
        cells = [
            f'<td class="name"><a href="#job-{number}" title="{escape(a.source)}">'
            f"{escape(name)}</a>"
            f'<span class="small">{escape(a.format)}</span></td>',
            f'<td class="wide">{found}</td>',
            _number("iterations", units.count(a.iterations)),
            _number("healthy", units.duration(a.healthy_iteration_s)),
            _number("wall", units.duration(a.wall_s)),
            _number("worst", units.slowdown(worst) if worst else ""),
            _number("lost", units.duration(a.lost_s) if slow else ""),
            _number("completion", units.percent(a.jct_increase_pct)),
            _number("spikes", units.count(a.spikes)),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = (
        "iterations",
        "healthy iteration",
        "wall time",
        "worst slowdown",
        "time lost",
        "completion time",
        "spikes",
    )
    head = "".join(f'<th class="n">{h}</th>' for h in heads)
    return (
        '<section class="card"><div class="scroll"><table class="stack"><thead><tr><th>job</th>'
        f"<th>found</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>\n"
    )


def _number(label: str, value: str) -> str:
    return f'<td class="n" data-label="{label}">{value}</td>' if value else '<td class="n"></td>'


def _changes(number: int) -> str:
    return units.plural(number, "workload change")


def _job(number: int, picture: JobPicture) -> Iterator[str]:
    a, payload = picture.analysis, picture.payload
    facts = [
        a.format,
        units.plural(a.iterations, "iteration"),
        f"steps {units.count(a.first_step)}–{units.count(a.last_step)}",
        f"healthy {units.duration(a.healthy_iteration_s)}",
        units.duration(a.wall_s),
    ]
    if a.start_time is not None and units.clock(a.start_time):
        facts.append(f"from {units.clock(a.start_time)} UTC")
    if a.spikes:
        facts.append(f"{units.plural(a.spikes, 'spike')} ({units.duration(a.spike_lost_s)})")
    if picture.drawn < picture.records:
        facts.append(
            f"{units.count(picture.drawn)} of {units.count(picture.records)} records drawn "
            "(lowest, median and highest of each stretch)"
        )
    mood = "fail_slow" if a.fail_slows else "ok"
    yield (
        f'<section class="card" id="job-{number}"><div class="head"><h2>{escape(a.source)}</h2>'
        f'<span class="tag {mood}">{escape(describe.verdict(a))}</span></div>'
        f'<p class="facts">{escape(" · ".join(facts))}</p>'
    )
    yield _controls()
    yield (
        f'<div class="chart" data-source="data-{number}" data-range="fit" role="img" '
        f'aria-label="iteration time of {escape(a.source)}"></div>'
    )
    yield _legend(payload)
    if a.episodes:
        rows = (_episode(i, e, a.start_time) for i, e in enumerate(a.episodes, start=1))
        yield f"{_EPISODE_HEAD}{''.join(rows)}</tbody></table></div>"
    for warning in a.warnings:
        yield f'<p class="warn">{escape(warning)}</p>'
    # "</" would end the script element and "<!--" hide its end, wherever they stand in the JSON
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    yield f'<script type="application/json" id="data-{number}">{data}</script></section>\n'


def _controls() -> str:
    def switch(name: str, choices: Sequence[tuple[str, str, str]]) -> str:
        buttons = "".join(
            f'<button type="button" data-set="{name}" data-value="{value}" title="{title}" '
            f'aria-pressed="{str(first).lower()}">{label}</button>'
            for first, (value, label, title) in zip(
                [True] + [False] * len(choices), choices, strict=False
            )
        )
        return f'<span class="switch">{buttons}</span>'

    across = switch("axis", [("x", "step", "against step"), ("time", "time", "against wall time")])
    up = switch(
        "range",
        [
            ("fit", "fit", "levels and episodes; what stands higher is pinned to the top edge"),
            ("all", "all", "from the fastest to the slowest iteration"),
            ("log", "log", "logarithmic"),
        ],
    )
    return f'<div class="bar"><span>across {across}</span><span>up {up}</span></div>'


def _legend(payload: dict[str, Any]) -> str:
    kinds = {episode["kind"] for episode in payload["episodes"]}
    line = "var(--line)" if payload["course"]["y"] else "var(--course)"
    entries = [
        (True, f'<i style="color:{line}"></i>iteration time'),
        (payload["course"]["y"], '<i style="color:var(--course)"></i>median'),
        (True, '<i class="dash" style="color:var(--healthy)"></i>healthy level'),
        ("fail_slow" in kinds, '<i class="area" style="background:var(--slow-soft)"></i>fail-slow'),
        (
            "workload_change" in kinds,
            '<i class="area" style="background:var(--work-soft)"></i>workload change',
        ),
        (payload["spikes"]["y"], '<i class="dot" style="color:var(--spike)"></i>spike'),
        (payload["above_fit"], '<i class="up" style="color:var(--spike)">▲</i>above the view'),
        (payload["data"]["y"], '<i style="color:var(--stall)"></i>waiting for data'),
        (payload["restarts"], '<i class="dots" style="color:var(--restart)"></i>restart'),
    ]
    shown = "".join(f"<span>{text}</span>" for wanted, text in entries if wanted)
    return f'<div class="legend">{shown}</div>'


def _episode(number: int, episode: Episode, start_time: float | None) -> str:
    when = describe.start_offset(episode)
    stamp = describe.start_clock(episode, start_time)
    remarks = [text for text in (describe.blame(episode), episode.note) if text]
    if len(episode.levels) > 1:
        levels = ", ".join(
            f"{units.slowdown(v.slowdown)} from step {units.count(v.start_step)}"
            for v in episode.levels
        )
        remarks.append(f"levels: {levels}")
    under = "".join(f'<span class="small">{escape(text)}</span>' for text in remarks)
    peak = ""
    if episode.peak_slowdown >= episode.slowdown * 1.05:
        peak = f'<span class="small">peak {units.slowdown(episode.peak_slowdown)}</span>'
    slow = episode.kind == "fail_slow"
    end = "" if episode.end_step is None else f"to step {units.count(episode.end_step)}"
    return (
        f'<tr><td data-label="#">{number}</td>'
        f'<td class="wide"><span class="tag {episode.kind}">{describe.kind(episode)}</span>'
        f"{under}</td>"
        f'<td class="wide"><button class="zoom" type="button" data-episode="{number}" '
        f'title="show it in the chart">step {units.count(episode.start_step)}</button>'
        f'<span class="small">{escape(when + (f", {stamp} UTC" if stamp else ""))}</span></td>'
        f'<td data-label="length">{escape(describe.length(episode))}'
        f'<span class="small">{end}</span></td>'
        f'<td class="n" data-label="slowdown">{units.slowdown(episode.slowdown)}{peak}</td>'
        f'<td class="n" data-label="iteration">{units.duration(episode.iteration_s)}'
        f'<span class="small">was {units.duration(episode.baseline_s)}</span></td>'
        + _number("lost", units.duration(episode.lost_s) if slow else "")
        + _number("confidence", f"{episode.confidence:.3f}")
        + "</tr>"
    )
