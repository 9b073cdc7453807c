"""A change of places and the split planned with it: both are in force, or neither is."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.decide.jobs import facts

from failslow.config import DecideConfig
from failslow.decide.levels import InForce, LayoutPlanner
from failslow.errors import MoveError, PlanError
from failslow.mitigate import steer_apply
from failslow.mitigate.batches import Split
from failslow.mitigate.grid import Place
from failslow.mitigate.move_state import put_rng, take_rng
from failslow.mitigate.steer_apply import Hands, refused
from failslow.records import Finding, Plan

GRID = (1, 4, 1)


class Worker:
    """Rank 1 of four replicas, whose state needs no others to be moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(steer_apply, "transfer_group", lambda **_: nullcontext())
        monkeypatch.setattr(steer_apply, "swap_state", lambda mine, **_: self.swap(mine))
        monkeypatch.setattr("torch.distributed.get_rank", lambda *_: 1)
        self.calls: list[Any] = []
        self.room, self.ahead = 99, 0
        self.hands = Hands(
            Split(counts=(8, 8, 8, 8), least=1),
            Place.at(1, GRID),
            most=None,
            rebuild=self.rebuild,
            state=lambda: "mine",
            move=self.move,
            checkpoint=None,
            limit_s=1.0,
        )

    def swap(self, mine: dict[str, Any]) -> SimpleNamespace:
        """The other's: its random numbers are further on."""
        torch.rand(self.ahead)
        theirs = {"rng": take_rng(), "state": "theirs"}
        put_rng(mine["rng"])
        return SimpleNamespace(state=theirs)

    def rebuild(self, count: int) -> None:
        if count > self.room:
            raise MemoryError("no room")
        self.calls.append(count)

    def move(self, placement: tuple[int, ...], state: Any) -> None:
        torch.rand(3)  # a model is made anew
        random.random(), np.random.rand()  # noqa: NPY002 - the global one
        self.calls.append((placement, state))

    @property
    def in_force(self) -> InForce:
        return InForce(microbatches=self.hands.split.counts, placement=self.hands.placement)

    def carry_out(self, plan: Plan) -> None:
        assert self.hands.problem(plan) == ("", False)
        self.hands.prepare(plan, 10)
        self.hands.commit()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def _plan(placement: tuple[int, ...] = (0, 2, 1, 3), microbatches: tuple[int, ...] = ()) -> Plan:
    return Plan(level="S3", predicted_slowdown=1.1, placement=placement, microbatches=microbatches)


def test_what_a_planner_wants_at_s3_is_what_is_in_force_afterwards(worker: Worker) -> None:
    """S2 for a slow device, S3 for a slow link besides: its split replaces that of S2."""
    job = facts(pp=1, stage_s=(0.1,), dp_s=0.6)
    planner = LayoutPlanner(job, DecideConfig())
    device = Finding(what="device", slowdown=1.6, ranks=(1,), host="gpu-1")
    split, _, _ = planner.assess((device,), planner.initial())
    assert split.plan is not None
    worker.carry_out(split.plan)
    assert worker.in_force.microbatches == split.plan.microbatches != (8, 8, 8, 8)
    slow = Finding(what="link", slowdown=6.0, ranks=(), host="gpu-1", peer_host="gpu-2")
    _, moved, _ = planner.assess((slow,), worker.in_force)
    plan = moved.plan
    assert plan is not None
    worker.carry_out(plan)
    assert worker.in_force == InForce(microbatches=plan.microbatches, placement=plan.placement)
    assert worker.in_force.microbatches == (8, 8, 8, 8)


def test_the_split_is_that_of_the_replica_at_the_new_place(worker: Worker) -> None:
    worker.carry_out(_plan(microbatches=(9, 9, 5, 9)))
    assert worker.hands.place == Place.at(2, GRID)
    assert worker.calls == [((0, 2, 1, 3), "theirs"), 5]
    worker.hands.build(5)  # before the step: it has been
    assert worker.calls[-1:] == [5]


def test_places_alone_leave_the_split_as_it_is(worker: Worker) -> None:
    worker.carry_out(Plan(level="S2", predicted_slowdown=1.1, microbatches=(9, 5, 9, 9)))
    worker.carry_out(_plan())
    assert worker.in_force == InForce(microbatches=(9, 5, 9, 9), placement=(0, 2, 1, 3))
    assert worker.calls == [5, ((0, 2, 1, 3), "theirs"), 9]


def test_a_split_that_cannot_be_built_at_the_new_place_takes_the_places_back(
    worker: Worker,
) -> None:
    worker.room = 9
    with pytest.raises(MemoryError):
        worker.hands.prepare(_plan(microbatches=(7, 7, 11, 7)), 10)
    worker.hands.roll_back()
    assert worker.in_force == InForce(microbatches=(8, 8, 8, 8), placement=(0, 1, 2, 3))
    assert worker.hands.place == Place.at(1, GRID)
    assert worker.calls == [((0, 2, 1, 3), "theirs"), ((0, 1, 2, 3), "mine")]
    worker.hands.build(8)
    assert worker.calls[-1] == 8


def test_a_split_that_cannot_be_is_refused_before_anybody_moves(worker: Worker) -> None:
    why, never = worker.hands.problem(_plan(microbatches=(9, 9, 9)))
    assert (why, never) == ("3 counts for 4 replicas", False)
    worker.hands.no_redistribution = "FSDP shard axis"
    assert worker.hands.problem(_plan(microbatches=(9, 5, 9, 9))) == ("FSDP shard axis", False)
    assert worker.hands.problem(_plan(microbatches=(8, 8, 8, 8))) == ("", False)
    assert worker.calls == []


def _drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002


def test_random_numbers_go_with_the_place(worker: Worker) -> None:
    """And a worker that stays, or goes back, has its own again, although its model is new."""
    before = take_rng()
    torch.rand(5)
    theirs = _drawn()
    put_rng(before)
    worker.ahead = 5
    worker.carry_out(_plan())
    assert _drawn() == theirs
    put_rng(before)
    mine = _drawn()
    put_rng(before)
    worker.hands.prepare(_plan((0, 1, 2, 3)), 11)
    worker.hands.roll_back()
    assert _drawn() == mine


class _Kept:
    """A state, alive as long as someone has it."""


@pytest.mark.parametrize("agreed", [True, False])
def test_the_state_of_the_place_before_is_let_go(worker: Worker, agreed: bool) -> None:
    kept: list[weakref.ref[_Kept]] = []

    def state() -> _Kept:
        made = _Kept()
        kept.append(weakref.ref(made))
        return made

    worker.hands._state = state
    worker.hands.prepare(_plan(), 10)
    assert kept[0]() is not None  # until it is known that it is not needed
    worker.hands.commit() if agreed else worker.hands.roll_back()
    worker.calls.clear()  # the trainer has gone on
    gc.collect()
    assert kept[0]() is None


def test_a_model_that_came_later_is_asked_before_counts_become_unequal(worker: Worker) -> None:
    asked: list[list[int]] = []

    def why_equal(replica_of: list[int]) -> str:
        asked.append(replica_of)
        return "SyncBatchNorm: 1 averages over replicas 0 to 3"

    worker.carry_out(_plan())
    worker.hands.why_equal = why_equal
    uneven = Plan(level="S2", predicted_slowdown=1.1, microbatches=(9, 9, 5, 9))
    with pytest.raises(MoveError, match="SyncBatchNorm") as caught:
        worker.hands.prepare(uneven, 10)
    assert refused(caught.value), "another try would end alike"
    worker.hands.roll_back()
    assert asked == [[0, 2, 1, 3]], "rank 2 holds the place of replica 1"
    worker.carry_out(Plan(level="S1", predicted_slowdown=1.0, microbatches=(8, 8, 8, 8)))
    assert len(asked) == 1
    # places may change all the same, but not with such a split
    with pytest.raises(PlanError, match="SyncBatchNorm"):
        worker.hands.prepare(_plan((0, 1, 2, 3), (9, 9, 5, 9)), 10)
    assert asked[-1] == [0, 1, 2, 3]
    worker.hands.roll_back()
    assert worker.in_force == InForce(microbatches=(8, 8, 8, 8), placement=(0, 2, 1, 3))
    worker.carry_out(_plan((0, 1, 2, 3)))
