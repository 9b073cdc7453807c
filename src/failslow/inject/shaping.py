"""One rate limit on an interface's egress, beside whatever else is there: htb class + u32 filter.

In: an interface, a rate, perhaps a destination. Out: a `Shape`, the exact kernel objects, so that
they and nothing else can be taken away again.

    >>> plan_shape(None, "eth0", dst="10.77.0.3")                        # doctest: +SKIP
    Shape(namespace=None, inode=4026532301, interface='eth0', handle='fa15', minor='f000',
          preference=64000, own_root=True)

Where the interface has no queueing of its own, an htb root is put there whose unclassified traffic
passes at full speed; an htb root without filters gets one class more. Anything else is refused.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from failslow.errors import InjectError
from failslow.inject.namespaces import run_in

__all__ = ["Shape", "apply_shape", "keep_namespace", "plan_shape", "remove_shape"]

_OWN = "/proc/self/ns/net"
_HANDLE = "fa15"
_FIRST_MINOR, _FIRST_PREFERENCE, _SLOTS = 0xF000, 64_000, 100
"""Slot i is class F000+i and filter preference 64000+i; the last slot takes the whole egress, so
that a link's own limit, which has a lower preference, goes first."""


@dataclass(frozen=True)
class Shape:
    """The kernel objects of one limit."""

    namespace: str | None
    inode: int
    """Of the namespace: a name may come to mean another one."""
    interface: str
    handle: str
    """Of the htb root, hexadecimal."""
    minor: str
    """Of our class, hexadecimal."""
    preference: int
    """Of our filter."""
    own_root: bool
    """Whether the root is ours too."""


def _inode(namespace: str | None) -> int:
    return Path(namespace or _OWN).stat().st_ino


def keep_namespace(namespace: str | None) -> None:
    """Hold it open until this process ends: the one named by `pid:4711` outlives that process.

    Raises OSError where it is not there or not to be had.
    """
    os.open(namespace or _OWN, os.O_RDONLY | os.O_CLOEXEC)  # never closed: `_ways` finds it


def plan_shape(namespace: str | None, interface: str, *, dst: str | None) -> Shape:
    """Where a limit towards `dst` (None: everything) would go. Raises InjectError.

    Changes nothing. The caller holds the lock of all injections from here to `apply_shape`.
    """
    shown = run_in(namespace, "tc", "-j", "qdisc", "show", "dev", interface)
    roots = [q for q in json.loads(shown or "[]") if q.get("root")]
    kind, handle = (roots[0]["kind"], roots[0]["handle"]) if roots else ("noqueue", "0:")
    handle = handle.rstrip(":")
    if handle == "0":  # what the kernel puts there by itself, and puts back
        return Shape(
            namespace, _inode(namespace), interface, _HANDLE, *_slot(set(), dst), own_root=True
        )
    if kind != "htb":
        raise InjectError(
            f"{interface} already has a {kind} queueing discipline, which cannot be shared; "
            f"remove it first: tc qdisc del dev {interface} root"
        )
    used = _preferences(namespace, interface, handle)
    if foreign := [p for p in used if not 0 <= p - _FIRST_PREFERENCE < _SLOTS]:
        raise InjectError(
            f"{interface} already has filters (preference {foreign[0]}) that would go first; "
            f"remove them first: tc filter del dev {interface} parent {handle}:"
        )
    slot = _slot(used, dst)
    own = handle == _HANDLE
    return Shape(namespace, _inode(namespace), interface, handle, *slot, own_root=own)


def _preferences(namespace: str | None, interface: str, handle: str) -> set[int]:
    command = ["tc", "-j", "filter", "show", "dev", interface, "parent", f"{handle}:"]
    return {int(f["pref"]) for f in json.loads(run_in(namespace, *command) or "[]")}


def _slot(used: set[int], dst: str | None) -> tuple[str, int]:
    """A free (minor, preference)."""
    slots = range(_SLOTS - 1) if dst is not None else range(_SLOTS - 1, _SLOTS)
    for slot in slots:
        if _FIRST_PREFERENCE + slot not in used:
            return f"{_FIRST_MINOR + slot:x}", _FIRST_PREFERENCE + slot
    raise InjectError("no further limit fits on this interface; end one first")


def apply_shape(shape: Shape, *, rate_bits: int, dst: str | None) -> None:
    """Limit what leaves for `dst` (None: all) to `rate_bits` a second. Raises InjectError."""
    where = ["dev", shape.interface]
    root = f"{shape.handle}:"
    flow = f"{root}{shape.minor}"
    if shape.own_root and not _root_is(shape):
        run_in(shape.namespace, "tc", "qdisc", "add", *where, "root", "handle", root, "htb")
    rate = f"{rate_bits}bit"
    # a small burst bites at once; the quantum silences a warning about the default one
    limits = ["rate", rate, "ceil", rate, "burst", "16k", "cburst", "16k", "quantum", "60000"]
    run_in(shape.namespace, "tc", "class", "add", *where, "parent", root, "classid", flow, "htb",
           *limits)  # fmt: skip
    run_in(shape.namespace, "tc", "filter", "add", *where, "parent", root,
           "pref", str(shape.preference), *_match(dst), "flowid", flow)  # fmt: skip


def _match(dst: str | None) -> list[str]:
    if dst is None:
        return ["protocol", "all", "u32", "match", "u32", "0", "0"]
    version = ipaddress.ip_address(dst).version
    protocol, field, length = ("ip", "ip", 32) if version == 4 else ("ipv6", "ip6", 128)
    return ["protocol", protocol, "u32", "match", field, "dst", f"{dst}/{length}"]


def _root_is(shape: Shape) -> bool:
    shown = run_in(shape.namespace, "tc", "-j", "qdisc", "show", "dev", shape.interface)
    return any(
        q.get("root") and q["handle"].rstrip(":") == shape.handle for q in json.loads(shown or "[]")
    )


def remove_shape(shape: Shape) -> None:
    """Take the limit away, whatever of it is there; the root too if ours and no longer used.

    A namespace or interface that is gone took it along. Raises InjectError, also where it cannot be
    told whether the namespace is gone: whoever it was named by may have left it to others.
    """
    handle = _open(shape)
    if handle is None:
        return
    try:
        # our own needs no entering, and no right to enter
        own = _inode(None) == shape.inode
        here = replace(shape, namespace=None if own else f"/proc/{os.getpid()}/fd/{handle}")
        try:
            _remove(here)
        except InjectError:
            if _has_interface(here):  # else it went meanwhile: its other end was removed
                raise
    finally:
        os.close(handle)


def _open(shape: Shape) -> int | None:
    """A descriptor of the namespace; None where it is gone. Raises InjectError where that is not
    to be told."""
    device, hidden = Path(_OWN).stat().st_dev, ""
    for way in _ways(shape):
        try:
            status = Path(way).stat()
            if (status.st_dev, status.st_ino) != (device, shape.inode):
                continue
            handle = os.open(way, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            # process 1 is never in it: that would be the machine's own network
            hidden = hidden if way == "/proc/1/ns/net" else way
            continue
        except OSError:
            continue  # it ended meanwhile
        if os.fstat(handle).st_ino == shape.inode:
            return handle
        os.close(handle)
    if hidden:
        raise InjectError(
            f"the namespace net:[{shape.inode}] with the limit on {shape.interface} is not found, "
            f"and {hidden} may not be looked at; as root, `lsns -t net` shows whether it is there"
        )
    return None


def _ways(shape: Shape) -> Iterator[str]:
    """Paths that may lead to the namespace: as it was named, what we hold, mounts, processes."""
    yield shape.namespace or _OWN
    yield from (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if fields[3] == f"net:[{shape.inode}]":
                yield fields[4]
    yield from (f"/proc/{name}/ns/net" for name in os.listdir("/proc") if name.isdigit())


def _has_interface(shape: Shape) -> bool:
    links = json.loads(run_in(shape.namespace, "ip", "-j", "link") or "[]")
    return shape.interface in {link.get("ifname") for link in links}


def _remove(shape: Shape) -> None:
    if not _has_interface(shape) or not _root_is(shape):
        return
    where = ["dev", shape.interface]
    root = f"{shape.handle}:"
    if shape.preference in _preferences(shape.namespace, shape.interface, shape.handle):
        run_in(shape.namespace, "tc", "filter", "del", *where, "parent", root,
               "pref", str(shape.preference))  # fmt: skip
    if shape.minor in _minors(shape):
        run_in(shape.namespace, "tc", "class", "del", *where, "classid", root + shape.minor)
    if shape.own_root and not _minors(shape):
        run_in(shape.namespace, "tc", "qdisc", "del", *where, "root", "handle", root)


def _minors(shape: Shape) -> set[str]:
    # iproute2 lists classes as text even when asked for JSON
    shown = run_in(shape.namespace, "tc", "class", "show", "dev", shape.interface)
    return set(re.findall(rf"^class htb {shape.handle}:([0-9a-f]+)", shown, re.MULTILINE))
