"""An operation trace -> what profiles of its workers would have been.

In: an `OperationTrace`, in which computation and communication are told apart. Out: a `RankProfile`
a worker, so that `diagnose` can say who was slow in it:

    diagnose(trace_profiles(trace), (), episode=trace.source, slowdown=0.0)

Traces carry no message sizes: who was late can be told from them, not whether a link was slow.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from failslow.records import CallCell, OperationTrace, RankProfile

__all__ = ["trace_profiles"]

_PASSED = {
    "forward-send": ("send", 1),
    "forward-recv": ("recv_", -1),
    "backward-send": ("send", -1),
    "backward-recv": ("recv_", 1),
}
"""Op, and how many stages on the other side is."""
_REPLICAS = {
    "grads-reduce-scatter": "_reduce_scatter_base_",
    "grads-all-reduce": "allreduce_",
    "params-all-gather": "_allgather_base_",
}
_WORLD = {"optimizer-clip-main-grad": "allreduce_"}
_ENDS = {"embedding-grads-all-reduce": "allreduce_"}
"""Between the first and the last stage of a pipeline."""


def trace_profiles(trace: OperationTrace) -> list[RankProfile]:
    """Medians over the traced steps; `compute_s` is all computation of a step together."""
    workers = {
        (int(dp), int(stage)): int(rank)
        for dp, stage, rank in zip(trace.dp, trace.stage, trace.rank, strict=True)
    }
    steps, step = np.unique(trace.step, return_inverse=True)
    step = step.reshape(-1)
    begin, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(begin, step, trace.start_s)
    np.maximum.at(end, step, trace.start_s + trace.duration_s)
    profiles = []
    for (dp, stage), rank in sorted(workers.items(), key=lambda item: item[1]):
        mine = np.flatnonzero((trace.dp == dp) & (trace.stage == stage))
        own = np.bincount(step[mine], weights=_computed(trace, mine), minlength=len(steps))[
            np.unique(step[mine])
        ]
        profiles.append(
            RankProfile(
                rank=rank,
                node=f"dp {dp} stage {stage}",
                start_t=float(begin.min()),
                end_t=float(end.max()),
                iterations=len(own),
                iteration_s=float(np.median(end - begin)),
                compute_s=float(np.median(own)),
                compute_spread_s=float(np.median(np.abs(own - np.median(own)))),
                cells=tuple(_cells(trace, mine, workers, dp, stage)),
            )
        )
    return profiles


def _computed(trace: OperationTrace, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Durations of operations that move nothing, 0 for the others."""
    moves = np.array([k in _PASSED or "reduce" in k or "gather" in k or "clip" in k
                      for k in trace.kinds])  # fmt: skip
    return np.where(moves[trace.kind[rows]], 0.0, trace.duration_s[rows])


def _cells(
    trace: OperationTrace,
    mine: NDArray[np.int64],
    workers: dict[tuple[int, int], int],
    dp: int,
    stage: int,
) -> Iterator[CallCell]:
    stages = sorted({s for d, s in workers if d == dp})
    line = tuple(workers[dp, s] for s in stages)
    groups = {
        **dict.fromkeys(_REPLICAS, tuple(r for (_, s), r in sorted(workers.items()) if s == stage)),
        **dict.fromkeys(_WORLD, tuple(sorted(workers.values()))),
        **dict.fromkeys(_ENDS, (line[0], line[-1])),
    }
    ops = {**_REPLICAS, **_WORLD, **_ENDS}
    for code, kind in enumerate(trace.kinds):
        rows = mine[(trace.kind[mine] == code) & (trace.duration_s[mine] > 0)]
        peer, op, group = None, ops.get(kind, ""), groups.get(kind, ())
        if kind in _PASSED:
            op, step = _PASSED[kind]
            group, peer = line, line[(stages.index(stage) + step) % len(line)]
        if not op or len(group) < 2:
            continue
        for seq in np.unique(trace.seq[rows]).tolist():
            took = trace.duration_s[rows[trace.seq[rows] == seq]]
            yield CallCell(
                group=group,
                label=kind,
                op=op,
                size_bytes=0,
                # both ways share the pair of ranks, and a pair's two sides the direction
                position=2 * seq + kind.startswith("backward"),
                peer=peer,
                calls=len(took),
                duration_s=float(np.median(took)),
                wait_s=float(np.median(took)),
                gap_s=0.0,
                spread_s=float(np.median(np.abs(took - np.median(took)))),
            )
