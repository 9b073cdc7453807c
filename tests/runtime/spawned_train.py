"""A job that nobody gives ranks before torch is imported: `python spawned_train.py`.

In: MASTER_PORT, TRAIN_FOLDER. The workers are made by `mp.spawn`, number themselves and train until
that folder has a file `stop`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, folder: Path) -> None:
    """One worker."""
    os.environ["RANK"] = str(rank)  # as many scripts do, and too late for the import of torch
    os.environ["WORLD_SIZE"] = "2"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    stop = torch.zeros(1)
    while not stop.item():
        weight.grad = torch.ones(8)
        dist.all_reduce(weight.grad)
        optimizer.step()
        stop[0] = (folder / "stop").exists()
        dist.all_reduce(stop)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(Path(os.environ["TRAIN_FOLDER"]),), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]  # torch's
