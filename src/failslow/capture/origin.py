"""Which start of a job a process belongs to. Standard library only, and cheap.

In: a worker's environment and its ancestors in /proc. Out: an `Origin`, in every ring:

    "40112-8231907@127.0.0.1:33291/4026531840@elastic"     launcher, master, how it is launched

Names do not tell jobs apart: two may have one `--rdzv-id` or one FAILSLOW_JOB. Workers of all nodes
share the address they meet at, which a restart may change, and those of one node the process they
descend from: torchrun's stays while it restarts them; a shell may have started other jobs as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Origin", "kin", "process_identity", "process_start_ticks", "worker_lives"]

_LONGEST = 200
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where workers come from; "" is not known."""

    launcher: str
    """PID-TICKS of the process that started them."""
    master: str
    """The address they meet at; of this network namespace, where it is loopback."""
    elastic: bool
    """The launcher is one job's: it gave them a run id."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Origin:
        """This process's own."""
        elastic = bool(environ.get("TORCHELASTIC_RUN_ID"))
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        master = f"{host}:{port}"[:_LONGEST] if host else ""
        if host in _LOOPBACK:
            master += f"/{_net_namespace()}"
        return cls(_launcher(b"TORCHELASTIC_RUN_ID=" if elastic else b"RANK="), master, elastic)

    @classmethod
    def parse(cls, text: str) -> Origin:
        """What `text` gave."""
        launcher, _, rest = text.partition("@")
        master, _, how = rest.rpartition("@")
        return cls(launcher, master, how == "elastic")

    @property
    def text(self) -> str:
        """For a file or a variable."""
        return f"{self.launcher}@{self.master}@{'elastic' if self.elastic else ''}"

    def shares(self, other: Origin) -> bool:
        """Whether the two are of one job."""
        if self.master and self.master == other.master:
            return True
        if not self.launcher or self.launcher != other.launcher:
            return False
        # a trainer may set the address when its monitoring has long been started
        return (self.elastic and other.elastic) or not self.master or not other.master


def kin(first: Iterable[Origin], others: Iterable[Origin]) -> set[Origin]:
    """`first`, and those of `others` that share with them, or with one that does, and so on."""
    found, left = set(first), set(others)
    while near := {other for other in left if any(other.shares(known) for known in found)}:
        found |= near
        left -= near
    return found


def process_start_ticks(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when there is no such process.

    A pid is used again, a pid with its start time is not. A zombie counts as gone.
    """
    try:
        fields = _stat(pid)
        return None if fields[0] in b"ZXx" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def process_identity(pid: int) -> str:
    """PID-TICKS."""
    return f"{pid}-{process_start_ticks(pid) or 0}"


def worker_lives(identity: str) -> bool:
    """Whether the process PID-TICKS is there."""
    pid, _, ticks = identity.partition("-")
    return process_start_ticks(int(pid)) == int(ticks)


def _launcher(mark: bytes) -> str:
    """The nearest ancestor that was not given `mark` itself: between it and us may be shells."""
    found, pid = os.getpid(), os.getppid()
    try:
        while pid > 0:
            found = pid
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(variable.startswith(mark) for variable in variables):
                break
            pid = int(_stat(pid)[1])
    except (OSError, ValueError, IndexError):
        pass  # another user's: no worker of ours
    return process_identity(found)


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from its state on."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # the name before it may hold anything, half a character too: the kernel cuts it at 15 bytes
    return stat[stat.rindex(b")") + 2 :].split()


def _net_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net").strip("net:[]")
    except OSError:
        return ""
