"""Whom a probe's journal names, and why. Pure.

In: verdicts and diagnoses on each fail-slow, the telemetry of the whole probe. Out: an `Accused`:

    Accused(result="communication", cause="network congestion", culprits=("link n1>n0",),
            causes=("network congestion",), nodes=("n0", "n1"), evidence=(…))

A verdict on a fail-slow has its evidence already. One on a probe that was slow from its start has
none, for nothing changed: there the telemetry of the accused is held against that of their peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from failslow.localize.accord import accord
from failslow.localize.evidence import job_cause
from failslow.pipeline.wording import described
from failslow.probe.measures import NodeSeries
from failslow.probe.result import ResultClass
from failslow.records import Diagnosis, Finding, Verdict

__all__ = ["Accused", "accuse"]

Case = tuple[Sequence[Verdict], Sequence[Diagnosis]]
"""What was said of one fail-slow, in the order of time."""
_HELD = (
    ("runqueue_cores", "CPU contention", "waited for a core"),
    ("throttled_cores", "device degradation (quota)", "was kept from computing by a quota"),
    ("stopped_share", "device degradation (stopped by signals)", "was stopped by signals"),
)
_LEAST = 0.05
"""Seconds a second that a worker is kept from computing, beyond what its peers are."""
_FACTS = 12
"""Of a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accused:
    """Fields of `ProbeResult`."""

    result: ResultClass
    cause: str
    culprits: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


def accuse(
    cases: Sequence[Case],
    *,
    nodes: Mapping[int, str],
    series: Mapping[str, NodeSeries],
    slowdown: float,
) -> Accused:
    """Of all fail-slows of a probe together.

    nodes: of each rank. slowdown: of the probe.
    """
    findings: dict[str, Finding] = {}
    for verdicts, diagnoses in cases:
        for finding in _proved(verdicts, diagnoses, slowdown):
            known = findings.get(finding.key)
            if known is None or (finding.cause and not known.cause):
                findings[finding.key] = finding
    told = [_explained(finding, nodes, series) for finding in findings.values()]
    if not told:
        return _suspected([diagnoses[-1] for _, diagnoses in cases if diagnoses])
    hosts = {host for f in told for host in _hosts(f, nodes)}
    return Accused(
        result=_class_of({"communication" if f.what == "link" else "compute" for f in told}),
        cause=job_cause(told),
        culprits=tuple(_name(f, nodes) for f in told),
        causes=tuple(f.cause for f in told),
        nodes=tuple(sorted(hosts)),
        evidence=tuple(text for f in told for text in _facts(f, nodes)),
    )


def _proved(
    verdicts: Sequence[Verdict], diagnoses: Sequence[Diagnosis], slowdown: float
) -> Iterator[Finding]:
    """What the last verdict that names anybody names, and what at least half of them do."""
    naming = [verdict for verdict in verdicts if verdict.findings]
    if naming and not naming[-1].episode and diagnoses:
        # the look at the start accuses whoever is slower than peers, waited for or not
        naming = [accord(naming[-1], diagnoses[-1], slowdown=slowdown)]
    counts: dict[str, int] = {}
    last: dict[str, Finding] = {}
    for verdict in naming:
        for finding in verdict.findings:
            counts[finding.key] = counts.get(finding.key, 0) + 1
            last[finding.key] = finding
    newest = {finding.key for finding in naming[-1].findings} if naming else set()
    for key, finding in last.items():
        if key in newest or 2 * counts[key] >= len(naming):
            yield finding


def _suspected(diagnoses: Sequence[Diagnosis]) -> Accused:
    """Nothing was proved: what the call streams say is the class of the result, and no more."""
    kinds = {
        "compute" if suspect.what == "compute" else "communication"
        for diagnosis in diagnoses
        if not diagnosis.everyone
        for suspect in diagnosis.suspects
    }
    texts = [f"Not proved by benchmarks; {described(diagnosis)}." for diagnosis in diagnoses]
    return Accused(result=_class_of(kinds), cause="unknown", evidence=tuple(texts))


def _class_of(kinds: set[str]) -> ResultClass:
    if kinds == {"compute"}:
        return "compute"
    if kinds == {"communication"}:
        return "communication"
    return "both" if kinds else "unknown"


def _explained(
    finding: Finding, nodes: Mapping[int, str], series: Mapping[str, NodeSeries]
) -> Finding:
    """With a cause, where what was sampled all along gives one."""
    if finding.cause:
        return finding
    if finding.what == "link":
        text = "No telemetry tells why this link is slow: it counts as congested, as in the study."
        return replace(finding, cause="network congestion", evidence=(*finding.evidence, text))
    most_s, cause, text = max(_excess(finding, nodes, series, held) for held in _HELD)
    if most_s < _LEAST:
        return finding
    return replace(finding, cause=cause, evidence=(*finding.evidence, text))


def _excess(
    finding: Finding,
    nodes: Mapping[int, str],
    series: Mapping[str, NodeSeries],
    held: tuple[str, str, str],
) -> tuple[float, str, str]:
    """(seconds a second more than its peers, cause, sentence)."""
    name, cause, verb = held
    each = {
        rank: float(np.median(x))
        for rank, node in nodes.items()
        if node in series and len(x := series[node].of(f"rank/{rank}/{name}"))
    }
    own = [value for rank, value in each.items() if rank in finding.ranks]
    others = [value for rank, value in each.items() if rank not in finding.ranks]
    if not own or not others:
        return 0.0, cause, ""
    mine, usual = max(own), float(np.median(others))
    who = ", ".join(map(str, finding.ranks))
    text = f"For {cause}: rank {who} {verb} {mine:.2g} s/s all along, its peers {usual:.2g} s/s."
    return mine - usual, cause, text


def _hosts(finding: Finding, nodes: Mapping[int, str]) -> Iterator[str]:
    """The nodes a finding is on."""
    ends = [(finding.host, finding.ranks)]
    if finding.what == "link":
        ends.append((finding.peer_host, finding.peer_ranks))
    for host, ranks in ends:
        if host:
            yield host
        else:
            yield from {nodes[rank] for rank in ranks if rank in nodes}


def _name(finding: Finding, nodes: Mapping[int, str]) -> str:
    """The key; a device's with its host."""
    if finding.what != "device":
        return finding.key
    hosts = sorted(set(_hosts(finding, nodes)))
    return f"{finding.key} of {', '.join(hosts)}" if hosts else finding.key


def _facts(finding: Finding, nodes: Mapping[int, str]) -> Iterator[str]:
    yield f"{_name(finding, nodes)} x{finding.slowdown:.2f}: {finding.cause or 'cause unknown'}."
    yield from finding.evidence[:_FACTS]
