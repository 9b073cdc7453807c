"""Opens files to write in folders that others may write to. Standard library only.

In: a path. Out: a descriptor of a regular file of this user; never one a planted link names.

    open_own(Path("failslow-runs/exp1/journal.jsonl"), os.O_WRONLY | os.O_APPEND)  # -> 7
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from failslow.errors import ConfigError

__all__ = ["check_folder", "open_own"]

_REMEDY = "remove it, or name another folder in FAILSLOW_DIR"


def open_own(path: Path, flags: int) -> int:
    """Open `path` with `flags`, made with mode 0644 when absent.

    Raises ConfigError when it is a link, no regular file, or another user's; else what opening
    raises.
    """
    # without O_NONBLOCK the opening of a planted pipe would never return
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ConfigError(f"{path}: is no regular file; {_REMEDY}") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is no regular file; {_REMEDY}")
        if not _is_own(status.st_uid, path.parent):
            raise ConfigError(
                f"{path}: is owned by user {status.st_uid}, not {os.geteuid()}; {_REMEDY}"
            )
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_folder(path: Path) -> None:
    """Raise ConfigError where another user than root could change what is in the folder at will,
    or what it is: one that is theirs, or a link of theirs (its parent may be one too)."""
    for place in (path.parent, path):
        status = place.lstat()
        if stat.S_ISLNK(status.st_mode) and not _is_own(status.st_uid, place.parent, root=True):
            raise ConfigError(f"{place}: is a link of user {status.st_uid}; {_REMEDY}")
    owner = path.stat().st_uid
    if not _is_own(owner, path, root=True):
        raise ConfigError(f"{path}: is a folder of user {owner}, not {os.geteuid()}; {_REMEDY}")


def _is_own(owner: int, folder: Path, *, root: bool = False) -> bool:
    """Whether what `owner` has in `folder` is this user's, or with `root` the system's.

    A server of files may give root's files to nobody: then a new file there tells.
    """
    if owner == os.geteuid() or (root and owner == 0):
        return True
    probe = folder / f".owner.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(handle).st_uid == owner
        finally:
            os.close(handle)
            probe.unlink()
    return False
