"""How many iterations after the onset a fail-slow is suspected, fed one record at a time.

    python -m benchmarks.detection.delay --jobs 200 --seed 0

Jobs of 3 % white noise, one record an iteration, 300–700 healthy iterations, then slow to the
end; a suspicion counts when said at or after the onset. Goal: at most 6 iterations, median, at
slowdowns of 1.15 and more. Beside it the cost: suspicions per 1,000 healthy iterations, which start
nothing but profiling.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from failslow.detect import Detector
from failslow.records import StepSample

__all__ = ["Delays", "main", "measure"]

NOISE = 0.03
SLOW_ITERATIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """What a number of jobs of one slowdown gave."""

    slowdown: float
    iterations: NDArray[np.int64]
    """Iterations from the onset until suspected, counting both ends; those never suspected left
    out."""
    never: int
    early: int
    """Suspicions in healthy iterations."""
    healthy_iterations: int

    @property
    def median(self) -> float:
        """Median delay; infinite when more than half were never suspected."""
        delays = np.concatenate([self.iterations, np.full(self.never, np.inf)])
        return float(np.median(delays))


def measure(slowdown: float, jobs: int, seed: int) -> Delays:
    """Feed `jobs` jobs of this slowdown to the detector."""
    delays: list[int] = []
    never = early = healthy = 0
    for index in range(jobs):
        rng = np.random.default_rng([seed, index])
        onset = int(rng.integers(300, 700))
        time_s = math.exp(rng.uniform(math.log(0.07), math.log(5.0)))
        duration_s = time_s * np.exp(NOISE * rng.normal(size=onset + SLOW_ITERATIONS))
        duration_s[onset:] *= slowdown
        said = _suspicions(duration_s)
        after = [i - onset + 1 for i in said if i >= onset]
        early += len(said) - len(after)
        healthy += onset
        if after:
            delays.append(after[0])
        else:
            never += 1
    return Delays(
        slowdown=slowdown,
        iterations=np.array(delays, dtype=np.int64),
        never=never,
        early=early,
        healthy_iterations=healthy,
    )


def _suspicions(duration_s: NDArray[np.float64]) -> list[int]:
    """Records at which a fail-slow is suspected, or at once taken for certain."""
    detector = Detector()
    end_s = np.cumsum(duration_s)
    said: list[int] = []
    for i in range(len(duration_s)):
        sample = StepSample(step=i, duration_s=float(duration_s[i]), end_s=float(end_s[i]))
        said += [e.index for e in detector.update(sample) if e.kind in ("suspected", "onset")]
    return said


def main(
    *,
    jobs: Annotated[int, typer.Option(help="Jobs for each slowdown.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the delay of the suspicion for several slowdowns."""
    results = [measure(slowdown, jobs, seed) for slowdown in (1.15, 1.2, 1.3, 1.5, 2.0, 4.0)]
    if as_json:
        rows = [
            {
                "slowdown": d.slowdown,
                "median_iterations": d.median,
                "never": d.never,
                "early_per_1000": 1000 * d.early / d.healthy_iterations,
            }
            for d in results
        ]
        print(json.dumps({"schema": "failslow.benchmark.delay/1", "seed": seed, "rows": rows}))
        return
    table = Table(title=f"iterations from onset to suspicion, {jobs} jobs each, 3 % noise")
    for column in ("slowdown", "median", "p90", "never", "early / 1,000 healthy it."):
        table.add_column(column, justify="right")
    for d in results:
        p90 = f"{np.quantile(d.iterations, 0.9):g}" if len(d.iterations) else "-"
        rate = f"{1000 * d.early / d.healthy_iterations:.2f}"
        table.add_row(f"x{d.slowdown}", f"{d.median:g}", p90, f"{d.never}", rate)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
