"""The numbers the page's pictures are drawn from, small however long the job was.

In: a `Story`. Out: what `story.js` reads:

    {"rounds": [{"t": …, "ranks": […], "nodes": […], "columns": […], "iteration_s": …,
                 "values": {"own": [[1.53, 1.0], …], …}}],
     "own": {"ranks": […], "nodes": […], "t": […], "percent": [[100, 155, null, …], …],
             "highest": 1.6, "spans": [[onset, relief]], "left_out": 0} or null,
     "links": {"sizes": [{"label": "16 MiB, 06:28:59", "nodes": […], "cells": [[from, to, times,
               label, detail]]}], "chosen": 2, "slowest": [[…]]} or null,
     "telemetry": [{"episode": id, "onset_t": …, "relief_t": …, "panels": [{"title", "unit",
               "change", "telling", "zero", "t": […], "y": […]}]}]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from failslow.report import units
from failslow.report.story.evidence import Panel, amount, panels
from failslow.report.story.links import LinkTime, Pause
from failslow.report.story.model import Case, Story
from failslow.report.story.profiles import ProfileRound
from failslow.report.words import size_text

__all__ = ["story_payload"]

_PANELS, _TELLING, _SLOWEST, _PAUSES = 8, 3.0, 8, 12


def story_payload(story: Story, shown: Sequence[Case]) -> dict[str, Any]:
    """The numbers of all pictures but the timeline."""
    return {
        "rounds": [_round(taken) for taken in story.rounds],
        "own": _own(story),
        "links": _links(story.pauses),
        "telemetry": [
            found for case in shown if case.is_fault for found in [_telemetry(case, story)] if found
        ],
    }


def _round(taken: ProfileRound) -> dict[str, Any]:
    return {
        "t": taken.t,
        "ranks": list(taken.ranks),
        "nodes": list(taken.nodes),
        "columns": list(taken.columns),
        "iteration_s": taken.iteration_s,
        "values": {
            metric: [[None if v is None else float(f"{v:.4g}") for v in row] for row in rows]
            for metric, rows in taken.values.items()
        },
    }


def _own(story: Story) -> dict[str, Any] | None:
    own = story.own_time
    if own is None:
        return None
    nodes = {worker.rank: worker.node for worker in story.workers}
    percent = np.where(np.isfinite(own.ratio), np.round(100 * own.ratio), -1).astype(np.int64)
    end_t = story.end_t or float(own.t[-1])
    return {
        "ranks": list(own.ranks),
        "nodes": [nodes.get(rank, "") for rank in own.ranks],
        "t": [round(t, 3) for t in own.t.tolist()],
        "percent": [[v if v >= 0 else None for v in row] for row in percent.tolist()],
        "highest": float(np.nanmax(own.ratio)),
        "spans": [
            [case.start_t, end_t if case.end_t is None else case.end_t] for case in story.faults
        ],
        "left_out": own.left_out,
    }


def _links(pauses: Sequence[Pause]) -> dict[str, Any] | None:
    measured = [pause for pause in pauses if pause.links][-_PAUSES:]
    if not measured:
        return None
    sizes = [
        _size(size, pause)
        for pause in measured
        for size in sorted({link.size_bytes for link in pause.links})
    ]
    last = measured[-1].links
    largest = max(link.size_bytes for link in last)
    most = [link for link in last if link.size_bytes == largest]
    slowest = sorted(most, key=lambda link: -link.ratio)[:_SLOWEST]
    return {
        "sizes": sizes,
        "chosen": len(sizes) - 1,
        "slowest": [
            [
                link.source,
                link.target,
                amount(link.bytes_per_s, "B/s"),
                units.duration(link.seconds),
                units.slowdown(link.ratio),
                link.against,
                _ranks(link),
            ]
            for link in slowest
        ],
    }


def _size(size: int, pause: Pause) -> dict[str, Any]:
    mine = [link for link in pause.links if link.size_bytes == size]
    names = sorted({name for link in mine for name in (link.source, link.target)}, key=_natural)
    place = {name: at for at, name in enumerate(names)}
    cells = [
        [
            place[link.source],
            place[link.target],
            float(f"{link.ratio:.4g}"),
            amount(link.bytes_per_s, "B/s"),
            f"{amount(link.bytes_per_s, 'B/s')}, {units.duration(link.seconds)}: "
            f"{units.slowdown(link.ratio)} {link.against}; {_ranks(link)}",
        ]
        for link in mine
    ]
    why = f" {pause.why}" if pause.why else ""
    label = f"{size_text(size)}, {units.clock(pause.t)[11:]}{why}"
    return {"label": label, "nodes": names, "cells": cells}


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """So that gpu-2 comes before gpu-10."""
    parts, number = [], ""
    for letter in f"{name} ":
        if letter.isdecimal():
            number += letter
            continue
        if number:
            parts.append((int(number), ""))
            number = ""
        parts.append((-1, letter))
    return tuple(parts)


def _ranks(link: LinkTime) -> str:
    pairs = ", ".join(f"{source}→{target}" for source, target in link.ranks[:4])
    more = f" and {len(link.ranks) - 4} more" if len(link.ranks) > 4 else ""
    return f"ranks {pairs}{more}"


def _telemetry(case: Case, story: Story) -> dict[str, Any] | None:
    """The panels of a case over all its nodes, the most telling first."""
    found: dict[tuple[str, int | None, str], Panel] = {}
    for t, body in story.telemetry:
        if story.case_at(t) is case:
            for panel in panels(body, onset_t=case.start_t, relief_t=case.end_t, most=_PANELS):
                key = (panel.node, panel.rank, panel.name)
                # of several windows the one that shows the onset best
                if key not in found or panel.score >= found[key].score:
                    found[key] = panel
    best = sorted(found.values(), key=lambda panel: -panel.score)[:_PANELS]
    if not best:
        return None
    return {
        "episode": case.id,
        "onset_t": case.start_t,
        "relief_t": case.end_t if case.end_t and case.end_t <= max(p.t[-1] for p in best) else None,
        "panels": [_panel(panel) for panel in best],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    who = panel.node if panel.rank is None else f"{panel.node}, rank {panel.rank}"
    change = ""
    if panel.before is not None:
        change = f"{amount(panel.before, panel.unit)} → {amount(panel.during, panel.unit)}"
    known = [value for value in panel.values if value is not None]
    return {
        "title": f"{who}: {panel.name}",
        "unit": panel.unit,
        "change": change,
        "telling": panel.score >= _TELLING,
        # a steady series fills its panel with noise unless it begins at zero
        "zero": min(known) >= 0 and (panel.score < _TELLING or min(known) < 0.5 * max(known)),
        "t": [round(t, 3) for t in panel.t],
        "y": [None if value is None else float(f"{value:.6g}") for value in panel.values],
    }
