"""A studied campaign of probes -> one HTML page: the study's table, nodes, and a node × time map.

In: a `ProbeStudy`. Out: the file, written whole or not at all; it needs nothing else to be viewed.

    write_probe_study_html(Path("study.html"), study, title="probes/")

The map has a row a node and a column a stretch of time; a cell is the worst of the probes that ran
there then: none, healthy, slow with somebody else named, slow with nobody named, slow by this node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from failslow.probe.study import ProbeStudy, SizeRow, StudyJob
from failslow.report import units
from failslow.report.files import write_atomically
from failslow.report.frame import page_head, page_tail, page_tiles
from failslow.report.probestudy import (
    causes_text,
    chance_text,
    headline,
    node_remark,
    size_name,
)

__all__ = ["heat_map", "write_probe_study_html"]

_COLUMNS, _ROWS, _HIT_ROWS = 240, 200, 200
_HEALTHY, _ELSEWHERE, _NOBODY, _NAMED = 0, 1, 2, 3


def write_probe_study_html(
    path: Path,
    study: ProbeStudy,
    *,
    title: str,
    warnings: Sequence[str] = (),
    made_at: str = "",
) -> None:
    """Write the page. Raises OutputError when `path` cannot be written.

    made_at: printed in the footer; left out of the page when empty.
    """
    write_atomically(path, _page(study, title, warnings, made_at))


def heat_map(study: ProbeStudy) -> dict[str, Any]:
    """What probes.js draws.

    nodes: rows, drain candidates first; left_out: nodes beyond the most that are drawn. edges_t:
    columns + 1 points of time (epoch seconds). cells: [row][column], null or 0..3 (healthy, slow
    elsewhere, slow with nobody named, named). told: the probes of each cell that is not healthy.
    """
    nodes = [node.node for node in study.nodes[:_ROWS]]
    if not study.jobs:
        return {"nodes": [], "left_out": 0, "edges_t": [], "cells": [], "told": []}
    first_t = min(job.result.begin_t for job in study.jobs)
    last_t = max(job.result.end_t for job in study.jobs)
    lengths = sorted(job.result.duration_s for job in study.jobs)
    # a column is no shorter than a probe usually is: else all cells between would be empty
    width_s = max(lengths[len(lengths) // 2], (last_t - first_t) / _COLUMNS, 1.0)
    columns = max(1, round((last_t - first_t) / width_s))
    width_s = max((last_t - first_t) / columns, 1.0)
    place = {node: row for row, node in enumerate(nodes)}
    cells: list[list[int | None]] = [[None] * columns for _ in nodes]
    told: list[list[list[str]]] = [[[] for _ in range(columns)] for _ in nodes]
    for job in study.jobs:
        middle_t = (job.result.begin_t + job.result.end_t) / 2
        column = min(columns - 1, int((middle_t - first_t) / width_s))
        for node in dict.fromkeys(job.result.nodes):
            if (row := place.get(node)) is None:
                continue
            level = _level(job, node)
            cells[row][column] = max(level, cells[row][column] or _HEALTHY)
            if level:
                told[row][column].append(_told(job))
    return {
        "nodes": nodes,
        "left_out": len(study.nodes) - len(nodes),
        "edges_t": [round(first_t + n * width_s, 3) for n in range(columns + 1)],
        "cells": cells,
        "told": [["\n".join(lines) for lines in row] for row in told],
    }


def _level(job: StudyJob, node: str) -> int:
    if not job.hit:
        return _HEALTHY
    if node in job.result.culprit_nodes:
        return _NAMED
    return _ELSEWHERE if job.result.culprit_nodes else _NOBODY


def _told(job: StudyJob) -> str:
    who = ", ".join(job.result.culprits) or "nobody named"
    return f"{job.probe}: {units.slowdown(job.result.slowdown)} {job.cause}: {who}"


def _page(study: ProbeStudy, title: str, warnings: Sequence[str], made_at: str) -> Iterator[str]:
    yield page_head(title, headline(study))
    yield page_tiles(_tiles(study))
    for warning in warnings:
        yield f'<p class="bad-file">{escape(warning)}</p>\n'
    yield _sizes(study)
    picture = heat_map(study)
    if picture["cells"]:
        more = f"; {picture['left_out']} nodes more are not drawn" if picture["left_out"] else ""
        height_px = min(1200, max(140, 90 + 22 * len(picture["nodes"])))
        yield (
            '<section class="card"><div class="head"><h2>Nodes over time</h2></div>'
            '<p class="facts">A cell is the worst of the probes that ran on the node then'
            f"{more}.</p>"
            '<noscript><p class="facts">The map needs JavaScript.</p></noscript>'
            f'<div data-picture="nodes" style="height:{height_px}px" role="img" '
            'aria-label="probes by node and time"></div>'
            '<div class="legend"><span><i class="dot" style="color:var(--healthy)"></i>healthy'
            '</span><span><i class="dot" style="color:var(--course)"></i>slow, another node named'
            '</span><span><i class="dot" style="color:var(--spike)"></i>slow, nobody named</span>'
            '<span><i class="dot" style="color:var(--slow)"></i>named</span></div></section>\n'
        )
    yield _nodes(study)
    yield _hits(study)
    # "</" would end the script element and "<!--" hide its end, wherever they stand in the JSON
    data = json.dumps(picture, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    yield f'<script type="application/json" id="probes-data">{data}</script>\n'
    yield page_tail("probes.js", made_at=made_at)


def _tiles(study: ProbeStudy) -> list[tuple[str, str, str]]:
    total = study.total
    candidates = len(study.drain_candidates)
    tiles = [
        (f"{units.count(total.hit)} of {units.count(total.jobs)}", "probes hit",
         "bad" if total.hit else "good"),
        (units.count(candidates), "drain candidate" + "s" * (candidates != 1),
         "bad" if candidates else "good"),
        (units.count(len(study.nodes)), "nodes probed", ""),
    ]  # fmt: skip
    if total.mean_duration_s is not None:
        tiles.append((units.duration(total.mean_duration_s), "mean duration", ""))
    if total.mean_jct_increase_pct is not None:
        tiles.append((units.percent(total.mean_jct_increase_pct), "completion time, hit", ""))
    if total.worst_slowdown is not None:
        tiles.append((units.slowdown(total.worst_slowdown), "worst slowdown", ""))
    return tiles


def _sizes(study: ProbeStudy) -> str:
    def cells(row: SizeRow) -> list[str]:
        return [
            escape(size_name(row)),
            units.count(row.jobs),
            "–" if row.hit_pct is None else f"{units.count(row.hit)} ({row.hit_pct:.0f} %)",
            "<br>".join(map(escape, causes_text(row.causes))),
            "" if row.mean_duration_s is None else units.duration(row.mean_duration_s),
            "" if row.mean_jct_increase_pct is None else units.percent(row.mean_jct_increase_pct),
            units.count(row.preempted),
            units.count(row.failed),
        ]

    rows = [*study.sizes, study.total] if len(study.sizes) > 1 else study.sizes
    heads = ("jobs", "number", "hit", "causes", "mean duration", "completion time",
             "preempted", "failed")  # fmt: skip
    return _card("Study", _table(heads, [cells(row) for row in rows], texts=(0, 3)))


def _nodes(study: ProbeStudy) -> str:
    rows = [
        [
            escape(node.node),
            units.count(node.probes),
            units.count(node.slow),
            units.count(node.named),
            units.count(node.spells),
            escape(chance_text(node.chance)),
            f'<span class="tag {"fail_slow" if node.is_drain_candidate else "ok"}">'
            f"{escape(node_remark(node))}</span>",
            "" if node.last_named_t is None else f"{units.clock(node.last_named_t)} UTC",
        ]
        for node in study.nodes[:_ROWS]
    ]
    heads = ("node", "probes", "slow", "named", "spells", "chance", "", "last named")
    why = (
        "chance: how likely a node would be named so often if all nodes were alike "
        "(Fisher's exact test, Holm's correction); spells: times it was named anew"
    )
    if left := len(study.nodes) - len(rows):
        why += f"; {units.count(left)} nodes more are not listed"
    return _card("Nodes", _table(heads, rows, texts=(0, 6, 7)), why)


def _hits(study: ProbeStudy) -> str:
    hit = [job for job in study.jobs if job.hit]
    rows = [
        [
            escape(job.probe) + (" (cut short)" if job.partial else ""),
            f"{units.clock(job.result.begin_t)} UTC",
            escape(", ".join(job.result.nodes)),
            escape(job.cause),
            escape(", ".join(job.result.culprits) or "nobody named"),
            units.slowdown(job.result.slowdown),
            units.duration(job.result.slow_s),
            units.percent(100.0 * job.result.jct_increase_share),
        ]
        for job in sorted(hit, key=lambda job: -job.result.slowdown)[:_HIT_ROWS]
    ]
    heads = ("probe", "began", "nodes", "cause", "culprits", "slowdown", "slow for",
             "completion time")  # fmt: skip
    left = f"the {_HIT_ROWS} hardest hit of {units.count(len(hit))}" if len(hit) > len(rows) else ""
    if not rows:
        return ""
    return _card("Probes that were hit", _table(heads, rows, texts=(0, 1, 2, 3, 4)), left)


def _card(title: str, table: str, facts: str = "") -> str:
    under = f'<p class="facts">{escape(facts)}</p>' if facts else ""
    return (
        f'<section class="card"><div class="head"><h2>{title}</h2></div>{under}{table}</section>\n'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[int]) -> str:
    """rows: HTML. texts: columns that hold no numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        parts = (
            f"<{tag}>{cell}</{tag}>" if n in texts else f'<{tag} class="n">{cell}</{tag}>'
            for n, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", heads)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
