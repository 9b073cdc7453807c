"""What a paused job measures: stages that all ranks walk through in the same order. Pure.

In: a suspicion, and where the workers are. Out: a script, one JSON object a stage:

    {"do":"gemm","ranks":[5,7],"dtype":"float32","size":384,"repeats":5,"least_s":0.25,
     "limit_s":1.0,"expect_s":0.3}
    {"do":"host","ranks":[5,7],"limit_s":0.4,"expect_s":0.07}
    {"do":"p2p","pairs":[[0,2],[4,6]],"sizes_bytes":[262144,1048576,4194304],"repeats":3,
     "limit_s":0.6,"expect_s":0.17}

A pair is directed: the first sends. The most useful stages come first; what the budget does not
bear is left out. Workers that share a device take turns, and a network card carries one transfer
at a time: they must measure themselves, not each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from failslow.localize.passes import Pass, both_ways, double_tree_passes, ring_passes, tournament
from failslow.localize.script_settings import ScriptSettings, WorkerPlace, endpoint, is_cpu
from failslow.localize.stages import Script, Stages
from failslow.records import Diagnosis, Finding, Suspect

__all__ = [
    "Script",
    "ScriptSettings",
    "WorkerPlace",
    "endpoint",
    "expected_s",
    "is_cpu",
    "plan",
    "reference_script",
]

T = TypeVar("T")

_SUSPECT, _PEER, _AROUND, _COMPARE, _WHOLE, _REST = 100.0, 90.0, 80.0, 70.0, 50.0, 40.0
"""How useful a measurement is; a suspect's own score is added."""


def plan(
    diagnosis: Diagnosis | None,
    workers: Sequence[WorkerPlace],
    settings: ScriptSettings | None = None,
    *,
    well: Collection[str] = (),
) -> Script:
    """What to measure about a suspicion; without one, everything the budget bears.

    Suspect workers compute, with peers of the same device model to compare with; suspect links
    are measured both ways, with links that share one end each (is it the link or a network card?)
    and one that shares none. A small job is measured as a whole. Groups are measured along their
    ring, or along the trees that NCCL makes of nodes where the workers were told to use these.

    well: keys of the links that earlier pauses found well (`Verdict.well`): where the whole ring
    is and the job is slow all the same, its calls may take another path, and it is the trees' turn.
    """
    settings = settings or ScriptSettings()
    job = _Job(workers, settings, well)
    suspects = [] if diagnosis is None or diagnosis.everyone else list(diagnosis.suspects)
    # of ranks that are as suspect, those of the most suspect party first
    for suspect in sorted(suspects, key=lambda suspect: -suspect.score):
        job.suspect(suspect)
    job.compare()
    if job.is_small or not suspects:
        job.rest(_REST)
        job.path(_evenly(job.members, settings.most_endpoints), _REST)
    return job.script()


def reference_script(
    workers: Sequence[WorkerPlace], settings: ScriptSettings | None = None
) -> Script:
    """What is measured at start-up, to be compared with later: all workers, hosts, and the links
    that the nodes' collectives take. Devices compute at the same time and the passes are disjoint:
    it takes as long for a thousand nodes as for a few."""
    settings = settings or ScriptSettings(budget_s=8.0)
    job = _Job(workers, replace(settings, most_ranks=max(1, len(workers))))
    job.rest(_WHOLE)
    job.path(list(job.members), _REST)
    return job.script()


def expected_s(script: Script) -> float:
    """Seconds the stages take on a healthy job, by estimate."""
    return float(sum(stage.get("expect_s", 0.0) for stage in script))


class _Job:
    """Collects what to measure, by usefulness."""

    def __init__(
        self, workers: Sequence[WorkerPlace], settings: ScriptSettings, well: Collection[str] = ()
    ) -> None:
        self.places = {worker.rank: worker for worker in workers}
        device = next((w.device for w in workers if not is_cpu(w.device)), "cpu")
        self.settings = settings.for_device(device)
        self.well = frozenset(well)
        self.members: dict[tuple[str, str], list[int]] = {}
        for rank in sorted(self.places):
            self.members.setdefault(endpoint(self.places[rank]), []).append(rank)
        if len(self.members) == 1:  # one node: the links are those between its workers
            self.members = {("", str(rank)): [rank] for rank in sorted(self.places)}
        self.of = {rank: end for end, ranks in self.members.items() for rank in ranks}
        self.ranks: dict[int, float] = {}
        self.links: dict[tuple[int, int], float] = {}
        self.touched: dict[tuple[str, str], int] = {}
        """Suspect endpoints, with the rank to use."""

    @property
    def is_small(self) -> bool:
        return (
            len(self.members) <= self.settings.most_endpoints
            and len(self.places) <= self.settings.most_ranks
        )

    def suspect(self, suspect: Suspect) -> None:
        """What proves or refutes it."""
        useful = _SUSPECT + suspect.score
        ranks = [rank for rank in suspect.ranks if rank in self.places]
        peers = [rank for rank in suspect.peer_ranks if rank in self.places]
        if suspect.what == "compute":
            for rank in ranks:
                self._rank(rank, useful)
                for mate in self.members[self.of[rank]]:  # one device, or its whole host?
                    self._rank(mate, _AROUND)
            return
        for rank in (*ranks, *peers):
            self._rank(rank, _COMPARE)  # what looks like a link may be a worker that is late
        if suspect.what == "link":
            for here in self._one_each(ranks):
                for there in self._one_each(peers):
                    self._link(here, there, useful)
                    self._around(here, there)
        else:
            ends = list(dict.fromkeys(self.of[rank] for rank in ranks))
            for end, rank in zip(ends, self._one_each(ranks), strict=True):
                self.touched.setdefault(end, rank)
            if len(ends) == 1:  # a group inside a node
                self._pass(both_ways(ring_passes(len(ranks))), ranks, useful)
                return
            # all of it: that takes no more passes than a part, and one link of all is slow
            self.path(ends, useful)
            if len(ends) <= self.settings.all_pairs:
                self._pass(both_ways(tournament(len(ends))), self._named(ends), _COMPARE)

    def compare(self) -> None:
        """Healthy workers of each suspect's device model, on other hosts first."""
        suspects = [rank for rank, useful in self.ranks.items() if useful >= _SUSPECT]
        models = {self.places[rank].device for rank in suspects}
        hosts = {self.places[rank].node for rank in suspects}
        for model in sorted(models):
            alike = [r for r, w in self.places.items() if w.device == model and r not in suspects]
            elsewhere = [rank for rank in alike if self.places[rank].node not in hosts]
            for rank in _evenly(elsewhere or alike, self.settings.peers):
                self._rank(rank, _PEER)

    def rest(self, useful: float) -> None:
        """Every worker computes, up to the bound."""
        for rank in _evenly(sorted(self.places), self.settings.most_ranks):
            self._rank(rank, useful)

    def path(self, ends: Sequence[tuple[str, str]], useful: float) -> None:
        """The links, both ways, that collectives among these take; see `plan`."""
        ranks = self._named(ends)
        shapes = [ring_passes(len(ranks)), double_tree_passes(len(ranks))]
        if any(self.places[rank].trees for rank in ranks):
            shapes.reverse()
        new = (passes for passes in shapes if not self._is_well(passes, ranks))
        self._pass(both_ways(next(new, shapes[0])), ranks, useful)

    def _is_well(self, passes: Iterable[Pass], ranks: Sequence[int]) -> bool:
        """Whether all these links are known to be well, in both directions."""
        return bool(self.well) and all(
            {self._key(ranks[a], ranks[b]), self._key(ranks[b], ranks[a])} <= self.well
            for links in passes
            for a, b in links
        )

    def _key(self, here: int, there: int) -> str:
        """What a verdict calls the link."""
        host, peer_host = self.places[here].node, self.places[there].node
        return Finding(what="link", slowdown=1.0, ranks=(), host=host, peer_host=peer_host).key

    def _around(self, here: int, there: int) -> None:
        """Links that share one end with a suspect one, and one that shares none."""
        self._link(there, here, _AROUND)
        if here == there or self.of[here] == self.of[there]:
            return
        mine = {self.of[here], self.of[there]}
        clear = [end for end in self.members if end not in mine and end not in self.touched]
        other = self._named(_evenly(clear, self.settings.peers))
        for one in other[:2]:
            self._link(here, one, _PEER)
            self._link(one, there, _PEER)
        if len(other) >= 2:
            self._link(other[-2], other[-1], _COMPARE)

    def _pass(self, passes: Iterable[Pass], ranks: Sequence[int], useful: float) -> None:
        for links in passes:
            for here, there in links:
                self._link(ranks[here], ranks[there], useful)

    def _rank(self, rank: int, useful: float) -> None:
        self.ranks[rank] = max(useful, self.ranks.get(rank, 0.0))

    def _link(self, here: int, there: int, useful: float) -> None:
        if here != there:
            self.links[here, there] = max(useful, self.links.get((here, there), 0.0))

    def _named(self, ends: Iterable[tuple[str, str]]) -> list[int]:
        """A worker of each endpoint: the suspect one, else the first."""
        return [self.touched.get(end, self.members[end][0]) for end in ends]

    def _one_each(self, ranks: Iterable[int]) -> list[int]:
        """The first rank of each endpoint among them: workers of a node share its links."""
        first: dict[tuple[str, str], int] = {}
        for rank in ranks:
            first.setdefault(self.of[rank], rank)
        return list(first.values())

    def script(self) -> Script:
        """The most useful stages that fit the budget."""
        return Stages(self.places, self.settings).script(self.ranks, self.links)


def _evenly(items: Collection[T], most: int) -> list[T]:
    """At most so many of them, evenly spread, in their order."""
    every = list(items)
    if len(every) <= most:
        return every
    return [every[i * len(every) // most] for i in range(most)]
