"""One step's part of the global batch, as a training loop sees it.

with coordinator.step(step) as share:
    for index in share:                      # of the global batch, from 0
        loss = loss_fn(model(batch(step, index)))
        (loss * share.weight).backward()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Share", "exchange_switch"]


def exchange_switch(model: nn.Module | None) -> Callable[[bool], None] | None:
    """Turns the exchange of gradients over replicas on and off; None where the model has none."""
    wrapped: Any = model
    if isinstance(wrapped, DistributedDataParallel):

        def switch(on: bool) -> None:
            # what DistributedDataParallel.no_sync() sets
            wrapped.require_backward_grad_sync = on

        return switch
    # between the replicas of hybrid sharding; within a replica shards go on being exchanged
    return wrapped.set_requires_all_reduce if isinstance(wrapped, FSDPModule) else None


class Share:
    """Micro-batches of one replica in one step. Iterate over it, or take `indices`."""

    __slots__ = ("_switch", "ends_s", "indices", "replicas", "scale", "size", "step")

    def __init__(
        self,
        step: int,
        indices: range,
        *,
        size: int,
        replicas: int,
        scale: float,
        switch: Callable[[bool], None] | None,
    ) -> None:
        self.step = step
        self.indices = indices
        """Of the global batch, in its order."""
        self.size = size
        """Micro-batches of the global batch."""
        self.replicas = replicas
        self.scale = scale
        """`replicas` where gradients are averaged over replicas, 1 where they are summed."""
        self.ends_s: list[float] = []
        """When iterating began, and when each micro-batch of it ended (CLOCK_MONOTONIC)."""
        self._switch = switch

    @property
    def count(self) -> int:
        """Micro-batches of this replica."""
        return len(self.indices)

    @property
    def weight(self) -> float:
        """Factor for a micro-batch's loss, all micro-batches having as many tokens."""
        return self.scale / self.size

    def weigh(self, tokens: float, of: float) -> float:
        """Factor for a loss that is the mean over `tokens`, the global batch having `of` of them.

        For a loss that is a sum over tokens, give 1.
        """
        return self.scale * tokens / of

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        """The indices. Gradients are exchanged in the last one's backward pass only, if the
        coordinator was given the model: so replicas may differ in their number."""
        switch, last, clock = self._switch, self.indices.stop - 1, time.monotonic
        self.ends_s = ends_s = [clock()]
        try:
            for index in self.indices:
                if switch is not None:
                    switch(index == last)
                yield index
                ends_s.append(clock())
        finally:
            if switch is not None:
                switch(True)

    @property
    def microbatch_s(self) -> float | None:
        """Seconds a micro-batch took, the last one left out; None where that is not known."""
        if len(self.ends_s) < 3:
            return None
        return (self.ends_s[-2] - self.ends_s[0]) / (len(self.ends_s) - 2)
