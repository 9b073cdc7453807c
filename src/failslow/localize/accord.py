"""A verdict names what was proved slow *and* is what slows the job. Pure.

In: what a pause measured to be slow, what the call streams said, how slow workers were in training.
Out: the verdict with the findings both agree on; the others become a note:

    Verdict(findings=(Finding(what="device", ranks=(5,), …),),
            note="also measured slow, but no suspect: host gpu-3 x1.40")

Benchmarks see a part for a second: other load, or a component that is slow but that this job does
not wait for, must not cost a healthy node. A call stream sees the job, but not why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from failslow.localize.readings import listed
from failslow.records import Diagnosis, Finding, Suspect, Verdict

__all__ = ["accord"]

_SLOW = 1.10
_SHARE = 0.5
"""Of the job's slowdown what a finding must be able to explain by itself where no suspect is it."""


def accord(
    verdict: Verdict,
    diagnosis: Diagnosis,
    *,
    slowdown: float,
    own: Mapping[int, float] | None = None,
) -> Verdict:
    """`verdict` without what does not slow the job.

    slowdown: the job's. own: of workers, where known, how slow they are in training by their own
    time; what a worker feels outranks what a benchmark of a second measured.
    """
    kept, left = [], []
    for finding in verdict.findings:
        felt = _felt(finding, own or {})
        if felt.slowdown >= _SLOW and _accused(finding, felt, diagnosis, slowdown):
            kept.append(felt)
        else:
            left.append(finding)
    if not left:
        return replace(verdict, findings=tuple(kept))
    named = listed(f"{finding.key} x{finding.slowdown:.2f}" for finding in left)
    note = f"also measured slow, but not what the job waits for: {named}"
    notes = (verdict.note, note) if kept else (note,)
    return replace(verdict, findings=tuple(kept), note="; ".join(filter(None, notes)))


def _felt(finding: Finding, own: Mapping[int, float]) -> Finding:
    """As slow as its workers are in training."""
    times = [own[rank] for rank in finding.ranks if rank in own]
    if finding.what == "link" or not times:
        return finding
    return replace(finding, slowdown=max(times))


def _accused(finding: Finding, felt: Finding, diagnosis: Diagnosis, slowdown: float) -> bool:
    # what all feel alike proves nothing of one of them: it must have been measured as well
    sure = min(finding.slowdown, felt.slowdown) >= 1.0 + _SHARE * (slowdown - 1.0)
    if diagnosis.everyone or not diagnosis.suspects:
        # it may have waited for a moment, and its telemetry knows of no contention
        return sure and not (finding.what == "host" and finding.evidence and not finding.cause)
    if any(_matches(finding, suspect) for suspect in diagnosis.suspects):
        return True
    # whoever is held, by a quota say, is slow to send and receive too: streams may show no more
    # than its groups, or the worst of several alike
    return sure and finding.what == "device" and bool(finding.cause)


def _matches(finding: Finding, suspect: Suspect) -> bool:
    if finding.what == "link":
        if suspect.what == "compute":
            return False
        involved = {*suspect.ranks, *suspect.peer_ranks}
        senders, receivers = set(finding.ranks), set(finding.peer_ranks)
        # a card is one end of a link; a link has both in what is slow
        return all(not end or end & involved for end in (senders, receivers))
    return suspect.what == "compute" and bool({*finding.ranks} & {*suspect.ranks})
