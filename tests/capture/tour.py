"""Every collective once, by hand, and what the script knows of each call it made.

In: a `Job` of job.py with at least two ranks. Out: its `did` list, call by call: the message
size is that of the whole message (all-gather: output, reduce-scatter: input), peers are ranks of
the group. `SETUP` marks calls that torch makes on its own, whose number is not promised.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FLOATS = 6


def collectives(job: Any) -> None:
    """Each operator of the dispatcher, blocking and not."""
    world, rank = job.world, job.rank
    size = 4 * FLOATS

    def ones(count: int = FLOATS) -> torch.Tensor:
        return torch.ones(count)

    def many(count: int = FLOATS) -> list[torch.Tensor]:
        return [torch.ones(count) for _ in range(world)]

    dist.all_reduce(ones())
    job.note("allreduce_", size)
    work = dist.all_reduce(ones(), async_op=True)
    job.note("allreduce_", size)
    work.wait()
    dist.all_reduce_coalesced([ones(), ones(2)])
    job.note("allreduce_coalesced_", size + 8)
    dist.all_gather(many(), ones())
    job.note("allgather_", size * world)
    dist.all_gather_into_tensor(ones(FLOATS * world), ones())
    job.note("_allgather_base_", size * world)
    dist.all_gather_coalesced([[ones(), ones(2)] for _ in range(world)], [ones(), ones(2)])
    job.note("allgather_coalesced_", (size + 8) * world)
    group: Any = dist.group.WORLD
    group.allgather_into_tensor_coalesced([ones(FLOATS * world)], [ones()]).wait()
    job.note("allgather_into_tensor_coalesced_", size * world)
    dist.reduce_scatter(ones(), many())
    job.note("reduce_scatter_", size * world)
    dist.reduce_scatter_tensor(ones(), ones(FLOATS * world))
    job.note("_reduce_scatter_base_", size * world)
    group.reduce_scatter_tensor_coalesced([ones()], [ones(FLOATS * world)]).wait()
    job.note("reduce_scatter_tensor_coalesced_", size * world)
    dist.broadcast(ones(), 1)
    job.note("broadcast_", size, peer=1)
    dist.reduce(ones(), 1)
    job.note("reduce_", size, peer=1)
    dist.gather(ones(), many() if rank == 0 else None, dst=0)
    job.note("gather_", size * world, peer=0)
    dist.scatter(ones(), many() if rank == 1 else None, src=1)
    job.note("scatter_", size * world, peer=1)
    dist.all_to_all_single(ones(FLOATS * world), ones(FLOATS * world))
    job.note("alltoall_base_", size * world)
    dist.barrier()
    job.note("barrier", 0)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    job.note("monitored_barrier_", 0)
    half = torch.ones(FLOATS, dtype=torch.bfloat16)
    dist.all_reduce(half)
    job.note("allreduce_", size // 2)


def point_to_point(job: Any) -> None:
    """send, recv, recv from anyone, and a batch, between ranks 0 and 1."""
    if job.rank > 1:
        return
    other, tensor = 1 - job.rank, torch.ones(FLOATS)
    size = 4 * FLOATS
    if job.rank == 0:
        dist.send(tensor, other)
        job.note("send", size, peer=other)
        dist.recv(tensor)
        job.note("recv_any_source_", size)
    else:
        dist.recv(tensor, other)
        job.note("recv_", size, peer=other)
        dist.send(tensor, other)
        job.note("send", size, peer=other)
    requests = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, tensor * 2, other)]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    job.note("send", size, peer=other)
    job.note("recv_", size, peer=other)


def groups(job: Any) -> None:
    """Subgroups in an order of their own, a device mesh, and a group that is destroyed."""
    alone = dist.new_group([job.rank], use_local_synchronization=True, group_desc="alone")
    backwards = dist.new_group([1, 0], sort_ranks=False, group_desc="backwards")
    for _ in range(3):
        dist.all_reduce(torch.ones(3), group=alone)
        job.note("allreduce_", 12, 1)
    if job.rank < 2:
        dist.broadcast(torch.ones(5), 1, group=backwards)
        job.note("broadcast_", 20, 2, peer=0)  # rank 1 is the first of the group
        dist.destroy_process_group(backwards)
    mesh = init_device_mesh("cpu", (job.world, 1), mesh_dim_names=("rows", "columns"))
    dist.all_reduce(torch.ones(7), group=mesh.get_group("columns"))
    job.note("allreduce_", 28, 1)
    job.marks["groups"] = [
        ["alone", [job.rank]],
        ["backwards", [1, 0]],
        ["mesh_columns", [job.rank]],
    ]


def failures(job: Any) -> None:
    """Collectives that raise, when called or when waited for: torch's own exception comes out."""
    caught = []
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=0.2), group_desc="hasty")
    group: Any = dist.group.WORLD
    try:
        group.allreduce([torch.ones(2), torch.ones(3)])
    except RuntimeError as error:
        caught.append([type(error).__name__, str(error)[:80]])
    dist.all_to_all([torch.ones(1)] * job.world, [torch.ones(1)] * job.world)
    job.note("alltoall_", 4 * job.world)
    if job.rank == 0:
        try:
            dist.all_reduce(torch.ones(13), group=hasty)  # rank 1 never comes
        except RuntimeError as error:
            caught.append([type(error).__name__, str(error)[:80]])
        job.note("allreduce_", 52, 2)
    job.marks["caught"] = caught


def loaders(job: Any) -> None:
    """Data-loader workers made by fork, which use a group the trainer uses too."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

    fake = dist.new_group([job.rank], backend="fake", use_local_synchronization=True)
    dist.all_reduce(torch.ones(9), group=fake)
    job.note("allreduce_", 36, 1)

    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            dist.all_reduce(torch.ones(11), group=fake)  # 44 bytes: must not be recorded
            return torch.tensor([index, os.getpid()])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process with threads
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        seen = torch.cat(list(loader))
    job.marks["loaded"] = sorted(seen[:, 0].tolist())
    job.marks["worker_pids"] = sorted(set(seen[:, 1].tolist()))
    job.marks["pid"] = os.getpid()


def tour(job: Any) -> None:
    """All of it, in this order."""
    collectives(job)
    point_to_point(job)
    groups(job)
    loaders(job)
    failures(job)
