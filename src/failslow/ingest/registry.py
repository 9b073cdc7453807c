"""Which reader reads which file: detection from content, and the files behind paths and globs.

In: paths, folders, globs, `-`. Out: `StepSeries`, or an InputError of one line:

    notes.txt: no known training log in it; known formats: megatron, deepspeed, ...; for any
    other table use --format csv --time-column NAME
"""

from __future__ import annotations

import glob
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path

from failslow.errors import InputError, UnknownFormatError
from failslow.ingest.base import Reader, SeriesBuilder, Source
from failslow.ingest.text import UTF16_MARKS
from failslow.records import StepSeries

__all__ = ["detect_format", "distinct", "expand_paths", "read_log", "readers"]

_FORMATS = (
    "megatron",
    "deepspeed",
    "mllog",
    "torchtitan",
    "nanogpt",
    "llmc",
    "modded_nanogpt",
    "hf_trainer",
    "llamafactory",
    "mmengine",
    "detectron2",
    "meters",
    "mxnet",
    "paddle",
    "fairseq",
    "lightning",
    "tensorboard",
    "table",
    "journal",
)
_ODD = ("\ufffd", *map(chr, range(1, 8)), *map(chr, range(14, 27)))
"""Characters of which a log has few."""
_ENOUGH_LINES = 50
"""Matching lines after which a format is certain."""
_SEARCHED = 32 << 20
"""Characters of a file in a folder in which a log must begin: data sets lie beside logs."""
_PATIENCE = 20_000
"""Lines after the first match in which another format can still show itself."""


@cache
def readers() -> tuple[Reader, ...]:
    """Every reader, in the order of the registry."""
    found: list[Reader] = []
    for name in _FORMATS:
        module = import_module(f"failslow.ingest.formats.{name}")
        found += getattr(module, "READERS", None) or (module.READER,)
    return tuple(found)


def detect_format(
    source: Source, candidates: Sequence[Reader] | None = None, *, within: float = math.inf
) -> Reader:
    """The reader that knows this file: highest priority first, then most matching lines.

    Reads until one format is certain, however late its first line comes, but no further than
    `within` characters for it. Raises UnknownFormatError when no line is known, InputError when
    there is nothing to read.
    """
    candidates = readers() if candidates is None else candidates
    head = source.head()
    if not head.strip():
        raise InputError(f"{source.name}: the file is empty; give the training log")
    binary = _is_binary(head)
    lines: Iterable[str] = source.lines()
    if binary:  # a checkpoint may be huge: its head decides
        lines = head.decode("utf-8", "replace").split("\n")
    counts: Counter[str] = Counter()
    lines = iter(lines)
    for line in lines:
        _count(line, candidates, counts)
        within -= len(line)
        if counts or within < 0:
            break
    for line in islice(lines, _PATIENCE if counts else 0):
        _count(line, candidates, counts)
        if max(counts.values()) >= _ENOUGH_LINES:
            break
    if not counts:
        raise UnknownFormatError(_unknown(source, binary))
    return max(
        (r for r in candidates if counts[r.name]), key=lambda r: (r.priority, counts[r.name])
    )


def _is_binary(head: bytes) -> bool:
    """Whether this is no text; a log with a hole of zeros (a network file system's) is text."""
    if b"\0" not in head or head[:2] in UTF16_MARKS:
        return False
    text = head.replace(b"\0", b"").decode("utf-8", "replace")
    odd = sum(text.count(sign) for sign in _ODD)
    return odd >= len(text) / 20


def _count(line: str, candidates: Sequence[Reader], counts: Counter[str]) -> None:
    for reader in candidates:
        if reader.matches(line):
            counts[reader.name] += 1


def _unknown(source: Source, binary: bool) -> str:
    names = ", ".join(reader.name for reader in readers())
    what = "a binary file, not a training log" if binary else "no known training log in it"
    return (
        f"{source.name}: {what}; known formats: {names}; "
        f"for any other table use --format csv --time-column NAME"
    )


def _candidates(format: str | Reader | None) -> tuple[Reader, ...]:
    """The readers `format` leaves open. Raises InputError for a name that is none."""
    if format is None:
        return readers()
    if not isinstance(format, str):
        return (format,)
    found = tuple(reader for reader in readers() if reader.name == format)
    if not found:
        names = ", ".join(reader.name for reader in readers())
        raise InputError(f"--format {format}: no such format; known: {names}")
    return found


def read_log(path: str | Path | Source, *, format: str | Reader | None = None) -> StepSeries:
    """The job in this log.

    format: the name of a reader, or a reader (a table's, made for its columns); None: detected
    from the content. Raises InputError when the file cannot be read or holds no usable timing
    record, UnknownFormatError when no reader knows it.
    """
    source = path if isinstance(path, Source) else Source.from_path(path)
    reader = detect_format(source) if format is None else _candidates(format)[0]
    builder = SeriesBuilder(source.name, reader.name)
    reader.read(source, builder)
    if source.complaint:
        builder.warn(source.complaint)
    return builder.finish()


def expand_paths(
    paths: Iterable[str | Path],
    *,
    format: str | Reader | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> list[Path]:
    """The logs behind files, folders (recursively), globs and `-`, each once, in a stable order.

    A file given by name is taken as it is. In a folder, and among the files a glob gives, a file
    no reader (or not the one of `format`) knows by its first 32 MB is left out and `on_skip` is
    told why. Raises InputError for a path that does not exist and a folder or glob without a
    usable file.
    """
    candidates = _candidates(format)
    return distinct(file for given in paths for file in _files_behind(given, candidates, on_skip))


def distinct(files: Iterable[Path]) -> list[Path]:
    """Each file once, however it is named (`latest.log` that links to `run7.log`)."""
    found: dict[Path, Path] = {}
    for file in files:
        target = file.resolve()
        if target not in found or (found[target].is_symlink() and not file.is_symlink()):
            found[target] = file
    return list(found.values())


def _files_behind(
    given: str | Path, candidates: Sequence[Reader], on_skip: Callable[[str], None] | None
) -> list[Path]:
    if not str(given):  # Path("") is the working folder
        raise InputError("an empty path; name a file, a folder, a glob, or - for stdin")
    try:
        path = Path(given)
        if str(given) == "-" or path.is_file():
            return [path]
        if path.is_dir():
            inside = _files_below(path)
        elif glob.has_magic(str(given)):
            matched = [Path(name) for name in sorted(glob.glob(str(given), recursive=True))]
            if not matched:
                raise InputError(f"{given}: no file matches; check the pattern and the folder")
            inside = [f for p in matched for f in (_files_below(p) if p.is_dir() else [p])]
        elif path.exists():  # a pipe or device, as in <(zcat …)
            return [path]
        else:
            raise InputError(f"{given}: no such file or folder; check the path")
    except OSError as error:
        raise InputError(
            f"{given}: cannot be read: {error.strerror or error}; check the path"
        ) from None
    usable = [file for file in inside if _known(file, candidates, on_skip)]
    if not usable:
        raise InputError(
            f"{given}: no training log among its {len(inside):,} files; "
            f"give a file by name to see why"
        )
    return usable


def _files_below(folder: Path) -> list[Path]:
    """Every file under `folder` whose path has no hidden part, sorted."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        path
        for path in files
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _known(file: Path, candidates: Sequence[Reader], on_skip: Callable[[str], None] | None) -> bool:
    try:
        detect_format(Source.from_path(file), candidates, within=_SEARCHED)
    except InputError as error:
        if on_skip is not None:
            on_skip(f"skipped {str(error).split('; ')[0]}")
        return False
    return True
