"""Why replicas of a model must run equal numbers of micro-batches.

In: the model, the mesh, and the replica each rank belongs to. Out: a reason, or "":

    "FSDP shard axis: parameter layers.0.weight is sharded over replicas 0 and 1"

Whatever exchanges something between replicas in every micro-batch waits for ever where one replica
runs more of them than another: gathering FSDP's shards, batch statistics, tokens of experts, and
what DDP's `join()` tells.
Gradients are no such thing where `share.exchange_switch` has them exchanged once a step: DDP's and
FSDP2's, and not those of FSDP1 (FullyShardedDataParallel). Tensor shards and FSDP shards within one
replica (hybrid sharding) are none either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["why_equal"]

_EXPERT_AXES = ("ep", "expert", "experts", "expert_parallel")
_EXPERT_GROUPS = ("ep_group", "expert_parallel_group", "expert_group")


def why_equal(
    replica_of: Sequence[int],
    *,
    model: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    groups: Mapping[str, dist.ProcessGroup] | None = None,
) -> str:
    """The first reason found on this worker; "" none.

    replica_of: of each rank. groups: what else communicates in every micro-batch, by its name.
    """
    for what, ranks in _exchanges(model, mesh, groups or {}):
        replicas = sorted({replica_of[rank] for rank in ranks})
        if len(replicas) > 1:
            which = (
                f"{replicas[0]} and {replicas[1]}"
                if len(replicas) == 2
                else (f"{replicas[0]} to {replicas[-1]}")
            )
            return f"{what} over replicas {which}"
    return ""


def _exchanges(
    model: nn.Module | None, mesh: DeviceMesh | None, groups: Mapping[str, dist.ProcessGroup]
) -> Iterator[tuple[str, Sequence[int]]]:
    """(what is exchanged in every micro-batch, between which ranks)."""
    for name, group in groups.items():
        yield f"{name}: communicates", dist.get_process_group_ranks(group)
    for dimension, name in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
        if name.rstrip("0123456789_") in _EXPERT_AXES:
            assert mesh is not None
            ranks = dist.get_process_group_ranks(mesh.get_group(dimension))
            yield f"expert parallel: mesh axis {name} exchanges tokens", ranks
    for path, module in model.named_modules() if model is not None else ():
        yield from _exchanges_of(path or "the model", module)
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if isinstance(parameter, DTensor):
                yield from _shards(name, parameter)


def _exchanges_of(path: str, module: nn.Module) -> Iterator[tuple[str, Sequence[int]]]:
    if isinstance(module, nn.SyncBatchNorm):
        # None is the default group: everybody
        ranks = dist.get_process_group_ranks(module.process_group)
        yield f"SyncBatchNorm: {path} averages", ranks
    if isinstance(module, DistributedDataParallel) and module._join_config.enable:
        ranks = dist.get_process_group_ranks(module.process_group)
        yield f"join(): {path} tells that it goes on", ranks
    if isinstance(module, FullyShardedDataParallel):
        shards = module.sharding_strategy is not ShardingStrategy.NO_SHARD
        # FSDP1 averages gradients in every backward pass, and nothing here turns that off
        averages = f"FSDP1 gradients: {path} averages them in every micro-batch"
        if module.process_group is not None:
            ranks = dist.get_process_group_ranks(module.process_group)
            yield f"FSDP shard axis: {path} is sharded" if shards else averages, ranks
        between: Any = getattr(module, "_inter_node_pg", None)  # of hybrid sharding
        if isinstance(between, dist.ProcessGroup):
            yield averages, dist.get_process_group_ranks(between)
    meta: Any = getattr(module, "fp8_meta", None)  # Transformer Engine's, once it has run
    if isinstance(meta, dict) and getattr(meta.get("recipe"), "reduce_amax", False):
        group: Any = meta.get("fp8_group")
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            yield f"FP8's delayed scaling: {path} compares maxima", ranks
    for attribute in _EXPERT_GROUPS:
        group = getattr(module, attribute, None)
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            yield f"expert parallel: {path} exchanges tokens", ranks


def _shards(name: str, parameter: DTensor) -> Iterator[tuple[str, Sequence[int]]]:
    mesh = parameter.device_mesh
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        axis = (mesh.mesh_dim_names or ())[dimension : dimension + 1]
        if axis and axis[0].rstrip("0123456789_") in _EXPERT_AXES:
            what = "expert parallel"
        else:
            what = "FSDP shard axis"
        ranks = dist.get_process_group_ranks(mesh.get_group(dimension))
        yield f"{what}: parameter {name} is sharded", ranks
