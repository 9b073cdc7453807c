"""A `Story` -> one HTML file that needs nothing else: plotly.js inside, no network, works offline.

In: `Story`. Out: the file, written whole or not at all. Each section is there only where the
journal tells something for it; what is missing is said at the end.

    write_story(Path("failslow-report.html"), story)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from failslow.report import units, words
from failslow.report.files import write_atomically
from failslow.report.frame import page_head, page_tail, page_tiles
from failslow.report.picture import JobPicture
from failslow.report.story.heat import METRICS
from failslow.report.story.model import Case, Story
from failslow.report.story.page_case import case_card, start_card
from failslow.report.story.payload import story_payload
from failslow.report.story.pieces import script, select, small, switch, table
from failslow.report.story.terminal import (
    blame_text,
    done_text,
    header_facts,
    length_text,
    lost_text,
    verdict_line,
)
from failslow.report.story.timeline import timeline_picture

__all__ = ["write_story"]

_FOLD = 64
"""More workers than that are first shown by node."""
_EVENTS = 400
_BY = (("rank", "rank", "each worker"), ("node", "node", "the worst worker of each node"))


def write_story(path: Path, story: Story, *, made_at: str = "") -> None:
    """Write the page. Raises OutputError when `path` cannot be written.

    made_at: printed in the footer; left out of the page when empty.
    """
    write_atomically(path, _page(story, made_at))


def _page(story: Story, made_at: str) -> Iterator[str]:
    yield page_head(story.name, verdict_line(story))
    yield page_tiles(_tiles(story))
    yield '<noscript><p class="card">The charts need JavaScript; the tables do not.</p></noscript>'
    picture = timeline_picture(story) if len(story.series) else None
    shown = [case for case in story.cases if case.stretches]
    yield from _job(story, picture, shown)
    payload = story_payload(story, shown)
    for number, case in enumerate(shown, start=1):
        if case.is_fault:
            pictures = [i for i, t in enumerate(payload["telemetry"]) if t["episode"] == case.id]
            yield from case_card(number, case, story, telemetry=pictures)
    yield from start_card(story)
    yield from _suspicions(story)
    yield from _profiles(story, payload)
    yield from _own_time(payload, story)
    yield from _links(payload)
    yield from _events(story)
    yield from _monitoring(story)
    yield script("story-data", payload)
    yield page_tail("report.js", "story.js", made_at=made_at)


def _tiles(story: Story) -> list[tuple[str, str, str]]:
    a, slow = story.analysis, story.faults
    if not a.iterations:
        return [("0", "iterations seen", "bad")]
    mood = "bad" if slow else "good"
    tiles = [(units.count(len(slow)), "fail-slow" + "s" * (len(slow) != 1), mood)]
    if slow:
        worst = max(slow, key=lambda case: case.worst)
        left = f", {units.slowdown(worst.left)} left" if worst.left else ""
        tiles += [
            (units.slowdown(worst.worst), f"worst slowdown{left}", ""),
            (units.duration(a.lost_s), "time lost", ""),
            (units.percent(a.jct_increase_pct), "completion time", ""),
        ]
    removed = [case.removal.share for case in slow if case.removal]
    if removed:
        text = f"{100 * sum(removed) / len(removed):.0f} %"
        label = "of the slowdown removed" + (", mean" if len(removed) > 1 else "")
        tiles.append((text, label, "good" if sum(removed) > 0 else "bad"))
    tiles.append((units.duration(a.healthy_iteration_s), "healthy iteration", ""))
    if story.paused_s:
        tiles.append((units.duration(story.paused_s), "paused for validation", ""))
    if story.spent_s:
        tiles.append((units.duration(story.spent_s), "spent on actions", ""))
    tiles.append((units.count(a.spikes), "spikes, not counted", ""))
    return tiles


def _job(story: Story, picture: JobPicture | None, shown: Sequence[Case]) -> Iterator[str]:
    facts = header_facts(story)
    if story.facts is not None:
        facts.append(words.facts_text(story.facts))
    if story.mode:
        facts.append(f"mode {story.mode}")
    if story.begin_t is not None and story.end_t is not None:
        end = "ended" if story.ended else "last entry"
        facts.append(f"{units.clock(story.begin_t)} UTC, {end} {units.clock(story.end_t)} UTC")
    if story.analysis.spikes:
        lost = units.duration(story.analysis.spike_lost_s)
        facts.append(f"{units.plural(story.analysis.spikes, 'spike')} ({lost})")
    if picture is not None and picture.drawn < picture.records:
        facts.append(
            f"{units.count(picture.drawn)} of {units.count(picture.records)} iterations drawn "
            "(lowest, median and highest of each stretch)"
        )
    mood = "fail_slow" if story.faults else "ok" if story.analysis.iterations else "workload_change"
    yield (
        f'<section class="card" id="job"><div class="head"><h2>{escape(story.source)}</h2>'
        f'<span class="tag {mood}">{escape(verdict_line(story))}</span></div>'
        f'<p class="facts">{escape(" · ".join(facts))}</p>'
    )
    if picture is not None:
        yield _controls()
        yield (
            '<div class="chart tall" data-source="data-1" data-range="fit" data-axis="time" '
            f'role="img" aria-label="iteration time of {escape(story.name)}"></div>'
        )
        yield _legend(picture.payload)
        yield script("data-1", picture.payload)
    yield _episodes(story, shown)
    for warning in story.analysis.warnings:
        yield f'<p class="warn">{escape(warning)}</p>'
    yield "</section>\n"


def _controls() -> str:
    across = switch("axis", [("time", "time", "against wall time"), ("x", "step", "against step")])
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
    bars = {span["kind"] for span in payload["spans"]}
    line = "var(--line)" if payload["course"]["y"] else "var(--course)"
    entries = [
        (True, f'<i style="color:{line}"></i>iteration time'),
        (payload["course"]["y"], '<i style="color:var(--course)"></i>median'),
        (True, '<i class="dash" style="color:var(--healthy)"></i>healthy level'),
        (payload["levels"]["y"], '<i style="color:var(--slow)"></i>level'),
        ("fail_slow" in kinds, '<i class="area" style="background:var(--slow-soft)"></i>fail-slow'),
        (
            "workload_change" in kinds,
            '<i class="area" style="background:var(--work-soft)"></i>workload change',
        ),
        (payload["spikes"]["y"], '<i class="dot" style="color:var(--spike)"></i>spike'),
        (payload["above_fit"], '<i class="up" style="color:var(--spike)">▲</i>above the view'),
        ("pause" in bars, '<i class="area" style="background:var(--stall)"></i>pause'),
        ("S2" in bars, '<i class="area" style="background:var(--healthy)"></i>S2 in force'),
        ("S3" in bars, '<i class="area" style="background:var(--course)"></i>S3 in force'),
        ("S4" in bars, '<i class="area" style="background:var(--work)"></i>S4 in force'),
        ("blind" in bars, '<i class="area" style="background:var(--restart)"></i>not seen'),
        (payload["restarts"], '<i class="dots" style="color:var(--restart)"></i>restart'),
    ]
    shown = "".join(f"<span>{text}</span>" for wanted, text in entries if wanted)
    return f'<div class="legend">{shown}</div>'


def _stretch_numbers(shown: Sequence[Case]) -> dict[str, int]:
    """The number the chart gives to the first stretch of each case."""
    numbers, next_number = {}, 1
    for case in shown:
        numbers[case.id] = next_number
        next_number += len(case.stretches)
    return numbers


def _episodes(story: Story, shown: Sequence[Case]) -> str:
    if not shown:
        return ""
    numbers, rows = _stretch_numbers(shown), []
    for number, case in enumerate(shown, start=1):
        episode, first = case.episode, case.stretches[0].episode
        assert episode is not None
        end = "ongoing" if case.end_t is None else f"{units.clock(case.end_t)[11:]} UTC"
        to = f"step {units.count(episode.end_step)}" if episode.end_step is not None else end
        what = "fail-slow" if case.is_fault else "workload change"
        link = f'<a href="#case-{number}">{what} {number}</a>' if case.is_fault else what
        again = f"{len(case.stretches)} stretches" if len(case.stretches) > 1 else ""
        rows.append(
            (
                "",
                [
                    f'<span class="tag {episode.kind}">{link}</span>'
                    + small(episode.note)
                    + small(again),
                    f'<button class="zoom" type="button" data-episode="{numbers[case.id]}" '
                    f'title="show it in the chart">step {units.count(first.start_step)}</button>'
                    + small(f"{units.clock(case.start_t)[11:]} UTC"),
                    to + small(end if to != end else ""),
                    escape(length_text(case, story)),
                    units.slowdown(case.worst)
                    + small(f"{units.slowdown(case.left)} left" if case.left else "")
                    + small(f"healthy {units.duration(episode.baseline_s)}"),
                    units.duration(case.lost_s) + small(lost_text(case).partition("\n")[2])
                    if case.is_fault
                    else "",
                    escape(blame_text(case)),
                    escape(done_text(case)) if case.is_fault else "",
                ],
            )
        )
    heads = ("what", "onset", "relief", "length", ">slowdown", ">lost", "who and why", "done")
    return table(heads, rows)


def _suspicions(story: Story) -> Iterator[str]:
    if not story.suspected:
        return
    rows = []
    for case in story.suspected:
        cleared = case.cleared_t
        ratio = next((s.get("slowdown") for _, s in case.suspicions), None)
        rows.append(
            (
                "",
                [
                    escape(case.id),
                    f"{units.clock(case.start_t)} UTC",
                    units.slowdown(ratio) if isinstance(ratio, float) else "",
                    escape(blame_text(case)),
                    f"cleared {units.clock(cleared)[11:]} UTC" if cleared else "open",
                ],
            )
        )
    yield (
        '<section class="card"><div class="head"><h2>Suspicions that became no episode</h2></div>'
        + table(("id", "when", ">slowdown", "suspect", "what became of it"), rows)
        + "</section>\n"
    )


def _profiles(story: Story, payload: dict[str, Any]) -> Iterator[str]:
    rounds = payload["rounds"]
    if not rounds:
        return
    labels = [
        f"{units.clock(r.t)[11:]}{' ' + r.why if r.why else ''}, {len(r.ranks):,} ranks"
        for r in story.rounds
    ]
    many = max(len(r.ranks) for r in story.rounds) > _FOLD
    metrics = [(name, title, meaning) for name, (title, meaning) in METRICS.items()
               if any(name in r.values for r in story.rounds)]  # fmt: skip
    by = "node" if many else "rank"
    blamed = [d.suspects[0].what for c in story.cases for _, d in c.diagnoses if d.suspects]
    metric = "transfer" if blamed and blamed[-1] != "compute" else "own"
    picked = select("round", labels, len(labels) - 1, "profile")
    yield (
        '<section class="card"><div class="head"><h2>Workers and groups</h2></div>'
        '<p class="facts">Each worker against comparable ones, by the groups it talks in: '
        "the same operation, bytes, place in the iteration and size of the group. "
        "Nothing was stopped for this.</p>"
        f'<div class="bar"><span>profile {picked}</span>'
        f"<span>{switch('metric', metrics, metric)}</span>"
        f"<span>by {switch('by', _BY, by)}</span></div>"
        f'<div data-picture="profiles" data-metric="{metric}" '
        f'data-by="{by}" style="height:200px" role="img" aria-label="workers and groups"></div>'
        "</section>\n"
    )


def _own_time(payload: dict[str, Any], story: Story) -> Iterator[str]:
    own = payload["own"]
    if own is None:
        return
    by = "node" if len(own["ranks"]) > _FOLD else "rank"
    left_out = f" {own['left_out']:,} that stand out least are left out." if own["left_out"] else ""
    if any(level in ("S2", "S3") for _, level in story.in_force):
        left_out += " What was done counts, too: more micro-batches take longer."
    yield (
        '<section class="card"><div class="head"><h2>Own time of each worker</h2></div>'
        '<p class="facts">Seconds of an iteration in no collective, over the worker’s own median '
        f"in healthy times; dotted: episodes.{left_out}</p>"
        f'<div class="bar"><span>by {switch("by", _BY, by)}</span></div>'
        f'<div data-picture="own" data-by="{by}" style="height:240px" role="img" '
        'aria-label="own time of each worker"></div></section>\n'
    )


def _links(payload: dict[str, Any]) -> Iterator[str]:
    links = payload["links"]
    if links is None:
        return
    labels = [size["label"] for size in links["sizes"]]
    picked = select("size", labels, len(labels) - 1, "size of the message")
    rows = [("", [escape(cell) for cell in row]) for row in links["slowest"]]
    yield (
        '<section class="card"><div class="head"><h2>Links</h2></div>'
        '<p class="facts">Measured from node to node while training was paused; the colour is the '
        "time "
        "over the same link’s in healthy times, or, without those, over the median link’s.</p>"
        f'<div class="bar"><span>message of {picked}</span></div>'
        '<div data-picture="links" style="height:300px" role="img" aria-label="links"></div>'
        + table(("from", "to", ">bandwidth", ">time", ">ratio", "against", "ranks"), rows)
        + "</section>\n"
    )


def _events(story: Story) -> Iterator[str]:
    if not story.marks:
        return
    rows = [
        ("", [f"{units.clock(m.t)}", escape(m.kind), escape(m.text)])
        for m in story.marks[-_EVENTS:]
    ]
    left_out = len(story.marks) - len(rows)
    more = f", the last {len(rows)}" if left_out else ""
    yield (
        '<section class="card"><div class="head"><h2>What happened</h2></div><details>'
        f"<summary>{units.plural(len(story.marks), 'entry', 'entries')}{more}</summary>"
        + table(("UTC", "kind", "what"), rows)
        + "</details></section>\n"
    )


def _monitoring(story: Story) -> Iterator[str]:
    rows = []
    for trouble in story.troubles[-_EVENTS:]:
        until = story.end_t if trouble.until_t is None else trouble.until_t
        length = units.duration(max(0.0, (until or trouble.since_t) - trouble.since_t))
        end = f"{length}, to the end" if trouble.until_t is None else length
        since = f"{units.clock(trouble.since_t)} UTC"
        rows.append(("", [since, escape(end), escape(trouble.what), escape(trouble.message)]))
    missing = [
        what
        for what, there in (
            ("profiles of the workers' calls", story.rounds),
            ("validation", story.pauses),
            ("telemetry", story.telemetry),
            ("decisions", any(case.decisions for case in story.cases)),
        )
        if not there
    ]
    seen = f"{units.plural(story.entries, 'entry', 'entries')} in the journal"
    blind = f", blind for {units.duration(story.blind_s)}" if story.blind_s else ""
    mood, word = ("workload_change", "troubles") if rows else ("ok", "no trouble")
    yield (
        '<section class="card"><div class="head"><h2>Monitoring</h2>'
        f'<span class="tag {mood}">{word}{blind}</span></div><p class="facts">{seen}'
        + (f" · not in it: {escape(', '.join(missing))}" if missing else "")
        + "</p>"
        + (table(("since", "length", "what", "message"), rows) if rows else "")
        + "</section>\n"
    )
