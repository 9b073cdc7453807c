"""Generic tables: CSV (comma, tab or semicolon) and JSON lines.

In: a table with a column of seconds (or milliseconds) per iteration. Out: its rows. Columns with
obvious names are found; others are named by `TableColumns` (`--time-column` and its relatives).

    step,step_time_ms,tokens,timestamp
    10,571.3,524288,2025-01-01 10:00:00
    {"step": 10, "step_time_ms": 571.3, "tokens": 524288, "timestamp": 1735725600.0}
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from failslow.errors import InputError
from failslow.ingest.base import (
    NAN,
    SeriesBuilder,
    Source,
    parse_clock,
    split_prefix,
)

__all__ = ["READERS", "CsvReader", "JsonLinesReader", "TableColumns", "TimeUnit"]

TimeUnit = Literal["s", "ms", "us"]

_UNIT_S: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_ITERATION = r"(?:step|iter|iteration|batch)"
_UNIT = r"(?:(?:in_)?(?:s|secs?|seconds|ms|msecs?|milliseconds|us|microseconds))"
_TIME = re.compile(
    rf"(?:train(?:ing)?_)?{_ITERATION}_(?:time|timing|duration|latency)(?:_{_UNIT})?"
    rf"|(?:time|duration)_per_{_ITERATION}(?:_{_UNIT})?|{_UNIT}_per_{_ITERATION}"
    rf"|duration(?:_{_UNIT})?|dt_{_UNIT}|elapsed_time_per_iteration(?:_{_UNIT})?"
)
_DATA = re.compile(rf"data(?:_?load(?:er|ing))?_(?:time|wait|duration)(?:_{_UNIT})?|data_s|data_ms")
_STEP = (
    "step",
    "global_step",
    "iteration",
    "iter",
    "train_step",
    "step_num",
    "trainer_global_step",
)
_CLOCK = ("timestamp", "wall_time", "walltime", "datetime", "time_stamp", "created_at", "epoch_s")
_WORK = (
    *("tokens", "num_tokens", "n_tokens", "tokens_per_step", "tokens_per_iteration"),
    *("samples", "num_samples", "global_batch_size", "batch_size", "samples_per_step"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """Names of a table's columns; None: found by an obvious name, or not there.

    `time` is per iteration. Without it, and with `timestamp` named, times are the differences of
    the timestamps. `time_unit` None: what the name says (`_ms`, `(us)`), else seconds.
    """

    time: str | None = None
    step: str | None = None
    work: str | None = None
    timestamp: str | None = None
    data: str | None = None
    time_unit: TimeUnit | None = None


class CsvReader:
    """A table with a header line: comma, tab or semicolon between the columns."""

    name = "csv"
    summary = "step,step_time_ms,tokens,timestamp"
    priority = 10

    def __init__(self, columns: TableColumns | None = None) -> None:
        self._columns = columns or TableColumns()

    def matches(self, line: str) -> bool:
        """Whether the line is a header with a time column, and a step or timestamp column."""
        if self._columns == TableColumns() and not _promising(line):
            return False
        return self._header(split_prefix(line)[1]) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every row below the header; a header printed again starts a run.

        Raises InputError when a named column is missing.
        """
        _Rows(source, builder, self._columns).read(self._rows(source))

    def _header(self, text: str) -> tuple[str, ...] | None:
        names = tuple(_cells(text, _delimiter(text)))
        roles = _resolve(names, self._columns)
        if roles is None or (self._columns == TableColumns() and not roles.ordered):
            return None
        return names

    def _rows(self, source: Source) -> Iterator[_Row]:
        names: tuple[str, ...] | None = None
        header = delimiter = ""
        for line in source.lines():
            writer, text = split_prefix(line)
            if names is None:
                names = self._header(text)
                header, delimiter = text, _delimiter(text)
                if names is None and text:  # should no header come, these are the columns there
                    yield writer, dict.fromkeys(_cells(text, delimiter), "")
            elif text == header:
                yield writer, None
            elif text:
                cells = _cells(text, delimiter)
                if len(cells) >= len(names):  # fewer: cut off, perhaps inside a number
                    yield writer, dict(zip(names, cells, strict=False))


class JsonLinesReader:
    """A JSON object a line; fields inside an object are named `outer.inner`."""

    name = "jsonl"
    summary = '{"step": 10, "step_time_ms": 571.3, "tokens": 524288}'
    priority = 10

    def __init__(self, columns: TableColumns | None = None) -> None:
        self._columns = columns or TableColumns()

    def matches(self, line: str) -> bool:
        """Whether the line is an object with a time, and a step or timestamp."""
        automatic = self._columns == TableColumns()
        if "{" not in line or (automatic and not _promising(line)):
            return False
        fields = _fields(split_prefix(line)[1])
        roles = _resolve(tuple(fields), self._columns)
        return roles is not None and (roles.ordered or not automatic)

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every object with the time field. Raises InputError when a named field is missing."""
        rows = (
            (writer, _fields(text)) for writer, text in map(split_prefix, source.lines()) if text
        )
        _Rows(source, builder, self._columns).read(rows)


READERS = (CsvReader(), JsonLinesReader())

_Row = tuple[str, Mapping[str, object] | None]
"""(writer, fields); None in place of the fields: the header is printed again."""


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which field plays which part, and the units of the two times."""

    time: str | None
    step: str | None
    work: str | None
    timestamp: str | None
    data: str | None
    time_unit_s: float
    data_unit_s: float

    @property
    def ordered(self) -> bool:
        return self.step is not None or self.timestamp is not None


class _Rows:
    """Adds rows of named fields to a builder."""

    def __init__(self, source: Source, builder: SeriesBuilder, columns: TableColumns) -> None:
        self._source, self._builder, self._columns = source, builder, columns
        self._last: dict[str, tuple[int, float]] = {}

    def read(self, rows: Iterable[_Row]) -> None:
        count = 0
        seen: dict[str, None] = {}
        for writer, fields in rows:
            if fields is None:
                self._builder.new_run("the header is printed again")
                continue
            roles = _resolve(tuple(fields), self._columns)
            if roles is None:
                seen = seen or dict.fromkeys(fields)
                continue
            count += 1
            self._add(roles, fields, count, writer)
        if not count:
            raise InputError(_missing(self._source, self._columns, list(seen)))

    def _add(self, roles: _Roles, fields: Mapping[str, object], row: int, writer: str) -> None:
        step = float(row) if roles.step is None else _number(fields[roles.step])
        clock_s = NAN if roles.timestamp is None else _clock(fields[roles.timestamp])
        if roles.time is not None and fields.get(roles.time) in (None, ""):
            return  # a validation row
        if not abs(step) < 2**62:
            self._builder.warn(f"a row whose {roles.step} is no number was skipped")
            return
        iterations = 0
        if roles.time is not None:
            duration_s = _number(fields[roles.time]) * roles.time_unit_s
        else:
            before = self._last.get(writer)
            self._last[writer] = int(step), clock_s
            if before is None or not before[0] < step:
                return
            iterations = int(step) - before[0]
            duration_s = (clock_s - before[1]) / iterations
        self._builder.add(
            step=int(step),
            duration_s=duration_s,
            iterations=iterations,
            clock_s=clock_s,
            work=NAN if roles.work is None else _number(fields[roles.work]),
            data_s=NAN if roles.data is None else _number(fields[roles.data]) * roles.data_unit_s,
            writer=writer,
        )


def _missing(source: Source, columns: TableColumns, names: Sequence[str]) -> str:
    wanted = [n for n in (columns.time, columns.step, columns.work) if n is not None]
    wanted += [n for n in (columns.timestamp, columns.data) if n is not None]
    absent = [name for name in wanted if _find(name, names) is None]
    what = f"no column {absent[0]!r}" if absent else "no column of seconds per iteration"
    listed = ", ".join(names[:20]) or "none"
    return (
        f"{source.name}: {what} in the table; its first line has: {listed}; "
        f"name the right one with --time-column NAME"
    )


@lru_cache(maxsize=256)
def _resolve(names: tuple[str, ...], columns: TableColumns) -> _Roles | None:
    """The parts the columns play; None without a time, or without a column asked for by name."""
    try:
        time = _role(columns.time, names, _TIME.fullmatch)
        step = _role(columns.step, names, _STEP.__contains__)
        work = _role(columns.work, names, _WORK.__contains__)
        timestamp = _role(columns.timestamp, names, _CLOCK.__contains__)
        data = _role(columns.data, names, _DATA.fullmatch)
    except KeyError:
        return None
    if time is None and columns.timestamp is None:
        return None
    unit = _unit_s(time) if columns.time_unit is None else _UNIT_S[columns.time_unit]
    return _Roles(time, step, work, timestamp, data, unit, _unit_s(data))


def _role(wanted: str | None, names: Sequence[str], obvious: Callable[[str], object]) -> str | None:
    if wanted is not None:
        found = _find(wanted, names)
        if found is None:
            raise KeyError(wanted)
        return found
    for name in names:
        if obvious(_plain(name)) or obvious(_plain(re.split(r"[./]", name)[-1])):
            return name
    return None


def _find(wanted: str, names: Sequence[str]) -> str | None:
    if wanted in names:
        return wanted
    return next((name for name in names if _plain(name) == _plain(wanted)), None)


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _unit_s(name: str | None) -> float:
    match = re.search(r"(?:^|_)(m|u|micro|milli)s(?:ecs?|econds)?(?:_|$)", _plain(name or ""))
    return 1.0 if match is None else _UNIT_S[match[1][0].replace("m", "ms").replace("u", "us")]


def _promising(line: str) -> bool:
    """A cheap look for an obvious time column, before a line is taken apart."""
    if len(line) > 20_000:
        return False
    lower = line.lower()
    return any(part in lower for part in ("tim", "duration", "per", "dt_", "latency"))


def _delimiter(line: str) -> str:
    return max(",\t;", key=line.count)


def _cells(line: str, delimiter: str) -> list[str]:
    if '"' in line:
        if line.count('"') % 2:  # cut off inside a cell
            return []
        try:
            return next(csv.reader([line], delimiter=delimiter), [])
        except csv.Error:
            return []
    return [cell.strip(" #") for cell in line.split(delimiter)]


def _fields(text: str) -> dict[str, object]:
    """The fields of a JSON object, one level of objects in it flattened; {} when it is none."""
    start = text.find("{")
    try:
        value = json.loads(text[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    flat: dict[str, object] = {}
    for name, field in value.items():
        if isinstance(field, dict):
            flat.update({f"{name}.{inner}": item for inner, item in field.items()})
        else:
            flat[name] = field
    return flat


def _number(value: object) -> float:
    if not isinstance(value, int | float | str):
        return NAN
    try:
        return float(value)
    except (ValueError, OverflowError):
        return NAN


def _clock(value: object) -> float:
    """Epoch seconds of a number (s, ms or µs since 1970, or any steady seconds) or a date."""
    seconds = _number(value)
    if not math.isnan(seconds):
        return seconds / (1e6 if seconds > 1e14 else 1e3 if seconds > 1e11 else 1.0)
    return parse_clock(value.strip()) if isinstance(value, str) else NAN
