"""Choose the baselines' parameters on a held-out suite.

    python -m benchmarks.detection.tune --jobs 300 --seed 1000

Prints the best of each grid by FPR + FNR per job; `baselines` holds them as its defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import typer
from benchmarks.detection.baselines import plain_bocd, sliding_window
from benchmarks.detection.score import Detector, Tally, score_job, tally
from benchmarks.detection.suite import LabelledJob, make_suite
from rich.console import Console

__all__ = ["main", "tune"]

SLIDING_GRID: list[tuple[str, Detector]] = [
    (f"window={window} ratio={ratio}", partial(sliding_window, window=window, ratio=ratio))
    for window in (5, 10, 15, 20, 30, 50, 75, 100)
    for ratio in (1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0)
]
BOCD_GRID: list[tuple[str, Detector]] = [
    (
        f"hazard={hazard:.3g} noise={noise} recent={recent}",
        partial(plain_bocd, hazard=hazard, noise=noise, recent=recent),
    )
    for hazard in (1 / 250, 1e-4, 1e-8, 1e-16, 1e-32, 1e-64)
    for noise in (0.01, 0.1)
    for recent in (8, 16, 32, 64)
]


def tune(
    jobs: list[LabelledJob], grid: Iterable[tuple[str, Detector]]
) -> list[tuple[float, str, Tally]]:
    """(FPR + FNR, parameters, scores) of each point, best first."""
    tried = []
    for parameters, detector in grid:
        total = tally([score_job(job, detector(job.series)) for job in jobs])
        loss = (total.fpr.share or 0.0) + (total.fnr.share or 0.0)
        tried.append((loss, parameters, total))
    return sorted(tried, key=lambda row: row[0])


def main(
    *,
    jobs: Annotated[int, typer.Option(help="How many held-out jobs.", min=1)] = 300,
    seed: Annotated[int, typer.Option(help="Not the seed the suite is run with.")] = 1000,
    top: Annotated[int, typer.Option(help="How many to print.", min=1)] = 5,
) -> None:
    """Print the best parameters of each baseline."""
    suite = make_suite(jobs, seed)
    console = Console()
    for name, grid in (("sliding", SLIDING_GRID), ("bocd", BOCD_GRID)):
        for loss, parameters, total in tune(suite, grid)[:top]:
            console.print(
                f"{name} {parameters}: FPR + FNR {loss:.3f}, "
                f"FPR {total.fpr.share or 0:.1%}, FNR {total.fnr.share or 0:.1%}"
            )


if __name__ == "__main__":
    typer.run(main)
