"""One worker's part of the training: its stage, its optimizer, one optimizer step at a time.

In: the options, a grid, and for each step the micro-batches this replica runs. Out: the global
batch's mean loss per token, the same on every worker. Gradients are summed over replicas by one
all-reduce, and clipped by their global norm, for which every step has one all-reduce over all
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from data import Batches, seed_of
from failslow.mitigate.share import Share
from layout import Grid
from model import BYTES, Shape, Stage, token_loss

__all__ = ["Trainer", "local"]

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""
_WISHES = ("told", "time")
"""Why a worker may want to end; the first outranks."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor that may be split over workers."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Trainer:
    """Made by all workers together; `rebuild` when the number of micro-batches changes."""

    def __init__(
        self,
        *,
        grid: Grid,
        shape: Shape,
        batches: Batches,
        device: torch.device,
        learning_rate: float,
        clip: float,
        seed: int,
    ) -> None:
        self.shape, self.batches, self.device = shape, batches, device
        self.learning_rate, self.clip, self.seed = learning_rate, clip, seed
        self.work: Callable[[], None] = lambda: None
        """Called once a micro-batch: compute that is there to take time."""
        self.wish = ""
        """Why this worker wants to end: "time" is up, or it is "told" to; "" it does not."""
        self.end = ""
        """The same of any worker, as of the last step: all of them know it after the same one."""
        self._weight = 0.0
        self.grid, self._joined = grid, True
        self._build()

    def _build(self) -> None:
        """Be the worker at its place of the grid, with a new model and optimizer."""
        grid = self.grid
        self.stage = Stage(self.shape, grid.stage, grid.layout.pp, self.seed).to(self.device)
        self.stage.work = self._work
        if grid.layout.tp > 1:
            self.stage.split(grid.tensor_mesh)
        self.parameters: dict[str, nn.Parameter] = dict(self.stage.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=self.learning_rate, weight_decay=0.01, foreach=False
        )
        self._pipeline: Schedule1F1B | None = None
        self._count = 0

    def _work(self) -> None:
        self.work()

    def rebuild(self, count: int) -> None:
        """From now on this replica runs `count` micro-batches a step; at least one a stage."""
        self._count = count
        if self.grid.layout.pp == 1:
            return
        shape, rows = self.shape, (self.batches.sequences, self.shape.length)
        text = torch.empty(rows, dtype=torch.long, device=self.device)
        hidden = torch.empty(*rows, shape.width, device=self.device, requires_grad=True)
        logits = torch.empty(*rows, BYTES, device=self.device, requires_grad=True)
        # left to find the shapes out, it would run a micro-batch more after each rebuild
        stage = PipelineStage(
            self.stage,
            self.grid.stage,
            self.grid.layout.pp,
            self.device,
            input_args=text if self.stage.is_first else hidden,
            output_args=logits if self.stage.is_last else hidden,
            group=self.grid.groups[0],
        )
        # scale_grads would divide by this replica's own count, which others do not have
        self._pipeline = Schedule1F1B(stage, count, loss_fn=self._loss, scale_grads=False)

    def state(self) -> dict[str, Any]:
        """Tensors and plain values that make up this place's state; the training's own."""
        moments = [self.optimizer.state[parameter] for parameter in self.parameters.values()]
        return {
            "parameters": {name: local(p.detach()) for name, p in self.parameters.items()},
            "moments": [{key: local(value) for key, value in own.items()} for own in moments],
        }

    def move(self, placement: tuple[int, ...], state: dict[str, Any]) -> None:
        """Take the place that `placement` gives this worker, and its state. All together.

        Where it fails, on whichever workers, all can call it again: to go back, or for another try.
        """
        # parameters that are split over workers hold on to the groups they were made with
        for name in ("stage", "parameters", "optimizer"):
            self.__dict__.pop(name, None)  # an earlier call may have failed just here
        self._pipeline = None
        if self._joined:
            self._joined = False
            self.grid.close()
        self.grid, self._joined = Grid.build(self.grid.layout, placement, self.device.type), True
        self._build()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local(parameter).copy_(state["parameters"][name])
            for parameter, moments in zip(self.parameters.values(), state["moments"], strict=True):
                for key, value in moments.items():
                    whole = torch.zeros_like(parameter) if value.ndim else torch.zeros(())
                    local(whole).copy_(value)
                    self.optimizer.state[parameter][key] = whole

    def step(self, step: int, share: Sequence[int] | Share, size: int) -> float:
        """Train on the micro-batches `share` of that step's global batch of `size`."""
        indices = share.indices if isinstance(share, Share) else share
        if len(indices) != self._count:
            self.rebuild(len(indices))
        tokens = sum(self.batches.tokens(step, index) for index in range(size))
        self._weight = 1.0 / tokens
        batches = [self.batches.microbatch(step, index) for index in indices]
        if self.shape.dropout:
            self.stage.dropout_seeds = [seed_of(self.seed, step, index) for index in indices]
        losses = (
            self._run_one_by_one(share, batches)
            if self._pipeline is None
            else (self._run_pipeline(self._pipeline, batches))
        )
        self._reduce()
        loss = self._clip(losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(logits, targets) * self._weight

    def _run_one_by_one(self, share: Iterable[int], batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Forward and backward; the losses. Iterating over a `Share` times each micro-batch."""
        losses: list[torch.Tensor] = []
        for _, (inputs, targets) in zip(share, batches, strict=True):
            logits = self.stage(inputs.to(self.device))
            loss = self._loss(logits, targets.to(self.device))
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            losses.append(loss.detach())
        return losses

    def _run_pipeline(self, pipeline: Schedule1F1B, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Forward and backward; the losses, at the last stage."""
        losses: list[torch.Tensor] = []
        first = [torch.cat([rows for rows, _ in batches]).to(self.device)]
        wanted: dict[str, Any] = {}
        if self.stage.is_last:
            targets = torch.cat([rows for _, rows in batches]).to(self.device)
            wanted = {"target": targets, "losses": losses}
        pipeline.step(*(first if self.stage.is_first else ()), return_outputs=False, **wanted)
        return [loss.detach() for loss in losses]

    def _gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self.parameters.values() if p.grad is not None]

    def _reduce(self) -> None:
        """Sum the gradients over the replicas."""
        if self.grid.layout.dp == 1:
            return
        gradients = self._gradients()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self.grid.groups[1])
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _clip(self, losses: Sequence[torch.Tensor]) -> float:
        """Scale the gradients down to a global norm of at most `clip`; the global loss."""
        layout = self.grid.layout
        total = torch.zeros(2 + len(_WISHES), dtype=torch.float64, device=self.device)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                continue
            holders = layout.dp * (1 if isinstance(parameter, DTensor) else layout.tp)
            total[0] += local(parameter.grad).double().square().sum() / holders
        for loss in losses:
            total[1] += loss.double() / layout.tp
        if self.wish:
            total[2 + _WISHES.index(self.wish)] = 1.0
        dist.all_reduce(total)
        sums = total.tolist()
        self.end = next((w for w, n in zip(_WISHES, sums[2:], strict=True) if n), "")
        norm = float(sums[0]) ** 0.5
        if self.clip and norm > self.clip:
            for gradient in self._gradients():
                gradient.mul_(self.clip / norm)
        return float(sums[1])
