"""What watching costs a training job: paired, alternated, with a confidence interval.

In: nothing. Out: three tables, or `--json`: the cost of a call (against no hook, and above a
bare redispatch), and what a 2-worker DDP job and jobs of 500 calls a step lose. Within one
process the hook goes on and off in short blocks, A B B A, so that drift cancels; an estimate is
the median over pairs of neighbouring blocks, its interval a bootstrap of pairs. Wall time is
what counts, but on a shared machine it swings by percents; the CPU time that the training
thread spends more, over the step's wall time, is steady and bounds it from above (part of it
passes while the worker would wait anyway). --mode: default the best there is.

    python benchmarks/capture_overhead.py                    # about five minutes
    python benchmarks/capture_overhead.py --only calls
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "capture"))

from job_launch import launch  # noqa: E402  # its folder is on the path only now

CALLS = 100
"""Calls of one block: a fifth of a step of 500; the share is the same."""
JOBS = ("ddp", "calls_1ms", "calls_5ms")


def interval(pairs: NDArray[np.float64]) -> dict[str, float]:
    """Median of the pairs and its bootstrap 95 % interval."""
    random = np.random.default_rng(1)
    picks = random.integers(0, len(pairs), (4000, len(pairs)))
    low, high = np.percentile(np.median(pairs[picks], axis=1), [2.5, 97.5])
    return {"median": float(np.median(pairs)), "low": float(low), "high": float(high)}


def alternate(
    block: Callable[[], Any], on: Callable[[], None], off: Callable[[], None], pairs: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(unwatched, watched) block results, pair by pair, in the order A B B A."""
    gc.collect()
    gc.freeze()  # the collections below then have little to look at
    got: dict[bool, list[Any]] = {False: [], True: []}
    for index in range(pairs):
        for watched in (False, True) if index % 2 == 0 else (True, False):
            (on if watched else off)()
            gc.collect()  # what installing leaves behind is not a cost of watching
            got[watched].append(block())
    off()
    return np.array(got[False]), np.array(got[True])


# ---- workers


def calls_worker(out: Path, pairs: int, mode: str) -> None:
    """One rank: microseconds of a blocking one-element all_reduce, three ways."""
    import torch
    import torch.distributed as dist

    from failslow.capture import hook

    torch.set_num_threads(1)
    # On two cores the backend's thread sleeps and wakes in one of two rhythms, which a few µs
    # tip over; on one core what remains is the work.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    dist.init_process_group("gloo")
    tensor = torch.zeros(1)

    def block() -> float:
        took = np.empty(300)
        for index in range(len(took)):
            start = time.perf_counter_ns()
            dist.all_reduce(tensor)
            took[index] = time.perf_counter_ns() - start
        return float(np.median(took)) / 1e3

    libraries: list[Any] = []

    def bare_on() -> None:
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's
        overload = torch.ops.c10d.allreduce_.default
        redispatch = overload._handle.redispatch_boxed
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keys: Any, *args: Any) -> Any:
            return redispatch(keys & below, *args)

        library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)
        libraries.append(library)

    def bare_off() -> None:
        while libraries:
            libraries.pop()._destroy()

    def hook_on() -> None:
        bare_off()
        hook.install(mode)

    def hook_off() -> None:
        hook.uninstall()

    bare = alternate(block, bare_on, bare_off, pairs)
    full = alternate(block, hook_on, hook_off, pairs)

    def swap_to_bare() -> None:
        hook_off()
        bare_on()

    above = alternate(block, hook_on, swap_to_bare, pairs)
    bare_off()
    result = {
        "no hook": interval(full[0]),
        "bare redispatch, added": interval(bare[1] - bare[0]),
        "failslow, added": interval(full[1] - full[0]),
        "failslow above bare redispatch": interval(above[1] - above[0]),
    }
    out.write_text(json.dumps(result))


def job_worker(out: Path, job: str, pairs: int, mode: str) -> None:
    """One rank of a job: seconds a step, watched and not; both ranks switch together."""
    import torch
    import torch.distributed as dist

    from failslow.capture import hook

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = _ddp_step() if job == "ddp" else _many_calls_step(0.001 if job == "calls_1ms" else 0.005)
    steps = 3 if job == "ddp" else 1
    for _ in range(3):
        step()

    def block() -> tuple[float, float]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            step()
        return time.perf_counter() - start, time.thread_time() - cpu

    def on() -> None:
        hook.install(mode)
        dist.barrier()  # the ring is made here, once, not in a timed step

    off, on_ = alternate(block, on, hook.uninstall, pairs)
    if dist.get_rank() == 0:
        wall = float(np.median(off[:, 0]))
        result = {
            "step_ms": 1e3 * wall / steps * (1 if job == "ddp" else 500 / CALLS),
            "wall_added_pct": interval(100 * (on_[:, 0] / off[:, 0] - 1)),
            "cpu_added_pct": interval(100 * (on_[:, 1] - off[:, 1]) / wall),
        }
        out.write_text(json.dumps(result))
    dist.barrier()
    time.sleep(0.3)  # gloo aborts when a peer closes first


def _ddp_step() -> Callable[[], None]:
    import torch
    from torch import nn

    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    parallel = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    x = torch.randn(128, 512)

    def step() -> None:
        loss: torch.Tensor = parallel(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _many_calls_step(apart_s: float) -> Callable[[], None]:
    """Part of a step of 500 all_reduces, `apart_s` of this worker's own CPU time before each."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(256)
    square = torch.randn(128, 128)

    def step() -> None:
        for _ in range(CALLS):
            until = time.thread_time() + apart_s
            while time.thread_time() < until:
                square @ square
            dist.all_reduce(message)

    return step


# ---- launcher


def measure(what: str, world: int, pairs: int, mode: str) -> dict[str, Any]:
    """Run one worker job and read its result."""
    with tempfile.TemporaryDirectory(prefix="failslow-bench-") as name:
        out = Path(name) / "out.json"
        command = [__file__, "--worker", what, "--out", str(out)]
        arguments = [*command, "--pairs", str(pairs), "--mode", mode]
        with launch(arguments, world=world, watch=False) as job:
            job.wait(timeout_s=900)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def main() -> None:
    """Measure and print, or be one of the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("calls", *JOBS))
    parser.add_argument("--pairs", type=int, help="default: 60 of calls, 150 of DDP, 60 of others")
    parser.add_argument("--mode", default="", choices=("", "native", "dispatcher"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        if options.worker == "calls":
            calls_worker(options.out, options.pairs, options.mode)
        else:
            job_worker(options.out, options.worker, options.pairs, options.mode)
        os._exit(0)
    result = {}
    for what in [options.only] if options.only else ["calls", *JOBS]:
        pairs = options.pairs or {"ddp": 150}.get(what, 60)
        result[what] = measure(what, 1 if what == "calls" else 2, pairs, options.mode)
        if not options.json:
            show(what, result[what])
    if options.json:
        print(json.dumps(result))


def show(what: str, result: dict[str, Any]) -> None:
    """One table."""
    if what == "calls":
        print("a blocking 1-element all_reduce, µs (95 % interval)")
        for name, value in result.items():
            print(f"  {name:32} {value['median']:6.2f}  [{value['low']:.2f}, {value['high']:.2f}]")
        return
    print(f"{what}: step of {result['step_ms']:.1f} ms, watched (95 % interval)")
    for name in ("wall", "cpu"):
        added = result[f"{name}_added_pct"]
        print(f"  {name:5} {added['median']:+.2f} % [{added['low']:+.2f}, {added['high']:+.2f}]")


if __name__ == "__main__":
    main()
