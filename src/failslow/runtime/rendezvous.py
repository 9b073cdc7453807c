"""Where the agents of a job meet its controller, from what every worker's environment says.

In: the environment torchrun (or whoever) gave the workers. Out: a `Meeting`:

| job | the controller serves at | agents find it by |
|---|---|---|
| one node | 127.0.0.1, a free port | the file `address` in the run folder |
| several nodes, FAILSLOW_TOKEN set | MASTER_ADDR, `derived_port` | the same sum |
| several nodes, no token | 127.0.0.1: the other nodes are not watched, and that is said | – |
| FAILSLOW_TRANSPORT=tcpstore://H:P | H:P | the same variable |
| FAILSLOW_TRANSPORT=redis://… | serves nothing | the same variable |

Standard library only.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from failslow.errors import ConfigError

__all__ = [
    "Meeting",
    "derived_port",
    "given_name",
    "is_loopback",
    "is_single_node",
    "meeting",
    "net_namespace",
    "node_name",
]

_FIRST_PORT, _PORTS = 10_000, 22_000
_LOOPBACK = "tcpstore://127.0.0.1:0"
_NAMELESS = ("", "localhost", "(none)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how."""

    url: str | None
    """What agents connect to; None: what the run folder's `address` says."""
    serve: str | None
    """Where the controller serves; None: somebody else does."""
    alone: bool = False
    """Other nodes have no token to speak with: only the controller's own node is watched."""


def meeting(job: str, environ: Mapping[str, str]) -> Meeting:
    """Raises ConfigError for a transport that cannot join processes."""
    url = environ.get("FAILSLOW_TRANSPORT", "")
    if url.startswith("memory:"):
        raise ConfigError(
            f"FAILSLOW_TRANSPORT = {url!r} stays inside one process; write tcpstore://HOST:PORT "
            "or redis://HOST:PORT, or unset it"
        )
    if url:
        return Meeting(url=url, serve=url if url.startswith("tcpstore:") else None)
    if is_single_node(environ):
        return Meeting(url=None, serve=_LOOPBACK)
    if not environ.get("FAILSLOW_TOKEN"):
        return Meeting(url=None, serve=_LOOPBACK, alone=True)
    host = environ.get("MASTER_ADDR", "")
    shown = f"[{host}]" if ":" in host else host
    url = f"tcpstore://{shown}:{derived_port(job, environ)}"
    return Meeting(url=url, serve=url)


def derived_port(job: str, environ: Mapping[str, str]) -> int:
    """A port all nodes of a job agree on without talking, below the range systems hand out.

    10,000 + CRC-32 of "JOB:MASTER_ADDR:MASTER_PORT" modulo 22,000.
    """
    names = f"{job}:{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    return _FIRST_PORT + zlib.crc32(names.encode()) % _PORTS


def is_single_node(environ: Mapping[str, str]) -> bool:
    """Whether all workers run here, by torchrun's variables, else by a MASTER_ADDR of loopback."""
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "")
    if environ.get("GROUP_WORLD_SIZE"):
        return environ["GROUP_WORLD_SIZE"] == "1"
    if local:
        return local == world
    return world == "1" or is_loopback(environ.get("MASTER_ADDR", "127.0.0.1"))


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback, without asking a resolver."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def node_name(environ: Mapping[str, str]) -> str:
    """FAILSLOW_NODE, else Slurm's name, else the host's with its network namespace if not init's.

    The latter tells apart the nodes of a test bed that share a machine. Hosts that nobody gave a
    name are told apart by the number of their kernel's start.
    """
    if given := given_name(environ):
        return given
    name = socket.gethostname()
    if name.partition(".")[0] in _NAMELESS and not is_single_node(environ):
        name = f"{name}-{_boot_id()[:8]}".rstrip("-")
    own, init = net_namespace("self"), net_namespace("1")
    return f"{name}-{own}" if own and init and own != init else name


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def given_name(environ: Mapping[str, str]) -> str:
    """The node's name as somebody gave it; "" nobody did."""
    return environ.get("FAILSLOW_NODE") or environ.get("SLURMD_NODENAME") or ""


def net_namespace(pid: str) -> str:
    """Number of the network namespace of `pid`; "" when that may not be known."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net").strip("net:[]")
    except OSError:
        return ""
