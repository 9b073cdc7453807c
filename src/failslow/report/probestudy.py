"""A studied campaign of probes -> terminal tables and the JSON document of `failslow study STORE`.

In: a `ProbeStudy`. Out: renderables, a plain dict of schema failslow.probe-study/1.

    jobs             number        hit  causes                  mean duration  completion time
    probe, 1 node       392    6 (2 %)  4 CPU contention,       10 min                 +11.8 %
                                        2 device degradation
    probe, 4 nodes      107  43 (40 %)  42 network congestion,  24 min                 +15.5 %
                                        1 CPU contention

    node    probes  slow  named  spells   chance
    gpu-17      31     9      8       3  < 0.001  drain candidate: 8 network congestion

Where a terminal is too narrow for the last column of texts, they follow below the table:

    probe, 1 node: 4 CPU contention, 2 device degradation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
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
_REMARK = 16
"""Columns that texts beside numbers need: "drain candidate:"."""
_GAP = 2
"""Columns between two of a table."""
_ANY_WIDTH = 10_000


def probe_study_view(
    study: ProbeStudy, *, source: str = "", warnings: Sequence[str] = ()
) -> RenderableType:
    """The study's table, then the nodes that were named, the drain candidates first."""
    parts: list[RenderableType] = []
    indent = 2 * bool(source)
    if source:
        line = Text.assemble((source, "bold"), f" · {headline(study)}")
        line.no_wrap, line.overflow = True, "ignore"
        parts.append(line)
    parts.append(Padding(_Fitting(_sizes(study), _sizes_narrow(study)), (0, 0, 0, indent)))
    named = [node for node in study.nodes if node.named]
    if named:
        shown = named[:_NODES]
        table = _Fitting(_nodes(shown), _nodes_narrow(shown))
        parts += [Text(), Padding(table, (0, 0, 0, indent))]
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


class _Fitting:
    """The first of two where no word of it is cut, else the second."""

    def __init__(self, wide: Table, narrow: RenderableType) -> None:
        self._wide, self._narrow = wide, narrow

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        # not as the table measures itself: that takes columns that do not wrap for ones that do
        free = options.update(width=_ANY_WIDTH)
        least = _GAP * (len(self._wide.columns) - 1)
        for column in self._wide.columns:
            cells = [Measurement.get(console, free, c) for c in (column.header, *column.cells)]
            needed = (cell.maximum if column.no_wrap else cell.minimum for cell in cells)
            least += max(column.min_width or 0, *needed)
        yield self._wide if least <= options.max_width else self._narrow


def _sizes(study: ProbeStudy) -> Table:
    table = _table()
    table.add_column("jobs", no_wrap=True)
    table.add_column("number", justify="right", no_wrap=True)
    table.add_column("hit", justify="right", no_wrap=True)
    table.add_column("causes", min_width=_REMARK)
    table.add_column("mean duration", no_wrap=True)
    table.add_column("completion time", justify="right", no_wrap=True)
    for row in _rows_shown(study):
        *left, hit, duration, increase = _cells(row)
        table.add_row(*left, hit, "\n".join(causes_text(row.causes)), duration, increase)
        for text in _attempts(row):
            table.add_row("", "", "", Text(text, style="dim"), "", "")
    return table


def _sizes_narrow(study: ProbeStudy) -> Group:
    table = _table()
    table.add_column("jobs", min_width=8)
    table.add_column("number", justify="right", no_wrap=True)
    table.add_column("hit", justify="right", no_wrap=True)
    table.add_column("mean\nduration", no_wrap=True)
    table.add_column("completion\ntime", justify="right", no_wrap=True)
    lines = []
    for row in _rows_shown(study):
        table.add_row(*_cells(row))
        told = " ".join(filter(None, (", ".join(causes_text(row.causes)), *_attempts(row))))
        if told:
            lines.append(Text.assemble(f"{size_name(row)}: ", (told, "" if row.causes else "dim")))
    return Group(table, *([Text(), *lines] if lines else []))


def _rows_shown(study: ProbeStudy) -> Sequence[SizeRow]:
    return [*study.sizes, study.total] if len(study.sizes) > 1 else study.sizes


def _cells(row: SizeRow) -> tuple[str, str, Text, str, str]:
    """Jobs, number, hit, mean duration, completion time."""
    hit = "–" if row.hit_pct is None else f"{units.count(row.hit)} ({row.hit_pct:.0f} %)"
    return (
        size_name(row),
        units.count(row.jobs),
        Text(hit, style=_SLOW if row.hit else _GOOD),
        "" if row.mean_duration_s is None else units.duration(row.mean_duration_s),
        "" if row.mean_jct_increase_pct is None else units.percent(row.mean_jct_increase_pct),
    )


def _attempts(row: SizeRow) -> Iterator[str]:
    if row.nodes is not None and (row.preempted or row.failed):
        told = [(row.preempted, "preempted"), (row.failed, "failed")]
        said = ", ".join(f"{units.count(number)} {what}" for number, what in told if number)
        yield f"({said})"


def _nodes(nodes: Sequence[NodeHistory]) -> Table:
    table = _node_columns()
    table.add_column("", min_width=_REMARK)
    for node in nodes:
        style = _node_style(node)
        table.add_row(*_node_cells(node), Text(node_remark(node), style=style or "dim"))
    return table


def _nodes_narrow(nodes: Sequence[NodeHistory]) -> Group:
    table = _node_columns()
    lines = [Text()]
    for node in nodes:
        table.add_row(*_node_cells(node))
        lines.append(Text(f"{node.node}: {node_remark(node)}", _node_style(node) or "dim"))
    return Group(table, *lines)


def _node_columns() -> Table:
    table = _table()
    table.add_column("node", overflow="fold", min_width=10)
    for name in ("probes", "slow", "named", "spells", "chance"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _node_style(node: NodeHistory) -> str:
    return _SLOW if node.is_drain_candidate else ""


def _node_cells(node: NodeHistory) -> tuple[Text | str, ...]:
    return (
        Text(node.node, style=_node_style(node)),
        units.count(node.probes),
        units.count(node.slow),
        units.count(node.named),
        units.count(node.spells),
        chance_text(node.chance),
    )


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")


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
