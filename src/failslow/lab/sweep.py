"""Removes a test bed: processes, namespaces, control groups, rings, its own folder. Also a process
that does so once the bed's owner is gone.

In: the bed's name. Out: nothing left of it. Every step may be repeated. As a process it reads stdin
to its end, or until the owner with that pid is no more, and then sweeps:

    python sweep.py fs4711 /sys/fs/cgroup/cpu 4711 183203

Standard library only, and nothing else of this package.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["NAMESPACES", "dead_beds", "main", "run", "start_ticks", "sweep"]

NAMESPACES = Path("/run/netns")
_SHARED = Path("/dev/shm")
_BED = re.compile(r"(fs(?P<pid>\d+)[a-z]*)(?:n\d+|sw|w\d+)")


def run(*words: str, stdin: str | None = None) -> str:
    """Output of a command; RuntimeError with what it said on stderr."""
    done = subprocess.run(
        words, input=stdin or "", capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def start_ticks(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _namespaces(bed: str) -> list[str]:
    names = [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []
    return [name for name in names if (m := _BED.fullmatch(name)) and m[1] == bed]


def _groups(bed: str, root: Path) -> list[Path]:
    return [
        path for path in root.glob(f"{bed}w*") if (m := _BED.fullmatch(path.name)) and m[1] == bed
    ]


def dead_beds(root: Path) -> set[str]:
    """Names of beds whose owner has ended without taking them down."""
    seen = [path.name for path in root.glob("fs*")]
    if NAMESPACES.is_dir():
        seen += [path.name for path in NAMESPACES.glob("fs*")]
    found = (m for name in seen if (m := _BED.fullmatch(name)))
    return {m[1] for m in found if start_ticks(int(m["pid"])) is None}


def members(bed: str, root: Path) -> set[int]:
    """Pids in the bed's control groups and namespaces."""
    pids: set[int] = set()
    for group in _groups(bed, root):
        for file in (group / "cgroup.procs", *group.glob("*/cgroup.procs")):
            with suppress(OSError):
                pids.update(map(int, file.read_text(encoding="ascii").split()))
    for name in _namespaces(bed):
        with suppress(RuntimeError):
            pids.update(map(int, run("ip", "netns", "pids", name).split()))
    return {pid for pid in pids if start_ticks(pid) is not None}


def kill(bed: str, root: Path, *, limit_s: float = 20.0) -> None:
    """Kill all of the bed's processes and what they still start; RuntimeError if one stays."""
    deadline_s = time.monotonic() + limit_s
    while pids := members(bed, root):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"processes {sorted(pids)} of test bed {bed} outlive SIGKILL")
        time.sleep(0.01)


def sweep(bed: str, root: Path) -> None:
    """Remove everything of the bed. root: the mount point of the cpu controller."""
    kill(bed, root)
    for name in _namespaces(bed):
        with suppress(RuntimeError):  # another sweeper was quicker
            run("ip", "netns", "del", name)
    kill(bed, root)  # who was on the way in
    for group in _groups(bed, root):
        for path in (*(p for p in group.iterdir() if p.is_dir()), group):
            _remove_group(path)
    for path in (*_SHARED.glob(f"{bed}n*"), *Path(tempfile.gettempdir()).glob(f"{bed}-*")):
        shutil.rmtree(path, ignore_errors=True)


def _remove_group(path: Path, *, limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while path.exists():  # busy while the dead are still leaving
        with suppress(OSError):
            path.rmdir()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the control group {path} stays busy")
        time.sleep(0.005)


def main() -> None:
    """Wait for the owner's end, then sweep."""
    bed, root, owner, ticks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while start_ticks(owner) == ticks:
        if select.select([0], [], [], 0.5)[0] and not os.read(0, 1):
            break
    sweep(bed, root)


if __name__ == "__main__":
    main()
