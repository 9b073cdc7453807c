"""A `LiveJob` -> the live table, and the document of `failslow status --json`.

In: `LiveJob`. Out: what `console.print` takes, or a plain dict; nothing is printed here.

    pretrain7 · fail-slow ×1.39 · step 812 · now 794 ms, healthy 571 ms
      since 2026-06-26 15:10:26 UTC (step 640, 2 min 17 s): rank 3 (compute ×2.30)
      1 fail-slow so far, 28.1 s lost
      monitoring: healthy
      rank  node    state  last    healthy  ratio  compute  note
         3  gpu-17  slow   794 ms  571 ms   ×1.39  612 ms   compute ×2.30
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.records import Culprit
from failslow.report import units
from failslow.report.livejob import LiveJob, LiveWorker, Phase, Trouble, WorkerState

__all__ = ["live_document", "live_view", "waiting_view"]

_PHASES: dict[Phase, tuple[str, str]] = {
    "waiting": ("no iteration seen yet", "yellow"),
    "learning": ("learning what is healthy", "yellow"),
    "healthy": ("healthy", "green"),
    "suspected": ("suspected", "yellow"),
    "slow": ("fail-slow", "bold red"),
    "silent": ("silent", "bold magenta"),
    "stalled": ("no iteration ends", "bold red"),
    "ended": ("ended", "dim"),
}
_STATES: dict[WorkerState, str] = {
    "slow": "bold red",
    "suspected": "yellow",
    "blind": "magenta",
    "gone": "dim",
    "ok": "green",
}
_WORST = tuple(_STATES)
_MONITORING = {"healthy": "green", "impaired": "yellow", "blind": "bold magenta"}
_TROUBLES_SHOWN = 4
_STALE_S = 5.0


def live_view(job: LiveJob, *, max_rows: int | None = None) -> RenderableType:
    """The job's lines and a row a worker.

    max_rows: with more workers only the ones worst off are shown, and how many are not.
    """
    parts: list[RenderableType] = [
        Padding(line, (0, 0, 0, 2 * depth)) for depth, line in _lines(job)
    ]
    if job.workers:
        parts.append(Padding(_table(job, max_rows), (1, 0, 0, 2)))
        hidden = [] if max_rows is None else _by_need(job)[max_rows:]
        if hidden:
            worst = min(_WORST.index(worker.state) for worker in hidden)
            rest = "all ok" if _WORST[worst] == "ok" else f"none worse than {_WORST[worst]}"
            text = f"and {units.plural(len(hidden), 'worker')} more, {rest}"
            parts.append(Padding(Text(text, style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def waiting_view(where: str) -> RenderableType:
    """What is shown before there is a journal."""
    return Text.assemble(
        (f"waiting for a watched job in {where}", "yellow"),
        "\n  start one with FAILSLOW=1 or failslow run; if it does not appear: failslow doctor",
    )


def live_document(job: LiveJob, *, folder: str) -> dict[str, Any]:
    """Schema failslow.status/1: keys are stable, keys may be added.

    phase       waiting | learning | healthy | suspected | slow | stalled | silent | ended
    slow        {since_t, since_step, slowdown, confirmed, culprits} while suspected or slow
    monitoring  {state: healthy | impaired | blind, troubles}
    workers     rank, node, state (ok | suspected | slow | blind | gone), step, last_t,
                iteration_s, healthy_iteration_s, ratio, compute_s, suspicion
    """
    slow = None
    if job.slow_since_t is not None:
        slow = {
            "since_t": job.slow_since_t,
            "since_step": job.slow_since_step,
            "slowdown": job.slowdown,
            "confirmed": job.confirmed,
            "culprits": [_culprit(culprit) for culprit in job.culprits],
        }
    return {
        "schema": "failslow.status/1",
        "job": job.name,
        "dir": folder,
        "t": job.now_s,
        "last_t": job.last_t,
        "phase": job.phase,
        "step": job.step,
        "iterations": job.iterations,
        "iteration_s": job.iteration_s,
        "healthy_iteration_s": job.healthy_s,
        "slow": slow,
        "episodes": job.episodes,
        "lost_s": job.lost_s,
        "monitoring": {
            "state": job.monitoring,
            "troubles": [
                {
                    "what": trouble.what,
                    "message": trouble.message,
                    "since_t": trouble.since_t,
                    "node": trouble.node,
                    "rank": trouble.rank,
                    "ranks": list(trouble.ranks),
                }
                for trouble in job.troubles
            ],
        },
        "workers": [_worker(worker) for worker in job.workers],
    }


def _worker(worker: LiveWorker) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "node": worker.node,
        "state": worker.state,
        "step": worker.step,
        "last_t": worker.last_t,
        "iteration_s": worker.iteration_s,
        "healthy_iteration_s": worker.healthy_s,
        "ratio": worker.ratio,
        "compute_s": worker.compute_s,
        "suspicion": None if worker.suspicion is None else _culprit(worker.suspicion),
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    return {"rank": culprit.rank, "what": culprit.what, "slowdown": culprit.slowdown}


def _lines(job: LiveJob) -> Iterator[tuple[int, Text]]:
    yield 0, _headline(job)
    if job.slow_since_t is not None:
        yield 1, _since(job, job.slow_since_t)
    if job.episodes:
        lost = (
            f"{units.plural(job.episodes, 'fail-slow')} so far, {units.duration(job.lost_s)} lost"
        )
        yield 1, Text(lost)
    style = _MONITORING[job.monitoring]
    if job.phase != "ended":
        yield 1, Text.assemble("monitoring: ", (job.monitoring, style))
    for trouble in job.troubles[:_TROUBLES_SHOWN]:
        yield 2, Text(_trouble(trouble, job.now_s), style=style)
    more = len(job.troubles) - _TROUBLES_SHOWN
    if more > 0:
        yield 2, Text(f"and {more} more", style=style)


def _headline(job: LiveJob) -> Text:
    phase, style = _PHASES[job.phase]
    if job.slow_since_t is not None and job.phase in ("slow", "suspected"):
        phase += f" {units.slowdown(job.slowdown)}"
    line = Text.assemble((job.name, "bold"), " · ", (phase, style))
    if job.step is not None:
        line.append(f" · step {units.count(job.step)}")
        if job.iterations != job.step + 1:
            line.append(f", {units.plural(job.iterations, 'iteration')} watched")
    times = []
    if job.iteration_s is not None:
        when = "last" if job.phase in ("ended", "silent") else "now"
        times.append(f"{when} {units.duration(job.iteration_s)}")
    if job.healthy_s is not None:
        times.append(f"healthy {units.duration(job.healthy_s)}")
    if times:
        line.append(f" · {', '.join(times)}")
    return line


def _since(job: LiveJob, since_t: float) -> Text:
    ago = units.duration(max(0.0, (job.last_t or since_t) - since_t))
    text = f"since {units.clock(since_t)} UTC (step {units.count(job.slow_since_step or 0)}, {ago})"
    worst = sorted(job.culprits, key=lambda c: -c.slowdown)
    named = ", ".join(f"rank {c.rank} ({_blame(c)})" for c in worst[:4])
    more = f" and {len(worst) - 4} more" if len(worst) > 4 else ""
    return Text(f"{text}: {named}{more}" if named else f"{text}: no worker stands out")


def _blame(culprit: Culprit) -> str:
    return f"{culprit.what} {units.slowdown(culprit.slowdown)}"


def _trouble(trouble: Trouble, now_s: float) -> str:
    return f"{trouble.message} ({units.duration(max(0.0, now_s - trouble.since_t))})"


def _by_need(job: LiveJob) -> list[LiveWorker]:
    """Worst state first, then the slowest."""
    return sorted(job.workers, key=lambda w: (_WORST.index(w.state), -(w.ratio or 0.0), w.rank))


def _table(job: LiveJob, max_rows: int | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, right in (
        ("rank", True),
        ("node", False),
        ("state", False),
        ("last", True),
        ("healthy", True),
        ("ratio", True),
        ("compute", True),
        ("note", False),
    ):
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=name != "note",
            overflow="ellipsis" if name == "node" else "fold",
        )
    few = max_rows is None or len(job.workers) <= max_rows
    for worker in job.workers if few else _by_need(job)[:max_rows]:
        style = _STATES[worker.state]
        table.add_row(
            str(worker.rank),
            worker.node,
            Text(worker.state, style=style),
            units.duration(worker.iteration_s),
            _time(worker.healthy_s),
            Text("" if worker.ratio is None else units.slowdown(worker.ratio), style=style),
            _time(worker.compute_s),
            _note(worker, job),
        )
    return table


def _time(seconds: float | None) -> str:
    return "" if seconds is None else units.duration(seconds)


def _note(worker: LiveWorker, job: LiveJob) -> str:
    notes = []
    if worker.suspicion is not None:
        notes.append(_blame(worker.suspicion))
    silent_s = job.now_s - worker.last_t
    if worker.state in ("blind", "gone") and silent_s > _STALE_S:
        notes.append(f"last seen {units.duration(silent_s)} ago")
    return ", ".join(notes)
