"""How slow a simulated job is under any of its faults, whatever is done about them.

In: a `Scenario`, a time, what is in force. Out: the slowdown, noise left out, by the own recurrence
of the simulator and never by a planner's model:

    truth = JobTruth(scenario)
    truth.slowdown(700.0)                                               # 1.46
    truth.slowdown(700.0, in_force=InForce(microbatches=(18, 10, 18, 18)))       # 1.11
"""

from __future__ import annotations

from failslow.decide import InForce
from failslow.simulate.noise import Noise
from failslow.simulate.scenario import Scenario
from failslow.simulate.sensors import faulty_nodes
from failslow.simulate.steps import StepBlock, StepModel
from failslow.simulate.streams import node_name

__all__ = ["JobTruth"]


class JobTruth:
    """Of one job; states that were asked for are remembered."""

    def __init__(self, scenario: Scenario) -> None:
        self._calm = scenario.but(noise=Noise.none(), faults=(), split=())
        self._faults = scenario.faults
        self._even = (scenario.workload.micro_batches,) * scenario.workload.dp
        self._known: dict[tuple[object, ...], float] = {}
        self.healthy_s = self._time_s(StepModel(self._calm), 0.0)

    def slowdown(
        self,
        at_s: float,
        *,
        in_force: InForce | None = None,
        without: frozenset[str] = frozenset(),
    ) -> float:
        """Of an iteration that begins at `at_s`. without: hosts whose place a spare has taken."""
        acting = tuple(
            fault
            for fault in self._faults
            if fault.level(at_s) > 1.0
            and not without & {node_name(node) for node in faulty_nodes(self._calm, fault)[:1]}
        )
        force = in_force or InForce()
        split = () if force.microbatches in ((), self._even) else force.microbatches
        levels = tuple((fault, fault.level(at_s)) for fault in acting)
        key = (levels, split, force.placement)
        if key not in self._known:
            told = self._calm.but(faults=acting, split=split)
            model = StepModel(told, devices=force.placement or None)
            self._known[key] = self._time_s(model, at_s) / self.healthy_s
        return self._known[key]

    @staticmethod
    def _time_s(model: StepModel, at_s: float) -> float:
        return float(StepBlock(model, 0, 1).durations(model.state(at_s))[0])
