"""A studied campaign of probes -> terminal tables and the JSON document of `failslow study STORE`.

In: a `ProbeStudy`. Out: renderables, a plain dict of schema failslow.probe-study/1.

    jobs             number        hit  causes                  mean duration  completion time
    probe, 1 node       392    6 (2 %)  4 CPU contention,       10 min                 +11.8 %
                                        2 device degradation
    probe, 4 nodes      107  43 (40 %)  42 network congestion,  24 min                 +15.5 %
                                        1 CPU contention

    node    probes  slow  named  spells   chance
    gpu-17      31     9      8       3  < 0.001  drain candidate: 8 network congestion
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.probe.study import NodeHistory, ProbeStudy, SizeRow, StudyJob
from failslow.report import units

__all__ = [
    "causes_text",
    "chance_text",
    "headline",
    "node_remark",
    "probe_study_document",
    "probe_study_view",
    "size_name",
]

_SLOW, _GOOD, _WARN = "bold red", "green", "yellow"
_NODES = 20
"""Shown on a terminal; the document has all."""


def probe_study_view(
    study: ProbeStudy, *, source: str = "", warnings: Sequence[str] = ()
) -> RenderableType:
    """The study's table, then the nodes that were named, the drain candidates first."""
    parts: list[RenderableType] = []
    if source:
        line = Text.assemble((source, "bold"), f" · {headline(study)}")
        line.no_wrap, line.overflow = True, "ignore"
        parts.append(line)
    parts.append(Padding(_sizes(study), (0, 0, 0, 2 * bool(source))))
    named = [node for node in study.nodes if node.named]
    if named:
        parts += [Text(), Padding(_nodes(named[:_NODES]), (0, 0, 0, 2 * bool(source)))]
    if len(named) > _NODES:
        parts.append(Text(f"  and {units.plural(len(named) - _NODES, 'node')} more", style="dim"))
    parts += [Text.assemble(("  warning: ", _WARN), warning) for warning in warnings]
    return Group(*parts)


def headline(study: ProbeStudy) -> str:
    """One phrase: "499 probes of 12 nodes, 49 hit; drain candidates: gpu-17"."""
    total = study.total
    if not total.jobs:
        return "no probe has measured anything yet"
    text = f"{units.plural(total.jobs, 'probe')} of {units.plural(len(study.nodes), 'node')}"
    text += f", {units.count(total.hit)} hit"
    if study.drain_candidates:
        names = study.drain_candidates
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        text += f"; drain candidate{'s' * (len(names) > 1)}: {shown}"
    return text


def size_name(row: SizeRow) -> str:
    """What the study calls such jobs."""
    return "all" if row.nodes is None else f"probe, {units.plural(row.nodes, 'node')}"


def causes_text(causes: Sequence[tuple[str, int]]) -> list[str]:
    """ "4 CPU contention", "2 device degradation"."""
    return [f"{units.count(number)} {cause}" for cause, number in causes]


def chance_text(chance: float | None) -> str:
    """A likelihood: "0.03", "< 0.001"; "–" without one."""
    if chance is None:
        return "–"
    return "< 0.001" if chance < 0.001 else f"{chance:.2g}"


def node_remark(node: NodeHistory) -> str:
    """What to do about it, and why."""
    causes = ", ".join(causes_text(node.causes))
    if node.is_drain_candidate:
        return f"drain candidate: {causes}"
    if not node.named:
        return "never named"
    return f"may be chance: {causes}" if node.chance is not None else causes


def _sizes(study: ProbeStudy) -> Table:
    table = _table()
    table.add_column("jobs", no_wrap=True)
    table.add_column("number", justify="right", no_wrap=True)
    table.add_column("hit", justify="right", no_wrap=True)
    table.add_column("causes")
    table.add_column("mean duration", no_wrap=True)
    table.add_column("completion time", justify="right", no_wrap=True)
    rows = [*study.sizes, study.total] if len(study.sizes) > 1 else study.sizes
    for row in rows:
        hit = "–" if row.hit_pct is None else f"{units.count(row.hit)} ({row.hit_pct:.0f} %)"
        table.add_row(
            size_name(row),
            units.count(row.jobs),
            Text(hit, style=_SLOW if row.hit else _GOOD),
            "\n".join(causes_text(row.causes)),
            "" if row.mean_duration_s is None else units.duration(row.mean_duration_s),
            "" if row.mean_jct_increase_pct is None else units.percent(row.mean_jct_increase_pct),
        )
        for text in _attempts(row):
            table.add_row("", "", "", Text(text, style="dim"), "", "")
    return table


def _attempts(row: SizeRow) -> Iterator[str]:
    if row.nodes is not None and (row.preempted or row.failed):
        told = [(row.preempted, "preempted"), (row.failed, "failed")]
        said = ", ".join(f"{units.count(number)} {what}" for number, what in told if number)
        yield f"({said})"


def _nodes(nodes: Sequence[NodeHistory]) -> Table:
    table = _table()
    table.add_column("node", overflow="fold", min_width=10)
    for name in ("probes", "slow", "named", "spells", "chance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for node in nodes:
        style = _SLOW if node.is_drain_candidate else ""
        table.add_row(
            Text(node.node, style=style),
            units.count(node.probes),
            units.count(node.slow),
            units.count(node.named),
            units.count(node.spells),
            chance_text(node.chance),
            Text(node_remark(node), style=style or "dim"),
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def probe_study_document(
    study: ProbeStudy, *, source: str, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Schema failslow.probe-study/1.

    source            the store
    sizes, total      per size of probes, and over all: nodes (null: all), jobs, hit, hit_pct,
                      causes {cause: jobs}, mean_duration_s, mean_jct_increase_pct,
                      worst_slowdown, preempted, failed; means over hit jobs, null without any
    nodes             node, probes, slow, named, spells, causes, worst_slowdown, last_named_t,
                      chance, drain_candidate; candidates first
    drain_candidates  their names
    jobs              one row a probe that measured, in the order they began
    warnings          what was left out
    """
    return {
        "schema": "failslow.probe-study/1",
        "source": source,
        "sizes": [_row(row) for row in study.sizes],
        "total": _row(study.total),
        "nodes": [_node(node) for node in study.nodes],
        "drain_candidates": list(study.drain_candidates),
        "jobs": [_job(job) for job in study.jobs],
        "warnings": list(warnings),
    }


def _row(row: SizeRow) -> dict[str, Any]:
    return {
        "nodes": row.nodes,
        "jobs": row.jobs,
        "hit": row.hit,
        "hit_pct": row.hit_pct,
        "causes": dict(row.causes),
        "mean_duration_s": row.mean_duration_s,
        "mean_jct_increase_pct": row.mean_jct_increase_pct,
        "worst_slowdown": row.worst_slowdown,
        "preempted": row.preempted,
        "failed": row.failed,
    }


def _node(node: NodeHistory) -> dict[str, Any]:
    return {
        "node": node.node,
        "probes": node.probes,
        "slow": node.slow,
        "named": node.named,
        "spells": node.spells,
        "causes": dict(node.causes),
        "worst_slowdown": node.worst_slowdown,
        "last_named_t": node.last_named_t,
        "chance": node.chance,
        "drain_candidate": node.is_drain_candidate,
    }


def _job(job: StudyJob) -> dict[str, Any]:
    result = job.result
    return {
        "probe": job.probe,
        "attempt": job.attempt,
        "partial": job.partial,
        "hit": job.hit,
        "nodes": list(result.nodes),
        "begin_t": result.begin_t,
        "end_t": result.end_t,
        "iterations": result.iterations,
        "result": result.result,
        "cause": result.cause,
        "culprits": list(result.culprits),
        "culprit_nodes": list(result.culprit_nodes),
        "slowdown": result.slowdown,
        "slow_s": result.slow_s,
        "jct_increase_pct": 100.0 * result.jct_increase_share,
    }
