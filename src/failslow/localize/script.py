"""What a paused job measures: stages that all ranks walk through in the same order. Pure.

In: a suspicion, and where the workers are. Out: a script, one JSON object a stage:

    {"do":"gemm","ranks":[5,7],"dtype":"float32","size":384,"repeats":5,"least_s":0.25,
     "limit_s":1.0,"expect_s":0.3}
    {"do":"host","ranks":[5,7],"limit_s":0.4,"expect_s":0.07}
    {"do":"p2p","pairs":[[0,2],[4,6]],"sizes_bytes":[262144,1048576,4194304],"repeats":3,
     "limit_s":0.6,"expect_s":0.17}

A pair is directed: the first sends. The most useful stages come first; what the budget does not
bear is left out. On one physical host no more workers compute at once than it has devices, and a
network card carries one transfer at a time: they must measure themselves, not each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from failslow.config import LocalizeConfig
from failslow.errors import ConfigError
from failslow.localize.passes import Pass, both_ways, ring_passes, tournament
from failslow.records import Diagnosis, Suspect

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

Stage = dict[str, Any]
Script = list[Stage]
"""Stages in order, JSON."""
T = TypeVar("T")
Links = list[tuple[float, int, int]]
"""(usefulness, sending rank, receiving rank)."""
Ranks = list[tuple[float, int]]
"""(usefulness, rank)."""

_SUSPECT, _PEER, _AROUND, _COMPARE, _WHOLE, _REST, _AGAIN = (
    100.0, 90.0, 80.0, 70.0, 50.0, 40.0, 30.0,
)  # fmt: skip
"""How useful a measurement is; a suspect's own score is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker runs, as far as measuring must know."""

    rank: int
    node: str
    """What the job takes for a host: what a verdict names."""
    host: str = ""
    """The physical machine (its boot id); "" = the node."""
    device: str = "cpu"
    """Model of the device ("cpu", "cpu Intel(R) Xeon(R)", "NVIDIA H200"): only equal ones
    compare."""
    device_count: int = 1
    """Devices of the physical host; a CPU is one, whatever its cores."""
    nic: str = ""
    """Network card it sends through; "" unknown, then taken as shared by the node's workers."""

    @property
    def machine(self) -> str:
        """The physical host."""
        return self.host or self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """How much is measured. Zeros and "" stand for what suits the device (`for_device`)."""

    budget_s: float = 4.0
    """Seconds the stages may take by estimate."""
    peers: int = 3
    """Healthy workers beside the suspects, and endpoints beside a suspect link's own."""
    most_ranks: int = 64
    """Workers that compute, at most."""
    most_endpoints: int = 16
    """Jobs of so many nodes, or fewer, have their whole ring measured."""
    most_ring: int = 1024
    """Nodes of a suspect group, at most, whose ring is measured: the script must fit a letter."""
    all_pairs: int = 4
    """Groups of so many nodes, or fewer, have every pair measured."""
    gemm_dtype: str = ""
    gemm_size: int = 0
    """Rows and columns of the square matrices."""
    gemm_s: float = 0.0
    """Seconds a worker computes, besides warming up."""
    rounds: int = 0
    """Times each worker computes, apart from each other: a CPU has slow spells of its own (what
    else its machine does), and the faster round counts."""
    gemm_repeats: int = 5
    """...and how many products at least."""
    sizes_bytes: tuple[int, ...] = ()
    """Of transfers."""
    repeats: int = 3
    """Transfers of each size."""
    bandwidth: float = 0.0
    """Bytes per second a healthy link is expected to carry, for the estimate."""
    connect_s: float = 0.0
    """Seconds until a pair is connected, for the estimate."""

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s <= 60.0:
            raise ConfigError(f"budget_s ({self.budget_s:g}) must be above 0 and at most 60")
        if not 0 <= self.gemm_size <= 65536 or self.gemm_repeats < 1 or self.repeats < 1:
            raise ConfigError(
                f"gemm_size ({self.gemm_size}) must be 0 to 65536, gemm_repeats "
                f"({self.gemm_repeats}) and repeats ({self.repeats}) at least 1"
            )
        if any(not 1 <= size <= 2**31 for size in self.sizes_bytes):
            raise ConfigError(f"sizes_bytes {self.sizes_bytes} must each be 1 to 2147483648")
        if not 0 <= self.rounds <= 10:
            raise ConfigError(f"rounds ({self.rounds}) must be 0 to 10")
        if self.peers < 0 or self.most_ranks < 1 or min(self.most_endpoints, self.all_pairs) < 0:
            raise ConfigError(
                f"peers ({self.peers}), most_endpoints ({self.most_endpoints}) and all_pairs "
                f"({self.all_pairs}) must be at least 0, most_ranks ({self.most_ranks}) 1"
            )

    @classmethod
    def from_config(cls, config: LocalizeConfig) -> ScriptSettings:
        """A fifth of the pause's limit is left for what is slow and for coming back."""
        return cls(
            budget_s=0.8 * config.pause_limit_s,
            gemm_dtype=config.gemm_dtype or "",
            gemm_size=config.gemm_size or 0,
            gemm_repeats=config.gemm_repeats or 5,
            sizes_bytes=config.p2p_sizes_bytes or (),
            repeats=config.p2p_repeats or 3,
        )

    def for_device(self, device: str) -> ScriptSettings:
        """With every setting that was left open filled in."""
        on_cpu = is_cpu(device)
        kilo = 1024
        sizes = (256 * kilo, kilo**2, 4 * kilo**2) if on_cpu else (16 << 20, 32 << 20, 64 << 20)
        return replace(
            self,
            # half precision is there on every GPU a job trains on; the CPU's matrices fit its cache
            gemm_dtype=self.gemm_dtype or ("float32" if on_cpu else "float16"),
            gemm_size=self.gemm_size or (384 if on_cpu else 8192),
            gemm_s=self.gemm_s or 0.15,
            rounds=self.rounds or (2 if on_cpu else 1),
            sizes_bytes=self.sizes_bytes or sizes,
            bandwidth=self.bandwidth or (125e6 if on_cpu else 5e9),
            connect_s=self.connect_s or (0.03 if on_cpu else 0.4),
        )


def plan(
    diagnosis: Diagnosis | None,
    workers: Sequence[WorkerPlace],
    settings: ScriptSettings | None = None,
) -> Script:
    """What to measure about a suspicion; without one, everything the budget bears.

    Suspect workers compute, with peers of the same device model to compare with; suspect links
    are measured both ways, with links that share one end each (is it the link or a network card?)
    and one that shares none. A small job is measured as a whole.
    """
    settings = settings or ScriptSettings()
    job = _Job(workers, settings)
    suspects = [] if diagnosis is None or diagnosis.everyone else list(diagnosis.suspects)
    # of ranks that are as suspect, those of the most suspect party first
    for suspect in sorted(suspects, key=lambda suspect: -suspect.score):
        job.suspect(suspect)
    job.compare()
    if job.is_small or not suspects:
        job.rest(_REST)
        job.ring(job.endpoints(settings.most_endpoints), _REST)
    return job.script()


def reference_script(
    workers: Sequence[WorkerPlace], settings: ScriptSettings | None = None
) -> Script:
    """What is measured at start-up, to be compared with later: workers, hosts and the ring of
    nodes, each bounded; up to 512 workers and 64 nodes, evenly chosen."""
    settings = settings or ScriptSettings(budget_s=8.0, most_ranks=512, most_endpoints=64)
    job = _Job(workers, settings)
    job.rest(_WHOLE)
    job.ring(job.endpoints(settings.most_endpoints), _REST)
    return job.script()


def expected_s(script: Script) -> float:
    """Seconds the stages take on a healthy job, by estimate."""
    return float(sum(stage.get("expect_s", 0.0) for stage in script))


class _Job:
    """Collects what to measure, by usefulness, and packs it into stages."""

    def __init__(self, workers: Sequence[WorkerPlace], settings: ScriptSettings) -> None:
        self.places = {worker.rank: worker for worker in workers}
        device = next((w.device for w in workers if not is_cpu(w.device)), "cpu")
        self.settings = settings.for_device(device)
        self.on_cpu = is_cpu(device)
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

    def endpoints(self, most: int) -> list[tuple[str, str]]:
        """At most so many of the job's endpoints, evenly chosen."""
        return _evenly(list(self.members), most)

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
            # the whole ring: it takes no more passes than a short one, and one link of all is slow
            self.ring(_evenly(ends, self.settings.most_ring), useful)
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

    def ring(self, ends: Sequence[tuple[str, str]], useful: float) -> None:
        """The links between neighbours, both ways."""
        self._pass(both_ways(ring_passes(len(ends))), self._named(ends), useful)

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
        """The most useful stages that fit the budget, the most useful first."""
        ranks = sorted(((u, r) for r, u in self.ranks.items()), key=lambda item: -item[0])
        ranks = ranks[: self.settings.most_ranks]
        links = sorted(((u, *link) for link, u in self.links.items()), key=lambda item: -item[0])
        stages = [*self._computing(ranks), *self._hosts(ranks), *self._transfers(links)]
        stages.sort(key=lambda item: -item[0])
        script: Script = []
        left_s = self.settings.budget_s
        for _, stage in stages:
            if stage["expect_s"] <= left_s or not script:
                script.append(stage)
                left_s -= stage["expect_s"]
        return script

    def _computing(self, ranks: Ranks) -> list[tuple[float, Stage]]:
        settings = self.settings
        waves = self._waves(ranks)
        turns = max(1, len(waves) * settings.rounds)
        # many workers on one machine take turns: shorter ones then
        least_s = min(settings.gemm_s, max(0.1, 0.3 * settings.budget_s / turns))
        expect_s = least_s + 0.05 if self.on_cpu else least_s + 0.15
        about = {
            "dtype": settings.gemm_dtype,
            "size": settings.gemm_size,
            "repeats": settings.gemm_repeats,
            "least_s": round(least_s, 3),
            "limit_s": round(3 * expect_s + 0.1, 3),
            "expect_s": round(expect_s, 3),
        }
        return self._rounds([(u, {"do": "gemm", "ranks": wave, **about}) for u, wave in waves])

    def _rounds(self, stages: list[tuple[float, Stage]]) -> list[tuple[float, Stage]]:
        """The stages, and once more what there is of rounds: after the links, well apart."""
        again = [(_AGAIN, stage) for _ in range(1, self.settings.rounds) for _, stage in stages]
        return [*stages, *again]

    def _hosts(self, ranks: Ranks) -> list[tuple[float, Stage]]:
        if not self.on_cpu:  # one worker speaks for its host
            first: dict[str, tuple[float, int]] = {}
            for useful, rank in ranks:
                first.setdefault(self.places[rank].node, (useful, rank))
            ranks = list(first.values())
        about = {"limit_s": 0.4, "expect_s": 0.07}
        waves = self._waves(ranks)
        # worth less than the benchmark of the same workers, which comes first
        return self._rounds(
            [(u - 5.0, {"do": "host", "ranks": wave, **about}) for u, wave in waves]
        )

    def _waves(self, ranks: Ranks) -> list[tuple[float, list[int]]]:
        """Workers that may compute at the same time, in as few waves as can be."""
        waves: list[tuple[float, list[int]]] = []
        turns: dict[str, int] = {}
        for useful, rank in ranks:
            place = self.places[rank]
            taken = turns.get(place.machine, 0)
            turns[place.machine] = taken + 1
            turn = taken // max(1, place.device_count)
            if turn == len(waves):
                waves.append((useful, []))
            waves[turn][1].append(rank)
        return waves

    def _transfers(self, links: Links) -> list[tuple[float, Stage]]:
        settings = self.settings
        expect_s = settings.connect_s + sum(settings.sizes_bytes) * settings.repeats / (
            settings.bandwidth
        )
        about = {
            "sizes_bytes": list(settings.sizes_bytes),
            "repeats": settings.repeats,
            "limit_s": round(3 * expect_s + 0.1, 3),
            "expect_s": round(expect_s, 3),
        }
        stages: list[_Transfers] = []
        for useful, here, there in links:
            ends = self._ends(here, there)
            stage = next((s for s in stages if s.has_room(ends)), None)
            if stage is None:
                stages.append(stage := _Transfers(useful))
            stage.add(here, there, ends)
        return [(s.useful, {"do": "p2p", "pairs": s.pairs, **about}) for s in stages]

    def _ends(self, here: int, there: int) -> dict[object, int]:
        """{what a transfer occupies: how many may at once}."""
        ends: dict[object, int] = {here: 1, there: 1}
        one, other = self.places[here], self.places[there]
        if endpoint(one) != endpoint(other):
            ends |= {endpoint(one): 1, endpoint(other): 1}
        for place in (one, other):  # both ends take a share of their machine
            ends[place.machine,] = max(1, place.device_count // 2)
        return ends


class _Transfers:
    """Pairs that do not disturb each other."""

    def __init__(self, useful: float) -> None:
        self.useful = useful
        self.pairs: list[list[int]] = []
        self._taken: dict[object, int] = {}

    def has_room(self, ends: dict[object, int]) -> bool:
        return all(self._taken.get(end, 0) < most for end, most in ends.items())

    def add(self, here: int, there: int, ends: Iterable[object]) -> None:
        self.pairs.append([here, there])
        for end in ends:
            self._taken[end] = self._taken.get(end, 0) + 1


def is_cpu(device: str) -> bool:
    """Whether a device's model is the host's own processor: "cpu", "cpu Intel(R) Xeon(R)"."""
    return device == "cpu" or device.startswith("cpu ")


def endpoint(place: WorkerPlace) -> tuple[str, str]:
    """(node, network card): what a worker's transfers to other nodes go through."""
    return place.node, place.nic


def _evenly(items: Collection[T], most: int) -> list[T]:
    """At most so many of them, evenly spread, in their order."""
    every = list(items)
    if len(every) <= most:
        return every
    return [every[i * len(every) // most] for i in range(most)]
