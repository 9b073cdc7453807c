"""One step's part of the global batch, as a training loop sees it.

with coordinator.step(step) as share:
    for index in share:                      # of the global batch, from 0
        loss = loss_fn(model(batch(step, index)))
        (loss * share.weight).backward()
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Share", "exchange_switch"]


def exchange_switch(model: nn.Module | None) -> Callable[[bool], None] | None:
    """Turns the exchange of gradients over replicas on and off; None where the model has none.

    Whatever exchanges them is found, wherever in the model: inside torch.compile's wrapper or
    another one, or around some layers only.
    """
    # weak: a model that is dropped for another, on a change of places, must free its groups
    found = [weakref.ref(m) for m in (model.modules() if model is not None else ()) if _has(m)]

    def switch(on: bool) -> None:
        for known in found:
            module = known()
            if module is not None:
                _turn(module, on)

    return switch if found else None


def _has(module: nn.Module) -> bool:
    """Whether it exchanges gradients itself; the last is what torch's replicate() gives."""
    known = isinstance(module, (DistributedDataParallel, FSDPModule))
    return known or callable(getattr(module, "set_requires_gradient_sync", None))


def _turn(module: Any, on: bool) -> None:
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = on  # what its no_sync() sets
    elif isinstance(module, FSDPModule):
        # between the replicas of hybrid sharding; within a replica shards go on being exchanged
        module.set_requires_all_reduce(on, recurse=False)
    else:
        module.set_requires_gradient_sync(on)


class _DeviceTimes:
    """Two moments in a CUDA device's own queue, where its work is slow to begin and not waited for.

    The clock of this process would only tell how long handing the work over takes.
    """

    __slots__ = ("_begin", "_end")

    def __init__(self) -> None:
        self._begin = _event()
        self._end: Any = None

    def end(self) -> None:
        """The device has been given all that is to be timed."""
        self._end = _event()

    @property
    def seconds(self) -> float | None:
        """Between the two; None until the device has come so far: it is not waited for."""
        if self._begin is None or self._end is None:
            return None
        try:
            if not self._end.query():
                return None
            return float(self._begin.elapsed_time(self._end)) / 1e3
        except RuntimeError:  # a pace less, not a step
            return None


def _on_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _event() -> Any:
    """An event at the end of what the device has been given; None where there can be none."""
    try:
        if torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    except RuntimeError:
        return None
    return event


class Share:
    """Micro-batches of one replica in one step. Iterate over it, or take `indices`."""

    __slots__ = (
        "_device", "_switch", "ends_s", "indices", "replicas", "scale", "size", "step", "work",
    )  # fmt: skip

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
        self.work: float | None = None
        """Tokens or samples of the global batch, if you tell: where they change the job is not
        taken for a slow one."""
        self.ends_s: list[float] = []
        """When iterating began, and when each micro-batch of it ended (CLOCK_MONOTONIC)."""
        self._device: _DeviceTimes | None = None
        """The same by the device; None where this process uses none."""
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
        self._device = device = _DeviceTimes() if _on_device() else None
        try:
            for index in self.indices:
                if switch is not None:
                    switch(index == last)
                yield index
                ends_s.append(clock())
                if device is not None and index == last - 1:
                    device.end()
        finally:
            if switch is not None:
                switch(True)

    @property
    def microbatch_s(self) -> float | None:
        """Seconds a micro-batch took, the last one left out; None where that is not known.

        On a CUDA device it is known once the device has come so far, after the next step at best.
        """
        if len(self.ends_s) < 3:
            return None
        if self._device is not None:
            seconds = self._device.seconds
            return None if seconds is None else seconds / (self.count - 1)
        return (self.ends_s[-2] - self.ends_s[0]) / (len(self.ends_s) - 2)
