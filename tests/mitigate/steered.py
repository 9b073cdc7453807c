"""Real training with a Coordinator, steered: `python steered.py SCENARIO… --out FOLDER`.

In: RANK and its kin, FAILSLOW=1. Orders are put into rank 0's mailbox as its agent would. Out:
FOLDER/rank<r>.json: {"ddp": {"even": {run}, "steered": {run}, "facts": {…}}}, a run being
{"losses": [...], "counts": [[...], ...], "indices": [[...], ...], "outcomes": [{...}, ...]}.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import failslow
from failslow.capture import hook
from failslow.mailbox import Mailbox
from failslow.mitigate.move_state import put_state, take_state
from failslow.mitigate.move_wire import leave
from failslow.mitigate.rebuild import LiveGrid

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "hybrid_gpt"))

MICROBATCHES, PARTIAL, EVERY = 16, 11, 5
"""The last global batch of every five is smaller."""
Step = Callable[[Any], float]
SCENARIOS: dict[str, Callable[[Job], Any]] = {}


def scenario(act: Callable[[Job], Any]) -> Callable[[Job], Any]:
    SCENARIOS[act.__name__] = act
    return act


class Job:
    """A run's settings, and the agent's end of rank 0's mailbox."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.rank = dist.get_rank()
        self.orders = 0
        self._agent: Mailbox | None = None
        self.heard: list[dict[str, Any]] = []

    def order(self, level: str, **plan: Any) -> None:
        """Rank 0's agent brings an order."""
        self.orders += 1
        if self.rank == 0:
            whole = {"level": level, "predicted_slowdown": 1.0, **plan}
            letter = {"topic": "steer", "id": self.orders, "level": level, "plan": whole}
            assert self._box().send(letter)

    def listen(self) -> list[dict[str, Any]]:
        """What rank 0's agent has heard since it last listened."""
        fresh = self._box().receive() if self.rank == 0 else []
        self.heard += fresh
        return fresh

    def _box(self) -> Mailbox:
        if self._agent is None:
            worker = hook.mailbox()
            assert worker is not None
            self._agent = Mailbox.open(worker.path)
        return self._agent

    def train(
        self,
        coordinator: failslow.Coordinator,
        step: Step,
        plans: Sequence[tuple[str, dict[str, Any]]] = (),
        *,
        partial: bool = True,
    ) -> dict[str, Any]:
        """Train; the next plan is ordered a while after the one before was answered."""
        run: dict[str, Any] = {"losses": [], "counts": [], "indices": [], "outcomes": []}
        waiting, due, base = list(plans), 3, self.orders
        self.listen()
        for index in range(self.steps):
            if waiting and index >= due:
                level, plan = waiting.pop(0)
                self.order(level, **plan)
                due = self.steps
            size = PARTIAL if partial and index % EVERY == EVERY - 1 else None
            with coordinator.step(index, size) as share:
                run["losses"].append(step(share))
            run["counts"].append(coordinator.counts)
            run["indices"].append(list(share.indices))
            for letter in self.listen():
                if letter["what"] == "outcome" and letter["id"] > base:
                    run["outcomes"].append({**letter, "seen_at": index})
                    due = index + max(3, self.steps // 8)
            # everybody orders at the same step, although only rank 0 hears
            shared = torch.tensor([due])
            dist.broadcast(shared, 0)
            due = int(shared)
        return run


def tokens_of(step: int, index: int) -> int:
    """Micro-batches differ in the rows that count."""
    return 3 + (step * 7 + index * 5) % 9


def data(step: int, index: int, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + index)
    rows = torch.randn(tokens_of(step, index), width, generator=draw)
    return rows, rows.roll(1, dims=1).tanh()


def net(width: int = 32) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)),
        nn.Linear(width, width),
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Mean losses weighted by tokens, gradients clipped, AdamW."""
    optimizer = optimizer or adamw(model)

    def step(share: Any) -> float:
        whole = sum(tokens_of(share.step, index) for index in range(share.size))
        mine = torch.zeros(())
        for index in share:
            rows, wanted = data(share.step, index)
            loss = (model(rows) - wanted).square().mean()
            tokens = tokens_of(share.step, index)
            (loss * share.weigh(tokens, whole)).backward()
            mine += loss.detach() * tokens / whole
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        assert float(norm) > 0.0
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mine)
        return float(mine)

    return step


@scenario
def ddp(job: Job) -> Any:
    """Plain data parallel; four replicas, six re-splits."""
    plans = [
        ("S2", {"microbatches": counts})
        for counts in ([7, 1, 4, 4], [2, 2, 2, 10], [1, 8, 6, 1], [5, 3, 4, 4])
    ]
    plans.append(("S1", {"microbatches": [4, 4, 4, 4]}))
    result = {}
    for name, wanted in (("even", []), ("steered", plans)):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
        coordinator = failslow.Coordinator(MICROBATCHES, listen_s=0.05, model=model)
        result[name] = job.train(coordinator, plain_step(model), wanted)
    assert coordinator.facts is not None
    return {**result, "facts": asdict(coordinator.facts)}


@scenario
def hsdp(job: Job) -> Any:
    """Hybrid sharding: two replicas of two shards each."""
    plans = [("S2", {"microbatches": counts}) for counts in ([11, 5], [3, 13], [9, 7])]
    result: dict[str, Any] = {}
    for name, wanted in (("even", []), ("steered", plans)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model: Any = net()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        coordinator = failslow.Coordinator(MICROBATCHES, listen_s=0.05, mesh=mesh, model=model)
        run = job.train(coordinator, _halved(plain_step(model)), wanted)
        result[name] = run
    result["tokens"] = coordinator.total(3.0)  # both shards of a replica count the same ones
    assert coordinator.facts is not None
    return {**result, "facts": asdict(coordinator.facts)}


def _halved(step: Step) -> Step:
    # both shards of a replica run the same micro-batches and count their loss
    return lambda share: step(share) / 2.0


@scenario
def fsdp(job: Job) -> Any:
    """FSDP2 over all: unequal counts would deadlock, so the order must be refused."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model: Any = net()
    fully_shard(model, mesh=mesh)
    coordinator = failslow.Coordinator(MICROBATCHES, listen_s=0.05, mesh=mesh, model=model)
    plans = [("S2", {"microbatches": [7, 1, 4, 4]}), ("S1", {"microbatches": [4, 4, 4, 4]})]
    # a partly full batch is no equal one
    run = job.train(coordinator, plain_step(model), plans, partial=False)
    assert coordinator.facts is not None
    return {"steered": run, "facts": asdict(coordinator.facts)}


@scenario
def reasons(job: Job) -> Any:
    """What else forbids unequal counts, and what does not."""
    found = {}

    def why(**about: Any) -> str:
        facts = failslow.Coordinator(MICROBATCHES, listen_s=0.05, **about).facts
        assert facts is not None
        return facts.no_redistribution

    found["sync batch norm"] = why(model=nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[job.rank // 2]
    within = nn.SyncBatchNorm(4, process_group=mine)
    found["sync batch norm within a replica"] = why(
        model=within, grid=(1, 2, 2), place=(0, job.rank // 2, job.rank % 2)
    )
    moe = nn.Linear(4, 4)
    moe.ep_group = mine  # as Megatron's and others' layers name it
    found["experts"] = why(model=moe)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    found["expert axis"] = why(mesh=mesh, grid=(1, 4, 1), place=(0, job.rank, 0))
    found["named group"] = why(exchanges={"my own gather": mine})
    found["nothing"] = why(model=net())
    return {"reasons": found}


@scenario
def renewed(job: Job) -> Any:
    """The model is replaced by one of which replicas must run as many micro-batches."""
    model = DistributedDataParallel(net())
    coordinator = failslow.Coordinator(MICROBATCHES, listen_s=0.05, model=model)
    other = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    coordinator.use(other)
    plans = [("S2", {"microbatches": [7, 1, 4, 4]}), ("S1", {"microbatches": [4, 4, 4, 4]})]
    return {"steered": job.train(coordinator, plain_step(model), plans, partial=False)}


@scenario
def failing(job: Job) -> Any:
    """One worker cannot rebuild for a plan: nobody may go by it. Then a plan that is none."""
    calls: list[int] = []

    def rebuild(count: int) -> None:
        calls.append(count)
        if job.rank == 2 and count == 6:
            raise ValueError("no memory for six")

    plans = [
        ("S2", {"microbatches": [3, 3, 6, 4]}),
        ("S2", {"microbatches": [3, 3, 6]}),
        ("S3", {"placement": [1, 0, 2, 3]}),
        ("S2", {"microbatches": [3, 3, 5, 5]}),
    ]
    result = {}
    for name, wanted in (("even", []), ("steered", plans)):
        model = DistributedDataParallel(net())
        calls.clear()
        coordinator = failslow.Coordinator(
            MICROBATCHES, listen_s=0.05, model=model, rebuild=rebuild
        )
        result[name] = {**job.train(coordinator, plain_step(model), wanted), "calls": list(calls)}
    return result


@scenario
def parted(job: Job) -> Any:
    """Rank 1's end of the Coordinator's own group is gone: training goes on everywhere."""
    result = {}
    for name in ("even", "steered"):
        model = DistributedDataParallel(net())
        coordinator = failslow.Coordinator(MICROBATCHES, listen_s=0.05, model=model)
        steering = coordinator._steering
        assert steering is not None
        step = plain_step(model)
        if name == "steered" and job.rank == 1:
            assert steering._group is not None
            steering._group.close()
        result[name] = {**job.train(coordinator, step), "listens": steering._group is not None}
    return result


@scenario
def parting(job: Job) -> Any:
    """So it is when they are to vote."""
    result = {}
    for name in ("even", "steered"):
        model = DistributedDataParallel(net())
        made: list[failslow.Coordinator] = []

        def rebuild(count: int, made: list[failslow.Coordinator] = made) -> None:
            if made and count == 1:  # rank 1's part of the plan
                steering = made[0]._steering
                assert steering is not None
                assert steering._group is not None
                leave(steering._group._group)

        coordinator = failslow.Coordinator(
            MICROBATCHES, listen_s=0.05, model=model, rebuild=rebuild, limit_s=60.0
        )
        made.append(coordinator)
        plans = [("S2", {"microbatches": [7, 1, 4, 4]})] if name == "steered" else []
        begin_s = time.monotonic()
        result[name] = job.train(coordinator, plain_step(model), plans, partial=False)
        result[name]["took_s"] = time.monotonic() - begin_s
    return result


@scenario
def hybrid(job: Job) -> Any:
    """examples/hybrid_gpt, 2 stages × 2 replicas: ragged, clipped, partly full batches."""
    plans = [("S2", {"microbatches": counts}) for counts in ([11, 5], [4, 12], [9, 7])]
    plans.append(("S1", {"microbatches": [8, 8]}))
    result = {}
    for name, wanted in (("even", []), ("steered", plans)):
        trainer = _gpt()
        coordinator = failslow.Coordinator(
            MICROBATCHES, listen_s=0.05, mesh=trainer.grid.mesh, model=trainer.stage,
            gradients="sum", rebuild=trainer.rebuild,
        )  # fmt: skip
        step = _part_step(trainer)
        result[name] = job.train(coordinator, step, wanted)
    assert coordinator.facts is not None
    return {**result, "facts": asdict(coordinator.facts)}


@scenario
def moving(job: Job) -> Any:
    """The same, and workers change places twice: state goes with the position, and so does the
    split that was planned with it; the second takes the even one back."""
    plans: list[tuple[str, dict[str, Any]]] = [
        ("S3", {"placement": [3, 1, 0, 2], "microbatches": [6, 10]}),
        ("S3", {"placement": [2, 1, 0, 3], "microbatches": [8, 8]}),
    ]
    result: dict[str, Any] = {}
    placements: list[tuple[int, ...]] = []
    for name, wanted in (("even", []), ("steered", plans)):
        trainer = _gpt()
        coordinator = failslow.Coordinator(
            MICROBATCHES, listen_s=0.05, mesh=trainer.grid.mesh, model=trainer.stage,
            gradients="sum", rebuild=trainer.rebuild, state=trainer.state, move=trainer.move,
        )  # fmt: skip
        train = _part_step(trainer)

        def step(share: Any, train: Step = train, at: Any = coordinator) -> float:
            if at.placement not in placements:
                placements.append(at.placement)
            return train(share)

        result[name] = job.train(coordinator, step, wanted)
    return {**result, "placements": placements}


@scenario
def stumbling(job: Job) -> Any:
    """Rank 2 has no state to give, then fails in the middle of changing places: all go back, their
    split too, and the next order, which says nothing of it, succeeds."""
    plans: list[tuple[str, dict[str, Any]]] = [
        ("S3", {"placement": [2, 1, 0, 3], "microbatches": [6, 10]}),
        ("S3", {"placement": [2, 1, 0, 3], "microbatches": [6, 10]}),
        ("S3", {"placement": [2, 1, 0, 3]}),
    ]
    result: dict[str, Any] = {}
    for name, wanted in (("even", []), ("steered", plans)):
        trainer = _gpt()
        state = trainer.state
        if name == "steered" and job.rank == 2:
            state = _failing_once(state, KeyError("no such buffer"))
            trainer._build = _failing_once(trainer._build, MemoryError("no room for the model"))
        coordinator = failslow.Coordinator(
            MICROBATCHES, listen_s=0.05, mesh=trainer.grid.mesh, model=trainer.stage,
            gradients="sum", rebuild=trainer.rebuild, state=state, move=trainer.move,
        )  # fmt: skip
        result[name] = job.train(coordinator, _part_step(trainer), wanted)
        result[name]["placement"] = coordinator.placement
    return result


class _Wrapped:
    """The worker that docs/coordinator.md shows, its model within DDP."""

    def __init__(self) -> None:
        self.grid = LiveGrid.build(range(4), sizes=(1, 4, 1), device_type="cpu")
        self.begin: Callable[[], None] = lambda: None
        self.build()

    def build(self) -> None:
        self.begin()
        group = self.grid.groups[1]
        self.model: Any = DistributedDataParallel(net(), process_group=group)
        self.optimizer: Any = adamw(self.model)

    def state(self) -> dict[str, Any]:
        return take_state(self.model, self.optimizer)

    def move(self, placement: tuple[int, ...], state: dict[str, Any]) -> None:
        self.model = self.optimizer = None
        self.grid = self.grid.moved(placement)
        self.build()
        put_state(state, self.model, self.optimizer)
        self.coordinator.use(self.model)

    def train(self, job: Job, plans: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        self.coordinator = failslow.Coordinator(
            MICROBATCHES, listen_s=0.05, model=self.model, state=self.state, move=self.move
        )

        def step(share: Any) -> float:
            return plain_step(self.model, self.optimizer)(share)

        return job.train(self.coordinator, step, plans)


@scenario
def wrapping(job: Job) -> Any:
    """Rank 1 has no room for its model, while the others wait for it in DDP's constructor."""
    plans: list[tuple[str, dict[str, Any]]] = [
        ("S2", {"microbatches": [7, 1, 4, 4]}),
        ("S3", {"placement": [2, 1, 0, 3]}),
        ("S3", {"placement": [2, 1, 0, 3], "microbatches": [3, 2, 6, 5]}),
    ]
    result: dict[str, Any] = {}
    for name, wanted in (("even", []), ("steered", plans)):
        worker = _Wrapped()
        if name == "steered" and job.rank == 1:
            worker.begin = _failing_once(lambda: None, MemoryError("no room for the model"))
        result[name] = worker.train(job, wanted)
    return result


@scenario
def printed(job: Job) -> Any:
    """The program of docs/coordinator.md as it stands there, but for the number of its steps."""
    text = (Path(__file__).parents[2] / "docs" / "coordinator.md").read_text(encoding="utf-8")
    (program,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "class Worker" in c)
    orders: dict[int, list[int]] = {}

    class Ordered(failslow.Coordinator):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given, listen_s=0.0)

        def begin(self, index: int, microbatches: int | None = None) -> Any:
            if index in orders:
                job.order("S3", placement=orders[index])
                dist.barrier()  # or another worker's next step might be over before it
            return super().begin(index, microbatches)

    outcomes, ends = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda _: None)
        patch.setattr(failslow, "Coordinator", Ordered)
        for wanted in ({}, {4: [2, 1, 0, 3], 14: [3, 0, 1, 2]}):
            orders.clear()
            orders.update(wanted)
            torch.manual_seed(7)
            names: dict[str, Any] = {}
            job.listen()
            exec(program.replace("range(1000)", f"range({job.steps})"), names)
            outcomes += [x["ok"] for x in job.listen() if x["what"] == "outcome"]
            worker = names["worker"]
            weights = torch.cat([p.detach().flatten() for p in worker.model.parameters()])
            noise = float(torch.rand((), generator=worker.noise))
            ends.append((weights, worker.grid.replica, noise, names["coordinator"].placement))
    (stayed, *before), (moved, *after) = ends
    return {
        "apart": float((stayed - moved).abs().max()), "outcomes": outcomes,
        "before": before, "after": after,
    }  # fmt: skip


def _failing_once(act: Callable[[], Any], error: Exception) -> Callable[[], Any]:
    failures = [error]

    def failing() -> Any:
        if failures:
            raise failures.pop()
        return act()

    return failing


def _gpt() -> Any:
    """One worker of examples/hybrid_gpt on two stages and two replicas."""
    from data import Batches, read_corpus
    from layout import Grid, Layout
    from model import Shape
    from trainer import Trainer

    return Trainer(
        grid=Grid.build(Layout(pp=2, dp=2), (0, 1, 2, 3), "cpu"),
        shape=Shape(layers=2, width=32, length=32, dropout=0.1),
        batches=Batches(
            read_corpus(200_000),
            sequences=2,
            length=32,
            microbatches=MICROBATCHES,
            seed=3,
            ragged=True,
        ),
        device=torch.device("cpu"),
        learning_rate=1e-3,
        clip=0.5,
        seed=3,
    )


def _part_step(trainer: Any) -> Step:
    return lambda share: trainer.step(share.step, share.indices, share.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", choices=sorted(SCENARIOS), nargs="+")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(800.0)  # a deadlock shows where it is
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)
    report = {}
    for number, name in enumerate(options.scenarios):
        own = PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
        dist.barrier()
        job = Job(options.steps)
        report[name] = SCENARIOS[name](job)
        report[name]["facts heard"] = [x for x in job.heard if x["what"] == "facts"]
        dist.barrier()
        time.sleep(0.2)  # gloo aborts when a peer closes first: all leave together
        if name != options.scenarios[-1]:
            dist.destroy_process_group()
        (options.out / f"rank{rank}.json").write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main()
