"""How long a step of a pipeline takes: the exact recurrence, for many steps and replicas at once.

In: a schedule, once; then how long each chunk computes and each transfer takes, in every case (a
step of a replica). Out: when each chunk has its gradients. A computation starts when its stage
has finished the one before and what it needs has arrived:

    end(c) = max(end(the one before on the stage), end(what it needs) + transfer) + own

    pipeline = Pipeline("1f1b", stages=4, micro_batches=8)
    pipeline.run(forward_s, backward_s, onward_s, back_s).stage_end_s.max(axis=0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from failslow.simulate.schedule import Computation, Schedule, stage_orders, sweep_order

__all__ = ["Pipeline", "PipelineTimes"]

Floats: TypeAlias = "NDArray[np.float64]"
Watch: TypeAlias = "Callable[[int, Computation, Floats, Floats], None]"


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds after the step began, in every case."""

    stage_end_s: Floats
    """(stages, cases): when a stage has finished its last computation."""
    chunk_end_s: Floats
    """(chunks, cases): when a chunk has finished its last backward."""


class Pipeline:
    """The computations of one schedule in an order that can be swept once.

    Raises ConfigError for counts the schedule cannot do.
    """

    def __init__(
        self, schedule: Schedule, *, stages: int, micro_batches: int, chunks_per_stage: int = 1
    ) -> None:
        self.stages = stages
        self.chunks = stages * chunks_per_stage
        orders = stage_orders(
            schedule,
            stages=stages,
            micro_batches=micro_batches,
            chunks_per_stage=chunks_per_stage,
        )
        self._sweep = sweep_order(orders)
        self._last = {c.chunk: c for order in orders for c in order if not c.forward}

    def run(
        self,
        forward_s: Floats,
        backward_s: Floats,
        onward_s: Floats,
        back_s: Floats,
        *,
        watch: Watch | None = None,
    ) -> PipelineTimes:
        """Every case of it.

        forward_s, backward_s: (chunks, cases) for one micro-batch.
        onward_s, back_s: (chunks - 1, cases) to pass activations from chunk k to k + 1, and
        gradients from k + 1 to k.
        watch: called with stage, computation, start and end of each.
        """
        cases = forward_s.shape[1]
        clock = np.zeros((self.stages, cases))
        chunk_end = np.zeros((self.chunks, cases))
        arriving: dict[Computation, Floats] = {}
        spare: list[Floats] = []
        for stage, computation in self._sweep:
            own, chunk = clock[stage], computation.chunk
            need = computation.needs(self.chunks)
            if need is not None:
                arrived = arriving.pop(need)
                np.maximum(own, arrived, out=own)
                spare.append(arrived)
            start = own.copy() if watch else own
            own += forward_s[chunk] if computation.forward else backward_s[chunk]
            if watch:
                watch(stage, computation, start, own.copy())
            passes = chunk < self.chunks - 1 if computation.forward else chunk > 0
            if passes:
                transfer = onward_s[chunk] if computation.forward else back_s[chunk - 1]
                arriving[computation] = np.add(
                    own, transfer, out=spare.pop() if spare else np.empty(cases)
                )
            if computation is self._last[chunk]:
                chunk_end[chunk] = own
        return PipelineTimes(clock, chunk_end)
