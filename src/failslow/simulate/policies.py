"""What policies would make of the faults of a simulated job: the real `decide.Policy`, in its job.

In: a `Scenario`, when its faults were noticed and what localisation said of them. Out: for each
policy what is lost to slowness and spent on what is done:

    cases = fault_cases(scenario, analysis_of_the_detector)
    PolicyTrial(scenario, cases, facts, config).run("full ladder")     # Trial(lost_s=..., ...)

Policies hear what the pipeline would tell them, when it would: the job's pace from the confirmed
onset on, a verdict after a pause, another at each recheck, outcomes of their own decisions, the
culprits' own pace once something is done, relief. What a plan leaves of a slowdown the simulator
works out, never the planner's own model. Actions and pauses cost their seconds and take no time
from a fault, which lasts as long as it lasts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal, TypeAlias, get_args

from failslow.config import DecideConfig
from failslow.decide import (
    Assessment,
    Event,
    History,
    Incident,
    InForce,
    LayoutPlanner,
    Pace,
    Planner,
    Policy,
    Relieved,
    Stretch,
    Tick,
)
from failslow.decide.levels import Outlook
from failslow.errors import PlanError
from failslow.records import (
    Command,
    CulpritPace,
    Decision,
    Finding,
    JobFacts,
    Outcome,
    Plan,
    Rung,
    Verdict,
)
from failslow.simulate.scenario import Scenario
from failslow.simulate.truth import JobTruth

__all__ = ["POLICY_NAMES", "FaultCase", "PolicyTrial", "StudyPolicy", "Trial", "incident_of"]

StudyPolicy: TypeAlias = Literal[
    "do nothing", "always restart", "S2 only", "full ladder", "ladder with history", "clairvoyant"
]
POLICY_NAMES: tuple[StudyPolicy, ...] = get_args(StudyPolicy)

_PAUSE_S = 4.0
"""What a pause for a verdict takes (`LocalizeConfig.pause_limit_s` bounds it at 5)."""
_VERDICT_S = 8.0
"""From the confirmed onset to the verdict: profiles, pause, telemetry."""
_RECHECK_S, _MOST_RECHECK_S = 60.0, 600.0
_MEASURED = 12
"""Iterations after a change whose median is its outcome."""
_NOTICED = 7
"""Iterations until a culprit's own time tells that it is well."""
_RELIEF_S = 10.0
_TRUST = 0.5
_EVICTIONS = 4
"""Hosts that policies which may restart at all may give up, in a job of several faults."""
_MOST_EVENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """Faults that begin together, as the tool sees them."""

    from_s: float
    until_s: float
    """When they are over: where one is restarted without them, they would have lasted so long."""
    noticed_s: float | None
    """When the onset was confirmed; None never."""
    slowdown: float
    """Of the job, nothing done."""
    findings: tuple[Finding, ...]
    """What localisation named."""
    truth: tuple[Finding, ...]
    """...and what is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of a job's faults under a policy."""

    policy: StudyPolicy
    lost_s: float
    """To slowness."""
    spent_s: float
    """On pauses and actions."""
    decisions: tuple[tuple[float, Decision], ...] = ()
    """With the job's time of each."""

    @property
    def total_s(self) -> float:
        """Both."""
        return self.lost_s + self.spent_s


def incident_of(case: FaultCase, name: str) -> Incident:
    """The fault as one of the past, for the history others learn from."""
    stretch = Stretch(after_s=0.0, slowdown=case.slowdown, findings=case.truth)
    return Incident(
        id=name,
        start_t=case.from_s,
        duration_s=case.until_s - case.from_s,
        ended=True,
        stretches=(stretch,),
    )


class _Only:
    """A planner of which some levels are left."""

    def __init__(self, planner: Planner, levels: Sequence[Rung]) -> None:
        self.planner, self._levels = planner, levels

    def initial(self) -> InForce:
        """How the job ran before anything was done."""
        return self.planner.initial()

    def assess(
        self, findings: Sequence[Finding], in_force: InForce, outlook: Outlook | None = None
    ) -> tuple[Assessment, ...]:
        """As the planner does; the levels left out are refused."""
        return tuple(
            found
            if found.level in self._levels
            else Assessment(level=found.level, applicable=False, reason="not by this policy")
            for found in self.planner.assess(findings, in_force, outlook)
        )


class PolicyTrial:
    """One job, any policy."""

    def __init__(
        self,
        scenario: Scenario,
        cases: Sequence[FaultCase],
        facts: JobFacts,
        config: DecideConfig,
        *,
        history: History | None = None,
    ) -> None:
        """facts: as calibrated by healthy profiles. history: for "ladder with history"."""
        self.truth, self.cases, self._history = JobTruth(scenario), list(cases), history or {}
        self._config = config.model_copy(
            update={"mode": "auto", "allow_restart": True, "max_evictions": _EVICTIONS}
        )
        self.planner = LayoutPlanner(facts, self._config)

    def run(self, name: StudyPolicy) -> Trial:
        """What comes of it."""
        if name == "do nothing":
            lost_s = sum(self._lost_s(case, InForce(), frozenset()) for case in self.cases)
            return Trial(policy=name, lost_s=lost_s, spent_s=0.0)
        if name == "clairvoyant":
            return self._clairvoyant()
        planner: Planner = self.planner
        if name == "always restart":
            planner = _Only(planner, ("S4",))
        elif name == "S2 only":
            planner = _Only(planner, ("S2",))
        learned = name == "ladder with history"
        trust = self._config.trust if self._config.trust < 1.0 else _TRUST
        config = self._config.model_copy(update={"trust": trust if learned else 1.0})
        policy = Policy(planner, config, history=self._history if learned else None)
        return _World(self, policy, name).run()

    def cost_s(self, level: Rung) -> float:
        """What going to a level really costs."""
        config = self._config
        return {
            "S1": 0.0,
            "S2": config.redistribute_cost_s,
            "S3": config.topology_cost_s,
            "S4": config.restart_cost_s,
        }[level]

    def _lost_s(self, case: FaultCase, in_force: InForce, without: frozenset[str]) -> float:
        left = self.truth.slowdown(case.from_s, in_force=in_force, without=without)
        return (case.until_s - case.from_s) * max(0.0, 1.0 - 1.0 / left)

    def _clairvoyant(self) -> Trial:
        """For each fault the best single level, at once, with the truth known."""
        lost_s = spent_s = 0.0
        for case in self.cases:
            ways = [(self._lost_s(case, InForce(), frozenset()), 0.0)]
            initial = self.planner.initial()
            for found in self.planner.assess(case.truth, initial):
                if found.plan is None:
                    continue
                force = _after(initial, found.plan)
                gone = frozenset(found.plan.evict)
                ways.append((self._lost_s(case, force, gone), self.cost_s(found.level)))
            best = min(ways, key=sum)
            lost_s, spent_s = lost_s + best[0], spent_s + best[1]
        return Trial(policy="clairvoyant", lost_s=lost_s, spent_s=spent_s)


class _World:
    """Plays a job's faults to a policy, and does what it decides."""

    def __init__(self, trial: PolicyTrial, policy: Policy, name: StudyPolicy) -> None:
        self._trial, self._policy, self._name = trial, policy, name
        self._now_s = self._lost_s = self._spent_s = self._episode_lost_s = 0.0
        self._force, self._without = trial.planner.initial(), frozenset[str]()
        self._ahead: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._decisions: list[tuple[float, Decision]] = []
        self._told: dict[str, Finding] = {}
        """Culprits the policy has been told of."""
        self._episode = ""

    def run(self) -> Trial:
        """To the end of the last fault, and of what was done about it."""
        for number, case in enumerate(self._trial.cases):
            self._at(case.from_s, self._turn)
            self._at(case.until_s, partial(self._over, case))
            if case.noticed_s is not None and case.noticed_s < case.until_s:
                self._at(case.noticed_s, partial(self._confirmed, case, number))
        for _ in range(_MOST_EVENTS):
            due_s = self._policy.due_s()
            next_s = self._ahead[0][0] if self._ahead else None
            if due_s is not None and (next_s is None or due_s <= next_s):
                self._advance(due_s)
                self._tell(Tick())
            elif next_s is not None:
                self._advance(next_s)
                heapq.heappop(self._ahead)[2]()
            else:
                return Trial(
                    policy=self._name,
                    lost_s=self._lost_s,
                    spent_s=self._spent_s,
                    decisions=tuple(self._decisions),
                )
        raise PlanError(f"{self._name} decided {_MOST_EVENTS:,} times about one job")

    def _at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._ahead, (max(when_s, self._now_s), next(self._numbers), do))

    @property
    def _slowdown(self) -> float:
        return self._trial.truth.slowdown(self._now_s, in_force=self._force, without=self._without)

    def _advance(self, until_s: float) -> None:
        lost_s = max(0.0, until_s - self._now_s) * max(0.0, 1.0 - 1.0 / self._slowdown)
        self._lost_s += lost_s
        self._episode_lost_s += lost_s
        self._now_s = max(self._now_s, until_s)

    def _tell(self, event: Event) -> None:
        waiting = list(self._policy.update(event, self._now_s))
        while waiting:
            decision = waiting.pop(0)
            self._decisions.append((self._now_s, decision))
            if decision.apply and decision.plan is not None:
                waiting += self._policy.update(
                    self._carry_out(decision, decision.plan), self._now_s
                )

    # -- what the pipeline would notice ------------------------------------------------------------

    def _turn(self) -> None:
        """A fault begins: what is lost from now on is this episode's."""
        if not self._holding:
            self._episode_lost_s = 0.0

    @property
    def _holding(self) -> bool:
        return self._policy.applied != "S1"

    def _confirmed(self, case: FaultCase, number: int) -> None:
        if not self._episode:
            self._episode = f"e{number}"
        self._pace()
        self._at(self._now_s + _VERDICT_S, partial(self._verdict, case, _RECHECK_S))

    def _pace(self) -> None:
        if self._episode:
            self._tell(
                Pace(episode=self._episode, slowdown=self._slowdown, lost_s=self._episode_lost_s)
            )

    def _verdict(self, case: FaultCase, again_s: float) -> None:
        """A pause, and what it proves: what was named, while it is slow."""
        if not self._episode or not (self._now_s < case.until_s or self._holding):
            return
        self._spent_s += _PAUSE_S
        acting = [
            finding
            for other in self._trial.cases
            if other.noticed_s is not None and other.noticed_s <= self._now_s < other.until_s
            for finding in other.findings
            if not self._without & {finding.host, finding.peer_host}
        ]
        self._told |= {finding.key: finding for finding in acting}
        self._pace()
        self._tell(Verdict(episode=self._episode, findings=tuple(acting)))
        if acting and self._name == "always restart":
            self._tell(Command(order="S4"))
        found = {finding.key for finding in acting}
        if self._holding:
            for key in [key for key in self._told if key not in found]:
                self._tell(CulpritPace(key=key, slowdown=1.0))
        if self._policy.applied != "S4":
            self._at(
                self._now_s + again_s,
                partial(self._verdict, case, min(_MOST_RECHECK_S, 2.0 * again_s)),
            )

    def _over(self, case: FaultCase) -> None:
        """A fault ends; what is done about it does not, until that is known."""
        if self._holding:
            soon_s = _NOTICED * self._trial.truth.healthy_s
            for finding in case.findings:
                if finding.what != "link":  # a link is only proved well by another pause
                    well = CulpritPace(key=finding.key, slowdown=1.0)
                    self._at(self._now_s + soon_s, partial(self._tell, well))
            return
        self._at(self._now_s + _RELIEF_S, self._relief)

    def _relief(self) -> None:
        busy = any(c.from_s <= self._now_s < c.until_s for c in self._trial.cases)
        if self._episode and not self._holding and not busy:
            lost_s = self._episode_lost_s
            episode, self._episode = self._episode, ""
            self._told, self._episode_lost_s = {}, 0.0
            self._tell(Relieved(episode=episode, lost_s=lost_s))

    # -- what is done ------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision, plan: Plan) -> Outcome:
        cost_s = self._trial.cost_s(decision.level)
        self._spent_s += cost_s
        if decision.level == "S4":
            self._without |= set(plan.evict)
            self._force = self._trial.planner.initial()
        else:
            self._force = _after(self._force, plan)
        if decision.level in ("S2", "S3"):
            after_s = _MEASURED * self._trial.truth.healthy_s * self._slowdown
            self._at(self._now_s + after_s, partial(self._measured, decision.level))
        else:
            self._at(self._now_s + _RELIEF_S, self._relief)
        return Outcome(episode=self._episode, level=decision.level, ok=True, cost_s=cost_s)

    def _measured(self, level: Rung) -> None:
        if self._policy.applied == level:
            outcome = Outcome(
                episode=self._episode, level=level, ok=True, cost_s=0.0, slowdown=self._slowdown
            )
            self._tell(outcome)
            self._pace()


def _after(force: InForce, plan: Plan) -> InForce:
    return InForce(
        microbatches=plan.microbatches or force.microbatches,
        placement=plan.placement or force.placement,
    )
