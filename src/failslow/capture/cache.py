"""Where the compiled capture is kept, and how it is opened so that nobody can put in another one.

In: the environment. Out: an open file, or why it must not be loaded. The file, its folder and the
cache folder are opened one in the other and looked at when open: what is loaded is what was looked
at, whatever anybody does to names meanwhile.

    ~/.cache/failslow/native-4f…/failslow_native.so        /tmp/failslow-cache-1000/native-4f…/…
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from failslow.errors import CaptureError

__all__ = ["COMMAND", "DIGEST", "FILE", "digest", "opened", "prepare", "refused", "roots"]

COMMAND = "python -m failslow.capture.native"
"""What a user runs to have it built."""
FILE, DIGEST = "failslow_native.so", "sha256"


def roots(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Folders for what is built, best first: a home may be read-only."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return (
        Path(cache) / "failslow",
        Path(tempfile.gettempdir()) / f"failslow-cache-{os.getuid()}",
    )


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The extension at `path`, ROOT/FOLDER/FILE, open; CaptureError where it must not be loaded.

    Raises OSError where there is none. Loading half a file (after a crash of the machine) would
    end the process: its digest is compared.
    """
    folder = path.parent
    with ExitStack() as stack:

        def inside(name: str | Path, parent: int | None, flags: int) -> int:
            handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=parent)
            stack.callback(os.close, handle)
            return handle

        own = _is_temporary(folder.parent)
        # a home's cache may be a link to a larger disk
        root = inside(folder.parent, None, os.O_DIRECTORY | (os.O_NOFOLLOW if own else 0))
        if own and not (_is_private(root) and _is_kept(folder.parent.parent)):
            raise CaptureError(f"{folder.parent} is not this user's alone; remove it")
        inner = inside(folder.name, root, os.O_DIRECTORY | os.O_NOFOLLOW)
        file = inside(path.name, inner, os.O_NOFOLLOW)
        if not all(_is_safe(os.fstat(handle)) for handle in (root, inner, file)):
            raise CaptureError(f"{path} can be written by others; remove it")
        with os.fdopen(inside(DIGEST, inner, os.O_NOFOLLOW), closefd=False) as told:
            right = told.read(100).strip() == _digest(file)
        if not right:
            raise CaptureError(f"{path} is damaged; remove it, then {COMMAND}")
        yield file


def refused(path: Path) -> str:
    """Why the extension at `path` must not be loaded, "" when it may. Raises OSError."""
    try:
        with opened(path):
            return ""
    except CaptureError as error:
        return str(error)


def prepare(folder: Path) -> str:
    """Make ROOT/FOLDER, for this user alone; why it cannot be used, else "". Raises OSError."""
    root = folder.parent
    root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    root.mkdir(exist_ok=True, mode=0o700)
    own = _is_temporary(root)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | (os.O_NOFOLLOW if own else 0)
    handle = os.open(root, flags)
    try:
        about = os.fstat(handle)
        if about.st_uid == os.getuid():  # made with a lax umask
            os.fchmod(handle, 0o700 if own else stat.S_IMODE(about.st_mode) & ~0o022)
        if not (_is_safe(os.fstat(handle)) and (not own or _is_private(handle))):
            return f"{root}: is not this user's alone; remove it"
    finally:
        os.close(handle)
    if own and not _is_kept(root.parent):
        return f"{root.parent}: others can put their own folders there; chmod +t it"
    folder.mkdir(exist_ok=True, mode=0o700)
    if not _is_safe(folder.lstat()):
        return f"{folder}: others can write there; remove it"
    return ""


def digest(path: Path) -> str:
    """Of the file's content, as in DIGEST."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(handle: int) -> str:
    with os.fdopen(handle, "rb", closefd=False) as file:
        return hashlib.sha256(file.read()).hexdigest()


def _is_temporary(root: Path) -> bool:
    """Whether anybody may have made it first."""
    return root.name == f"failslow-cache-{os.getuid()}"


def _is_private(handle: int) -> bool:
    about = os.fstat(handle)
    return about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077


def _is_kept(parent: Path) -> bool:
    """Whether nobody else can rename what is in it."""
    about = parent.stat()
    return bool(not about.st_mode & 0o022 or about.st_mode & stat.S_ISVTX)


def _is_safe(about: os.stat_result) -> bool:
    """Whether only this user, or root, could have put there what is there."""
    linked = stat.S_ISLNK(about.st_mode)
    return about.st_uid in (os.getuid(), 0) and not about.st_mode & 0o022 and not linked
