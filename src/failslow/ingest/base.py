"""What every reader builds on: a source of clean lines, and a builder of one job's series.

In: a path, `-`, or bytes; plain or gzip. Out: a `StepSeries`. A reader is a module in
`failslow.ingest.formats` with one `READER`; it says which lines are its own and turns them
into `SeriesBuilder.add` calls. All mending (NaN, zero and negative times, duplicates,
interleaved ranks, restarts, the clock) is done once, in `SeriesBuilder.finish`.

    builder.add(step=120, duration_s=0.571, clock_s=1745735250.9, work=524288)
"""

from __future__ import annotations

import gzip
import io
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from failslow.errors import InputError
from failslow.records import Run, StepSeries

__all__ = ["NAN", "Reader", "SeriesBuilder", "Source"]

NAN = float("nan")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Source:
    """One input, readable any number of times (stdin is kept in memory).

    Raises InputError (one line: which file, what to do) when it cannot be opened.
    """

    def __init__(self, name: str, *, path: Path | None = None, data: bytes | None = None) -> None:
        self.name = name
        self.path = path
        self._data = data

    @classmethod
    def from_path(cls, path: str | Path) -> Source:
        """The file at `path`; `-` reads stdin to its end."""
        if str(path) == "-":
            return cls("<stdin>", data=sys.stdin.buffer.read())
        return cls(str(path), path=Path(path))

    def open(self) -> IO[bytes]:
        """Raw bytes, gunzipped when they begin with the gzip magic."""
        try:
            if self.path is None:
                raw: IO[bytes] = io.BytesIO(self._data or b"")
            else:
                raw = self.path.open("rb")
            magic = raw.read(2)
            raw.seek(0)
        except OSError as error:
            raise InputError(
                f"{self.name}: cannot be read: {error.strerror or error}; check the path"
            ) from None
        return gzip.GzipFile(fileobj=raw) if magic == b"\x1f\x8b" else raw

    def lines(self) -> Iterator[str]:
        """Text lines without line end, ANSI colours or carriage returns; bad UTF-8 replaced.

        A progress bar that rewrites its line with carriage returns gives one line a rewrite.
        A gzip file cut short gives what could be read.
        """
        with self.open() as raw:
            # newline=None: \n, \r\n and a bare \r all end a line
            text = io.TextIOWrapper(raw, encoding="utf-8", errors="replace", newline=None)
            try:
                for line in text:
                    yield _ANSI.sub("", line[:-1]) if "\x1b" in line else line.rstrip("\n")
            except (EOFError, gzip.BadGzipFile, OSError):
                return


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
        raise NotImplementedError

    def extend(self, rows: Iterable[tuple[int, float]]) -> None:
        """Many (step, duration_s) at once."""
        for step, duration_s in rows:
            self.add(step=step, duration_s=duration_s)
