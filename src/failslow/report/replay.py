"""Policies compared on recorded faults -> a terminal table, and the document of `replay --json`.

In: `ReplayedJob`s. Out: what `console.print` takes, or a plain dict; nothing is printed here.

    run-7/journal.jsonl · 3 faults, 41 min 10 s slow
      policy        lost         spent   together       of clairvoyant
      wait          12 min 4 s   0 s     12 min 4 s     ×5.85
      ladder        1 min 52 s   32 s    2 min 24 s     ×1.16
      clairvoyant   1 min 20 s   44 s    2 min 4 s      ×1.00
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.decide import Incident, Replayed
from failslow.report import units

__all__ = ["ReplayedJob", "replay_document", "replay_view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """One journal's faults, and what each policy made of them."""

    source: str
    incidents: tuple[Incident, ...]
    results: Mapping[str, Sequence[Replayed]]
    """By policy: one for each incident, in order."""


def replay_document(jobs: Sequence[ReplayedJob], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Schema failslow.replay/1.

    Seconds throughout, `of_best` the ratio to the clairvoyant: below 1 where
    changing the level in time, as what happened did, was better than any single one."""
    return {
        "schema": "failslow.replay/1",
        "settings": dict(settings),
        "totals": _totals(jobs),
        "jobs": [
            {
                "source": job.source,
                "faults": [
                    _fault(incident, {name: job.results[name][at] for name in job.results})
                    for at, incident in enumerate(job.incidents)
                ],
            }
            for job in jobs
        ],
    }


def replay_view(jobs: Sequence[ReplayedJob], *, decisions: bool) -> RenderableType:
    """One table over all journals; with `decisions` also what each policy did about each fault."""
    faults = [incident for job in jobs for incident in job.incidents]
    slow_s = sum(incident.duration_s for incident in faults)
    names = ", ".join(job.source for job in jobs[:3]) + (", …" if len(jobs) > 3 else "")
    head = f" · {units.plural(len(faults), 'fault')}, {units.duration(slow_s)} slow"
    parts: list[RenderableType] = [Text.assemble((names, "bold"), head)]
    if not faults:
        return Group(*parts)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("policy")
    for title in ("lost", "spent", "together", "of clairvoyant"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, total in _totals(jobs).items():
        times = [units.duration(total[key] or 0.0) for key in ("lost_s", "spent_s", "total_s")]
        ratio = total["of_best"]
        table.add_row(name, *times, "" if ratio is None else units.slowdown(ratio))
    parts.append(Padding(table, (0, 0, 0, 2)))
    if decisions:
        for job in jobs:
            for at, incident in enumerate(job.incidents):
                parts += _story(incident, {name: job.results[name][at] for name in job.results})
    return Group(*parts)


def _story(incident: Incident, results: Mapping[str, Replayed]) -> list[RenderableType]:
    length = units.duration(incident.duration_s) + ("" if incident.ended else " at least")
    worst = max(stretch.slowdown for stretch in incident.stretches)
    who = ", ".join(_culprits(incident)) or "nobody named"
    title = f"{incident.id} · {length} · {units.slowdown(worst)} · {who}"
    parts: list[RenderableType] = [Text(), Text(title, style="bold")]
    for name, result in results.items():
        for after_s, decision in result.decisions:
            line = f"  {name} after {units.duration(after_s)}: {decision.level}: {decision.reason}"
            parts.append(Text(line))
    return parts


def _fault(incident: Incident, results: Mapping[str, Replayed]) -> dict[str, Any]:
    return {
        "id": incident.id,
        "start_t": incident.start_t,
        "duration_s": incident.duration_s,
        "ended": incident.ended,
        "slowdown": max(stretch.slowdown for stretch in incident.stretches),
        "culprits": _culprits(incident),
        "policies": {
            name: {
                "lost_s": result.lost_s,
                "spent_s": result.spent_s,
                "total_s": result.total_s,
                "decisions": [
                    {
                        "after_s": after_s,
                        "action": decision.action,
                        "level": decision.level,
                        "lost_s": decision.lost_s,
                        "threshold_s": decision.threshold_s,
                        "trust_factor": decision.trust_factor,
                        "reason": decision.reason,
                    }
                    for after_s, decision in result.decisions
                ],
            }
            for name, result in results.items()
        },
    }


def _culprits(incident: Incident) -> list[str]:
    found = (f.key for stretch in incident.stretches for f in stretch.findings)
    return list(dict.fromkeys(found))


def _totals(jobs: Sequence[ReplayedJob]) -> dict[str, dict[str, float | None]]:
    totals: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for job in jobs for name in job.results):
        results = [result for job in jobs for result in job.results.get(name, ())]
        totals[name] = {
            "lost_s": sum(result.lost_s for result in results),
            "spent_s": sum(result.spent_s for result in results),
            "total_s": sum(result.total_s for result in results),
        }
    best_s = totals.get("clairvoyant", {}).get("total_s")
    for total in totals.values():
        total["of_best"] = total["total_s"] / best_s if best_s else None
    return totals
