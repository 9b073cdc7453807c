"""What every level is worth for one fault, and from which loss on.

In: an `Account`, the planner's assessments, costs as known. Out: the options of a decision, and
the next level with the loss at which it is worth its cost:

    appraiser.look(account, in_force, evictions)
    appraiser.ways(account, in_force)                   # [Way("escalate", "S2", 1.0, …)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from failslow.config import DecideConfig
from failslow.decide.account import RUNGS, SLACK_S, Account
from failslow.decide.costs import CostBook
from failslow.decide.learned import History, choose_theta
from failslow.decide.levels import Assessment, InForce, Outlook, Planner
from failslow.decide.ski import Ladder
from failslow.records import LevelOption, Rung

__all__ = ["Appraiser", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """A change that can be made, and when it is worth its cost."""

    action: Literal["escalate", "replan"]
    level: Rung
    threshold_s: float
    """It is worth it once so much was lost..."""
    from_s: float
    """...but not before this time."""

    def is_due(self, account: Account) -> bool:
        """Whether that is so now."""
        lost_enough = account.lost_s >= self.threshold_s - SLACK_S
        return lost_enough and account.now_s >= self.from_s - SLACK_S


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
            found = self._assess(account, in_force, outlook)
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

    def _assess(
        self, account: Account, in_force: InForce, outlook: Outlook
    ) -> tuple[Assessment, ...]:
        """Ignored culprits count, for no plan may give them more work; but they are not evicted."""
        found = self.planner.assess(tuple(account.findings.values()), in_force, outlook)
        wanted = tuple(f for key, f in account.findings.items() if key not in account.ignored)
        if not wanted or len(wanted) == len(account.findings):
            return found
        again = self.planner.assess(wanted, in_force, outlook)
        restart = [assessment for assessment in again if assessment.level == "S4"]
        return (*(a for a in found if a.level != "S4"), *restart)

    def ways(self, account: Account, in_force: InForce) -> list[Way]:
        """What may be done next; the first that is due is to be done."""
        found = []
        if not account.left_alone or account.outlived:
            found.append(self._replan(account, in_force))
        if not account.left_alone:
            found.append(self._escalate(account, in_force))
        return [way for way in found if way is not None]

    def _escalate(self, account: Account, in_force: InForce) -> Way | None:
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
                threshold_s = (account.theta or 1.0) * option.cost_s
                return Way("escalate", option.level, threshold_s, account.now_s)
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

    def _replan(self, account: Account, in_force: InForce) -> Way | None:
        """The present level with a better plan, and the loss at which that is worth its cost."""
        level = account.level
        if account.applied != level:
            return self._advise_again(account)
        assessment, plan = account.assessments.get(level), None
        if assessment is not None:
            plan = assessment.plan if assessment.applicable else assessment.back
        if assessment is None or plan is None or level == "S4":
            return None
        from_s = account.replan_from_s
        if assessment.now is None or from_s is None or self._experience(account, level):
            return None
        counts = plan.microbatches or in_force.microbatches
        placement = plan.placement or in_force.placement
        if (counts, placement) == (in_force.microbatches, in_force.placement):
            return None
        # both by the model, so that its errors are the same
        if plan.predicted_slowdown > assessment.now * (1.0 - self._config.min_gain):
            return None
        # one that costs milliseconds would follow every measurement
        cost_s = max(self._costs.cost(level)[0], self._config.redistribute_cost_s)
        threshold_s = account.acted_at_lost_s + (account.theta or 1.0) * cost_s
        return Way("replan", level, threshold_s, from_s)

    @staticmethod
    def _advise_again(account: Account) -> Way | None:
        """Advice that nobody carried out is given again when it is about others.

        At the same level, or where that is closed for these culprits at the next below it.
        """
        if account.planned_for == account.culprits:
            return None
        least, most = RUNGS.index(account.applied), RUNGS.index(account.level)
        for option in reversed(account.options[least + 1 : most + 1]):
            if option.applicable and account.assessments[option.level].plan is not None:
                return Way("replan", option.level, 0.0, account.now_s)
        return None

    def promise(self, account: Account, level: Rung) -> float:
        """The slowdown `level` should leave, as plans for it have kept their promises."""
        assessment = account.assessments.get(level)
        share = 0.0 if assessment is None else self._costs.share(level, assessment.share)
        promised = 1.0 + (account.base - 1.0) * (1.0 - share)
        if assessment is not None and assessment.back is not None:
            return min(promised, assessment.back.predicted_slowdown)
        if level == "S4" and assessment is not None and assessment.plan is not None:
            # of however slow a fault: fewer hosts have more to do each
            return max(promised, assessment.plan.predicted_slowdown)
        return promised

    def _option(self, account: Account, level: Rung, evictions: int) -> LevelOption:
        cost_s, cost_source = self._costs.cost(level)
        assessment = account.assessments.get(level)
        here = level == account.applied
        reason = ""
        if level != "S1" and not here:
            reason = self._experience(account, level)
            reason = reason or ("nothing is planned" if assessment is None else assessment.reason)
            if level == "S4" and not reason:
                reason = self.restart_barred(account, evictions) or self._unconfirmed(account)
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

    def restart_barred(self, account: Account, evictions: int) -> str:
        """Why nobody may order S4: started again by nobody, or of hosts that are too many."""
        config, plan = self._config, account.assessments["S4"].plan
        if not config.allow_restart:
            return "restarting is not allowed: failslow run --restarts N allows it N times"
        hosts = len(plan.evict) if plan else 0
        if evictions + hosts > config.max_evictions:
            return (
                f"{evictions} hosts were given up before and {hosts} more would exceed "
                f"max_evictions ({config.max_evictions})"
            )
        return ""

    def _unconfirmed(self, account: Account) -> str:
        """Why the policy waits with S4, though a person may order it."""
        needed = self._config.confirmations
        for key in account.findings:
            if account.seen[key] < needed and key not in account.ignored:
                return f"{account.seen[key]} of {needed} verdicts name {key}"
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
