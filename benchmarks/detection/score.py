"""How well a detector did on labelled jobs.

In: a `LabelledJob` and what a detector found in its series. Out: a `JobScore`, and of many of
them a `Tally` with rates, their Wilson intervals and errors.

    score_job(job, [DetectedEpisode(first_index=410, last_index=477, slowdown=1.38)])
    JobScore(index=12, kind="short_compute", outcome="right", matches=(Match(onset_error=1, …),), …)

Rules. Only detections of kind `fail_slow` are alarms. Two stretches overlap when they share a
record. *Per job*: a job without any true episode and with an alarm is a false alarm (FPR); a job
of which any scored episode overlaps no alarm is missed (FNR), even where others were found.
*Per episode*: recall is the share of scored episodes that overlap an alarm; precision the share
of alarms that overlap a true episode, scored or not. An alarm that overlaps only unscored
episodes counts for nothing. Onset and relief errors are distances in records to the nearest right
answer (`TrueEpisode.onset`, `.relief`), of the first and the last alarm that overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from benchmarks.detection.suite import LabelledJob, TrueEpisode

from failslow.records import EpisodeKind, StepSeries

__all__ = [
    "DetectedEpisode",
    "Detector",
    "JobScore",
    "Match",
    "Rate",
    "Tally",
    "score_job",
    "tally",
    "wilson",
]

Outcome = Literal["right", "false_alarm", "missed", "unscored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedEpisode:
    """A detector's claim, in records of the series."""

    first_index: int
    last_index: int
    slowdown: float
    kind: EpisodeKind = "fail_slow"
    suspected_index: int | None = None
    """The record after which a detector fed one by one would have spoken; None: not told."""


Detector = Callable[[StepSeries], Sequence[DetectedEpisode]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One scored true episode that was found."""

    onset_error: int
    """Records from the nearest right onset; early counts as late."""
    relief_error: int | None
    """Likewise; None when it lasts to the job's end."""
    slowdown_error: float
    """|detected / true - 1| of the longest alarm inside."""
    iou: float
    """Records in common over records in either, alarms taken together."""
    pieces: int
    """Alarms that overlap it; 1 is right."""
    delay_iterations: int | None
    """Iterations from the onset until suspected; None: not told, or before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScore:
    """One job's verdict on a detector."""

    index: int
    kind: str
    noise: str
    label: str
    outcome: Outcome
    scored: int
    """Scored true episodes."""
    matches: tuple[Match, ...]
    alarms: int
    """Alarms, those on unscored episodes left out."""
    strays: int
    """Alarms of these that overlap no true episode."""
    workload_changes: int
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A share with its 95 % Wilson interval; `share` None when nothing was counted."""

    hits: int
    of: int

    @property
    def share(self) -> float | None:
        return self.hits / self.of if self.of else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.hits, self.of)

    def to_json(self) -> dict[str, object]:
        """Keys hits, of, share, low, high."""
        low, high = self.interval
        return {"hits": self.hits, "of": self.of, "share": self.share, "low": low, "high": high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Scores of many jobs taken together; errors are None without a match."""

    jobs: int
    unscored: int
    fpr: Rate
    fnr: Rate
    precision: Rate
    recall: Rate
    stray_jobs: Rate
    """Jobs with a true episode that also have an alarm beside it."""
    onset_median: float | None
    onset_p90: float | None
    relief_median: float | None
    relief_p90: float | None
    slowdown_error_median: float | None
    iou_median: float | None
    pieces_mean: float | None
    delay_median: float | None

    def to_json(self) -> dict[str, object]:
        """Keys of this class; rates as `Rate.to_json`."""
        return {
            name: value.to_json() if isinstance(value, Rate) else value
            for name, value in ((n, getattr(self, n)) for n in self.__slots__)
        }


def wilson(hits: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927); (0, 1) when nothing was counted."""
    if of == 0:
        return 0.0, 1.0
    share, weight = hits / of, z * z / of
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / of + weight / (4 * of))
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    return low, 1.0 if hits == of else min(1.0, middle + half)


def score_job(job: LabelledJob, found: Sequence[DetectedEpisode]) -> JobScore:
    """Hold what was found against the truth of `job`."""
    alarms = sorted((d for d in found if d.kind == "fail_slow"), key=lambda d: d.first_index)
    on_scored = [d for d in alarms if any(e.scored and _overlap(d, e) for e in job.episodes)]
    strays = [d for d in alarms if not any(_overlap(d, e) for e in job.episodes)]
    scored = [e for e in job.episodes if e.scored]
    matches = tuple(
        _match(job, e, inside)
        for e in scored
        if (inside := [d for d in on_scored if _overlap(d, e)])
    )
    outcome: Outcome = "right"
    if job.label == "unscored":
        outcome = "unscored"
    elif job.label == "clean" and alarms:
        outcome = "false_alarm"
    elif len(matches) < len(scored):
        outcome = "missed"
    claims = "; ".join(f"{d.first_index}-{d.last_index} x{d.slowdown:.2f}" for d in alarms)
    return JobScore(
        index=job.index,
        kind=job.kind,
        noise=job.noise.label,
        label=job.label,
        outcome=outcome,
        scored=len(scored),
        matches=matches,
        alarms=0 if outcome == "unscored" else len(on_scored) + len(strays),
        strays=0 if outcome == "unscored" else len(strays),
        workload_changes=sum(d.kind == "workload_change" for d in found),
        description=f"{job.describe()} found=[{claims}]",
    )


def _overlap(detected: DetectedEpisode, true: TrueEpisode) -> bool:
    last = true.last_index if true.relief is None else true.relief[1]
    return detected.first_index <= last and detected.last_index >= true.onset[0]


def _match(job: LabelledJob, true: TrueEpisode, inside: Sequence[DetectedEpisode]) -> Match:
    covered: set[int] = set()
    for d in inside:
        covered.update(range(d.first_index, d.last_index + 1))
    wanted = range(true.first_index, true.last_index + 1)
    common = sum(i in covered for i in wanted)
    longest = max(inside, key=lambda d: d.last_index - d.first_index)
    last = max(d.last_index for d in inside)
    suspected = [i for d in inside if (i := d.suspected_index) is not None and i >= true.onset[0]]
    delay = (min(suspected) - true.first_index + 1) * job.interval if suspected else None
    return Match(
        onset_error=_distance(inside[0].first_index, true.onset),
        relief_error=None if true.relief is None else _distance(last, true.relief),
        slowdown_error=abs(longest.slowdown / true.slowdown - 1),
        iou=common / (len(covered) + len(wanted) - common),
        pieces=len(inside),
        delay_iterations=delay,
    )


def _distance(index: int, right: tuple[int, int]) -> int:
    return max(right[0] - index, index - right[1], 0)


def tally(scores: Sequence[JobScore]) -> Tally:
    """Rates and errors over `scores`."""
    clean = [s for s in scores if s.label == "clean"]
    slow = [s for s in scores if s.label == "slow"]
    matches = [m for s in scores for m in s.matches]
    alarms, strays = sum(s.alarms for s in scores), sum(s.strays for s in scores)
    onset = [m.onset_error for m in matches]
    relief = [m.relief_error for m in matches if m.relief_error is not None]
    delays = [m.delay_iterations for m in matches if m.delay_iterations is not None]
    return Tally(
        jobs=len(scores),
        unscored=sum(s.label == "unscored" for s in scores),
        fpr=Rate(hits=sum(s.outcome == "false_alarm" for s in clean), of=len(clean)),
        fnr=Rate(hits=sum(s.outcome == "missed" for s in slow), of=len(slow)),
        precision=Rate(hits=alarms - strays, of=alarms),
        recall=Rate(hits=len(matches), of=sum(s.scored for s in scores)),
        stray_jobs=Rate(hits=sum(s.strays > 0 for s in slow), of=len(slow)),
        onset_median=_quantile(onset, 0.5),
        onset_p90=_quantile(onset, 0.9),
        relief_median=_quantile(relief, 0.5),
        relief_p90=_quantile(relief, 0.9),
        slowdown_error_median=_quantile([m.slowdown_error for m in matches], 0.5),
        iou_median=_quantile([m.iou for m in matches], 0.5),
        pieces_mean=float(np.mean([m.pieces for m in matches])) if matches else None,
        delay_median=_quantile(delays, 0.5),
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None
