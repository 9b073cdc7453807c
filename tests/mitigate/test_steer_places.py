"""Workers change places by order, several times, and nothing of it stays behind.

Four workers as threads, each with its own Coordinator, its own loop, a model and its AdamW; orders
come by a mailbox and state goes over `move_fake`'s wires. Only torch.distributed is a made-up one.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import failslow
from failslow.capture import hook
from failslow.mailbox import Mailbox
from failslow.mitigate import coordinator as coordinator_module
from failslow.mitigate import steer, steer_apply
from failslow.mitigate.move_fake import ThreadHub, ThreadWire
from failslow.mitigate.move_state import put_state, take_state

WORLD, WIDTH = 4, 96
_PLACES: tuple[tuple[int, ...], ...] = (
    (1, 0, 2, 3), (1, 2, 0, 3), (0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (0, 1, 2, 3),
)  # fmt: skip


class Job:
    """What the threads share in place of torch.distributed and of rank 0's agent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.me = threading.local()
        self._barrier = threading.Barrier(WORLD, timeout=60.0)
        self._words: list[Any] = [None] * WORLD
        worker = Mailbox.create(folder / "r0.ring")
        self.agent = Mailbox.open(worker.path)
        for name, value in (("is_initialized", True), ("get_world_size", WORLD)):
            monkeypatch.setattr(dist, name, lambda *_, value=value: value)
        monkeypatch.setattr(dist, "get_rank", lambda *_: self.me.rank)
        monkeypatch.setattr(coordinator_module, "_watched", lambda: True)
        monkeypatch.setattr(coordinator_module, "_check_gloo", lambda: None)
        monkeypatch.setattr(hook, "mailbox", lambda: None if self.me.rank else worker)
        monkeypatch.setattr(steer, "SteerGroup", lambda _: Circle(self))
        monkeypatch.setattr(steer_apply, "transfer_group", self.transfer_group)

    def tell(self, word: Any) -> list[Any]:
        """Everybody's, by rank."""
        self._words[self.me.rank] = word
        self._barrier.wait()
        words = list(self._words)
        self._barrier.wait()
        return words

    @contextmanager
    def transfer_group(self, limit_s: float) -> Iterator[ThreadWire]:
        """A network for this move alone."""
        del limit_s
        hub = self.tell(None if self.me.rank else ThreadHub(WORLD))[0]
        self.tell(None)  # no word of it is kept
        yield ThreadWire(hub, self.me.rank)

    def run(self, train: Any) -> None:
        """`train(rank)` in all of them."""

        def body(wire: ThreadWire) -> None:
            self.me.rank = wire.rank
            try:
                train(wire.rank)
            except BaseException:
                self._barrier.abort()
                raise

        errors = [e for e in ThreadHub(WORLD).run(body, 100.0) if e is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]


class Circle:
    """A `SteerGroup` of threads."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def gather(self, **content: Any) -> Sequence[dict[str, Any]]:
        return [json.loads(told) for told in self._job.tell(json.dumps(content))]

    def hear(self, wait: int, order: dict[str, Any] | None) -> tuple[int, dict[str, Any] | None]:
        said: tuple[int, dict[str, Any] | None] = self._job.tell((wait, order))[0]
        return said

    def vote(self, problem: str, after_s: float) -> str:
        del after_s
        return next((f"rank {r}: {no}" for r, no in enumerate(self._job.tell(problem)) if no), "")

    def close(self) -> None:
        pass


class Trainer:
    """The documented callbacks, and a model that tells at which position it was begun."""

    def __init__(self, rank: int) -> None:
        self.rank = self.position = rank
        self.failures = 0
        self.build()
        with torch.no_grad():
            self.model.bias.fill_(float(rank))

    def build(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)

    def state(self) -> dict[str, Any]:
        return take_state(self.model, self.optimizer, position=self.position)

    def move(self, placement: tuple[int, ...], state: dict[str, Any]) -> None:
        del self.model, self.optimizer
        self.build()
        put_state(state, self.model, self.optimizer)
        self.position = state["extras"]["position"]
        assert placement.index(self.rank) == self.position
        if self.failures:
            self.failures -= 1
            raise MemoryError("no room for the model")

    def step(self, share: Any) -> None:
        for _ in share:
            (self.model(torch.ones(1, WIDTH)).sum() * share.weight).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _tensor_bytes() -> int:
    """Of all tensors that are alive in this process."""
    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor)
        and thing.layout == torch.strided
        and not is_traceable_wrapper_subclass(thing)  # it has no storage; what it wraps is here too
    }
    return sum(storages.values())


def _left() -> tuple[int, int, int]:
    return _tensor_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("failing", [False, True], ids=["carried out", "undone"])
def test_changing_places_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    job = Job(tmp_path, monkeypatch)
    left: list[tuple[int, int, int]] = []
    answers: list[dict[str, Any]] = []
    trainers: list[Trainer] = []

    def train(rank: int) -> None:
        trainer = Trainer(rank)
        coordinator = failslow.Coordinator(
            8, listen_s=0.0, state=trainer.state, move=trainer.move, model=None
        )
        for index in range(1 + len(_PLACES)):
            trainer.failures = int(failing and rank == 2)
            with coordinator.step(index) as share:
                trainer.step(share)
            job.tell(None)
            if rank == 0:
                left.append(_left())
                heard = job.agent.receive()
                answers.extend(x for x in heard if x["what"] == "outcome")
                if index < len(_PLACES):
                    assert job.agent.send(_order(index, _PLACES[index]))
            job.tell(None)
            wanted = (0, 1, 2, 3) if failing or index == 0 else _PLACES[index - 1]
            assert coordinator.placement == wanted
            assert trainer.model.bias.tolist() == [float(wanted.index(rank))] * WIDTH
        trainers.append(trainer)

    job.run(train)
    assert [answer["ok"] for answer in answers] == [not failing] * len(_PLACES)
    assert all(failing == ("no room for the model" in answer["error"]) for answer in answers)
    own = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # bytes of parameters and two moments
    assert left[0][0] > WORLD * own
    # nothing of any move, not even of the latest: no state, no thread, no file
    for now in left:
        assert all(a <= b for a, b in zip(now, left[0], strict=True)), left


def test_a_worker_without_callbacks_stays_and_so_do_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it in the move's group, which it never makes."""
    job = Job(tmp_path, monkeypatch)
    told: list[Any] = [None] * WORLD

    def train(rank: int) -> None:
        trainer = Trainer(rank)
        move, save = (None, None) if rank == 2 else (trainer.move, lambda _: None)
        told[rank] = failslow.Coordinator(8, state=trainer.state, move=move, checkpoint=save).facts

    job.run(train)
    why = "no state= and move= callbacks given to the Coordinator"
    assert [facts.no_topology_change for facts in told] == [
        why if rank == 2 else f"rank 2: {why}" for rank in range(WORLD)
    ]
    assert told[0].no_restart == "rank 2: no checkpoint= callback given to the Coordinator"


def _order(number: int, placement: tuple[int, ...]) -> dict[str, Any]:
    plan = {"level": "S3", "predicted_slowdown": 1.0, "placement": placement}
    return {"topic": "steer", "id": number, "level": "S3", "plan": plan}
