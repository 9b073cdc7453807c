"""A `LiveJob` -> the live table, and the document of `failslow status --json`.

In: `LiveJob`. Out: what `console.print` takes, or a plain dict; nothing is printed here.

    pretrain7 · fail-slow ×1.39 · step 812 · now 794 ms, healthy 571 ms
      since 2026-06-26 15:10:26 UTC (step 640, 2 min 17 s): rank 3 (compute ×2.30)
      verdict: device of rank 3 (gpu-17, GPU 3) ×1.52: device degradation (thermal)
      S2 in force since 15:11:02 UTC: micro-batches 7 9 8 8 (1.21 s lost ≥ threshold 100 ms)
      1 fail-slow so far, 28.1 s lost
      monitoring: healthy
      rank  node    state                         last    healthy  ratio  compute  note
         3  gpu-17  slow: device ×1.52 (verdict)  794 ms  571 ms   ×1.39  612 ms
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.records import Culprit, Finding, Suspect
from failslow.report import units, words
from failslow.report.livejob import LiveJob, LiveWorker, Phase, Trouble, WorkerState

__all__ = ["inquiry_lines", "live_document", "live_view", "waiting_view"]

_PHASES: dict[Phase, tuple[str, str]] = {
    "waiting": ("no iteration seen yet", "yellow"),
    "learning": ("learning what is healthy", "yellow"),
    "healthy": ("healthy", "green"),
    "suspected": ("suspected", "yellow"),
    "slow": ("fail-slow", "bold red"),
    "silent": ("silent", "bold magenta"),
    "between": ("no training iteration, collectives go on", "yellow"),
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
_NAMED = 3
"""Suspects, and findings, at most."""
_STALE_S = 5.0
_DECISION = (
    "action", "level", "from_level", "mode", "apply", "lost_s", "threshold_s", "reason", "plan"
)  # fmt: skip
_OUTCOME = ("level", "ok", "cost_s", "slowdown", "error")


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

    phase       waiting | learning | healthy | suspected | slow | between | stalled | silent | ended
    slow        {since_t, since_step, slowdown, confirmed, culprits} while suspected or slow
    monitoring  {state: healthy | impaired | blind, troubles}
    workers     rank, node, state (ok | suspected | slow | blind | gone), step, last_t,
                iteration_s, healthy_iteration_s, ratio, compute_s, suspicion, suspect, finding
    suspects    [{what, ranks, peer_ranks, label, slowdown, extra_s, score, note}] of the profile
    verdict     {t, step, pause_s, note, findings: [{component, what, ranks, peer_ranks, host,
                peer_host, device, nic, slowdown, cause, evidence}]} of what is on now, or null
    level       in force: S1 | S2 | S3 | S4
    decision    {t, action, level, from_level, mode, apply, lost_s, threshold_s, reason, plan}
    outcome     {level, ok, cost_s, slowdown, error} of the last plan, or null
    layout      the trainer's facts about its job: {pp, dp, tp, microbatches, …}, or null
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
        **_inquiry(job),
    }


def _inquiry(job: LiveJob) -> dict[str, Any]:
    found = job.inquiry
    verdict, decision, outcome = None, None, None
    if found.verdict is not None:
        verdict = {
            "t": found.verdict_t,
            "step": found.verdict.step,
            "pause_s": found.verdict.pause_s,
            "note": found.verdict.note,
            "findings": [_finding(finding) for finding in found.findings.values()],
        }
    if found.decision is not None:
        plain = asdict(found.decision)
        decision = {"t": found.decision_t, **{name: plain[name] for name in _DECISION}}
    if found.outcome is not None:
        plain = asdict(found.outcome)
        outcome = {name: plain[name] for name in _OUTCOME}
    return {
        "suspects": [_suspect(suspect) for suspect in found.suspects],
        "verdict": verdict,
        "level": found.level,
        "decision": decision,
        "outcome": outcome,
        "layout": None if found.facts is None else asdict(found.facts),
    }


def _suspect(suspect: Suspect) -> dict[str, Any]:
    return {name: value for name, value in asdict(suspect).items() if name != "measurements"}


def _finding(finding: Finding) -> dict[str, Any]:
    plain = asdict(finding)
    del plain["measurements"]
    return {"component": finding.key, **plain}


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
        "suspect": None if worker.suspect is None else _suspect(worker.suspect),
        "finding": None if worker.finding is None else worker.finding.key,
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    return {"rank": culprit.rank, "what": culprit.what, "slowdown": culprit.slowdown}


def _lines(job: LiveJob) -> Iterator[tuple[int, Text]]:
    if job.last_t is None:  # so nobody can say that it is well watched
        yield 0, Text.assemble((job.name, "bold"), " · ", ("nothing was written yet", "yellow"))
        yield 1, Text("a watched job writes within seconds; if it does not: failslow doctor")
        return
    yield 0, _headline(job)
    if job.slow_since_t is not None:
        yield 1, _since(job, job.slow_since_t)
    if job.phase != "ended":
        yield from ((1, line) for line in inquiry_lines(job))
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


def inquiry_lines(job: LiveJob) -> Iterator[Text]:
    """Suspects until there is a verdict; the verdict; the level in force; the last decision."""
    found = job.inquiry
    if found.facts is not None:
        yield Text(f"layout: {words.facts_text(found.facts)}", style="dim")
    for finding in list(found.findings.values())[:_NAMED]:
        yield Text(f"verdict: {words.finding_text(finding)}", style="bold red")
    if len(found.findings) > _NAMED:
        yield Text(f"verdict: {len(found.findings) - _NAMED} more", style="bold red")
    if found.verdict is not None and not found.verdict.findings:
        yield Text(f"verdict: {words.verdict_text(found.verdict)}")
    for suspect in found.open_suspects[:_NAMED]:
        ratio = units.slowdown(suspect.slowdown)
        text = f"suspect: {words.suspect_text(suspect)} {ratio}, score {suspect.score:.2f}"
        yield Text(text, style="yellow")
    if found.diagnosis is not None and found.diagnosis.everyone and not found.findings:
        yield Text(words.diagnosis_text(found.diagnosis), style="yellow")
    if found.level != "S1" or found.decision is not None:
        line = Text.assemble((f"{found.level} in force", "" if found.level == "S1" else "green"))
        if found.decision is not None:
            when = f"{units.clock(found.decision_t)[11:]} UTC"
            what = words.decision_text(found.decision)
            why = words.arithmetic_text(found.decision)
            line.append(f" · decided {when}: {what} ({why})")
        yield line
    if found.outcome is not None and not found.outcome.ok:
        yield Text(words.outcome_text(found.outcome), style="yellow")


def _since(job: LiveJob, since_t: float) -> Text:
    ago = units.duration(max(0.0, (job.last_t or since_t) - since_t))
    text = f"since {units.clock(since_t)} UTC (step {units.count(job.slow_since_step or 0)}, {ago})"
    worst = sorted(job.culprits, key=lambda c: -c.slowdown)
    named = ", ".join(f"rank {c.rank} ({_blame(c)})" for c in worst[:4])
    more = f" and {len(worst) - 4} more" if len(worst) > 4 else ""
    if not named and (job.inquiry.findings or job.inquiry.open_suspects):
        return Text(text)  # the lines below say who
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
            no_wrap=name not in ("state", "note"),
            min_width=12 if name == "note" and any(_note(w, job) for w in job.workers) else None,
            overflow="ellipsis" if name == "node" else "fold",
        )
    few = max_rows is None or len(job.workers) <= max_rows
    for worker in job.workers if few else _by_need(job)[:max_rows]:
        style = _STATES[worker.state]
        table.add_row(
            str(worker.rank),
            worker.node,
            Text(_state(worker), style=style),
            units.duration(worker.iteration_s),
            _time(worker.healthy_s),
            Text("" if worker.ratio is None else units.slowdown(worker.ratio), style=style),
            _time(worker.compute_s),
            _note(worker, job),
        )
    return table


def _time(seconds: float | None) -> str:
    return "" if seconds is None else units.duration(seconds)


def _state(worker: LiveWorker) -> str:
    if worker.state == "slow" and worker.finding is not None:
        ratio = units.slowdown(worker.finding.slowdown)
        return f"slow: {worker.finding.what} {ratio} (verdict)"
    return "suspect" if worker.state == "suspected" else worker.state


def _note(worker: LiveWorker, job: LiveJob) -> str:
    notes = []
    if worker.suspicion is not None and worker.finding is None:
        notes.append(_blame(worker.suspicion))
    elif worker.suspect is not None and worker.finding is None:
        what = "own time" if worker.suspect.what == "compute" else worker.suspect.what
        notes.append(f"{what} {units.slowdown(worker.suspect.slowdown)}")
    silent_s = job.now_s - worker.last_t
    if worker.state in ("blind", "gone") and silent_s > _STALE_S:
        notes.append(f"last seen {units.duration(silent_s)} ago")
    return ", ".join(notes)
