"""MLPerf training logs (`:::MLLOG` lines of mlperf-logging).

In: the result file. Out: seconds per iteration from `train_step_time` / `train_step_timing`,
else from `time` or `throughput`; time_ms is the clock, and tells a running mean from a windowed
one. Validation rows are left out.

    0: :::MLLOG {"namespace": "", "time_ms": 1745982390329, "event_type": "POINT_IN_TIME",
    "key": "tracked_stats", "value": {"throughput": 1165.5}, "metadata": {"step_num": 200}}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.ingest.base import (
    NAN,
    RunHeader,
    SeriesBuilder,
    Source,
    split_prefix,
    undo_running_mean,
)
from failslow.ingest.rates import RateRecords

__all__ = ["READER", "MlLogReader"]

_MARK = ":::MLLOG"
_DIRECT = ("train_step_time", "train_step_timing")
_STEP_NAMES = ("step", "step_num", "iteration", "samples_count")
_WANTED = ('"tracked_stats"', '"global_batch_size"', '"run_start"')


class MlLogReader:
    """`:::MLLOG {...}` lines of the key tracked_stats."""

    name = "mllog"
    summary = (
        ':::MLLOG {"time_ms": ..., "key": "tracked_stats", "value": {"throughput": 1165.5}, ...}'
    )
    priority = 80

    def matches(self, line: str) -> bool:
        """Whether the line has training statistics that tell a time."""
        if _MARK not in line or '"tracked_stats"' not in line:
            return False
        return '"train_step_tim' in line or '"throughput"' in line or '"time"' in line

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """The statistics that tell times most directly; the others of the file are left out."""
        rows, header = _Rows(), RunHeader()
        for line in source.lines():
            at = line.find(_MARK)
            if at < 0 or not any(key in line for key in _WANTED):
                continue
            event = _event(line[at + len(_MARK) :])
            value = event.get("value")
            if event.get("key") == "run_start":
                header.note("run_start", "")
            elif event.get("key") == "global_batch_size":
                header.note("global_batch_size", str(value))
            elif event.get("key") == "tracked_stats" and isinstance(value, dict):
                header.open_run(rows)
                rows.take(event, value, header.get("global_batch_size"), split_prefix(line[:at])[0])
        rows.give(builder)


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    step_size: float
    clock_s: float
    direct_s: float
    time_s: float
    throughput: float
    data_s: float
    batch: float


class _Rows:
    """The statistics of a file, by run and writer."""

    def __init__(self) -> None:
        self._runs: list[tuple[str, bool, dict[str, list[_Row]]]] = [("", False, {})]

    def new_run(self, note: str, *, config_changed: bool = False) -> None:
        self._runs.append((note, config_changed, {}))

    def take(self, event: dict[str, Any], value: dict[str, Any], batch: float, writer: str) -> None:
        about = event.get("metadata")
        about = about if isinstance(about, dict) else {}
        name = next((n for n in _STEP_NAMES if n in about), "")
        step = _number(about.get(name))
        direct_s = max((_number(value[n]) for n in _DIRECT if n in value), default=NAN)
        row = _Row(
            step=int(step) if abs(step) < 2**62 else -1,
            step_size=batch if name == "samples_count" and batch > 0 else 1.0,
            clock_s=_number(event.get("time_ms")) / 1000,
            direct_s=direct_s,
            time_s=_number(value.get("time")),
            throughput=_number(value.get("throughput")),
            data_s=_number(value.get("data")),
            batch=batch,
        )
        if name and row.step >= 0:
            self._runs[-1][2].setdefault(writer, []).append(row)

    def give(self, builder: SeriesBuilder) -> None:
        """Add the rows of the most direct kind in the file."""
        rows = [row for _, _, writers in self._runs for some in writers.values() for row in some]
        for kind in ("direct_s", "time_s", "throughput"):
            if any(not math.isnan(getattr(row, kind)) for row in rows):
                break
        plain = any(row.direct_s > 0 and math.isnan(row.throughput) for row in rows)
        for note, changed, writers in self._runs:
            builder.new_run(note, config_changed=changed)
            for writer, some in writers.items():
                told = [row for row in some if not math.isnan(getattr(row, kind))]
                if kind == "direct_s" and plain:
                    steps = [row for row in told if math.isnan(row.throughput)]
                    for _ in range(len(told) - len(steps)):
                        builder.warn("a row that sums up a block of iterations was left out")
                    told = steps
                if told and kind == "throughput":
                    _give_throughput(told, writer, builder)
                elif told:
                    _give_times(told, writer, builder, running=kind == "time_s")


def _give_times(rows: list[_Row], writer: str, builder: SeriesBuilder, *, running: bool) -> None:
    seconds = np.array([row.time_s if running else row.direct_s for row in rows])
    data_s = np.array([row.data_s for row in rows])
    if running and _is_running_mean(seconds, rows):
        count = np.array([row.step for row in rows], np.int64)
        seconds, data_s = undo_running_mean(seconds, count), undo_running_mean(data_s, count)
    for index, row in enumerate(rows):
        grown = row.step - rows[index - 1].step if index else row.step_size
        builder.add(
            step=row.step,
            duration_s=float(seconds[index]),
            iterations=0 if row.step_size == 1 else max(1, round(grown / row.step_size)),
            clock_s=row.clock_s,
            work=row.batch,
            data_s=float(data_s[index]),
            writer=writer,
        )


def _give_throughput(rows: list[_Row], writer: str, builder: SeriesBuilder) -> None:
    seconds = 1 / np.array([row.throughput or NAN for row in rows])
    if _is_running_mean(seconds, rows):
        seconds = undo_running_mean(seconds, np.array([row.step for row in rows], np.int64))
    records = RateRecords(builder, "sample", whole=True)
    for row, second in zip(rows, seconds, strict=True):
        records.add(
            step=row.step,
            rate=float(1 / second) if second else NAN,
            clock_s=row.clock_s,
            stated=row.batch,
            step_size=row.step_size,
            writer=writer,
        )
    records.flush()


def _is_running_mean(seconds: NDArray[np.float64], rows: list[_Row]) -> bool:
    """Whether the clock agrees better with `seconds` undone as a running mean than as printed."""
    count = np.array([row.step for row in rows], np.int64)
    passed = np.diff(np.array([row.clock_s for row in rows]))
    grown = np.diff(count)
    usable = (passed > 0) & (grown > 0)
    if usable.sum() < 3:
        return False
    truth = passed[usable] / grown[usable]
    spreads = []
    for printed in (seconds, undo_running_mean(seconds, count)):
        ratio = printed[1:][usable] / truth
        middle = np.nanmedian(ratio)
        spreads.append(np.nanmedian(np.abs(ratio / middle - 1)) if middle > 0 else np.inf)
    return bool(spreads[1] < spreads[0])


def _event(text: str) -> dict[str, Any]:
    start = text.find("{")
    try:
        event, _ = json.JSONDecoder().raw_decode(text, start) if start >= 0 else ({}, 0)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else NAN


READER = MlLogReader()
