"""What every level is worth for one fault, and from which loss on.

In: an `Account`, the planner's assessments, costs as known. Out: the options of a decision, and
the next level with the loss at which it is worth its cost:

    appraiser.look(account, in_force, evictions)
    appraiser.escalate_at(account, in_force)            # ("S2", 1.0)
"""

from __future__ import annotations

from failslow.config import DecideConfig
from failslow.decide.account import RUNGS, SLACK_S, Account
from failslow.decide.costs import CostBook
from failslow.decide.learned import History, choose_theta
from failslow.decide.levels import InForce, Outlook, Planner
from failslow.decide.ski import Ladder
from failslow.records import LevelOption, Rung

__all__ = ["Appraiser"]


class Appraiser:
    """Turns assessments and experience into options and thresholds."""

    def __init__(
        self, planner: Planner, config: DecideConfig, costs: CostBook, history: History
    ) -> None:
        self.planner, self._config, self._costs = planner, config, costs
        self._history = history

    def look(self, account: Account, in_force: InForce, evictions: int) -> None:
        """Renew the account's options, and its assessments where the culprits have changed."""
        horizon_s = max(self._config.horizon_s, account.age_s) + SLACK_S
        due = (a.pays_from_s for a in account.assessments.values())
        if account.changed or any(pays_s is not None and pays_s <= horizon_s for pays_s in due):
            outlook = Outlook(topology_cost_s=self._costs.cost("S3")[0], horizon_s=horizon_s)
            found = self.planner.assess(tuple(account.findings.values()), in_force, outlook)
            account.assessments = {assessment.level: assessment for assessment in found}
            account.changed = False
            undone = max((a.undone for a in found if a.undone is not None), default=None)
            if undone is not None and account.others and account.applied != "S1":
                # it cannot be measured while something is done about it
                account.base = max(undone, account.slowdown)
            account.others = False
        account.options = tuple(self._option(account, level, evictions) for level in RUNGS)
        if account.theta is None:
            account.theta = self._theta(account)

    def escalate_at(self, account: Account, in_force: InForce) -> tuple[Rung, float] | None:
        """The next level that can help, and the loss at which it is worth its cost."""
        if account.slowdown <= self._config.relief_slowdown:
            return None
        options = [option for option in account.options if option.applicable]
        for index in _ladder(options).useful() if options else ():
            option = options[index]
            higher = RUNGS.index(option.level) > RUNGS.index(account.level)
            if (
                higher
                and self._is_new(account, option.level, in_force)
                and option.slowdown <= account.slowdown * (1.0 - self._config.min_gain)
            ):
                return option.level, (account.theta or 1.0) * option.cost_s
        return None

    @staticmethod
    def _is_new(account: Account, level: Rung, in_force: InForce) -> bool:
        """Whether the level's plan is anything but what is in force."""
        assessment = account.assessments.get(level)
        plan = None if assessment is None else assessment.plan
        if plan is None or not (plan.microbatches or plan.placement):
            return True  # of a restart, or of a model that knows no plans
        if level == "S3":  # another split alone is a new plan of the level there is
            return plan.placement != in_force.placement
        return plan.microbatches != in_force.microbatches

    def replan_at(self, account: Account, in_force: InForce) -> tuple[Rung, float] | None:
        """The present level with a better plan, and the loss at which that is worth its cost."""
        level = account.level
        assessment = account.assessments.get(level)
        plan = assessment.plan if assessment and assessment.applicable else None
        if assessment is None or plan is None or level == "S4":
            return None
        if account.applied != level:
            # advice that nobody carried out: said again when it is about others
            return None if account.planned_for == account.culprits else (level, 0.0)
        if assessment.now is None or self._experience(account, level):
            return None
        counts = plan.microbatches or in_force.microbatches
        placement = plan.placement or in_force.placement
        if (counts, placement) == (in_force.microbatches, in_force.placement):
            return None
        # both by the model, so that its errors are the same
        if plan.predicted_slowdown > assessment.now * (1.0 - self._config.min_gain):
            return None
        threshold_s = (account.theta or 1.0) * self._costs.cost(level)[0]
        return level, account.acted_at_lost_s + threshold_s

    def promise(self, account: Account, level: Rung) -> float:
        """The slowdown `level` should leave, as plans for it have kept their promises."""
        assessment = account.assessments.get(level)
        share = 0.0 if assessment is None else self._costs.share(level, assessment.share)
        return 1.0 + (account.base - 1.0) * (1.0 - share)

    def _option(self, account: Account, level: Rung, evictions: int) -> LevelOption:
        cost_s, cost_source = self._costs.cost(level)
        assessment = account.assessments.get(level)
        here = level == account.applied
        reason = ""
        if level != "S1" and not here:
            reason = self._experience(account, level)
            reason = reason or ("nothing is planned" if assessment is None else assessment.reason)
            if level == "S4" and not reason:
                reason = self._restart_obstacle(account, evictions)
        return LevelOption(
            level=level,
            applicable=not reason,
            reason=reason,
            cost_s=cost_s,
            cost_source=cost_source,
            slowdown=account.slowdown if here else self.promise(account, level),
            slowdown_source="measured" if here and account.measured else "estimate",
        )

    def _experience(self, account: Account, level: Rung) -> str:
        """Why a level is closed because of what came of it."""
        failures = account.failures.get(level, 0)
        if failures >= self._config.max_failures:
            return f"it failed {failures} times and is not tried again for these culprits"
        return self._costs.refusal(level)

    def _restart_obstacle(self, account: Account, evictions: int) -> str:
        """Why S4 is closed although it would help."""
        config, plan = self._config, account.assessments["S4"].plan
        if not config.allow_restart:
            return "restarting is not allowed: set allow_restart"
        hosts = len(plan.evict) if plan else 0
        if evictions + hosts > config.max_evictions:
            return (
                f"{evictions} hosts were given up before and {hosts} more would exceed "
                f"max_evictions ({config.max_evictions})"
            )
        for key in account.findings:
            if account.seen[key] < config.confirmations:
                return f"{account.seen[key]} of {config.confirmations} verdicts name {key}"
        return ""

    def _theta(self, account: Account) -> float:
        """What thresholds are multiplied by, for this fault once and for all."""
        kinds = {finding.what for finding in account.findings.values()}
        curves = [self._history[kind] for kind in sorted(kinds) if kind in self._history]
        curves = curves or [curve for kind, curve in self._history.items() if kind == ""]
        if not curves or self._config.trust == 1.0:
            return 1.0
        # of several culprits the one whose kind lasts longest
        curve = max(curves, key=lambda curve: curve.mean_s())
        ladder = _ladder([option for option in account.options if option.applicable])
        return choose_theta(ladder, curve, trust=self._config.trust)


def _ladder(options: list[LevelOption]) -> Ladder:
    return Ladder(
        cost_s=[0.0 if option.level == "S1" else option.cost_s for option in options],
        rate=[option.loss_rate for option in options],
    )
