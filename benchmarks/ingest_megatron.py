"""How fast a long Megatron-LM log is read, on one core, and with how much memory.

    python benchmarks/ingest_megatron.py --lines 1000000

writes such a log to a temporary folder and prints the seconds and the peak resident memory of
reading it. `write_megatron_log` makes logs with known slow stretches for other benchmarks.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

from failslow.ingest import read_log

__all__ = ["SLOW_STRETCHES", "write_megatron_log"]

SLOW_STRETCHES = ((0.2, 0.23, 1.4), (0.5, 0.52, 1.25), (0.8, 0.801, 2.0))
"""(begin, end, slowdown) of the stretches a log has by default; begin and end as its shares."""


def write_megatron_log(
    path: Path,
    lines: int,
    seed: int = 0,
    *,
    iteration_s: float = 0.571,
    noise: float = 0.01,
    stretches: Sequence[tuple[float, float, float]] = SLOW_STRETCHES,
) -> list[tuple[int, int, float]]:
    """Write a log of `lines` iterations; return its slow stretches.

    A stretch is (first slow step, first step after it, slowdown).
    noise: standard deviation of the log of the iteration time. The first iteration takes 60 s.
    """
    random = np.random.default_rng(seed)
    duration_s = iteration_s * np.exp(noise * random.standard_normal(lines))
    slow = []
    for begin, end, slowdown in stretches:
        first, after = int(begin * lines), int(end * lines)
        duration_s[first:after] *= slowdown
        slow.append((first + 1, after + 1, slowdown))
    duration_s[0] = 60.0
    start = datetime(2025, 3, 4, 10, tzinfo=timezone.utc).replace(tzinfo=None)
    end_s = np.cumsum(duration_s)
    with path.open("w", encoding="utf-8") as log:
        for index in range(lines):
            now = (start + timedelta(seconds=float(end_s[index]))).isoformat(" ", "microseconds")
            log.write(
                f" [{now}] iteration {index + 1:8d}/{lines:8d} | consumed samples: "
                f"{(index + 1) * 256:12d} | elapsed time per iteration (ms): "
                f"{1000 * duration_s[index]:.1f} | throughput per GPU (TFLOP/s/GPU): 297.7 | "
                f"learning rate: 1.500000E-04 | global batch size:   256 | lm loss: 2.217231E+00 | "
                f"loss scale: 1.0 | grad norm: 0.486 | number of skipped iterations:   0 | "
                f"number of nan iterations:   0 |\n"
            )
    return slow


def main() -> None:
    """Write a log, read it, print seconds and peak memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "megatron.log"
        write_megatron_log(path, options.lines, options.seed)
        size_bytes = path.stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        series = read_log(path)
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{len(series):,} records from {size_bytes / 2**20:,.0f} MiB in {wall_s:.1f} s "
        f"({cpu_s:.1f} s of one core); peak {peak_mib:,.0f} MiB, "
        f"{before / 1024:,.0f} before reading"
    )


if __name__ == "__main__":
    main()
