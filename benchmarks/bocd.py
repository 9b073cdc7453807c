"""How fast the change-point detectors are: many series a step, one long series, one sample a call.

    $ python benchmarks/bocd.py
    numpy 2.4.6, processor time of one core, median of 5 (slowest)
    10,000 series, runs up to 128    5.53 ms a step    (5.7)   target 10
    1,000,000 samples, up to 200     4.67 s            (4.85)   target 10
    one sample a call, up to 200     31.8 us a sample  (32.5)   target 60

Those figures are of an AMD EPYC (Zen 4) core at 2.6 GHz. With AVX-512 switched off
(NPY_DISABLE_CPU_FEATURES=X86_V4): 7.9 ms and 6.0 s. The same recursions compiled by numba 0.68.1
took 15 ms (13.5 with fastmath) and 3.7 s on that core: numpy's SIMD logarithm and exponential
outweigh its extra passes over the cache, so there is no dependency on numba and its 208 MB.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the targets are of one core

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from failslow.stats.bocd import Bocd, BocdStream

MANY_RUN, STREAM_RUN = 128, 200  # the longest runs told apart: the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured speed beside its target, both in `unit`."""

    what: str
    median: float
    slowest: float
    target: float
    unit: str


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure the speed of change-point detection on one core.",
        epilog="example: python benchmarks/bocd.py --repeats 3 --samples 200000 --json",
    )
    parser.add_argument("--series", type=int, default=10_000, help="series that advance together")
    parser.add_argument("--samples", type=int, default=1_000_000, help="length of the long series")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many is shown")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if min(arguments.series, arguments.samples, arguments.repeats) < 1:
        parser.error("--series, --samples and --repeats must be at least 1")

    figures = [
        many_series(arguments.series, arguments.repeats),
        long_series(arguments.samples, arguments.repeats),
        single_samples(arguments.repeats),
    ]
    if arguments.json:
        found = {"numpy": np.__version__, "repeats": arguments.repeats}
        print(json.dumps({**found, "figures": [asdict(figure) for figure in figures]}))
        return
    how = f"median of {arguments.repeats} (slowest)"
    print(f"numpy {np.__version__}, processor time of one core, {how}")
    for figure in figures:
        print(
            f"{figure.what:32} {figure.median:.3g} {figure.unit:12} "
            f"({figure.slowest:.3g})   target {figure.target:g}"
        )


def many_series(series: int, repeats: int, steps: int = 50) -> Figure:
    """Milliseconds a step takes over all series, run lengths filled up first."""
    detector = Bocd(series, max_run=MANY_RUN)
    x = noise(MANY_RUN + repeats * steps, series)
    for row in x[:MANY_RUN]:
        detector.update(row)
    rows = iter(x[MANY_RUN:])

    def advance() -> None:
        for _ in range(steps):
            detector.update(next(rows))

    what = f"{series:,} series, runs up to {MANY_RUN}"
    return measured(what, advance, repeats, scale=1e3 / steps, target=10, unit="ms a step")


def long_series(samples: int, repeats: int) -> Figure:
    """Seconds for one series in one block."""
    x = noise(samples)
    stream = BocdStream(max_run=STREAM_RUN)
    what = f"{samples:,} samples, up to {STREAM_RUN}"
    return measured(what, lambda: stream.extend(x), repeats, scale=1, target=10, unit="s")


def single_samples(repeats: int, samples: int = 5000) -> Figure:
    """Microseconds for a sample that comes alone, as in a live job."""
    x = noise(samples)
    stream = BocdStream(max_run=STREAM_RUN)

    def one_by_one() -> None:
        for value in x:
            stream.extend((value,))

    what = f"one sample a call, up to {STREAM_RUN}"
    scale = 1e6 / samples
    return measured(what, one_by_one, repeats, scale=scale, target=60, unit="us a sample")


def noise(*shape: int) -> NDArray[np.float64]:
    """Healthy log times: 0.5 s with 1 % noise."""
    unit = np.random.default_rng(0).standard_normal(shape)
    return -0.69 + 0.01 * unit


def measured(
    what: str, work: Callable[[], object], repeats: int, *, scale: float, target: float, unit: str
) -> Figure:
    """The processor time of `work`, times `scale`: one thread, so it is the time of a free core."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * scale)
    return Figure(
        what=what, median=statistics.median(times), slowest=max(times), target=target, unit=unit
    )


if __name__ == "__main__":
    main()
