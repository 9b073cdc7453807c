"""Workers change places: state moved in memory against a checkpoint, with and without restart.

In: nothing; four workers on this machine, 256 MB of state each (parameters and AdamW's moments),
all of which change places, in two pairs. Out: seconds and ratios, or `--json`:

    python benchmarks/move.py                            # about two minutes on two idle cores

move: group for the move, `swap_state`, old groups and mesh replaced, state put into the model;
once read from the other worker's memory, as on one machine, once sent, as between machines.
checkpoint: saved, flushed to disk (fsync), read back at the new place and put into the model, by
torch.distributed.checkpoint and by plain torch.save. The reader is another host in earnest, so what
the writer's page cache holds is dropped first (--warm: it is not).
restart: processes started anew until they have read the checkpoint, plus the saving; what a job
pays that cannot change places otherwise, without the scheduler's own delays. Every round measures
all of them, in an order that alternates; the slowest worker counts, medians are shown.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from failslow.mitigate.move import swap_state, transfer_group
from failslow.mitigate.move_state import put_state, take_state
from failslow.mitigate.rebuild import LiveGrid

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "capture"))

from job_launch import launch  # noqa: E402  # its folder is on the path only now

WORLD, SIZES = 4, (2, 2, 1)
EXCHANGED = (1, 0, 3, 2)
WIDTH = 1024
MOVES = ("move", "move over sockets")
CHECKPOINTS = ("checkpoint (distributed)", "checkpoint (torch.save)")
KINDS = MOVES + CHECKPOINTS


def build(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stage whose parameters and moments take about so much together."""
    layer_bytes = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    layers = max(1, round(megabytes * 1e6 / layer_bytes))
    with torch.device("cpu"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


class Place:
    """One worker and its state, marked with the position it belongs to."""

    def __init__(self, megabytes: float, folder: Path, *, warm: bool) -> None:
        self.folder, self.warm = folder, warm
        self.model, self.optimizer = build(megabytes)
        self.grid = LiveGrid.build(range(WORLD), sizes=SIZES, device_type="cpu", timeout_s=120.0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(dist.get_rank()))

    @property
    def position(self) -> int:
        return self.grid.placement.index(dist.get_rank())

    def state(self) -> dict[str, Any]:
        return take_state(self.model, self.optimizer)

    def adopt(self, state: dict[str, Any], placement: tuple[int, ...]) -> None:
        self.grid = self.grid.moved(placement)
        put_state(state, self.model, self.optimizer)

    def check(self) -> None:
        held = next(self.model.parameters())
        assert bool((held == self.position).all()), "the state is not that of the position"

    def move(self, placement: tuple[int, ...], *, near: bool = True) -> None:
        with transfer_group(120.0) as group:
            moved = swap_state(
                self.state(),
                placement_now=self.grid.placement,
                placement_new=placement,
                group=group,
                limit_s=120.0,
                near=near,
            )
        self.adopt(moved.state, placement)

    def distributed_checkpoint(self, placement: tuple[int, ...]) -> None:
        save_distributed(self.state(), self.position, self.folder / "dcp")
        self.forget()
        state = self.state()
        load_distributed(state, placement.index(dist.get_rank()), self.folder / "dcp")
        self.adopt(state, placement)

    def forget(self) -> None:
        """All have written; what is read from now on comes from the disk."""
        dist.barrier()
        if not self.warm:
            drop_cached(self.folder)
            dist.barrier()

    def plain_checkpoint(self, placement: tuple[int, ...]) -> None:
        target = self.folder / f"{self.position}.pt"
        with target.open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self.forget()
        source = self.folder / f"{placement.index(dist.get_rank())}.pt"
        self.adopt(torch.load(source, weights_only=True), placement)


def drop_cached(folder: Path) -> None:
    """Forget the pages of all files there that are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save_distributed(state: dict[str, Any], position: int, folder: Path) -> None:
    """Every worker its position's part; flushed to the disk, as the writer does by default."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    state_dict_saver.save({str(position): state}, checkpoint_id=folder)


def load_distributed(state: dict[str, Any], position: int, folder: Path) -> None:
    """Into the tensors of `state`."""
    state_dict_loader.load({str(position): state}, checkpoint_id=folder)


def timed(act: Callable[[], None]) -> float:
    """Seconds from when all workers are ready until all are done."""
    dist.barrier()
    begin_s = time.perf_counter()
    act()
    took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def worker(options: argparse.Namespace) -> None:
    """Measure, or, started anew, read the checkpoint and say when it is done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Place(options.megabytes, options.folder, warm=options.warm)
    gc.collect()
    gc.freeze()  # torch's own objects need no looking through at every move
    report: dict[str, Any] = {}
    if options.resume:
        state = place.state()
        read_s = timed(lambda: load_distributed(state, place.position, options.folder / "dcp"))
        put_state(state, place.model, place.optimizer)
        place.check()
        dist.barrier()
        report = {"ready_s": time.time(), "read_s": read_s}
    else:
        acts: dict[str, Callable[[tuple[int, ...]], None]] = {
            MOVES[0]: place.move,
            MOVES[1]: partial(place.move, near=False),
            CHECKPOINTS[0]: place.distributed_checkpoint,
            CHECKPOINTS[1]: place.plain_checkpoint,
        }
        took: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds + 1):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                home = place.grid.placement == tuple(range(WORLD))
                placement = EXCHANGED if home else tuple(range(WORLD))
                seconds = timed(partial(acts[kind], placement))
                place.check()
                if number:  # the first round warms up allocators, connections and caches
                    took[kind].append(seconds)
        if place.grid.placement != tuple(range(WORLD)):
            place.move(tuple(range(WORLD)))
        save_s = timed(
            lambda: save_distributed(place.state(), place.position, options.folder / "dcp")
        )
        tensors = place.state()["tensors"].values()
        size = 3 * sum(t.numel() * t.element_size() for t in tensors)
        place.forget()
        report = {"took_s": took, "save_s": save_s, "state_bytes": size}
    if dist.get_rank() == 0:
        (options.folder / "report.json").write_text(json.dumps(report), encoding="ascii")
    dist.barrier()
    time.sleep(0.3)
    os._exit(0)  # gloo aborts now and then where a peer has closed first


def measure(
    megabytes: float, rounds: int, restarts: int, folder: Path, *, warm: bool
) -> dict[str, Any]:
    """Everything the report says."""
    command = [__file__, "--worker", "--megabytes", str(megabytes), "--rounds", str(rounds)]
    command += ["--folder", str(folder), *(["--warm"] if warm else [])]

    def run(*more: str) -> tuple[float, dict[str, Any]]:
        begin_s = time.time()
        with launch([*command, *more], world=WORLD, watch=False) as job:
            job.wait(560.0)
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return begin_s, report

    _, report = run()
    restarted = []
    for _ in range(restarts):
        begin_s, again = run("--resume")
        restarted.append(again["ready_s"] - begin_s + report["save_s"])
    medians = {kind: statistics.median(seconds) for kind, seconds in report["took_s"].items()}
    took = report["took_s"]
    ratios = {
        move: {
            kind: statistics.median(b / a for a, b in zip(took[move], took[kind], strict=True))
            for kind in CHECKPOINTS
        }
        for move in MOVES
    }
    if restarted:
        for move in MOVES:
            ratios[move]["checkpoint, restart"] = statistics.median(restarted) / medians[move]
    return {
        "workers": WORLD,
        "state_mb": report["state_bytes"] / 1e6,
        "rounds": rounds,
        "median_s": medians,
        "restart_s": statistics.median(restarted) if restarted else None,
        "ratios": ratios,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=260.0, help="state of one worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to compare with; a temporary one")
    parser.add_argument("--warm", action="store_true", help="read from the writer's page cache")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="failslow-move-") as folder:
        result = measure(
            options.megabytes, options.rounds, options.restarts, Path(folder), warm=options.warm
        )
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{WORLD} workers, {result['state_mb']:.0f} MB of state each, {options.rounds} rounds")
    for kind, seconds in result["median_s"].items():
        print(f"  {kind:28s} {seconds:7.3f} s")
    if result["restart_s"] is not None:
        print(f"  {'checkpoint and restart':28s} {result['restart_s']:7.3f} s")
    for move, ratios in result["ratios"].items():
        for kind, ratio in ratios.items():
            print(f"{move} is {ratio:.1f} x faster than {kind} and load")


if __name__ == "__main__":
    main()
