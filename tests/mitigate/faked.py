"""A job of several workers of which only this one is there: what it sends goes nowhere.

with faked_world(4):
    coordinator = failslow.Coordinator(16)    # rank 0 of four; nothing watches it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["faked_world"]


@contextmanager
def faked_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
