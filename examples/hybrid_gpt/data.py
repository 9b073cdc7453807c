"""Bytes of real text, cut into global batches that do not depend on how many workers there are.

In: a seed, a step and the index of a micro-batch within the step's global batch. Out: two tensors
of shape (sequences, length), int64: the bytes and those that follow them.

    batches.microbatch(step=7, index=3)   # the same on whichever replica runs it
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["IGNORED", "Batches", "seed_of"]

IGNORED = -100
"""Target of a position that does not count (torch's `ignore_index`)."""
_CORPUS_BYTES = 2_000_000


def seed_of(*parts: int) -> int:
    """One seed for torch out of several numbers, different for different numbers."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 0x9E3779B9) % (2**63 - 1)
    return seed


def read_corpus(limit_bytes: int = _CORPUS_BYTES) -> torch.Tensor:
    """The Python standard library's own sources, in order of their names; shape (bytes,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).long()


@dataclass(frozen=True)
class Batches:
    """The global batches of a run."""

    corpus: torch.Tensor
    sequences: int
    """Of a micro-batch."""
    length: int
    """Bytes of a sequence."""
    microbatches: int
    """Of a global batch."""
    seed: int
    ragged: bool = False
    """Micro-batches differ in the number of targets that count."""
    epoch_steps: int = 0
    """The last global batch of so many is only partly full; 0: none is."""

    def size(self, step: int) -> int:
        """Micro-batches of that step's global batch."""
        last = self.epoch_steps and step % self.epoch_steps == self.epoch_steps - 1
        return max(1, 5 * self.microbatches // 8) if last else self.microbatches

    def microbatch(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of one micro-batch, shape (sequences, length) each."""
        draw = torch.Generator().manual_seed(seed_of(self.seed, step, index))
        room = len(self.corpus) - self.length - 1
        starts = torch.randint(room, (self.sequences,), generator=draw)
        rows = torch.stack([self.corpus[i : i + self.length + 1] for i in starts.tolist()])
        inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        targets[:, self._kept(step, index) :] = IGNORED
        return inputs, targets

    def tokens(self, step: int, index: int) -> int:
        """Targets of one micro-batch that count."""
        return self.sequences * self._kept(step, index)

    def _kept(self, step: int, index: int) -> int:
        """Positions of each sequence whose targets count."""
        if not self.ragged:
            return self.length
        return self.length // 4 + seed_of(self.seed, step, index, 1) % (3 * self.length // 4 + 1)
