"""The truth of a simulated job beside its analysis: terminal table, JSON, a card of the page.

In: rows of plain values, so that nothing here knows the simulator. Out: a renderable, HTML, or
a plain dict.

      truth (the scenario's faults)
      fault    cause               where   steps    slowdown  found
      congest  network congestion  node 3  621–700  ×5.02     episode 1, 2 iterations late
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.report import units

__all__ = ["Truth", "TruthRow", "truth_card", "truth_document", "truth_view"]

_HEADS = ("fault", "cause", "where", "steps", "slowdown", "found")


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRow:
    """One fault of the scenario. Steps: first with it, first after it; None where there is none."""

    fault: str
    cause: str
    what: str
    where: str
    start_step: int | None
    end_step: int | None
    slowdown: float
    counts: bool
    """It slowed the job enough to be a fail-slow."""
    episodes: tuple[int, ...]
    onset_error: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the simulator knows of one job."""

    ranks: int
    seed: int
    healthy_iteration_s: float
    lost_s: float
    false_alarms: int
    missed: int
    faults: Sequence[TruthRow]


def truth_document(truth: Truth) -> dict[str, Any]:
    """What stands under "simulation" beside the jobs of schema failslow.analysis/1."""
    return {
        "ranks": truth.ranks,
        "seed": truth.seed,
        "healthy_iteration_s": truth.healthy_iteration_s,
        "lost_s": truth.lost_s,
        "false_alarms": truth.false_alarms,
        "missed": truth.missed,
        "truth": [
            {
                "fault": row.fault,
                "cause": row.cause,
                "what": row.what,
                "where": row.where,
                "start_step": row.start_step,
                "end_step": row.end_step,
                "slowdown": row.slowdown,
                "counts": row.counts,
                "found": bool(row.episodes),
                "episodes": list(row.episodes),
                "onset_error": row.onset_error,
            }
            for row in truth.faults
        ],
    }


def truth_view(truth: Truth) -> RenderableType:
    """A table of the faults, and the score below it."""
    parts: list[RenderableType] = [
        Padding(Text(f"truth ({_facts(truth)})", style="dim"), (0, 0, 0, 2))
    ]
    if truth.faults:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for head in _HEADS:
            table.add_column(head)
        for row in truth.faults:
            table.add_row(*_cells(row)[:-1], Text(_found(row), style=_style(row)))
        parts.append(Padding(table, (0, 0, 0, 2)))
    good = not (truth.false_alarms or truth.missed)
    parts.append(
        Padding(Text(_verdict(truth), style="green" if good else "bold red"), (0, 0, 0, 2))
    )
    return Group(*parts)


def truth_card(truth: Truth) -> str:
    """The same as a card of the HTML page."""
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
        for row in truth.faults
    )
    mood = "fail_slow" if truth.false_alarms or truth.missed else "ok"
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    return (
        '<section class="card"><div class="head"><h2>Truth</h2>'
        f'<span class="tag {mood}">{escape(_verdict(truth))}</span></div>'
        f'<p class="facts">{escape(_facts(truth))}</p><div class="scroll">{table}</div></section>\n'
    )


def _facts(truth: Truth) -> str:
    return (
        f"{units.plural(truth.ranks, 'device')} · seed {truth.seed} · "
        f"healthy {units.duration(truth.healthy_iteration_s)} · "
        f"{units.duration(truth.lost_s)} lost to faults"
    )


def _verdict(truth: Truth) -> str:
    counting = sum(row.counts for row in truth.faults)
    if not counting:
        found = "no fault slows the job by 10 %"
    else:
        found = f"{counting - truth.missed} of {units.plural(counting, 'fault')} found"
    return f"{found}, {units.plural(truth.false_alarms, 'false alarm')}"


def _cells(row: TruthRow) -> list[str]:
    if row.start_step is None:
        steps = "never: the job ends before"
    else:
        end = "" if row.end_step is None else units.count(row.end_step - 1)
        steps = f"{units.count(row.start_step)}–{end}"
    slowdown = units.slowdown(row.slowdown)
    return [row.fault, row.cause, row.where, steps, slowdown, _found(row)]


def _found(row: TruthRow) -> str:
    if row.episodes:
        numbers = ", ".join(str(number) for number in row.episodes)
        return f"episode {numbers}, {_when(row.onset_error or 0)}"
    return "missed" if row.counts else "too small to be one"


def _when(error: int) -> str:
    if not error:
        return "on time"
    return f"{units.plural(abs(error), 'iteration')} {'late' if error > 0 else 'early'}"


def _style(row: TruthRow) -> str:
    if row.episodes:
        return "green"
    return "bold red" if row.counts else "dim"
