"""Real workers that change places: `python move_job.py SCENARIO… --out FOLDER`.

In: RANK and its kin; PYTHONPATH with the repository and examples/hybrid_gpt. Out:
FOLDER/rank<r>.json, {"layout 2x2x1": {…}, "states": {…}, …}.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import hashlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.mitigate.made_states import DTYPES, LAYOUTS, made_tensor, same_bits
from torch.distributed.tensor import DTensor

from data import Batches, read_corpus
from failslow.errors import MoveError
from failslow.mitigate import move_wire
from failslow.mitigate.move import Moved, swap_state, transfer_group
from failslow.mitigate.move_state import put_rng, put_state, take_rng, take_state
from failslow.mitigate.rebuild import LiveGrid
from layout import Layout
from model import Shape
from trainer import Trainer

STEPS, MICROBATCHES = 12, 8


class _Grid:
    """What the example's trainer asks of a grid."""

    def __init__(self, live: LiveGrid) -> None:
        self.layout = Layout(*live.sizes)
        self.stage, self.replica, self.groups = live.stage, live.replica, live.groups
        self.tensor_mesh = live.along("tp")


class Training:
    """The example's trainer in a grid whose workers may change places."""

    def __init__(
        self, sizes: tuple[int, int, int], *, limit_s: float = 60.0, near: bool = True
    ) -> None:
        self.limit_s, self.near = limit_s, near
        self.grid = LiveGrid.build(
            range(dist.get_world_size()), sizes=sizes, device_type="cpu", timeout_s=100.0
        )
        self.trainer = Trainer(
            grid=_Grid(self.grid),  # type: ignore[arg-type]  # it has what is asked for
            shape=Shape(length=32),
            batches=Batches(
                read_corpus(100_000), sequences=2, length=32, microbatches=MICROBATCHES, seed=3
            ),
            device=torch.device("cpu"),
            learning_rate=1e-2,
            clip=1.0,
            seed=5,
        )
        self.losses: list[float] = []
        self.draws: list[tuple[int, int, list[float]]] = []
        # alike on the shards of a replica's stage
        seed = 100 * self.grid.stage + self.grid.replica
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global one is what is tested
        random.seed(seed)

    def run(self, steps: int, swaps: dict[int, Sequence[int]] | None = None) -> dict[str, Any]:
        """`steps` more steps, with changes of place before some of them."""
        moves: list[float] = []
        for _ in range(steps):
            step = len(self.losses)
            if swaps and step in swaps:
                begin_s = time.perf_counter()
                self.change_places(swaps[step])
                moves.append(time.perf_counter() - begin_s)
            each = MICROBATCHES // self.grid.sizes[1]
            share = range(each * self.grid.replica, each * (self.grid.replica + 1))
            self.losses.append(self.trainer.step(step, share, MICROBATCHES))
            drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]  # noqa: NPY002
            self.draws.append((self.grid.stage, self.grid.replica, drawn))
        return {"losses": self.losses, "draws": self.draws, "moves_s": moves}

    def change_places(self, placement: Sequence[int]) -> Moved:
        state = take_state(self.trainer.stage, self.trainer.optimizer, rng=take_rng())
        with transfer_group(self.limit_s) as group:
            moved = swap_state(
                state,
                placement_now=self.grid.placement,
                placement_new=placement,
                group=group,
                tp=self.grid.sizes[2],
                limit_s=self.limit_s,
                chunk_bytes=8192,
                near=self.near,
            )
        trainer = self.trainer
        del state, trainer.stage, trainer.parameters, trainer.optimizer, trainer.grid
        trainer._pipeline = None
        self.grid = self.grid.moved(placement)
        trainer.grid = _Grid(self.grid)  # type: ignore[assignment]
        trainer._build()
        put_state(moved.state, trainer.stage, trainer.optimizer)
        put_rng(moved.state["extras"]["rng"])
        return moved

    def fingerprint(self) -> str:
        """Of everything that makes up this worker's state."""
        state = take_state(self.trainer.stage, self.trainer.optimizer, rng=take_rng())
        digest = hashlib.sha256()
        for tensor in [*state["tensors"].values(), *_tensors(state["optimizer"])]:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def whole_shards(self) -> float:
        """How far gathered parameters are from this worker's shard of them: 0, or groups lie."""
        worst = 0.0
        for parameter in self.trainer.parameters.values():
            if isinstance(parameter, DTensor):
                full, shard = parameter.full_tensor().detach(), parameter.to_local().detach()
                dim = parameter.placements[0].dim  # type: ignore[attr-defined]
                mine = full.chunk(self.grid.sizes[2], dim)[self.grid.shard]
                worst = max(worst, float((mine - shard).abs().max()))
        return worst

    def close(self) -> None:
        trainer = self.trainer
        del trainer.stage, trainer.parameters, trainer.optimizer
        trainer._pipeline = None
        self.grid.close()


def _tensors(rows: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [value for row in rows for value in row.values() if isinstance(value, torch.Tensor)]


# -- scenarios ---------------------------------------------------------------------------------


def layout(sizes: tuple[int, int, int], swaps: dict[int, Sequence[int]]) -> dict[str, Any]:
    """The same training without and with changes of place."""
    report: dict[str, Any] = {}
    for name, plan in (("stayed", None), ("moved", swaps)):
        training = Training(sizes)
        report[name] = training.run(STEPS, plan)
        report[name]["placement"] = list(training.grid.placement)
        report[name]["misplaced"] = training.whole_shards()
        training.close()
    return report


def states() -> dict[str, Any]:
    """Random states and permutations; every worker makes all of them, so it knows what is due."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong, moved, received = [], 0, 0
    for case in range(6):
        draw = random.Random(case)
        now, new = (draw.sample(range(world), world) for _ in range(2))
        all_states = [_made_state(draw) for _ in range(world)]
        kept = copy.deepcopy(all_states[rank])
        with transfer_group(60.0) as group:
            result = swap_state(
                all_states[rank],
                placement_now=now,
                placement_new=new,
                group=group,
                chunk_bytes=draw.choice([8192, 50_000, 1 << 24]),
                near=case % 2 == 0,
            )
        due = all_states[now[new.index(rank)]]
        if not same_bits(result.state, due) or not same_bits(all_states[rank], kept):
            wrong.append(case)
        moved += now.index(rank) != new.index(rank)
        received += result.received_bytes
    return {"wrong": wrong, "moved": moved, "received": received}


def _made_state(draw: random.Random) -> dict[str, Any]:
    tensors = [
        made_tensor(
            draw.choice(DTYPES),
            [draw.randrange(40) for _ in range(draw.randrange(4))],
            draw.choice(LAYOUTS),
            draw.randrange(1 << 30),
        )
        for _ in range(draw.randrange(12))
    ]
    large = made_tensor(torch.float32, [draw.randrange(1, 300), 333], "plain", draw.randrange(99))
    return {"many": {3: tensors}, "large": large, "tied": [large, large.T], "n": draw.random()}


class _Spoilt:
    """Counts what a wire posts and lets something happen at one of them."""

    def __init__(self, at: int, happen: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        self._post = move_wire.GroupWire.post
        self._at, self._happen, self._posts = at, happen, 0

    def __enter__(self) -> None:
        spoilt = self

        def post(wire: Any, *pair: Any) -> Any:
            spoilt._posts += 1
            if spoilt._posts == spoilt._at:
                pair = spoilt._happen(pair)
            return spoilt._post(wire, *pair)

        setattr(move_wire.GroupWire, "post", post)  # noqa: B010 - a method

    def __exit__(self, *_: object) -> None:
        setattr(move_wire.GroupWire, "post", self._post)  # noqa: B010 - a method


def _flip(pair: tuple[Any, ...]) -> tuple[Any, ...]:
    (data, to), incoming = pair
    damaged = data.clone()
    damaged[len(damaged) // 2] ^= 4
    return (damaged, to), incoming


def _oversleep(pair: tuple[Any, ...]) -> tuple[Any, ...]:
    time.sleep(2.5)
    return pair


def faults() -> dict[str, Any]:
    """Each fault befalls one worker in the middle of training; then a move that succeeds."""
    training = Training((2, 2, 1), limit_s=1.0, near=False)
    training.run(3)
    report: dict[str, Any] = {}
    for victim, (name, spoilt) in enumerate(
        {"damage": _Spoilt(20, _flip), "stall": _Spoilt(20, _oversleep), "memory": None}.items()
    ):
        before, begin_s = training.fingerprint(), time.perf_counter()
        error = ""
        try:
            if dist.get_rank() != victim:
                training.change_places([1, 2, 3, 0])
            elif spoilt is None:
                with _little_memory():
                    training.change_places([1, 2, 3, 0])
            else:
                with spoilt:
                    training.change_places([1, 2, 3, 0])
        except MoveError as caught:
            error = str(caught)
        report[name] = {
            "error": error,
            "took_s": time.perf_counter() - begin_s,
            "kept": training.fingerprint() == before,
        }
        dist.barrier()
        training.run(1)  # the training's own groups are well
    training.limit_s = 60.0
    report["placement"] = training.change_places([1, 2, 3, 0]).position
    report["losses"] = training.run(STEPS - 6)["losses"]
    training.close()
    return report


class _little_memory:
    """Memory cannot be had for real, whatever is free by the books."""

    def __enter__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self._inbox = swap_state.__globals__["Inbox"]

        def inbox(specs: Any, *rest: Any) -> Any:
            resource.setrlimit(resource.RLIMIT_AS, (used, self._limits[1]))
            torch.empty(1 << 32, dtype=torch.uint8)  # what a state of 4 GB would ask for
            return self._inbox(specs, *rest)

        swap_state.__globals__["Inbox"] = inbox

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._limits)
        swap_state.__globals__["Inbox"] = self._inbox


def leaks(sizes: tuple[int, int, int], swaps: int = 20) -> dict[str, Any]:
    """What a process holds after each of many changes of place, a step between them."""
    training = Training(sizes)
    training.run(1)
    width = sizes[2]
    held = []
    for number in range(swaps + 4):
        blocks = [list(training.grid.placement[i : i + width]) for i in range(0, 4, width)]
        at = number % (len(blocks) - 1)
        blocks[at], blocks[at + 1] = blocks[at + 1], blocks[at]
        training.change_places([rank for block in blocks for rank in block])
        training.run(1)
        gc.collect()
        held.append(_held())
    training.close()
    return {"held": held}


def _held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "rss_kb": pages * resource.getpagesize() // 1024,
    }


def killed(*, near: bool) -> dict[str, Any]:
    """The last rank is killed in the middle of a move."""
    rank, world = dist.get_rank(), dist.get_world_size()
    survivors = dist.new_group(list(range(world - 1)))
    state = {"w": torch.full((4_000_000,), float(rank))}
    new = [*range(1, world), 0]
    begin_s, error = time.perf_counter(), ""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    if near and rank == world - 1:
        swap_state.__globals__["collect"] = die
    at = 20 if rank == world - 1 and not near else -1
    try:
        with transfer_group(60.0) as group, _Spoilt(at, die):
            swap_state(
                state,
                placement_now=range(world),
                placement_new=new,
                group=group,
                chunk_bytes=1 << 18,
                near=near,
            )
    except MoveError as caught:
        error = str(caught)
    took_s = time.perf_counter() - begin_s
    total = torch.ones(1)
    dist.all_reduce(total, group=survivors)
    return {
        "error": error,
        "took_s": took_s,
        "kept": bool((state["w"] == rank).all()),
        "survivors": total.item(),
    }


def dropped() -> dict[str, Any]:
    """The last rank is killed, the one before it leaves, and the others wait for that one alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    leaver, begin_s, error = world - 2, time.perf_counter(), ""
    survivors = dist.new_group(list(range(world - 1)))
    with transfer_group(60.0) as group:
        wire = move_wire.GroupWire(group)
        wire.gather(move_wire.word(ok=True), 60.0)  # all are connected
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        source = world - 1 if rank == leaver else leaver
        _, awaited = wire.post(None, (torch.empty(4, dtype=torch.uint8), source))
        assert awaited is not None
        try:
            awaited.wait(60.0)
        except RuntimeError as caught:
            error = str(caught)
            with suppress(Exception):
                wire.drop()
        took_s = time.perf_counter() - begin_s
        dist.barrier(group=survivors)  # its end, too, would tell the others
        return {"error": error, "took_s": took_s}


LOSES_A_WORKER = {"killed", "killed near", "dropped"}
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "layout 2x2x1": lambda: layout((2, 2, 1), {3: [1, 0, 2, 3], 6: [2, 0, 1, 3], 9: [3, 2, 0, 1]}),
    "layout 2x1x2": lambda: layout((2, 1, 2), {3: [2, 3, 0, 1], 6: [0, 1, 2, 3], 9: [2, 3, 0, 1]}),
    "layout 1x4x1": lambda: layout((1, 4, 1), {4: [1, 2, 3, 0], 8: [0, 1, 3, 2]}),
    "layout 2x2x2": lambda: layout(
        (2, 2, 2), {3: [2, 3, 0, 1, 4, 5, 6, 7], 7: [4, 5, 2, 3, 6, 7, 0, 1]}
    ),
    "states": states,
    "faults": faults,
    "leaks": lambda: leaks((2, 1, 2), swaps=6),
    "leaks pipeline": lambda: leaks((2, 2, 1)),
    "leaks tensor": lambda: leaks((2, 1, 2)),
    "killed": lambda: killed(near=False),
    "killed near": lambda: killed(near=True),
    "dropped": dropped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", choices=sorted(SCENARIOS), nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(240.0)  # a deadlock shows where it is
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {}
    for name in options.scenarios:
        begin_s = time.perf_counter()
        report[name] = SCENARIOS[name]()
        report[name]["took_s"] = report[name].get("took_s", time.perf_counter() - begin_s)
        print(f"{name}: {time.perf_counter() - begin_s:.1f} s", flush=True)
        if name not in LOSES_A_WORKER:
            dist.barrier()
    target = options.out / f"rank{dist.get_rank()}.json"
    target.with_suffix(".part").write_text(json.dumps(report), encoding="ascii")
    target.with_suffix(".part").rename(target)
    if LOSES_A_WORKER.isdisjoint(options.scenarios):
        dist.barrier()
    time.sleep(0.3)
    os._exit(0)  # gloo aborts now and then where a peer has closed first


if __name__ == "__main__":
    main()
