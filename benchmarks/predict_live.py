"""The pipeline model against real training: iteration times under faults, predicted and measured.

    python benchmarks/predict_live.py            # root; about two minutes on two idle cores

In: nothing. Out: a line a fault:

    throttle rank 2 to 0.50      predicted 0.551 s  measured 0.540 s   +2.0 %

examples/hybrid_gpt trains in four network namespaces, two stages by two replicas, watched in mode
observe. The model knows the profiles of the healthy workers and how hard each fault is, nothing
else; the prediction is made before the fault. Then a worker is stopped for a share of its time, or
a link of a gradients' ring is shaped to a rate, and the iterations that follow are measured. The
iteration before each fault is measured as well: where it has drifted since the profiles, the
prediction is of that many per cent more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from failslow.demo import SteeredJob, steered_job
from failslow.inject import congest, throttle
from failslow.lab import TestBed
from failslow.records import JobFacts, RankProfile
from failslow.simulate.fitted import FittedJob, Ring

TARGET_PCT = 15.0
PP, DP = 2, 2
MICROBATCHES, WORK_MS, HEALTHY_MBIT = 8, 20.0, 200.0
MODEL = (
    *("--width", "128", "--layers", "2", "--sequences", "1", "--length", "32"),
    *("--seed", "7", "--pp", str(PP)),
)
DILUTION = 6.0
"""Of the added work: sleep over products (`steered_job`)."""
_PERIOD_S, _SLEPT_S = 0.020, 0.001
"""Signals stop a worker once in so long. A piece of sleep of the added work that a stop falls into
counts 1.5 ms (`examples/hybrid_gpt/work.py`), half a millisecond of which had passed: so much work
is done although the worker is stopped."""
_SETTLE, _CALM_S, _LIMIT_S = 3, 2.0, 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One fault."""

    fault: str
    healthy_s: float
    """Measured just before."""
    predicted_s: float
    measured_s: float

    @property
    def off_pct(self) -> float:
        """Of the measured time."""
        return 100.0 * (self.predicted_s / self.measured_s - 1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A fault, for the bed and for the model."""

    name: str
    inject: Callable[[SteeredJob], AbstractContextManager[object]]
    predict: Callable[[FittedJob], float]


def throttled(rank: int, to: float) -> Case:
    """A worker that gets a share of its time, and a little: see `_SLEPT_S`."""
    gets = to + _SLEPT_S / _PERIOD_S * DILUTION / (DILUTION + 1.0)
    return Case(
        f"throttle rank {rank} to {to:.2f}",
        lambda job: throttle(job.pids[rank], to=to, method="signal"),
        lambda fitted: fitted.iteration_s(slow={rank: 1.0 / gets}),
    )


def congested(rank: int, peer: int, mbit: float) -> Case:
    """A link of a gradients' ring at a rate."""
    ring = Ring(bytes_per_s=mbit * 1e6 / 8, healthy_bytes_per_s=HEALTHY_MBIT * 1e6 / 8)

    def inject(job: SteeredJob) -> AbstractContextManager[object]:
        assert job.bed is not None
        here, there = job.bed.nodes[rank], job.bed.nodes[peer]
        return congest(here.namespace, here.interface, mbit, dst=there.address)

    return Case(
        f"link of rank {rank} to rank {peer} at {mbit:g} Mbit/s",
        inject,
        lambda fitted: fitted.iteration_s(rings={rank // DP: ring}),
    )


CASES = (
    throttled(2, 0.5),
    congested(1, 0, 20.0),
    throttled(1, 0.65),
    congested(2, 3, 10.0),
)


def measure(cases: Sequence[Case], *, iterations: int = 20) -> list[Prediction]:
    """Predict and measure each. Raises LabError where there can be no bed."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="failslow-predict-") as name,
        steered_job(
            Path(name),
            layout=("--dp", str(DP)),
            model=MODEL,
            lab=True,
            work_ms=WORK_MS,
            microbatches=MICROBATCHES,
            mode="observe",
            egress_mbit=HEALTHY_MBIT,
        ) as job,
    ):
        fitted = fit(job)
        for case in cases:
            healthy_s = _iteration_s(job, iterations)
            predicted_s = case.predict(fitted) * healthy_s / fitted.iteration_s()
            with case.inject(job):
                measured_s = _iteration_s(job, iterations)
            time.sleep(_CALM_S)
            found.append(
                Prediction(
                    fault=case.name,
                    healthy_s=healthy_s,
                    predicted_s=predicted_s,
                    measured_s=measured_s,
                )
            )
    return found


def fit(job: SteeredJob) -> FittedJob:
    """By the job's first, healthy profiles."""
    if not job.wait_for(lambda: len(_profiles(job)) == PP * DP, limit_s=_LIMIT_S):
        raise SystemExit(f"no healthy profiles of all workers within {_LIMIT_S:g} s")
    (facts,) = [e.record for e in job.entries("jobfacts") if isinstance(e.record, JobFacts)][:1]
    return FittedJob.of(facts, list(_profiles(job).values()))


def _profiles(job: SteeredJob) -> dict[int, RankProfile]:
    entries = job.entries("rankprofile")
    return {
        entry.record.rank: entry.record
        for entry in entries
        if isinstance(entry.record, RankProfile) and entry.tags.get("episode") == ""
    }


def _iteration_s(job: SteeredJob, count: int) -> float:
    """Median of the next iterations that begin after a few."""
    since_t = time.time()
    goal = _SETTLE + count
    if not job.wait_for(lambda: len(job.steps_s(since_t)) >= goal, limit_s=_LIMIT_S):
        raise SystemExit(f"{goal} iterations took longer than {_LIMIT_S:g} s")
    return median(job.steps_s(since_t)[_SETTLE:goal])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20, help="of each median")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := TestBed.available():
        raise SystemExit(reason)
    rows = measure(CASES, iterations=options.iterations)
    if options.json:
        print(json.dumps([asdict(row) | {"off_pct": row.off_pct} for row in rows], indent=1))
    else:
        for row in rows:
            print(
                f"{row.fault:38} healthy {row.healthy_s:.3f} s  predicted {row.predicted_s:.3f} s  "
                f"measured {row.measured_s:.3f} s  {row.off_pct:+6.1f} %"
            )
    raise SystemExit(any(abs(row.off_pct) > TARGET_PCT for row in rows))


if __name__ == "__main__":
    main()
