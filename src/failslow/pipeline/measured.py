"""A pause as the journal has it, and what it measured until there is telemetry for it. Pure.

In: a script, a `PauseResult`, or the journal's record of one. Out: that record, a `Measured`, and
what is concluded from it once telemetry is there:

    {"what":"pausing","episode":"e1745735301","why":"suspects","pause_s":1.3}       # an action
    {"episode":"e1745735301","why":"suspects","ok":true,"pause_s":1.9,"results":[…],…}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from failslow.localize.accord import accord
from failslow.localize.evidence import explain_all
from failslow.localize.pause import PauseResult
from failslow.localize.script import WorkerPlace
from failslow.pipeline.case import Case
from failslow.records import Diagnosis, Verdict

__all__ = ["Measured", "begun", "concluded", "ended"]

_TELEMETRY_S = 2.0
"""How long a verdict waits for what the nodes' samplers saw."""


def begun(why: str, episode: str, expected_s: float) -> dict[str, Any]:
    """Training is about to be paused: it counts, should the controller be killed meanwhile."""
    return {"what": "pausing", "episode": episode, "why": why, "pause_s": expected_s}


def ended(why: str, episode: str, result: PauseResult) -> dict[str, Any]:
    """How it went."""
    return {
        "episode": episode,
        "why": why,
        "ok": result.ok,
        "reason": result.reason,
        "step": result.step,
        "pause_s": result.pause_s,
        "waited_s": result.waited_s,
        "missing": result.missing,
        "errors": {str(rank): error for rank, error in result.errors.items()},
        "results": [dict(item) for items in result.results.values() for item in items],
    }


def concluded(
    verdict: Verdict,
    case: Case,
    windows: Sequence[Mapping[str, Any]],
    places: Mapping[int, WorkerPlace],
    *,
    own: Mapping[int, float],
) -> Verdict:
    """What benchmarks alone say, with its causes and without what does not slow the job.

    windows: telemetry of those blamed. own: how slow workers are by their own time.
    """
    devices = {rank: place.device for rank, place in places.items()}
    findings = explain_all(verdict.findings, windows, onset_t=case.onset_t, devices=devices)
    diagnosis = case.diagnosis or Diagnosis(episode=case.id, suspects=())
    return accord(replace(verdict, findings=findings), diagnosis, slowdown=case.slowdown, own=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a verdict is to be given on."""

    results: list[dict[str, Any]]
    """Of all ranks."""
    step: int | None
    pause_s: float
    from_s: float
    """Before that it is not known who lives, and..."""
    until_s: float
    """...after it telemetry is not waited for."""

    @classmethod
    def of(cls, record: Mapping[str, Any], from_s: float) -> Measured:
        """record: as `ended` makes it, or a journal has it."""
        return cls(
            results=[dict(result) for result in record.get("results", ())],
            step=record.get("step"),
            pause_s=float(record.get("pause_s", 0.0)),
            from_s=from_s,
            until_s=from_s + _TELEMETRY_S,
        )

    def again(self, now_s: float) -> Measured:
        """Further nodes have been asked."""
        return replace(self, until_s=now_s + _TELEMETRY_S)

    def waits(self, now_s: float, *, told: bool) -> bool:
        """told: all nodes have sent their telemetry."""
        return now_s < self.from_s or (not told and now_s < self.until_s)
