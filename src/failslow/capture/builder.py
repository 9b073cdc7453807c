"""Builds the native capture: once for each torch, Python and source, never while a job waits.

In: `native.cpp`, torch's headers and a C++ compiler. Out: an extension in the user's cache
folder, else in one of its own in the temporary folder, that `native.load` finds. Torch is looked
up, not imported, save by the build itself. A build is tried in a process of its own before it is
put in its place, in one step; whoever comes meanwhile finds the lock taken.

    state() -> BuildState("missing", "")
    build() -> /root/.cache/failslow/native-…/failslow_native.so     takes about a minute
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Literal

from failslow.capture.cache import COMMAND, DIGEST, FILE, digest, prepare, refused, roots
from failslow.errors import CaptureError

__all__ = [
    "COMMAND",
    "BuildState",
    "build",
    "build_later",
    "extension_path",
    "places",
    "state",
]

_SOURCE = Path(__file__).with_name("native.cpp")
_HEADER = Path(__file__).with_name("native_ring.hpp")
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_LOCK, _FAILED = "build.lock", "failed.txt"
_PATIENCE_S = 900.0
"""A compiler at the lowest priority, beside trainers that use every core, is slow."""
_RETRY_S = 7 * 86400.0
"""A build that failed is not tried again by itself for so long; by hand always."""
_OFF = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class BuildState:
    """Whether the extension is there, and why not."""

    name: Literal["built", "building", "missing", "failed", "no compiler", "no torch"]
    detail: str
    """Its path (built), the compiler asked for (no compiler), what went wrong (failed), why one
    that is there is not used (missing)."""


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where the extension for this source, torch and Python may be, best first.

    Raises CaptureError without torch.
    """
    name = _folder_name()
    return [root / name / FILE for root in roots(environ)]


def extension_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where it is and may be loaded from, else where it would be. Raises as `places`."""
    where = places(environ)
    return _found(where)[0] or where[0]


def _found(where: Sequence[Path]) -> tuple[Path | None, str]:
    """The first that may be loaded, else why the first that is there may not."""
    reasons = []
    for path in where:
        with contextlib.suppress(OSError):  # it is not there
            reason = refused(path)
            if not reason:
                return path, ""
            reasons.append(reason)
    return None, "".join(reasons[:1])


def state(environ: Mapping[str, str] = os.environ) -> BuildState:
    """What there is; nothing is started and torch is not imported."""
    try:
        where = places(environ)
    except CaptureError as error:
        return BuildState("no torch", str(error))
    path, reason = _found(where)
    if path is not None:
        return BuildState("built", str(path))
    compiler = environ.get("CXX") or "c++"
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        return BuildState("no compiler", compiler)
    for place in where:
        if _taken(place.with_name(_LOCK)):
            return BuildState("building", "")
        with contextlib.suppress(OSError):
            failed = place.with_name(_FAILED)
            if time.time() - failed.stat().st_mtime < _RETRY_S:
                return BuildState("failed", failed.read_text(errors="replace").strip())
    return BuildState("missing", reason)


def build_later(environ: Mapping[str, str] = os.environ, *, start: bool = True) -> str:
    """Start the build in the background unless it is there or hopeless.

    start: False only tells what is to be told. The build runs at the lowest priority, or that of
    FAILSLOW_RUNTIME_NICE, and outlives whoever asked for it.
    Out: what to tell the user, one line, "" nothing.
    FAILSLOW_CAPTURE_BUILD=0 keeps it from happening, and so does a FAILSLOW_CAPTURE_MODE that
    does not want it.
    """
    if environ.get("FAILSLOW_CAPTURE_BUILD", "").strip().lower() in _OFF:
        return ""
    if environ.get("FAILSLOW_CAPTURE_MODE", "") not in ("", "native"):
        return ""
    now = state(environ)
    if now.name == "no compiler":
        return (
            f"no C++ compiler ({now.detail}): calls are captured in Python, at some ten times the "
            f"cost; install one or set CXX, then {COMMAND}"
        )
    if now.name == "failed":
        return f"calls are captured in Python: {now.detail}"
    if now.name != "missing":
        return ""
    if start:
        _start(environ)
    return (
        "the compiled capture is being built in the background for jobs started later; this one "
        "is captured in Python"
    )


def _start(environ: Mapping[str, str]) -> None:
    down = str(max(0, _nice(environ) - os.getpriority(os.PRIO_PROCESS, 0)))
    subprocess.Popen(
        # the shell ends at once: nobody has to wait for the build
        ["/bin/sh", "-c", 'nice -n "$@" &', "failslow", down, *_ourselves("--later")],
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=_quiet(environ),
        start_new_session=True,
    ).wait()


def build(
    environ: Mapping[str, str] = os.environ,
    *,
    wait: bool = True,
    again: bool = False,
    limit_s: float = _PATIENCE_S,
) -> Path:
    """Build the extension unless it is there and may be loaded.

    wait: for another process that is at it already; else that is an error. again: build it where
    it cannot be loaded, too; to know that takes seconds. Raises CaptureError with what went wrong
    and what to do.
    """
    where = places(environ)
    deadline_s = time.monotonic() + limit_s
    reasons = []
    for place in where:
        folder = place.parent
        try:
            if reason := prepare(folder):
                reasons.append(reason)
                continue
            with _locked(folder / _LOCK, deadline_s if wait else 0.0):
                found = _found([place])[0]
                if found and not (again and _unloadable(environ, deadline_s)):
                    return found
                return _make(folder, environ, deadline_s)
        except OSError as error:
            reasons.append(f"{folder.parent}: {error.strerror or error}")
    raise CaptureError(
        f"no folder for the compiled capture: {'; '.join(reasons)}; name one in XDG_CACHE_HOME"
    )


def _make(folder: Path, environ: Mapping[str, str], deadline_s: float) -> Path:
    """Compile, try, put in place; the lock is ours."""
    failed = folder / _FAILED
    failed.unlink(missing_ok=True)
    for left in folder.glob("build-*"):  # of a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as name:
        # laid out as a cache folder, for the process that tries it
        made = Path(name) / "failslow" / folder.name / FILE
        made.parent.parent.mkdir(mode=0o700)  # by itself, or it gets what the umask gives
        made.parent.mkdir(mode=0o700)
        try:
            _run(_command(made, environ), environ, deadline_s)
            made.chmod(0o700)  # whatever the umask
            made.with_name(DIGEST).write_text(f"{digest(made)}\n")
            made.with_name(DIGEST).chmod(0o600)
            tried = {**_quiet(environ), "XDG_CACHE_HOME": name, "FAILSLOW_CAPTURE_FOLDER": name}
            _run(_ourselves("--try"), tried, deadline_s)
        except FileNotFoundError:
            compiler = environ.get("CXX") or "c++"
            raise CaptureError(
                f"no C++ compiler: {compiler} was not found; install one or set CXX"
            ) from None
        except CaptureError as error:
            with contextlib.suppress(OSError):
                failed.write_text(f"{error}\n")
            raise
        made.with_name(DIGEST).replace(folder / DIGEST)
        made.replace(folder / FILE)
    return folder / FILE


def _unloadable(environ: Mapping[str, str], deadline_s: float) -> str:
    """Why the extension that is there does not run, "" where it does."""
    with tempfile.TemporaryDirectory() as rings:
        try:
            tried = {**_quiet(environ), "FAILSLOW_CAPTURE_FOLDER": rings}
            _run(_ourselves("--try"), tried, deadline_s)
        except CaptureError as error:
            return str(error)
    return ""


def _command(made: Path, environ: Mapping[str, str]) -> list[str]:
    import torch

    home = Path(torch.__file__).parent
    return [
        environ.get("CXX") or "c++",
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{home / 'include'}",
        f"-I{home / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_paths()['include']}",
        str(_SOURCE),
        *("-o", str(made), f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def _run(command: Sequence[str], environ: Mapping[str, str], deadline_s: float) -> None:
    """Run to the end or the deadline; CaptureError with its last words when it fails."""
    what = "does not run" if command[0] == sys.executable else f"does not compile ({command[0]})"
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=dict(environ),
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate(timeout=max(1.0, deadline_s - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            raise CaptureError(
                f"{_SOURCE.name} {what}: not done in time; try {COMMAND} when the machine is idle"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the compiler has children
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = [line for line in said.splitlines() if "error" in line.lower()] or [said[-300:]]
        why = " ".join(lines[0].split()) or f"exit code {process.returncode}"
        raise CaptureError(f"{_SOURCE.name} {what}: {why}; capture works without it")


def _nice(environ: Mapping[str, str]) -> int:
    try:
        return int(environ.get("FAILSLOW_RUNTIME_NICE", "19"))
    except ValueError:
        return 19


def _ourselves(option: str) -> list[str]:
    return [sys.executable, "-m", "failslow.capture.native", option]


def _quiet(environ: Mapping[str, str]) -> dict[str, str]:
    """In which importing torch starts nothing of ours."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FAILSLOW_CAPTURE_MODE")
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return kept | {
        "FAILSLOW": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def _folder_name() -> str:
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        raise CaptureError("torch is not installed for this Python: nothing can be captured")
    version = Path(found.origin).with_name("version.py")
    what = (
        _SOURCE.read_bytes(),
        _HEADER.read_bytes(),
        version.read_bytes() if version.exists() else b"",
        found.origin,
        sys.version,
        platform.machine(),
        *_FLAGS,
    )
    return f"native-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"


def _taken(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(handle)
    return False


@contextmanager
def _locked(lock: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock; CaptureError when another process has it until the deadline."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise CaptureError(
                        f"another process is building {lock.parent}; wait for it"
                    ) from None
                time.sleep(0.2)
                continue
            except OSError:
                pass  # a file system without locks: two builds at worst, each put in place whole
            break
        yield
    finally:
        os.close(handle)
