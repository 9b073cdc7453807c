"""The store of a campaign: a folder with one Parquet file for every attempt that has ended.

In: `ProbeRecord`s, one at a time. Out: the same to any number of readers, while it grows:

    STORE/failslow-probes.json     {"schema": "failslow.probe-store/1", "campaign": "c4f21a09",
                                    "made_t": 1745735241.0, "job": {"workers_per_node": 4, …}}
    STORE/parts/4n-0007.1.parquet  one row: the attempt, the columns of its result, and the whole
                                   result as JSON in `record`
    STORE/history.jsonl            results that count for the fleet's reference, one a line
    STORE/probes/4n-0007.1/        journal and logs of an attempt that runs, was slow, or failed
    STORE/writer.lock              held by the campaign that writes; others are refused

A part is written beside its place and renamed into it: it is there whole or not at all, and whoever
dies loses at most the probes that were running. Any tool that reads Parquet reads the store:

    duckdb -c "SELECT cause, count(*) FROM 'STORE/parts/*.parquet' GROUP BY cause"
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from failslow.errors import ProbeError
from failslow.probe.campaign import Attempt
from failslow.probe.store_parts import ProbeRecord, draft_part, open_database, read_parts

__all__ = [
    "SCHEMA",
    "ProbeRecord",
    "StoreReading",
    "StoreWriter",
    "is_store",
    "read_store",
]

SCHEMA = "failslow.probe-store/1"
_MANIFEST, _LOCK, _HISTORY = "failslow-probes.json", "writer.lock", "history.jsonl"
_PARTS, _FOLDERS = "parts", "probes"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReading:
    """A store as it was at one moment."""

    path: Path
    campaign: str
    job: Mapping[str, Any]
    """What every probe of it trains: results of different jobs do not compare."""
    records: tuple[ProbeRecord, ...]
    """In the order they ended."""
    warnings: tuple[str, ...] = ()
    """Files that were left out, one line each."""


def is_store(path: Path) -> bool:
    """Whether the folder says that it is one."""
    try:
        return SCHEMA in (path / _MANIFEST).read_text(encoding="utf-8")[:4096]
    except (OSError, ValueError):
        return False


def read_store(path: Path) -> StoreReading:
    """All attempts that have ended by now. A campaign may be writing meanwhile.

    A part that is torn, or is none of ours, is left out and named in `warnings`. Raises
    ProbeError where `path` is no store, MissingDependencyError without DuckDB.
    """
    manifest = _manifest(path)
    with open_database() as database, _disk(path):
        records, warnings = read_parts(database, path / _PARTS)
    return StoreReading(
        path=path,
        campaign=manifest["campaign"],
        job=manifest["job"],
        records=tuple(records),
        warnings=tuple(warnings),
    )


class StoreWriter:
    """The only writer of a store, inside a `with` block; makes the store where there is none.

    job: what every probe of it trains. Entering raises ProbeError where another campaign writes,
    the store's probes train another job, or the folder holds something else.
    """

    def __init__(self, path: Path, *, job: Mapping[str, Any]) -> None:
        self.path = path
        self.campaign = ""
        """Its id, made with the store: part of the names of its jobs and files."""
        self.warnings: tuple[str, ...] = ()
        """Parts that were there and are left out."""
        self._job = dict(job)
        self._records: list[ProbeRecord] = []
        self._lock: int | None = None
        self._stack = contextlib.ExitStack()

    @property
    def records(self) -> Sequence[ProbeRecord]:
        """Every attempt that has ended, of earlier runs too."""
        return tuple(self._records)

    @property
    def attempts(self) -> list[Attempt]:
        """What a planner must know: also of attempts that were lost when a campaign was killed.

        Their folder is all that is left of them; their numbers, and so their names, are not used
        again, for what is left of their processes may still be about to end.
        """
        found = [record.as_attempt for record in self._records]
        kept = {(attempt.probe, attempt.number) for attempt in found}
        for folder in sorted((self.path / _FOLDERS).glob("*.*")):
            probe, _, number = folder.name.rpartition(".")
            if number.isdecimal() and (probe, int(number)) not in kept:
                found.append(
                    Attempt(
                        probe=probe,
                        number=int(number),
                        ending="stopped",
                        started_t=folder.stat().st_mtime,
                    )
                )
        return found

    @property
    def history(self) -> Path:
        """The results that count for the fleet's reference, as JSON lines."""
        return self.path / _HISTORY

    def folder(self, probe: str, attempt: int) -> Path:
        """Where an attempt keeps what it writes while it runs."""
        return self.path / _FOLDERS / f"{probe}.{attempt}"

    def __enter__(self) -> StoreWriter:
        with contextlib.ExitStack() as stack, _disk(self.path):
            self._database = stack.enter_context(open_database())
            _refuse_foreign(self.path)
            (self.path / _PARTS).mkdir(parents=True, exist_ok=True)
            stack.callback(os.close, _lock(self.path / _LOCK))
            manifest = self._manifest_of_this_job()
            self.campaign = manifest["campaign"]
            for draft in (self.path / _PARTS).glob(".*"):
                draft.unlink()  # of a writer that died
            self._records, warnings = read_parts(self._database, self.path / _PARTS)
            self.warnings = tuple(warnings)
            lines = "".join(map(_history_line, self._records))
            _replace(self.history, lines.encode())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(self, record: ProbeRecord) -> None:
        """Keep it: when this returns, it is on disk. Raises ProbeError where that fails."""
        target = self.path / _PARTS / record.file_name
        with _disk(target):
            draft = draft_part(self._database, record, target.parent)
            _flush(draft)
            draft.replace(target)
            _flush(target.parent)
            with self.history.open("a", encoding="utf-8") as history:
                history.write(_history_line(record))
        self._records.append(record)

    def _manifest_of_this_job(self) -> dict[str, Any]:
        path = self.path / _MANIFEST
        if not path.exists():
            manifest: dict[str, Any] = {
                "schema": SCHEMA,
                "campaign": f"c{secrets.token_hex(4)}",
                "made_t": round(time.time(), 3),
                "job": self._job,
            }
            _replace(path, (json.dumps(manifest, indent=1) + "\n").encode())
            return manifest
        manifest = _manifest(self.path)
        for name in sorted({*manifest["job"], *self._job}):
            was, wanted = manifest["job"].get(name), self._job.get(name)
            if was != wanted:
                raise ProbeError(
                    f"{self.path}: its probes have {name} {was}, not {wanted}, and would not "
                    "compare; use the same settings or another folder"
                )
        return manifest


def _history_line(record: ProbeRecord) -> str:
    return f"{record.result.to_json()}\n" if record.result is not None else ""


def _refuse_foreign(path: Path) -> None:
    """Raises ProbeError where the folder holds anything that is not of a store."""
    ours = {_MANIFEST, _PARTS, _LOCK, _HISTORY, _FOLDERS}
    if not path.exists() or is_store(path):
        return
    foreign = (
        sorted(p.name for p in path.iterdir() if p.name not in ours) if path.is_dir() else [""]
    )
    if foreign:
        raise ProbeError(
            f"{path}: is there and is no store of probes; name a folder that is new or empty"
        )


def _manifest(path: Path) -> dict[str, Any]:
    """Raises ProbeError where there is none."""
    try:
        found = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if (
            found["schema"] == SCHEMA
            and _NAME.fullmatch(found["campaign"])
            and isinstance(found["job"], dict)
        ):
            return dict(found)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise ProbeError(
        f"{path}: no store of probes ({_MANIFEST} of schema {SCHEMA} is not in it); "
        "failslow probe campaign makes one"
    )


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """What the disk refuses becomes a ProbeError that names `path`."""
    try:
        yield
    except OSError as error:
        raise ProbeError(
            f"{path}: {error.strerror or error}; it must be yours to read and write"
        ) from None


def _lock(path: Path) -> int:
    """A descriptor that holds the lock. Raises ProbeError where another process does."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip()
        os.close(handle)
        raise ProbeError(
            f"{path.parent}: another campaign writes it ({holder or 'just begun'}); wait for it, "
            "stop it, or use another folder"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def _replace(path: Path, data: bytes) -> None:
    """Put `data` there in one step."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.write_bytes(data)
    _flush(draft)
    draft.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
