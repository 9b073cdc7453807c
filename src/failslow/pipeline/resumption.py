"""What was known of a case when its controller was killed. Pure.

In: a `Case` as the job's iterations show it, what the journal says of its inquiry. Out: the case as
it was, and what had not been finished yet:

    known = go_on(case, past.inquiry, config)
    known.unjudged      # the journal's record of a pause whose verdict was not given any more
    known.verdicts      # to be told to the policy, which begins anew
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from failslow.config import LocalizeConfig
from failslow.journal import JournalEntry
from failslow.pipeline.case import Case
from failslow.records import CulpritPace, Diagnosis, RankProfile, Verdict

__all__ = ["Known", "go_on"]

_WELL = 1.05


@dataclass(frozen=True, slots=True)
class Known:
    """What is to be finished."""

    unjudged: Mapping[str, Any] | None
    verdicts: tuple[Verdict, ...]
    """Without culprits whose own time was healthy when last told."""


def go_on(case: Case, entries: Iterable[JournalEntry], config: LocalizeConfig) -> Known:
    """Bring `case` to where it was; entries of other cases are passed over."""
    profiles: dict[int, RankProfile] = {}
    unjudged: Mapping[str, Any] | None = None
    verdicts: list[Verdict] = []
    blamed: set[str] = set()
    for entry in entries:
        record = entry.record
        if isinstance(record, CulpritPace):
            if record.slowdown <= _WELL:
                blamed.discard(record.key)
        elif _episode(entry) != case.id:
            continue
        elif isinstance(record, RankProfile):
            profiles[record.rank] = record
        elif isinstance(record, Diagnosis):
            case.diagnosis, case.due_s = record, entry.t
            case.profiles, profiles = profiles, {}
            if case.asked_s is not None and case.asked_s <= entry.t:
                case.asked_s = None
        elif isinstance(record, Verdict):
            unjudged = None
            verdicts.append(record)
            blamed = (blamed - set(record.well)) | {finding.key for finding in record.findings}
            case.take_verdict(record, recheck_s=config.recheck_s, now_s=entry.t)
        elif entry.kind == "action":  # a pause begins: workers may stand still yet
            case.due_s = entry.t + config.pause_limit_s
        elif record.get("ok"):
            unjudged, case.due_s = record, None
        else:
            case.take_failure(entry.t)
    told = (
        replace(verdict, findings=tuple(f for f in verdict.findings if f.key in blamed))
        for verdict in verdicts
    )
    return Known(unjudged, tuple(verdict for verdict in told if verdict.findings))


def _episode(entry: JournalEntry) -> str:
    """Whose it is; of healthy times nobody's."""
    record = entry.record
    if isinstance(record, RankProfile):
        return str(entry.tags.get("episode", ""))
    if isinstance(record, Mapping):
        return str(record.get("episode", ""))
    return str(record.episode)
