"""Small real training jobs of several layouts, whose computation is sleep: `profile_job.py LAYOUT`.

In: RANK and its kin, TRAIN_FOLDER, TRAIN_WORK_MS (computation of one iteration of a stage). Out:
nothing; it trains until a file `stop` is in TRAIN_FOLDER. Nothing here knows failslow.

    dp      DDP, several gradient buckets          fsdp    FSDP2
    pp-dp   2 stages (1F1B) x replicas             tp-dp   pairs of tensor shards x replicas
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

_PIECE_S = 0.001
"""Short against the 20 ms in which signals stop and continue a worker."""
_WIDTH = 64
_MICRO = 4

Step = Callable[[], None]


def _work(seconds: float) -> None:
    for _ in range(round(seconds / _PIECE_S)):
        time.sleep(_PIECE_S)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        _work(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        _work(2 * ctx.seconds)
        return grads[0], None


class _Block(nn.Module):
    """Takes `seconds` forward and twice that backward."""

    def __init__(self, seconds: float, width: int = _WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = _Sleep.apply(self.linear(x), self._seconds)  # type: ignore[no-untyped-call]  # torch's
        return done


def _blocks(count: int, seconds: float, width: int = _WIDTH) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(_Block(seconds / 3 / count, width) for _ in range(count)))


def _data_parallel(work_s: float) -> Step:
    width = int(os.environ.get("TRAIN_WIDTH", "256"))
    net = DistributedDataParallel(_blocks(4, work_s, width), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(4, width)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def _sharded(work_s: float) -> Step:
    from torch.distributed.fsdp import fully_shard

    net: Any = _blocks(4, work_s)
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> None:
        loss: torch.Tensor = net(torch.ones(4, _WIDTH)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _pipeline(work_s: float) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    index = mesh.get_local_rank("pp")
    width = int(os.environ.get("TRAIN_WIDTH", str(_WIDTH)))
    net = _blocks(2, work_s / _MICRO, width)
    stage = PipelineStage(net, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(
        stage, _MICRO, loss_fn=lambda out, target: (out - target).square().mean()
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.ones(int(os.environ.get("TRAIN_ROWS", "4")) * _MICRO, width)

    def step() -> None:
        if index:
            schedule.step(target=x, losses=[])
        else:
            schedule.step(x)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tensor_parallel(work_s: float) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    shards, replicas = mesh.get_group("tp"), mesh.get_group("dp")
    net = _blocks(4, work_s)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        x = torch.ones(4, _WIDTH)
        for block in net:
            x = block(x)
            with torch.no_grad():
                dist.all_reduce(x.detach(), group=shards)
        torch.autograd.backward(x.square().mean())
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, group=replicas)
        optimizer.step()
        optimizer.zero_grad()

    return step


_LAYOUTS: dict[str, Callable[[float], Step]] = {
    "dp": _data_parallel,
    "fsdp": _sharded,
    "pp-dp": _pipeline,
    "tp-dp": _tensor_parallel,
}


def main(layout: str) -> None:
    """Train until told to stop; rank 0 decides that for all."""
    folder = Path(os.environ["TRAIN_FOLDER"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    step = _LAYOUTS[layout](float(os.environ["TRAIN_WORK_MS"]) / 1e3)
    going = torch.ones(1)
    while bool(going):
        step()
        going = torch.tensor([float(not (folder / "stop").exists())])
        dist.broadcast(going, 0)
    dist.barrier()
    time.sleep(0.2)
    os._exit(0)  # gloo may abort an ordinary exit


if __name__ == "__main__":
    main(sys.argv[1])
