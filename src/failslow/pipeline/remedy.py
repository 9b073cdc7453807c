"""From verdicts to what is done about them, and back once the culprits are well.

In: the job's iterations in an episode, `Verdict`s, letters of rank 0's Coordinator. Out: the
policy's `Decision`s as journal lines, `Order`s to carry them out, `Outcome`s:

    Order(topic="steer", body={"id": 3, "level": "S2", "plan": {"microbatches": [9, 5, 9, 9], …}})
    Report(topic="steer", body={"what": "outcome", "id": 3, "level": "S2", "ok": true, …})

While something is done about a fault the job looks healthy and its culprit is not: from then on
the culprit's own time decides (`CulpritPace`), never the job's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from failslow.config import DecideConfig
from failslow.decide import Event as PolicyEvent
from failslow.decide import InForce, LayoutPlanner, Pace, Policy, Relieved, Tick
from failslow.errors import PlanError
from failslow.journal import JournalEntry
from failslow.localize.calibrate import calibrate
from failslow.pipeline.aftermath import SETTLE, Aftermath
from failslow.pipeline.desk import Desk
from failslow.pipeline.experience import Experience
from failslow.pipeline.letters import LetterError, read_command, read_facts, read_outcome
from failslow.pipeline.messages import Instruction, Report, Say, Write
from failslow.pipeline.orders import (
    Ordered,
    answer_limit_s,
    failed,
    given,
    nodes_of,
    ordered_before,
    restart,
    said,
    why_kept,
)
from failslow.pipeline.own import OWN, OwnTimes
from failslow.pipeline.paces import Paces
from failslow.pipeline.past import Past
from failslow.pipeline.series import JobStep, Worker
from failslow.pipeline.takeback import TakeBack, even_again, left_by
from failslow.pipeline.toldsplit import ToldSplit
from failslow.records import (
    CulpritPace,
    Decision,
    Finding,
    JobFacts,
    Outcome,
    RankProfile,
    Verdict,
)

__all__ = ["Remedy"]

_PACE_EVERY_S = 0.5
_STANDING_S = 60.0
_STANDING_RANKS_PER_S = 50
"""How often what must not be lost is repeated in the journal: the facts of a large job are long."""
_ANEW_S = 60.0
"""Within so long after their Coordinator's first letter new workers are known by their samples."""


class Remedy:
    """Carries out one job's policy."""

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
        self._anew_s = -math.inf
        """When another Coordinator spoke up last."""
        self._standing_s: float | None = None
        self._findings: dict[str, Finding] = {}
        """The policy's culprits, and some it may have forgiven..."""
        self._well: set[str] = set()
        """...those that a pause has proved well since."""
        self._own = OwnTimes(workers)
        self._told_split = ToldSplit()
        self._paces = Paces(config)
        self._paced_s = -1.0
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

    def recall(self, entries: Iterable[JournalEntry], past: Past | None) -> None:
        """Levels cost what earlier controllers of this job measured, or a job with its layout."""
        self._experience = Experience.of(entries, past)

    def resume(self, past: Past, now_s: float) -> list[Instruction]:
        """Another controller of this launch knew of the job what `past` says.

        A split that is in force, or may be by an order nobody answered, is taken back, since the
        culprits it was for are not known here: if they are still slow they are found again.
        Workers that changed places stay where they are, unless they were started again since.
        """
        desk = self._desk
        desk.next_id = max(desk.next_id, past.next_id)
        if past.facts is None:
            return []
        with suppress(PlanError):
            self._policy, self.facts = self._make_policy(past.facts, self.evictions), past.facts
        if self.facts is None:
            return []
        self._calibrate([*past.profiles.values()])
        even, at_start = self._initial.microbatches, self._initial.placement
        placement = at_start if past.ended else past.placement or at_start
        self._policy.in_force = InForce(microbatches=even, placement=placement)
        if past.ended:
            return []  # workers that are started again begin with the even split
        desk.unanswered = ordered_before(past.unanswered, now_s)
        desk.back = left_by(past, even, self._config.mode)
        return [] if desk.back is None else self._told([desk.back.order()], now_s)

    def standing(self, now_s: float) -> list[Instruction]:
        """Now and then: what one that goes on must know, which only reads the journal's end."""
        facts, force = self.facts, self._policy.in_force
        every_s = max(_STANDING_S, len(force.placement) / _STANDING_RANKS_PER_S)
        if self._standing_s is not None and now_s - self._standing_s < every_s:
            return []
        self._standing_s = now_s
        if facts is None:
            return []
        again = self._experience.repeated(now_s)
        return [Write(kind="jobfacts", record=facts, t=now_s), self._stands(now_s), *again]

    def _stands(self, now_s: float, **more: Any) -> Write:
        """What is in force."""
        about = {"next_id": self._desk.next_id} | more
        force, back = self._policy.in_force, self._desk.back
        if back is not None:  # planned for as if it were gone already
            force = replace(force, microbatches=back.split)
        record = {"what": "standing", **asdict(force), **about}
        return Write(kind="action", record=record, t=now_s)

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
                return self._decide(read_command(body), now_s)
            if what == "facts":
                return self._learn_facts(read_facts(body), now_s)
            if what == "pace":
                rank = int(body["rank"])
                self._own.tell(rank, float(body["microbatch_s"]))
                self._told_split.tell(rank, body.get("microbatches"))
            if what == "outcome":
                return self._answer(body.pop("id", None), read_outcome(body), now_s)
        except (LetterError, PlanError, KeyError, TypeError, ValueError) as error:
            first = str(error).splitlines()[0]
            return [Say(f"a letter of the job's coordinator makes no sense: {first}")]
        return []

    def verdict(self, verdict: Verdict, now_s: float) -> list[Instruction]:
        """Culprits were proved, or found well again."""
        for finding in verdict.findings:
            self._findings[finding.key] = finding
        self._well -= {finding.key for finding in verdict.findings}
        self._well |= self._findings.keys() & set(verdict.well)
        out = self._decide(verdict, now_s)
        # what was measured again and is not slow any more is well
        well = [key for key in self._findings if key in verdict.well]
        self._paces.forget([*well, *(finding.key for finding in verdict.findings)])
        for key in well:
            out += self._culprit_pace(CulpritPace(key=key, slowdown=1.0), now_s)
        return out

    def pace(
        self,
        step: JobStep,
        *,
        episode: str | None,
        slowdown: float,
        lost_s: float,
        healthy_s: float | None,
        now_s: float,
    ) -> list[Instruction]:
        """An iteration of the job in an episode, or (None) while something is done about a fault
        whose episode is not followed further."""
        self._step_s = step.sample.duration_s
        out = self._measure(step, slowdown, healthy_s if episode else None, now_s)
        if now_s - self._paced_s < _PACE_EVERY_S:
            return out
        self._paced_s = now_s
        present = self._aftermath.present(slowdown)
        if episode and present is not None:
            out += self._job_pace(Pace(episode=episode, slowdown=present, lost_s=lost_s), now_s)
        if self.holding and self._desk.asked is None and self._aftermath.since >= SETTLE + OWN:
            self._arrange()
            news = self._paces.news(self._own, self._findings, now_s, well=self._well)
            for pace in news:
                out += self._culprit_pace(pace, now_s)
        return out

    def healthy(
        self, profiles: Sequence[RankProfile], *, before_t: float, again: bool = False
    ) -> None:
        """A suspicion begins: keep what was healthy until then, to plan and to compare by. again:
        it has become an episode."""
        self._arrange()
        self._own.learn(again=again, before_t=before_t)
        self._calibrate(profiles)

    def own_slowdowns(self) -> dict[int, float]:
        """How slow each worker is by its own time per micro-batch, where that is known."""
        self._arrange()
        found = {rank: self._own.slowdown(rank) for rank in self._workers}
        return {rank: own for rank, own in found.items() if own is not None}

    def relieved(
        self, episode: str, lost_s: float, now_s: float, *, abandoned: bool = False
    ) -> list[Instruction]:
        """The episode is over."""
        out: list[Instruction] = []
        if abandoned:
            self._own.change()
            self._aftermath.forget()
            if self._policy.applied != "S1" or self._policy.waiting:
                # nobody measures any more how the job fares: nothing is lost but what is seen
                out += self._job_pace(Pace(episode=episode, slowdown=1.0, lost_s=lost_s), now_s)
        event = Relieved(episode=episode, lost_s=lost_s, abandoned=abandoned)
        out += self._decide(event, now_s)
        if not self.holding:
            self._findings = {}
            self._own.forget_told()  # much of it is of slow times
        return out

    def changed(self) -> None:
        """The program is another one, or works on something else."""
        self._own.change()

    def restarted(self, now_s: float) -> list[Instruction]:
        """The workers were started again."""
        if now_s - self._anew_s < _ANEW_S:
            return []  # their Coordinator has said so before they could
        return self._begin_again("the workers were started again", now_s)

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

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed."""
        asked, back = self._desk.asked, self._desk.back
        if asked is not None:
            return self._give_up(asked, now_s) if asked.is_overdue(now_s) else []
        if back is not None and back.is_due(now_s):
            return self._told([back.order()], now_s)
        if back is None and self.facts is not None:
            split = self._told_split.other(self.facts, self._policy.in_force, now_s)
            if split is not None:
                return self._set_right(split, now_s)
        due_s = self._policy.due_s()
        return self._decide(Tick(), now_s) if due_s is not None and now_s >= due_s else []

    # -- the policy --------------------------------------------------------------------------------

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

    def _learn_facts(self, facts: JobFacts, now_s: float) -> list[Instruction]:
        known = self.facts
        if known is not None and replace(facts, iteration_s=known.iteration_s) == known:
            if bool(known.iteration_s) == bool(facts.iteration_s):
                return []  # it only knows its pace better
            self.facts = facts
            out: list[Instruction] = [Write(kind="jobfacts", record=facts, t=now_s)]
            if known.iteration_s:  # a Coordinator that knows its pace does not forget it
                self._anew_s = now_s
                return out + self._begin_again("the job has another Coordinator", now_s)
            if not self._calibrated:  # until now gains were guessed, in rounds of micro-batches
                self._fit(facts)
            return out
        evictions = self._policy.evictions
        if known is not None:
            self._experience.forget_refusals()
        policy = self._make_policy(facts, evictions)  # a PlanError leaves all as it was
        self.facts, self._policy, self._calibrated = facts, policy, False
        self._desk.clear()  # its orders are of another trainer
        self._told_split.forget()
        if known is not None:
            self._own = OwnTimes(self._workers)
        self._standing_s = now_s
        return [Write(kind="jobfacts", record=facts, t=now_s)]

    def _decide(self, event: PolicyEvent, now_s: float) -> list[Instruction]:
        return self._told(self._policy.update(event, now_s), now_s)

    def _job_pace(self, pace: Pace, now_s: float) -> list[Instruction]:
        """How the job fares; into the journal where an episode's own records tell it otherwise."""
        out: list[Instruction] = []
        told = (pace.episode, pace.slowdown)
        if told != self._paced and (self.holding or self._paced is None):
            record = {"what": "pace", **asdict(pace)}
            out.append(Write(kind="action", record=record, t=now_s))
        self._paced = told
        return out + self._decide(pace, now_s)

    def _culprit_pace(self, pace: CulpritPace, now_s: float) -> list[Instruction]:
        return [Write(kind="culpritpace", record=pace, t=now_s), *self._decide(pace, now_s)]

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

    def _measure(
        self, step: JobStep, level: float, healthy_s: float | None, now_s: float
    ) -> list[Instruction]:
        """What the change left of the slowdown, once enough iterations have shown it."""
        # while an order waits it would pass for the answer
        left = self._aftermath.take(
            step.sample.duration_s, level, healthy_s=healthy_s, waits=self._desk.asked is not None
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

    def _arrange(self) -> None:
        """How the job runs now, for the workers' own times."""
        since = self._aftermath.since - SETTLE
        self._own.arrange(self.facts, self._policy.in_force, self._initial, since=since)
