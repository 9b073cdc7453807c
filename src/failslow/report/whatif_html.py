"""A `WhatIf` -> one HTML page: heat map over replicas and stages, step times, and what a fix gains.

In: `WhatIf`. Out: the file, written whole or not at all; it needs nothing else to be viewed.

    write_whatif_html(Path("whatif.html"), found)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from failslow.records import WhatIf
from failslow.report import units
from failslow.report.files import write_atomically
from failslow.report.frame import page_head, page_tail, page_tiles
from failslow.report.whatif import cause_text, whatif_headline

__all__ = ["write_whatif_html"]

_ROW_PX, _LEAST_PX, _MOST_PX = 18, 220, 900


def write_whatif_html(path: Path, found: WhatIf, *, made_at: str = "") -> None:
    """Write the page. Raises OutputError when `path` cannot be written.

    made_at: printed in the footer; left out of the page when empty.
    """
    write_atomically(path, _page(found, made_at))


def _page(found: WhatIf, made_at: str) -> Iterator[str]:
    slow = found.diagnosis[0].what != "none"
    yield page_head(found.source, whatif_headline(found))
    tiles = [
        (units.slowdown(found.slowdown), "replayed over ideal", "bad" if slow else "good"),
        (units.duration(float(found.measured_s.mean())), "step, measured", ""),
        (units.duration(float(found.replayed_s.mean())), "step, without gaps", ""),
        (units.duration(float(found.ideal_s.mean())), "step, ideal", ""),
    ]
    if found.fixes:
        gain = units.percent(found.fixes[0].gain_pct).removeprefix("+")
        tiles.append((gain, f"gain: {found.fixes[0].what}", ""))
    yield page_tiles(tiles)
    yield '<section class="card"><div class="head"><h2>Diagnosis</h2></div>'
    mood = "fail_slow" if slow else "ok"
    for cause in found.diagnosis:
        yield f'<p><span class="tag {mood}">{escape(cause_text(cause))}</span></p>'
    yield _fixes(found)
    for warning in found.warnings:
        yield f'<p class="warn">{escape(warning)}</p>'
    yield "</section>\n"
    yield '<noscript><p class="card">The charts need JavaScript.</p></noscript>'
    yield _card(
        "Workers",
        "workers",
        len(found.dp_ranks) * _ROW_PX,
        "the smaller of the slowdowns with only the worker's replica, or only its stage, as slow "
        "as it was",
    )
    yield _card("Steps", "steps", _LEAST_PX + 80, "measured, replayed without gaps, ideal")
    why = "slowdown over the ideal if this alone were as slow as it was"
    yield _card("Stages", "stages", len(found.stages) * 26 + 60, why)
    yield _card("Replicas", "replicas", min(len(found.dp_ranks), 24) * 26 + 60, why)
    yield _card("Operations", "operations", len(found.operation_slowdown) * 26 + 60, why)
    # "</" would end the script element and "<!--" hide its end, wherever they stand in the JSON
    data = json.dumps(_payload(found), separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")
    yield f'<script type="application/json" id="whatif-data">{data}</script>\n'
    yield page_tail("whatif.js", made_at=made_at)


def _fixes(found: WhatIf) -> str:
    if not found.fixes:
        return '<p class="facts">No single change would gain a percent.</p>'
    rows = "".join(
        f"<tr><td>{escape(fix.what)}</td><td>{escape(fix.where)}</td>"
        f'<td class="n">{escape(units.percent(fix.gain_pct).removeprefix("+"))}</td></tr>'
        for fix in found.fixes
    )
    head = '<tr><th>fix</th><th>where</th><th class="n">gain</th></tr>'
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _card(title: str, picture: str, height_px: int, facts: str) -> str:
    height_px = min(max(height_px, _LEAST_PX if picture == "workers" else 120), _MOST_PX)
    return (
        f'<section class="card"><div class="head"><h2>{title}</h2></div>'
        f'<p class="facts">{escape(facts)}</p>'
        f'<div data-picture="{picture}" style="height:{height_px}px" role="img" '
        f'aria-label="{escape(title)}"></div></section>\n'
    )


def _payload(found: WhatIf) -> dict[str, Any]:
    def rounded(values: Any) -> Any:
        """Six figures; NaN as null."""
        if np.ndim(values):
            return [rounded(value) for value in values]
        return float(f"{values:.6g}") if np.isfinite(values) else None

    def slowest(names: list[str], values: Any) -> list[list[Any]]:
        rows = zip(names, rounded(values), strict=True)
        return sorted(([name, value] for name, value in rows), key=lambda row: -row[1])

    return {
        "steps": found.steps.tolist(),
        "measured_s": rounded(found.measured_s),
        "replayed_s": rounded(found.replayed_s),
        "ideal_s": rounded(found.ideal_s),
        "dp_ranks": list(found.dp_ranks),
        "stages": list(found.stages),
        "workers": rounded(found.worker_slowdown),
        "ranks": found.worker_rank.tolist(),
        "by_stage": slowest([f"stage {s}" for s in found.stages], found.stage_slowdown),
        "by_dp": slowest([f"dp {d}" for d in found.dp_ranks], found.dp_slowdown),
        "by_kind": slowest(
            [kind for kind, _ in found.operation_slowdown],
            np.array([value for _, value in found.operation_slowdown]),
        ),
    }
