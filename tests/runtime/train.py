"""A small DDP job to be watched; nothing in it knows failslow.

In: RANK and its kin, TRAIN_FOLDER, TRAIN_WORK_MS, TRAIN_ITERATIONS (else on and on). Out:
TRAIN_FOLDER/rank<r>.json with when each iteration ended (epoch seconds) and losses<r>.json with
the losses, bit for bit, at the end: once a file `stop` is there; rank 0 decides that for all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PIECE_S = 0.001
"""Short against the 20 ms in which signals stop and continue a worker: a sleep goes on while its
process is stopped, and one as long as the stop is hurt or spared by the luck of the phase."""


def main() -> None:
    """Train until told to stop."""
    folder, rank = Path(os.environ["TRAIN_FOLDER"]), int(os.environ["RANK"])
    pieces = round(float(os.environ["TRAIN_WORK_MS"]) / 1e3 / _PIECE_S)
    limit = int(os.environ.get("TRAIN_ITERATIONS", sys.maxsize))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    ends: list[float] = []
    losses: list[str] = []
    going = torch.ones(1)
    while bool(going):
        going = torch.tensor([float(len(ends) + 1 < limit and not (folder / "stop").exists())])
        dist.broadcast(going, 0)
        optimizer.zero_grad()
        for _ in range(pieces):  # so that stopping and continuing the process slows it
            time.sleep(_PIECE_S)
        x = torch.randn(4, 64, generator=generator)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        ends.append(time.time())
        losses.append(loss.item().hex())
    (folder / f"rank{rank}.json").write_text(json.dumps(ends))
    (folder / f"losses{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    time.sleep(0.2)
    os._exit(0)  # gloo may abort an ordinary exit


if __name__ == "__main__":
    main()
