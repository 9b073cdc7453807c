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
import re
from dataclasses import dataclass
from pathlib import Path

from failslow.errors import InjectError
from failslow.inject.namespaces import run_in

__all__ = ["Shape", "apply_shape", "plan_shape", "remove_shape"]

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
    return Path(namespace or "/proc/self/ns/net").stat().st_ino


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

    A namespace or interface that is gone took it along. Raises InjectError.
    """
    try:
        same = _inode(shape.namespace) == shape.inode
    except OSError:
        return
    links = json.loads(run_in(shape.namespace, "ip", "-j", "link") or "[]") if same else []
    if shape.interface not in {link.get("ifname") for link in links} or not _root_is(shape):
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
