"""Appends entries to a journal, whatever happens to the disk.

In: records and their times. Out: whole lines in `journal.jsonl`, older ones in `journal.jsonl.1`, …
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from failslow.errors import FailslowError, JournalError
from failslow.journal.codec import encode_entry, rotated_path
from failslow.ownfiles import check_folder, open_own

__all__ = ["JournalHealth", "JournalWriter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHealth:
    """What became of the entries appended since the writer was made."""

    written: int
    dropped: int
    """Entries that could not be written: a full disk, no permission, another writer."""
    last_error: str


class JournalWriter:
    """Appends entries to `path`; the only writer of it. Safe to use from several threads.

    fsync_s: None leaves flushing to the system, 0 flushes every entry, more at most that often.
    Opens nothing until the first entry. Raises only JournalError, for settings out of range:
    a monitor must outlive a full disk.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 67_108_864,
        keep: int = 4,
        fsync_s: float | None = None,
    ) -> None:
        if max_bytes < 1 or keep < 1:
            raise JournalError(
                f"max_bytes is {max_bytes}, keep is {keep}: both must be at least 1; 67108864 "
                "and 4 are the defaults"
            )
        self.path = path
        self._max_bytes, self._keep, self._fsync_s = max_bytes, keep, fsync_s
        self._lock = threading.Lock()
        self._file: int | None = None
        self._torn = False
        self._flushed_t = -math.inf
        self._written = self._dropped = 0
        self._last_error = ""

    @property
    def health(self) -> JournalHealth:
        """Counts, and the last thing that went wrong."""
        with self._lock:
            return JournalHealth(
                written=self._written, dropped=self._dropped, last_error=self._last_error
            )

    def append(self, record: Any, *, t: float, kind: str | None = None, **tags: Any) -> bool:
        """Write one entry (see `encode_entry`); False when it could not be, which is counted."""
        with self._lock:
            try:
                self._write(encode_entry(record, t=t, kind=kind, **tags), t)
            except (OSError, FailslowError) as error:
                self._dropped += 1
                self._last_error = str(error)
                return False
            self._written += 1
            return True

    def close(self) -> None:
        """Let go of the file; a later append opens it again."""
        with self._lock:
            self._close()

    def _write(self, line: bytes, t: float) -> None:
        file = self._ready(len(line) + 1)
        # a line cut short by a crash or a full disk is ended, so that it spoils no other
        data = (b"\n" if self._torn else b"") + line + b"\n"
        written = os.write(file, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, "line cut short", str(self.path))
        if self._fsync_s is not None and t - self._flushed_t >= self._fsync_s:
            os.fsync(file)
            self._flushed_t = t

    def _ready(self, size: int) -> int:
        """The open file, with room for `size` bytes if rotation can make it."""
        file = self._file
        if file is None or not self._is_in_place(file):
            file = self._open()
        held = os.fstat(file).st_size
        if held and held + size > self._max_bytes:
            try:
                self._rotate()
            except OSError as error:
                self._last_error = f"not rotated: {error}"  # growing is better than losing
            if not self._is_in_place(file):
                file = self._open()
        return file

    def _is_in_place(self, file: int) -> bool:
        """Whether `path` still is the file we hold: somebody may have moved or deleted it."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(file))
        except OSError:
            return False

    def _open(self) -> int:
        self._close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_folder(self.path.parent)  # it may have been exchanged since
        file = open_own(self.path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise OSError(errno.EBUSY, "another process writes it", str(self.path)) from None
        except OSError:
            pass  # a file system without locks
        size = os.fstat(file).st_size
        self._torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        self._file = file
        return file

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                os.close(file)

    def _rotate(self) -> None:
        for number in range(self._keep - 1, -1, -1):
            older = rotated_path(self.path, number)
            if os.path.lexists(older):
                older.replace(rotated_path(self.path, number + 1))
