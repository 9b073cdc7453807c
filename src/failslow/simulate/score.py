"""What the detector said of a simulated job, beside what was true.

In: a `SimulatedJob` and the `JobAnalysis` of its series. Out: a `Score`.

    score(job, analyze(job.series)).false_alarms     # 0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from failslow.records import Episode, JobAnalysis
from failslow.simulate.job import FaultTruth, SimulatedJob

__all__ = ["FaultScore", "Score", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScore:
    """One fault, and the episodes it is in."""

    truth: FaultTruth
    episodes: tuple[int, ...]
    """Numbers of the episodes that overlap it, from 1 as in every report."""
    onset_error: int | None
    """Iterations by which it is noticed too late (negative: too early): by the onset, or the
    level within an episode, that is nearest to it."""

    @property
    def found(self) -> bool:
        """Whether an episode covers any of it."""
        return bool(self.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How right the analysis is."""

    faults: tuple[FaultScore, ...]
    false_alarms: int
    """Fail-slow episodes of which less than half the iterations were truly slow."""
    healthy_iteration_s: float
    true_lost_s: float
    """Wall time the faults cost."""

    @property
    def missed(self) -> int:
        """Faults that slowed the job by 10 % or more and are in no episode."""
        return sum(fault.truth.counts and not fault.found for fault in self.faults)


def score(job: SimulatedJob, analysis: JobAnalysis) -> Score:
    """Compare; a fault is found when a fail-slow episode overlaps it."""
    slow = job.slow
    numbered = [(n, e) for n, e in enumerate(analysis.episodes, start=1) if e.kind == "fail_slow"]
    false_alarms = sum(slow[e.first_index : e.last_index + 1].mean() < 0.5 for _, e in numbered)
    return Score(
        faults=tuple(_fault(truth, numbered) for truth in job.truth),
        false_alarms=int(false_alarms),
        healthy_iteration_s=float(np.median(job.healthy_s)),
        true_lost_s=job.lost_s,
    )


def _fault(truth: FaultTruth, numbered: list[tuple[int, Episode]]) -> FaultScore:
    if truth.start_step is None:
        return FaultScore(truth=truth, episodes=(), onset_error=None)
    hit = [
        (number, episode)
        for number, episode in numbered
        if (truth.end_step is None or episode.start_step < truth.end_step)
        and (episode.end_step is None or episode.end_step > truth.start_step)
    ]
    begins = [level.start_step for _, e in hit for level in e.levels]
    begins += [e.start_step for _, e in hit]
    errors = [begin - truth.start_step for begin in begins]
    return FaultScore(
        truth=truth,
        episodes=tuple(number for number, _ in hit),
        onset_error=min(errors, key=abs) if errors else None,
    )
