"""Orders to the job's Coordinator: how long an answer may take, and what is to follow from it.

In: a `Decision`, its culprits. Out: what must be known once the answer comes, however late, and
the lines of the journal, the letters:

    Ordered(number=3, decision=decision, asked_s=…, limit_s=61.2, nodes=("gpu-3",), why="…")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from failslow.pipeline.messages import Instruction, Order, Say, Write
from failslow.pipeline.series import Worker
from failslow.records import Decision, Finding, JobFacts, Outcome, Rung

__all__ = [
    "Ordered",
    "answer_limit_s",
    "failed",
    "given",
    "nodes_of",
    "ordered_before",
    "restart",
    "said",
    "why_kept",
]

_ANSWER_S: Mapping[Rung, float] = {"S1": 60.0, "S2": 60.0, "S3": 420.0, "S4": 1800.0}
"""A move may take 300 s, the checkpoint of a large model many minutes..."""
_ANSWER_STEPS = 4
"""...and the Coordinator hears of an order between two iterations only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """An order that was given."""

    number: int
    decision: Decision
    asked_s: float
    limit_s: float
    findings: tuple[Finding, ...] = ()
    """The culprits it is for."""
    nodes: tuple[str, ...] = ()
    """S4: where they are."""
    why: str = ""
    apart: bool = False
    """The policy knows nothing of it: it takes back what an earlier controller left."""

    def is_overdue(self, now_s: float) -> bool:
        """The answer should be here."""
        return now_s - self.asked_s > self.limit_s


def answer_limit_s(level: Rung, iteration_s: float) -> float:
    """An order not answered within so long counts as not carried out, until it is after all."""
    return _ANSWER_S[level] + _ANSWER_STEPS * iteration_s


def nodes_of(findings: Iterable[Finding], workers: Mapping[int, Worker]) -> tuple[str, ...]:
    """Where the culprits are: of a link its sending end, or the one that receives slowly from
    everybody."""
    ranks = {rank for finding in findings for rank in finding.ranks or finding.peer_ranks}
    return tuple(sorted({workers[rank].node for rank in ranks & workers.keys()} - {""}))


def why_kept(
    nodes: Sequence[str],
    facts: JobFacts | None,
    workers: Mapping[int, Worker],
    *,
    requeues: bool,
) -> str:
    """Why the job cannot do without those nodes; "" it can. requeues: a scheduler finds others."""
    if not nodes:
        return "nobody knows on which node its culprits are"
    if requeues or facts is None:
        return ""
    ranks = facts.ranks or range(facts.pp * facts.dp * facts.tp)
    if {workers[rank].node for rank in ranks if rank in workers} <= {*nodes}:
        return f"the job has no node but {', '.join(nodes)} to start again on"
    return ""


def ordered_before(
    unanswered: Mapping[int, tuple[Decision, Mapping[str, Any]]], now_s: float
) -> dict[int, Ordered]:
    """Orders of an earlier controller that may be answered yet, by number; their journal lines."""
    return {
        number: Ordered(
            number=number,
            decision=decision,
            asked_s=now_s,
            limit_s=0.0,
            nodes=tuple(map(str, line.get("nodes", ()))),
            why=str(line.get("why", "")),
        )
        for number, (decision, line) in unanswered.items()
    }


def given(ordered: Ordered, now_s: float) -> list[Instruction]:
    """The order itself."""
    decision = ordered.decision
    assert decision.plan is not None
    body = {"id": ordered.number, "level": decision.level, "episode": decision.episode}
    record: dict[str, Any] = {"what": "ordered", **body, "plan": decision.plan}
    if decision.level == "S4":
        record |= {"nodes": ordered.nodes, "why": ordered.why}
    return [
        Write(kind="action", record=record, t=now_s),
        Order(topic="steer", body=body | {"plan": asdict(decision.plan)}),
    ]


def failed(decision: Decision, error: str) -> Outcome:
    """It was not carried out."""
    return Outcome(
        episode=decision.episode, level=decision.level, ok=False, cost_s=0.0, error=error
    )


def restart(ordered: Ordered, now_s: float) -> list[Instruction]:
    """The job was saved: have it started again without the culprits' nodes."""
    body = {
        "id": f"{ordered.decision.episode}-{ordered.number}",
        "evict": list(ordered.nodes),
        "why": ordered.why,
    }
    return [
        Write(kind="action", record={"what": "restart", **body}, t=now_s),
        Order(topic="restart", body=body),
        Say(f"the job is saved and starts again without {', '.join(ordered.nodes)}"),
    ]


def said(decision: Decision) -> str:
    """A decision in words."""
    verb = {"stay": "stays at", "restore": "goes back to"}.get(decision.action, "goes to")
    if decision.plan is not None and not decision.apply:
        verb = "would go to"
    text = f"{verb} {decision.level}: {decision.reason}"
    plan = decision.plan
    if plan is not None and plan.microbatches:
        text += f"; micro-batches {list(plan.microbatches)}"
    if plan is not None and plan.placement:
        text += f"; workers {list(plan.placement)}"
    if plan is not None and plan.evict:
        text += f"; without {', '.join(plan.evict)}"
    return text
