"""What if nothing had been slow: an operation trace replayed with other durations.

In: an `OperationTrace`. Out: a `WhatIf`: how long steps would take without launch delays
(replayed), with every operation as long as its kind usually takes (ideal), and with only one
replica, stage or kind of operation as slow as it was; then what that adds up to.

Definitions are those of arXiv 2505.05713 (Equations 1 to 4) and its published analyzer: the usual
duration of a kind is the mean over workers and steps of a computation, but the median of a
communication, where one outlier must not count as usual.

    what_if(read_trace("trace.parquet", read_layout("meta.yaml"))).slowdown     # 1.179
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.errors import InputError
from failslow.records import OperationTrace, WhatIf
from failslow.simulate.dependencies import step_graphs
from failslow.simulate.diagnosis import diagnose
from failslow.simulate.kinds import is_peer_to_peer
from failslow.simulate.replay import Choice, Replay, of_kinds, of_replica, of_stage

__all__ = ["what_if"]

Floats: TypeAlias = "NDArray[np.float64]"

_DISAGREE = 0.25
"""Share of meetings with contradicting times from which start times are not believed."""
_MUCH_DELAY = 1.10
"""Measured over replayed step time from which the gaps between operations are pointed out."""


def what_if(trace: OperationTrace) -> WhatIf:
    """Replay the trace as it was, as it could have been, and diagnose the difference.

    Raises InputError when the trace contradicts itself or takes no time.
    """
    graphs, warnings = step_graphs(trace)
    replay = Replay(trace, graphs)
    replayed_s = replay.step_times(lambda g: g.own_s)
    ideal_s = replay.step_times(replay.usual)
    if not ideal_s.mean() > 0:
        raise InputError(f"{trace.source}: no operation takes any time; check the durations")

    def slowdown(chosen: Choice) -> float:
        return float(replay.keeping(chosen).mean() / ideal_s.mean())

    dp_ranks, stages = np.unique(trace.dp), np.unique(trace.stage)
    by_dp = np.array([slowdown(of_replica(int(d))) for d in dp_ranks])
    by_stage = np.array([slowdown(of_stage(int(s))) for s in stages])
    groups = _operation_groups(trace.kinds)
    by_kind = {name: slowdown(of_kinds(codes)) for name, codes in groups.items()}
    rank = np.full((len(dp_ranks), len(stages)), -1, dtype=np.int32)
    rank[np.searchsorted(dp_ranks, trace.dp), np.searchsorted(stages, trace.stage)] = trace.rank
    worker = np.where(rank >= 0, np.minimum(by_dp[:, None], by_stage[None, :]), np.nan)
    agree = float(np.mean([g.disagreeing for g in graphs])) < _DISAGREE
    if not agree:
        warnings.append("clocks of the workers disagree: only durations are used, not start times")
    steps, measured_s = _measured(trace, by_worker=not agree)
    causes, fixes = diagnose(replay, groups)
    return WhatIf(
        source=trace.source,
        layout=trace.layout,
        steps=steps,
        measured_s=measured_s,
        replayed_s=replayed_s,
        ideal_s=ideal_s,
        dp_ranks=tuple(dp_ranks.tolist()),
        dp_slowdown=by_dp,
        stages=tuple(stages.tolist()),
        stage_slowdown=by_stage,
        operation_slowdown=tuple(sorted(by_kind.items(), key=lambda item: -item[1])),
        worker_slowdown=worker,
        worker_rank=rank,
        diagnosis=causes,
        fixes=fixes,
        warnings=tuple(warnings + _remarks(replay, measured_s.mean() / replayed_s.mean())),
    )


def _measured(trace: OperationTrace, *, by_worker: bool) -> tuple[NDArray[np.int64], Floats]:
    """The steps, and how long each took from the first start to the last end: of all workers,
    or by each worker's own clock of the slowest."""
    who = trace.stage * (int(trace.dp.max()) + 1) + trace.dp if by_worker else np.zeros(len(trace))
    order = np.lexsort((who, trace.step))
    step, who = trace.step[order], who[order]
    begins = np.flatnonzero(
        np.concatenate(([True], (step[1:] != step[:-1]) | (who[1:] != who[:-1])))
    )
    start_s, end_s = trace.start_s[order], (trace.start_s + trace.duration_s)[order]
    took_s = np.maximum.reduceat(end_s, begins) - np.minimum.reduceat(start_s, begins)
    steps, first = np.unique(step[begins], return_index=True)
    return steps, np.maximum.reduceat(took_s, first)


def _operation_groups(kinds: Sequence[str]) -> Mapping[str, list[int]]:
    """Codes of the kinds by the name they are reported under; sends and recvs of a way are one."""
    groups: dict[str, list[int]] = defaultdict(list)
    for code, name in enumerate(kinds):
        groups[f"{name.split('-')[0]}-pp-comm" if is_peer_to_peer(name) else name].append(code)
    return groups


def _remarks(replay: Replay, delay: float) -> list[str]:
    remarks = []
    layout, trace = replay.trace.layout, replay.trace
    if delay >= _MUCH_DELAY:
        remarks.append(
            f"steps take x{delay:.2f} of what their operations need: between operations workers "
            "wait for something the trace does not hold (data loading, the host)"
        )
    for name, told, seen in (
        ("replicas", layout.dp, len(np.unique(trace.dp))),
        ("stages", layout.pp, len(np.unique(trace.stage))),
    ):
        if seen < told:
            remarks.append(f"{seen} of {told} {name} are in the trace; nothing is said of the rest")
    if len(replay.graphs) > 1:
        remarks.append(
            f"steps are of {len(replay.graphs)} shapes (different operations were recorded)"
        )
    return remarks
