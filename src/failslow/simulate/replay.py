"""Step times under other durations: the graphs of a trace, run again as often as asked.

In: the `StepGraph`s of a trace. Out: a time for each step, when operations take what a function
of the graph says.

    replay = Replay(trace, graphs)
    replay.step_times(lambda g: g.own_s).mean()         # as it was, no launch delays
    replay.step_times(replay.usual).mean()              # ideal
    replay.keeping(of_stage(3)).mean()                  # ideal, but the last stage as it was
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.records import OperationTrace
from failslow.simulate.dependencies import StepGraph
from failslow.simulate.kinds import is_communication

__all__ = ["Choice", "Durations", "Replay", "of_kinds", "of_replica", "of_stage"]

Floats: TypeAlias = "NDArray[np.float64]"
Durations: TypeAlias = "Callable[[StepGraph], Floats]"
"""Durations (n, S), or (n, 1) when they are the same in every step."""
Choice: TypeAlias = "Callable[[StepGraph], NDArray[np.bool_]]"
"""Flags (n,): which operations are meant."""


def of_replica(dp: int) -> Choice:
    """The operations of one data-parallel rank."""
    return lambda g: g.dp == dp


def of_stage(stage: int) -> Choice:
    """The operations of one pipeline stage."""
    return lambda g: g.stage == stage


def of_kinds(codes: Sequence[int]) -> Choice:
    """The operations of these kinds."""
    return lambda g: np.isin(g.kind, codes)


class Replay:
    """Runs the steps of a trace again."""

    def __init__(self, trace: OperationTrace, graphs: Sequence[StepGraph]) -> None:
        self.trace = trace
        self.graphs = graphs
        steps = np.concatenate([g.steps for g in graphs])
        self._order = np.argsort(steps)
        self.usual_s = self._usual()
        """What an operation of each kind usually takes; 0 behind the last, for idle ones."""

    def usual(self, graph: StepGraph) -> Floats:
        """Every operation as long as its kind usually takes: (n, 1)."""
        return self.usual_s[graph.kind][:, None]

    def step_times(self, durations: Durations) -> Floats:
        """A time for each step of the trace, in their order."""
        times = []
        for graph in self.graphs:
            own_s = graph.step_time_s(durations(graph))
            times.append(np.broadcast_to(own_s, graph.steps.shape))
        result: Floats = np.concatenate(times)[self._order]
        return result

    def keeping(self, chosen: Choice) -> Floats:
        """Step times when the chosen operations take what they took, all others the usual."""
        return self.step_times(
            lambda g: np.where(chosen(g)[:, None], g.own_s, self.usual_s[g.kind][:, None])
        )

    def mending(self, chosen: Choice) -> Floats:
        """Step times when the chosen operations take the usual, all others what they took."""
        return self.step_times(
            lambda g: np.where(chosen(g)[:, None], self.usual_s[g.kind][:, None], g.own_s)
        )

    def _usual(self) -> Floats:
        usual = np.zeros(len(self.trace.kinds) + 1)
        for code, name in enumerate(self.trace.kinds):
            taken = [g.own_s[g.kind == code].ravel() for g in self.graphs]
            taken_s = np.concatenate(taken)
            if len(taken_s):
                usual[code] = np.median(taken_s) if is_communication(name) else taken_s.mean()
        return usual
