"""The words for what was found and done, shared by report and status.

In: records. Out: short phrases: "rank 5's device ×1.52 (device degradation)", "S2: micro-batches
7 9 8 8".
"""

from __future__ import annotations

from collections.abc import Sequence

from failslow.records import (
    Decision,
    Diagnosis,
    Finding,
    JobFacts,
    LevelOption,
    Measurement,
    Outcome,
    Plan,
    Suspect,
    Verdict,
    group_label,
)
from failslow.report import units

__all__ = [
    "LEVELS",
    "arithmetic_text",
    "decision_text",
    "diagnosis_text",
    "facts_text",
    "finding_text",
    "measurement_text",
    "option_text",
    "outcome_text",
    "plan_text",
    "quantity_text",
    "ranks_text",
    "size_text",
    "suspect_text",
    "verdict_text",
]

LEVELS = {
    "S1": "do nothing",
    "S2": "redistribute micro-batches",
    "S3": "change the topology",
    "S4": "restart elsewhere",
}
_FINDINGS = 8
_SUSPECTS = {"compute": "own time of", "link": "link", "group": "group of"}


def ranks_text(ranks: Sequence[int], *, most: int = 8) -> str:
    """ "rank 5", "ranks 4–7", "ranks 0, 8, 16 and 61 more"."""
    if not ranks:
        return "no rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}–{ordered[-1]}"
    more = f" and {units.count(len(ordered) - most)} more" if len(ordered) > most else ""
    return f"ranks {', '.join(map(str, ordered[:most]))}{more}"


def size_text(size_bytes: int) -> str:
    """ "16 MiB", "1.5 kB"."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= size and size_bytes % size == 0:
            return f"{units.count(size_bytes // size)} {name}"
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {name}"
    return f"{size_bytes} B"


def suspect_text(suspect: Suspect) -> str:
    """Who looks slow, without its score."""
    who = ranks_text(suspect.ranks)
    if suspect.what == "link" and suspect.peer_ranks:
        who = f"{who} → {ranks_text(suspect.peer_ranks)}"
    name = group_label(suspect.label)  # an older journal has it as torch says it
    label = f" in {name}" if name else ""
    return f"{_SUSPECTS[suspect.what]} {who}{label}"


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """The likeliest suspect, or why there is none."""
    if diagnosis.compute_alike:
        return (
            "all ranks compute longer alike: perhaps the work changed (tell it by "
            "failslow.step(work=…))"
        )
    if diagnosis.everyone:
        return "all workers are late alike: not one worker"
    if not diagnosis.suspects:
        return f"no suspect{': ' if diagnosis.note else ''}{diagnosis.note}"
    first = diagnosis.suspects[0]
    more = f" and {len(diagnosis.suspects) - 1} more" if len(diagnosis.suspects) > 1 else ""
    return f"suspect: {suspect_text(first)} {units.slowdown(first.slowdown)}{more}"


def finding_text(finding: Finding, *, cause: bool = True) -> str:
    """One proven culprit: "rank 5's device (gpu-17, GPU 5) ×1.52: device degradation"."""
    who = ranks_text(finding.ranks)
    if finding.what == "link":
        peer = ranks_text(finding.peer_ranks)
        ends = f"{finding.host or who} → {finding.peer_host or peer}"
        text = f"link {ends}" + (f" ({finding.nic})" if finding.nic else "")
    elif finding.what == "host":
        text = f"host {finding.host or 'of ' + who}" + (f" ({who})" if finding.host else "")
    else:
        place = ", ".join(filter(None, (finding.host, finding.device)))
        text = f"device of {who}" + (f" ({place})" if place else "")
    text += f" {units.slowdown(finding.slowdown)}"
    return f"{text}: {finding.cause}" if cause and finding.cause else text


def verdict_text(verdict: Verdict) -> str:
    """The findings, of very many the first few, or that there are none."""
    if verdict.findings:
        texts = [finding_text(finding) for finding in verdict.findings[:_FINDINGS]]
        more = len(verdict.findings) - len(texts)
        return "; ".join(texts) + (f"; and {units.count(more)} more" if more else "")
    if not verdict.episode:  # nobody was looked for
        return "the reference was taken" + (f" ({verdict.note})" if verdict.note else "")
    return "nothing found" + (f": {verdict.note}" if verdict.note else "")


def measurement_text(measurement: Measurement) -> str:
    """ "gemm float32 1024: 31.2 ms, expected 20.5 ms"."""
    text = f"{measurement.what}: {quantity_text(measurement.value, measurement.unit)}"
    if measurement.expected is not None:
        text += f", expected {quantity_text(measurement.expected, measurement.unit)}"
    return text


def quantity_text(value: float, unit: str) -> str:
    """A measured value in its unit; seconds in a handy one."""
    if unit == "s":
        return units.duration(value)
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{shown} {unit}".strip()


def plan_text(plan: Plan | None) -> str:
    """What is to be done."""
    if plan is None:
        return ""
    parts = [_order(plan.placement)] if plan.placement else []
    if plan.microbatches:
        parts.append(f"micro-batches {_short(plan.microbatches)}")
    if parts:
        text = ", ".join(parts)
    elif plan.evict:
        text = f"without {', '.join(plan.evict)}"
    else:
        text = LEVELS[plan.level]
    return f"{text} ({plan.note})" if plan.note else text


def _order(placement: Sequence[int]) -> str:
    """ "workers in the order 0 1 3 2"; of very many those that are not at their own places."""
    if len(placement) <= 16:
        return f"workers in the order {' '.join(map(str, placement))}"
    away = [rank for at, rank in enumerate(placement) if at != rank]
    return f"{ranks_text(away)} at others' places" if away else "workers at their own places"


def _short(numbers: Sequence[int]) -> str:
    """ "7 9 8 8"; of very many the different ones: "8 ×509, 7, 9 ×2"."""
    if len(numbers) <= 16:
        return " ".join(map(str, numbers))
    counts = {number: numbers.count(number) for number in dict.fromkeys(numbers)}
    ordered = sorted(counts.items(), key=lambda item: -item[1])[:6]
    return ", ".join(f"{n} ×{units.count(k)}" if k > 1 else str(n) for n, k in ordered)


def decision_text(decision: Decision) -> str:
    """What was decided, in a line."""
    if decision.action == "obey" and decision.plan is None:  # resume, ignore
        return f"as ordered: {decision.reason}, at {decision.level}"
    verbs = {
        "stay": "stay at",
        "escalate": "go to",
        "replan": "plan anew at",
        "restore": "back to",
        "obey": "as ordered:",
    }
    text = f"{verbs[decision.action]} {decision.level}"
    plan = plan_text(decision.plan)
    if plan:
        text += f": {plan}"
    # without a plan there is nothing anybody might do
    return text if decision.apply or decision.plan is None else f"advice: {text}"


def arithmetic_text(decision: Decision) -> str:
    """Why now: the loss against the price of the level."""
    text = f"{units.duration(decision.lost_s)} lost"
    if decision.spent_s:
        text += f" + {units.duration(decision.spent_s)} spent"
    if decision.threshold_s is not None:
        sign = "≥" if decision.lost_s + 1e-9 >= decision.threshold_s else "<"
        text += f" {sign} threshold {units.duration(decision.threshold_s)}"
        if decision.trust_factor != 1.0:
            text += f" (cost ×{decision.trust_factor:.2g} by history)"
    return text


def option_text(option: LevelOption) -> str:
    """ "S2: leaves ×1.08 (estimate), costs 100 ms (measured)"."""
    if not option.applicable:
        return f"{option.level}: {option.reason or 'not applicable'}"
    left = f"leaves {units.slowdown(option.slowdown)} ({option.slowdown_source})"
    if option.level == "S1":
        return f"{option.level}: {left}"
    cost = f"costs {units.duration(option.cost_s)} ({option.cost_source})"
    text = f"{option.level}: {left}, {cost}"
    return f"{text}; {option.reason}" if option.reason else text


def outcome_text(outcome: Outcome) -> str:
    """What became of a plan."""
    if not outcome.ok:
        how = "refused" if outcome.refused else "failed"
        return f"{outcome.level} {how}{': ' if outcome.error else ''}{outcome.error}"
    text = f"{outcome.level} done in {units.duration(outcome.cost_s)}"
    if outcome.slowdown is not None:
        text += f", leaves {units.slowdown(outcome.slowdown)}"
    return text


def facts_text(facts: JobFacts) -> str:
    """The job's grid and what it cannot bear."""
    parts = [f"pp {facts.pp} × dp {facts.dp}" + (f" × tp {facts.tp}" if facts.tp > 1 else "")]
    parts.append(f"{units.plural(facts.microbatches, 'micro-batch', 'micro-batches')}")
    for level, why in (
        ("S2", facts.no_redistribution),
        ("S3", facts.no_topology_change),
        ("S4", facts.no_restart),
    ):
        if why:
            parts.append(f"no {level}: {why}")
    return " · ".join(parts)
