#!/usr/bin/env python
"""What following one worker's calls costs: time a call, memory, and time to find long periods.

    python benchmarks/tracking.py

Prints a line a stream: calls, microseconds of processor time a call when records are read in
blocks of 500 (a busy job read ten times a second), the share of a core at 5,000 calls a second,
peak memory; and for a period of 100,000 calls how long the searches took and after how many
iterations it was followed. Exits with 1 where a bound is missed: 10 µs a call once followed,
30 s in all for the long period.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the bounds are of one core

import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.track.streams import (  # noqa: E402
    OPS,
    Call,
    Stretch,
    ddp,
    every,
    fsdp,
    hybrid,
    play,
    scalars,
    start_up,
)

from failslow.stats.period import find_period  # noqa: E402  # the repository root comes first
from failslow.track import Tracker  # noqa: E402

BLOCK = 500
BOUND_US = 10.0
BOUND_LONG_S = 30.0


def cost(calls: NDArray[np.void], block: int = BLOCK) -> tuple[float, float, Tracker]:
    """(µs a call over the whole stream, µs a call over its second half, the tracker)."""
    tracker = Tracker(ops=OPS)
    half, spent = 0.0, 0.0
    for begin in range(0, len(calls), block):
        start = time.process_time()
        tracker.update(calls[begin : begin + block])
        took = time.process_time() - start
        spent += took
        if begin >= len(calls) // 2:
            half += took
    return spent / len(calls) * 1e6, half / (len(calls) - len(calls) // 2) * 1e6, tracker


def peak_mib(calls: NDArray[np.void]) -> float:
    """Most memory the tracker held, beyond the records themselves."""
    tracemalloc.start()
    cost(calls)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def main() -> int:
    """Print the table; 1 when a bound is missed."""
    streams = {
        "ddp, 3 calls": [start_up(), *[ddp()] * 20_000],
        "fsdp, 98 calls": [start_up(), *[Stretch(fsdp(32))] * 800],
        "tp pp dp, 642 calls": [start_up(), *[Stretch(hybrid(64, first_stage=False))] * 120],
        "fsdp, evaluation every 10": [
            start_up(),
            *every(800, 10, Stretch(fsdp(32)), scalars(100)),
        ],
    }
    missed = False
    titles = ("calls", "marks", "µs/call", "later", "core", "MiB")
    print(f"{'stream':28}" + "".join(f"{title:>9}" for title in titles))
    for name, stretches in streams.items():
        played = play(stretches)
        for marks, calls in (("yes", played.calls), ("no", played.unmarked)):
            whole, later, tracker = cost(calls)
            missed |= later > BOUND_US or tracker.state.phase != "locked"
            print(
                f"{name:28}{len(calls):9}{marks:>9}{whole:9.2f}{later:9.2f}"
                f"{later * 5000 / 1e6:9.2%}{peak_mib(calls[: 1 << 16]):9.1f}",
                flush=True,
            )
    rng = np.random.default_rng(0)
    unit = [Call("allreduce_", int(size) * 1000) for size in rng.integers(1, 300, 100_000)]
    played = play([start_up(), *[Stretch(unit, 40.0)] * 7])
    calls = played.unmarked
    symbols = np.unique(calls["size_bytes"], return_inverse=True)[1]
    start = time.process_time()
    assert find_period(symbols[: 4 * 100_000]) == 100_000
    once = time.process_time() - start
    tracker = Tracker(ops=OPS)
    start = time.process_time()
    locked_s = locked_at = None
    for begin in range(0, len(calls), BLOCK):
        block = calls[begin : begin + BLOCK]
        tracker.update(block)
        if locked_s is None and tracker.state.period_calls == 100_000:
            locked_s = time.process_time() - start
            locked_at = int(np.searchsorted(played.ends_s, block["start_ns"][-1] / 1e9))
    if locked_s is None:
        print("period of 100,000 calls: not found")
        return 1
    print(
        f"period of 100,000 calls: find_period on 400,000 symbols {once:.2f} s; followed after "
        f"{locked_at} iterations, {locked_s:.1f} s of work in all"
    )
    missed |= locked_s > BOUND_LONG_S
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
