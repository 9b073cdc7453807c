"""Real training jobs to be watched: `python job.py SCENARIO… --out FOLDER`.

In: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Out: FOLDER/rank<r>.json with what the script
itself saw of each scenario: {"ddp": {"losses": [...], "step_end_ns": [...], "start_ns": …,
"did": [[op, bytes, group size, peer], ...], "marks": {...}}}. Between two scenarios all process
groups are destroyed and made anew. Nothing here knows failslow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[int], torch.Tensor]
SCENARIOS: dict[str, Callable[[Job], None]]


class Job:
    """Settings of the run and the script's own record of it."""

    def __init__(self, iterations: int, work_ms: float) -> None:
        self.iterations = iterations
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.start_ns = time.monotonic_ns()
        self.losses: list[float] = []
        self.step_end_ns: list[int] = []
        self.did: list[tuple[str, int, int, int]] = []
        self.marks: dict[str, Any] = {}
        self._block = torch.randn(192, 192)
        self._repeats = 1
        self._calibrate(work_ms / 1e3)

    def _calibrate(self, seconds: float) -> None:
        if not seconds:
            self._repeats = 0
            return
        took = min(self._timed(20) for _ in range(5)) / 20
        self._repeats = max(1, round(seconds / took))
        shared = torch.tensor([self._repeats])
        dist.broadcast(shared, 0)
        self._repeats = int(shared)

    def note(self, op: str, size_bytes: int, group_size: int = 0, peer: int = -1) -> None:
        """The script just made this call."""
        self.did.append((op, size_bytes, group_size or self.world, peer))

    def _timed(self, repeats: int) -> float:
        start = time.thread_time()
        for _ in range(repeats):
            self._block @ self._block
        return time.thread_time() - start

    def work(self, share: float = 1.0) -> None:
        """Computation of the wanted length, the same on every rank."""
        for _ in range(round(self._repeats * share)):
            self._block @ self._block

    def run(self, step: Step, iterations: int | None = None) -> None:
        """Iterate and note each loss and when the iteration ended."""
        for _ in range(self.iterations if iterations is None else iterations):
            loss = step(len(self.losses))
            self.step_end_ns.append(time.monotonic_ns())
            self.losses.append(float(loss))


def model(width: int = 64, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


def batch(index: int, rank: int, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(16, width, generator=generator)


def data_parallel(job: Job, micro: int = 1, *, sync_each: bool = False) -> Step:
    """DDP; `micro` backward passes an iteration, gradients exchanged at the last or at each."""
    net = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def step(index: int) -> torch.Tensor:
        for part in range(micro):
            last = part == micro - 1
            with nullcontext() if last or sync_each else net.no_sync():
                job.work(1 / micro)
                loss: torch.Tensor = net(batch(index * micro + part, job.rank)).square().mean()
                torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded(job: Job, micro: int = 1) -> Step:
    """FSDP2; all-gathers in every micro-batch, reduce-scatters in the last only."""
    from torch.distributed.fsdp import fully_shard

    net: Any = model()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step(index: int) -> torch.Tensor:
        for part in range(micro):
            job.work(1 / micro)
            net.set_requires_gradient_sync(part == micro - 1)
            loss: torch.Tensor = net(batch(index * micro + part, job.rank)).square().mean()
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def evaluate(job: Job) -> None:
    """Four validation batches, one metric exchanged after each."""
    for _ in range(4):
        job.work(0.5)
        metric = torch.zeros(2)
        dist.all_reduce(metric)


def save(job: Job, folder: Path) -> None:
    """A checkpoint: everyone meets, shards are listed, rank 0 writes, everyone meets again."""
    dist.barrier()
    gathered: list[Any] = [None] * job.world
    dist.all_gather_object(gathered, {"rank": job.rank, "rows": [0] * 50})
    if job.rank == 0:
        torch.save({"x": torch.zeros(200_000)}, folder / "checkpoint.pt")
    dist.barrier()


def every(job: Job, period: int, act: Callable[[], None], step: Step) -> Step:
    """`step`, with `act` before each iteration whose index divides by `period`."""

    def with_act(index: int) -> torch.Tensor:
        if index and index % period == 0:
            act()
        return step(index)

    job.marks["every"] = period
    return with_act


def pipeline_tensor_data(job: Job, grid: tuple[int, int, int] = (2, 2, 2), micro: int = 4) -> Step:
    """1F1B pipelining of DTensor tensor-parallel stages, data parallel by hand, AdamW."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("pp", "dp", "tp"))
    stage_index = mesh.get_local_rank("pp")
    torch.manual_seed(11 + stage_index)
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))
    )
    if grid[2] > 1:
        for block in net:
            plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)

    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out - target).square().mean()

    schedule = None
    if grid[0] > 1:
        device, pipe = torch.device("cpu"), mesh.get_group("pp")
        stage = PipelineStage(net, stage_index, grid[0], device, group=pipe)
        schedule = Schedule1F1B(stage, micro, loss_fn=loss_fn, scale_grads=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    data_rank = mesh.get_local_rank("dp")

    def step(index: int) -> torch.Tensor:
        job.work()
        losses: list[torch.Tensor] = []
        x = batch(index, data_rank).repeat(micro, 1)
        if schedule is None:
            for part in x.chunk(micro):
                losses.append(loss_fn(net(part), part))
                torch.autograd.backward(losses[-1])
        elif stage_index == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        flat = torch.cat([g.reshape(-1) for g in local])
        dist.all_reduce(flat, group=mesh.get_group("dp"))
        for part, gradient in zip(
            torch.split(flat, [g.numel() for g in local]), local, strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.detach()

    return step


def experts(job: Job) -> Step:
    """A mixture of experts: token counts, and with them message sizes, differ every time."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        for _ in range(3):
            counts = torch.randint(1, 60, (job.world, job.world), generator=generator)
            sent, received = counts[job.rank].tolist(), counts[:, job.rank].tolist()
            for splits in ((sent, received), (received, sent)):
                out = torch.empty(sum(splits[1]), 64)
                dist.all_to_all_single(out, torch.randn(sum(splits[0]), 64), splits[1], splits[0])
                job.work(1 / 8)
        loss: torch.Tensor = net(batch(index, job.rank)).square().mean()
        torch.autograd.backward(loss)
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def scenario_ddp(job: Job) -> None:
    job.run(data_parallel(job))


def scenario_ddp_accumulate(job: Job) -> None:
    job.run(data_parallel(job, 4))


def scenario_ddp_sync_each(job: Job) -> None:
    job.run(data_parallel(job, 8, sync_each=True))


def scenario_fsdp(job: Job) -> None:
    job.run(sharded(job))


def scenario_fsdp_accumulate(job: Job) -> None:
    job.run(sharded(job, 8))


def scenario_hybrid(job: Job) -> None:
    grid = {8: (2, 2, 2), 4: (2, 1, 2)}[job.world]
    job.run(pipeline_tensor_data(job, grid))


def scenario_evaluation(job: Job) -> None:
    job.run(every(job, 10, lambda: evaluate(job), data_parallel(job)))


def scenario_checkpoint(job: Job) -> None:
    job.run(every(job, 15, lambda: save(job, Path(os.environ["JOB_OUT"])), sharded(job)))


def scenario_experts(job: Job) -> None:
    job.run(experts(job))


def scenario_change(job: Job) -> None:
    """The programme changes for good: half of the run accumulates, the other half does not."""
    job.run(data_parallel(job, 4, sync_each=True), job.iterations // 2)
    job.marks["changed_at"] = job.iterations // 2
    job.run(sharded(job), job.iterations - job.iterations // 2)


def scenario_tour(job: Job) -> None:
    """Every collective, groups, failures, forked workers: see tour.py."""
    from tour import tour

    tour(job)


def scenario_profiled(job: Job) -> None:
    """Waits for the file `go`; then rank 1 comes 0.3 s late to a collective nobody waits for."""
    dist.all_reduce(torch.ones(1))
    while not (Path(os.environ["JOB_OUT"]) / "go").exists():
        time.sleep(0.01)
    dist.barrier()
    net = DistributedDataParallel(nn.Linear(16, 1))
    loss: torch.Tensor = net(torch.ones(1, 16)).sum()
    if job.rank:
        time.sleep(0.3)
    torch.autograd.backward(loss)
    dist.barrier()


def scenario_tensor_parallel(job: Job) -> None:
    """DTensor tensor parallel alone: functional collectives, started by C++."""
    job.run(pipeline_tensor_data(job, (1, 1, job.world), micro=1))


def scenario_pipeline(job: Job) -> None:
    """1F1B alone: sends and receives."""
    job.run(pipeline_tensor_data(job, (job.world, 1, 1)))


def scenario_compiled(job: Job) -> None:
    """A compiled model, a collective inside a full graph, and a compiled optimizer step."""
    from torch.distributed import _functional_collectives as functional

    net, world = model(), list(range(job.world))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    compiled: Any = torch.compile(net, backend="aot_eager")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def average(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = functional.all_reduce(x, "sum", world)
        return total / job.world

    def update() -> None:
        optimizer.step()

    compiled_update = torch.compile(update, backend="aot_eager")

    def step(index: int) -> torch.Tensor:
        loss: torch.Tensor = compiled(batch(index, job.rank)).square().mean()
        torch.autograd.backward(loss)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad = average(parameter.grad).detach()
        (compiled_update if index % 2 else update)()
        optimizer.zero_grad()
        return loss.detach()

    job.run(step)


SCENARIOS = {
    name.removeprefix("scenario_"): act
    for name, act in list(globals().items())
    if name.startswith("scenario_")
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", choices=sorted(SCENARIOS), nargs="+")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--work-ms", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    os.environ["JOB_OUT"] = str(options.out)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world, rank == 0)
    report = {}
    for number, scenario in enumerate(options.scenarios):
        own = PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
        job = Job(options.iterations, options.work_ms)
        SCENARIOS[scenario](job)
        report[scenario] = {
            "losses": job.losses,
            "start_ns": job.start_ns,
            "step_end_ns": job.step_end_ns,
            "end_ns": time.monotonic_ns(),
            "did": job.did,
            "marks": job.marks,
        }
        dist.barrier()
        time.sleep(0.3)  # gloo aborts when a peer closes first: all leave together
        if scenario != options.scenarios[-1]:
            dist.destroy_process_group()
    (options.out / f"rank{rank}.json").write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main()
