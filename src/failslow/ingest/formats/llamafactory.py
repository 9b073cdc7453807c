"""LLaMA-Factory's `trainer_log.jsonl`: a line each `logging_steps`, with the time since the start.

    {"current_steps": 20, "total_steps": 900, "loss": 1.42, "lr": 4e-05, "epoch": 0.07,
     "percentage": 2.22, "elapsed_time": "0:01:23", "remaining_time": "1:00:51",
     "throughput": 3947.59, "total_tokens": 327680}

(one line in the file). `elapsed_time` is in whole seconds, so lines are averaged until they span
20 s. `throughput` is `total_tokens` over the same time and has more digits: where the two agree
the time comes from them. Evaluation writes a line of its own at the same step: the time up to it
is no iteration's.
"""

from __future__ import annotations

from failslow.ingest.base import SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import (
    ElapsedRecords,
    elapsed_seconds,
    json_object,
    number,
    whole,
)

__all__ = ["READER", "LlamaFactoryReader"]

_ROUNDING = 0.005
"""`throughput` has two decimals."""


class LlamaFactoryReader:
    """Reads LLaMA-Factory's trainer log."""

    name = "llamafactory"
    summary = '{"current_steps": 20, "loss": 1.42, ..., "elapsed_time": "0:01:23", ...}'
    priority = 50

    def matches(self, line: str) -> bool:
        """A line with a step count and the elapsed time."""
        return '"current_steps"' in line and '"elapsed_time"' in line

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Rounded times become records where enough of them have passed."""
        records: dict[str, ElapsedRecords] = {}
        for line in source.lines():
            writer, rest = split_prefix(line)
            row = json_object(rest) if self.matches(rest) else None
            step = whole(row.get("current_steps")) if row is not None else None
            if row is None or step is None:
                if line.strip():
                    builder.warn("a line that is no whole JSON record was skipped")
                continue
            elapsed_s = elapsed_seconds(str(row.get("elapsed_time")))
            tokens = number(row.get("total_tokens"))
            elapsed_s, resolution_s = _sharpened(elapsed_s, tokens, number(row.get("throughput")))
            own = records.setdefault(writer, ElapsedRecords(builder, writer))
            if step == own.step:
                own.pause(elapsed_s - own.elapsed_s)
            own.point(step, elapsed_s, resolution_s=resolution_s, work_total=tokens)
        for own in records.values():
            own.close()


def _sharpened(elapsed_s: float, tokens: float, throughput: float) -> tuple[float, float]:
    """(seconds since the start, their resolution) from all the line says."""
    if tokens > 0 and throughput > 0:
        fine_s = tokens / throughput
        resolution_s = 2 * fine_s * _ROUNDING / throughput
        if -0.1 <= fine_s - elapsed_s < 1.1 and resolution_s < 1:
            return fine_s, resolution_s
    return elapsed_s, 1.0


READER = LlamaFactoryReader()
