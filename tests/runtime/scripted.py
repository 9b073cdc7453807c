"""A scripted job for the pipeline: workers, their clocks, and what their agents would send.

job = Scripted(ranks=4)
job.iterate(100, 0.1)                   # a hundred iterations of 100 ms
job.iterate(60, 0.1, slow=1.4)
job.said("episode")                     # the instructions so far, by kind
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from failslow.config import DecideConfig, DetectConfig, LocalizeConfig, RuntimeConfig
from failslow.journal import JournalEntry, decode_entry, encode_entry
from failslow.pipeline import (
    AgentBeat,
    Instruction,
    Pipeline,
    Tick,
    WorkerSamples,
    WorkerState,
    Write,
)
from failslow.records import StepSample

__all__ = ["EPOCH", "Scripted"]

EPOCH = 1_745_735_250.0
_PER_NODE = 2


class Scripted:
    """Ranks two a node; every node's clock is off by another amount."""

    def __init__(
        self,
        ranks: int = 4,
        *,
        detect: DetectConfig | None = None,
        runtime: RuntimeConfig | None = None,
        launch: str = "launch-1",
        skew_s: float = 0.3,
        alone: bool = False,
        decide: DecideConfig | None = None,
        localize: LocalizeConfig | None = None,
    ) -> None:
        self.decide, self.localize = decide, localize
        self.detect = detect or DetectConfig(min_duration_s=2.0)
        self.runtime = runtime or RuntimeConfig()
        self.now_s = EPOCH
        self.alone = alone
        self.ranks = range(ranks)
        self.skew_s = {rank: skew_s * (rank // _PER_NODE) for rank in self.ranks}
        self.step = dict.fromkeys(self.ranks, -1)
        self.process = {rank: f"{1000 + rank}-77" for rank in self.ranks}
        self.session = dict.fromkeys(self.nodes, 1)
        self.counted = dict.fromkeys(self.ranks, True)
        self.run = 0
        self.work = 1e6
        self.records = 0
        """Collectives each worker has made, as its agent tells."""
        self.silent: set[int] = set()
        """Ranks whose samples do not arrive."""
        self.dead_agents: set[str] = set()
        self.random = random.Random(7)
        self.out: list[Instruction] = []
        self.begin(launch)
        self.beat()

    def begin(self, launch: str, entries: Iterable[JournalEntry] = ()) -> None:
        """A controller starts, with what the journal says."""
        self.pipeline = Pipeline(
            launch=launch,
            detect=self.detect,
            runtime=self.runtime,
            decide=self.decide,
            localize=self.localize,
            since_t=EPOCH - 60.0,
            alone=self.alone,
        )
        self.out += self.pipeline.start(entries, self.now_s)

    @property
    def nodes(self) -> list[str]:
        return sorted({self.node(rank) for rank in self.ranks})

    @staticmethod
    def node(rank: int) -> str:
        return f"node{rank // _PER_NODE}"

    def beat(self, *, leaving: bool = False, world: int | None = None) -> None:
        """Every living agent reports its workers."""
        for node in self.nodes:
            if node not in self.dead_agents:
                workers = tuple(
                    WorkerState(
                        rank=rank,
                        worker=self.process[rank],
                        world_size=world or len(self.ranks),
                        alive=not leaving,
                        records=self.records,
                    )
                    for rank in self.ranks
                    if self.node(rank) == node
                )
                self.give(
                    AgentBeat(
                        node=node, session=self.session[node], workers=workers, leaving=leaving
                    )
                )

    def sample(
        self, rank: int, duration_s: float, *, compute_s: float | None = None, foreign: int = 0
    ) -> WorkerSamples:
        """The rank's next iteration, ending now."""
        self.step[rank] += 1
        sample = StepSample(
            step=self.step[rank],
            duration_s=duration_s,
            end_s=self.now_s + self.skew_s[rank],
            work=self.work,
            compute_s=duration_s * 0.6 if compute_s is None else compute_s,
            run=self.run,
            foreign_calls=foreign,
        )
        return self.event(rank, [sample])

    def event(self, rank: int, samples: Sequence[StepSample]) -> WorkerSamples:
        return WorkerSamples(
            node=self.node(rank),
            rank=rank,
            worker=self.process[rank],
            session=self.session[self.node(rank)],
            counted=self.counted[rank],
            samples=tuple(samples),
        )

    def iterate(
        self,
        count: int,
        healthy_s: float,
        *,
        slow: float = 1.0,
        culprit: int | None = None,
        foreign_every: int = 0,
    ) -> None:
        """`count` iterations with 1 % noise, each reported, with ticks and beats between."""
        for index in range(count):
            duration_s = healthy_s * slow * self.random.gauss(1.0, 0.01)
            foreign = int(bool(foreign_every) and index % foreign_every == foreign_every - 1)
            if foreign:
                duration_s *= 4
            self.now_s += duration_s
            for rank in self.ranks:
                compute_s = healthy_s * 0.6
                if rank == culprit:
                    compute_s = duration_s * 0.95
                event = self.sample(rank, duration_s, compute_s=compute_s, foreign=foreign)
                if rank not in self.silent and self.node(rank) not in self.dead_agents:
                    self.give(event)
            self.give(Tick())
            if index % 10 == 0:
                self.beat()

    def wait(self, seconds: float, *, calls: int = 0) -> None:
        """Time passes without iterations; calls: collectives made each half second."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            self.records += calls
            self.beat()
            self.give(Tick())

    def give(self, event: Any) -> None:
        self.out += self.pipeline.handle(event, self.now_s)

    # -- what was said -----------------------------------------------------------------------------

    @property
    def journal(self) -> list[JournalEntry]:
        """What a reader of the journal would see."""
        return [
            decode_entry(encode_entry(w.record, t=w.t, kind=w.kind, **w.tags))
            for w in self.out
            if isinstance(w, Write)
        ]

    def said(self, kind: str) -> list[JournalEntry]:
        return [entry for entry in self.journal if entry.kind == kind]

    def job_steps(self) -> list[StepSample]:
        """The job's own samples."""
        return [entry.record for entry in self.said("step") if entry.rank is None]

    def events(self) -> list[tuple[str, str]]:
        """(event, id) of suspicions and episodes, in order."""
        found = []
        for entry in self.journal:
            if entry.kind in ("suspicion", "episode"):
                tags = entry.record if isinstance(entry.record, dict) else entry.tags
                found.append((tags["event"], tags["id"]))
        return found

    def health(self, what: str) -> list[dict[str, Any]]:
        return [e.record for e in self.said("health") if e.record["what"] == what]
