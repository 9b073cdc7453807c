"""Files as clean lines, and what many log lines share: rank prefixes, dates, numbers.

In: a path, `-` or bytes; plain or gzip. Out: lines without line ends and colours, and the parts
of a prefix such as

    9: [default3]:[2026-06-26 14:26:18.413968] iteration       10/     300 | ...
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from calendar import timegm
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from failslow.errors import InputError

__all__ = ["NAN", "NUMBER", "UTF16_MARKS", "Source", "parse_clock", "split_prefix"]

NAN = float("nan")
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|[iI]nf)"
"""Regex text of a number as logs print it; `float` takes whatever it matches."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""What a UTF-16 file begins with (PowerShell's `>` writes such logs)."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HEAD_BYTES = 65_536
_MINUTE = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):")
_ZONED = re.compile(r"(.{19}(?:[.,]\d+)?) ?(?:Z|UTC|([-+])(\d\d):?(\d\d))")
_PREFIX = re.compile(
    r"\s*(?:"
    r"(?P<srun>\d+):\s+"  # srun --label
    r"|\[(?:default|rank|\d+,)(?P<local>\d+)\](?:<\w+>)?:\s?"  # torchrun --tee, PyTorch, mpirun
    r"|\((?P<ray>[\w.]+ pid=\d+(?:, ip=[\d.]+)?)\)\s"  # Ray
    r"|(?P<host>(?!Epoch:|Train:|Test:)[A-Za-z][\w.-]*):\s+(?=\[)"  # pdsh, DeepSpeed's launcher
    r")"
)


class Source:
    """One input, readable any number of times (stdin is kept in memory).

    Raises InputError (one line: which file, what to do) when it cannot be opened.
    """

    def __init__(self, name: str, *, path: Path | None = None, data: bytes | None = None) -> None:
        self.name = name
        self.path = path
        self.complaint = ""
        """Why reading stopped before the end ("the gzip stream is cut short"), or ""."""
        self._data = data

    @classmethod
    def from_path(cls, path: str | Path) -> Source:
        """The file at `path`; stdin (`-`) and other pipes are read to their end."""
        if str(path) == "-":
            return cls("<stdin>", data=_stdin())
        path = Path(path)
        with suppress(OSError):  # what is wrong with a path shows when it is opened
            if path.is_fifo():
                return cls(str(path), data=path.read_bytes())
        return cls(str(path), path=path)

    def open(self) -> io.BufferedReader | io.BytesIO | gzip.GzipFile:
        """Raw bytes, gunzipped when they begin with the gzip magic."""
        try:
            raw: io.BufferedReader | io.BytesIO = (
                self.path.open("rb") if self.path else io.BytesIO(self._data or b"")
            )
            magic = raw.read(2)
            raw.seek(0)
        except OSError as error:
            raise InputError(
                f"{self.name}: cannot be read: {error.strerror or error}; check the path"
            ) from None
        if magic != b"\x1f\x8b":
            return raw
        if self.path is None:
            return gzip.GzipFile(fileobj=raw)
        raw.close()
        return gzip.open(self.path)

    def head(self) -> bytes:
        """The first 64 KiB (gunzipped), or as much of them as can be read."""
        parts: list[bytes] = []
        with self.open() as raw, suppress(EOFError, OSError, zlib.error):
            # piece by piece: a gzip stream cut short gives what came before the cut
            while sum(map(len, parts)) < _HEAD_BYTES and (part := raw.read1(8192)):
                parts.append(part)
        return b"".join(parts)

    def lines(self) -> Iterator[str]:
        """Text lines without line end, ANSI colours or carriage returns; bad UTF-8 replaced.

        A progress bar that rewrites its line with carriage returns gives one line a rewrite.
        A gzip file cut short gives what could be read, and leaves a `complaint`.
        """
        encoding = "utf-16" if self.head()[:2] in UTF16_MARKS else "utf-8"
        with self.open() as raw:
            # newline=None: \n, \r\n and a bare \r all end a line
            text = io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline=None)
            try:
                first = text.readline()
                if first:
                    yield _ANSI.sub("", first).lstrip("\ufeff").rstrip("\n")
                for line in text:
                    yield (_ANSI.sub("", line) if "\x1b" in line else line).rstrip("\n")
            except (EOFError, OSError, zlib.error) as error:
                self.complaint = f"reading stopped before the end: {error}"


def _stdin() -> bytes:
    if sys.stdin is None:
        raise InputError("<stdin>: is closed; pipe a log into it or name a file")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise InputError(
            f"<stdin>: cannot be read: {error.strerror or error}; pipe a log into it or name a file"
        ) from None


def split_prefix(line: str) -> tuple[str, str]:
    """(writer, rest) of a line: which process printed it ("" when not said), and what.

    Knows the labels of srun, torchrun, PyTorch, mpirun, Ray and pdsh, nested too:

        split_prefix(" 9: [default3]:step 1") == ("9/3", "step 1")
    """
    parts: list[str] = []
    end = 0
    while (match := _PREFIX.match(line, end)) is not None:
        parts.append(match[match.lastgroup or 0])
        end = match.end()
    return "/".join(parts), line[end:]


def parse_clock(text: str) -> float:
    """Epoch seconds of `2023-04-18 01:46:59,171` and its ISO relatives; NaN when it is none.

    Logs print local time and rarely the zone, so a time without one counts as UTC.
    """
    try:
        second = float(text[17:].replace(",", "."))
    except ValueError:
        return _zoned_clock(text)
    return _minute(text[:17]) + second if 0 <= second < 62 else NAN


@lru_cache(maxsize=4096)
def _minute(text: str) -> float:
    """Epoch seconds of `2023-04-18 01:46:`; the lines of a minute share it."""
    match = _MINUTE.fullmatch(text)
    if match is None:
        return NAN
    year, month, day, hour, minute = (int(part) for part in match.groups())
    if not (year and 1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return NAN
    return float(timegm((year, month, day, hour, minute, 0)))


def _zoned_clock(text: str) -> float:
    """A time with a zone behind it, or none at all."""
    match = _ZONED.fullmatch(text.strip())
    if match is None:
        return NAN
    offset = 60 * (60 * int(match[3] or 0) + int(match[4] or 0))
    return parse_clock(match[1]) + (offset if match[2] == "-" else -offset)
