"""Why a traced job is slower than it need be: workers, stages, data, or the network.

In: a `Replay`. Out: causes with the share of the slowdown each explains alone, and what putting
one thing right would gain. Durations of computations are split into what the place in the model
needs (stage and chunk, by the median replica), what a worker needs beyond its peers of the same
place, and what varies from one micro-batch to the next; each part is taken out by itself and the
steps run again.

    diagnose(replay, groups)[0][0]   # WhatIfCause(what="stage imbalance", where="stage 3", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.records import WhatIfCause, WhatIfFix
from failslow.simulate.dependencies import StepGraph
from failslow.simulate.kinds import BACKWARD, FORWARD, is_communication
from failslow.simulate.replay import Replay, of_kinds

__all__ = ["diagnose"]

Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"

_MIN_SLOWDOWN = 1.10
"""A job, or a worker against its peers, this much slower is worth a diagnosis (design, §1)."""
_MIN_SHARE = 0.25
"""A cause explains at least so much of the slowdown."""
_MIN_GAIN_PCT = 1.0
_FORWARD_BACKWARD = 0.9
"""Correlation of forward and backward times of a micro-batch that shows its length to be the
reason (arXiv 2505.05713, §5.3)."""
_SIGMAS = 3.0
"""A worker's excess over its peers must be this many standard errors over the steps."""
_NAMED = 8


def diagnose(
    replay: Replay, groups: Mapping[str, Sequence[int]]
) -> tuple[tuple[WhatIfCause, ...], tuple[WhatIfFix, ...]]:
    """Causes, the largest first ("none" when nothing is to blame), and fixes worth a percent.

    groups: codes of the operation kinds by the name they are reported under.
    """
    now_s = float(replay.step_times(lambda g: g.own_s).mean())
    ideal_s = float(replay.step_times(replay.usual).mean())
    parts = _Parts(replay)
    considered = [
        *parts.workers(),
        *parts.stages(),
        *parts.data(),
        *_communication(replay, groups),
    ]
    causes, fixes = [], []
    for mending in considered:
        gained_s = now_s - mending.step_s
        if mending.what is not None and gained_s >= _MIN_SHARE * (now_s - ideal_s):
            share = gained_s / (now_s - ideal_s) if now_s > ideal_s else 0.0
            causes.append(WhatIfCause(what=mending.what, where=mending.where, share=share))
        gain_pct = 100 * gained_s / now_s
        if gain_pct >= _MIN_GAIN_PCT:
            fixes.append(WhatIfFix(what=mending.fix, where=mending.where, gain_pct=gain_pct))
    fixes.sort(key=lambda fix: -fix.gain_pct)
    if now_s < _MIN_SLOWDOWN * ideal_s:
        causes = [WhatIfCause(what="none", where="", share=0.0)]
    elif not causes:
        causes = [WhatIfCause(what="none", where="no part of it explains it", share=1.0)]
    return tuple(sorted(causes, key=lambda cause: -cause.share)), tuple(fixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mending:
    """Something put right: what it would be as a cause, if it can be one, and the step time."""

    what: Literal["worker", "stage imbalance", "data imbalance", "communication"] | None
    fix: str
    where: str
    step_s: float


def _communication(replay: Replay, groups: Mapping[str, Sequence[int]]) -> Iterator[_Mending]:
    kinds = replay.trace.kinds
    networked = {n: codes for n, codes in groups.items() if is_communication(kinds[codes[0]])}
    alone = {name: replay.mending(of_kinds(codes)).mean() for name, codes in networked.items()}
    if not alone:
        return
    every = [code for codes in networked.values() for code in codes]
    together_s = float(replay.mending(of_kinds(every)).mean())
    most = min(alone, key=lambda name: alone[name])
    yield _Mending(
        what="communication", fix="steady the network", where=f"mostly {most}", step_s=together_s
    )


class _Parts:
    """Computation times split by place (stage, chunk, kind), worker and micro-batch."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.trace = replay, replay.trace
        kinds = self.trace.kinds
        self._computing = [k for k, name in enumerate(kinds) if name in (FORWARD, BACKWARD)]
        self._dps, self._stages = np.unique(self.trace.dp), np.unique(self.trace.stage)
        keys = np.concatenate([self._keys(g)[self._compute(g)] for g in replay.graphs])
        self.places = np.unique(keys, axis=0)
        """(P, 3): stage, kind, chunk of each place."""
        shape = (len(self._dps), len(self.places), sum(len(g.steps) for g in replay.graphs))
        total, count = np.zeros(shape), np.zeros(shape)
        first = 0
        for g in replay.graphs:
            mine = self._compute(g)
            where = (np.searchsorted(self._dps, g.dp[mine]), self._place(g)[mine])
            last = first + len(g.steps)
            np.add.at(total[:, :, first:last], where, g.own_s[mine])
            np.add.at(count[:, :, first:last], where, 1)
            first = last
        self._total, self._count = total, count
        with np.errstate(invalid="ignore"):
            self.worker_s = total.sum(axis=2) / count.sum(axis=2)
        """(D, P): what a worker takes on average; NaN where it does nothing."""
        self.place_s = _low_median(self.worker_s)
        """(P,): what the place takes by its median replica."""

    def workers(self) -> Iterator[_Mending]:
        """Those slower than their peers of the same stage, together and each alone."""
        slow = self._slow_workers()
        if not slow:
            return

        def mended(chosen: Sequence[tuple[int, int]]) -> float:
            def durations(g: StepGraph) -> Floats:
                of_them = np.zeros(len(g.dp), dtype=np.bool_)
                for d, s in chosen:
                    of_them |= (g.dp == d) & (g.stage == s)
                return self._with(g, of_them, lambda place: self.place_s[place][:, None])

            return float(self.replay.step_times(durations).mean())

        named = ", ".join(self._name(d, s, factor) for (d, s), factor in slow[:_NAMED])
        more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
        yield _Mending(
            what="worker",
            fix="replace the worker" if len(slow) == 1 else f"replace all {len(slow)} workers",
            where=named + more,
            step_s=mended([worker for worker, _ in slow]),
        )
        for worker, factor in slow[:_NAMED] if len(slow) > 1 else ():
            yield _Mending(
                what=None,
                fix="replace the worker",
                where=self._name(*worker, factor),
                step_s=mended([worker]),
            )

    def stages(self) -> Iterator[_Mending]:
        """The same work spread evenly over the stages and chunks."""
        if len(self._stages) < 2:
            return
        kind = self.places[:, 1]
        even_s = np.array([self.place_s[kind == k].mean() for k in kind])
        factor = even_s / np.where(self.place_s > 0, self.place_s, 1.0)

        def durations(g: StepGraph) -> Floats:
            place = self._place(g)
            scale = np.where(self._compute(g), factor[place], 1.0)
            return g.own_s * scale[:, None]

        load = np.array([self.place_s[self.places[:, 0] == s].sum() for s in self._stages])
        longest = int(np.argmax(load))
        last = longest == len(load) - 1
        where = f"last stage, {self._stages[-1]}" if last else f"stage {self._stages[longest]}"
        where += f" (×{load[longest] / load.mean():.2f} the mean stage)"
        if len(self._dps) == 1:
            where += "; with one replica it may as well be a slow worker"
        yield _Mending(
            what="stage imbalance",
            fix="balance the stages",
            where=where,
            step_s=float(self.replay.step_times(durations).mean()),
        )

    def data(self) -> Iterator[_Mending]:
        """Every micro-batch as long as its worker's mean; data is why when both ways agree."""

        def durations(g: StepGraph) -> Floats:
            dp = np.searchsorted(self._dps, g.dp)
            everywhere = np.ones(len(dp), dtype=np.bool_)
            return self._with(g, everywhere, lambda place: self.worker_s[dp, place][:, None])

        agreement = self._agreement()
        lengths = agreement >= _FORWARD_BACKWARD
        where = f"forward and backward times of a micro-batch correlate by {agreement:.2f}"
        yield _Mending(
            what="data imbalance" if lengths else None,
            fix="even out the micro-batches" if lengths else "steady the computation",
            where=where,
            step_s=float(self.replay.step_times(durations).mean()),
        )

    def _slow_workers(self) -> list[tuple[tuple[int, int], float]]:
        """((dp, stage), factor over its peers), the slowest first."""
        with np.errstate(invalid="ignore", divide="ignore"):
            each = self._total / self._count
            expected = self._count * _low_median(each)[None]
            found = []
            for s in self._stages:
                mine = self.places[:, 0] == s
                ratio = self._total[:, mine].sum(axis=1) / expected[:, mine].sum(axis=1)
                for d, by_step in zip(self._dps, ratio, strict=True):
                    known = by_step[np.isfinite(by_step)]
                    if not len(known):
                        continue
                    error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else 0.0
                    factor = float(known.mean())
                    if factor >= _MIN_SLOWDOWN and factor - 1 >= _SIGMAS * error:
                        found.append(((int(d), int(s)), factor))
        return sorted(found, key=lambda item: -item[1])

    def _agreement(self) -> float:
        """Correlation of forward and backward times of micro-batches, each over its usual."""
        ways: dict[str, list[Floats]] = {FORWARD: [], BACKWARD: []}
        for g in self.replay.graphs:
            dp, place = np.searchsorted(self._dps, g.dp), self._place(g)
            rows = g.rows[:, 0]
            order = np.lexsort(
                (
                    self.trace.seq[rows],
                    self.trace.microbatch[rows],
                    self.trace.global_chunk[rows],
                    g.stage,
                    g.dp,
                )
            )
            pair = {}
            for way in ways:
                mine = order[np.isin(g.kind[order], self._codes(way))]
                pair[way] = g.own_s[mine] / self.worker_s[dp[mine], place[mine]][:, None]
            if pair[FORWARD].shape == pair[BACKWARD].shape:
                for way, values in pair.items():
                    ways[way].append(values.ravel())
        if not ways[FORWARD]:
            return 0.0
        forward, backward = (np.concatenate(values) for values in ways.values())
        if len(forward) < 3 or not forward.std() > 0 or not backward.std() > 0:
            return 0.0
        return float(np.corrcoef(forward, backward)[0, 1])

    def _with(
        self, g: StepGraph, chosen: NDArray[np.bool_], value: Callable[[Ints], Floats]
    ) -> Floats:
        """The trace's own durations, but of the chosen computations those by place."""
        mine = chosen & self._compute(g)
        return np.where(mine[:, None], value(self._place(g)), g.own_s)

    def _compute(self, g: StepGraph) -> NDArray[np.bool_]:
        return np.isin(g.kind, self._computing)

    def _codes(self, name: str) -> list[int]:
        return [code for code, kind in enumerate(self.trace.kinds) if kind == name]

    def _keys(self, g: StepGraph) -> Ints:
        chunk = self.trace.global_chunk[g.rows[:, 0]].astype(np.int64)
        return np.stack([g.stage, g.kind, chunk], axis=1)

    def _place(self, g: StepGraph) -> Ints:
        """Index of each operation's place; any for what is no computation."""
        span = int(self.trace.global_chunk.max()) + 2
        kinds = len(self.trace.kinds) + 1

        def code(keys: Ints) -> Ints:
            return (keys[:, 0] * kinds + keys[:, 1]) * span + keys[:, 2]

        found = np.searchsorted(code(self.places), code(self._keys(g)))
        return np.minimum(found, len(self.places) - 1)

    def _name(self, dp: int, stage: int, factor: float) -> str:
        here = (self.trace.dp == dp) & (self.trace.stage == stage)
        return f"dp {dp} stage {stage} (rank {self.trace.rank[here][0]}) ×{factor:.2f}"


def _low_median(values: Floats) -> Floats:
    """Over the first axis, NaN left out; of two values the lower, as the one at fault is slow."""
    known = np.isfinite(values).sum(axis=0)
    middle = np.maximum(known - 1, 0) // 2
    result: Floats = np.take_along_axis(np.sort(values, axis=0), middle[None], axis=0)[0]
    return result
