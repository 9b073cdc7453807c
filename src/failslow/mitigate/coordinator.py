"""What a training loop needs to be steered: its micro-batches, their weight, a few callbacks.

In: the grid, the size of the global batch, callbacks. Out: each step's share of the global batch;
plans are carried out between two steps, on all workers at the same one:

    coordinator = failslow.Coordinator(microbatches=32, model=model)
    for step in range(steps):
        with coordinator.step(step) as share:
            for index in share:
                (loss_fn(model(batch(step, index))) * share.weight).backward()
            optimizer.step()

In a job that failslow does not watch (FAILSLOW=1 is not set) it communicates nothing and every
replica has its even share. Else rank 0 reads the controller's orders from its node's agent.

The contract (arXiv 2410.12588, §5): the global batch and its order never change and gradients are
weighted by what they stand for, so training goes as with the even split, up to rounding.
"""

from __future__ import annotations

import socket
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from failslow.capture import hook
from failslow.errors import PlanError
from failslow.mitigate.batches import Split, even
from failslow.mitigate.grid import Place, place_in
from failslow.mitigate.share import Share, Witness, exchange_switch
from failslow.mitigate.steer import Steering
from failslow.mitigate.steer_apply import Hands, Placing
from failslow.mitigate.steer_group import why_alone, why_no_gloo
from failslow.records import JobFacts
from failslow.saying import say
from failslow.trainer import whole

__all__ = ["Coordinator"]

_TAKEN_FIRST = (
    "gradients are exchanged in every micro-batch: the loop takes all of a share before it runs "
    "any; run each one while iterating over the share"
)

_LOST = (
    "gradients are exchanged in every micro-batch: the model that the Coordinator was given is "
    "gone; call coordinator.use(model) with the new one in `move`"
)


class Coordinator:
    """Made once by every worker of the job, all together, after the process group and the model.

    microbatches: of the global batch, over all replicas.
    grid, place: (pp, dp, tp) and this worker's coordinates in it; or mesh, whose dimensions are
    named pp, dp (replicate), tp (shard); the world is one data-parallel axis if left out.
    model: with it DDP's and FSDP2's exchange of gradients happens in the last micro-batch only, and
    what forbids unequal counts is found.
    gradients: "mean" where they are averaged over replicas (DDP, FSDP), "sum" where they are added.
    least, most: micro-batches a replica can run; least is the number of stages if left out, as 1F1B
    needs.
    rebuild: called with the number of micro-batches whenever it changes (a pipeline's schedule),
    before the first step too.
    state, move: for changes of place: this worker's state as a tree of tensors and plain values;
    move(placement, state) makes this worker the one at the position where `placement` has its rank,
    with that position's state, its groups and mesh made anew. The global random generators (torch,
    its CUDA device, numpy, Python) go along by themselves; others belong in the state.
    checkpoint: called with the index of the step that comes next; saves so that the job can be
    started again with it.
    exchanges: {"name": group} of what else communicates in every micro-batch.
    listen_s: how often orders are looked for; rank 0's counts. 0: before every step.
    limit_s: how long workers wait for each other between two steps before they give orders up.

    Raises PlanError for a grid or a batch that does not fit, on all workers alike.
    """

    def __init__(
        self,
        microbatches: int,
        *,
        grid: tuple[int, int, int] | None = None,
        place: tuple[int, int, int] | None = None,
        mesh: DeviceMesh | None = None,
        model: nn.Module | None = None,
        gradients: Literal["mean", "sum"] = "mean",
        least: int | None = None,
        most: int | None = None,
        rebuild: Callable[[int], None] | None = None,
        state: Callable[[], Any] | None = None,
        move: Placing | None = None,
        checkpoint: Callable[[int], None] | None = None,
        exchanges: Mapping[str, dist.ProcessGroup] | None = None,
        listen_s: float = 0.25,
        limit_s: float = 1800.0,
    ) -> None:
        here = _here(grid, place, mesh)
        stages, replicas, _ = here.grid
        self._hands = Hands(
            even(microbatches, replicas, stages if least is None else least),
            here,
            most=most,
            rebuild=rebuild,
            state=state,
            move=move,
            checkpoint=checkpoint,
            limit_s=limit_s,
        )
        self._replicas = replicas
        self._scale = float(replicas) if gradients == "mean" else 1.0
        self._switch: Callable[[bool], None] | None = None
        self._models: list[weakref.ref[nn.Module]] = []
        """The one in use; to be looked at, not to be kept."""
        self.use(model)
        self._share: Share | None = None
        self._said = False
        self._steering: Steering | None = None
        from failslow.mitigate.steer_refuse import why_equal

        def reason(replica_of: list[int]) -> str:
            return why_equal(replica_of, model=model, mesh=mesh, groups=exchanges)

        models = self._models

        def reason_now(replica_of: list[int]) -> str:
            if self._taken_first:
                return _TAKEN_FIRST
            if self._lost:
                return _LOST
            # groups and axes of the mesh belong to positions: what was found of them stays true
            return why_equal(replica_of, model=models[0]() if models else None)

        self._hands.why_equal = reason_now
        self._placed = place is None
        """Where the others are is known."""
        if grid is None and mesh is not None:
            self._hands.placement = tuple(mesh.mesh.flatten().tolist())
        if not _watched():
            with suppress(Exception):
                self._hands.no_redistribution = reason(self._hands.replica_of())
            return
        try:
            _check_gloo()
            self._steering = Steering(
                self._hands, why_equal=reason, listen_s=listen_s, limit_s=limit_s
            )
            self._placed = True
        except PlanError:
            raise
        except Exception as error:  # no way to hear orders together is no reason not to train
            why = str(error).splitlines()[0] if str(error) else repr(error)
            say(
                f"rank {dist.get_rank()} takes no orders, as the workers have no way of their own "
                f"to agree on one ({why}); training goes on with even shares"
            )

    def use(self, model: nn.Module | None) -> None:
        """The model is another one from now on: to be said in `move` where it wraps DDP or FSDP.

        What forbids unequal counts is looked for in it before they become unequal the next time;
        outside of `move`, call it while they are equal.
        """
        self._switch = exchange_switch(model)
        self._witness = None if model is None else Witness(model)
        self._may_differ = self._taken_first = False
        self._models[:] = [] if model is None else [weakref.ref(model)]

    @property
    def _lost(self) -> bool:
        """Its exchange of gradients was to be turned on and off, and there is another in its place
        that nobody told of."""
        return self._switch is not None and self._models[0]() is None

    @property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches of each replica, as they are split now."""
        return self._hands.split.counts

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank at each position, row-major over (pp, dp, tp)."""
        return self._hands.placement

    @property
    def facts(self) -> JobFacts | None:
        """What the controller is told of the job; None where none watches, or none is heard."""
        return self._steering.facts if self._steering is not None else None

    @property
    def stop(self) -> bool:
        """The job was saved to be restarted elsewhere: leave the loop."""
        return self._hands.stop

    def step(self, index: int, microbatches: int | None = None) -> _Step:
        """`with coordinator.step(index) as share:` around one step, its optimizer step included."""
        return _Step(self, index, microbatches)

    def begin(self, index: int, microbatches: int | None = None) -> Share:
        """Before step `index`, on all workers; what this replica has to run.

        microbatches: of this step's global batch, where it is another number than usual.
        Raises PlanError where they are too few or too many for the replicas, or uneven where that
        would deadlock, on all workers alike, and what a callback raises.
        """
        hands = self._hands
        if self._steering is not None:
            hook.begin_steps(index)
            self._steering.between(index)
        split = hands.split
        if microbatches is not None:
            split = split.scaled(microbatches, hands.most)
        if max(split.counts) > min(split.counts) and (self._lost or not self._may_differ):
            self._check_unequal(split)
        indices = split.part(hands.place.replica)
        hands.build(len(indices))
        self._share = share = Share(
            index,
            indices,
            size=split.size,
            replicas=self._replicas,
            scale=self._scale,
            switch=self._switch,
            witness=self._witness if self._steering is not None else None,
        )
        return share

    def end(self) -> None:
        """After the step, its optimizer step included."""
        share, self._share = self._share, None
        if share is None:
            raise PlanError("end() without begin(); call begin(step) before the step")
        if share.left_out and not self._said:
            self._said = True
            say(
                f"step {share.step}: the loop left before the last of its {share.count} "
                "micro-batches, in whose backward pass gradients are exchanged: they were not, and "
                "replicas are no longer alike; run all micro-batches of a share"
            )
        hook.mark_step(share.step, whole(share.work))
        if self._steering is not None:
            share.ended_s = time.monotonic()
            self._taken_first = share.taken_first and self._switch is not None
            self._steering.ended(share)

    def total(self, tokens: float, group: dist.ProcessGroup | None = None) -> float:
        """`tokens` of all replicas together, for `Share.weigh`: an all-reduce.

        tokens: those this worker counts, as all stages and shards of its replica do. group: this
        worker's data-parallel one; all workers if left out, each replica's counting as one.
        """
        if not dist.is_initialized():
            return float(tokens)
        value = torch.tensor([float(tokens)], dtype=torch.float64, device=_device(group))
        dist.all_reduce(value, group=group)
        stages, _, shards = self._hands.place.grid
        return float(value) / (1 if group is not None else stages * shards)

    def _check_unequal(self, split: Split) -> None:
        """PlanError where replicas would wait for each other for ever: a batch that cannot be
        split evenly. It is looked at once for a model."""
        hands = self._hands
        if self._placed and (why := hands.no_redistribution or hands.why_equal(hands.replica_of())):
            raise PlanError(
                f"{split.size} micro-batches are {list(split.counts)} over {self._replicas} "
                f"replicas, which would wait for each other for ever ({why}); give a multiple of "
                f"{self._replicas}"
            )
        self._may_differ = True


class _Step:
    """`begin` and `end` as a context; a step that fails has no end."""

    __slots__ = ("_coordinator", "_index", "_microbatches")

    def __init__(self, coordinator: Coordinator, index: int, microbatches: int | None) -> None:
        self._coordinator, self._index, self._microbatches = coordinator, index, microbatches

    def __enter__(self) -> Share:
        return self._coordinator.begin(self._index, self._microbatches)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._coordinator.end()


def _here(
    grid: tuple[int, int, int] | None,
    place: tuple[int, int, int] | None,
    mesh: DeviceMesh | None,
) -> Place:
    ready = dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if ready else (1, 0)
    if grid is None and mesh is not None:
        here = place_in(mesh)
    elif grid is None:
        here = Place(0, rank, 0, (1, world, 1))
    else:
        here = Place(*place, grid) if place is not None else Place.at(rank, grid)
    pp, dp, tp = here.grid
    if pp * dp * tp != world:
        raise PlanError(
            f"a grid of {pp} x {dp} x {tp} needs {pp * dp * tp} workers and the job has {world}"
        )
    return here


def _watched() -> bool:
    """Whether rank 0 is watched, so that orders can come; the same on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    watched = torch.tensor([float(hook.status()["active"])], device=_device(None))
    with hook.quiet():
        dist.broadcast(watched, 0)
    return bool(watched)


def _check_gloo() -> None:
    """RuntimeError on all workers alike where one of them cannot be in a group over gloo.

    The others would wait for it as long as they may, to make a group with it.
    """
    problem, loopback = why_no_gloo(dist.get_world_size()), why_alone()
    host = zlib.crc32(socket.gethostname().encode())
    told = [not problem, not loopback, host, -host]
    least = torch.tensor(told, dtype=torch.float64, device=_device(None))
    with hook.quiet():
        dist.all_reduce(least, dist.ReduceOp.MIN)
    able, reached, first, last = least.tolist()
    if not able:
        raise RuntimeError(problem or "another worker has no gloo")
    if not reached and first != -last:  # there are several hosts
        raise RuntimeError(loopback or "another worker's gloo cannot be reached")


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor must be that the group sends."""
    if "gloo" in dist.get_backend(group) or not torch.cuda.is_available():
        return torch.device("cpu")
    # that of init_process_group(device_id=…), whose caller need not set the current one
    bound = getattr(group or dist.group.WORLD, "bound_device_id", None)
    return bound or torch.device("cuda", torch.cuda.current_device())
