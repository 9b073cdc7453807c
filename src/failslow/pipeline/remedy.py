"""From verdicts to what is done about them, and back once the culprits are well.

In: the job's iterations in an episode, `Verdict`s, letters of rank 0's Coordinator. Out: the
policy's `Decision`s as journal lines, `Order`s to carry them out, `Outcome`s:

    Order(topic="steer", body={"id": 3, "level": "S2", "plan": {"microbatches": [9, 5, 9, 9], …}})
    Report(topic="steer", body={"what": "outcome", "id": 3, "level": "S2", "ok": true, …})

While something is done about a fault the job looks healthy and its culprit is not: from then on
the culprit's own time decides (`CulpritPace`), never the job's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from statistics import median
from typing import Any

from pydantic import TypeAdapter, ValidationError

from failslow.config import DecideConfig
from failslow.decide import Event as PolicyEvent
from failslow.decide import InForce, LayoutPlanner, Pace, Policy, Relieved, Tick
from failslow.errors import PlanError
from failslow.localize.calibrate import calibrate
from failslow.pipeline.aftermath import SETTLE, Aftermath
from failslow.pipeline.messages import Instruction, Order, Report, Say, Write
from failslow.pipeline.orders import Ordered, answer_limit_s, nodes_of, said
from failslow.pipeline.past import Past
from failslow.pipeline.series import JobStep, Worker
from failslow.records import (
    Command,
    CulpritPace,
    Decision,
    Finding,
    JobFacts,
    Outcome,
    Plan,
    RankProfile,
    Verdict,
)

__all__ = ["Remedy"]

_PACE_EVERY_S = 0.5
_STANDING_S = 60.0
_STANDING_RANKS_PER_S = 50
"""How often what must not be lost is repeated in the journal: the facts of a large job are long."""
_MOST_UNANSWERED = 64
_OWN = 5
"""Iterations whose median is a worker's own time now."""
_PACES = 3
"""Last letters of a worker about its pace that count: one comes every second."""
_PACES_KEPT = 64
"""Letters that tell of healthy times. Where an iteration takes seconds, those since the onset are
among them when the suspicion begins: their lower quartile is healthy all the same."""
_FACTS: TypeAdapter[JobFacts] = TypeAdapter(JobFacts)
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)


class Remedy:
    """Carries out one job's policy."""

    def __init__(self, config: DecideConfig, *, workers: Mapping[int, Worker]) -> None:
        """workers: those of the job, as they are at any time."""
        self._config, self._workers = config, workers
        self.facts: JobFacts | None = None
        self._initial = InForce()
        self._policy = self._make_policy(None, 0)
        self._asked: Ordered | None = None
        """The order that is being carried out."""
        self._unanswered: dict[int, Ordered] = {}
        """Those before it that were given up, by their ids: they may be carried out yet."""
        self._settled = 0
        """The latest order that was carried out: what is in force is not of one before it."""
        self._next_id = 1
        self._step_s = 0.0
        """What an iteration takes."""
        self._standing_s: float | None = None
        self._findings: dict[str, Finding] = {}
        self._own_s: dict[int, float] = {}
        """Healthy own seconds per iteration of each worker, with the even split."""
        self._microbatch_s: dict[int, deque[float]] = {}
        """Seconds a micro-batch took it lately, as each worker tells..."""
        self._healthy_microbatch_s: dict[int, float] = {}
        """...and told in healthy times."""
        self._paced_s = -1.0
        self._aftermath = Aftermath()

    @property
    def holding(self) -> bool:
        """Something is done about a fault: job time says nothing of its culprits."""
        return self._policy.applied != "S1" or self._asked is not None

    @property
    def evictions(self) -> int:
        """Hosts the job has lost to S4 so far."""
        return self._policy.evictions

    @evictions.setter
    def evictions(self, count: int) -> None:
        self._policy.evictions = count

    def resume(self, past: Past, now_s: float) -> list[Instruction]:
        """Another controller of this launch knew of the job what `past` says.

        A split that is in force, or may be by an order nobody answered, is taken back, since the
        culprits it was for are not known here: if they are still slow they are found again.
        Workers that changed places stay where they are, unless they were started again since.
        """
        self._next_id = max(self._next_id, past.next_id)
        if past.facts is None:
            return []
        with suppress(PlanError):
            self._policy, self.facts = self._make_policy(past.facts, self.evictions), past.facts
        if self.facts is None:
            return []
        even, at_start = self._initial.microbatches, self._initial.placement
        placement = at_start if past.ended else past.placement or at_start
        self._policy.in_force = InForce(microbatches=even, placement=placement)
        splits = [past.microbatches]
        for number, (decision, line) in past.unanswered.items():
            splits.append(decision.plan.microbatches if decision.plan is not None else ())
            if not past.ended:
                self._unanswered[number] = Ordered(
                    number=number,
                    decision=decision,
                    asked_s=now_s,
                    limit_s=0.0,
                    nodes=tuple(map(str, line.get("nodes", ()))),
                    why=str(line.get("why", "")),
                )
        if all(split in ((), even) for split in splits):
            return []
        number, self._next_id = self._next_id, self._next_id + 1
        back = Plan(level="S1", predicted_slowdown=1.0, microbatches=even)
        body = {"id": number, "level": "S1", "episode": "", "plan": asdict(back)}
        return [Order(topic="steer", body=body), Say("the even split is restored")]

    def standing(self, now_s: float) -> list[Instruction]:
        """Now and then: what one that goes on must know, which only reads the journal's end."""
        facts, force = self.facts, self._policy.in_force
        every_s = max(_STANDING_S, len(force.placement) / _STANDING_RANKS_PER_S)
        if self._standing_s is not None and now_s - self._standing_s < every_s:
            return []
        self._standing_s = now_s
        if facts is None:
            return []
        record = {"what": "standing", **asdict(force), "next_id": self._next_id}
        return [
            Write(kind="jobfacts", record=facts, t=now_s),
            Write(kind="action", record=record, t=now_s),
        ]

    # -- events ------------------------------------------------------------------------------------

    def report(self, event: Report, now_s: float) -> list[Instruction]:
        """A letter of the Coordinator, or a person's command."""
        body = dict(event.body)
        what = body.pop("what", "")
        if event.topic == "restart":
            error = body.get("error")
            return [Say(f"node {event.node} cannot be told to restart: {error}")] if error else []
        try:
            if event.topic == "act":
                return self._decide(_COMMAND.validate_python({"order": body.get("order")}), now_s)
            if what == "facts":
                return self._learn_facts(_FACTS.validate_python(_known(body, JobFacts)), now_s)
            if what == "pace":
                self._take_pace(body)
            if what == "outcome":
                number = body.pop("id", None)
                return self._answer(number, _OUTCOME.validate_python(_known(body, Outcome)), now_s)
        except (ValidationError, PlanError, KeyError, TypeError, ValueError) as error:
            first = str(error).splitlines()[0]
            return [Say(f"a letter of the job's coordinator makes no sense: {first}")]
        return []

    def _take_pace(self, body: Mapping[str, Any]) -> None:
        """A worker says what a micro-batch takes it."""
        rank, seconds = int(body["rank"]), float(body["microbatch_s"])
        if seconds > 0.0:
            self._microbatch_s.setdefault(rank, deque(maxlen=_PACES_KEPT)).append(seconds)

    def verdict(self, verdict: Verdict, now_s: float) -> list[Instruction]:
        """Culprits were proved, or found well again."""
        for finding in verdict.findings:
            self._findings[finding.key] = finding
        out = self._decide(verdict, now_s)
        if self.holding:  # what was measured again and is not slow any more is well
            for key in [key for key in self._findings if key in verdict.well]:
                out += self._decide(CulpritPace(key=key, slowdown=1.0), now_s)
        return out

    def pace(
        self,
        step: JobStep,
        *,
        episode: str,
        slowdown: float,
        lost_s: float,
        healthy_s: float | None,
        now_s: float,
    ) -> list[Instruction]:
        """An iteration of the job in an episode."""
        self._step_s = step.sample.duration_s
        out = self._measure(step, slowdown, healthy_s, now_s)
        if now_s - self._paced_s < _PACE_EVERY_S:
            return out
        self._paced_s = now_s
        present = self._aftermath.present(slowdown)
        if present is not None:
            out += self._decide(Pace(episode=episode, slowdown=present, lost_s=lost_s), now_s)
        if self.holding and self._asked is None and self._aftermath.since >= SETTLE + _OWN:
            for key, finding in list(self._findings.items()):
                own = self._own_slowdown(finding)
                if own is not None:
                    out += self._decide(CulpritPace(key=key, slowdown=own), now_s)
        return out

    def healthy(self, profiles: Sequence[RankProfile]) -> None:
        """A suspicion begins: keep what was healthy until now, to plan and to compare by."""
        for worker in self._workers.values():
            own = [s.compute_s for s in worker.healthy if s.compute_s is not None]
            if len(own) >= _OWN:
                self._own_s[worker.rank] = median(own)
        for rank, told in self._microbatch_s.items():
            self._healthy_microbatch_s.setdefault(rank, sorted(told)[(len(told) - 1) // 4])
        if self.facts is not None and profiles:
            with suppress(PlanError):
                self._policy.fit(LayoutPlanner(calibrate(self.facts, profiles), self._config))

    def own_slowdowns(self) -> dict[int, float]:
        """How slow each worker is by its own time per micro-batch, where that is known."""
        found = {rank: self._own_of(worker) for rank, worker in self._workers.items()}
        return {rank: own for rank, own in found.items() if own is not None}

    def relieved(
        self, episode: str, lost_s: float, now_s: float, *, abandoned: bool = False
    ) -> list[Instruction]:
        """The episode is over."""
        event = Relieved(episode=episode, lost_s=lost_s, abandoned=abandoned)
        out = self._decide(event, now_s)
        if not self.holding:
            self._findings = {}
        return out

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed."""
        asked = self._asked
        if asked is not None:
            return self._give_up(asked, now_s) if asked.is_overdue(now_s) else []
        due_s = self._policy.due_s()
        return self._decide(Tick(), now_s) if due_s is not None and now_s >= due_s else []

    # -- the policy --------------------------------------------------------------------------------

    def _make_policy(self, facts: JobFacts | None, evictions: int) -> Policy:
        planner = LayoutPlanner(facts, self._config)
        self._initial = planner.initial()
        return Policy(planner, self._config, evictions=evictions)

    def _learn_facts(self, facts: JobFacts, now_s: float) -> list[Instruction]:
        known = self.facts
        if known is not None and replace(facts, iteration_s=known.iteration_s) == known:
            return []  # it only knows its pace better
        evictions = self._policy.evictions
        policy = self._make_policy(facts, evictions)  # a PlanError leaves all as it was
        self.facts, self._policy, self._asked = facts, policy, None
        self._unanswered = {}  # of another trainer
        self._standing_s = now_s
        return [Write(kind="jobfacts", record=facts, t=now_s)]

    def _decide(self, event: PolicyEvent, now_s: float) -> list[Instruction]:
        return self._told(self._policy.update(event, now_s), now_s)

    def _told(self, decisions: Sequence[Decision], now_s: float) -> list[Instruction]:
        out: list[Instruction] = []
        for decision in decisions:
            out.append(Write(kind="decision", record=decision, t=now_s))
            out.append(Say(said(decision)))
            if decision.apply and decision.plan is not None:
                out += self._carry_out(decision, now_s)
        return out

    def _carry_out(self, decision: Decision, now_s: float) -> list[Instruction]:
        assert decision.plan is not None
        number, self._next_id = self._next_id, self._next_id + 1
        found = tuple(self._findings[key] for key in decision.culprits if key in self._findings)
        asked = Ordered(
            number=number,
            decision=decision,
            asked_s=now_s,
            limit_s=answer_limit_s(decision.level, self._step_s),
            findings=found,
            nodes=nodes_of(found, self._workers),
            why=", ".join(f"{finding.key} x{finding.slowdown:.2f}" for finding in found),
        )
        self._asked = asked
        body = {"id": number, "level": decision.level, "episode": decision.episode}
        record: dict[str, Any] = {"what": "ordered", **body, "plan": decision.plan}
        if decision.level == "S4":
            record |= {"nodes": asked.nodes, "why": asked.why}
        return [
            Write(kind="action", record=record, t=now_s),
            Order(topic="steer", body=body | {"plan": asdict(decision.plan)}),
        ]

    def _give_up(self, asked: Ordered, now_s: float) -> list[Instruction]:
        """It was not answered, which does not mean that it is not carried out yet."""
        self._asked = None
        self._unanswered[asked.number] = asked
        for number in [*self._unanswered][:-_MOST_UNANSWERED]:
            del self._unanswered[number]
        outcome = Outcome(
            episode=asked.decision.episode,
            level=asked.decision.level,
            ok=False,
            cost_s=0.0,
            error=f"the job's coordinator did not answer within {asked.limit_s:.0f} s",
        )
        out: list[Instruction] = [
            Write(kind="outcome", record=outcome, t=now_s),
            Say(f"{outcome.level} failed: {outcome.error}"),
        ]
        out += self._decide(outcome, now_s)
        self._begin_anew(outcome)
        return out

    def _answer(self, number: Any, outcome: Outcome, now_s: float) -> list[Instruction]:
        asked = self._asked
        is_late = asked is None or number != asked.number
        ordered = self._unanswered.pop(number, None) if is_late else asked
        if ordered is None:
            return []  # of no order that is known, or answered before
        decision = ordered.decision
        outcome = replace(outcome, episode=decision.episode, level=decision.level)
        after_all = " after all" if is_late else ""
        how = f"took {outcome.cost_s:.3g} s" if outcome.ok else f"failed: {outcome.error}"
        out: list[Instruction] = [
            Write(kind="outcome", record=outcome, t=now_s, tags={"id": number}),
            Say(f"{decision.level}{after_all} {how}"),
        ]
        if is_late and not outcome.ok:
            return out  # as was thought
        if outcome.ok and decision.level == "S4":
            out += self._restart(ordered, now_s)
            self._asked, self._unanswered = None, {}  # the job they were for has ended
        elif not is_late:
            self._asked = None
        elif ordered.number < self._settled:
            return out  # something else is in force since
        if outcome.ok:
            self._settled = max(self._settled, ordered.number)
            self._findings |= {f.key: f for f in ordered.findings if f.key not in self._findings}
        if is_late:
            out += self._told(self._policy.late(decision, outcome, now_s), now_s)
        else:
            out += self._decide(outcome, now_s)
        self._begin_anew(outcome)
        return out

    def _begin_anew(self, outcome: Outcome) -> None:
        """What was measured before an outcome says nothing of the job after it."""
        self._microbatch_s.clear()
        self._aftermath.begin(outcome)
        if not self.holding:
            self._findings = {}

    def _restart(self, ordered: Ordered, now_s: float) -> list[Instruction]:
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

    def _measure(
        self, step: JobStep, level: float, healthy_s: float | None, now_s: float
    ) -> list[Instruction]:
        """What the change left of the slowdown, once enough iterations have shown it."""
        # while an order waits it would pass for the answer
        left = self._aftermath.take(
            step.sample.duration_s, level, healthy_s=healthy_s, waits=self._asked is not None
        )
        if left is None:
            return []
        outcome = Outcome(
            episode=self._policy.episode,
            level=self._policy.applied,
            ok=True,
            cost_s=0.0,
            slowdown=left,
        )
        out: list[Instruction] = [Write(kind="outcome", record=outcome, t=now_s)]
        return [*out, *self._decide(outcome, now_s)]

    # -- culprits' own times -----------------------------------------------------------------------

    def _own_slowdown(self, finding: Finding) -> float | None:
        """How slow a device or host is by its workers' time per micro-batch; None unknown."""
        if finding.what == "link":
            return None
        workers = [self._workers[rank] for rank in finding.ranks if rank in self._workers]
        known = [own for worker in workers if (own := self._own_of(worker)) is not None]
        return max(known, default=None)

    def _own_of(self, worker: Worker) -> float | None:
        """By what the worker tells of its micro-batches, else by its time outside of calls."""
        force, initial, facts = self._policy.in_force, self._initial, self.facts
        recent = [s.compute_s for s in worker.recent if s.compute_s is not None][-_OWN:]
        now_s = median(recent) if len(recent) == _OWN else None
        if facts is None:
            usual_s = self._own_s.get(worker.rank)
            return now_s / usual_s if usual_s and now_s is not None else None
        ranks = force.placement or initial.placement
        if worker.rank not in ranks:
            return None
        position = ranks.index(worker.rank)
        # who had this part of the model in healthy times tells what it takes
        earlier = initial.placement[position]
        told, usual_s = self._microbatch_s.get(worker.rank), self._healthy_microbatch_s.get(earlier)
        if told and len(told) >= _PACES - 1 and usual_s:
            return median(list(told)[-_PACES:]) / usual_s
        usual_s = self._own_s.get(earlier)
        replica = position // facts.tp % facts.dp
        counts, even = force.microbatches, initial.microbatches
        share = counts[replica] / even[replica] if counts and even and even[replica] else 1.0
        if now_s is None or not usual_s or share <= 0.0:
            return None
        return now_s / (usual_s * share)


def _known(body: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """The fields of `cls` among `body`: a newer trainer may say more."""
    return {f.name: body[f.name] for f in fields(cls) if f.name in body}
