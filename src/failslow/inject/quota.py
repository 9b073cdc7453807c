"""A CPU quota for one process by its control group: the group's own where the process is alone in
it, else a group made for it.

In: a pid and cores. Out: a limit in the kernel, and before each change the promise that undoes it.
Version 1 and version 2 differ in where a group may be made: in version 2 members are in leaves only
(but for the root), and a group has the controller only where all groups above hand it down.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from failslow.errors import InjectError
from failslow.inject.cgroups import CpuGroup
from failslow.inject.fault import Guarding
from failslow.inject.processes import family
from failslow.inject.steps import DissolveGroup, HandBack, RestoreFile

__all__ = ["limit_process"]

_WEIGHT_OF_A_THREAD = 1024
"""cpu.shares of one runnable thread that is in no group of its own."""


def limit_process(
    guard: Guarding, group: CpuGroup, pid: int, *, cores: float, threads: int
) -> Path:
    """Limit `pid` and its family in `group` to `cores`; the group that now has the limit.

    threads: how many compute; a group of its own is to weigh as much. Raises InjectError or OSError
    where that is not to be had; what was promised then undoes what was done.
    """
    tightest = group.tightest_limit_cores()
    if tightest is not None and tightest <= cores:
        raise InjectError(
            f"its control group already allows only {tightest:.2f} cores, no more than {cores:.2f}"
        )
    members = group.members()
    if group.path != group.root and members <= family(pid):
        if group.version == 2:
            _hand_down(guard, group.root, group.path.parent)
        # undone last first: the quota before the period it is checked against
        for file in group.limit_files():
            guard.promise(RestoreFile(str(file), file.read_text(encoding="ascii").strip()))
        group.set_limit(cores)
        return group.path
    own = _own_group(guard, group, pid, threads)
    own.set_limit(cores)
    own.move_in(family(pid) & members)
    own.move_in(family(pid) & group.members())  # forked while the others moved
    return own.path


def _own_group(guard: Guarding, group: CpuGroup, pid: int, threads: int) -> CpuGroup:
    """A new group below the process's, or beside it where members must be in leaves."""
    inside = group.version == 1 or group.path == group.root
    parent = group.path if inside else group.path.parent
    if not os.access(parent, os.W_OK):
        raise InjectError(f"{parent} is not writable by this user")
    if group.version == 2:
        _hand_down(guard, group.root, parent)
    own = CpuGroup(parent / f"failslow-{pid}", group.version, group.root)
    guard.promise(DissolveGroup(str(own.path), str(group.path)))
    own.path.mkdir(exist_ok=True)
    if group.version == 1:
        own.weight_file().write_text(str(_WEIGHT_OF_A_THREAD * threads), encoding="ascii")
    else:
        with suppress(FileNotFoundError):  # the root has no weight
            weight = group.weight_file().read_text(encoding="ascii")
            own.weight_file().write_text(weight, encoding="ascii")
    return own


def _hand_down(guard: Guarding, root: Path, parent: Path) -> None:
    """See that every group from `root` to `parent` gives its children the cpu controller.

    Where another injection saw to it, it is for whichever ends last to take it back.
    """
    chain = [parent, *parent.parents]
    for path in reversed(chain[: chain.index(root) + 1]):
        control = path / "cgroup.subtree_control"
        back = HandBack(str(path))
        if "cpu" not in control.read_text(encoding="ascii").split():
            guard.promise(back)
            control.write_text("+cpu", encoding="ascii")
        elif guard.promised(back):
            guard.promise(back)
