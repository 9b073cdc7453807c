"""The store of a campaign: a folder with one Parquet file for every attempt that has ended.

In: `ProbeRecord`s, one at a time. Out: the same to any number of readers, while it grows:

    STORE/failslow-probes.json     {"schema": "failslow.probe-store/1", "campaign": "c4f21a09",
                                    "made_t": 1745735241.0, "job": {"workers_per_node": 4, …}}
    STORE/parts/4n-0007.1.parquet  one row: the attempt, the columns of its result, and the whole
                                   result as JSON in `record`
    STORE/history.jsonl            results that count for the fleet's reference, one a line
    STORE/probes/4n-0007.1/        journal and logs of an attempt that runs or failed, or whose
                                   result is `worth_keeping`
    STORE/writer.lock              held by the campaign that writes; others are refused

A part is written beside its place and renamed into it: it is there whole or not at all, and whoever
dies loses at most the probes that were running. Any tool that reads Parquet reads the store:

    duckdb -c "SELECT cause, count(*) FROM 'STORE/parts/*.parquet' GROUP BY cause"
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from failslow.errors import ProbeError
from failslow.probe.campaign import Attempt, Ending
from failslow.probe.executors.base import RESULT_FILE
from failslow.probe.result import ProbeResult, ProbeState
from failslow.probe.store_parts import (
    ProbeRecord,
    check_place,
    draft_part,
    is_draft,
    name_of_part,
    open_database,
    read_parts,
)

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
_DRAFT = re.compile(rf"\.(?:{re.escape(_MANIFEST)}|{re.escape(_HISTORY)})\.[0-9a-f]{{8}}")
_ENDED: dict[ProbeState, Ending] = {"done": "finished", "preempted": "stopped", "failed": "failed"}
"""How an attempt ended whose campaign did not see it: only that one can have told it to end."""
_REMEDIES = {
    errno.ENOSPC: "make room there, and run the same command again",
    errno.EDQUOT: "make room there, and run the same command again",
    errno.EROFS: "nothing can be written there; use another folder",
    errno.EACCES: "it must be yours to read and write",
    errno.EPERM: "it must be yours to read and write",
    errno.ENOLCK: "its file system has no locks; use a folder on another one",
    errno.EOPNOTSUPP: "its file system has no locks; use a folder on another one",
    errno.ENOSYS: "its file system has no locks; use a folder on another one",
    errno.ENOTDIR: "name a folder",
    errno.EIO: "the disk fails; mend it, or use a folder on another one",
}


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
    """Whether the folder says that it is one, of whatever schema."""
    try:
        return (path / _MANIFEST).is_file()
    except (OSError, ValueError):
        return False


def read_store(path: Path) -> StoreReading:
    """All attempts that have ended by now. A campaign may be writing meanwhile.

    A part that is torn, or is none of ours, is left out and named in `warnings`. Raises
    ProbeError where `path` is no store, MissingDependencyError without DuckDB.
    """
    manifest = _manifest(path)
    with open_database() as database, _disk(path):
        check_place(path)
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

        Their folder is all that is left of them, or a part that cannot be read; their numbers, and
        so their names, are not used again: what is left of their processes may still be about to
        end, and the part is not ours to replace.
        """
        found = [record.as_attempt for record in self._records]
        lost: dict[tuple[str, int], float] = {}
        for folder in sorted((self.path / _FOLDERS).glob("*.*")):
            probe, _, number = folder.name.rpartition(".")
            if number.isdecimal():
                lost[probe, int(number)] = folder.stat().st_mtime
        for part in sorted((self.path / _PARTS).glob("*.parquet")):
            if (name := name_of_part(part)) is not None:
                lost.setdefault(name, part.lstat().st_mtime)
        for attempt in found:
            lost.pop((attempt.probe, attempt.number), None)
        found += [
            Attempt(probe=probe, number=number, ending="stopped", started_t=started_t)
            for (probe, number), started_t in lost.items()
        ]
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
            check_place(self.path)
            _refuse_foreign(self.path)
            (self.path / _PARTS).mkdir(parents=True, exist_ok=True)
            stack.callback(os.close, _lock(self.path / _LOCK))
            manifest = self._manifest_of_this_job()
            self.campaign = manifest["campaign"]
            _clear_drafts(self.path)
            self._records, warnings = read_parts(
                self._database, self.path / _PARTS, all_readable=True
            )
            self.warnings = tuple(warnings)
            lines = "".join(map(_history_line, self._records))
            _replace(self.history, lines.encode())
            self._adopt()
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
            if os.path.lexists(target):
                raise ProbeError(
                    f"{target}: is there already, and is not replaced; run the same command again: "
                    "it counts on from there"
                )
            draft = draft_part(self._database, record, target.parent)
            _flush(draft)
            draft.replace(target)
            _flush(target.parent)
            with self.history.open("a", encoding="utf-8") as history:
                history.write(_history_line(record))
        self._records.append(record)

    def _adopt(self) -> None:
        """Keep the results of attempts that ended when nobody could: the disk was full, say."""
        known = {(record.probe, record.attempt) for record in self._records}
        for folder in sorted((self.path / _FOLDERS).glob("*.*")):
            probe, _, digits = folder.name.rpartition(".")
            number = int(digits) if digits.isdecimal() else 0
            if number < 1 or (probe, number) in known or _NAME.fullmatch(probe) is None:
                continue
            result = _result_in(folder, f"{self.campaign}-{folder.name}")
            if result is None:
                continue
            record = ProbeRecord(
                probe=probe,
                attempt=number,
                ending=_ENDED[result.state],
                wanted_nodes=len(result.nodes),
                executor="unknown",
                submitted_t=result.begin_t,
                ended_t=result.end_t,
                why="" if result.state == "done" else result.error or "its campaign had ended",
                result=result,
            )
            if os.path.lexists(self.path / _PARTS / record.file_name):
                continue  # a part that cannot be used: not ours to replace
            self.add(record)
            if record.ending == "finished" and not result.worth_keeping:
                shutil.rmtree(folder, ignore_errors=True)
        self._records.sort(key=lambda r: (r.ended_t, r.probe, r.attempt))

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


def _result_in(folder: Path, probe_id: str) -> ProbeResult | None:
    """What the attempt of that name has left there."""
    try:
        found = ProbeResult.from_json((folder / RESULT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if found.probe_id == probe_id else None


def _history_line(record: ProbeRecord) -> str:
    return f"{record.result.to_json()}\n" if record.result is not None else ""


def _clear_drafts(path: Path) -> None:
    """Unlink those of a writer that died; other hidden files are not ours (.gitkeep)."""
    found = [p for p in path.iterdir() if _DRAFT.fullmatch(p.name)]
    found += [p for p in (path / _PARTS).glob(".*") if is_draft(p)]
    for draft in found:
        if draft.is_file() and not draft.is_symlink():
            draft.unlink()


def _refuse_foreign(path: Path) -> None:
    """Raises ProbeError where the folder holds anything that is not of a store of this schema."""
    ours = {_MANIFEST, _PARTS, _LOCK, _HISTORY, _FOLDERS}
    if is_store(path):
        _manifest(path)
        return
    if not path.exists():
        return
    names = [p.name for p in path.iterdir()] if path.is_dir() else [""]
    # a writer that died may have left a draft
    if any(name not in ours and not _DRAFT.fullmatch(name) for name in names):
        raise ProbeError(
            f"{path}: is there and is no store of probes; name a folder that is new or empty"
        )


def _manifest(path: Path) -> dict[str, Any]:
    """Raises ProbeError where there is none, or one that is not known."""
    file = path / _MANIFEST
    try:
        with _disk(file):
            found = (json.loads(file.read_bytes()) or {}) if is_store(path) else None
    except (ValueError, RecursionError):
        found = {}
    if found is None:
        raise ProbeError(
            f"{path}: no store of probes ({_MANIFEST} is not in it); "
            "failslow probe campaign makes one"
        )
    schema = found.get("schema") if isinstance(found, dict) else None
    if isinstance(schema, str) and schema != SCHEMA:
        raise ProbeError(
            f"{path}: a store of schema {schema[:80]}, and this failslow knows {SCHEMA}; use the "
            "failslow that made it, or another folder"
        )
    if (
        schema != SCHEMA
        or not isinstance(found.get("campaign"), str)
        or _NAME.fullmatch(found["campaign"]) is None
        or not isinstance(found.get("job"), dict)
    ):
        raise ProbeError(
            f"{file}: torn, or no manifest of a store of probes ({SCHEMA}); restore it, or use "
            "another folder"
        )
    duration_s = found["job"].get("duration_s", 0.0)
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float):
        duration_s = math.nan
    if not 0 <= duration_s < sys.float_info.max:
        raise ProbeError(
            f"{file}: the duration_s of its job, {json.dumps(found['job']['duration_s'])[:40]}, is "
            "no number of seconds; restore the file, or use another folder"
        )
    return dict(found)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """What the disk refuses becomes a ProbeError that names `path`."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "mend that, or use another folder")
        raise ProbeError(f"{path}: {error.strerror or error}; {remedy}") from None


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
