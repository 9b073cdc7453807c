"""One worker's part of the training: its stage, its optimizer, one optimizer step at a time.

In: the options, a grid, and for each step the micro-batches this replica runs. Out: the global
batch's mean loss per token, the same on every worker. Gradients are summed over replicas by one
all-reduce, and clipped by their global norm, for which every step has one all-reduce over all
workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from data import Batches, seed_of
from layout import Grid
from model import Shape, Stage, token_loss

__all__ = ["Trainer", "local"]


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
        self.grid, self.shape, self.batches, self.device = grid, shape, batches, device
        self.clip, self.seed = clip, seed
        self.stage = Stage(shape, grid.stage, grid.layout.pp, seed).to(device)
        if grid.layout.tp > 1:
            self.stage.split(grid.tensor_mesh)
        self.parameters: dict[str, nn.Parameter] = dict(self.stage.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=learning_rate, weight_decay=0.01, foreach=False
        )
        self._weight = 0.0
        self._pipeline: Schedule1F1B | None = None
        self._count = 0

    def rebuild(self, count: int) -> None:
        """From now on this replica runs `count` micro-batches a step; at least one a stage."""
        self._count = count
        if self.grid.layout.pp == 1:
            return
        stage = PipelineStage(
            self.stage,
            self.grid.stage,
            self.grid.layout.pp,
            self.device,
            group=self.grid.groups[0],
        )
        # scale_grads would divide by this replica's own count, which others do not have
        self._pipeline = Schedule1F1B(stage, count, loss_fn=self._loss, scale_grads=False)

    def step(self, step: int, indices: Sequence[int]) -> float:
        """Train on the micro-batches `indices` of that step's global batch."""
        if len(indices) != self._count:
            self.rebuild(len(indices))
        size = self.batches.size(step)
        tokens = sum(self.batches.tokens(step, index) for index in range(size))
        self._weight = 1.0 / tokens
        batches = [self.batches.microbatch(step, index) for index in indices]
        if self.shape.dropout:
            self.stage.dropout_seeds = [
                seed_of(self.seed, step, index, self.grid.stage) for index in indices
            ]
        losses = self._run(batches)
        self._reduce()
        loss = self._clip(losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(logits, targets) * self._weight

    def _run(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Forward and backward; the losses, at the last stage."""
        losses: list[torch.Tensor] = []
        if self._pipeline is None:
            for inputs, targets in batches:
                logits = self.stage(inputs.to(self.device))
                loss = self._loss(logits, targets.to(self.device))
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                losses.append(loss.detach())
            return losses
        first = [torch.cat([rows for rows, _ in batches]).to(self.device)]
        wanted: dict[str, Any] = {}
        if self.stage.is_last:
            targets = torch.cat([rows for _, rows in batches]).to(self.device)
            wanted = {"target": targets, "losses": losses}
        self._pipeline.step(*(first if self.stage.is_first else ()), return_outputs=False, **wanted)
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
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                continue
            holders = layout.dp * (1 if isinstance(parameter, DTensor) else layout.tp)
            total[0] += local(parameter.grad).double().square().sum() / holders
        for loss in losses:
            total[1] += loss.double() / layout.tp
        dist.all_reduce(total)
        norm = float(total[0]) ** 0.5
        if self.clip and norm > self.clip:
            for gradient in self._gradients():
                gradient.mul_(self.clip / norm)
        return float(total[1])
