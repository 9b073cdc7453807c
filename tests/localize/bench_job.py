"""A worker that runs scripts on demand: rank and store from the environment, orders as files.

In: `order-<n>.json` in the folder {"script":…, "name":…, "absent":[…], "die_after_s":…}. Out:
`result-<n>-<rank>.json` {"results":…, "took_s":…, "changed":[…], "threads":[before, after],
"recorded":…, "sum":…}. "stop" as the script ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from failslow.capture import hook
from failslow.localize.benchmarks import describe_place, run_script


def _state() -> dict[str, Any]:
    """All that a script must leave alone."""
    store: Any = dist.distributed_c10d._get_default_store()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002  # a trainer's may be this one
        "python": repr(random.getstate()),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "store": str(store.timeout),
    }


def _wait_for(path: Path) -> dict[str, Any]:
    while not path.exists():
        time.sleep(0.01)
    order: dict[str, Any] = json.loads(path.read_text())
    return order


def _put(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def main() -> None:
    """Run until told to stop."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    os.environ.setdefault("FAILSLOW_CAPTURE_FOLDER", str(folder))
    recorder = hook.install()
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    # a trainer that has set about everything that can be set
    torch.manual_seed(7 + rank)
    random.seed(rank)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    ones = torch.ones(1000, device="cpu")
    dist.all_reduce(ones)
    _put(folder / f"place-{rank}.json", describe_place(rank, device))
    number = 0
    while True:
        order = _wait_for(folder / f"order-{number}.json")
        if order["script"] == "stop":
            break
        dist.barrier()  # starting together is a pause's business; here the barrier's
        before, threads = _state(), threading.active_count()
        recorded, start_s = recorder.ring.written if recorder.ring else 0, time.perf_counter()
        results: list[dict[str, Any]] = []
        if "die_after_s" in order and rank in order["dying"]:
            threading.Timer(order["die_after_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        if rank not in order.get("absent", ()):
            with contextlib.ExitStack() as stack:
                if order.get("odd_modes"):
                    stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
                    stack.enter_context(torch.device("meta"))
                    before = _state()
                results = run_script(
                    order["script"],
                    rank=rank,
                    world_size=world,
                    device=device,
                    name=order["name"],
                    **order.get("more", {}),
                )
                after = _state()
        else:
            after = _state()
        took_s = time.perf_counter() - start_s
        until_s = time.monotonic() + 10.0
        while threading.active_count() > threads and time.monotonic() < until_s:
            time.sleep(0.01)  # a thread that closes connections may be left to do so
        report = {
            "results": results,
            "took_s": took_s,
            "changed": [key for key in before if before[key] != after[key]],
            "threads": [threads, threading.active_count()],
            "recorded": (recorder.ring.written if recorder.ring else 0) - recorded,
        }
        if not order.get("dying"):  # training goes on
            ones.fill_(1.0)
            dist.all_reduce(ones)
            report["sum"] = float(ones[0])
        _put(folder / f"result-{number}-{rank}.json", report)
        number += 1
    os._exit(0)


if __name__ == "__main__":
    main()
