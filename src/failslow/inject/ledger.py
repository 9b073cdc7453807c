"""The injections in force on this machine, one file each, so that a crashed one can be undone.

In: records of guards. Out: files under `/run/failslow/inject` (root), the user's runtime folder or
`/tmp/failslow-UID/inject`; `FAILSLOW_INJECT_FOLDER` outranks them. Mode 0600, replaced as a whole:

    {"kind": "throttle", "targets": ["process 4711"], "summary": "process 4711 to 0.70 of a core",
     "guard": {"pid": 4720, "start_ticks": 183960}, "owner": {"pid": 4718, "start_ticks": 183940},
     "boot_id": "6c7f…", "steps": [{"do": "RestoreFile", "path": "…/cpu.cfs_quota_us", …}]}
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from failslow.errors import InjectError
from failslow.inject.processes import ProcessId, boot_id, is_alive
from failslow.inject.steps import Step, step_from_json, step_to_json

__all__ = ["Ledger", "Record", "ledger_folder"]


@dataclass(frozen=True)
class Record:
    """One injection in force."""

    kind: str
    targets: tuple[str, ...]
    """What it holds; no second injection of its kind may hold the same."""
    summary: str
    guard: ProcessId
    """The process that undoes it."""
    owner: ProcessId
    """The process it was asked by."""
    boot_id: str
    steps: tuple[Step, ...] = ()
    """What undoes it, last step first."""

    @property
    def in_force(self) -> bool:
        """Whether its guard still watches over it."""
        return self.boot_id == boot_id() and is_alive(self.guard)

    def undo(self) -> None:
        """Carry out every step, even if one fails. Raises InjectError naming all failures.

        Another boot has forgotten it all.
        """
        steps = reversed(self.steps) if self.boot_id == boot_id() else ()
        failures = [failure for step in steps if (failure := _failure(step))]
        if failures:
            raise InjectError(
                f"cannot undo {self.kind} of {', '.join(self.targets)}: {'; '.join(failures)}; "
                "`failslow inject undo` tries again"
            )


def _failure(step: Step) -> str | None:
    """Carry the step out; what went wrong."""
    try:
        step.undo()
    except (InjectError, OSError) as error:
        return f"{type(step).__name__}: {error}"
    return None


def ledger_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's records are."""
    if environ.get("FAILSLOW_INJECT_FOLDER"):
        return Path(environ["FAILSLOW_INJECT_FOLDER"])
    user = os.geteuid()
    if user == 0:
        return Path("/run/failslow/inject")
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "failslow/inject") if runtime else Path(f"/tmp/failslow-{user}/inject")


class Ledger:
    """The folder of records. Making one touches nothing; using it creates the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time; not to be nested. Raises InjectError where it cannot be had."""
        self._ready()
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _ready(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder, parent = self.folder.stat(), self.folder.parent.stat()
        except OSError as error:
            raise InjectError(
                f"cannot keep records in {self.folder}: {error.strerror}; "
                "name a folder in FAILSLOW_INJECT_FOLDER"
            ) from None
        # what stands in the records is carried out: nobody else may write them
        ours = folder.st_uid == os.geteuid() and parent.st_uid in (0, os.geteuid())
        if not ours or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InjectError(
                f"{self.folder} can be written by others; chmod 700 it, or name another folder "
                "in FAILSLOW_INJECT_FOLDER"
            )

    def records(self) -> list[Record]:
        """All records, the oldest guard first. Raises InjectError for one that makes no sense."""
        found = filter(None, map(_load, self.folder.glob("*.json")))
        return sorted(found, key=lambda r: (r.guard.start_ticks, r.guard.pid))

    def claim(self, record: Record) -> None:
        """Write a new record down, under the lock. Leftovers in its way are undone first.

        Raises InjectError where an injection in force holds one of its targets.
        """
        for other in self.records():
            shared = set(other.targets) & set(record.targets)
            if other.kind != record.kind or not shared:
                continue
            if other.in_force:
                raise InjectError(
                    f"{sorted(shared)[0]} already has a {record.kind} injection in force (by "
                    f"process {other.owner.pid}); end that one first, or `failslow inject undo "
                    "--all`"
                )
            other.undo()
            self.remove(other)
        self.write(record)

    def write(self, record: Record) -> None:
        """Replace the record of this guard."""
        text = json.dumps(
            {**asdict(replace(record, steps=())), "steps": [step_to_json(s) for s in record.steps]}
        )
        path = self._path(record)
        fresh = path.with_suffix(".tmp")
        try:
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            fresh.replace(path)
        except OSError as error:
            raise InjectError(
                f"cannot write {path}: {error.strerror}; make room, or name another folder in "
                "FAILSLOW_INJECT_FOLDER"
            ) from None

    def remove(self, record: Record) -> None:
        """Strike the record out, once it is undone."""
        for suffix in (".json", ".tmp"):
            self._path(record).with_suffix(suffix).unlink(missing_ok=True)

    def _path(self, record: Record) -> Path:
        guard = record.guard
        return self.folder / f"{record.kind}-{guard.pid}-{guard.start_ticks}.json"

    def find(self, guard_pid: int) -> list[Record]:
        """The records written by guard `guard_pid`."""
        return [r for r in self.records() if r.guard.pid == guard_pid]


def _load(path: Path) -> Record | None:
    """The record in `path`; None where it has just been struck out. Raises InjectError."""
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InjectError(
            f"{path} is no record of an injection ({error}); remove it once what it "
            "describes is undone"
        ) from None


def _read(data: Mapping[str, Any]) -> Record:
    steps: Sequence[Mapping[str, Any]] = data["steps"]
    return Record(
        kind=data["kind"],
        targets=tuple(data["targets"]),
        summary=data["summary"],
        guard=ProcessId(**data["guard"]),
        owner=ProcessId(**data["owner"]),
        boot_id=data["boot_id"],
        steps=tuple(step_from_json(step) for step in steps),
    )
