"""The CPU control group of a process, version 1 or 2: its limit, and a group of its own.

In: a pid, /proc/PID/cgroup and the mount table. Out: a `CpuGroup`, whose limit is in cores.

    >>> group = cpu_group(4711)                                          # doctest: +SKIP
    >>> group.path, group.limit_cores()                                  # doctest: +SKIP
    (PosixPath('/sys/fs/cgroup/cpu/job7'), None)
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from failslow.errors import InjectError

__all__ = ["CpuGroup", "cpu_group", "dissolve", "limit_words"]

_PERIOD_US = 10_000
"""Short, so that a burst of computing longer than a few ms already feels the limit."""
_MIN_QUOTA_US = 1_000
"""The kernel accepts no less; slower than that takes a longer period."""
_MAX_PERIOD_US = 1_000_000


@dataclass(frozen=True)
class CpuGroup:
    """One control group of the cpu controller."""

    path: Path
    version: int
    root: Path
    """Where the controller's tree begins as seen from here."""

    @property
    def processes_file(self) -> Path:
        """Reading lists the members, writing a pid moves that process in."""
        return self.path / "cgroup.procs"

    def members(self) -> set[int]:
        """Pids in this group itself, without its child groups."""
        return {int(line) for line in self.processes_file.read_text(encoding="ascii").split()}

    def limit_files(self) -> list[Path]:
        """The files that together hold the limit, in the order they are to be written."""
        if self.version == 2:
            return [self.path / "cpu.max"]
        return [self.path / "cpu.cfs_period_us", self.path / "cpu.cfs_quota_us"]

    def weight_file(self) -> Path:
        """The file with the group's share under contention."""
        return self.path / ("cpu.weight" if self.version == 2 else "cpu.shares")

    def limit_cores(self) -> float | None:
        """The group's own limit; None without one (the root of version 2 has none)."""
        try:
            words = " ".join(f.read_text(encoding="ascii") for f in self.limit_files()).split()
        except FileNotFoundError:
            return None
        quota, period = words if self.version == 2 else reversed(words)
        return None if quota in ("max", "-1") else int(quota) / int(period)

    def tightest_limit_cores(self) -> float | None:
        """The least limit of the group and the groups above it."""
        limits = []
        for path in (self.path, *self.path.parents):
            limits.append(CpuGroup(path, self.version, self.root).limit_cores())
            if path == self.root:
                break
        return min((limit for limit in limits if limit is not None), default=None)

    def set_limit(self, cores: float) -> None:
        """At most `cores` CPU seconds a second for all members together."""
        words = limit_words(cores, version=self.version)
        for file, text in zip(self.limit_files(), words, strict=True):
            file.write_text(text, encoding="ascii")

    def move_in(self, pids: set[int]) -> None:
        """Move processes here; those that have ended meanwhile are left out."""
        for pid in sorted(pids):
            with suppress(ProcessLookupError):
                self.processes_file.write_text(str(pid), encoding="ascii")


def limit_words(cores: float, *, version: int) -> list[str]:
    """What to write into the limit files for `cores`.

    >>> limit_words(0.7, version=1), limit_words(0.05, version=2)
    (['10000', '7000'], ['1000 20000'])
    """
    period_us = min(max(_PERIOD_US, round(_MIN_QUOTA_US / cores)), _MAX_PERIOD_US)
    quota_us = max(_MIN_QUOTA_US, round(cores * period_us))
    if version == 2:
        return [f"{quota_us} {period_us}"]
    return [str(period_us), str(quota_us)]


def cpu_group(
    pid: int | str = "self", *, proc: Path = Path("/proc"), root: Path = Path("/")
) -> CpuGroup | None:
    """The cpu control group of `pid`; None where this machine, or this container, shows none.

    root: where the mounts of `proc` are looked for; the paths of the group are without it.
    """
    try:
        mounts = (proc / "self/mountinfo").read_text(encoding="utf-8").splitlines()
        member = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for version in (1, 2):
        mount = _mount(mounts, version)
        inside = _membership(member, version)
        if mount is None or inside is None:
            continue
        point, top = mount
        # a container sees only a part of the tree, and its members named from the tree's root
        if inside.is_relative_to(top) and ".." not in inside.parts:
            path = point / inside.relative_to(top)
            if version == 1 or _has_cpu(root / point.relative_to("/")):
                return CpuGroup(path, version, point)
    return None


def _mount(mountinfo: list[str], version: int) -> tuple[Path, PurePosixPath] | None:
    """(mount point, the part of the tree mounted there) of the cpu controller."""
    for line in mountinfo:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        fits = kind == "cgroup2" if version == 2 else kind == "cgroup"
        if fits and (version == 2 or "cpu" in options.split(",")):
            fields = left.split()
            return Path(fields[4]), PurePosixPath(fields[3])
    return None


def _membership(cgroup: list[str], version: int) -> PurePosixPath | None:
    for line in cgroup:
        number, controllers, path = line.split(":", 2)
        if (number == "0") if version == 2 else ("cpu" in controllers.split(",")):
            return PurePosixPath(path)
    return None


def _has_cpu(root: Path) -> bool:
    """Whether a tree of version 2 has the controller at all; groups may have to ask for it."""
    with suppress(OSError):
        return "cpu" in (root / "cgroup.controllers").read_text(encoding="ascii").split()
    return False


def dissolve(path: Path, back_to: Path, *, limit_s: float = 5.0) -> None:
    """Move all members of the group at `path` to the one at `back_to` and remove it.

    Where `back_to` is gone its nearest parent takes them. Raises InjectError after `limit_s`.
    """
    while not (back_to / "cgroup.procs").exists() and back_to != back_to.parent:
        back_to = back_to.parent
    deadline_s = time.monotonic() + limit_s
    while path.exists():
        with suppress(FileNotFoundError):
            for pid in (path / "cgroup.procs").read_text(encoding="ascii").split():
                with suppress(ProcessLookupError):
                    (back_to / "cgroup.procs").write_text(pid, encoding="ascii")
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # busy: a member forked, or is just leaving
            if time.monotonic() > deadline_s:
                raise InjectError(
                    f"cannot remove the control group {path}: {error.strerror}; "
                    f"move what `cat {path}/cgroup.procs` lists elsewhere, then rmdir it"
                ) from None
            time.sleep(0.01)
