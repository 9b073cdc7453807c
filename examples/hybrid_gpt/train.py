"""Train a small GPT by pipeline, data and tensor parallelism.

    torchrun --nproc-per-node 4 examples/hybrid_gpt/train.py --pp 2 --dp 2 --steps 50

In: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the options. Out: a line for every tenth step
from rank 0, and the files asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import failslow
from data import Batches, read_corpus
from layout import Grid, Layout
from model import Shape
from trainer import Trainer
from work import Work


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says, checked."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the Python library's text.")
    add = parser.add_argument
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp", type=int, default=1, help="data-parallel replicas")
    add("--tp", type=int, default=1, help="tensor-parallel shards")
    add("--steps", type=int, default=100)
    add("--seconds", type=float, help="end then, if sooner, or at SIGTERM: all after the same step")
    add("--micro-batches", type=int, default=8, help="of a step, over all replicas")
    add("--sequences", type=int, default=4, help="of a micro-batch")
    add("--length", type=int, default=64, help="bytes of a sequence")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--learning-rate", type=float, default=1e-3)
    add("--clip", type=float, default=1.0, help="global norm of the gradients; 0: no limit")
    add("--seed", type=int, default=0)
    add("--ragged", action="store_true", help="micro-batches differ in tokens that count")
    add("--epoch-steps", type=int, default=0, help="every so many steps the batch is partly full")
    add("--work-ms", type=float, default=0.0, help="compute added to each micro-batch and stage")
    add("--dilute", type=float, default=4.0, help="of the added compute: sleep over products")
    add("--sleep", choices=["fixed", "follow"], default="fixed", help="see work.py")
    add("--losses", type=Path, metavar="FILE", help="the losses, as a JSON list; a .jsonl grows")
    add("--step-times", type=Path, metavar="FILE", help="seconds of each step, as a JSON list")
    add("--checkpoint", type=Path, metavar="FOLDER", help="resume from it and save there")
    add("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: only at the end")
    chosen = parser.parse_args(arguments)
    world = int(os.environ["WORLD_SIZE"])
    if chosen.pp * chosen.dp * chosen.tp != world:
        parser.error(
            f"pp {chosen.pp} × dp {chosen.dp} × tp {chosen.tp} is not the world size {world}"
        )
    if chosen.layers < chosen.pp or chosen.heads % chosen.tp:
        parser.error("give a layer to each stage, and heads that divide by tp")
    least = chosen.pp * chosen.dp * (8 / 5 if chosen.epoch_steps else 1)
    if chosen.micro_batches < least:
        parser.error(f"--micro-batches must be at least {least:.0f}: one a stage and replica")
    return chosen


def until(trainer: Trainer, seconds: float | None) -> Callable[[], None]:
    """To be called after each step: training ends so many seconds from now, or at SIGTERM."""
    if seconds is None:
        return lambda: None
    end_s = time.monotonic() + seconds
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "wish", "told"))

    def look() -> None:
        if time.monotonic() >= end_s:
            trainer.wish = trainer.wish or "time"

    return look


def write(path: Path | None, values: list[float]) -> None:
    """The file of a finished run, if there is to be one; a .jsonl has grown already."""
    if path and path.suffix != ".jsonl":
        path.write_text(json.dumps(values), encoding="ascii")


def main() -> None:
    """Train."""
    chosen = options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    layout = Layout(pp=chosen.pp, dp=chosen.dp, tp=chosen.tp)
    shape = Shape(
        layers=chosen.layers,
        width=chosen.width,
        heads=chosen.heads,
        length=chosen.length,
        dropout=chosen.dropout,
    )
    batches = Batches(
        read_corpus(),
        sequences=chosen.sequences,
        length=chosen.length,
        microbatches=chosen.micro_batches,
        seed=chosen.seed,
        ragged=chosen.ragged,
        epoch_steps=chosen.epoch_steps,
    )
    grid = Grid.build(layout, tuple(range(layout.workers)), device.type)
    trainer = Trainer(
        grid=grid,
        shape=shape,
        batches=batches,
        device=device,
        learning_rate=chosen.learning_rate,
        clip=chosen.clip,
        seed=chosen.seed,
    )
    if chosen.work_ms:
        trainer.work = Work(
            chosen.work_ms / 1e3, chosen.dilute, follow=chosen.sleep == "follow", device=device
        )
    first = checkpoint.load(trainer, chosen.checkpoint) if chosen.checkpoint else 0

    def save(done: int) -> None:
        checkpoint.save(trainer, chosen.checkpoint, done)

    coordinator = failslow.Coordinator(
        chosen.micro_batches,
        mesh=grid.mesh,
        model=trainer.stage,
        gradients="sum",
        rebuild=trainer.rebuild,
        state=trainer.state,
        move=trainer.move,
        checkpoint=save if chosen.checkpoint else None,
    )
    look = until(trainer, chosen.seconds)
    losses: list[float] = []
    times_s: list[float] = []
    for step in range(first, chosen.steps):
        begin_s = time.perf_counter()
        with coordinator.step(step, batches.size(step)) as share:
            losses.append(trainer.step(step, share, share.size))
        times_s.append(time.perf_counter() - begin_s)
        if rank == 0 and chosen.losses and chosen.losses.suffix == ".jsonl":
            with chosen.losses.open("a", encoding="ascii") as file:
                file.write(f"{losses[-1]!r}\n")
        if rank == 0 and step % 10 == 0:
            print(f"step {step:5d}  loss {losses[-1]:.4f}  {times_s[-1] * 1e3:.1f} ms", flush=True)
        done, every = step + 1, chosen.checkpoint_every
        if chosen.checkpoint and (done == chosen.steps or (every and done % every == 0)):
            save(done)
        if coordinator.stop or trainer.end:
            break
        look()

    print(f"ended: {trainer.end or 'steps'}", flush=True)
    if rank == 0:
        write(chosen.losses, losses)
        write(chosen.step_times, times_s)
    # gloo aborts where a peer closes first: all leave together, past the interpreter's own exit
    dist.barrier()
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
