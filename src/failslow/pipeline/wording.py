"""Diagnoses and verdicts in one line each, for whoever looks at the log.

In: a `Diagnosis`, a `Verdict`. Out: "suspects: compute of rank 3 x1.52", "verdict after a pause of
1.90 s: device rank 3 x1.51 (device degradation)".
"""

from __future__ import annotations

from failslow.localize.readings import listed
from failslow.pipeline.health import rank_list
from failslow.records import Diagnosis, Verdict

__all__ = ["described", "proved"]


def described(diagnosis: Diagnosis) -> str:
    """Who looks slow, in one line."""
    parts = [
        f"{suspect.what} of {rank_list(list(suspect.ranks))}"
        + (f" to {rank_list(list(suspect.peer_ranks))}" if suspect.peer_ranks else "")
        + f" x{suspect.slowdown:.2f}"
        for suspect in diagnosis.suspects[:3]
    ]
    if len(diagnosis.suspects) > 3:
        parts.append(f"{len(diagnosis.suspects) - 3} more")
    text = "suspects: " + (", ".join(parts) or "none")
    if diagnosis.everyone:
        text = "every rank is late alike: not one worker"
    if diagnosis.compute_alike:
        text = (
            "all ranks compute longer alike: perhaps the work changed (tell it by "
            "failslow.step(work=…))"
        )
    return "; ".join(filter(None, (text, diagnosis.imbalance, diagnosis.note)))


def proved(verdict: Verdict) -> str:
    """What was proved, in one line."""
    if not verdict.findings and not verdict.episode:  # nobody was looked for
        return "the reference was taken" + (f" ({verdict.note})" if verdict.note else "")
    if not verdict.findings:
        return f"verdict: nothing found ({verdict.note or 'all benchmarks are healthy'})"
    parts = [
        f"{finding.key} x{finding.slowdown:.2f}" + (f" ({finding.cause})" if finding.cause else "")
        for finding in verdict.findings
    ]
    return f"verdict after a pause of {verdict.pause_s:.2f} s: {listed(parts)}"
