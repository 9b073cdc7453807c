"""Whom a probe's journal names, and why. Pure.

In: verdicts and diagnoses on each fail-slow, the telemetry of the whole probe. Out: an `Accused`:

    Accused(result="communication", cause="network congestion", culprits=("link n1>n0",),
            causes=("network congestion",), nodes=("n0", "n1"), evidence=(…))

A verdict on a fail-slow mostly has its evidence already. Where it has none, as of a probe that was
slow from its start, the telemetry of the accused while it was slow is held against that of their
peers, and against their own at other times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from failslow.localize.accord import accord
from failslow.localize.evidence import job_cause
from failslow.pipeline.wording import described
from failslow.probe.measures import NodeSeries, Span
from failslow.probe.result import ResultClass
from failslow.records import Diagnosis, Finding, Verdict

__all__ = ["Accused", "Case", "accuse"]

_HELD = (
    ("runqueue_cores", "CPU contention", "waited for a core"),
    ("throttled_cores", "device degradation (quota)", "was kept from computing by a quota"),
    ("stopped_share", "device degradation (stopped by signals)", "was stopped by signals"),
)
_LEAST = 0.05
"""Seconds a second that a worker is kept from computing, beyond what its peers are."""
_SAMPLES = 3
_FACTS = 12
"""Of a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fail-slow, and what was said of it, in the order of time."""

    verdicts: Sequence[Verdict] = ()
    diagnoses: Sequence[Diagnosis] = ()
    spans: tuple[Span, ...] = ()
    """When it was slow; twice where its name came again."""


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
    trained: Span,
) -> Accused:
    """Of all fail-slows of a probe together.

    nodes: of each rank. slowdown: of the probe. trained: from its first iteration to its last.
    """
    look = _Look(nodes, series, trained)
    findings: dict[str, Finding] = {}
    spans: dict[str, tuple[Span, ...]] = {}
    for case in cases:
        for finding in _proved(case.verdicts, case.diagnoses, slowdown):
            known = findings.get(finding.key)
            spans[finding.key] = (*spans.get(finding.key, ()), *case.spans)
            if known is None or (finding.cause and not known.cause):
                findings[finding.key] = finding
    told = [_explained(f, spans[f.key], look) for f in findings.values()]
    if not told:
        return _suspected([case.diagnoses[-1] for case in cases if case.diagnoses])
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


@dataclass(frozen=True, slots=True)
class _Look:
    """Where telemetry is looked for."""

    nodes: Mapping[int, str]
    series: Mapping[str, NodeSeries]
    trained: Span


def _explained(finding: Finding, spans: Sequence[Span], look: _Look) -> Finding:
    """With a cause, where what was sampled while it was slow gives one."""
    if finding.cause:
        return finding
    if finding.what == "link":
        if not _between_nodes(finding, look.nodes):
            return finding
        text = "No telemetry tells why this link is slow: it counts as congested, as in the study."
        return replace(finding, cause="network congestion", evidence=(*finding.evidence, text))
    most_s, cause, text = max(_excess(finding, spans, look, held) for held in _HELD)
    if most_s < _LEAST:
        return finding
    return replace(finding, cause=cause, evidence=(*finding.evidence, text))


def _between_nodes(finding: Finding, nodes: Mapping[int, str]) -> bool:
    """Whether a link crosses the network; an end that names nobody is everybody."""
    everybody = set(nodes.values())
    senders = {finding.host} if finding.host else {nodes.get(rank, "") for rank in finding.ranks}
    receivers = {nodes.get(rank, "") for rank in finding.peer_ranks}
    if finding.peer_host:
        receivers = {finding.peer_host}
    return len(((senders or everybody) | (receivers or everybody)) - {""}) > 1


def _excess(
    finding: Finding,
    spans: Sequence[Span],
    look: _Look,
    held: tuple[str, str, str],
) -> tuple[float, str, str]:
    """(seconds a second more than its peers and than at other times, cause, sentence)."""
    name, cause, verb = held
    own, usual, others = [], [], []
    for rank, node in look.nodes.items():
        if node not in look.series:
            continue
        slow, rest = look.series[node].split(f"rank/{rank}/{name}", spans, of=look.trained)
        if len(slow) < _SAMPLES:
            continue
        if rank not in finding.ranks:
            others.append(float(np.median(slow)))
            continue
        own.append(float(np.median(slow)))
        if len(rest) >= _SAMPLES:
            usual.append(float(np.median(rest)))
    if not own or not (others or usual):
        return 0.0, cause, ""
    mine, least = max(own), 0.0
    text = f"rank {', '.join(map(str, finding.ranks))} {verb} {mine:.2g} s/s"
    text += " while it was slow" if usual else " all along"
    if usual:
        least = max(usual)
        text += f", {least:.2g} s/s at other times"
    if others:
        peers = float(np.median(others))
        least = max(least, peers)
        text += f", its peers {peers:.2g} s/s"
    return mine - least, cause, f"For {cause}: {text}."


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
