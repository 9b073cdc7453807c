"""A small byte-level GPT, whole or cut into pipeline stages.

In: bytes, shape (sequences, length), at the first stage; activations (sequences, length, width) at
the others. Out: activations, or at the last stage logits (sequences, length, 256). A parameter's
first value depends on its name and the seed only, so that every layout starts alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from data import IGNORED, seed_of

__all__ = ["BYTES", "Block", "Shape", "Stage", "token_loss"]

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the whole model."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    length: int = 64
    """Bytes of a sequence."""
    dropout: float = 0.0


class Block(nn.Module):
    """Attention and a feed-forward net; its heads and hidden units can be split over workers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_width, self.dropout = width // shape.heads, shape.dropout
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, _ = x.shape
        y = self.attention_norm(x)
        # -1 heads: as many as this worker holds
        query, key, value = (
            linear(y).view(sequences, length, -1, self.head_width).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(sequences, length, -1))
        x = x + functional.dropout(y, self.dropout, self.training)
        y = self.down(functional.gelu(self.up(self.forward_norm(x))))
        return x + functional.dropout(y, self.dropout, self.training)

    def split(self, mesh: DeviceMesh) -> None:
        """Tensor parallelism over `mesh`; all its workers hold the same full weights before."""
        wide, narrow = ("query", "key", "value", "up"), ("out", "down")
        plan = {
            **{name: ColwiseParallel() for name in wide},
            **{name: RowwiseParallel() for name in narrow},
        }
        parallelize_module(self, mesh, plan, src_data_rank=None)


class Stage(nn.Module):
    """Layers `index / stages` of the model, with the embeddings or the head at the ends."""

    def __init__(self, shape: Shape, index: int, stages: int, seed: int) -> None:
        super().__init__()
        first, last = shape.layers * index // stages, shape.layers * (index + 1) // stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(first, last)})
        if self.is_first:
            self.token = nn.Embedding(BYTES, shape.width)
            self.position = nn.Embedding(shape.length, shape.width)
        if self.is_last:
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.work: Callable[[], None] = lambda: None
        """Called once a micro-batch: compute that is there to take time."""
        self.dropout_seeds: list[int] = []
        """One for each coming micro-batch: chance follows it and the layer, not the worker."""
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                    continue
                draw = torch.Generator().manual_seed(seed_of(seed, zlib.crc32(name.encode())))
                parameter.normal_(0.0, 0.05, generator=draw)

    def split(self, mesh: DeviceMesh) -> None:
        """Tensor parallelism over `mesh`."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            block.split(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seed = self.dropout_seeds.pop(0) if self.dropout_seeds else None
        self.work()
        if self.is_first:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for number, layer in self.layers.items():
            if seed is not None:
                torch.manual_seed(seed_of(seed, int(number)))
            x = layer(x)
        if self.is_last:
            x = self.head(self.norm(x))
        return x


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over the targets that count."""
    flat = logits.reshape(-1, BYTES)
    return functional.cross_entropy(
        flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
