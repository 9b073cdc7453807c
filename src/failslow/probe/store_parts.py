"""The parts of a store: one Parquet file for every attempt of a probe that has ended, by DuckDB.

In: `ProbeRecord`s, files. Out: the files, and the records again; what is torn or foreign is named.
A part has one row: the columns of the attempt, those of its result that questions are asked about,
and the whole result as JSON in `record`:

    probe   attempt ending   wanted_nodes … result        cause              slowdown … record
    4n-0007       1 finished            4 … communication network congestion     1.62 … {"schema":…
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from failslow.errors import MissingDependencyError, ProbeError
from failslow.probe.campaign import Attempt, Ending
from failslow.probe.result import ProbeResult

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "ProbeRecord",
    "check_place",
    "draft_part",
    "is_draft",
    "name_of_part",
    "open_database",
    "read_parts",
]

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FILE = re.compile(r"([A-Za-z0-9_-]+)\.([1-9][0-9]{0,8})\.parquet")
_DRAFT = re.compile(rf"\.{_FILE.pattern}\.[0-9a-f]{{8}}")
_PATTERN = "[*?"
_PYTHON = {"VARCHAR": str, "INTEGER": int, "DOUBLE": float}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)

_ATTEMPT_COLUMNS = {
    "probe": "VARCHAR",
    "attempt": "INTEGER",
    "ending": "VARCHAR",
    "wanted_nodes": "INTEGER",
    "executor": "VARCHAR",
    "submitted_t": "DOUBLE",
    "ended_t": "DOUBLE",
    "why": "VARCHAR",
}
_RESULT_COLUMNS = {
    "nodes": "VARCHAR[]",
    "workers": "INTEGER",
    "preset": "VARCHAR",
    "begin_t": "DOUBLE",
    "end_t": "DOUBLE",
    "state": "VARCHAR",
    "iterations": "BIGINT",
    "healthy_iteration_s": "DOUBLE",
    "reference_iteration_s": "DOUBLE",
    "result": "VARCHAR",
    "cause": "VARCHAR",
    "onset_delay_s": "DOUBLE",
    "slow_s": "DOUBLE",
    "slowdown": "DOUBLE",
    "lost_s": "DOUBLE",
    "jct_increase_share": "DOUBLE",
    "culprits": "VARCHAR[]",
    "culprit_nodes": "VARCHAR[]",
    "sm_utilisation_share": "DOUBLE",
    "cnp_per_s": "DOUBLE",
    "temperature_c": "DOUBLE",
    "temperature_max_c": "DOUBLE",
    "latency_cv_intra_node": "DOUBLE",
    "latency_cv_inter_node": "DOUBLE",
}
"""Of a `ProbeResult`, what questions are asked about; null where there is no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """One attempt of a campaign's probe, and what came of it."""

    probe: str
    """Name within the campaign: "4n-0007"."""
    attempt: int
    """From 1."""
    ending: Ending
    wanted_nodes: int
    executor: str
    submitted_t: float
    """Epoch seconds at which it was handed to the executor; it may have waited in a queue."""
    ended_t: float
    why: str = ""
    """Of one that did not finish, one line."""
    result: ProbeResult | None = None
    """None: nothing was measured."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.probe) is None or self.attempt < 1:
            raise ValueError(
                f"probe {self.probe!r}, attempt {self.attempt}: a file is named by them; letters, "
                "digits, _ and -, and a number from 1"
            )

    @property
    def file_name(self) -> str:
        """Of its part."""
        return f"{self.probe}.{self.attempt}.parquet"

    @property
    def as_attempt(self) -> Attempt:
        """What the planner must know of it."""
        return Attempt(
            probe=self.probe,
            number=self.attempt,
            ending=self.ending,
            started_t=self.submitted_t,
        )


def name_of_part(file: Path) -> tuple[str, int] | None:
    """(probe, attempt) a part is named by; None: no part is named so.

    >>> name_of_part(Path("4n-0007.2.parquet"))
    ('4n-0007', 2)
    """
    found = _FILE.fullmatch(file.name)
    return (found[1], int(found[2])) if found else None


def is_draft(file: Path) -> bool:
    """Whether `draft_part` names files so.

    >>> is_draft(Path(".4n-0007.2.parquet.0a1b2c3d")), is_draft(Path(".gitkeep"))
    (True, False)
    """
    return _DRAFT.fullmatch(file.name) is not None


def check_place(folder: Path) -> None:
    """Raises ProbeError where DuckDB cannot name files of the folder."""
    path = str(folder.absolute())
    if (shown := _shown(path)) != path:
        raise ProbeError(
            f"{shown}: its name is no UTF-8, and DuckDB opens no such files; use another folder"
        )
    if "\\" in path and any(c in path for c in _PATTERN):
        raise ProbeError(
            f"{path}: has a backslash and one of {' '.join(_PATTERN)} in its name, which DuckDB "
            "takes for a pattern; use another folder"
        )


def read_parts(
    database: DuckDBPyConnection, folder: Path, *, all_readable: bool = False
) -> tuple[list[ProbeRecord], list[str]]:
    """All records, in the order they ended, and a line for each file that is left out.

    all_readable: a part the disk does not give is no reason to go on without it. Raises ProbeError
    then, and OSError where the folder cannot be read.
    """
    # the pattern fits drafts too, whose names begin with a point
    files = sorted(p for p in folder.glob("*.parquet") if not p.name.startswith("."))
    records: list[ProbeRecord] = []
    warnings: list[str] = []

    @contextlib.contextmanager
    def leaving_out(name: object, *errors: type[Exception]) -> Iterator[None]:
        try:
            yield
        except errors as error:
            warnings.append(
                f"{_shown(name)}: left out: torn, or no part of a store: {_line(error)}"
            )

    rows: list[tuple[Any, ...]] = []
    try:
        rows = _rows(database, files)
    except (_database_error(), UnicodeError, TypeError):
        # one by one: a file must not decide about the others, or what types they have
        for file in files:
            try:
                with file.open("rb") as opened:
                    opened.read()
            except OSError as error:
                why = error.strerror or str(error)
                if all_readable and name_of_part(file) and not isinstance(error, IsADirectoryError):
                    raise ProbeError(
                        f"{file}: cannot be read: {why}; what it holds would be measured again: "
                        "make it readable, or move it away"
                    ) from None
                warnings.append(f"{_shown(file)}: left out: cannot be read: {why}")
                continue
            with leaving_out(file, _database_error(), UnicodeError, TypeError):
                rows += _rows(database, [file])
    for name, *values in rows:
        with leaving_out(name, ValueError, TypeError):
            record = _record(*values)
            if Path(name).name != record.file_name:
                raise ValueError(f"what it holds belongs into {record.file_name}")
            records.append(record)
    records.sort(key=lambda r: (r.ended_t, r.probe, r.attempt))
    return records, warnings


def draft_part(database: DuckDBPyConnection, record: ProbeRecord, folder: Path) -> Path:
    """A file with the record, of a name that `read_parts` passes over.

    Raises OSError where the disk refuses it, else ProbeError.
    """
    values = {name: getattr(record, name) for name in _ATTEMPT_COLUMNS}
    for name in _RESULT_COLUMNS:
        found = getattr(record.result, name, None)
        values[name] = list(found) if isinstance(found, tuple) else found
    values["record"] = None if record.result is None else record.result.to_json()
    types = {**_ATTEMPT_COLUMNS, **_RESULT_COLUMNS, "record": "VARCHAR"}
    columns = ", ".join(f"CAST(${name} AS {kind}) AS {name}" for name, kind in types.items())
    # absolute: DuckDB takes a first ~ for the home, and file: for a scheme
    draft = folder.absolute() / f".{record.file_name}.{secrets.token_hex(4)}"
    try:
        database.execute(f"CREATE OR REPLACE TABLE part AS SELECT {columns}", values)
        database.table("part").write_parquet(str(draft), compression="zstd")
    except _database_error() as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        # of what the disk said the library keeps the words alone
        for number in _DISK:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number)) from None
        raise ProbeError(
            f"{draft}: cannot be written: {_line(error)}; mend that, or use another folder"
        ) from None
    return draft


def _rows(database: DuckDBPyConnection, files: Sequence[Path]) -> list[tuple[Any, ...]]:
    """File name, the columns of the attempt, and `record`, of every row.

    Raises duckdb.Error, and TypeError where values have other types: those of one file become all
    others', whose values are then changed.
    """
    if not files:
        return []
    given = {str(file.absolute()): str(file) for file in files}
    # the reader takes names for patterns
    names = ["".join(f"[{c}]" if c in _PATTERN else c for c in name) for name in given]
    columns = ", ".join(("filename", *_ATTEMPT_COLUMNS, "record"))
    # no Hive partitioning: a folder called probe=x above would stand in for the column
    rows = database.execute(
        f"SELECT {columns} FROM read_parquet(?, filename = true, union_by_name = true, "
        "hive_partitioning = false)",
        [names],
    ).fetchall()
    kinds = [str, *(_PYTHON[kind] for kind in _ATTEMPT_COLUMNS.values()), str]
    for row in rows:
        for value, kind in zip(row, kinds, strict=True):
            if value is not None and type(value) is not kind:
                raise TypeError(f"{value!r} is no {kind.__name__}")
    return [(given.get(name, name), *values) for name, *values in rows]


def _record(*values: Any) -> ProbeRecord:
    """Raises ValueError or TypeError where the values are not those of a record."""
    *told, text = values
    of = dict(zip(_ATTEMPT_COLUMNS, told, strict=True))
    missing = [name for name, value in of.items() if value is None]
    if missing:
        raise ValueError(f"no part of a store: without {missing[0]}")
    if of["ending"] not in get_args(Ending):
        raise ValueError(f"ending is {of['ending']!r}; known: {', '.join(get_args(Ending))}")
    result = None if text is None else ProbeResult.from_json(text, where="record")
    return ProbeRecord(**of, result=result)


@contextlib.contextmanager
def open_database() -> Iterator[DuckDBPyConnection]:
    """One in memory. Raises MissingDependencyError without DuckDB."""
    try:
        import duckdb
    except ImportError:
        raise MissingDependencyError(
            "a store of probes needs DuckDB: pip install 'failslow[probe]'"
        ) from None
    # one thread: this may be a node that others compute on
    with duckdb.connect(config={"threads": 1}) as database:
        yield database


def _database_error() -> type[Exception]:
    import duckdb

    return duckdb.Error


def _shown(name: object) -> str:
    """Of a file, with \\xff for bytes that are no UTF-8."""
    return os.fsencode(str(name)).decode(errors="backslashreplace")


def _line(error: Exception) -> str:
    """The first line of what a library says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
