"""Writing a report: a reader of the file sees the old report or the new one, never half.

In: a path and text. Out: the file, by a temporary one beside it and a rename.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from failslow.errors import OutputError

__all__ = ["write_atomically"]


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Write `parts` to `path` as UTF-8. Raises OutputError; then `path` is as it was.

    A device or pipe (`/dev/stdout`) is written straight to; a link's target is replaced.
    """
    try:
        # asked of the path itself: a pipe behind /dev/stdout has no other name
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("w", encoding="utf-8", errors="replace") as stream:
                stream.writelines(parts)
            return
        target = path.resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
                stream.writelines(parts)
            # mkstemp makes it private; a report is as public as any file of the user
            Path(temporary).chmod(0o666 & ~_umask())
            Path(temporary).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {error.strerror or error}; "
            "name a file in a folder that exists and is yours to write"
        ) from None


def _umask() -> int:
    # the only portable way to read it is to set it
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
