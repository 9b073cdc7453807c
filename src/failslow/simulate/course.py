"""A simulated job one iteration at a time, which can be steered between any two.

In: a `Scenario`. Out: for each iteration how long it takes and what each device computed in it:

    course = Course(scenario)
    course.steer(split=(9, 5, 9, 9))
    course.step(120, now_s=88.1)       # Step(duration_s=0.71, healthy_s=0.62, own_s=(…))

The noise of an iteration is the same whatever is done about a fault.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.simulate.noise import iteration_factors
from failslow.simulate.scenario import Scenario
from failslow.simulate.sensors import faulty_nodes
from failslow.simulate.steps import StepBlock, StepModel

__all__ = ["Course", "Step"]

Floats: TypeAlias = "NDArray[np.float64]"

_BLOCK = 128
"""Iterations worked out together, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One iteration."""

    duration_s: float
    healthy_s: float
    """Without faults, and with nothing done about any."""
    own_s: Floats
    """(devices,): what each computed by itself."""
    counts: NDArray[np.int64]
    """(devices,): micro-batches each ran."""


class Course:
    """Where a job stands: its faults, its split, its workers' places."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        """As it is now: split as steered, without what left with its node."""
        self.devices = tuple(StepModel(scenario).cost_model.device.tolist())
        """The device at each position."""
        self._factor, self._spike = iteration_factors(
            scenario.noise, scenario.iterations, scenario.seed
        )
        self._healthy = StepModel(scenario.but(faults=(), split=()))
        self._model = StepModel(scenario)
        self._blocks: dict[int, tuple[int, StepBlock]] = {}

    def steer(
        self, *, split: Sequence[int] | None = None, devices: Sequence[int] | None = None
    ) -> None:
        """From the next iteration on replicas run `split`, and `devices` are at the positions."""
        even = (self.scenario.workload.micro_batches,) * self.scenario.workload.dp
        if split is not None:
            self.scenario = self.scenario.but(split=() if tuple(split) == even else tuple(split))
        if devices is not None:
            self.devices = tuple(devices)
        self._model = StepModel(self.scenario, devices=self.devices)

    def leave(self, nodes: Collection[int]) -> None:
        """A spare takes the place of each of these nodes: their faults are gone."""
        kept = tuple(
            fault
            for fault in self.scenario.faults
            if not set(nodes) & set(faulty_nodes(self.scenario, fault)[:1])
        )
        self.scenario = self.scenario.but(faults=kept)
        self._model = StepModel(self.scenario, devices=self.devices)

    def step(self, index: int, now_s: float) -> Step:
        """Iteration `index`, counted from 0, if it begins at `now_s`."""
        block, k = self._block(self._model, index)
        plain, _ = self._block(self._healthy, index)
        state = self._model.state(now_s)
        own, healthy_s = self._factor[index], float(plain.durations(self._healthy.healthy)[k])
        extra_s = healthy_s * self._spike[index]
        told = self.scenario
        if told.checkpoint_every and (index + 1) % told.checkpoint_every == 0:
            extra_s += told.checkpoint_s
        w, counts = told.workload, self._model.counts
        each_s = self._model.cost_model.own_s(self._model.effects(state)) * counts[None, :, None]
        each_s = each_s * block.noise[0][k][..., None] + w.optimizer_ms * 1e-3
        own_s = np.empty(len(self.devices))
        own_s[list(self.devices)] = each_s.ravel()
        ran = np.empty(len(self.devices), dtype=np.int64)
        ran[list(self.devices)] = np.broadcast_to(counts[None, :, None], each_s.shape).ravel()
        return Step(
            duration_s=float(block.durations(state)[k] * own + extra_s),
            healthy_s=float(healthy_s * own + extra_s),
            own_s=own_s,
            counts=ran,
        )

    def _block(self, model: StepModel, index: int) -> tuple[StepBlock, int]:
        size = min(model.block, _BLOCK)
        number, within = divmod(index, size)
        known = self._blocks.get(id(model))
        if known is None or known[0] != number:
            known = number, StepBlock(model, number, size)
            keep = (id(self._model), id(self._healthy))
            self._blocks = {key: b for key, b in self._blocks.items() if key in keep}
            self._blocks[id(model)] = known
        return known[1], within
