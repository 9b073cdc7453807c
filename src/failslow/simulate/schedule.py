"""Which stage of a pipeline computes what, in which order: GPipe, 1F1B, interleaved 1F1B.

In: a schedule's name, stages, micro-batches, chunks a stage. Out: for each stage its
computations in order, and one order over all stages in which everything comes after what it
needs.

    stage_orders("1f1b", stages=2, micro_batches=2)[0]   # F0 F1 B0 B1 of chunk 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from failslow.errors import ConfigError

__all__ = ["Computation", "Schedule", "stage_orders", "sweep_order"]

Schedule = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True, slots=True)
class Computation:
    """Forward or backward of one micro-batch through one chunk of the model."""

    forward: bool
    chunk: int
    """In the model, 0 first; chunk c lives on stage c modulo the number of stages."""
    micro_batch: int

    def needs(self, chunks: int) -> Computation | None:
        """What must arrive from the neighbouring chunk, if anything must."""
        if self.forward:
            return Computation(True, self.chunk - 1, self.micro_batch) if self.chunk else None
        if self.chunk == chunks - 1:
            return None  # its own forward, which the stage has done before
        return Computation(False, self.chunk + 1, self.micro_batch)


def stage_orders(
    schedule: Schedule, *, stages: int, micro_batches: int, chunks_per_stage: int = 1
) -> list[list[Computation]]:
    """The computations of each stage in order.

    1f1b and gpipe: Narayanan et al., SC '21 (arXiv 2104.04473), §2.2; interleaved as in Megatron:
    micro-batches in groups of `stages`, chunk after chunk. Raises ConfigError for counts the
    schedule cannot do.
    """
    if schedule == "interleaved":
        if micro_batches % stages:
            raise ConfigError(
                f"micro_batches ({micro_batches}) must be a multiple of pp ({stages}) for the "
                "interleaved schedule; change it, or use schedule 1f1b"
            )
    elif chunks_per_stage != 1:
        raise ConfigError(
            f"vpp ({chunks_per_stage}) needs schedule interleaved; schedule is {schedule}"
        )
    return [
        _order(schedule, stage, stages, micro_batches, chunks_per_stage) for stage in range(stages)
    ]


def _order(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int
) -> list[Computation]:
    total = micro_batches * chunks
    forwards = [_nth(True, n, stage, stages, chunks) for n in range(total)]
    backwards = [_nth(False, n, stage, stages, chunks) for n in range(total)]
    if schedule == "gpipe":
        return forwards + backwards
    ahead = stages - stage - 1
    if schedule == "interleaved" and chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, total)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[total - ahead :]


def _nth(forward: bool, n: int, stage: int, stages: int, chunks: int) -> Computation:
    """The n-th forward (or backward) of a stage: groups of `stages` micro-batches, chunk wise."""
    group, within = divmod(n, stages * chunks)
    local = within // stages
    if not forward:
        local = chunks - 1 - local
    return Computation(forward, local * stages + stage, group * stages + within % stages)


def sweep_order(orders: Sequence[Sequence[Computation]]) -> list[tuple[int, Computation]]:
    """(stage, computation) of all stages, each after all it needs.

    Raises ValueError when the orders wait for each other in a circle.
    """
    stages = len(orders)
    chunks = 1 + max(c.chunk for order in orders for c in order)
    position = [0] * stages
    done: set[Computation] = set()
    sweep: list[tuple[int, Computation]] = []
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        while position[stage] < len(orders[stage]):
            computation = orders[stage][position[stage]]
            need = computation.needs(chunks)
            if need is not None and need not in done:
                break
            done.add(computation)
            sweep.append((stage, computation))
            position[stage] += 1
            # whoever may have waited for it is looked at again
            after = computation.chunk + (1 if computation.forward else -1)
            if 0 <= after < chunks and after % stages != stage and after % stages not in ready:
                ready.append(after % stages)
    if len(sweep) < sum(map(len, orders)):
        raise ValueError("the stages' orders wait for each other")
    return sweep
