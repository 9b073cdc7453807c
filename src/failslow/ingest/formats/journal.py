"""failslow's own journal.

In: `journal.jsonl`. Out: its step records, the job's own where it has them, else those of one
rank; the other kinds are left out.

    {"t": 1745735250.9, "kind": "step", "step": 120, "duration_s": 0.571, "end_s": 68.5,
     "iterations": 1, "work": 524288.0, "data_s": null, "run": 0}
"""

from __future__ import annotations

import json
from typing import Any

from failslow.ingest.base import NAN, SeriesBuilder, Source, split_prefix

__all__ = ["READER", "JournalReader"]


class JournalReader:
    """`{"t": EPOCH, "kind": "step", "step": N, "duration_s": X, ...}`."""

    name = "journal"
    summary = '{"t": 1745735250.9, "kind": "step", "step": 120, "duration_s": 0.571, ...}'
    priority = 90

    def matches(self, line: str) -> bool:
        """Whether the line is a step record."""
        return '"duration_s"' in line and _record(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every step record; a run number that changes starts a run."""
        run = None
        of_job = any(
            '"duration_s"' in line and '"rank"' not in line and _record(line) is not None
            for line in source.lines()
        )
        for line in source.lines():
            record = _record(line) if '"duration_s"' in line else None
            if record is None or (of_job and "rank" in record):
                continue
            if record.get("run", run) != run and run is not None:
                builder.new_run("")
            run = record.get("run", run)
            iterations = _number(record.get("iterations"))
            builder.add(
                step=int(record["step"]),
                duration_s=_number(record["duration_s"]),
                iterations=int(iterations) if 1 <= iterations < 2**62 else 0,
                clock_s=_number(record.get("t")),
                work=_number(record.get("work")),
                data_s=_number(record.get("data_s")),
                writer=f"{split_prefix(line)[0]}/{record.get('rank', '')}".strip("/"),
            )


def _record(line: str) -> dict[str, Any] | None:
    start = line.find("{")
    if '"step"' not in line or start < 0:
        return None
    try:
        record = json.loads(line[start:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") != "step" or "duration_s" not in record:
        return None
    step = record.get("step")
    return record if isinstance(step, int) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else NAN


READER = JournalReader()
