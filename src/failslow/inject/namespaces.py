"""Network namespaces and their interfaces: which one a name means, and shaping it with htb.

In: a namespace's name, `pid:4711`, an interface, an address. Out: a `Place`, and calls of `ip`
and `tc` inside it.

    >>> find_place("node0")                                              # doctest: +SKIP
    Place(namespace='/run/netns/node0', interface='eth0', address='10.77.0.1')
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from failslow.errors import InjectError
from failslow.inject.processes import ancestors

__all__ = [
    "Place",
    "command_in",
    "find_place",
    "is_host_network",
    "namespace_name",
    "namespace_path",
    "parse_rate_bits",
    "run_in",
]

_NAMED = Path("/run/netns")
_UNITS = {
    "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12,
    "bps": 8, "kbps": 8 * 10**3, "mbps": 8 * 10**6, "gbps": 8 * 10**9,
}  # fmt: skip
_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """An interface in a network namespace, or an address that is elsewhere."""

    namespace: str | None
    """Path of the namespace; None for the one this process is in."""
    interface: str | None
    """None: no interface here, `address` is on another machine."""
    address: str | None

    @property
    def name(self) -> str:
        """As a user would name it: "node0/eth0", "eth0" or "10.0.0.7"."""
        if self.interface is None:
            return str(self.address)
        if self.namespace is None:
            return self.interface
        return f"{namespace_name(self.namespace)}/{self.interface}"


def namespace_name(path: str) -> str:
    """What `namespace_path` made the path of.

    >>> namespace_name("/run/netns/node0"), namespace_name("/proc/4711/ns/net")
    ('node0', 'pid:4711')
    """
    parts = Path(path).parts
    if parts[1] == "proc":
        return f"pid:{parts[2]}"
    return parts[-1] if Path(path).parent == _NAMED else path


def parse_rate_bits(text: str) -> int:
    """Bits per second of "50mbit", "1gbit", or tc's "10mbps" (megabytes). Raises InjectError.

    >>> parse_rate_bits("50mbit"), parse_rate_bits("1.5 Gbit"), parse_rate_bits("1mbps")
    (50000000, 1500000000, 8000000)
    """
    match = _RATE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    bits = round(float(match[1]) * unit) if match and unit else 0
    if bits < 8_000:
        raise InjectError(
            f"{text!r} is no rate from 8kbit up; write it as 50mbit or 1gbit (units as in tc)"
        )
    return bits


def command_in(namespace: str | None, *words: str) -> list[str]:
    """The command line that runs `words` inside the namespace."""
    return list(words) if namespace is None else ["nsenter", f"--net={namespace}", "--", *words]


def run_in(namespace: str | None, *words: str) -> str:
    """Run `ip` or `tc` inside the namespace; its output. Raises InjectError with its first line."""
    command = command_in(namespace, *words)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise InjectError(
            f"{command[0]} is not installed; install iproute2 and util-linux"
        ) from None
    except subprocess.TimeoutExpired:
        raise InjectError(f"`{' '.join(words)}` does not answer") from None
    if done.returncode != 0:
        told = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        remedy = "; root (CAP_NET_ADMIN) may" if "not permitted" in told else ""
        raise InjectError(f"`{' '.join(words)}` failed: {told}{remedy}")
    return done.stdout


def _addresses(namespace: str | None) -> list[dict[str, Any]]:
    """The interfaces of a namespace with their addresses, as `ip -j address` lists them."""
    listed: list[dict[str, Any]] = json.loads(run_in(namespace, "ip", "-j", "address") or "[]")
    return [entry for entry in listed if entry.get("ifname")]


def find_place(text: str, *, towards: str | None = None) -> Place:
    """What a user means by `text`: a namespace, NAMESPACE/INTERFACE, an interface or an address.

    towards: an address; the interface that leads there is taken where several would do. An
    address that no interface here has is returned without one. Raises InjectError.
    """
    name, _, wanted = (text, "", "") if text.startswith("/") else text.partition("/")
    namespace = namespace_path(name)
    if namespace is None:
        name, wanted = "", text
    entries = _addresses(namespace)
    if namespace is None and (address := _as_address(wanted)) is not None:
        for entry in entries:
            if address in _of(entry):
                return Place(None, entry["ifname"], address)
        return Place(None, None, address)
    found = {entry["ifname"]: entry for entry in entries}
    if wanted:
        if wanted not in found:
            known = ", ".join([*_named(), *found]) if namespace is None else ", ".join(found)
            raise InjectError(f"no namespace, interface or address {text!r}; here are: {known}")
        chosen = wanted
    else:
        chosen = _leading(namespace, name, found, towards)
    return Place(namespace, chosen, next(iter(_of(found[chosen])), None))


def _leading(
    namespace: str | None, name: str, found: dict[str, dict[str, Any]], towards: str | None
) -> str:
    """The interface of a namespace that a bare name means."""
    if towards is not None:
        route = json.loads(run_in(namespace, "ip", "-j", "route", "get", towards))
        return str(route[0]["dev"])
    up = [i for i, entry in found.items() if i != "lo" and "UP" in entry.get("flags", ())]
    if len(up) != 1:
        what = f"several interfaces ({', '.join(up)})" if up else "no interface that is up"
        raise InjectError(f"namespace {name} has {what}; name one as {name}/eth0")
    return up[0]


def _of(entry: dict[str, Any]) -> list[str]:
    """The usable addresses of an interface, IPv4 first."""
    infos = [i for i in entry.get("addr_info", ()) if i.get("scope") != "link"]
    return [i["local"] for i in sorted(infos, key=lambda i: i["family"] != "inet")]


def _as_address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _named() -> list[str]:
    return sorted(path.name for path in _NAMED.iterdir()) if _NAMED.is_dir() else []


def namespace_path(name: str) -> str | None:
    """The path of the namespace "node0" (of `ip netns`), "pid:4711" or "/run/x/ns"; None: no such.

    Raises InjectError for a pid that has none to enter.
    """
    if name.startswith("pid:"):
        path = Path("/proc") / name[4:] / "ns" / "net"
        if not name[4:].isdigit() or not os.access(path, os.R_OK):
            raise InjectError(f"{name}: no such process, or not yours; `ps -e` lists them")
        return str(path)
    if name.startswith("/"):
        return name if Path(name).exists() else None
    return str(_NAMED / name) if name in _named() else None


def is_host_network(namespace: str | None) -> bool:
    """Whether this is the network of process 1: the machine's own, or a whole container's.

    Where the kernel does not show that one, the network of our topmost ancestor stands for it.
    """
    asked = _inode(namespace or "/proc/self/ns/net")
    line = [*reversed(ancestors(os.getpid())), os.getpid()]
    shown = (inode for pid in line if (inode := _inode(f"/proc/{pid}/ns/net")) is not None)
    return asked is None or asked == next(shown, asked)


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None
