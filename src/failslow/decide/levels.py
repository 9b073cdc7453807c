"""What each level could do about a verdict in this job: can it help, how much, with which plan.

In: a job's `JobFacts`, the `Finding`s of the culprits, and what is in force. Out: an `Assessment`
each for S2, S3 and S4:

    planner = LayoutPlanner(facts, config)
    planner.assess(verdict.findings, planner.initial())
    # Assessment(level="S2", applicable=True, share=0.69, plan=Plan(microbatches=(9, 5, 9, 9), …))
    # Assessment(level="S3", applicable=False, reason="… below a gain of 5 %", …) …

`share` is the part of the slowdown a plan removes: by the model, so that the slowdown itself can
stay a measured one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from failslow.config import DecideConfig
from failslow.decide.allocate import even_split, reallocate
from failslow.decide.placement import plan_topology
from failslow.decide.topology import Blocks, TopologyModel
from failslow.errors import PlanError
from failslow.records import Finding, JobFacts, Plan, Rung

__all__ = ["Assessment", "InForce", "LayoutPlanner", "Outlook", "Planner"]

_LOCAL = 0.1
"""A transfer inside a host takes this share of one between hosts; only its smallness matters."""
_EXPLAINED = 0.01
"""Findings that slow the modelled iteration by less do not explain anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """How the job runs at the moment."""

    microbatches: tuple[int, ...] = ()
    """Of each replica; () unknown."""
    placement: tuple[int, ...] = ()
    """The worker at each position; () unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a change of places costs, and for how long it is expected to help."""

    topology_cost_s: float = 0.0
    horizon_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What one level could do."""

    level: Rung
    applicable: bool
    reason: str = ""
    """Why it cannot help, or cannot be done."""
    share: float = 0.0
    """Of the slowdown that it removes: 1 all of it."""
    plan: Plan | None = None
    pays_from_s: float | None = None
    """It is not applicable because it saves less than it costs, until the fault is expected to
    last so long; None: that is not why."""
    undone: float | None = None
    """By the model the slowdown with nothing done..."""
    now: float | None = None
    """...and as the job runs now; None unknown."""
    back: Plan | None = None
    """It is not applicable, nothing being better than doing nothing; but what is in force is worse
    than this, for it was planned for others."""


class Planner(Protocol):
    """Whatever can say what the levels would do."""

    def initial(self) -> InForce:
        """How the job ran before anything was done."""
        ...

    def assess(
        self, findings: Sequence[Finding], in_force: InForce, outlook: Outlook | None = None
    ) -> tuple[Assessment, ...]:
        """S2, S3 and S4 against all of `findings` at once."""
        ...


class LayoutPlanner:
    """Plans from the job's layout. Without `facts` (nothing steers the job) only S4 is left."""

    def __init__(self, facts: JobFacts | None, config: DecideConfig, *, evictions: int = 0) -> None:
        """evictions: hosts lost so far; a spare one has taken the place of each, as there were."""
        self._config = config
        self._spares = max(0, config.spares - evictions)
        self._grid = None if facts is None else _Grid(facts)

    def initial(self) -> InForce:
        """The even split, and every worker at its own place."""
        return InForce() if self._grid is None else self._grid.initial

    def assess(
        self, findings: Sequence[Finding], in_force: InForce, outlook: Outlook | None = None
    ) -> tuple[Assessment, ...]:
        """S2, S3 and S4 against all of `findings` at once."""
        restart = _restart(self._grid, findings)
        if self._grid is None:
            why = "nothing steers the job: it has no coordinator"
            return _refused("S2", why), _refused("S3", why), restart
        model, missing = self._grid.with_faults(findings)
        if restart.plan is not None:
            restart = self._grid.restart(restart.plan, findings, self._spares)
        if missing:
            why = f"{', '.join(missing)} is not in the job's grid"
            return _refused("S2", why), _refused("S3", why), restart
        case = _Case(self._grid, model, in_force, self._config.min_gain)
        return case.redistribute(), case.rearrange(outlook or Outlook()), restart


class _Grid:
    """A job's blocks on their hosts, healthy."""

    def __init__(self, facts: JobFacts) -> None:
        self.facts = facts
        world = facts.pp * facts.dp * facts.tp
        self.ranks = np.array(facts.ranks or range(world))
        if len(self.ranks) != world or (facts.hosts and len(facts.hosts) <= self.ranks.max()):
            raise PlanError(
                f"{len(facts.ranks)} ranks and {len(facts.hosts)} hosts do not fit a grid of "
                f"{facts.pp} x {facts.dp} x {facts.tp}; give one of each for every worker, or none"
            )
        self.block_of = {int(rank): at // facts.tp for at, rank in enumerate(self.ranks)}
        blocks = facts.pp * facts.dp
        self.host_names: dict[str, int] = {}
        host = np.arange(blocks)
        if facts.hosts:
            for block, rank in enumerate(self.ranks[:: facts.tp]):
                name = facts.hosts[rank]
                host[block] = self.host_names.setdefault(name, len(self.host_names))
        hosts = int(host.max()) + 1
        link = np.ones((hosts, hosts))
        np.fill_diagonal(link, _LOCAL)
        self.even = even_split(facts.microbatches, facts.dp)
        self.placement = np.arange(blocks).reshape(facts.pp, facts.dp)
        self.initial = InForce(microbatches=self.even, placement=tuple(self.ranks.tolist()))
        # unknown stages share what the gradients' ring leaves of an iteration
        rounds = max(self.even) + facts.pp - 1
        compute_s = max(facts.iteration_s - facts.dp_s, 0.0) or float(rounds)
        model = TopologyModel(
            stage_s=facts.stage_s or (compute_s / rounds,) * facts.pp,
            microbatches=max(self.even),
            slowdown=np.ones(blocks),
            host=host,
            link=link,
            dp_s=(facts.dp_s,) * facts.pp,
            pp_s=facts.pp_s,
        )
        known = facts.iteration_s > 0.0
        self.model = model.calibrated(facts.iteration_s, self.placement) if known else model

    def with_faults(self, findings: Sequence[Finding]) -> tuple[TopologyModel, list[str]]:
        """The model with its culprits as slow as found, and those it does not know."""
        slowdown, link = self.model.slowdown.copy(), self.model.link.copy()
        missing = []
        for finding in findings:
            if finding.what == "link":
                here = self._hosts(finding.host, finding.ranks)
                there = self._hosts(finding.peer_host, finding.peer_ranks)
                # no peer: everything the host sends is slow; only a peer: all it receives
                there = there or list(range(len(link)))
                here = here or (list(range(len(link))) if finding.peer_ranks else [])
                pairs = [(a, b) for a in here for b in there if a != b]
                # which way round a ring goes is the library's choice (gloo: from r to r - 1), so a
                # neighbour is a bad one whichever of the two directions is slow
                for a, b in (*pairs, *((b, a) for a, b in pairs)):
                    link[a, b] = max(link[a, b], finding.slowdown)
                known = bool(pairs)
            else:
                blocks = [self.block_of[rank] for rank in finding.ranks if rank in self.block_of]
                slowdown[blocks] = np.maximum(slowdown[blocks], finding.slowdown)
                known = bool(blocks)
            if not known:
                missing.append(finding.key)
        return replace(self.model, slowdown=slowdown, link=link), missing

    def _hosts(self, name: str, ranks: Sequence[int]) -> list[int]:
        if name in self.host_names:
            return [self.host_names[name]]
        return sorted({int(self.model.host[self.block_of[r]]) for r in ranks if r in self.block_of})

    def restart(self, plan: Plan, findings: Sequence[Finding], spares: int) -> Assessment:
        """S4 by `plan`, if there are hosts enough, and as slow as it is with fewer of them."""
        least, gone, left = self._hosts_left(findings)
        if not least or not gone:
            return Assessment(level="S4", applicable=True, share=1.0, plan=plan)
        hosts = left + min(spares, len(gone))
        if not hosts:
            return _refused("S4", f"the job has no host but {', '.join(gone)} to start again on")
        if hosts < least:
            return _refused(
                "S4",
                f"without {', '.join(gone)} it has {hosts} hosts and its launcher needs {least}: "
                "give --nnodes MIN:MAX, or [decide] spares",
            )
        fixed, slope = self.model.replica_costs(self.placement.T)
        own_s = float((fixed + slope * np.array(self.even)).max())
        whole_s = own_s + float(self.model.ring_s(self.placement).max()) + self.model.other_s
        more = own_s / whole_s * ((left + len(gone)) / hosts - 1.0)
        plan = replace(plan, predicted_slowdown=1.0 + more)
        return Assessment(level="S4", applicable=True, share=1.0, plan=plan)

    def _hosts_left(self, findings: Sequence[Finding]) -> tuple[int, tuple[str, ...], int]:
        """(fewest hosts it can start on, those left out, how many others there are).

        Hosts by their workers: where these are not known, none is left out.
        """
        of_rank = self.facts.hosts
        ranks = {rank for finding in findings for rank in finding.ranks or finding.peer_ranks}
        names = {of_rank[rank] for rank in ranks if rank < len(of_rank)}
        names |= {f.host or f.peer_host for f in findings} & set(of_rank)
        others = len({of_rank[rank] for rank in self.ranks} - names) if of_rank else 1
        least = self.facts.least_hosts
        if least > others + len(names):
            least = 1  # several of its nodes are on one host
        return least, tuple(sorted(names)), others

    def blocks_at(self, in_force: InForce) -> Blocks:
        """(pp, dp): the block at each place."""
        if not in_force.placement:
            return self.placement
        firsts = in_force.placement[:: self.facts.tp]
        return np.array([self.block_of[rank] for rank in firsts]).reshape(self.placement.shape)

    def ranks_at(self, placement: Blocks) -> tuple[int, ...]:
        """The worker at each position."""
        by_block = self.ranks.reshape(-1, self.facts.tp)
        return tuple(by_block[placement.ravel()].ravel().tolist())


class _Case:
    """One job, one set of culprits: what S2 and S3 make of it."""

    def __init__(
        self, grid: _Grid, model: TopologyModel, in_force: InForce, min_gain: float
    ) -> None:
        self._grid, self._facts, self._model, self._min_gain = grid, grid.facts, model, min_gain
        self._counts = in_force.microbatches or grid.even
        self._placement = grid.blocks_at(in_force)
        self._healthy_s = self._time_s(grid.model, grid.even, grid.placement)
        # doing nothing: where workers had been moved for an earlier fault, they stay there
        places = (grid.placement, self._placement)
        self._slow_s = max(self._time_s(model, grid.even, placement) for placement in places)
        self._now_s = self._time_s(model, self._counts, self._placement)

    def redistribute(self) -> Assessment:
        """S2."""
        facts = self._facts
        if facts.no_redistribution:
            return _refused("S2", facts.no_redistribution)
        if facts.dp < 2:
            return _refused("S2", "there is one replica: nothing to redistribute to")
        try:
            counts = self._split(self._placement, self._counts)
        except PlanError as error:
            return _refused("S2", str(error))
        return self._judge("S2", counts, self._placement)

    def rearrange(self, outlook: Outlook) -> Assessment:
        """S3, with the best split on top where replicas may differ.

        One that gains but saves less than it costs keeps its plan, for a person to order.
        """
        facts = self._facts
        if facts.no_topology_change:
            return _refused("S3", facts.no_topology_change)
        if facts.pp * facts.dp < 2:
            return _refused("S3", "there is one block: nothing to exchange it with")
        search = plan_topology(
            self._model,
            self._placement,
            cost_s=outlook.topology_cost_s,
            horizon_s=outlook.horizon_s,
            min_gain=self._min_gain,
        )
        moved = not np.array_equal(self._placement, self._grid.placement)
        # where workers have changed places before, those they have are what S3 is
        wanted = search.placement if moved else search.best
        placement = self._placement if wanted is None else np.array(wanted)
        if not moved and np.array_equal(placement, self._grid.placement):
            return _refused("S3", search.reason)
        counts = self._grid.even
        if not facts.no_redistribution and facts.dp > 1:
            with suppress(PlanError):  # bounds no split keeps: the even one is the trainer's own
                counts = self._split(placement, counts)
        judged = self._judge("S3", counts, placement)
        if not judged.applicable or moved or search.placement is not None:
            return judged
        saved = 1.0 - search.after_s / search.before_s
        return replace(
            judged,
            applicable=False,
            reason=search.reason,
            pays_from_s=outlook.topology_cost_s / saved,
        )

    def _split(self, placement: Blocks, held: Sequence[int]) -> tuple[int, ...]:
        """The best split there; `held` where that gains too little."""
        fixed, slope = self._model.replica_costs(placement.T)
        return reallocate(
            held,
            fixed,
            slope,
            min_gain=self._min_gain,
            least=self._facts.least_microbatches,
            most=self._facts.most_microbatches,
        ).counts

    def _judge(self, level: Rung, counts: tuple[int, ...], placement: Blocks) -> Assessment:
        """What is gained over doing nothing, the culprits being as slow as they are."""
        slow_s, healthy_s = self._slow_s, self._healthy_s
        after_s = self._time_s(self._model, counts, placement)
        plan = Plan(
            level=level,
            predicted_slowdown=after_s / healthy_s,
            microbatches=counts,
            placement=self._grid.ranks_at(placement) if level == "S3" else (),
        )
        why = ""
        if slow_s < healthy_s * (1.0 + _EXPLAINED):
            why = "by the model the culprits cost the iteration nothing"
        elif after_s > slow_s * (1.0 - self._min_gain):
            why = (
                f"at best {slow_s:.4g} s to {after_s:.4g} s an iteration: below a gain of "
                f"{100 * self._min_gain:.3g} %"
            )
        if why and after_s <= self._now_s * (1.0 - self._min_gain):
            refused = _refused(level, why)
            undone, now = slow_s / healthy_s, self._now_s / healthy_s
            return replace(refused, undone=undone, now=now, back=plan)
        if why:
            return _refused(level, why)
        share = min(1.0, (slow_s - after_s) / (slow_s - healthy_s))
        return Assessment(
            level=level,
            applicable=True,
            share=share,
            plan=plan,
            undone=slow_s / healthy_s,
            now=self._now_s / healthy_s,
        )

    def _time_s(self, model: TopologyModel, counts: Sequence[int], placement: Blocks) -> float:
        fixed, slope = model.replica_costs(placement.T)
        slowest = float((fixed + slope * np.array(counts)).max())
        return slowest + float(model.ring_s(placement).max()) + model.other_s


def _refused(level: Rung, reason: str) -> Assessment:
    return Assessment(level=level, applicable=False, reason=reason)


def _restart(grid: _Grid | None, findings: Sequence[Finding]) -> Assessment:
    """S4: leave out every host at fault; of a slow link the sending one, if it is known."""
    if grid is not None and grid.facts.no_restart:
        return _refused("S4", grid.facts.no_restart)
    meeting = set(grid.facts.meeting) if grid is not None else set()
    if held := [f.key for f in findings if meeting & set(f.ranks or f.peer_ranks)]:
        return _refused("S4", f"all meet at the host of {', '.join(held)} to start again")
    named = {finding.key: finding.host or finding.peer_host for finding in findings}
    if unnamed := [key for key, host in named.items() if not host]:
        return _refused("S4", f"no host is known for {', '.join(unnamed)}")
    hosts = tuple(dict.fromkeys(named.values()))
    plan = Plan(level="S4", predicted_slowdown=1.0, evict=hosts)
    return Assessment(level="S4", applicable=True, share=1.0, plan=plan)
