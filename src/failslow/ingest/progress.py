"""What progress reports have in common: bars, elapsed time in whole seconds, steps per epoch.

In: pieces of log lines. Out: numbers a reader can add. A bar and its cumulative, rounded clock:

     12%|█▏        | 120/1000 [02:03<15:01,  1.02s/it, loss=2.1]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from failslow.ingest.base import NAN, SeriesBuilder, parse_clock

__all__ = [
    "Bar",
    "ElapsedRecords",
    "EpochSteps",
    "clock_in",
    "elapsed_seconds",
    "find_number",
    "json_object",
    "number",
    "one_writer",
    "parse_bar",
    "whole",
]

_DATE = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T,]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_DATE_WITHIN = 120
"""A line's own time stands in its first characters; dates further on mean something else."""
_ELAPSED = re.compile(r"(?:(\d{1,9}) days?, )?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,2})$")
_BAR = re.compile(
    r"\d+%\|[^|]*\|\s*(?P<count>\d{1,18})/(?P<total>\d{1,18})\s*\[(?P<elapsed>[\d:]+)<"
)


def clock_in(line: str) -> float:
    """Epoch seconds of the date near the start of a log line; NaN without one."""
    match = _DATE.search(line, 0, _DATE_WITHIN)
    return parse_clock(match[0]) if match else NAN


def elapsed_seconds(text: str) -> float:
    """Seconds of `02:03`, `1:02:03` or `1 day, 2:03:04`; NaN when it is none of these."""
    match = _ELAPSED.match(text)
    if match is None:
        return NAN
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def find_number(pattern: re.Pattern[str], text: str) -> float:
    """The number in the first group of `pattern`; NaN where it does not occur."""
    match = pattern.search(text)
    return float(match[1]) if match else NAN


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that begins at the first brace of `text`; None when there is none whole."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        value = json.loads(text[start:])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: object) -> float:
    """A field of a JSON object as a float; NaN when it is missing or not a number."""
    if not isinstance(value, int | float | str):
        return NAN
    try:
        return float(value)
    except (ValueError, OverflowError):
        return NAN


def whole(value: object) -> int | None:
    """A field of a JSON object as a step number; None when it is not one."""
    wide = number(value)
    return int(wide) if abs(wide) < 2**62 else None


@dataclass(frozen=True, slots=True)
class Bar:
    """A tqdm progress bar: what stands before it, iterations done and planned, seconds so far."""

    label: str
    count: int
    total: int
    elapsed_s: float


def parse_bar(line: str) -> Bar | None:
    """The progress bar in `line`; None when there is none."""
    match = _BAR.search(line) if "%|" in line else None
    if match is None:
        return None
    label = line[: match.start()].strip(" :\t")
    elapsed_s = elapsed_seconds(match["elapsed"])
    return Bar(label, int(match["count"]), int(match["total"]), elapsed_s)


def one_writer(told: Mapping[str, int], builder: SeriesBuilder) -> str:
    """The writer that printed most, of `told` lines each, where several draw the same progress.

    Records of rounded time end at other steps for each of them, so they must not be mixed.
    """
    kept = max(told, key=lambda writer: told[writer])
    if len(told) > 1:
        builder.warn(
            f"{len(told)} writers print the same steps: kept writer {kept or 'without a label'}"
        )
    return kept


class EpochSteps:
    """Step numbers that go on over epochs, for a log that may count anew in each.

    An index that falls while the epoch grows was counted anew: the epochs in between had as many
    iterations as the log says, or as the longest epoch seen so far.

        steps = EpochSteps()
        steps.step(0, 90), steps.step(0, 99), steps.step(1, 9)    # 90, 99, 109
    """

    def __init__(self) -> None:
        self._epoch, self._index, self._longest = 0, 0, 0
        self._base: dict[int, int] = {}

    def step(self, epoch: int, index: int, per_epoch: int = 0) -> int:
        """The step of iteration `index` of `epoch`; per_epoch: its length, 0 when not said."""
        if not self._base:
            self._base[epoch] = 0
        elif epoch > self._epoch:
            grown = 0
            if index <= self._index:
                grown = (epoch - self._epoch) * (per_epoch or self._longest)
            self._base[epoch] = self._base[self._epoch] + grown
        elif epoch < self._epoch:  # restarted, perhaps with epochs of another length
            self._base = {epoch: self._base.get(epoch, 0)}
            self._longest = 0
        self._epoch, self._index = epoch, index
        self._longest = max(self._longest, index)
        return self._base[epoch] + index


class ElapsedRecords:
    """Records from the time elapsed since the start, which logs print in whole seconds.

    Two rounded readings differ from the truth by up to one unit, so a record is added only when
    20 units have passed: 5 %, half of the least slowdown that is called a fail-slow.
    """

    _UNITS = 20

    def __init__(self, builder: SeriesBuilder, writer: str = "") -> None:
        self._builder, self._writer = builder, writer
        self._started = self._added = self._waiting = self._merged = False
        self.step, self.elapsed_s = -1, 0.0
        """Of the latest point; -1 before the first."""
        self._from_step, self._pauses, self._active_s, self._from_work = 0, 0, 0.0, NAN

    def restart(self, step: int, elapsed_s: float, work_total: float = NAN) -> None:
        """Count from here on, as after a restart."""
        if self._added:
            self._builder.new_run(f"elapsed time restarts at step {step}")
        self._open(step, elapsed_s, work_total)

    def pause(self, duration_s: float) -> None:
        """Evaluation or a checkpoint took this long since the last point: no iteration time."""
        if self._started and duration_s > 0:
            self._active_s -= duration_s
            self._pauses += 1

    def point(
        self,
        step: int,
        elapsed_s: float,
        *,
        resolution_s: float = 1.0,
        work_total: float = NAN,
        data_s: float = NAN,
    ) -> None:
        """After `step` iterations (and `work_total` of work) `elapsed_s` had passed.

        A step that goes back while time goes on is another process's and left out.
        """
        if not elapsed_s >= 0:
            return
        if not self._started or elapsed_s < self.elapsed_s - 2 * resolution_s:
            self.restart(step, elapsed_s, work_total)
            return
        if step < self.step:
            return
        self._active_s += elapsed_s - self.elapsed_s
        self.step, self.elapsed_s = step, elapsed_s
        iterations = step - self._from_step
        if iterations <= 0:
            return
        if self._active_s < self._UNITS * resolution_s * (1 + self._pauses):
            self._waiting = True
            return
        if self._waiting and not self._merged:
            self._merged = True
            self._builder.warn(
                f"elapsed time has a resolution of {resolution_s:g} s: lines are averaged until "
                f"they span {self._UNITS * resolution_s:g} s"
            )
        self._add(iterations, work_total, data_s)

    def close(self) -> None:
        """A log too short for one record gives the little it has."""
        if not self._added and self.step > self._from_step and self._active_s > 0:
            self._builder.warn(
                f"the log spans only {self._active_s:g} s of rounded elapsed time: its one "
                f"record is inexact"
            )
            self._add(self.step - self._from_step, NAN, NAN)

    def _open(self, step: int, elapsed_s: float, work_total: float) -> None:
        self._started, self._waiting, self._pauses = True, False, 0
        self._from_step, self.step = step, step
        self.elapsed_s, self._active_s, self._from_work = elapsed_s, 0.0, work_total

    def _add(self, iterations: int, work_total: float, data_s: float) -> None:
        self._added = True
        self._builder.add(
            step=self.step,
            duration_s=self._active_s / iterations,
            iterations=iterations,
            clock_s=self.elapsed_s,
            work=(work_total - self._from_work) / iterations,
            data_s=data_s,
            writer=self._writer,
        )
        self._open(self.step, self.elapsed_s, work_total)
