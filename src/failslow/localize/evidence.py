"""Why a component is slow: the telemetry around onset, weighed for each cause of the field study.

In: a proven `Finding`, the telemetry of the nodes concerned (bodies of reports with the node's
name, as a journal keeps them), the times of onset and relief. Out: the `Finding` with its cause and
the facts for and against:

    Finding(what="host", …, cause="CPU contention", evidence=(
        "For CPU contention: rank 3 waited for a core 0.41 s/s, before 0.01 s/s (+52 MADs, r 0.96,
         at onset).", "Against device degradation: its control group's quota kept from rank 3
         0 s/s, before 0 s/s."))

Where workers compute on the CPU, contention slows the benchmark of the "device" as well. There a
quota or signals that hold the worker stand for a degraded device, and waiting for cores that others
use makes a finding of a device one of its host, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from failslow.localize.cues import (
    drop_cue,
    ecn_cues,
    foreign_cue,
    gpu_cues,
    node_contention,
    quota_cue,
    speed_cue,
    stop_cue,
    traffic_cues,
    wait_cue,
)
from failslow.localize.facts import CONGESTION, CONTENTION, DEGRADATION, Cue, Fact, weigh
from failslow.localize.script_settings import is_cpu
from failslow.localize.windows import Floats, NodeWindow
from failslow.steering import Finding, Measurement

__all__ = ["explain", "explain_all", "job_cause"]

_MOST_FACTS = 10
_BAD = ("drops", "errors")
_HEADERS = 1.05
"""An interface also counts headers and acknowledgements."""
_MOST_OTHERS = 64
_SEVERAL = "several at once"
_NOBODYS: Mapping[int, str] = {}


def explain(
    finding: Finding,
    windows: Iterable[Mapping[str, Any]],
    *,
    onset_t: float,
    relief_t: float | None = None,
    devices: Mapping[int, str] = _NOBODYS,
) -> Finding:
    """`finding` with its cause, the facts, and what was measured; `what` may become device or host.

    windows: bodies of telemetry reports, each with "node" (`runtime.duty_telemetry`), of nodes
    concerned or not. Times are epoch seconds of the job's clock (`windows.on_job_clock`). devices:
    the model each worker computes on, where that is known; else NVML tells of GPUs. The
    cause is one of "CPU contention", "device degradation", also "(thermal)", "(power)",
    "(clocks)", "(quota)", "(stopped by signals)", "(link speed)", "network congestion", "several
    at once: …", or "" where nothing tells; a slow GPU is "device degradation" whatever telemetry
    says: its benchmark has proved it.
    """
    nodes = [NodeWindow.of(body) for body in windows]
    weighing = _Weighing(onset_t, relief_t)
    on_gpu = _is_gpu(finding, nodes, devices)
    if finding.what == "link":
        facts = list(_of_link(finding, nodes, weighing))
    else:
        facts = list(_of_worker(finding, nodes, weighing, on_gpu=on_gpu))
    if not facts:
        text = "No telemetry of its node tells why."
        cause = DEGRADATION if on_gpu and finding.what == "device" else ""
        return replace(finding, cause=finding.cause or cause, evidence=(*finding.evidence, text))
    decided = [fact for fact in facts if fact.speaks == "for" and fact.cue.decides]
    what = finding.what
    if what != "link" and not on_gpu:
        what = _stand_in(what, decided)
    if what == "device" and on_gpu:
        decided = [fact for fact in decided if fact.cue.cause == DEGRADATION]
        cause = _cause(decided) or DEGRADATION
    else:
        cause = _cause(decided)
    return replace(
        finding,
        what=what,
        cause=cause,
        evidence=(
            *finding.evidence,
            *_sentences(facts, nodes, finding),
            *(_variation(finding, nodes, onset_t, relief_t) if what == "link" else ()),
        ),
        measurements=(*finding.measurements, *(_measured(fact) for fact in decided)),
    )


def explain_all(
    findings: Sequence[Finding],
    windows: Sequence[Mapping[str, Any]],
    *,
    onset_t: float,
    relief_t: float | None = None,
    devices: Mapping[int, str] = _NOBODYS,
) -> tuple[Finding, ...]:
    """`explain` of each; what turned out to be the same component several times is one finding.

    A host of workers that compute on the CPU is looked at worker by worker: what holds one of them
    by its quota is that worker's "device", and a worker that nothing holds is not accused.
    """
    nodes = [NodeWindow.of(body) for body in windows]
    told = partial(explain, windows=windows, onset_t=onset_t, relief_t=relief_t, devices=devices)
    united: dict[str, Finding] = {}
    for finding in findings:
        each = [told(finding)]
        on_gpu = _is_gpu(finding, nodes, devices)
        if finding.what == "host" and len(finding.ranks) > 1 and not on_gpu:
            parts = [told(replace(finding, ranks=(rank,))) for rank in finding.ranks]
            each = [part for part in parts if part.cause] or each
        for part in each:
            other = united.get(part.key)
            united[part.key] = part if other is None else _united(other, part)
    return tuple(united.values())


def job_cause(findings: Sequence[Finding]) -> str:
    """One cause for a job, as in the field study: a class, "several at once: …", or "unknown".

    >>> job_cause([])
    'unknown'
    """
    classes = [
        cause
        for cause in (CONTENTION, DEGRADATION, CONGESTION)
        if any(cause in finding.cause for finding in findings)
    ]
    if not classes:
        return "unknown"
    return classes[0] if len(classes) == 1 else f"{_SEVERAL}: {', '.join(classes)}"


class _Weighing:
    def __init__(self, onset_t: float, relief_t: float | None) -> None:
        self._weigh = partial(weigh, onset_t=onset_t, relief_t=relief_t)

    def __call__(self, cue: Cue, t: Floats, x: Floats | None, usual: float = 0.0) -> Iterator[Fact]:
        fact = self._weigh(cue, t, x, usual=usual)
        if fact is not None:
            yield fact


def _of_worker(
    finding: Finding, nodes: Sequence[NodeWindow], weighing: _Weighing, *, on_gpu: bool
) -> Iterator[Fact]:
    for node in nodes:
        ranks = [rank for rank in finding.ranks if rank in node.ranks]
        if not ranks:
            continue
        for rank in ranks:
            held = node.of_rank(rank, "throttled_cores")
            waited = node.of_rank(rank, "runqueue_cores")
            if waited is not None and held is not None:
                # the kernel counts threads held by a quota as waiting
                waited = np.where(np.isnan(held), waited, np.maximum(0.0, waited - held))
            yield from weighing(wait_cue(rank), node.t, waited)
            quota = quota_cue(rank, CONTENTION if on_gpu else DEGRADATION)
            yield from weighing(quota, node.t, held)
            if not on_gpu:
                yield from weighing(stop_cue(rank), node.t, node.of_rank(rank, "stopped_share"))
            for gpu in node.gpus(rank):
                for name, cue in gpu_cues(gpu):
                    usual = _of_others(name, finding, nodes) if cue.standing else 0.0
                    yield from weighing(cue, node.t, node.series(name), usual)
        for name, cue in node_contention(node.node or "its node"):
            yield from weighing(cue, node.t, node.series(name))


def _of_others(name: str, finding: Finding, nodes: Sequence[NodeWindow]) -> float:
    """The usual level of a GPU's series on those that nobody blames.

    Under full load most run at their power limit all the time: what all do tells nothing of one.
    """
    what = name.rpartition("/")[2]
    blamed = {(n.node, gpu) for n in nodes for rank in finding.ranks for gpu in n.gpus(rank)}
    others = ((n, gpu) for n in nodes for gpu in n.gpu_numbers if (n.node, gpu) not in blamed)
    series = (n.series(f"gpu/{gpu}/{what}") for n, gpu in islice(others, _MOST_OTHERS))
    known = (x[np.isfinite(x)] for x in series if x is not None)
    levels = [float(np.median(x)) for x in known if len(x)]
    if not levels:
        return 1.0 if what == "throttle_power" else 0.0
    return float(np.median(levels))


def _of_link(finding: Finding, nodes: Sequence[NodeWindow], weighing: _Weighing) -> Iterator[Fact]:
    senders = [node for node in nodes if set(node.ranks) & set(finding.ranks)]
    receivers = [node for node in nodes if set(node.ranks) & set(finding.peer_ranks)]
    for node in senders:
        others = [r for r in receivers if r is not node]
        peers = [(a, r.node) for r in others for a in r.addresses]
        known = [(f"peer/{a}", name) for a, name in peers if any(node.names(f"peer/{a}/"))]
        for key, name in known or [("link/inter", finding.peer_host or "other hosts")]:
            for series, cue in traffic_cues(key, f"from {node.node or 'here'} to {name}"):
                yield from weighing(cue, node.t, node.series(series))
    for node in dict.fromkeys((*senders, *receivers)):
        yield from _of_ports(finding, node, weighing)
        yield from _of_interfaces(node, weighing)
    for node in senders:
        for rank in sorted(set(node.ranks) & set(finding.ranks)):
            waited = node.of_rank(rank, "runqueue_cores")
            yield from weighing(replace(wait_cue(rank), decides=False), node.t, waited)


def _of_ports(finding: Finding, node: NodeWindow, weighing: _Weighing) -> Iterator[Fact]:
    for port in sorted({name.rsplit("/", 1)[0] for name in node.names("rdma/")}):
        if finding.nic and finding.nic.split(":")[0] not in port:
            continue
        where = f"{node.node}'s {port.removeprefix('rdma/')}"
        for what, cue in ecn_cues(where):
            yield from weighing(cue, node.t, node.series(f"{port}/{what}"))
        speed = node.series(f"{port}/speed_bits_per_s")
        yield from weighing(speed_cue(where), node.t, speed)


def _of_interfaces(node: NodeWindow, weighing: _Weighing) -> Iterator[Fact]:
    interfaces = sorted({name.rsplit("/", 1)[0] for name in node.names("net/")})
    for interface in interfaces:
        where = f"{node.node}'s {interface.removeprefix('net/')}"
        bad = [f"{interface}/{way}_{what}_per_s" for way in ("tx", "rx") for what in _BAD]
        yield from weighing(drop_cue(where), node.t, _total(node, bad))
        speed = node.series(f"{interface}/speed_bits_per_s")
        yield from weighing(speed_cue(where), node.t, speed)
    peers = sorted({name.rsplit("/", 1)[0] for name in node.names("peer/")})
    for way, out, verb in (("sent", "tx", "left"), ("received", "rx", "reached")):
        job = _total(node, [f"{peer}/{way}_bytes_per_s" for peer in peers])
        whole = _total(node, [f"{interface}/{out}_bytes_per_s" for interface in interfaces])
        if job is not None and whole is not None:
            foreign = np.maximum(0.0, whole - _HEADERS * job)
            yield from weighing(foreign_cue(verb, node.node or "the node"), node.t, foreign)


def _total(node: NodeWindow, names: Iterable[str]) -> Floats | None:
    """The sum of the series there are, what is unknown counted as 0."""
    found = [x for name in names if (x := node.series(name)) is not None]
    return np.nansum(found, axis=0) if found else None


def _is_gpu(finding: Finding, nodes: Sequence[NodeWindow], devices: Mapping[int, str]) -> bool:
    """Whether the workers compute on GPUs, by the finding's words or their own, else by NVML."""
    models = [devices[rank] for rank in finding.ranks if rank in devices]
    if finding.device or models:
        return not all(map(is_cpu, [finding.device] if finding.device else models))
    return any(node.gpu_numbers for node in nodes if set(node.ranks) & set(finding.ranks))


def _stand_in(
    what: Literal["device", "host", "link"], decided: Sequence[Fact]
) -> Literal["device", "host", "link"]:
    """Where the processor is the device: what holds the worker more, its limits or its neighbours.

    Both are seconds a second it was kept from computing.
    """
    held = sum(f.step.during - f.step.before for f in decided if f.cue.cause == DEGRADATION)
    waited = sum(f.step.during - f.step.before for f in decided if f.cue.cause == CONTENTION)
    if held == waited:
        return what
    return "device" if held > waited else "host"


def _cause(decided: Sequence[Fact]) -> str:
    """The one with its details; several where the weaker takes at least half of the stronger."""
    found: dict[str, list[Fact]] = {}
    for fact in decided:
        found.setdefault(fact.cue.cause, []).append(fact)
    if not found:
        return ""
    weights = {cause: sum(f.weight for f in facts) for cause, facts in found.items()}
    most = max(weights.values())
    named = [cause for cause in found if 2 * weights[cause] >= most]
    texts = []
    for cause in named:
        details = list(dict.fromkeys(f.cue.detail for f in found[cause] if f.cue.detail))
        # the reason says more than the clocks that follow from it
        details = [d for d in details if d != "clocks"] or details
        texts.append(f"{cause} ({', '.join(details)})" if details else cause)
    return texts[0] if len(texts) == 1 else f"{_SEVERAL}: {', '.join(texts)}"


def _sentences(
    facts: Sequence[Fact], nodes: Sequence[NodeWindow], finding: Finding
) -> Iterator[str]:
    """The facts for first, the strongest of each kind; then what could not be seen."""
    order = {"for": 0, "neither": 1, "against": 2}
    ranked = sorted(facts, key=lambda f: (order[f.speaks], not f.cue.decides, -f.weight))
    yield from (fact.sentence for fact in ranked[:_MOST_FACTS])
    if len(ranked) > _MOST_FACTS:
        yield f"Further series that did not change with onset: {len(ranked) - _MOST_FACTS}."
    for node in nodes:
        if set(node.ranks) & {*finding.ranks, *finding.peer_ranks}:
            for text in node.missing:
                if ("RDMA" in text) == (finding.what == "link"):
                    yield f"Not seen on {node.node or 'its node'}: {text}."


def _variation(
    finding: Finding, nodes: Sequence[NodeWindow], onset_t: float, relief_t: float | None
) -> Iterator[str]:
    """How much the latency of each class of links varied while it was slow, and before."""
    concerned = [n for n in nodes if set(n.ranks) & {*finding.ranks, *finding.peer_ranks}]
    for kind, text in (("inter", "between hosts"), ("intra", "inside hosts")):
        early, late = [], []
        for node in concerned:
            x = node.series(f"link/{kind}/rtt_s")
            if x is not None:
                end_t = np.inf if relief_t is None else relief_t
                early.append(x[node.t <= onset_t])
                late.append(x[(node.t > onset_t) & (node.t <= end_t)])
        before, during = _spread(early), _spread(late)
        if before is not None and during is not None:
            yield (
                f"Round trips {text} varied with a coefficient of variation of {during:.2f}, "
                f"before {before:.2f}."
            )


def _spread(parts: Sequence[Floats]) -> float | None:
    """Standard deviation over mean, of nodes and times together."""
    x = np.concatenate(parts) if parts else np.empty(0)
    x = x[np.isfinite(x)]
    return float(x.std() / x.mean()) if len(x) >= 3 and x.mean() > 0 else None


def _measured(fact: Fact) -> Measurement:
    return Measurement(
        what=fact.cue.text,
        value=fact.step.during * fact.cue.scale,
        unit=fact.cue.unit.strip(),
        expected=fact.step.before * fact.cue.scale,
    )


def _united(one: Finding, two: Finding) -> Finding:
    return replace(
        one,
        ranks=tuple(sorted({*one.ranks, *two.ranks})),
        slowdown=max(one.slowdown, two.slowdown),
        cause=one.cause or two.cause,
        measurements=tuple(dict.fromkeys((*one.measurements, *two.measurements))),
        evidence=tuple(dict.fromkeys((*one.evidence, *two.evidence))),
    )
