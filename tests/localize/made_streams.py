"""Call records of made-up jobs of TP x PP x DP workers, in which it is known who is slow.

In: a `Grid` and `Faults`. Out: each rank's ring records by a clock of its own, as the hook would
have written them, and the profiles made of them:

    streams = run(Grid(tp=2, pp=2, dp=4), Faults(slow={5: 1.4}))
    diagnose(streams.profiles(), (), episode="e", slowdown=1.4)

A worker computes, meets its tensor-parallel peers after every block, passes activations on (1F1B),
reduces gradients with its replicas, and meets all before the optimizer step. A collective ends
for all when the last has come, plus the transfer; what is sent is under way at once. Rank =
(stage * dp + replica) * tp + shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from failslow.capture.layout import CALL, DONE, FLAG_ASYNC, NO_GROUP, OPS, OPTIMIZER_STEP
from failslow.capture.reader import RECORD_DTYPE, Group
from failslow.localize.digest import digest
from failslow.records import RankProfile, StepSample

__all__ = ["Faults", "Grid", "Streams", "run"]

ITERATIONS = 10
BLOCK_S, TRANSFER_S = 0.010, {"tp": 0.0005, "pp": 0.0005, "dp": 0.004, "world": 0.0003}
BYTES = {"tp": 65_536, "pp": 131_072, "dp": 4_000_000, "world": 4}
_ENQUEUE_S = 20e-6


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the job is laid out."""

    tp: int = 1
    pp: int = 1
    dp: int = 2
    micro_batches: int = 4
    stage_work: tuple[float, ...] = ()
    """Work of each stage, relative; () all alike."""
    devices: Mapping[int, str] = field(default_factory=dict)
    """Model of each rank's device; else "gpu"."""
    speeds: Mapping[str, float] = field(default_factory=lambda: {"gpu": 1.0})
    on_device: bool = False
    """The host only enqueues, and runs ahead; the device's clock tells durations."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, replica, shard)."""
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        stage, replica, shard = self.place(rank)
        everyone = np.arange(self.world).reshape(self.pp, self.dp, self.tp)
        parts = {
            "world": everyone.reshape(-1),
            "tp": everyone[stage, replica],
            "dp": everyone[stage, :, shard],
            "pp": everyone[:, replica, shard],
        }
        return {name: tuple(part.tolist()) for name, part in parts.items()}


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """{rank: its computations take so many times as long}."""
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """{(src, dst): transfers over it take so many times as long}."""
    everyone: float = 1.0
    pause_s: float = 0.0
    """One worker after the other pauses so long, one in each iteration."""
    noise: float = 0.03
    """Of each computation and transfer."""
    uneven: float = 0.0
    """Of workers, the same all the time."""
    seed: int = 0


class Did(NamedTuple):
    op: str
    kind: str
    peer: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Streams:
    """What each rank did, by one clock; `steps`: when each of its iterations ended."""

    grid: Grid
    faults: Faults
    did: dict[int, list[Did]]
    steps: dict[int, list[float]]

    @property
    def iteration_s(self) -> float:
        return float(np.median(np.diff(self.steps[0])))

    def profiles(self) -> list[RankProfile]:
        """As the agents would make them."""
        return [self.profile(rank) for rank in range(self.grid.world)]

    def profile(self, rank: int) -> RankProfile:
        offset = np.random.default_rng([7, rank]).uniform(0, 1e6)  # clocks of hosts differ
        groups = self.grid.groups(rank)
        table = [
            Group(
                number=number, name=str(number), desc=name, backend="nccl", size=len(ranks),
                rank=ranks.index(rank), ranks=ranks, time_ns=0,
            )
            for number, (name, ranks) in enumerate(groups.items())
        ]  # fmt: skip
        made = digest(
            self.records(rank, offset),
            ops=OPS,
            groups=table,
            samples=self.samples(rank, offset + 1.7e9),
            epoch_s=1.7e9,
            rank=rank,
            node=f"node-{rank // 8}",
            host=f"host-{rank // 8}",
            device=self.grid.devices.get(rank, "gpu"),
        )
        assert made is not None
        return made

    def samples(self, rank: int, offset: float) -> list[StepSample]:
        ends = self.steps[rank]
        return [
            StepSample(step=index, duration_s=end - begin, end_s=end + offset)
            for index, (begin, end) in enumerate(pairwise(ends))
        ]

    def records(self, rank: int, offset: float) -> NDArray[np.void]:
        """Ring records, step marks among them."""
        groups = list(self.grid.groups(rank).items())
        rows: list[dict[str, float]] = []
        marks = deque(self.steps[rank])
        begun = 0.0
        for did in self.did[rank]:
            while marks and marks[0] <= did.start_s + 1e-12:
                begun = marks.popleft()
                rows.append({"kind": OPTIMIZER_STEP, "start": begun, "group": NO_GROUP})
            number = [name for name, _ in groups].index(did.kind)
            peer = groups[number][1].index(did.peer) if did.peer >= 0 else -1
            row = {
                "kind": CALL, "start": did.start_s, "end": did.end_s, "group": number,
                "op": OPS.index(did.op), "size": BYTES[did.kind], "peer": peer,
                "took": did.end_s - did.start_s, "many": len(groups[number][1]),
            }  # fmt: skip
            if self.grid.on_device:
                begun += _ENQUEUE_S
                row |= {"start": begun, "end": -offset, "took": _ENQUEUE_S, "flags": FLAG_ASYNC}
                rows.append(row)
                done = {"kind": DONE, "start": did.start_s, "end": did.end_s, "of": len(rows)}
                rows.append(done)
            else:
                rows.append(row)
        records = np.zeros(len(rows), RECORD_DTYPE)
        for at, row in enumerate(rows):
            record = records[at]
            record["seq"], record["kind"] = at + 1, row["kind"]
            record["start_ns"] = round((row["start"] + offset) * 1e9)
            record["end_ns"] = round((row.get("end", -offset) + offset) * 1e9)
            record["size_bytes"] = row.get("of", row.get("size", 0))
            record["call_ns"] = round(row.get("took", 0.0) * 1e9)
            record["peer"], record["op"] = row.get("peer", -1), row.get("op", 0)
            record["group"], record["group_size"] = row.get("group", 0), row.get("many", 0)
            record["flags"] = row.get("flags", 0)
        return records


class _Task(NamedTuple):
    op: str
    """"" computation."""
    kind: str = ""
    peer: int = -1
    seconds: float = 0.0


def _programme(grid: Grid, rank: int) -> list[_Task]:
    """One iteration: 1F1B, then gradients, then all."""
    stage = grid.place(rank)[0]
    work = BLOCK_S * (grid.stage_work[stage] if grid.stage_work else 1.0)
    step = grid.dp * grid.tp
    before = rank - step if stage > 0 else -1
    after = rank + step if stage < grid.pp - 1 else -1
    meet = [_Task("allreduce_", "tp")] if grid.tp > 1 else []

    def sweep(seconds: float, source: int, target: int) -> list[_Task]:
        tasks = [_Task("recv_", "pp", source)] if source >= 0 else []
        for _ in range(2):
            tasks += [_Task("", seconds=seconds / 2), *meet]
        return [*tasks, *([_Task("send", "pp", target)] if target >= 0 else [])]

    forward, backward = sweep(work, before, after), sweep(2 * work, after, before)
    warm_up = min(grid.pp - stage - 1, grid.micro_batches)
    tasks = forward * warm_up
    for _ in range(grid.micro_batches - warm_up):
        tasks += forward + backward
    tasks += backward * warm_up
    if grid.dp > 1:
        tasks += [_Task("allreduce_", "dp"), _Task("", seconds=BLOCK_S / 10)] * 2
    return [*tasks, _Task("allreduce_", "world"), _Task("", seconds=BLOCK_S / 5), _Task("step")]


class _Run:
    """Time passes: each rank goes on until it must wait for another."""

    def __init__(self, grid: Grid, faults: Faults, iterations: int) -> None:
        self.grid, self.faults = grid, faults
        self.rng = np.random.default_rng(faults.seed)
        self.tasks = {r: _programme(grid, r) * iterations for r in range(grid.world)}
        self.groups = {r: grid.groups(r) for r in range(grid.world)}
        self.at = dict.fromkeys(range(grid.world), 0)
        self.now = dict.fromkeys(range(grid.world), 0.0)
        self.did: dict[int, list[Did]] = {r: [] for r in range(grid.world)}
        self.steps: dict[int, list[float]] = {r: [] for r in range(grid.world)}
        self.came: dict[tuple[str, tuple[int, ...]], dict[int, float]] = {}
        self.sent: dict[tuple[int, int], deque[float]] = {}
        persistent = np.random.default_rng(99).standard_normal(grid.world)
        device = [grid.devices.get(r, "gpu") for r in range(grid.world)]
        self.pace = {
            r: grid.speeds.get(device[r], 1.0)
            * max(0.5, 1.0 + faults.uneven * float(persistent[r]))
            * faults.slow.get(r, 1.0)
            * faults.everyone
            for r in range(grid.world)
        }

    def run(self) -> Streams:
        ready = deque(range(self.grid.world))
        while ready:
            rank = ready.popleft()
            while self.at[rank] < len(self.tasks[rank]):
                freed = self._do(rank, self.tasks[rank][self.at[rank]])
                if freed is None:
                    break
                ready.extend(other for other in freed if other != rank)
        assert all(self.at[r] == len(self.tasks[r]) for r in self.at), "the programme deadlocks"
        return Streams(self.grid, self.faults, self.did, self.steps)

    def _do(self, rank: int, task: _Task) -> list[int] | None:
        """Who can go on because of it; None: `rank` has to wait."""
        if task.op == "step":
            self.steps[rank].append(self.now[rank])
            if self.faults.pause_s and len(self.steps[rank]) % self.grid.world == rank:
                self.now[rank] += self.faults.pause_s
        elif not task.op:
            self.now[rank] += task.seconds * self.pace[rank] * self._noise()
        elif task.op == "send":
            start = self.now[rank]
            end = start + self._transfer(task.kind, [(rank, task.peer)])
            self.sent.setdefault((rank, task.peer), deque()).append(end)
            self._ended(rank, task, start, end)
            self.at[rank] += 1
            return [task.peer]
        elif task.op == "recv_":
            arrived = self.sent.get((task.peer, rank))
            if not arrived:
                return None
            start = self.now[rank]
            self._ended(rank, task, start, max(start + _ENQUEUE_S, arrived.popleft()))
        else:
            return self._meet(rank, task)
        self.at[rank] += 1
        return []

    def _meet(self, rank: int, task: _Task) -> list[int] | None:
        group = self.groups[rank][task.kind]
        came = self.came.setdefault((task.kind, group), {})
        came[rank] = self.now[rank]
        if len(came) < len(group):
            return None
        del self.came[task.kind, group]
        ring = [(r, group[index - 1]) for index, r in enumerate(group)]
        end = max(came.values()) + self._transfer(task.kind, ring)
        for other, start in came.items():
            self._ended(other, task, start, end + 1e-6 * self.rng.random())
            self.at[other] += 1
        return list(group)

    def _transfer(self, kind: str, links: list[tuple[int, int]]) -> float:
        slowest = max(self.faults.links.get(link, 1.0) for link in links)
        return TRANSFER_S[kind] * slowest * self._noise()

    def _ended(self, rank: int, task: _Task, start: float, end: float) -> None:
        self.did[rank].append(Did(task.op, task.kind, task.peer, start, end))
        self.now[rank] = end

    def _noise(self) -> float:
        return float(max(0.5, 1.0 + self.faults.noise * self.rng.standard_normal()))


def run(grid: Grid, faults: Faults | None = None, iterations: int = ITERATIONS) -> Streams:
    """The job from its first iteration on."""
    return _Run(grid, faults or Faults(), iterations).run()
