"""How fast a device multiplies matrices, and its host's processor and memory work.

In: type, size, how long. Out: a result, times in seconds:

    {"dtype":"float32","size":384,"seconds":0.00102,"min_s":0.00097,"median_s":0.00101,"repeats":243,
     "wall_s":0.25,"cpu_s":0.25,"queued_s":0.0,"throttled_s":0.0,"error":""}

Nothing of the trainer's is used or changed: matrices are filled by a generator of their own, and
are gone afterwards. Devices are timed with CUDA events, on a stream of our own.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from failslow.localize.benchmarks.accounts import Account, Books

__all__ = ["check_host", "gemm", "summarize"]

_MOST_SAMPLES = 4096
_COPY_BYTES = 16 << 20
_HELD_LONGER = 2.5
"""A quota runs and holds a process by turns, 100 ms each two: a window of few turns that always
ends with a hold measured 5 where 3.3 was true."""


def gemm(
    *, dtype: str, size: int, repeats: int, least_s: float, limit_s: float, device: torch.device
) -> dict[str, Any]:
    """Square products back to back, for `least_s` seconds and `repeats` times at least, but no
    longer than `limit_s`. Raises ValueError for an unknown type or too little free memory."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of torch")
    needed = 3 * size * size * kind.itemsize
    free = _free_bytes(device)
    if free < 1.5 * needed:
        raise ValueError(f"{free >> 20} MB are free on {device}; the matrices need {needed >> 20}")
    generator = torch.Generator(device=device).manual_seed(size)
    # random numbers: a device draws less power, and throttles less, on constants
    one, two = (
        torch.rand((size, size), generator=generator, device=device, dtype=torch.float32)
        .sub_(0.5)
        .to(kind)
        for _ in range(2)
    )
    out = torch.empty((size, size), dtype=kind, device=device)

    def multiply() -> None:
        torch.mm(one, two, out=out)

    about = {"dtype": dtype, "size": size}
    if device.type == "cuda":
        times_s, account = _time_on_device(multiply, repeats, least_s, limit_s, device)
    else:
        times_s, account = _time(multiply, repeats, least_s, limit_s)
    return {**about, **summarize(times_s, account)}


def check_host(*, limit_s: float) -> list[dict[str, Any]]:
    """A core's speed (checksums, 256 KB each) and memory's (copies of 16 MB), one thread."""
    block = bytes(range(256)) * 1024
    source, copy = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    results = []
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("core", lambda: zlib.crc32(block)),
        ("memory", lambda: np.copyto(copy, source)),
    )
    for what, work in checks:
        times_s, account = _time(work, 5, 0.03, limit_s / len(checks))
        results.append({"what": what, **summarize(times_s, account)})
    return results


def summarize(times_s: Sequence[float], account: Account | None = None) -> dict[str, Any]:
    """seconds: the mean without the slowest tenth, so that stalls that return count and a single
    one does not; with the minimum, the median, and how far the samples spread (MAD)."""
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    kept = ordered[: max(1, len(ordered) - max(1, len(ordered) // 10))]
    median = float(np.median(ordered))
    result: dict[str, Any] = {
        "seconds": float(kept.mean()),
        "min_s": float(ordered[0]),
        "median_s": median,
        "mad_s": float(np.median(np.abs(ordered - median))),
        "repeats": len(ordered),
    }
    if account is not None:
        result |= {
            "mean_s": float(ordered.mean()),
            "wall_s": account.wall_s,
            "cpu_s": account.cpu_s,
            "queued_s": account.queued_s,
            "throttled_s": account.throttled_s,
        }
    return {key: _rounded(value) for key, value in result.items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _time(
    work: Callable[[], object], repeats: int, least_s: float, limit_s: float
) -> tuple[list[float], Account]:
    for _ in range(2):
        work()
    times_s: list[float] = []
    books, wanted_s = Books(), least_s
    start_s = now_s = time.perf_counter()
    while len(times_s) < _MOST_SAMPLES and now_s - start_s < limit_s:
        if len(times_s) >= repeats and now_s - start_s >= wanted_s:
            if wanted_s > least_s or not books.close().throttled_s:
                break
            wanted_s = _HELD_LONGER * least_s
        work()
        before_s, now_s = now_s, time.perf_counter()
        times_s.append(now_s - before_s)
    return times_s, books.close()


def _time_on_device(
    work: Callable[[], object], repeats: int, least_s: float, limit_s: float, device: torch.device
) -> tuple[list[float], None]:
    """Each product by the device's own clock, in bursts that keep it busy."""
    cuda: Any = torch.cuda  # its constructors have no types
    with torch.cuda.stream(cuda.Stream(device)):
        start_s = time.perf_counter()
        times_s: list[float] = []
        is_warm = False
        while len(times_s) < _MOST_SAMPLES:
            marks = [cuda.Event(enable_timing=True) for _ in range(11)]
            marks[0].record()
            for mark in marks[1:]:
                work()
                mark.record()
            marks[-1].synchronize()
            if is_warm:
                # milliseconds
                times_s += [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
            elapsed_s = time.perf_counter() - start_s
            if times_s and (
                (len(times_s) >= repeats and elapsed_s >= least_s) or elapsed_s > limit_s
            ):
                break
            # clocks rise under load: the first burst counts for nothing, nor do the first 50 ms
            is_warm = elapsed_s >= min(0.05, 0.25 * limit_s)
    return times_s, None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    import psutil

    return int(psutil.virtual_memory().available)
