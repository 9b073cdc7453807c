"""The folder by which the processes of one job on one node find each other. Standard library only.

In: the job's name. Out: `/dev/shm/failslow-<uid>-<job>.run/` (where that is full, one in the
temporary folder), mode 0700, with

    agent-<node>.lock, controller.lock   held (flock) by whoever plays that part; its pid
    supervisor-<node>.lock               held by the supervisor
    address                              where the controller of a single node serves
    token                                the job token, when FAILSLOW_TOKEN is not set
    journal                              the folder of the job's journal
    claims                               who uses it: see `claim.py`
    room                                 nothing: that files could be written here
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from failslow.capture.ring import ring_folders
from failslow.errors import ConfigError
from failslow.runtime.claim import Claim, dump_claims, parse_claims
from failslow.runtime.security import load_token

__all__ = ["RunFolder", "remove_stale_folders", "stale_folders"]

_ROOM, _CLAIMS = "room", "claims"
_CLAIM_S = 0.5
"""What a trainer waits for others that enter the folder."""
_FRESH_S = 600.0
"""A folder may have neither claim nor lock for a moment, while a job comes up."""
_ROOM_BYTES = 32 * 1024
"""What the files of a run folder may need: a page each."""


class RunFolder:
    """The run folder of `job`; made when absent.

    Raises ConfigError when no folder can be had, or the one there is not this user's alone.
    """

    def __init__(self, job: str, environ: Mapping[str, str]) -> None:
        self.name, self._environ = job, environ
        reasons = []
        paths = [parent / f"failslow-{os.getuid()}-{job}.run" for parent in ring_folders(environ)]
        # one that is in use stays in use, whatever has become full or empty since
        for self.path in sorted(paths, key=lambda path: not _has_room(path)):
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)
                if not _is_private(self.path):
                    reasons.append(f"{self.path}: is not this user's alone; remove it")
                    continue
                if not _has_room(self.path):
                    self._try_room()
            except OSError as error:
                reasons.append(f"{self.path.parent}: {error.strerror or error}")
                continue
            return
        raise ConfigError(
            f"no folder for the job's agent: {'; '.join(reasons)}; name another one in "
            "FAILSLOW_CAPTURE_FOLDER"
        )

    @classmethod
    def given(cls, environ: Mapping[str, str]) -> RunFolder:
        """The one that the worker which started this process has chosen."""
        return cls(environ.get("FAILSLOW_RUN") or environ["FAILSLOW_JOB"], environ)

    def enter(self, mine: Claim) -> list[Claim]:
        """Claim it; those who have it, if they live and are of another start of a job.

        Where claims cannot be kept the folder is as good as free.
        """
        handle, deadline_s = None, time.monotonic() + _CLAIM_S
        try:
            while (handle := self.lock(_CLAIMS)) is None:
                if time.monotonic() > deadline_s:
                    return []
                time.sleep(0.005)
            living = [claim for claim in self.claims() if self._lives(claim)]
            if living and not any(claim.shares(mine) for claim in living):
                return living
            others = [claim for claim in living if claim.worker != mine.worker]
            self.write(_CLAIMS, dump_claims([*others, mine]))
        except OSError:
            pass
        finally:
            if handle is not None:
                os.close(handle)
        return []

    def claims(self) -> list[Claim]:
        """All that are there, of the dead too."""
        return parse_claims(self.read(_CLAIMS) or "")

    def _lives(self, claim: Claim) -> bool:
        """Whether its worker does; of one in another container, whether anybody is here."""
        return claim.lives if claim.is_near else self._is_held()

    def _is_held(self) -> bool:
        """Whether anybody plays a part here."""
        for path in self.path.glob("*.lock"):
            if path.stem == _CLAIMS:
                continue
            handle = self.lock(path.stem)
            if handle is None:
                return True
            os.close(handle)
        return False

    @classmethod
    def at(cls, path: Path) -> RunFolder:
        """One that is there, whoever's it was."""
        found = cls.__new__(cls)
        found.name, found.path, found._environ = "", path, {}
        return found

    def is_stale(self, now_s: float) -> bool:
        """Whether all who used it were killed. Those of another container are not seen."""
        try:
            if not _is_private(self.path) or now_s - self.path.stat().st_mtime < _FRESH_S:
                return False
            used = any(not claim.is_near or claim.lives for claim in self.claims())
            return not used and not self._is_held()
        except OSError:
            return False

    def _try_room(self) -> None:
        """Raises OSError where files can be made and not filled, as on a full tmpfs."""
        draft = self.path / f".{_ROOM}.{secrets.token_hex(8)}"
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(bytes(_ROOM_BYTES))
                file.flush()
                file.truncate(1)
            draft.replace(self.path / _ROOM)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
                self.path.rmdir()  # unless somebody else has begun to use it
            raise

    def lock(self, name: str) -> int | None:
        """A descriptor that holds the lock as long as any process has it open; None: taken."""
        path = self.path / f"{name}.lock"
        while True:
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)  # its last user may just have left
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return None
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    return handle
            os.close(handle)  # removed by the holder before us

    def token(self) -> str:
        """The job token: FAILSLOW_TOKEN, else the folder's own. Raises ConfigError."""
        return load_token(self._environ, self.path / "token")

    def read(self, name: str) -> str | None:
        """What `write` put there; None before that."""
        try:
            return (self.path / name).read_text()
        except OSError:
            return None

    def write(self, name: str, text: str) -> None:
        """Put `text` there in one step, readable by this user alone. Raises OSError."""
        draft = self.path / f".{name}.{secrets.token_hex(8)}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, text.encode())
            draft.replace(self.path / name)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)

    def tidy(self, leaving: str = "") -> bool:
        """Remove it if nobody holds one of its locks, or has claimed it and lives; whether it is
        gone. leaving: a worker whose claim no longer counts."""
        held: list[int] = []
        try:
            for path in self.path.glob("*.lock"):
                handle = self.lock(path.stem)
                if handle is None:
                    return False
                held.append(handle)
            if any(c.is_near and c.lives for c in self.claims() if c.worker != leaving):
                return False  # its supervisor is about to come
            # while all locks are ours nobody relies on what is in it
            for path in self.path.iterdir():
                path.unlink(missing_ok=True)
            self.path.rmdir()
        except OSError:
            return False
        finally:
            for handle in held:
                os.close(handle)
        return True


def stale_folders(environ: Mapping[str, str], now_s: float) -> list[RunFolder]:
    """This user's that nobody uses any more, their last users killed. now_s: epoch seconds."""
    found = (
        RunFolder.at(path)
        for parent in ring_folders(environ)
        for path in sorted(parent.glob(f"failslow-{os.getuid()}-*.run"))
    )
    return [folder for folder in found if folder.is_stale(now_s)]


def remove_stale_folders(environ: Mapping[str, str]) -> None:
    """Remove those of `stale_folders`."""
    for folder in stale_folders(environ, time.time()):
        folder.tidy()


def _is_private(path: Path) -> bool:
    """Whether it is a folder, and this user's alone. Raises OSError."""
    status = path.lstat()
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    return private and status.st_uid == os.getuid()


def _has_room(path: Path) -> bool:
    """Whether a process of this user found room in it."""
    try:
        return _is_private(path) and (path / _ROOM).stat().st_size > 0
    except OSError:
        return False
