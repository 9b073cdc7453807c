"""What other policies would have made of the same faults.

In: `Incident`s, and which policy. Out: what each loses and spends, with the decisions it takes:

    results = compare(incidents, ("wait", "ladder", "clairvoyant"), config=config)
    results["ladder"][0].total_s, results["ladder"][0].decisions

Under a level the job is as slow as the level leaves it: the measured value where the incident had
one, else what was assessed. Actions cost their seconds and take no time from the fault; the even
split that follows relief is free, and is decided on where the culprits' own times are on record.
All policies are given a verdict at the same moment. How the job was paced under the policy it had
(a journal's lines of action "pace") says nothing of what another would have left of the fault:
`redecide` reads them, which tells a policy what the job's own was told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, get_args

from failslow.config import DecideConfig
from failslow.decide.account import RUNGS
from failslow.decide.costs import CostBook
from failslow.decide.events import Event, Pace, Tick
from failslow.decide.incident import Incident, Stretch, learn_history
from failslow.decide.learned import History
from failslow.decide.levels import Assessment, InForce, Outlook, Planner
from failslow.decide.policy import Policy
from failslow.errors import PlanError
from failslow.records import CulpritPace, Decision, Finding, Outcome, Plan, Rung, Verdict

__all__ = [
    "POLICIES",
    "PolicyName",
    "RecordedPlanner",
    "Replayed",
    "compare",
    "replay",
]

PolicyName = Literal[
    "recorded", "wait", "redistribute", "restart", "ladder", "learned", "clairvoyant"
]
"""recorded: what happened · wait, redistribute, restart: that, at the verdict · ladder: ski rental
· learned: ski rental with the history · clairvoyant: the best single level, at the onset."""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

_TRUST = 0.5
"""Of "learned" where the settings say nothing of it."""
_MOST_EVENTS = 100_000
"""A policy that decides more often than that on one fault is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy made of one or several faults."""

    policy: str
    lost_s: float
    """To slowness."""
    spent_s: float
    """On actions."""
    decisions: tuple[tuple[float, Decision], ...] = ()
    """With the seconds after onset at which each was taken."""

    @property
    def total_s(self) -> float:
        """What it cost altogether."""
        return self.lost_s + self.spent_s


_EVEN, _UNEVEN = (2, 2), (1, 3)
"""Stand for the splits where no layout is known: S2 leaves one that is to be taken back."""


class RecordedPlanner:
    """Knows of the levels what an incident recorded, whoever is to blame."""

    def __init__(self, levels: Sequence[Assessment]) -> None:
        self._levels = tuple(
            replace(
                level,
                plan=Plan(
                    level=level.level,
                    predicted_slowdown=1.0,
                    microbatches=_UNEVEN if level.level == "S2" else (),
                    evict=("recorded",) if level.level == "S4" else (),
                ),
            )
            if level.applicable
            else level
            for level in levels
        )

    def initial(self) -> InForce:
        """An even split; where workers were is not known, and not needed."""
        return InForce(microbatches=_EVEN)

    def assess(
        self,
        findings: Sequence[Finding],  # noqa: ARG002  # the protocol's
        in_force: InForce,  # noqa: ARG002
        outlook: Outlook | None = None,  # noqa: ARG002
    ) -> tuple[Assessment, ...]:
        """What was recorded."""
        return self._levels


def replay(
    incident: Incident,
    policy: Policy,
    planner: Planner,
    *,
    costs_s: Callable[[Rung], float] | None = None,
    name: str = "ladder",
) -> Replayed:
    """What `policy`, which plans with `planner`, does about `incident`.

    costs_s: what going to a level really costs; None: as the policy expects. Raises PlanError when
    the policy never comes to rest.
    """
    return _World(incident, policy, planner, costs_s).run(name)


class _World:
    """Plays a fault to a policy and does what it decides."""

    def __init__(
        self,
        incident: Incident,
        policy: Policy,
        planner: Planner,
        costs_s: Callable[[Rung], float] | None,
    ) -> None:
        self._incident, self._policy, self._planner = incident, policy, planner
        self._costs_s = costs_s or (lambda level: policy.costs.cost(level)[0])
        self._ahead = list(incident.stretches)
        self._stretch = incident.stretches[0]
        self._level: Rung = "S1"
        self._now_s = self._lost_s = self._spent_s = 0.0
        self._decisions: list[tuple[float, Decision]] = []

    def run(self, name: str) -> Replayed:
        """Until the fault is over."""
        end_s = self._incident.duration_s
        for _ in range(_MOST_EVENTS):
            while self._ahead and self._ahead[0].after_s <= self._now_s:
                self._begin(self._ahead.pop(0))
            due_s = self._policy.due_s()
            next_s = min(end_s, *(stretch.after_s for stretch in self._ahead[:1]), end_s)
            if due_s is None or due_s > next_s:
                self._advance(next_s)
                if next_s == end_s:
                    break
            else:
                self._advance(due_s)
                self._tell(Tick())
        else:
            raise PlanError(
                f"{name} decided {_MOST_EVENTS:,} times about fault {self._incident.id}"
            )
        if self._incident.ended and self._incident.paced:
            self._recover()
        return Replayed(
            policy=name,
            lost_s=self._lost_s,
            spent_s=self._spent_s,
            decisions=tuple(self._decisions),
        )

    def _recover(self) -> None:
        """The culprits are well from now on; nothing is lost any more until that is believed."""
        self._stretch = Stretch(after_s=self._now_s, slowdown=1.0)
        for key in dict.fromkeys(f.key for s in self._incident.stretches for f in s.findings):
            self._tell(CulpritPace(key=key, slowdown=1.0))
        due_s = self._policy.due_s()
        if due_s is not None:
            self._now_s = due_s
            self._tell(Tick())

    def _begin(self, stretch: Stretch) -> None:
        self._stretch = stretch
        if self._level == "S4":
            return  # the culprits are left out already
        slowdown = left_by(self._planner, self._level, stretch)
        self._tell(Pace(episode=self._incident.id, slowdown=slowdown, lost_s=self._lost_s))
        if stretch.findings:
            self._tell(Verdict(episode=self._incident.id, findings=stretch.findings))

    def _advance(self, until_s: float) -> None:
        rate = 1.0 - 1.0 / left_by(self._planner, self._level, self._stretch)
        self._lost_s += rate * (until_s - self._now_s)
        self._now_s = until_s

    def _tell(self, event: Event) -> None:
        waiting = list(self._policy.update(event, self._now_s))
        while waiting:
            decision = waiting.pop(0)
            self._decisions.append((self._now_s, decision))
            if decision.apply:
                waiting += self._policy.update(self._carry_out(decision), self._now_s)

    def _carry_out(self, decision: Decision) -> Outcome:
        self._level = decision.level
        cost_s = 0.0 if decision.level == "S1" else self._costs_s(decision.level)
        self._spent_s += cost_s
        return Outcome(
            episode=self._incident.id,
            level=decision.level,
            ok=True,
            cost_s=cost_s,
            slowdown=left_by(self._planner, decision.level, self._stretch),
        )


def compare(
    incidents: Sequence[Incident],
    policies: Sequence[PolicyName] = POLICIES,
    *,
    config: DecideConfig | None = None,
    costs_s: Mapping[Rung, float] | None = None,
    history: History | None = None,
    planner: Planner | None = None,
) -> dict[PolicyName, list[Replayed]]:
    """What each of `policies` makes of each incident, in order.

    costs_s: what levels cost; left out: measured ones of the incidents, else the config's.
    history: for "learned"; None: each incident is judged by the durations of the others. planner:
    for incidents of which no level is on record. Restarts are allowed as `config` says, over all
    incidents together.
    """
    config = _with_costs(config or DecideConfig(), incidents, costs_s or {})
    # a recorded verdict is told once, and stands
    common = {"mode": "auto", "confirmations": 1}
    ladder = config.model_copy(update={**common, "trust": 1.0})
    trust = config.trust if "trust" in config.model_fields_set else _TRUST
    learned = config.model_copy(update={**common, "trust": trust})
    found: dict[PolicyName, list[Replayed]] = {}
    for name in policies:
        evictions = 0
        found[name] = []
        for incident in incidents:
            recorded = RecordedPlanner(tuple(incident.levels.values()))
            plan = recorded if incident.levels or planner is None else planner
            if name == "ladder":
                policy = Policy(plan, ladder, evictions=evictions)
            elif name == "learned":
                known = _others(incidents, incident) if history is None else history
                policy = Policy(plan, learned, history=known, evictions=evictions)
            if name in ("ladder", "learned"):
                result = replay(incident, policy, plan, name=name)
                evictions = policy.evictions
            else:
                result = _simple(incident, plan, config, name)
            found[name].append(result)
    return found


def _others(incidents: Sequence[Incident], incident: Incident) -> History:
    return learn_history([other for other in incidents if other is not incident])


def _with_costs(
    config: DecideConfig, incidents: Sequence[Incident], costs_s: Mapping[Rung, float]
) -> DecideConfig:
    names: dict[Rung, str] = {
        "S2": "redistribute_cost_s",
        "S3": "topology_cost_s",
        "S4": "restart_cost_s",
    }
    update = {}
    for level, name in names.items():
        measured = [i.costs_s[level] for i in incidents if level in i.costs_s]
        if level in costs_s:
            update[name] = costs_s[level]
        elif measured:
            update[name] = median(measured)
    return config.model_copy(update=update)


def _simple(
    incident: Incident, planner: Planner, config: DecideConfig, name: PolicyName
) -> Replayed:
    """The policies that decide once, or not at all."""
    if name == "recorded":
        return Replayed(policy=name, lost_s=incident.lost_s, spent_s=incident.spent_s)
    book = CostBook(config)
    levels: dict[PolicyName, Rung] = {"wait": "S1", "redistribute": "S2", "restart": "S4"}
    if name != "clairvoyant":
        return _fixed(incident, planner, levels[name], book, name, at_once=False)
    possible = RUNGS if config.allow_restart else RUNGS[:-1]
    every = [_fixed(incident, planner, level, book, name, at_once=True) for level in possible]
    return min(every, key=lambda result: result.total_s)


def left_by(planner: Planner, level: Rung, stretch: Stretch) -> float:
    """The slowdown `level` leaves of a fault as it is in `stretch`."""
    found = planner.assess(stretch.findings, planner.initial())
    share = next((a.share for a in found if a.level == level and a.applicable), 0.0)
    return 1.0 + (stretch.slowdown - 1.0) * (1.0 - share)


def _fixed(
    incident: Incident,
    planner: Planner,
    level: Rung,
    book: CostBook,
    name: str,
    *,
    at_once: bool,
) -> Replayed:
    """Wait for the verdict (or not even that), go to one level, stay there."""
    known = (stretch.after_s for stretch in incident.stretches if stretch.findings)
    from_s = 0.0 if at_once else next(known, incident.duration_s)
    open_levels = {
        assessment.level
        for stretch in incident.stretches
        for assessment in planner.assess(stretch.findings, planner.initial())
        if assessment.applicable
    }
    cost_s = book.cost(level)[0]
    if level not in open_levels or from_s >= incident.duration_s:
        level, cost_s = "S1", 0.0
    ends = [*(stretch.after_s for stretch in incident.stretches[1:]), incident.duration_s]
    lost_s = 0.0
    for stretch, end_s in zip(incident.stretches, ends, strict=True):
        before_s = max(0.0, min(end_s, from_s) - stretch.after_s)
        after_s = max(0.0, end_s - max(stretch.after_s, from_s))
        lost_s += before_s * (1.0 - 1.0 / stretch.slowdown)
        lost_s += after_s * (1.0 - 1.0 / left_by(planner, level, stretch))
    return Replayed(policy=name, lost_s=lost_s, spent_s=cost_s)
