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
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Share", "Witness", "exchange_switch"]

_WITNESSES = 16


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
        # a static graph is learned in the first backward pass, which has to exchange or fails
        learned = getattr(module, "_static_graph_delay_allreduce_enqueued", True)
        unknown = module.static_graph and not learned
        module.require_backward_grad_sync = on or unknown  # what its no_sync() sets
    elif isinstance(module, FSDPModule):
        # between the replicas of hybrid sharding; within a replica shards go on being exchanged
        module.set_requires_all_reduce(on, recurse=False)
    else:
        module.set_requires_gradient_sync(on)


class Witness:
    """Tells whether a backward pass has run meanwhile, as gradients of some parameters show.

    A loop that takes all its micro-batches first and runs them afterwards has them exchanged in
    each of them, and shows nothing of their times.
    """

    def __init__(self, model: nn.Module) -> None:
        wanted = (p for p in model.parameters() if p.requires_grad)
        sharded = (m for m in model.modules() if isinstance(m, FSDPModule))
        self._parameters = [weakref.ref(p) for p in islice(wanted, _WITNESSES)]
        self._sharded = [weakref.ref(m) for m in islice(sharded, _WITNESSES)]

    def look(self) -> list[object] | None:
        """Changes with every backward pass; None where nothing can be told."""
        try:
            return self._states()
        except Exception:  # torch's own are looked at: a witness less, not a step
            return None

    def _states(self) -> list[object] | None:
        found: list[object] = []
        for known in self._parameters:
            if (parameter := known()) is None:
                return None  # of a model that is gone
            found.append(_state_of(parameter.grad))
        for sharded in self._sharded:
            if (module := sharded()) is None:
                return None
            # hybrid sharding keeps gradients there until replicas exchange them; private to torch
            groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
            found += [_state_of(getattr(g, "_partial_reduce_output", None)) for g in groups]
        return found or None


def _state_of(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (id(tensor), tensor._version)


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
        "_device", "_switch", "_witness", "ended_s", "ends_s", "indices", "left_out", "replicas",
        "scale", "size", "step", "taken_first", "work",
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
        witness: Witness | None = None,
    ) -> None:
        """witness: where it matters whether micro-batches run while it is iterated over."""
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
        self.ended_s: float | None = None
        """When the step ended."""
        self.taken_first = False
        """The last micro-batch was asked for before any other had run."""
        self.left_out = False
        """The loop ended before the last one, in whose backward pass gradients are exchanged."""
        self._device: _DeviceTimes | None = None
        """The same by the device; None where this process uses none."""
        self._switch, self._witness = switch, witness

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
        witness = self._witness if len(self.indices) > 1 else None
        before = None if witness is None else witness.look()
        self.left_out = switch is not None
        try:
            for index in self.indices:
                if index == last and witness is not None and before is not None:
                    self.taken_first = witness.look() == before
                if switch is not None:
                    switch(index == last)
                    self.left_out = index != last
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
        if len(self.ends_s) < 3 or self.taken_first or self._is_brief:
            return None
        if self._device is not None:
            seconds = self._device.seconds
            return None if seconds is None else seconds / (self.count - 1)
        return (self.ends_s[-2] - self.ends_s[0]) / (len(self.ends_s) - 2)

    @property
    def _is_brief(self) -> bool:
        """Most of the step came after iterating, and nothing tells that micro-batches ran in it."""
        if self._witness is not None or self.ended_s is None:
            return False
        begin_s, end_s = self.ends_s[0], self.ends_s[-1]
        return end_s - begin_s < 0.5 * (self.ended_s - begin_s)
