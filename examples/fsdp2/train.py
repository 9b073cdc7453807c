"""Hybrid sharding (FSDP2): replicas of shards, steered by failslow.

    FAILSLOW=1 torchrun --nproc-per-node 4 examples/fsdp2/train.py --replicas 2

The workers of a replica share its parameters and run the same micro-batches; replicas may run
unequal numbers of them. With --replicas 1 all workers share one model: then failslow refuses to
redistribute, and says why.

In: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Out: the loss of every twentieth step, from rank 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import failslow


def microbatch(step: int, index: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Made up, and the same on whichever replica runs it."""
    draw = torch.Generator().manual_seed(1000 * step + index)
    rows = torch.randn(16, 64, generator=draw)
    return rows.to(device), rows.roll(1, dims=1).tanh().to(device)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batches", type=int, default=32, help="of a step, over all workers")
    parser.add_argument("--replicas", type=int, default=2)
    chosen = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(7)
    shape = (chosen.replicas, dist.get_world_size() // chosen.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    coordinator = failslow.Coordinator(chosen.micro_batches, mesh=mesh, model=model)
    for step in range(chosen.steps):
        with coordinator.step(step) as share:
            mean = torch.zeros((), device=device)
            for index in share:
                rows, wanted = microbatch(step, index, device)
                loss = (model(rows) - wanted).square().mean()
                (loss * share.weight).backward()
                mean += loss.detach() / share.size / shape[1]
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:5d}  loss {float(mean):.4f}  {coordinator.counts}", flush=True)
    # gloo aborts where a peer closes first: all leave together, past the interpreter's own exit
    dist.barrier()
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
