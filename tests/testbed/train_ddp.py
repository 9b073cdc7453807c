"""A real data-parallel training job for the test bed: torch DDP over gloo.

In: plain RANK variables and the options below. Out: `rank{r}.jsonl` in --out, first a line about
the worker, then one an iteration, by this script's own clock (CLOCK_MONOTONIC, seconds):

    {"rank": 0, "pid": 4711, "compute_reps": 37}
    {"step": 0, "start_s": 812.401, "end_s": 812.507, "compute_s": 0.1, "sync_s": 0.006}

Diluted compute is one burst of matrix products in a sleep of a fixed multiple of what the burst
took: several workers fit on two cores, and a fault that stretches the burst stretches the whole.
Each rank's burst has its turn within the sleep, so that healthy workers do not meet on a core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=0, help="stop after so many; 0: no limit")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="stop after so long; 0: no limit"
    )
    parser.add_argument("--compute", choices=["diluted", "matmul"], default="diluted")
    parser.add_argument("--iteration-ms", type=float, default=100.0, help="healthy compute time")
    parser.add_argument("--dilution", type=float, default=4.0, help="sleep over burst, if diluted")
    parser.add_argument("--micro-batches", type=int, default=1, help="accumulated without a sync")
    parser.add_argument("--gradient-mb", type=float, default=1.0, help="reduced an iteration")
    parser.add_argument("--width", type=int, default=256, help="of the layers")
    parser.add_argument("--out", type=Path, default=os.environ.get("TESTBED_FOLDER", "."))
    arguments = parser.parse_args()
    if not arguments.steps and not arguments.seconds:
        parser.error("give --steps or --seconds: without either it would never end")
    return arguments


class _Model(nn.Module):
    """Three layers that cost time, and a vector that costs bandwidth."""

    def __init__(self, width: int, gradient_mb: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip
        self.vector = nn.Parameter(torch.zeros(max(1, round(gradient_mb * 1e6 / 4))))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean() + self.vector.mean()
        return loss


class _Compute:
    """The compute of one micro-batch, calibrated alike on all ranks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._left = torch.randn(arguments.width, arguments.width)
        self._dilution = arguments.dilution if arguments.compute == "diluted" else 0.0
        self._turn = dist.get_rank() / dist.get_world_size()
        whole_s = arguments.iteration_ms / 1e3 / arguments.micro_batches
        burst_s = whole_s / (1.0 + self._dilution)
        self._multiply(50)
        # CPU time: who shares the core does not matter; the best of several, the best of all ranks
        best_s = min(self._cost_s(20) for _ in range(8))
        agreed = torch.tensor([best_s])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        self.reps = max(1, round(burst_s / float(agreed)))
        self._last_burst_s = burst_s

    def _multiply(self, reps: int) -> None:
        for _ in range(reps):
            self._left @ self._left

    def _cost_s(self, reps: int) -> float:
        begin_s = time.thread_time()
        self._multiply(reps)
        return (time.thread_time() - begin_s) / reps

    def run(self) -> None:
        """The part of the sleep before this rank's turn, the burst, the rest of the sleep."""
        time.sleep(self._turn * self._dilution * self._last_burst_s)
        begin_s = time.monotonic()
        self._multiply(self.reps)
        self._last_burst_s = time.monotonic() - begin_s
        time.sleep((1.0 - self._turn) * self._dilution * self._last_burst_s)


def main() -> None:
    """Train until the steps or the seconds are over."""
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(_Model(arguments.width, arguments.gradient_mb))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, arguments.width)
    compute = _Compute(arguments)
    dist.barrier()
    begin_s = time.monotonic()
    stop = torch.zeros(1)
    step = 0
    with (arguments.out / f"rank{rank}.jsonl").open("w", buffering=1, encoding="utf-8") as out:
        about = {"rank": rank, "pid": os.getpid(), "compute_reps": compute.reps}
        out.write(json.dumps(about) + "\n")
        while not arguments.steps or step < arguments.steps:
            start_s = time.monotonic()
            compute_s = 0.0
            for micro in range(arguments.micro_batches):
                last = micro == arguments.micro_batches - 1
                with nullcontext() if last else model.no_sync():
                    loss = model(batch)
                    compute_begin_s = time.monotonic()
                    compute.run()
                    compute_s += time.monotonic() - compute_begin_s
                    sync_begin_s = time.monotonic()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if arguments.seconds:
                stop[0] = float(rank == 0 and time.monotonic() - begin_s > arguments.seconds)
                dist.all_reduce(stop)
            end_s = time.monotonic()
            row = {
                "step": step,
                "start_s": start_s,
                "end_s": end_s,
                "compute_s": round(compute_s, 6),
                "sync_s": round(end_s - sync_begin_s, 6),
            }
            out.write(json.dumps(row) + "\n")
            step += 1
            if stop.item():
                break
    # gloo aborts where a peer closes first: all leave together, past the interpreter's own exit
    dist.barrier()
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
