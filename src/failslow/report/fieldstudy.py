"""A simulated field study: what was measured beside what was published, and what policies save.

In: a `FieldStudy` of plain values. Out: terminal tables, a plain dict, cards of the page.

      4 nodes            measured     true      published
      jobs hit           43 of 107    43        43
      mean duration      23 min       24 min    24 min
      completion time    +15.3 %      +15.4 %   +15.4 %
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

__all__ = [
    "FieldStudy",
    "PolicyResult",
    "PopulationResult",
    "field_study_card",
    "field_study_document",
    "field_study_view",
]

_COLUMNS = ("measured", "true", "published")
_POLICY = ("policy", "lost", "of it spent", "saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """What a policy would have made of the true faults of a population."""

    policy: str
    lost_s: float
    """Slowness and what is spent..."""
    spent_s: float
    """...of it on pauses and on what it does."""
    saved_pct: float
    """Of what doing nothing loses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationResult:
    """One population. Means over nothing are None."""

    name: str
    jobs: int
    hit: int
    """Jobs the tool calls hit."""
    truly_hit: int
    published_hit: int
    false_alarms: int
    missed: int
    mean_duration_s: float | None
    true_duration_s: float | None
    published_duration_s: float
    jct_increase_pct: float | None
    true_jct_increase_pct: float | None
    published_jct_increase_pct: float
    over_50_share_pct: float | None
    """Of the hit jobs."""
    median_onset_error: float | None
    """Iterations, absolute."""
    faults: int
    """True ones..."""
    culprits_right: int
    """...whose verdict names all that is slow and nothing else, and..."""
    innocents: int
    """...in whose verdict somebody is named that is not slow."""
    causes: Sequence[tuple[str, int, int, int]]
    """(cause, jobs truly hit by it, jobs it is named in, jobs where both agree)."""
    policies: Sequence[PolicyResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStudy:
    """All populations of one seed."""

    seed: int
    populations: Sequence[PopulationResult]


def field_study_document(study: FieldStudy) -> dict[str, Any]:
    """What stands under "simulation" beside the figures of schema failslow.study/1."""
    return {
        "seed": study.seed,
        "populations": [
            {
                "name": p.name,
                "jobs": p.jobs,
                "hit": p.hit,
                "truly_hit": p.truly_hit,
                "published_hit": p.published_hit,
                "false_alarms": p.false_alarms,
                "missed": p.missed,
                "mean_duration_s": p.mean_duration_s,
                "true_duration_s": p.true_duration_s,
                "published_duration_s": p.published_duration_s,
                "jct_increase_pct": p.jct_increase_pct,
                "true_jct_increase_pct": p.true_jct_increase_pct,
                "published_jct_increase_pct": p.published_jct_increase_pct,
                "over_50_share_pct": p.over_50_share_pct,
                "median_onset_error": p.median_onset_error,
                "faults": p.faults,
                "culprits_right": p.culprits_right,
                "innocents": p.innocents,
                "causes": [
                    {"cause": cause, "true": true, "named": named, "agree": agree}
                    for cause, true, named, agree in p.causes
                ],
                "policies": [
                    {
                        "policy": r.policy,
                        "lost_s": r.lost_s,
                        "spent_s": r.spent_s,
                        "saved_pct": r.saved_pct,
                    }
                    for r in p.policies
                ],
            }
            for p in study.populations
        ],
    }


def field_study_view(study: FieldStudy) -> RenderableType:
    """A block of tables for each population."""
    parts: list[RenderableType] = []
    for p in study.populations:
        parts.append(_table((p.name, *_COLUMNS), _figures(p)))
        parts.append(Text())
        causes = [(cause, *map(str, counts)) for cause, *counts in p.causes]
        parts.append(_table(("cause (jobs)", "true", "named", "right"), causes))
        parts.append(Text())
        policies = [(r.policy, *_policy(r)) for r in p.policies]
        parts.append(_table(_POLICY, policies))
        parts.append(Text())
    return Group(*(Padding(part, (0, 0, 0, 2)) for part in parts))


def field_study_card(study: FieldStudy) -> str:
    """The same as cards of the HTML page."""
    return "".join(
        f'<section class="card"><div class="head"><h2>{escape(p.name)}</h2></div>'
        + _html(("", *_COLUMNS), _figures(p))
        + _html(
            ("cause (jobs)", "true", "named", "right"),
            [(cause, *map(str, counts)) for cause, *counts in p.causes],
        )
        + _html(_POLICY, [(r.policy, *_policy(r)) for r in p.policies])
        + "</section>\n"
        for p in study.populations
    )


def _figures(p: PopulationResult) -> list[tuple[str, str, str, str]]:
    def shown(value: float | None, form: Any) -> str:
        return "–" if value is None else str(form(value))

    return [
        ("jobs hit", f"{p.hit} of {units.count(p.jobs)}", f"{p.truly_hit}", f"{p.published_hit}"),
        (
            "mean duration",
            shown(p.mean_duration_s, units.duration),
            shown(p.true_duration_s, units.duration),
            units.duration(p.published_duration_s),
        ),
        (
            "completion time of hit jobs",
            shown(p.jct_increase_pct, units.percent),
            shown(p.true_jct_increase_pct, units.percent),
            units.percent(p.published_jct_increase_pct),
        ),
        ("hit jobs over +50 %", shown(p.over_50_share_pct, "{:.0f} %".format), "", ""),
        ("false alarms, faults missed", f"{p.false_alarms}, {p.missed}", "", ""),
        ("onset error (median)", shown(p.median_onset_error, "{:.0f} iterations".format), "", ""),
        ("culprits of faults right", f"{p.culprits_right} of {p.faults}", "", ""),
        ("innocents named in", f"{p.innocents} faults", "", ""),
    ]


def _policy(result: PolicyResult) -> tuple[str, str, str]:
    return (
        units.duration(result.lost_s),
        units.duration(result.spent_s),
        f"{result.saved_pct:.0f} %",
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", min_width=28 * (not number))
    for row in rows:
        table.add_row(*row)
    return table


def _html(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        first, *rest = (escape(cell) for cell in cells)
        others = "".join(f'<{tag} class="n">{cell}</{tag}>' for cell in rest)
        return f"<tr><{tag}>{first}</{tag}>{others}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", heads)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
