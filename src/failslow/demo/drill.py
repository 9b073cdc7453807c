"""One fault from beginning to end: healthy, injected, noticed, proved, worked around, undone.

In: a `SteeredJob` and a `Fault`. Out: a `Drill`, read from the job's own journal:

    Drill(fault="throttle", target={"rank": 2}, onset_delay_s=3.1, verdict_delay_s=4.4,
          culprit_correct=True, level="S2", healthy_s=0.118, slow_s=0.223, mitigated_s=0.133, …)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from failslow.decide import allocate, even_split
from failslow.demo.job import SteeredJob
from failslow.errors import LabError
from failslow.inject import congest, throttle
from failslow.records import Decision, Episode, Finding, Outcome, Verdict

__all__ = ["SETTINGS", "Drill", "Fault", "faults_here", "run_drill"]

SETTINGS = {
    "FAILSLOW_DETECT_MIN_DURATION_S": "2",
    "FAILSLOW_DETECT_MERGE_GAP_S": "1",
    "FAILSLOW_LOCALIZE_PAUSES_PER_HOUR": "100000",
    "FAILSLOW_LOCALIZE_MAX_PAUSE_SHARE": "1",
    "FAILSLOW_LOCALIZE_RECHECK_S": "6",
    "FAILSLOW_DECIDE_REDISTRIBUTE_COST_S": "0.5",
    "FAILSLOW_DECIDE_TOPOLOGY_COST_S": "2",
    "FAILSLOW_DECIDE_RELIEF_HOLD_S": "3",
    "FAILSLOW_DECIDE_MEMORY_S": "1",
}
"""Patience for minutes instead of days: what a job of iterations of a tenth of a second needs."""
_HEALTHY_S = 6.0
_ONSET_S, _VERDICT_S, _ACTION_S, _RELIEF_S = 30.0, 20.0, 30.0, 60.0
_SETTLE, _MEASURED = 3, 20
_WELL = ("cleared", "relief", "abandoned")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is injected, and what a right verdict says."""

    name: str
    target: dict[str, Any]
    inject: Callable[[], AbstractContextManager[object]]
    is_culprit: Callable[[Finding], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """What became of one fault; None: it did not come to that."""

    fault: str
    target: dict[str, Any]
    onset_delay_s: float | None
    """From the injection to the confirmed onset."""
    verdict_delay_s: float | None
    """From there to the verdict."""
    culprit_correct: bool
    named: tuple[str, ...]
    cause: str
    level: str | None
    """Carried out."""
    plan: tuple[int, ...]
    """Micro-batches of each replica, or the worker at each position."""
    healthy_s: float
    """Median iteration before the fault..."""
    slow_s: float | None
    """...under it..."""
    mitigated_s: float | None
    """...and with it worked around."""
    optimum_s: float | None
    """What the best plan of that kind would give, by the measured times."""
    pause_s: float | None
    action_s: float | None
    """Training stood still for carrying it out."""
    relieved: bool
    """Noticed that the culprit was well again, and all taken back."""

    @property
    def removed_pct(self) -> float | None:
        """Of the slowdown, in wall time per iteration."""
        return self._removed(self.mitigated_s)

    @property
    def optimum_pct(self) -> float | None:
        """The same of the best plan."""
        return self._removed(self.optimum_s)

    def _removed(self, after_s: float | None) -> float | None:
        if self.slow_s is None or after_s is None or self.slow_s <= self.healthy_s:
            return None
        return 100.0 * (self.slow_s - after_s) / (self.slow_s - self.healthy_s)

    def document(self) -> dict[str, Any]:
        """An event of schema failslow.demo/1."""
        times = {"healthy": self.healthy_s, "slow": self.slow_s, "mitigated": self.mitigated_s}
        return {
            "fault": self.fault,
            "target": self.target,
            "onset_delay_s": self.onset_delay_s,
            "verdict_delay_s": self.verdict_delay_s,
            "culprit_correct": self.culprit_correct,
            "named": list(self.named),
            "cause": self.cause,
            "level": self.level,
            "plan": list(self.plan),
            "iterations_per_s": {k: None if s is None else 1.0 / s for k, s in times.items()},
            "removed_pct": self.removed_pct,
            "optimum_pct": self.optimum_pct,
            "pause_s": self.pause_s,
            "action_s": self.action_s,
            "relieved": self.relieved,
        }


def faults_here(
    job: SteeredJob, *, rank: int = 2, to: float = 0.5, mbit: float = 20
) -> list[Fault]:
    """A worker that gets the share `to` of its time, and, on nodes of their own, a link of the
    gradients' ring, as it lies now, with only `mbit` Mbit/s."""
    slow = Fault(
        name="throttle",
        target={"rank": rank},
        inject=lambda: throttle(job.pids[rank], to=to, method="signal"),
        is_culprit=lambda f: f.what == "device" and f.ranks == (rank,),
    )
    if job.bed is None:
        return [slow]
    nodes, placement = job.bed.nodes, job.placement()
    # gloo's ring sends to the one before
    before = placement[placement.index(rank) - 1]
    link = Fault(
        name="link",
        target={"rank": rank, "peer": before},
        inject=lambda: congest(nodes[rank].namespace, "eth0", mbit, dst=nodes[before].address),
        is_culprit=lambda f: f.what == "link" and (f.ranks, f.peer_ranks) == ((rank,), (before,)),
    )
    return [slow, link]


def run_drill(job: SteeredJob, fault: Fault, *, say: Say, act_limit_s: float = _ACTION_S) -> Drill:
    """Let the fault strike; about 40 s. say: told each turn, for people.

    Raises LabError when the training ends, or does not come to rest.
    """
    calm_t = time.time()
    rested = job.wait_for(
        lambda: _is_calm(job) and time.time() - calm_t > _HEALTHY_S, limit_s=2 * _RELIEF_S
    )
    if not rested:
        raise LabError("the training does not come to rest: something else slows it")
    healthy_s = median(job.steps_s(calm_t))
    say(f"healthy: {1e3 * healthy_s:.0f} ms an iteration")
    with fault.inject():
        began_t = time.time()
        say(f"injected: {fault.name} {_target(fault)}")
        seen = _Seen(job, began_t)
        if job.wait_for(lambda: seen.onset, limit_s=_ONSET_S):
            say(
                f"confirmed {seen.onset.t - began_t:.1f} s later: x{seen.onset.record.slowdown:.2f}"
            )
            if job.wait_for(lambda: seen.verdict, limit_s=_VERDICT_S):
                keys = ", ".join(f.key for f in seen.verdict.record.findings)
                say(f"verdict {seen.verdict.t - seen.onset.t:.1f} s later: {keys}")
                if job.wait_for(lambda: seen.outcome, limit_s=act_limit_s):
                    say(f"{seen.outcome.record.level}: {_plan_text(seen)}")
                    after_t = seen.outcome.t
                    job.wait_for(
                        lambda: len(job.steps_s(after_t)) >= _SETTLE + _MEASURED, limit_s=30.0
                    )
        ended_t = time.time()
    say("undone")
    relieved = job.wait_for(lambda: _is_calm(job), limit_s=_RELIEF_S)
    if relieved:
        say(f"well again {time.time() - ended_t:.1f} s later")
    return _sum_up(seen, fault, healthy_s, ended_t, relieved=relieved)


class _Seen:
    """What the journal says of a fault that began at `t`."""

    def __init__(self, job: SteeredJob, t: float) -> None:
        self.job, self.t = job, t

    @property
    def onset(self) -> Any:
        return self._first("episode", Episode, lambda e: e.tags.get("event") == "onset")

    @property
    def verdict(self) -> Any:
        """The first that found something, else the first."""
        found = self._first("verdict", Verdict, lambda e: e.record.episode and e.record.findings)
        return found or self._first("verdict", Verdict, lambda e: e.record.episode)

    @property
    def decision(self) -> Any:
        return self._first("decision", Decision, lambda e: e.record.apply and e.record.plan)

    @property
    def outcome(self) -> Any:
        return self._first("outcome", Outcome, lambda e: e.record.ok and e.record.level != "S1")

    def _first(self, kind: str, cls: type, fits: Callable[[Any], object]) -> Any:
        for entry in self.job.entries(kind):
            if entry.t > self.t and isinstance(entry.record, cls) and fits(entry):
                return entry
        return None


def _sum_up(
    seen: _Seen, fault: Fault, healthy_s: float, ended_t: float, *, relieved: bool
) -> Drill:
    job, began_t = seen.job, seen.t
    onset, verdict, outcome, decision = seen.onset, seen.verdict, seen.outcome, seen.decision
    findings: Sequence[Finding] = verdict.record.findings if verdict else ()
    slow = mitigated = None
    plan: tuple[int, ...] = ()
    if onset:
        start_t = onset.tags.get("start_t", began_t)
        until_t = outcome.t if outcome else ended_t
        slow = job.steps_s(start_t, until_t)
    if outcome and decision:
        mitigated = job.steps_s(outcome.t, ended_t)[_SETTLE:]
        chosen = decision.record.plan
        plan = chosen.placement if chosen.level == "S3" else chosen.microbatches
    slow_s = median(slow) if slow else None
    level = outcome.record.level if outcome else None
    optimum_s = healthy_s if level == "S3" else None
    if level == "S2" and onset and outcome:
        own_s = job.own_s(onset.tags.get("start_t", began_t), outcome.t)
        if slow_s is not None and len(own_s) == len(plan):
            optimum_s = _best_split(own_s, slow_s, sum(plan))
    return Drill(
        fault=fault.name,
        target=fault.target,
        onset_delay_s=onset.t - began_t if onset else None,
        verdict_delay_s=verdict.t - onset.t if onset and verdict else None,
        culprit_correct=len(findings) == 1 and fault.is_culprit(findings[0]),
        named=tuple(finding.key for finding in findings),
        cause=findings[0].cause if findings else "",
        level=level,
        plan=plan,
        healthy_s=healthy_s,
        slow_s=slow_s,
        mitigated_s=median(mitigated) if mitigated else None,
        optimum_s=optimum_s,
        pause_s=verdict.record.pause_s if verdict else None,
        action_s=outcome.record.cost_s if outcome else None,
        relieved=relieved,
    )


def _best_split(own_s: Sequence[float], slow_s: float, microbatches: int) -> float:
    """What an iteration would take with the integer optimum.

    own_s: what each replica takes for its even share of the micro-batches, with the fault on;
    slow_s: an iteration, whose rest no split can shorten.
    """
    even = even_split(microbatches, len(own_s))
    each = [s / count for s, count in zip(own_s, even, strict=True)]
    best = allocate([0.0] * len(each), each, microbatches)
    return max(0.0, slow_s - max(own_s)) + best.makespan_s


def _is_calm(job: SteeredJob) -> bool:
    """No suspicion, no episode, nothing in force."""
    on, level = "", "S1"
    for entry in job.entries("suspicion", "episode", "outcome", "decision"):
        record = entry.record
        if isinstance(record, Outcome):
            level = record.level if record.ok else level
            continue
        if isinstance(record, Decision):  # changed places stay: they cost nothing
            level = "S1" if record.action == "restore" and not record.apply else level
            continue
        own = record if isinstance(record, dict) else entry.tags
        event = str(own.get("event", ""))
        on = "" if event in _WELL else event
        level = "S1" if event == "relief" else level
    return not on and level == "S1" and len(job.entries("step")) > 30


def _target(fault: Fault) -> str:
    return ", ".join(f"{key} {value}" for key, value in fault.target.items())


def _plan_text(seen: _Seen) -> str:
    decision = seen.decision
    if decision is None:
        return "carried out"
    plan = decision.record.plan
    if plan.level == "S3":
        return f"workers at the positions {list(plan.placement)}"
    return f"micro-batches {list(plan.microbatches)}"
