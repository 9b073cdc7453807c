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

from failslow.config import DecideConfig
from failslow.decide import InForce, Pace, Relieved, Tick
from failslow.errors import PlanError
from failslow.journal import JournalEntry
from failslow.pipeline.aftermath import SETTLE
from failslow.pipeline.carrier import Carrier
from failslow.pipeline.experience import Experience
from failslow.pipeline.letters import LetterError, read_command, read_facts, read_outcome
from failslow.pipeline.messages import Instruction, Report, Say, Write
from failslow.pipeline.orders import ordered_before
from failslow.pipeline.own import OWN, OwnTimes
from failslow.pipeline.paces import Paces
from failslow.pipeline.past import Past
from failslow.pipeline.series import JobStep, Worker
from failslow.pipeline.takeback import left_by
from failslow.records import CulpritPace, JobFacts, Outcome, RankProfile, Verdict

__all__ = ["Remedy"]

_PACE_EVERY_S = 0.5
_STANDING_S = 60.0
_STANDING_RANKS_PER_S = 50
"""How often what must not be lost is repeated in the journal: the facts of a large job are long."""
_ANEW_S = 60.0
"""Within so long after their Coordinator's first letter new workers are known by their samples."""


class Remedy(Carrier):
    """What one job's policy hears, and what follows from it."""

    def __init__(self, config: DecideConfig, *, workers: Mapping[int, Worker]) -> None:
        """workers: those of the job, as they are at any time."""
        super().__init__(config, workers=workers)
        self._anew_s = -math.inf
        """When another Coordinator spoke up last."""
        self._standing_s: float | None = None
        self._well: set[str] = set()
        """Culprits that a pause has proved well since they were named."""
        self._paces = Paces(config)
        self._paced_s = -1.0

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
