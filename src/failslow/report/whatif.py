"""A `WhatIf` -> terminal tables with a heat map, and the document of `failslow whatif --json`.

In: `WhatIf`. Out: what `console.print` takes, or a plain dict; nothing is printed here.

    trace-ST.parquet
      dp 2 × pp 4 · 32 steps · step 2.21 s, without gaps 2.18 s, ideal 1.84 s
      ×1.18 the ideal · stage imbalance: last stage, 3 (×1.41 the mean stage), 89 % of the slowdown
      balance the stages: last stage, 3 (×1.41 the mean stage): gain 13.6 %

      dp \\ stage     0     1     2     3
               0  1.00  0.98  0.98  1.17
               1  1.00  0.98  0.98  1.18
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.records import WhatIf, WhatIfCause
from failslow.report import units

__all__ = ["cause_text", "whatif_document", "whatif_headline", "whatif_view"]

_SLOW, _GOOD, _WARN = "bold red", "green", "yellow"
_ROWS, _COLUMNS = 24, 11
"""Of the heat map; more are folded into the worst ones."""
_NAMED = 8
_LEVELS = ((1.10, "bold red"), (1.02, "yellow"), (0.0, ""))
"""From the project's 10 % on a worker is marked as slow, from 2 % on as noticeable."""


def whatif_document(found: WhatIf) -> dict[str, Any]:
    """Schema failslow.whatif/1; times are means over the steps, `per_step` has each."""
    return {
        "schema": "failslow.whatif/1",
        "source": found.source,
        "layout": {
            "dp": found.layout.dp,
            "pp": found.layout.pp,
            "tp": found.layout.tp,
            "vpp": found.layout.vpp,
        },
        "steps": len(found.steps),
        "measured_s": found.measured_s.mean(),
        "replayed_s": found.replayed_s.mean(),
        "ideal_s": found.ideal_s.mean(),
        "slowdown": found.slowdown,
        "launch_slowdown": found.launch_slowdown,
        "dp_ranks": [
            {"dp": dp, "slowdown": value}
            for dp, value in zip(found.dp_ranks, found.dp_slowdown, strict=True)
        ],
        "stages": [
            {"stage": stage, "slowdown": value}
            for stage, value in zip(found.stages, found.stage_slowdown, strict=True)
        ],
        "operations": [
            {"kind": kind, "slowdown": value} for kind, value in found.operation_slowdown
        ],
        "workers": [
            {"dp": dp, "stage": stage, "slowdown": found.worker_slowdown[i, j]}
            for i, dp in enumerate(found.dp_ranks)
            for j, stage in enumerate(found.stages)
            if np.isfinite(found.worker_slowdown[i, j])
        ],
        "diagnosis": [
            {"what": cause.what, "where": cause.where, "share": cause.share}
            for cause in found.diagnosis
        ],
        "fixes": [
            {"what": fix.what, "where": fix.where, "gain_pct": fix.gain_pct} for fix in found.fixes
        ],
        "per_step": [
            {"step": step, "measured_s": measured, "replayed_s": replayed, "ideal_s": ideal}
            for step, measured, replayed, ideal in zip(
                found.steps, found.measured_s, found.replayed_s, found.ideal_s, strict=True
            )
        ],
        "warnings": list(found.warnings),
    }


def whatif_headline(found: WhatIf) -> str:
    """Where the time of a step goes, in one line."""
    return (
        f"dp {len(found.dp_ranks)} × pp {len(found.stages)}"
        f" · {units.plural(len(found.steps), 'step')}"
        f" · step {units.duration(float(found.measured_s.mean()))}"
        f", without gaps {units.duration(float(found.replayed_s.mean()))}"
        f", ideal {units.duration(float(found.ideal_s.mean()))}"
    )


def cause_text(cause: WhatIfCause) -> str:
    """One cause in words."""
    if cause.what == "none":
        return f"nothing to blame: {cause.where}" if cause.where else "nothing to blame"
    return f"{cause.what}: {cause.where}, {100 * cause.share:.0f} % of the slowdown"


def whatif_view(found: WhatIf) -> RenderableType:
    """Everything about the trace, for a terminal of 80 columns or more."""
    parts: list[RenderableType] = [
        Text(found.source, style="bold", no_wrap=True, overflow="ignore"),
        _indented(Text(whatif_headline(found))),
    ]
    slow = found.diagnosis[0].what != "none"
    for number, cause in enumerate(found.diagnosis):
        ratio = f"{units.slowdown(found.slowdown)} the ideal · " if not number else ""
        parts.append(_indented(Text(f"{ratio}{cause_text(cause)}", style=_SLOW if slow else _GOOD)))
    for fix in found.fixes[:_NAMED]:
        gain = units.percent(fix.gain_pct).removeprefix("+")
        parts.append(_indented(Text.assemble((f"{fix.what}: ", ""), fix.where, f": gain {gain}")))
    parts += [Text(), _indented(_heat_map(found)), *_heat_map_notes(found)]
    parts += [
        Text(),
        _indented(Text("slowdown if this alone were as slow as it was:", style="dim")),
        _indented(_tables(found)),
    ]
    parts += [_indented(Text.assemble(("warning: ", _WARN), warning)) for warning in found.warnings]
    return Group(*parts)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def _heat_map(found: WhatIf) -> Table:
    table = _table()
    table.add_column("dp \\ stage", justify="right", style="dim")
    rows, columns = _shown(found)
    for stage in columns:
        table.add_column(str(found.stages[stage]), justify="right", min_width=4)
    for dp in rows:
        values = (float(found.worker_slowdown[dp, stage]) for stage in columns)
        table.add_row(str(found.dp_ranks[dp]), *(_heat(value) for value in values))
    return table


def _shown(found: WhatIf) -> tuple[list[int], list[int]]:
    """Indices of the replicas and stages in the map: the slowest ones, in order."""
    worst = np.nan_to_num(found.worker_slowdown)
    rows = np.sort(np.argsort(-worst.max(axis=1), kind="stable")[:_ROWS])
    columns = np.sort(np.argsort(-worst.max(axis=0), kind="stable")[:_COLUMNS])
    return rows.tolist(), columns.tolist()


def _heat_map_notes(found: WhatIf) -> Iterator[RenderableType]:
    replicas, stages = found.worker_slowdown.shape
    hidden = [
        f"{units.count(number - limit)} of {units.count(number)} {name}"
        for number, limit, name in ((replicas, _ROWS, "replicas"), (stages, _COLUMNS, "stages"))
        if number > limit
    ]
    if hidden:
        text = f"{' and '.join(hidden)}, none of them slower, are left out; --html shows all"
        yield _indented(Text(text, style="dim"))


def _heat(value: float) -> Text:
    if not np.isfinite(value):
        return Text("–", style="dim")
    style = next(style for level, style in _LEVELS if value >= level)
    return Text(f"{value:.2f}", style=style)


def _tables(found: WhatIf) -> Table:
    """Stages and replicas beside the kinds of operations."""
    side = Table.grid(padding=(0, 3, 0, 0))
    by_stage = zip((f"stage {s}" for s in found.stages), found.stage_slowdown, strict=True)
    by_dp = zip((f"dp {d}" for d in found.dp_ranks), found.dp_slowdown, strict=True)
    side.add_row(
        _slowest("stage", [(n, float(v)) for n, v in by_stage]),
        _slowest("replica", [(n, float(v)) for n, v in by_dp]),
        _slowest("operation", list(found.operation_slowdown)),
    )
    return side


def _slowest(title: str, rows: list[tuple[str, float]]) -> Table:
    table = _table()
    table.add_column(title)
    table.add_column("", justify="right")
    for name, value in sorted(rows, key=lambda row: -row[1])[:_NAMED]:
        table.add_row(name, _heat(value))
    if len(rows) > _NAMED:
        table.add_row(Text(f"{units.count(len(rows) - _NAMED)} more", style="dim"), "")
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
