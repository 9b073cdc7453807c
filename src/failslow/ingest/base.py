"""What every reader builds on: the reader's contract, and a builder of one job's series.

In: a `Source` of lines. Out: a `StepSeries`. A reader is a module in `failslow.ingest.formats`
with one `READER`; it says which lines are its own and turns them into `SeriesBuilder.add` calls.
All mending (NaN, zero and negative times, duplicates, interleaved ranks, restarts, the clock) is
done once, in `SeriesBuilder.finish`.

    builder.add(step=120, duration_s=0.571, clock_s=1745735250.9, work=524288)
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Protocol

import numpy as np

from failslow.errors import InputError
from failslow.ingest.derive import undo_cumulative, undo_running_mean
from failslow.ingest.mend import Columns, mend
from failslow.ingest.text import NAN, NUMBER, Source, parse_clock, split_prefix
from failslow.records import Run, StepSeries

__all__ = [
    "NAN",
    "NUMBER",
    "Reader",
    "RunHeader",
    "SeriesBuilder",
    "Source",
    "parse_clock",
    "split_prefix",
    "undo_cumulative",
    "undo_running_mean",
]

_STEP_LIMIT = 2**62
_CLOCK_LIMIT_S = 1e12


class Reader(Protocol):
    """A log format. `name` is what `--format` takes; `summary` shows a line of the format."""

    name: str
    summary: str
    priority: int
    """Among readers that recognise a file the highest wins, then the most matching lines."""

    def matches(self, line: str) -> bool:
        """Whether this line carries a timing record of the format; fast, never raises."""
        ...

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Add every timing record of `source` to `builder`; skip what is not one."""
        ...


class SeriesBuilder:
    """Collects timing records as they are read and mends them into a `StepSeries`."""

    def __init__(self, source: str, format_name: str) -> None:
        self._source, self._format = source, format_name
        self._step, self._iterations = array("q"), array("q")
        self._duration, self._clock = array("d"), array("d")
        self._work, self._data = array("d"), array("d")
        self._run, self._writer = array("q"), array("q")
        self._runs: list[Run] = [Run()]
        self._writers: dict[str, int] = {"": 0}
        self._warnings: Counter[str] = Counter()
        self.planned_ramp = ""

    def __len__(self) -> int:
        return len(self._step)

    def add(
        self,
        *,
        step: int,
        duration_s: float,
        iterations: int = 0,
        clock_s: float = NAN,
        work: float = NAN,
        data_s: float = NAN,
        writer: str = "",
    ) -> None:
        """One record: mean `duration_s` per iteration, the last of them being `step`.

        iterations: how many it averages; 0 = the distance to the step before it.
        clock_s: epoch (or any steady) seconds at which the line was written.
        work, data_s: tokens or samples, and data-loading seconds, per iteration.
        writer: which rank printed the line, where the log interleaves several.
        """
        if not (-_STEP_LIMIT < step < _STEP_LIMIT and iterations < _STEP_LIMIT):
            self.warn("a record with an impossible step number was dropped")
            return
        self._step.append(step)
        self._duration.append(duration_s)
        self._iterations.append(iterations)
        self._clock.append(clock_s)
        self._work.append(work)
        self._data.append(data_s)
        self._run.append(len(self._runs) - 1)
        if writer not in self._writers:
            self._writers[writer] = len(self._writers)
        self._writer.append(self._writers[writer])

    def new_run(self, note: str, *, config_changed: bool = False) -> None:
        """A header says the program started anew; before the first record it is ignored."""
        if self._run and self._run[-1] == len(self._runs) - 1:
            self._runs.append(Run(note=note, config_changed=config_changed))

    def warn(self, message: str) -> None:
        """Count a complaint; equal messages are reported once with their number."""
        self._warnings[message] += 1

    def finish(self) -> StepSeries:
        """The mended series. Raises InputError when no usable record is left."""
        if not len(self):
            raise InputError(
                f"{self._source}: no timing record of format {self._format} in it; check that it "
                f"is the training log, or name another --format"
            )
        clock_s = np.frombuffer(self._clock, np.float64)
        columns = Columns(
            step=np.frombuffer(self._step, np.int64),
            duration_s=np.frombuffer(self._duration, np.float64),
            iterations=np.frombuffer(self._iterations, np.int64),
            clock_s=np.where(np.abs(clock_s) < _CLOCK_LIMIT_S, clock_s, NAN),
            work=np.frombuffer(self._work, np.float64),
            data_s=np.frombuffer(self._data, np.float64),
            run=np.frombuffer(self._run, np.int64),
            writer=np.frombuffer(self._writer, np.int64),
        )
        told = [
            message if count == 1 else f"{message} ({count:,} times)"
            for message, count in self._warnings.items()
        ]
        return mend(
            columns,
            source=self._source,
            format_name=self._format,
            runs=self._runs,
            writers=list(self._writers),
            planned_ramp=self.planned_ramp,
            warnings=told,
        )


class _Runs(Protocol):
    """What can start a run: a `SeriesBuilder`, and what collects records for one."""

    def new_run(self, note: str, *, config_changed: bool = False) -> None: ...


class RunHeader:
    """Settings a log prints at each start of the program; a changed one starts a run.

    header.note("global_batch_size", "128")    # as header lines are met
    header.open_run(builder)                   # before each record is added
    """

    def __init__(self) -> None:
        self._settings: dict[str, str] = {}
        self._seen: dict[str, str] = {}

    def note(self, name: str, value: str) -> None:
        """The header says `name` is `value`."""
        self._seen[name] = value

    def get(self, name: str) -> float:
        """The latest value as a number; NaN when it is none or was not printed."""
        try:
            return float(self._seen.get(name) or self._settings[name])
        except (KeyError, ValueError):
            return NAN

    def open_run(self, records: _Runs) -> None:
        """Start a run in the builder if header lines came since the record before."""
        if not self._seen:
            return
        changed = [
            f"{name} {self._settings[name]} -> {value}"
            for name, value in self._seen.items()
            if self._settings.get(name, value) != value
        ]
        records.new_run(
            ", ".join(changed) or "the program started anew", config_changed=bool(changed)
        )
        self._settings.update(self._seen)
        self._seen.clear()
