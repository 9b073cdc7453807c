"""The document of `failslow report --json`, schema `failslow.report/1`.

In: a `Story`. Out: a plain dict. Keys are stable, keys may be added; what the journal does not
tell is null, "" or an empty list. `t` and `…_t` are epoch seconds.

    schema, job, source
    begin_t, end_t, ended   first and last entry; whether the controller said that the job ended
    mode                    observe | advise | auto | "" unknown
    workers                 [{rank, node, iterations, last_t, compute_s}]
    layout                  {pp, dp, tp, microbatches, …fields of JobFacts} or null
    iterations, first_step, last_step, healthy_iteration_s, wall_s, lost_s, jct_increase_pct,
    spikes, spike_lost_s, paused_s, spent_s     as in failslow.analysis/1; paused for validation,
                                                spent on actions
    episodes    one an id, fail-slows and workload changes, in order:
      id, kind, start_t, end_t, ongoing, start_step, end_step, slowdown, peak_slowdown, baseline_s,
      iteration_s, lost_s, confidence, note, levels [{start_step, slowdown}],
      culprits [{rank, what, slowdown}]     as the series of the workers tell
      suspects    [{t, what, ranks, peer_ranks, label, slowdown, extra_s, score, note,
                    measurements}] of the last diagnosis
      findings    [{what, component, ranks, peer_ranks, host, peer_host, device, nic, slowdown,
                    cause, evidence, measurements [{what, value, unit, expected}]}]
      verdicts    [{t, step, pause_s, findings: components, note}]
      decisions   [{t, action, level, from_level, mode, apply, lost_s, threshold_s, spent_s,
                    trust_factor, reason, culprits, plan, options}]
      outcomes    [{t, level, ok, cost_s, slowdown, error, refused}]
      restarts    [{t, id, evict, why, save_s, starts, back_t, lost_s}] of level S4; back_t, lost_s
                  null: not seen to train again
      commands    [{t, run, commands, error}] a scheduler was told (run), or might be
      removed     {share, healthy_s, slow_s, after_s, iterations} or null: the part of the
                  slowdown that the actions took away, in wall time per iteration
    suspicions  [{id, suspected_t, cleared_t, suspects}] that became no episode
    timeline    [{t, until_t, kind, text}]  kind: suspicion, cleared, diagnosis, verdict, pause,
                                            decision, action, failed, watch
    level_in_force  [{t, level}] at each change; S1 before
    profiles    [{t, why, iteration_s, iterations, columns, ranks, nodes, values}]
                values: {own|healthy|late|transfer: [[…a column] a rank]}
    start       who is slow from the start: {suspects, findings, everyone, imbalance}, or null
    pauses      [{t, episode, why, ok, reason, step, pause_s, links: [{source, target, size_bytes,
                seconds, bytes_per_s, ratio, against, measured, ranks}]}]
                why: reference | suspects | ""; ratio: its time over the same link's of the
                reference, without one over the median link's
    telemetry   [{t, node, since_t, until_t, episode, series: [{name, rank, unit, before, during,
                  score}]}]
    monitoring  {entries, skipped, unknown {kind: entries}, blind_s,
                 troubles [{what, message, node, rank, since_t, until_t}]}
    warnings    [text]
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from failslow.records import Finding, Suspect
from failslow.report.story.evidence import node_of, panels
from failslow.report.story.links import Pause
from failslow.report.story.model import Case, Story
from failslow.report.story.profiles import ProfileRound

__all__ = ["story_document"]

_PANELS = 12


def story_document(story: Story) -> dict[str, Any]:
    """Schema failslow.report/1."""
    a = story.analysis
    return {
        "schema": "failslow.report/1",
        "job": story.name,
        "source": story.source,
        "begin_t": story.begin_t,
        "end_t": story.end_t,
        "ended": story.ended,
        "mode": story.mode,
        "workers": [asdict(worker) for worker in story.workers],
        "layout": None if story.facts is None else asdict(story.facts),
        "iterations": a.iterations,
        "first_step": a.first_step,
        "last_step": a.last_step,
        "healthy_iteration_s": a.healthy_iteration_s,
        "wall_s": a.wall_s,
        "lost_s": a.lost_s,
        "jct_increase_pct": a.jct_increase_pct,
        "spikes": a.spikes,
        "spike_lost_s": a.spike_lost_s,
        "paused_s": story.paused_s,
        "spent_s": story.spent_s,
        "episodes": [_case(case) for case in story.cases if case.stretches],
        "suspicions": [
            {
                "id": case.id,
                "suspected_t": case.suspected_t,
                "cleared_t": case.cleared_t,
                "suspects": _suspects(case),
            }
            for case in story.suspected
        ],
        "timeline": [
            {"t": m.t, "until_t": m.until_t, "kind": m.kind, "text": m.text} for m in story.marks
        ],
        "level_in_force": [{"t": t, "level": level} for t, level in story.in_force],
        "profiles": [_round(taken) for taken in story.rounds],
        "start": None if story.start is None else _start(story.start),
        "pauses": [_pause(pause) for pause in story.pauses],
        "telemetry": [_telemetry(story, t, body) for t, body in story.telemetry],
        "monitoring": {
            "entries": story.entries,
            "skipped": story.skipped,
            "unknown": dict(story.unknown),
            "blind_s": story.blind_s,
            "troubles": [
                {
                    "what": trouble.what,
                    "message": trouble.message,
                    "node": trouble.node,
                    "rank": trouble.rank,
                    "since_t": trouble.since_t,
                    "until_t": trouble.until_t,
                }
                for trouble in story.troubles
            ],
        },
        "warnings": list(a.warnings),
    }


def _start(case: Case) -> dict[str, Any]:
    diagnosis = case.diagnoses[-1][1] if case.diagnoses else None
    return {
        "suspects": _suspects(case),
        "findings": [_finding(finding) for finding in case.findings],
        "everyone": diagnosis is not None and diagnosis.everyone,
        "imbalance": "" if diagnosis is None else diagnosis.imbalance,
    }


def _pause(pause: Pause) -> dict[str, Any]:
    return {
        "t": pause.t,
        "episode": pause.episode,
        "why": pause.why,
        "ok": pause.ok,
        "reason": pause.reason,
        "step": pause.step,
        "pause_s": pause.pause_s,
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "size_bytes": link.size_bytes,
                "seconds": link.seconds,
                "bytes_per_s": link.bytes_per_s,
                "ratio": link.ratio,
                "against": link.against,
                "measured": link.measured,
                "ranks": [list(pair) for pair in link.ranks],
            }
            for link in pause.links
        ],
    }


def _case(case: Case) -> dict[str, Any]:
    first, last = case.stretches[0], case.stretches[-1]
    episode = last.episode
    return {
        "id": case.id,
        "kind": episode.kind,
        "start_t": case.start_t,
        "end_t": case.end_t,
        "ongoing": case.end_t is None,
        "start_step": first.episode.start_step,
        "end_step": episode.end_step,
        "slowdown": episode.slowdown,
        "peak_slowdown": max(stretch.episode.peak_slowdown for stretch in case.stretches),
        "baseline_s": episode.baseline_s,
        "iteration_s": episode.iteration_s,
        "lost_s": case.lost_s,
        "confidence": episode.confidence,
        "note": episode.note,
        "levels": [asdict(v) for stretch in case.stretches for v in stretch.episode.levels],
        "culprits": [asdict(culprit) for culprit in episode.culprits],
        "suspects": _suspects(case),
        "findings": [_finding(finding) for finding in case.findings],
        "verdicts": [
            {
                "t": t,
                "step": verdict.step,
                "pause_s": verdict.pause_s,
                "findings": [finding.key for finding in verdict.findings],
                "note": verdict.note,
            }
            for t, verdict in case.verdicts
        ],
        "decisions": [{"t": t, **_without_episode(decision)} for t, decision in case.decisions],
        "outcomes": [{"t": t, **_without_episode(outcome)} for t, outcome in case.outcomes],
        "restarts": [
            {**asdict(r), "evict": list(r.evict), "lost_s": r.lost_s} for r in case.restarts
        ],
        "commands": [{**asdict(told), "commands": list(told.commands)} for told in case.commands],
        "removed": None
        if case.removal is None
        else {"share": case.removal.share, **asdict(case.removal)},
    }


def _without_episode(record: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != "episode"}


def _suspects(case: Case) -> list[dict[str, Any]]:
    if not case.diagnoses:
        return []
    t, diagnosis = case.diagnoses[-1]
    return [{"t": t, **_suspect(suspect)} for suspect in diagnosis.suspects]


def _suspect(suspect: Suspect) -> dict[str, Any]:
    return asdict(suspect)


def _finding(finding: Finding) -> dict[str, Any]:
    return {"component": finding.key, **asdict(finding)}


def _round(taken: ProfileRound) -> dict[str, Any]:
    return {
        "t": taken.t,
        "why": taken.why,
        "iteration_s": taken.iteration_s,
        "iterations": taken.iterations,
        "columns": list(taken.columns),
        "ranks": list(taken.ranks),
        "nodes": list(taken.nodes),
        "values": {metric: [list(row) for row in rows] for metric, rows in taken.values.items()},
    }


def _telemetry(story: Story, t: float, body: Any) -> dict[str, Any]:
    case = story.case_at(t)
    onset_t = case.start_t if case else t
    shown = panels(body, onset_t=onset_t, relief_t=case.end_t if case else None, most=_PANELS)
    return {
        "t": t,
        "node": node_of(body),
        "since_t": body.get("since_t"),
        "until_t": body.get("until_t"),
        "episode": case.id if case else "",
        "series": [
            {
                "name": panel.name,
                "rank": panel.rank,
                "unit": panel.unit,
                "before": panel.before,
                "during": panel.during,
                "score": panel.score,
            }
            for panel in shown
        ],
    }
