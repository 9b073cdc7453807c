"""What an inquiry knows of one suspicion. Pure.

In: profiles as they come, verdicts. Out: whether more are to be waited for:

    Case("e1745735301", onset_t=1745735301.2, onset_s=1745735301.3, slowdown=1.41)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from failslow.pipeline.messages import Instruction, Order, Write
from failslow.records import Diagnosis, RankProfile, Verdict

__all__ = ["MOST_RECHECK_S", "Case", "opened", "profile_order", "written"]

MOST_RECHECK_S = 600.0
_EMPTY_AGAIN_S = 10.0
_RETRY_S = 5.0
_RETRIES = 6

_PROFILE_S = 3.0
_ITERATIONS, _HEALTHY_ITERATIONS = 8, 20
_LIMIT_S, _PROFILE_LEAST = 15.0, 3
"""Agents collect a profile for so long, or so many iterations if these take longer."""
_LATE_S = 5.0
"""Profiles that have not come so long after do not come."""
_BEFORE_S = 120.0
"""Telemetry from so long before the onset shows what was usual."""
_JOURNALED, _JOURNALED_CELLS = 1024, 40_000
"""Profiles of more ranks, or of more calls together, are not all written down: it takes the
controller a second, and the journal 10 MB."""


@dataclass(slots=True)
class Case:
    """One suspicion, and the episode it has become."""

    id: str
    onset_t: float
    """By the job's clock, and..."""
    onset_s: float
    """...by the controller's."""
    slowdown: float
    confirmed: bool = False
    iteration_s: float = 0.0
    """What an iteration takes now."""
    asked_s: float | None = None
    """When profiles were asked for; None: not waiting for any."""
    profiles: dict[int, RankProfile] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    due_s: float | None = None
    """When suspects are to be put to the proof (again)."""
    recheck_s: float = 0.0
    failures: int = 0
    empty: int = 0
    """Verdicts in a row that found nothing..."""
    judged: Diagnosis | None = None
    """...and the diagnosis the last one was on..."""
    well: frozenset[str] = frozenset()
    """...and keys of what they found well."""
    linked: bool = False
    """A link is to blame: of it only another pause tells."""
    kept: bool = False
    """Its episode is not followed further, but something is done about it: it is looked at again
    until that is taken back."""

    @property
    def collect_s(self) -> float:
        """How long agents may collect a profile."""
        return max(_LIMIT_S, _PROFILE_LEAST * self.iteration_s)

    def is_late(self, now_s: float) -> bool:
        """Profiles were asked for, and those that are missing do not come any more."""
        return self.asked_s is not None and now_s - self.asked_s > self.collect_s + _LATE_S

    def is_due(self, now_s: float) -> bool:
        """Its suspects are to be put to the proof."""
        told = self.confirmed and self.asked_s is None
        return told and self.due_s is not None and now_s >= self.due_s

    def telling_s(self, now_s: float) -> float:
        """Of how many seconds until now telemetry tells of its onset."""
        return now_s - self.onset_s + _BEFORE_S

    def take_verdict(self, verdict: Verdict, *, recheck_s: float, now_s: float) -> None:
        """A verdict was given on its diagnosis, or on the one before: when to look again.

        recheck_s: after how long the first time.
        """
        named = bool(verdict.findings)
        self.judged, self.failures = self.diagnosis, 0
        if named:
            self.linked = any(finding.what == "link" for finding in verdict.findings)
        self.well = frozenset(verdict.well) | (self.well if self.empty else frozenset())
        self.empty = 0 if named else self.empty + 1
        if named or self.recheck_s:
            # culprits that are well now are looked at no more often than slow ones: pauses are few
            self.recheck_s = min(MOST_RECHECK_S, 2.0 * self.recheck_s or recheck_s)
            self.due_s = now_s + self.recheck_s
        else:
            self.due_s = now_s + _EMPTY_AGAIN_S * 2 ** (self.empty - 1)

    def take_failure(self, now_s: float) -> None:
        """Training was not paused for it."""
        self.failures += 1
        if self.failures < _RETRIES:
            self.due_s = now_s + _RETRY_S * 2 ** (self.failures - 1)
        else:  # the hour's pauses may be spent, by a fault before this one
            self.due_s = now_s + MOST_RECHECK_S

    def ask(self, now_s: float) -> Order:
        """Have all workers' calls profiled."""
        self.asked_s, self.profiles = now_s, {}
        return profile_order("suspicion", self.collect_s)


def opened(write: Write, now_s: float) -> Case:
    """By a suspicion, or by the onset of an episode."""
    record, tags = write.record, write.tags
    late_s = now_s - write.t  # the job's clock may be another than the controller's
    if write.event == "suspected":
        onset_t = record["first_t"]
        case = Case(record["id"], onset_t, onset_t + late_s, record["slowdown"])
        case.iteration_s = record["slowdown"] * record["baseline_s"]
        return case
    onset_t = tags["start_t"]
    case = Case(tags["id"], onset_t, onset_t + late_s, record.slowdown, confirmed=True)
    case.iteration_s = record.slowdown * record.baseline_s
    return case


def profile_order(why: str, limit_s: float = _LIMIT_S) -> Order:
    """why: "suspicion" or "healthy"."""
    body = {
        "why": why,
        "for_s": _PROFILE_S,
        "min_iterations": _HEALTHY_ITERATIONS if why == "healthy" else _ITERATIONS,
        "limit_s": limit_s,
    }
    return Order(topic="profile", body=body)


def written(
    profiles: Mapping[int, RankProfile], ranks: Sequence[int], episode: str, now_s: float
) -> list[Instruction]:
    """For the journal, those of `ranks`; "" are those of healthy times."""
    out: list[Instruction] = []
    cells = 0
    for rank in ranks[:_JOURNALED]:
        cells += len(profiles[rank].cells)
        if out and cells > _JOURNALED_CELLS:
            break
        record = profiles[rank]
        out.append(Write(kind="rankprofile", record=record, t=now_s, tags={"episode": episode}))
    return out
