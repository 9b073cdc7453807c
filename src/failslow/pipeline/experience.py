"""What a job's levels are known to cost, so that no controller begins with estimates again. Pure.

In: the policy's `CostBook`, the job's facts, journal entries. Out: a line of the journal whenever
something was learnt, and a book that begins with the last one of them:

    {"t":…,"kind":"action","what":"learnt","layout":{"pp":1,"dp":4,"tp":1,"microbatches":32,
     "hosts":4},"levels":{"S2":{"cost_s":[0.004],"kept":[0.93],"refused":""}}}

A later job in the same folder begins with it too, if its layout is the same; what a job refused is
true of that job alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from failslow.decide.costs import CostBook
from failslow.journal import JournalEntry
from failslow.pipeline.messages import Write
from failslow.pipeline.past import Past
from failslow.records import JobFacts

__all__ = ["Experience"]


class Experience:
    """Of one job. record: of a line as above."""

    def __init__(self, record: Mapping[str, Any] | None = None) -> None:
        self._record = dict(record or {})

    @classmethod
    def of(cls, entries: Iterable[JournalEntry], past: Past | None) -> Experience:
        """The last of the job, else of the folder."""
        if past is not None and past.learnt is not None:
            return cls(past.learnt)
        told = [e.record for e in entries if isinstance(e.record, dict)]
        last = next((line for line in reversed(told) if line.get("what") == "learnt"), None)
        found = cls(last)
        found.forget_refusals()
        return found

    def forget_refusals(self) -> None:
        """The trainer is another one."""
        levels = self._record.get("levels")
        if isinstance(levels, Mapping):
            kept = {k: {**v, "refused": ""} for k, v in levels.items() if isinstance(v, Mapping)}
            self._record["levels"] = kept

    def give(self, book: CostBook, facts: JobFacts | None) -> None:
        """A policy is made: it knows what is known of jobs like this one."""
        if facts is None:
            return
        levels = self._record.get("levels")
        if self._record.get("layout") == _layout(facts) and isinstance(levels, Mapping):
            book.recall(levels)
        else:
            self._record = {}

    def news(self, book: CostBook, facts: JobFacts | None, now_s: float) -> list[Write]:
        """The line, where anything was learnt since the last one."""
        levels = book.learnt()
        if facts is None or not levels or levels == self._record.get("levels"):
            return []
        self._record = {"what": "learnt", "layout": _layout(facts), "levels": levels}
        return self.repeated(now_s)

    def repeated(self, now_s: float) -> list[Write]:
        """The last line again: only the journal's end is read."""
        return [Write(kind="action", record=self._record, t=now_s)] if self._record else []


def _layout(facts: JobFacts) -> dict[str, int]:
    return {
        "pp": facts.pp,
        "dp": facts.dp,
        "tp": facts.tp,
        "microbatches": facts.microbatches,
        "hosts": len(set(facts.hosts)),
    }
