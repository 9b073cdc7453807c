"""A training job to be paused; nothing in it knows how, but for the stand-in for the benchmarks.

In: RANK and its kin, TRAIN_FOLDER, PAUSE_SCENARIO (see `SCENARIOS`), PAUSE_STUB (seconds a stand-in
takes). Out: TRAIN_FOLDER/rank<r>.json once a file `stop` is there:

    {"losses":[0.91,…],"shas":{"10":"ab31…",…},"ends":[1745735301.2,…],"status":{…},"scripts":1}
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from failslow import capture

FOLDER = Path(os.environ["TRAIN_FOLDER"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WORK_S = float(os.environ["TRAIN_WORK_MS"]) / 1e3
SHA_EVERY = 10
REMADE = (10, 25)
Step = Callable[[int], float]
scripts: list[Any] = []


def net(seed: int) -> nn.Sequential:
    """Its dropout draws from the default generator, which a pause must leave alone."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32))


def batch(index: int, seed: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * index + seed))


def ddp() -> tuple[Step, nn.Module]:
    """Gradients over C++'s reducer, the loss over a call from Python."""
    model = DistributedDataParallel(net(7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(index: int) -> float:
        loss = model(batch(index, RANK)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    return step, model


def pipeline(world_calls: bool = True) -> tuple[Step, nn.Module]:
    """Two stages, two replicas: sends, receives, gradients in pairs; one call on all ranks."""
    stage, replica = RANK % 2, RANK // 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = net(7 + stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    peer = RANK + 1 if stage == 0 else RANK - 1

    def step(index: int) -> float:
        total = torch.zeros(1)
        outputs: list[torch.Tensor] = []
        sent: list[Any] = []
        for part in range(3):
            if stage == 0:
                outputs.append(model(batch(3 * index + part, replica)))
                dist.send(outputs[-1].detach(), peer)
            else:
                given = torch.empty(8, 32)
                dist.recv(given, peer)
                given.requires_grad_()
                loss = model(given).square().mean()
                torch.autograd.backward(loss)
                total += loss.detach()
                assert given.grad is not None
                sent.append((dist.isend(given.grad, peer), given.grad))
        for output in outputs:
            grad = torch.empty(8, 32)
            dist.recv(grad, peer)
            torch.autograd.backward(output, grad)
        for work, _ in sent:
            work.wait()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=groups[stage])
        if world_calls:
            dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step, model


SCENARIOS: dict[str, Callable[[], tuple[Step, nn.Module]]] = {
    "ddp": ddp,
    "again": ddp,  # its groups are destroyed and made anew in the first iterations
    "pipeline": pipeline,
    "apart": lambda: pipeline(world_calls=False),
}


def goes_on(scenario: str, index: int) -> bool:
    """Rank 0 decides, in a way that fits the scenario."""
    going = torch.tensor([float(not (FOLDER / "stop").exists())])
    if scenario == "apart":  # no call on all ranks
        for low, high in ((0, 1), (0, 2), (2, 3)):
            if low == RANK:
                dist.send(going, high)
            elif high == RANK:
                dist.recv(going, low)
    elif scenario == "pipeline" and index % 10:
        return True
    else:
        dist.broadcast(going, 0)
    return bool(going)


def main() -> None:
    torch.set_num_threads(1)
    scenario, stub = os.environ["PAUSE_SCENARIO"], os.environ.get("PAUSE_STUB", "")
    if stub:
        from failslow.capture import pausing

        def run(script: list[Any], number: int) -> list[Any]:
            scripts.append(number)
            time.sleep(float(stub))
            return [{"do": "stub", "rank": RANK, "pause": number, "stages": len(script)}]

        def runner(pauser: pausing.Pauser) -> pausing.Runner | None:
            """Real benchmarks are run as ever."""
            return run if pauser._worker.script[0]["do"] == "stub" else None

        pausing.Pauser.runner = property(runner)  # type: ignore[assignment]  # by each script
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, RANK == 0)
    losses: list[float] = []
    shas: dict[int, str] = {}
    ends: list[float] = []
    made = 0
    going = True
    while going:
        own = PrefixStore(str(made), store)
        dist.init_process_group("gloo", store=own, rank=RANK, world_size=WORLD)
        made += 1
        step, model = SCENARIOS[scenario]()
        torch.manual_seed(RANK)
        while going := goes_on(scenario, len(losses)):
            time.sleep(WORK_S)
            losses.append(step(len(losses)))
            ends.append(time.time())
            if len(losses) % SHA_EVERY == 0:
                state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
                shas[len(losses)] = hashlib.sha256(state).hexdigest()
            if len(losses) % 20 == 0:
                progress = FOLDER / f"progress{RANK}"
                progress.write_text(f"{len(losses)} {time.time()}")
            if scenario == "again" and len(losses) in REMADE:
                break
        if going:
            time.sleep(0.3)  # gloo aborts when a peer closes first: all leave together
            dist.destroy_process_group()
    report = {
        "losses": losses,
        "shas": shas,
        "ends": ends,
        "status": capture.status(),
        "scripts": len(scripts),
    }
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(report))
    store.add("ended", 1)
    while store.add("ended", 0) < WORLD:
        time.sleep(0.02)
    time.sleep(0.2)
    os._exit(0)  # gloo may abort an ordinary exit


if __name__ == "__main__":
    main()
