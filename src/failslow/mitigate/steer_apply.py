"""What a plan changes in this process, so that it can be undone until all workers are ready.

In: a plan and the trainer's callbacks. Out: the new split or place, after `commit`:

    hands.prepare(plan, step)       # may raise; then, and after a "no" of anyone: roll_back()
    hands.commit()
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from failslow.capture import hook
from failslow.comeback import tell_saved
from failslow.errors import FailslowError, MoveError, PlanError
from failslow.mitigate.batches import Split
from failslow.mitigate.grid import Place
from failslow.mitigate.move import swap_state, transfer_group
from failslow.mitigate.move_state import put_rng, take_rng
from failslow.mitigate.move_wire import leave
from failslow.records import Plan

__all__ = ["Hands", "refused"]

_MOVE_S = 300.0
"""Longest that a change of places may take, however patient the workers are else."""

Placing = Callable[[tuple[int, ...], Any], None]
"""`place(placement, state)`: be the worker of another position from now on."""


class Hands:
    """One worker's callbacks and what is in force here."""

    def __init__(
        self,
        split: Split,
        place: Place,
        *,
        most: int | None,
        rebuild: Callable[[int], None] | None,
        state: Callable[[], Any] | None,
        move: Placing | None,
        checkpoint: Callable[[int], None] | None,
        limit_s: float,
    ) -> None:
        self.split, self.place = split, place
        self.placement = tuple(range(math.prod(place.grid)))
        """The rank at each position."""
        self.most = most
        self.stop = False
        """A checkpoint for a restart was saved: the job is to end."""
        self.no_redistribution = ""
        """Why no replica may run more micro-batches than another, as all workers told at first."""
        self.why_equal: Callable[[list[int]], str] = lambda _: ""
        """The same of this worker's present model, from the replica of each rank."""
        self.no_comeback = ""
        """Why nobody would start the job again, as all workers told at first."""
        self.others_stay = self.others_lose = ""
        """Why another worker cannot change places, or save its state, as all told at first."""
        self.failed_s = math.inf
        """When `prepare` failed, where it took a while to raise since (CLOCK_MONOTONIC)."""
        self._rebuild, self._state, self._move, self._checkpoint = rebuild, state, move, checkpoint
        self._limit_s = min(limit_s, _MOVE_S)
        self._built: int | None = None
        """Micro-batches the trainer was last told of."""
        self._commit: Callable[[], None] = _nothing
        self._undo: Callable[[], None] = _nothing

    @property
    def no_topology_change(self) -> str:
        """Why workers cannot change places; "" they can."""
        if self._state is None or self._move is None:
            return "no state= and move= callbacks given to the Coordinator"
        return self.others_stay

    @property
    def no_restart(self) -> str:
        """Why the job cannot be restarted; "" it can."""
        if self._checkpoint is None:
            return "no checkpoint= callback given to the Coordinator"
        return self.others_lose or self.no_comeback

    def build(self, count: int) -> None:
        """This replica runs `count` micro-batches in the coming step."""
        if self._rebuild is not None and count != self._built:
            self._built = None  # should it fail half-way
            self._rebuild(count)
            self._built = count

    def problem(self, plan: Plan) -> tuple[str, bool]:
        """(why the plan cannot be carried out, "" if it can; whether it never can)."""
        if plan.level in ("S1", "S2"):
            return self._split_problem(plan.microbatches)
        if plan.level == "S3":
            if self.no_topology_change:
                return self.no_topology_change, True
            if sorted(plan.placement) != sorted(self.placement):
                return f"{list(plan.placement)} is no placement of the job's ranks", False
            # what forbids a split does not forbid changing places
            return self._split_problem(plan.microbatches)[0] if plan.microbatches else "", False
        return self.no_restart, bool(self.no_restart)

    def _split_problem(self, counts: Sequence[int]) -> tuple[str, bool]:
        if self.no_redistribution and max(counts, default=0) - min(counts, default=0) > 1:
            return self.no_redistribution, True
        return self.split.problem(counts, self.most), False

    def prepare(self, plan: Plan, step: int) -> None:
        """Get ready for the plan before `step`. What it raises is a "no"."""
        self._commit = self._undo = _nothing
        self.failed_s = math.inf
        if plan.level in ("S1", "S2"):
            self._prepare_split(plan.microbatches)
        elif plan.level == "S3":
            self._prepare_move(plan.placement, plan.microbatches)
        else:
            self._prepare_restart(step)

    def commit(self) -> None:
        """All workers are ready."""
        commit, self._commit, self._undo = self._commit, _nothing, _nothing
        commit()

    def roll_back(self) -> None:
        """Some worker is not. Raises what a callback raises."""
        # neither is kept: undoing a change of places takes the whole state of the old place
        undo, self._commit, self._undo = self._undo, _nothing, _nothing
        undo()

    def _prepare_split(self, counts: Sequence[int]) -> None:
        new = Split(counts=tuple(counts), least=self.split.least)
        why = self._forbids(new, self.placement)
        if why:
            raise MoveError(why, refused=True)

        def commit() -> None:
            self.split = new

        def undo() -> None:
            self.build(self.split.counts[self.place.replica])

        self._commit, self._undo = commit, undo
        self.build(new.counts[self.place.replica])

    def _prepare_move(self, placement: tuple[int, ...], counts: Sequence[int]) -> None:
        """Move, and be ready for the split that goes with the new places; () it stays."""
        if self._state is None or self._move is None:
            raise PlanError(self.no_topology_change)
        split = Split(counts=tuple(counts), least=self.split.least) if counts else self.split
        place = Place.at(placement.index(dist.get_rank()), self.place.grid)
        now, move, device = self.placement, self._move, _device()
        # a move's traffic is none of the training's
        with hook.quiet(), transfer_group(limit_s=self._limit_s) as group:
            # not before: who has no state to give leaves the group, which tells the others;
            # chance belongs to the place too, whatever building a model anew draws
            mine = {"rng": take_rng(device), "state": self._state()}
            moved = swap_state(
                mine,
                placement_now=now,
                placement_new=placement,
                group=group,
                tp=self.place.grid[2],
                limit_s=self._limit_s,
            )

        def undo() -> None:
            self._built = None
            move(now, mine["state"])
            put_rng(mine["rng"], device)

        def commit() -> None:
            self.placement, self.place, self.split = placement, place, split

        self._commit, self._undo = commit, undo
        self._built = None
        with self._leaving_new_groups():
            move(placement, moved.state["state"])
            why = self._forbids(split, placement)
            if why:  # which does not forbid changing places
                raise PlanError(why)
            self.build(split.counts[place.replica])
        put_rng(moved.state["rng"], device)

    @contextmanager
    def _leaving_new_groups(self) -> Iterator[None]:
        """What fails within it breaks the process groups that were made within it: others may wait
        for this worker there, as DDP's constructor does, and would for half an hour."""
        known: Any = getattr(dist.distributed_c10d, "_world", None)  # private to torch
        before = set(getattr(known, "pg_map", ()))
        try:
            yield
        except Exception:
            self.failed_s = time.monotonic()
            with hook.quiet():
                for group in set(getattr(known, "pg_map", ())) - before:
                    with suppress(Exception):  # one that is broken already
                        leave(group)
            raise

    def _forbids(self, split: Split, placement: tuple[int, ...]) -> str:
        """What of the model there is now forbids a split; it may be another than at the start."""
        if max(split.counts) - min(split.counts) <= 1:
            return ""
        return self.why_equal(self.replica_of(placement))

    def replica_of(self, placement: Sequence[int] | None = None) -> list[int]:
        """Of each rank, where `placement` has the rank at each position; None: as it is now."""
        placement = self.placement if placement is None else placement
        _, dp, tp = self.place.grid
        replicas = [0] * len(placement)
        for position, rank in enumerate(placement):
            replicas[rank] = position // tp % dp
        return replicas

    def _prepare_restart(self, step: int) -> None:
        if self._checkpoint is None or self.no_restart:
            raise PlanError(self.no_restart)

        def commit() -> None:
            self.stop = True
            with suppress(OSError, FailslowError):  # nor can an order be left there
                tell_saved(os.environ)

        self._commit = commit
        self._checkpoint(step)


def refused(error: Exception) -> bool:
    """Whether what went wrong would go wrong again."""
    return isinstance(error, MoveError) and error.refused


def _device() -> str:
    """Whose random numbers go along with a place, besides the CPU's."""
    return "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]


def _nothing() -> None:
    pass
