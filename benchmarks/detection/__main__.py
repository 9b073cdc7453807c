"""Run detectors over the labelled suite and print how well they did.

    python -m benchmarks.detection --jobs 1000 --seed 0
    python -m benchmarks.detection --only failslow --kind drift --show-failures
    python -m benchmarks.detection --job 417 --plot job.html

Prints tables, or with --json one object (`tables.to_json`). The time taken is the detectors' own.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.detection import picture, tables
from benchmarks.detection.baselines import plain_bocd, sliding_window
from benchmarks.detection.model import KINDS
from benchmarks.detection.score import DetectedEpisode, Detector, JobScore, score_job
from benchmarks.detection.suite import kind_of, make_job
from rich.console import Console
from rich.progress import Progress

from failslow.detect import Detector as OnlineDetector
from failslow.detect import analyze
from failslow.records import StepSeries

__all__ = ["DETECTORS", "main", "run"]


def _failslow(series: StepSeries) -> list[DetectedEpisode]:
    return [
        DetectedEpisode(
            first_index=e.first_index,
            last_index=e.last_index,
            slowdown=e.slowdown,
            kind=e.kind,
        )
        for e in analyze(series).episodes
    ]


def _failslow_with_suspicion(series: StepSeries) -> list[DetectedEpisode]:
    """The same, and when each episode was first suspected; takes twice as long."""
    events, _ = OnlineDetector().extend(series)
    said = [e.index for e in events if e.kind in ("suspected", "onset")]
    return [
        replace(d, suspected_index=next((i for i in said if d.first_index <= i), None))
        for d in _failslow(series)
    ]


DETECTORS: dict[str, Detector] = {
    "failslow": _failslow,
    "sliding": sliding_window,
    "bocd": plain_bocd,
}


def main(
    *,
    jobs: Annotated[int, typer.Option(help="How many jobs.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Which suite.", min=0)] = 0,
    only: Annotated[str, typer.Option(help="Detectors, by commas.")] = ",".join(DETECTORS),
    kind: Annotated[str, typer.Option(help="Only jobs of this kind.")] = "",
    job: Annotated[int, typer.Option(help="Only this job.", min=-1)] = -1,
    plot: Annotated[Path | None, typer.Option(help="With --job: write its picture.")] = None,
    suspicion: Annotated[bool, typer.Option(help="Also time failslow's suspicion.")] = False,
    show_failures: Annotated[bool, typer.Option(help="Print each job gone wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score detectors on the labelled suite."""
    names = [name for name in only.split(",") if name]
    _check_known(names, DETECTORS)
    _check_known([kind] if kind else [], KINDS)
    indices = [job] if job >= 0 else [i for i in range(jobs) if kind in ("", kind_of(i, seed))]
    detectors = {name: DETECTORS[name] for name in names}
    if suspicion and "failslow" in detectors:
        detectors["failslow"] = _failslow_with_suspicion
    scores, taken_s = run(detectors, indices, seed)
    if plot is not None and job >= 0:
        subject = make_job(job, seed)
        picture.write(subject, {n: detect(subject.series) for n, detect in detectors.items()}, plot)
    if as_json:
        print(json.dumps(tables.to_json(scores, taken_s, seed)))
        return
    console = Console()
    if job >= 0:
        for name, (score,) in scores.items():
            tables.show_one(console, name, score)
        return
    tables.show(console, scores, taken_s)
    if show_failures:
        tables.show_failures(console, scores)


def _check_known(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")


def run(
    detectors: Mapping[str, Detector], indices: Sequence[int], seed: int
) -> tuple[dict[str, list[JobScore]], dict[str, float]]:
    """Scores and seconds of each detector over the jobs `indices` of `seed`."""
    scores: dict[str, list[JobScore]] = {name: [] for name in detectors}
    taken_s: dict[str, float] = defaultdict(float)
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        for index in progress.track(indices, description="jobs"):
            subject = make_job(index, seed)
            for name, detect in detectors.items():
                begin = time.perf_counter()
                found = detect(subject.series)
                taken_s[name] += time.perf_counter() - begin
                scores[name].append(score_job(subject, found))
    return scores, dict(taken_s)


if __name__ == "__main__":
    typer.run(main)
