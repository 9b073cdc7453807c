"""What became of a thread's time while it measured: run, waited for a core, held by a quota.

In: Linux's books of this process. Out: the difference between two looks at them:

    Account(wall_s=0.40, cpu_s=0.19, queued_s=0.21, throttled_s=0.2)

A slow benchmark on the CPU is either the processor's doing (ran longer, or held by a quota) or its
neighbours' (waited for a core): this tells which. Zeros where there are no such books.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Account", "Books"]

_V1_MOUNTS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")
_V2_MOUNT = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Account:
    """Where the seconds went."""

    wall_s: float
    cpu_s: float
    """Of this thread."""
    queued_s: float
    """Ready to run, but not running; time held by a quota is in it."""
    throttled_s: float
    """Held by the quota of a control group the process is in."""


class Books:
    """Opens at construction; `close` gives the account since then.

    every_thread: what any thread of the process waited counts, together; else that of the thread
    that waited longest among those that take part in the work.
    """

    def __init__(self, *, every_thread: bool = False) -> None:
        self._every_thread = every_thread
        self._quotas = tuple(_quota_files())
        self._queued = _queued_s()
        self._throttled_s = self._read_throttled()
        # inside the wall clock's interval, at both ends
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def close(self) -> Account:
        """What happened since this was made."""
        cpu_s, wall_s = time.thread_time() - self._cpu_s, time.perf_counter() - self._wall_s
        now, none = _queued_s(), (0.0, 0.0)
        ran = {task: now[task][0] - self._queued.get(task, none)[0] for task in now}
        most = max(ran.values(), default=0.0)
        waited = {task: now[task][1] - self._queued.get(task, none)[1] for task in now}
        if self._every_thread:
            queued_s = sum(waited.values())
        else:
            # only threads that took part: a loader's that waits for a core slows nobody here
            queued_s = max((waited[t] for t in now if ran[t] >= 0.5 * most), default=0.0)
        throttled_s = self._read_throttled() - self._throttled_s
        return Account(wall_s, cpu_s, max(0.0, queued_s), max(0.0, throttled_s))

    def _read_throttled(self) -> float:
        return sum(map(_throttled_s, self._quotas))


def _queued_s() -> dict[str, tuple[float, float]]:
    """{thread: (seconds run, seconds waited for a core)} of this process."""
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
                words = Path(f"/proc/self/task/{task}/schedstat").read_text().split()
                found[task] = (int(words[0]) * 1e-9, int(words[1]) * 1e-9)
    return found


def _quota_files() -> Iterator[Path]:
    """cpu.stat of this process's control group and those above it, version 1 or 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        mounts: tuple[str, ...] = ()
        if "cpu" in controllers.split(","):
            mounts = _V1_MOUNTS
        elif number == "0":
            mounts = (_V2_MOUNT,)
        for mount in mounts:
            folder = Path(mount) / path.lstrip("/")
            while len(folder.parts) >= len(Path(mount).parts):
                stat = folder / "cpu.stat"
                if stat.is_file():
                    yield stat
                folder = folder.parent


def _throttled_s(path: Path) -> float:
    try:
        words = path.read_text().split()
    except OSError:
        return 0.0
    values = dict(zip(words[::2], words[1::2], strict=False))
    try:
        if "throttled_usec" in values:
            return int(values["throttled_usec"]) * 1e-6
        return int(values.get("throttled_time", 0)) * 1e-9
    except ValueError:
        return 0.0
