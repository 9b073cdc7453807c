"""An operation trace -> what waits for what in a step: the model that replays it.

In: an `OperationTrace`. Out: `StepGraph`s, one for each set of steps in which the same workers
did the same operations (usually one for all). The model is that of "Understanding Stragglers in
Large Model Training Using What-if Analysis" (arXiv 2505.05713, §3.2), with every order read off
the trace itself (medians over steps and replicas, within a worker: clocks of workers are never
compared):

- a worker computes one thing after another, and does what follows the last backward in order;
- a send waits for the computation whose result it carries, a computation for its recv, a recv
  for the computation that ended before it was posted, and each for the one of its kind before;
- gathering parameters comes before the first forward that needs them, reducing gradients after
  the last backward that makes them, whether overlapped with computation or not;
- sends and recvs end together with their peers; gathers and reductions with the other replicas
  of the stage, the embedding's with the other end of the pipeline, clipping with everyone. What
  an operation itself takes is what is left when the last of them has come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.errors import InputError
from failslow.records import OperationTrace
from failslow.simulate.graph import CycleError, Graph
from failslow.simulate.kinds import (
    BACKWARD,
    CLIP,
    EMBEDDING,
    FORWARD,
    WAYS,
    Way,
    is_peer_to_peer,
    is_replica_sync,
)

__all__ = ["StepGraph", "step_graphs"]

Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"

_SAME_MOMENT_S = 50e-6
"""Times of one worker closer than this are taken as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGraph:
    """Steps of equal structure: n operations in each of S steps."""

    steps: Ints
    rows: Ints
    """(n, S): where in the trace each operation of each step is."""
    own_s: Floats
    """(n, S): what each operation takes by itself, waiting for others left out."""
    dp: Ints
    stage: Ints
    kind: Ints
    """(n,): who did what."""
    graph: Graph
    """Over the n operations, then the meetings of those that end together."""
    disagreeing: float
    """Share of the meetings whose ends show that clocks disagree."""

    def step_time_s(self, own_s: Floats) -> Floats:
        """(S,): how long each step takes when operations take `own_s` (n, S) or (n, 1)."""
        meetings = np.zeros((self.graph.nodes - len(own_s), own_s.shape[1]))
        return self.graph.last_end(np.concatenate([own_s, meetings]))


def step_graphs(trace: OperationTrace) -> tuple[list[StepGraph], list[str]]:
    """The graphs, and warnings about what could not be understood.

    Raises InputError when the trace contradicts itself.
    """
    order = np.lexsort((trace.seq, trace.kind, trace.stage, trace.dp, trace.step))
    _refuse_doubles(trace, order)
    cells = _cells(trace, order)
    plans: dict[bytes, _Plan] = {}
    alike: dict[bytes, list[Ints]] = defaultdict(list)
    for (_, rows), shape in cells:
        alike[shape].append(rows)
    for shape, members in alike.items():
        plans[shape] = _Plan(trace, np.stack(members, axis=1))
    by_structure: dict[Hashable, list[tuple[int, list[tuple[Ints, bytes]]]]] = defaultdict(list)
    by_step: dict[int, list[tuple[int, Ints, bytes]]] = defaultdict(list)
    for ((step, dp), rows), shape in cells:
        by_step[step].append((dp, rows, shape))
    for step, parts in by_step.items():
        key = tuple((dp, shape) for dp, _, shape in parts)
        by_structure[key].append((step, [(rows, shape) for _, rows, shape in parts]))
    graphs = [_assemble(trace, members, plans) for members in by_structure.values()]
    warnings = dict.fromkeys(w for plan in plans.values() for w in plan.warnings)
    return graphs, list(warnings)


def _refuse_doubles(trace: OperationTrace, order: Ints) -> None:
    keys = np.stack([trace.step, trace.dp, trace.stage, trace.kind, trace.seq])[:, order]
    same = np.flatnonzero(np.all(keys[:, 1:] == keys[:, :-1], axis=0))
    if len(same):
        row = order[same[0]]
        raise InputError(
            f"{trace.source}: step {trace.step[row]}, dp_rank {trace.dp[row]}, stage "
            f"{trace.stage[row]}: {trace.kinds[trace.kind[row]]} number {trace.seq[row]} is there "
            "twice; keep one tensor-parallel rank of each worker"
        )


def _cells(trace: OperationTrace, order: Ints) -> list[tuple[tuple[tuple[int, int], Ints], bytes]]:
    """Rows of each (step, replica), and bytes that are equal where the structure is."""
    step, dp = trace.step[order], trace.dp[order]
    cuts = np.flatnonzero((step[1:] != step[:-1]) | (dp[1:] != dp[:-1])) + 1
    shape = np.stack(
        [trace.stage, trace.kind, trace.seq, trace.chunk, trace.microbatch, trace.global_chunk],
        axis=1,
    )
    return [
        (((int(trace.step[rows[0]]), int(trace.dp[rows[0]])), rows), shape[rows].tobytes())
        for rows in np.split(order, cuts)
    ]


@dataclass(slots=True)
class _Node:
    """An operation of a replica, at its usual time within its worker's step."""

    index: int
    stage: int
    kind: str
    seq: int
    chunk: int
    microbatch: int
    start_s: float
    end_s: float
    after: list[int] = field(default_factory=list)
    meeting: Hashable | None = None
    idle: bool = False
    """Recorded, but nothing was sent: it takes part in nothing."""


class _Plan:
    """What waits for what inside a replica, from all its steps of this structure."""

    def __init__(self, trace: OperationTrace, rows: Ints) -> None:
        self.trace = trace
        self.warnings: list[str] = []
        first = rows[:, 0]
        stage = trace.stage[first]
        begins = trace.start_s[rows]
        for s in np.unique(stage):
            begins[stage == s] -= begins[stage == s].min(axis=0)
        start_s = np.median(begins, axis=1)
        end_s = np.median(begins + trace.duration_s[rows], axis=1)
        self.nodes = [
            _Node(
                index=i,
                stage=int(stage[i]),
                kind=trace.kinds[trace.kind[row]],
                seq=int(trace.seq[row]),
                chunk=self._global_chunk(row),
                microbatch=int(trace.microbatch[row]),
                start_s=float(start_s[i]),
                end_s=float(end_s[i]),
            )
            for i, row in enumerate(first)
        ]
        for s in np.unique(stage):
            _Worker([n for n in self.nodes if n.stage == s], self).connect()

    def _global_chunk(self, row: int) -> int:
        """The chunk of the model; -1 for an operation that belongs to none."""
        if self.trace.global_chunk[row] >= 0:
            return int(self.trace.global_chunk[row])
        if self.trace.kinds[self.trace.kind[row]] not in (FORWARD, BACKWARD):
            return -1
        if self.trace.layout.vpp > 1:
            raise InputError(
                f"{self.trace.source}: computations of a job with virtual stages need mc or gmc"
            )
        return int(self.trace.stage[row])


class _Worker:
    """Connects the operations of one pipeline stage of a replica."""

    def __init__(self, nodes: list[_Node], plan: _Plan) -> None:
        self.nodes = sorted(nodes, key=lambda n: (n.start_s, n.end_s, n.seq))
        self.plan = plan
        self.computes = [n for n in self.nodes if n.kind in (FORWARD, BACKWARD)]
        if not self.computes:
            where = f"stage {nodes[0].stage}" if nodes else "a stage"
            raise InputError(f"{plan.trace.source}: {where} has no {FORWARD} and {BACKWARD}")
        self.last_end_s = self.computes[-1].end_s
        self.layout = plan.trace.layout

    def connect(self) -> None:
        passing = [n for n in self.nodes if is_peer_to_peer(n.kind)]
        syncs = [n for n in self.nodes if is_replica_sync(n.kind)]
        beside = [n for n in syncs if n.start_s < self.last_end_s - _SAME_MOMENT_S]
        aside = {n.index for n in (*passing, *beside)}
        main = [n for n in self.nodes if n.index not in aside]
        _chain(main)
        _chain(beside)
        self._beside(beside, main)
        for way in WAYS:
            self._pass(way, [n for n in passing if n.kind.startswith(way)])
        for node in self.nodes:
            if is_replica_sync(node.kind):
                node.meeting = (node.kind, node.stage, node.seq)
            elif node.kind == EMBEDDING:
                node.meeting = (node.kind, node.seq, "own replica")
            elif node.kind == CLIP:
                node.meeting = (node.kind, node.seq)

    def _beside(self, syncs: Iterable[_Node], main: list[_Node]) -> None:
        """Gathers and reductions that go on beside computation."""
        tail = [n for n in main if n.start_s >= self.last_end_s - _SAME_MOMENT_S]
        for sync in syncs:
            before = self._ended_by(sync.start_s)
            if sync.kind.startswith("params-"):
                if before:
                    sync.after.append(before[-1].index)
                later = [
                    n
                    for n in self.computes
                    if n.start_s >= sync.end_s - _SAME_MOMENT_S
                    and (sync.chunk < 0 or (n.kind == FORWARD and n.chunk == sync.chunk))
                ]
            else:
                made = [
                    n
                    for n in before
                    if n.kind == BACKWARD and (sync.chunk < 0 or n.chunk == sync.chunk)
                ]
                if made or before:
                    sync.after.append((made or before)[-1].index)
                later = [n for n in tail if n.start_s >= sync.end_s - _SAME_MOMENT_S]
            if later:
                later[0].after.append(sync.index)

    def _ended_by(self, time_s: float) -> list[_Node]:
        return [n for n in self.computes if n.end_s <= time_s + _SAME_MOMENT_S]

    def _pass(self, way: Way, nodes: list[_Node]) -> None:
        """Sends and recvs of one way: which computation each belongs to, and to which peer."""
        computes = [n for n in self.computes if n.kind == f"{way}-compute"]
        chunks = self.layout.pp * self.layout.vpp
        for end in ("send", "recv"):
            passing = sorted((n for n in nodes if n.kind.endswith(end)), key=lambda n: n.seq)
            onward = (way == "forward") == (end == "send")
            needed = [n for n in computes if (n.chunk < chunks - 1 if onward else n.chunk > 0)]
            matched = self._match(passing, computes, needed, end)
            for node, compute in matched:
                if end == "send":
                    node.after.append(compute.index)
                else:
                    compute.after.append(node.index)
                    posted = [
                        n
                        for n in self._ended_by(node.start_s)
                        if n.start_s < compute.start_s and n is not compute
                    ]
                    if posted:
                        node.after.append(posted[-1].index)
                # named by the chunk that sends
                chunk = compute.chunk
                if end == "recv":
                    chunk += -1 if way == "forward" else 1
                node.meeting = (way, chunk, self._microbatch(compute, computes), "own replica")
            taking_part = {node.index for node, _ in matched}
            for node in passing:
                node.idle = node.index not in taking_part
            _chain([node for node, _ in matched])

    def _match(
        self, passing: list[_Node], computes: list[_Node], needed: list[_Node], end: str
    ) -> list[tuple[_Node, _Node]]:
        """Pairs in order. Some recorders also note sends and recvs that carry nothing (from the
        first and to the last chunk), all of them or all but the first recv."""
        if len(passing) == len(needed):
            return list(zip(passing, needed, strict=True))
        wanted = {n.index for n in needed}
        if len(passing) in (len(computes), len(computes) - 1):
            skip = len(computes) - len(passing)
            owners = computes[skip:] if end == "recv" else computes[: len(passing)]
            pairs = [(p, c) for p, c in zip(passing, owners, strict=True) if c.index in wanted]
            if len(pairs) == len(needed):
                return pairs
        if passing:
            node = passing[0]
            self.plan.warnings.append(
                f"stage {node.stage}: {len(passing)} {node.kind} for {len(needed)} computations "
                "that need one; the surplus is left out"
            )
        return list(zip(passing, needed, strict=False))

    @staticmethod
    def _microbatch(compute: _Node, computes: list[_Node]) -> int:
        same = [n for n in computes if n.chunk == compute.chunk]
        names = {n.microbatch for n in same}
        return compute.microbatch if len(names) == len(same) else same.index(compute)


def _chain(nodes: list[_Node]) -> None:
    for before, node in pairwise(nodes):
        node.after.append(before.index)


def _assemble(
    trace: OperationTrace,
    members: list[tuple[int, list[tuple[Ints, bytes]]]],
    plans: Mapping[bytes, _Plan],
) -> StepGraph:
    """The graph of steps whose replicas have the plans named."""
    parts = members[0][1]
    rows = np.stack([np.concatenate([r for r, _ in cells]) for _, cells in members], axis=1)
    keep = np.ones(len(rows), dtype=np.bool_)
    before: list[int] = []
    after: list[int] = []
    meetings: dict[Hashable, list[int]] = defaultdict(list)
    base = 0
    for replica, (_, shape) in enumerate(parts):
        nodes = plans[shape].nodes
        for node in nodes:
            here = base + node.index
            keep[here] = not node.idle
            if node.meeting is not None and not node.idle:
                own = isinstance(node.meeting, tuple) and node.meeting[-1] == "own replica"
                meetings[(replica, node.meeting) if own else node.meeting].append(here)
        base += len(nodes)
    groups = [np.asarray(group, dtype=np.int64) for group in meetings.values()]
    meets = np.full(base, -1, dtype=np.int64)
    for number, group in enumerate(groups):
        meets[group] = base + number
        before += [base + number] * len(group)
        after += group.tolist()
    base = 0
    for _, shape in parts:
        for node in plans[shape].nodes:
            here = base + node.index
            target = int(meets[here]) if meets[here] >= 0 else here
            before += [base + k for k in node.after]
            after += [target] * len(node.after)
        base += len(plans[shape].nodes)
    try:
        graph = Graph(base + len(groups), before, after)
    except CycleError as error:
        raise InputError(
            f"{trace.source}: step {members[0][0]}: {error}; its start times contradict each other"
        ) from None
    first = rows[:, 0]
    own_s, apart = _own(trace, rows, groups)
    own_s[~keep] = 0.0
    return StepGraph(
        steps=np.asarray([step for step, _ in members], dtype=np.int64),
        rows=rows,
        own_s=own_s,
        dp=trace.dp[first].astype(np.int64),
        stage=trace.stage[first].astype(np.int64),
        kind=np.where(keep, trace.kind[first], -1).astype(np.int64),
        graph=graph,
        disagreeing=apart,
    )


def _own(trace: OperationTrace, rows: Ints, groups: list[Ints]) -> tuple[Floats, float]:
    """Durations without the wait for the last that comes to each meeting, and the share of
    meetings that show clocks to disagree."""
    start_s, duration_s = trace.start_s[rows], trace.duration_s[rows]
    own_s = duration_s.copy()
    if not groups:
        return own_s, 0.0
    who = np.concatenate(groups)
    begins = np.cumsum([0, *(len(g) for g in groups[:-1])])
    sizes = [len(g) for g in groups]
    ends = start_s[who] + duration_s[who]

    def over(what: np.ufunc, values: Floats) -> Floats:
        """Of each meeting, for each that takes part."""
        return np.repeat(what.reduceat(values, begins, axis=0), sizes, axis=0)

    left_s = ends - over(np.maximum, start_s[who])
    shortest_s = over(np.minimum, duration_s[who])
    # who meets ends together, so ends further apart than that are clocks that disagree; then only
    # durations count, and who waits least came last
    apart = over(np.maximum, ends) - over(np.minimum, ends) > shortest_s
    own_s[who] = np.where(apart | (left_s < 0), shortest_s, left_s)
    return own_s, float(apart.mean())
