"""When to do what about a fail-slow: ski rental over the levels S1 to S4.

In: events of one job, each with its time. Out: `Decision`s, every one with its arithmetic:

    policy = Policy(LayoutPlanner(facts, config), config)
    policy.update(Pace(episode="e1", slowdown=1.4, lost_s=1.2), now_s=1000.0)        # []
    policy.update(Verdict(episode="e1", findings=(finding,)), now_s=1004.0)
    # [Decision(action="escalate", level="S2", lost_s=2.34, threshold_s=1.0, reason="…", plan=…)]

The rule is that of `ski`: stay at a level until the time lost since onset reaches the cost of the
next level that can help, then go there. Costs and what each level leaves are estimates until
outcomes tell better. Job time alone never ends what was done: the culprits' own times do. The same
events at the same times give the same decisions.
"""

from __future__ import annotations

from typing import Literal

from failslow.config import DecideConfig
from failslow.decide.account import RUNGS, SLACK_S, Account
from failslow.decide.appraise import Appraiser, Way
from failslow.decide.costs import CostBook
from failslow.decide.events import Event, Pace, Relieved
from failslow.decide.learned import History
from failslow.decide.levels import InForce, Planner
from failslow.records import (
    Command,
    CulpritPace,
    Decision,
    Outcome,
    Plan,
    Rung,
    Verdict,
)

__all__ = ["Policy"]

Action = Literal["stay", "escalate", "replan", "restore", "obey"]


class Policy:
    """Decides for one job. A decision with `apply` waits for its `Outcome` before the next."""

    def __init__(
        self,
        planner: Planner,
        config: DecideConfig | None = None,
        *,
        history: History | None = None,
        evictions: int = 0,
    ) -> None:
        """history: past durations, used as far as `trust` allows. evictions: hosts lost so far."""
        self._config = config or DecideConfig()
        self._planner = planner
        self.costs = CostBook(self._config)
        self._appraiser = Appraiser(planner, self._config, self.costs, history or {})
        self.in_force = planner.initial()
        self.evictions = evictions
        self._account: Account | None = None

    @property
    def level(self) -> Rung:
        """The level decided on last."""
        return self._account.level if self._account else "S1"

    @property
    def applied(self) -> Rung:
        """The level that was carried out last."""
        return self._account.applied if self._account else "S1"

    @property
    def episode(self) -> str:
        """Id of the latest episode; "" before any."""
        return self._account.episode if self._account else ""

    @property
    def waiting(self) -> bool:
        """A decision is being carried out: nothing is decided before its outcome."""
        return bool(self._account and self._account.pending)

    def update(self, event: Event, now_s: float) -> list[Decision]:
        """Take one event; what to do now. `now_s` must not go back."""
        account = self._account
        if account is not None:
            account.advance(now_s)
        if isinstance(event, Command):
            return self._obey(event)
        if isinstance(event, Pace):
            self._present(event.episode, now_s).report(event.episode, event.lost_s, event.slowdown)
        elif isinstance(event, Verdict):
            if account is not None:
                account.paused(event.pause_s)
            if event.findings:
                self._present(event.episode, now_s).accuse(event.findings)
        elif isinstance(event, Relieved):
            self._relieved(event)
        elif isinstance(event, CulpritPace):
            if account is not None:
                account.pace(event.key, event.slowdown)
        elif isinstance(event, Outcome):
            self._learn(event)
        return self._consider()

    def late(self, decision: Decision, outcome: Outcome, now_s: float) -> list[Decision]:
        """A plan was carried out after all that had been given up as not answered.

        What is in force is in force, whatever has been decided since: a decision that is being
        carried out goes on, a fault that is over has its plan taken back.
        """
        account = self._account
        if outcome.level == "S1" and (account is None or account.rested):
            self._take(decision.plan)
            return []
        account = self._present(decision.episode, now_s)
        account.advance(now_s)
        account.spent_s += outcome.cost_s
        account.restore_s = account.now_s
        account.failures[outcome.level] = max(0, account.failures.get(outcome.level, 0) - 1)
        if outcome.level == "S4":
            account.pending = None  # the job it was for has ended
        if outcome.level == "S1" and not account.findings.keys() <= account.well_since.keys():
            # slow again meanwhile: the fault goes on, and nothing is done about it any more
            self._take(decision.plan)
            account.level = account.applied = "S1"
            account.left, account.changed = None, True
            if account.episode_over and not account.pending:
                account.rest()  # if it is slow, it will be found again
        else:
            self._done(account, outcome, decision)
        if account.pending is not None:
            account.level = account.pending.level
        return self._consider()

    def due_s(self) -> float | None:
        """When, all else equal, a `Tick` would lead to a decision; None when it would not."""
        account = self._account
        if account is None or account.rested or account.pending or self._config.mode == "observe":
            return None
        times = [since + account.hold_s for since in account.well_since.values()]
        times += [since_s + account.settle_s for _, since_s in account.shifting.values()]
        times = [time for time in times if time > account.now_s]
        if not account.findings and account.applied != "S1":
            times.append(max(account.now_s, account.restore_s))
        if account.loss_rate > 0.0:
            if not account.left_alone:
                pays_s = [a.pays_from_s for a in account.assessments.values()]
                pay_times = [account.began_s + after_s for after_s in pays_s if after_s is not None]
                times += [time for time in pay_times if time > account.now_s]
            for way in self._appraiser.ways(account, self.in_force):
                wait_s = max(0.0, way.threshold_s - account.lost_s) / account.loss_rate
                times.append(max(account.now_s + wait_s, way.from_s))
        return min(times, default=None)

    def fit(self, planner: Planner) -> None:
        """Plan by another model of the same job; costs and the present fault are kept."""
        self._planner = self._appraiser.planner = planner
        if self._account is not None:
            self._account.changed = True
        elif self.in_force.placement == ():
            self.in_force = planner.initial()

    # -- events ------------------------------------------------------------------------------------

    def _present(self, episode: str, now_s: float) -> Account:
        """The account of the fault that is on; one that rested too long is closed."""
        account = self._account
        if account is not None and account.resting_since is not None:
            if now_s - account.resting_since <= self._config.memory_s:
                account.wake()
            else:
                account = None
        if account is None:
            account = Account(self._config, episode, now_s, began_s=now_s)
        self._account = account
        return account

    def _relieved(self, event: Relieved) -> None:
        account = self._account
        if account is None or account.rested:
            return
        if event.episode == account.episode:
            account.bank(event.lost_s)
            account.episode_over = True
        if account.applied == "S1" and not account.pending:
            account.rest()
        elif not event.abandoned:
            left = 1.0 if account.left is None else account.left
            account.slowdown = min(left, self._config.relief_slowdown)

    def _learn(self, outcome: Outcome) -> None:
        account = self._account
        if account is None:
            return
        decision = account.pending
        if outcome.level != (decision.level if decision else account.applied):
            return  # of something this policy did not decide
        account.pending = None
        account.spent_s += outcome.cost_s
        if not outcome.ok:
            self._failed(account, outcome)
            return
        if decision is not None:
            self._done(account, outcome, decision)
        if account.rested or outcome.slowdown is None:
            return
        if account.left is None:
            promised = account.assessments.get(outcome.level)
            if promised is not None and account.base >= self._config.min_slowdown:
                achieved = (account.base - outcome.slowdown) / (account.base - 1.0)
                self.costs.learn_share(outcome.level, promised=promised.share, achieved=achieved)
        account.left = account.slowdown = max(1.0, outcome.slowdown)
        account.measured = True

    def _failed(self, account: Account, outcome: Outcome) -> None:
        account.level = account.applied
        if outcome.refused:
            self.costs.refuse(outcome.level, outcome.error or "the job refused it")
        else:
            account.failures[outcome.level] = account.failures.get(outcome.level, 0) + 1
        # a restore that failed is tried again after as long a wait
        account.well_since = dict.fromkeys(account.well_since, account.now_s)
        account.restore_s = account.now_s + account.hold_s
        if account.episode_over and account.applied == "S1":
            account.rest()  # nobody will tell any more that it is over

    def _done(self, account: Account, outcome: Outcome, decision: Decision) -> None:
        plan = decision.plan
        self._take(plan)
        if outcome.level in ("S1", "S4"):
            if outcome.level == "S4" and plan is not None:
                # what it cost is not learned: this is the saving alone, most is lost afterwards
                self.evictions += len(plan.evict)
                self.in_force = self._planner.initial()
            account.rest()
            return
        self.costs.learn_cost(outcome.level, outcome.cost_s)
        account.level = account.applied = outcome.level
        account.act(decision.culprits, again=decision.action == "replan")
        account.slowdown = self._appraiser.promise(account, outcome.level)
        account.measured, account.left = False, None
        account.changed = True

    def _take(self, plan: Plan | None) -> None:
        """The job runs by `plan` now."""
        if plan is not None:
            self.in_force = InForce(
                microbatches=plan.microbatches or self.in_force.microbatches,
                placement=plan.placement or self.in_force.placement,
            )

    def _obey(self, command: Command) -> list[Decision]:
        account = self._account
        if account is None or account.rested or not account.findings:
            return []
        if command.order == "ignore":
            account.ignored |= account.findings.keys()
            reason = f"{_names(account)} is left alone until it has recovered"
            return [self._decision(account, "obey", account.level, reason)]
        if command.order == "resume":
            account.manual, account.ignored, account.told = False, set(), None
            account.changed = True
            said = self._decision(account, "obey", account.level, "automatic again")
            return [said, *self._consider()]
        self._appraiser.look(account, self.in_force, self.evictions)
        assessment = account.assessments.get(command.order)
        plan = assessment.plan if assessment else None
        why = assessment.reason if assessment else "nothing is planned"
        if plan is not None:  # that it would not pay is for a person to know
            barred = command.order == "S4"
            why = self._appraiser.restart_barred(account, self.evictions) if barred else ""
        why = f"{account.level} is being carried out" if account.pending else why
        if why or plan is None:
            reason = f"{command.order} was asked for, but {why}"
            return [self._decision(account, "stay", account.level, reason)]
        account.manual = True
        reason = f"{command.order} was asked for"
        return [self._act(account, "obey", command.order, plan, reason, apply=True)]

    # -- deciding ----------------------------------------------------------------------------------

    def _consider(self) -> list[Decision]:
        account = self._account
        if account is None or account.rested or account.pending or self._config.mode == "observe":
            return []
        well = account.well()
        if well and len(well) == len(account.findings):
            return self._restore(account)
        if well:
            account.forgive(well)
        account.settle()
        if not account.findings:
            due = account.applied != "S1" and account.now_s >= account.restore_s - SLACK_S
            return self._restore(account) if due else []
        self._appraiser.look(account, self.in_force, self.evictions)
        for way in self._appraiser.ways(account, self.in_force):
            if way.is_due(account):
                return [self._go(account, way)]
        return [] if account.left_alone else self._stay(account)

    def _restore(self, account: Account) -> list[Decision]:
        """Every culprit is well: the even split again."""
        if account.level == "S1" and account.applied == "S1":
            return []  # nothing was done; the job's own relief ends it
        even = self._planner.initial().microbatches
        reason = f"{_names(account)} has been well for {account.hold_s:.4g} s"
        if not account.findings:
            reason = f"{account.applied} was carried out late, and nothing is slow any more"
        kept = account.applied == "S3"
        if self.in_force.microbatches == even:
            reason += "; the workers keep their places" if kept else "; nothing is to be undone"
            decision = self._decision(account, "restore", "S1", reason)
        else:
            plan = Plan(level="S1", predicted_slowdown=1.0, microbatches=even)
            reason += "; the even split is restored"
            reason += ", and the workers keep their places" if kept else ""
            # what is in force was carried out, perhaps by a person's order: so is its end
            decision = self._act(account, "restore", "S1", plan, reason, apply=True)
        if not decision.apply:
            account.rest()
        return [decision]

    def _go(self, account: Account, way: Way) -> Decision:
        level, threshold_s = way.level, way.threshold_s
        assessment = account.assessments[level]
        plan = assessment.plan or assessment.back
        assert plan is not None
        option = account.options[RUNGS.index(level)]
        promise = self._appraiser.promise(account, level)
        what = "a new plan" if way.action == "replan" else level
        reason = (
            f"{account.lost_s:.4g} s lost since onset reach the {threshold_s:.4g} s at which "
            f"{what} is worth its {option.cost_s:.4g} s ({option.cost_source}): "
            f"x{account.slowdown:.2f} now, x{promise:.2f} promised"
        )
        return self._act(account, way.action, level, plan, reason, threshold_s=threshold_s)

    def _stay(self, account: Account) -> list[Decision]:
        """Said once: no level can help, and why."""
        above = account.options[1:]
        if account.level != "S1" or any(option.applicable for option in above):
            return []
        reasons = tuple(f"{option.level}: {option.reason}" for option in above)
        if account.told == reasons:
            return []
        account.told = reasons
        return [self._decision(account, "stay", "S1", "; ".join(reasons))]

    # -- records -----------------------------------------------------------------------------------

    def _act(
        self,
        account: Account,
        action: Action,
        level: Rung,
        plan: Plan,
        reason: str,
        *,
        threshold_s: float | None = None,
        apply: bool | None = None,
    ) -> Decision:
        """A decision that is to be carried out, if that is allowed."""
        apply = self._config.mode == "auto" if apply is None else apply
        decision = self._decision(
            account, action, level, reason, plan=plan, threshold_s=threshold_s, apply=apply
        )
        account.level = level
        account.planned_for = account.culprits
        if apply:
            account.pending = decision
        return decision

    def _decision(
        self,
        account: Account,
        action: Action,
        level: Rung,
        reason: str,
        *,
        plan: Plan | None = None,
        threshold_s: float | None = None,
        apply: bool = False,
    ) -> Decision:
        return Decision(
            episode=account.episode,
            action=action,
            level=level,
            from_level=account.level,
            mode=self._config.mode,
            apply=apply,
            culprits=account.blamed(level),
            lost_s=account.lost_s,
            threshold_s=threshold_s,
            spent_s=account.spent_s,
            trust_factor=account.theta or 1.0,
            options=account.options,
            plan=plan,
            reason=reason,
        )


def _names(account: Account) -> str:
    return ", ".join(account.culprits)
