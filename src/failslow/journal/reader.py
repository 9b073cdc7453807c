"""Reads a journal over its rotated files, to its end or as it grows.

In: the path of `journal.jsonl`. Out: its `JournalEntry`s, oldest first.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from failslow.errors import JournalError
from failslow.journal.codec import JournalEntry, decode_entry, rotated_path

__all__ = ["GrowingJournal", "Journal", "nothing_in", "read_journal"]

_STEP, _KIND_WITHIN = b'"kind":"step"', 64
"""How the writer puts the kind of a step near a line's start."""


class Journal:
    """The entries of a journal, oldest first, rotated files included; iterate it.

    Lines that are no entries (cut short by a crash) are left out and counted in `skipped`.
    """

    def __init__(
        self,
        path: Path,
        *,
        follow: bool,
        stop: threading.Event | None,
        poll_s: float,
        all_steps_bytes: int | None,
    ) -> None:
        self.path = path
        self.skipped = 0
        self._follow, self._poll_s = follow, poll_s
        self._stop = stop or threading.Event()
        self._all_steps_bytes = all_steps_bytes

    def __iter__(self) -> Iterator[JournalEntry]:
        lines = self._lines()
        if self._all_steps_bytes is not None:
            lines = self._thinned(lines, self._all_steps_bytes)
        for line in lines:
            if line.isspace():
                continue
            try:
                yield decode_entry(line)
            except JournalError:
                self.skipped += 1

    def check(self, source: str = "") -> None:
        """Raise JournalError where there is no entry in it. source: what to call it."""
        if next(iter(self), None) is None:
            raise nothing_in(source or str(self.path), self.skipped)
        self.skipped = 0

    def lines(self) -> Iterator[bytes]:
        """All lines as they stand, oldest first, for who reads only some of them."""
        return self._lines()

    def _thinned(self, lines: Iterator[bytes], all_steps_bytes: int) -> Iterator[bytes]:
        """`lines`, of steps in a row only the first until the journal's end is that near."""
        left = -all_steps_bytes
        for _, path in _files(self.path):
            with contextlib.suppress(FileNotFoundError):
                left += path.stat().st_size
        in_a_row = False
        for line in lines:
            left -= len(line)
            is_step = _STEP in line[:_KIND_WITHIN]
            if left < 0 or not (is_step and in_a_row):
                yield line
            in_a_row = is_step

    def _lines(self) -> Iterator[bytes]:
        file = _open_after(self.path, None)
        pending = b""
        try:
            while True:
                stopping = not self._follow or self._stop.is_set()
                while file is not None and (piece := file.readline()):
                    pending += piece
                    if pending.endswith(b"\n"):
                        yield pending
                        pending = b""
                following = _open_after(self.path, file)
                if following is not None:
                    if file is not None:
                        # what was written between our reaching its end and its rotation
                        yield from (pending + file.read()).splitlines(keepends=True)
                        file.close()
                    pending, file = b"", following
                elif file is not None and os.fstat(file.fileno()).st_size < file.tell():
                    file.seek(0)  # emptied in place, as logrotate's copytruncate does
                    pending = b""
                elif stopping:
                    break
                else:
                    self._stop.wait(self._poll_s)
            if pending:
                yield pending
        finally:
            if file is not None:
                file.close()


def nothing_in(source: str, skipped: int) -> JournalError:
    """What is said of a file without an entry, all of whose `skipped` lines are something else."""
    lines = f"{skipped:,} line{'s' * (skipped != 1)} that no journal has"
    return JournalError(
        f"{source}: the journal is {lines if skipped else 'empty'}; a watched job writes its first "
        "entry when watching begins: see failslow doctor if it does not"
    )


class GrowingJournal:
    """A journal that is looked at again and again: each line is read once.

    `entries` are all so far, `refresh` takes in what is new. There may be no journal yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[JournalEntry] = []
        # held open: the inode of a file that was deleted may come to mean another one
        self._file: BinaryIO | None = None
        self._pending = b""

    def refresh(self) -> list[JournalEntry]:
        """The new entries, which are at the end of `entries` now. Lines cut short are left out.

        Raises JournalError where it may not be read.
        """
        known = len(self.entries)
        while True:
            # listed before reading: what a file got before it was rotated is then all there
            following = _open_after(self.path, self._file)
            if self._file is not None:
                if os.fstat(self._file.fileno()).st_size < self._file.tell():
                    self._file.seek(0)  # emptied in place, as logrotate's copytruncate does
                    self._pending = b""
                lines = (self._pending + self._file.read()).splitlines(keepends=True)
                cut = bool(lines) and not lines[-1].endswith(b"\n")
                self._pending = lines.pop() if cut else b""
                for line in lines:
                    with contextlib.suppress(JournalError):
                        self.entries.append(decode_entry(line))
            if following is None:
                return self.entries[known:]
            self._close()
            self._file, self._pending = following, b""

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    __del__ = _close


def _open_after(path: Path, file: BinaryIO | None) -> BinaryIO | None:
    """The next newer file than `file`, or the oldest; None when there is none yet."""
    while True:
        listed = _files(path)
        if listed != _files(path):
            continue  # being rotated
        inodes = [inode for inode, _ in listed]
        own = None if file is None else os.fstat(file.fileno()).st_ino
        position = inodes.index(own) + 1 if own in inodes else 0
        if position == len(listed):
            return None
        inode, next_path = listed[position]
        try:
            # the caller closes it, after the file it reads now
            opened = next_path.open("rb")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise JournalError(
                f"{next_path}: cannot be read: {error.strerror or error}; check its permissions"
            ) from None
        if os.fstat(opened.fileno()).st_ino == inode:
            return opened
        opened.close()


def _files(path: Path) -> list[tuple[int, Path]]:
    """(inode, path) of a journal's files, oldest first."""
    start = len(path.name) + 1
    suffixes = [other.name[start:] for other in path.parent.glob(f"{glob.escape(path.name)}.*")]
    numbers = [0, *(int(suffix) for suffix in suffixes if suffix.isdecimal())]
    listed = []
    for number in sorted(numbers, reverse=True):
        file = rotated_path(path, number)
        with contextlib.suppress(FileNotFoundError):
            listed.append((file.stat().st_ino, file))
    return listed


def read_journal(
    path: Path,
    *,
    follow: bool = False,
    stop: threading.Event | None = None,
    poll_s: float = 0.2,
    all_steps_bytes: int | None = None,
) -> Journal:
    """The journal at `path`. With `follow` its iteration waits for more until `stop` is set.

    all_steps_bytes: further than this from its end, of several steps in a row only the first is
    given. They are nearly all of a long journal, and reading them takes minutes.
    Raises JournalError when there is none and `follow` is not set.
    """
    journal = Journal(
        path, follow=follow, stop=stop, poll_s=poll_s, all_steps_bytes=all_steps_bytes
    )
    if not follow and not path.exists() and not rotated_path(path, 1).exists():
        raise JournalError(f"{path}: no journal there; give the journal.jsonl of a watched job")
    return journal
