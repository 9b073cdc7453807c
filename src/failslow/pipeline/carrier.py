"""A policy's decisions carried out: ordered, answered, late, failed, or gone of themselves.

In: decisions, a Coordinator's answers, what workers tell they run. Out: journal lines, orders, and
what the policy must know of them:

    Order(topic="steer", body={"id": 3, "level": "S2", "plan": {"microbatches": [9, 5, 9, 9], …}})
    Write(kind="outcome", record=Outcome(level="S2", ok=True, cost_s=0.004, …), tags={"id": 3})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from failslow.config import DecideConfig
from failslow.decide import Event as PolicyEvent
from failslow.decide import InForce, LayoutPlanner, Policy
from failslow.errors import PlanError
from failslow.localize.calibrate import calibrate
from failslow.pipeline.aftermath import Aftermath
from failslow.pipeline.desk import Desk
from failslow.pipeline.experience import Experience
from failslow.pipeline.messages import Instruction, Say, Write
from failslow.pipeline.orders import (
    Ordered,
    answer_limit_s,
    failed,
    given,
    nodes_of,
    restart,
    said,
    why_kept,
)
from failslow.pipeline.own import OwnTimes
from failslow.pipeline.series import Worker
from failslow.pipeline.takeback import TakeBack, even_again
from failslow.pipeline.toldsplit import ToldSplit
from failslow.records import Decision, Finding, JobFacts, Outcome, RankProfile

__all__ = ["Carrier"]


class Carrier:
    """Has one job's policy carried out, and knows what is in force."""

    def __init__(self, config: DecideConfig, *, workers: Mapping[int, Worker]) -> None:
        """workers: those of the job, as they are at any time."""
        self._config, self._workers = config, workers
        self.facts: JobFacts | None = None
        self._calibrated = False
        """Plans are made by profiles of healthy workers."""
        self._initial = InForce()
        self._experience = Experience()
        self._policy = self._make_policy(None, 0)
        self._desk = Desk()
        self._step_s = 0.0
        """What an iteration takes."""
        self._findings: dict[str, Finding] = {}
        """The policy's culprits, and some it may have forgiven."""
        self._own = OwnTimes(workers)
        self._told_split = ToldSplit()
        self._paced: tuple[str, float] | None = None
        """The episode and the slowdown told to the policy last; None: it has begun anew since."""
        self._aftermath = Aftermath()

    @property
    def holding(self) -> bool:
        """Something is done about a fault: job time says nothing of its culprits."""
        return self._policy.applied != "S1" or self._desk.busy

    @property
    def evictions(self) -> int:
        """Hosts the job has lost to S4 so far."""
        return self._policy.evictions

    @evictions.setter
    def evictions(self, count: int) -> None:
        self._policy.evictions = count

    # -- what is planned by ------------------------------------------------------------------------

    def _make_policy(self, facts: JobFacts | None, evictions: int) -> Policy:
        planner = LayoutPlanner(facts, self._config, evictions=evictions)
        self._initial = planner.initial()
        policy = Policy(planner, self._config, evictions=evictions)
        self._experience.give(policy.costs, facts)
        return policy

    def _calibrate(self, profiles: Sequence[RankProfile]) -> None:
        """Plan by what these tell of healthy times."""
        if self.facts is not None and profiles:
            with suppress(PlanError):
                self._fit(calibrate(self.facts, profiles))
                self._calibrated = True

    def _fit(self, facts: JobFacts) -> None:
        """Plan by these from here on; a PlanError leaves all as it was."""
        self._policy.fit(LayoutPlanner(facts, self._config, evictions=self.evictions))

    # -- decisions ---------------------------------------------------------------------------------

    def _decide(self, event: PolicyEvent, now_s: float) -> list[Instruction]:
        return self._told(self._policy.update(event, now_s), now_s)

    def _told(self, decisions: Sequence[Decision], now_s: float) -> list[Instruction]:
        out: list[Instruction] = [*self._experience.news(self._policy.costs, self.facts, now_s)]
        for decision in decisions:
            out.append(Write(kind="decision", record=decision, t=now_s))
            out.append(Say(said(decision)))
            if decision.apply and decision.plan is not None:
                out += self._carry_out(decision, now_s)
        return out

    def _carry_out(self, decision: Decision, now_s: float) -> list[Instruction]:
        desk = self._desk
        found = tuple(self._findings[key] for key in decision.culprits if key in self._findings)
        asked = Ordered(
            number=desk.next_id,
            decision=decision,
            asked_s=now_s,
            limit_s=answer_limit_s(decision.level, self._step_s),
            findings=found,
            nodes=nodes_of(found, self._workers),
            why=", ".join(f"{finding.key} x{finding.slowdown:.2f}" for finding in found),
            apart=desk.back is not None and decision is desk.back.decision,
        )
        if decision.level == "S4":
            requeues = self._config.slurm == "requeue"
            why = why_kept(asked.nodes, self.facts, self._workers, requeues=requeues)
            if why:
                return self._failed(decision, why, now_s)
        desk.give(asked)
        return given(asked, now_s)

    def _give_up(self, asked: Ordered, now_s: float) -> list[Instruction]:
        self._desk.give_up()
        error = f"the job's coordinator did not answer within {asked.limit_s:.0f} s"
        return self._failed(asked.decision, error, now_s, apart=asked.apart)

    def _failed(
        self, decision: Decision, error: str, now_s: float, *, apart: bool = False
    ) -> list[Instruction]:
        """An order nobody answered, or that was not even given."""
        outcome = failed(decision, error)
        out: list[Instruction] = [
            Write(kind="outcome", record=outcome, t=now_s),
            Say(f"{outcome.level} failed: {outcome.error}"),
        ]
        out += self._not_back(now_s) if apart else self._decide(outcome, now_s)
        self._begin_anew(outcome)
        return out

    def _answer(self, number: Any, outcome: Outcome, now_s: float) -> list[Instruction]:
        asked = self._desk.asked
        is_late = asked is None or number != asked.number
        ordered = self._desk.answered(number, ok=outcome.ok)
        if ordered is None:
            return []
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
        is_restart = outcome.ok and decision.level == "S4"
        if is_restart:
            out += restart(ordered, now_s)
        if outcome.ok:
            if not self._desk.settle(ordered) and not is_restart:
                return out
            self._findings |= {f.key: f for f in ordered.findings if f.key not in self._findings}
            if is_restart or (decision.level == "S1" and not (is_late or ordered.apart)):
                self._findings = {}  # the fault is over
        if ordered.apart and not outcome.ok:
            out += self._not_back(now_s)
        elif is_late or ordered.apart:
            out += self._told(self._policy.late(decision, outcome, now_s), now_s)
        else:
            out += self._decide(outcome, now_s)
        self._begin_anew(outcome)
        return out

    def _begin_anew(self, outcome: Outcome) -> None:
        """What was measured before an outcome says nothing of the job after it."""
        self._forget_told()
        self._aftermath.begin(outcome)
        if outcome.ok and outcome.level == "S1":
            self._paced = None

    def _forget_told(self) -> None:
        """What workers told is of another split."""
        self._own.forget_told()
        self._told_split.forget()

    def _not_back(self, now_s: float) -> list[Instruction]:
        """The split that an earlier controller left is still there, as far as is known."""
        back = self._desk.back
        if back is None or back.fail(now_s):
            return []
        self._desk.back = None
        self._policy.in_force = replace(self._policy.in_force, microbatches=back.split)
        return [Say(f"the even split cannot be restored: micro-batches {list(back.split)} stay")]

    # -- what is in force without a decision -------------------------------------------------------

    def _stands(self, now_s: float, **more: Any) -> Write:
        """What is in force."""
        about = {"next_id": self._desk.next_id} | more
        force, back = self._policy.in_force, self._desk.back
        if back is not None:  # planned for as if it were gone already
            force = replace(force, microbatches=back.split)
        record = {"what": "standing", **asdict(force), **about}
        return Write(kind="action", record=record, t=now_s)

    def _begin_again(self, why: str, now_s: float) -> list[Instruction]:
        """The job runs as at the start, whatever was in force."""
        asked = self._desk.asked
        self._desk.clear()
        self._forget_told()
        out = self._lapse(self._initial, why, now_s, anew=True)
        if asked is not None and not asked.apart:
            out += self._failed(asked.decision, why, now_s)
        return out

    def _lapse(self, force: InForce, why: str, now_s: float, **more: Any) -> list[Instruction]:
        """The split is the even one again, though nobody ordered it."""
        policy = self._policy
        was, policy.in_force = policy.applied, force
        out: list[Instruction] = []
        if self.facts is not None:
            out.append(self._stands(now_s, **more))
        if was != "S1":
            outcome = Outcome(episode=policy.episode, level="S1", ok=True, cost_s=0.0)
            self._begin_anew(outcome)
            out.append(Write(kind="outcome", record=outcome, t=now_s))
            out.append(Say(f"{why}: {was} is not in force any more"))
            decision = even_again(self._initial.microbatches, self._config.mode, policy.episode)
            out += self._told(policy.late(decision, outcome, now_s), now_s)
        return out

    def _set_right(self, split: tuple[int, ...], now_s: float) -> list[Instruction]:
        """Workers run another split than is believed: an answer was lost, or nobody gave one."""
        policy, desk, even = self._policy, self._desk, self._initial.microbatches
        self._forget_told()
        if any(ordered.decision.level == "S3" for ordered in desk.unanswered.values()):
            return []  # if that was carried out, who runs which replica is not known
        why = f"workers tell of micro-batches {list(split)}"
        for number, ordered in reversed(desk.unanswered.items()):
            decision = ordered.decision
            if decision.plan is not None and decision.plan.microbatches == split:
                cost_s = policy.costs.cost(decision.level)[0]  # nobody told another
                outcome = Outcome(
                    episode=decision.episode, level=decision.level, ok=True, cost_s=cost_s
                )
                return [Say(why), *self._answer(number, outcome, now_s)]
        force = replace(policy.in_force, microbatches=split)
        if split == even:
            return self._lapse(force, why, now_s)
        policy.in_force = force
        again = even_again(even, self._config.mode, policy.episode, f"{why}, which nobody ordered")
        desk.back = TakeBack(again, split)
        return [self._stands(now_s), *self._told([desk.back.order()], now_s)]
