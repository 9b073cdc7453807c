"""Whether a job could start again without one of its hosts (level S4), as its launcher knows it.

In: the command of `failslow run --restarts`. Out: variables for it, which its workers inherit, and
there what speaks against a restart:

    launched(["torchrun", "--nnodes", "6:8", "--rdzv-endpoint", "gpu-1:29400", "train.py"], {})
    # on gpu-1: {"FAILSLOW_LAUNCHER": "gpu-1", "FAILSLOW_MEETS": "gpu-1:29400", …}
    # on gpu-2: {"FAILSLOW_LAUNCHER": "gpu-2", "FAILSLOW_MEETS": "", "FAILSLOW_NEEDS": "6"}
    against(os.environ)      # "" nothing
    meets_here(os.environ)   # True on gpu-1: the others could not start without it
    least_hosts(os.environ)  # 6

Once it has saved itself it says so in the run's folder, by `saved-<host>`: only for such a job does
a launcher wait for an order after its command has ended.

A job that saved itself and then cannot start is worse off than a slow one: all of this is known
before it is saved. Standard library and psutil only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from failslow.ownfiles import open_own

__all__ = [
    "against", "launched", "least_hosts", "meets_here", "needed_nodes", "saved", "tell_saved",
]  # fmt: skip

_LAUNCHER, _MEETS, _NEEDS = "FAILSLOW_LAUNCHER", "FAILSLOW_MEETS", "FAILSLOW_NEEDS"
_ANYWHERE = "*"
_NUMBER = re.compile(r"[0-9]{1,6}")


def launched(
    command: Sequence[str], environ: Mapping[str, str], *, requeued: bool = False
) -> dict[str, str]:
    """Variables for a command that this host's `failslow run` starts, and would start again.

    requeued: a scheduler would, on whatever hosts.
    """
    if requeued:
        return {_LAUNCHER: _ANYWHERE, _MEETS: "", _NEEDS: "0"}
    place = _option(command, "rdzv-endpoint") or _option(command, "master-addr")
    place = place or environ.get("PET_RDZV_ENDPOINT") or environ.get("PET_MASTER_ADDR") or ""
    least = (_option(command, "nnodes") or environ.get("PET_NNODES") or "1").partition(":")[0]
    return {
        _LAUNCHER: socket.gethostname(),
        _MEETS: place if _is_here(place) else "",
        _NEEDS: least if _NUMBER.fullmatch(least) else "1",
    }


def against(environ: Mapping[str, str]) -> str:
    """Why nobody would start this worker's job again as it is meant; "" nothing is known."""
    host = environ.get(_LAUNCHER, "")
    if not host:
        return "nobody would start the job again: start it by failslow run --restarts"
    if host not in (_ANYWHERE, socket.gethostname()):
        return (
            f"only {host} has a failslow run, and its command would start the job on all hosts "
            "again: use failslow run on every host, or --slurm requeue"
        )
    return ""


def meets_here(environ: Mapping[str, str]) -> bool:
    """Whether this worker's host is where the others meet to start again."""
    return bool(environ.get(_MEETS))


def least_hosts(environ: Mapping[str, str]) -> int:
    """Of how many hosts at least this worker's job can start again; 0: others are found for it."""
    told = environ.get(_NEEDS, "")
    return int(told) if _NUMBER.fullmatch(told) else 1


def needed_nodes(command: Sequence[str]) -> int:
    """Of how many nodes a launcher needs all to start; 0 where it can do with fewer, or one."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", _option(command, "nnodes"))
    if match is None or int(match[1]) < int(match[2] or match[1]) or int(match[1]) < 2:
        return 0
    return int(match[1])


def tell_saved(environ: Mapping[str, str]) -> None:
    """This worker's job has saved itself to start again. Raises OSError."""
    if environ.get(_LAUNCHER) and environ.get("FAILSLOW_DIR"):
        host = re.sub(r"[^A-Za-z0-9_.-]+", "_", socket.gethostname())
        path = Path(environ["FAILSLOW_DIR"]) / f"saved-{host}"
        handle = open_own(path, os.O_WRONLY | os.O_TRUNC)
        os.write(handle, f"{os.getpid()}\n".encode())
        os.close(handle)


def saved(folder: Path) -> dict[str, int]:
    """When hosts last said so, to be compared with what there was before: clocks may differ."""
    found = {}
    for path in folder.glob("saved-*"):
        with contextlib.suppress(OSError):
            found[path.name] = path.stat().st_mtime_ns
    return found


def _option(command: Sequence[str], name: str) -> str:
    """Its value: those after the script are the script's own."""
    found = ""
    for word, after in zip(command, (*command[1:], ""), strict=True):
        if word.endswith(".py"):
            break
        option, given, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            found = value if given else after
    return found


def _is_here(place: str) -> bool:
    """Whether HOST:PORT is one of this machine's addresses."""
    with contextlib.suppress(ValueError, OSError):
        host = urlsplit(f"//{place}").hostname or ""
        if not host:
            return False
        mine = set(_addresses())
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        return any(ip_address(a.partition("%")[0]).is_loopback or a in mine for a in found)
    return False


def _addresses() -> Iterator[str]:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                yield address.address
