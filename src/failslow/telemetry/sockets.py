"""The kernel's own measurements of TCP connections, without a tool: sock_diag over netlink.

In: nothing; it sees the network namespace of the caller. Out: the established connections, each
with round trip, retransmissions, bytes and delivery rate, as `ss -ti` shows them:

    Connection(inode=81231, local="10.77.0.1", remote="10.77.0.2", rtt_s=0.00031, …)

linux/inet_diag.h and linux/tcp.h define the layout; fields a kernel does not have yet are 0.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Connection", "connections"]

_SOCK_DIAG = 4
_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_REQUEST_DUMP = 0x301
_ESTABLISHED = 1 << 1
_INFO = 2
_HEADER = struct.Struct("=IHHII")
_MESSAGE_BYTES = 72
_ADDRESSES = struct.Struct(">HH16s16s")
_QUEUES = struct.Struct("=IIIII")  # expires, receive queue, send queue, uid, inode
_LIMIT_S = 0.2
# offsets in struct tcp_info
_SINCE_SENT_MS, _SINCE_RECEIVED_MS, _RTT_US, _RETRANSMITS = 44, 52, 68, 100
_ACKED, _RECEIVED, _MIN_RTT_US, _DELIVERY, _BUSY_US = 120, 128, 148, 160, 168


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One established TCP connection, seen from this side."""

    inode: int
    """By which /proc/PID/fd names it."""
    cookie: int
    """Unlike the inode, never given to another one."""
    local: str
    remote: str
    """Addresses; an IPv4 one in IPv6 form is plain IPv4 here."""
    rtt_s: float
    """Smoothed round trip of what was sent, queueing at this host included..."""
    min_rtt_s: float
    """...and the least of the last minutes."""
    retransmits: int
    acked_bytes: int
    """Sent and received by the other side; and what came from there:"""
    received_bytes: int
    busy_s: float
    """So long something was under way to the other side."""
    delivery_bytes_per_s: float
    """How fast the last data sent arrived."""
    idle_s: float
    """Since data were last sent or received."""
    queued_bytes: int
    """Sent by the process and not acknowledged."""


def connections() -> Iterator[Connection]:
    """Every established TCP connection of this network namespace. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.settimeout(_LIMIT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = struct.pack(
                "=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED
            )
            size_bytes = _HEADER.size + len(wanted)
            link.send(_HEADER.pack(size_bytes, _BY_FAMILY, _REQUEST_DUMP, family, 0) + wanted)
            yield from _answer(link, family)


def _answer(link: socket.socket, asked: int) -> Iterator[Connection]:
    while True:
        data = link.recv(1 << 17)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
            body = data[at + _HEADER.size : at + length]
            at += (length + 3) & ~3
            if sequence != asked:
                continue
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                if number:
                    raise OSError(number, "sock_diag")
                return
            if kind == _BY_FAMILY and (found := _connection(body)) is not None:
                yield found


def _connection(body: bytes) -> Connection | None:
    family = body[0]
    _, _, source, target = _ADDRESSES.unpack_from(body, 4)
    (cookie,) = struct.unpack_from("=Q", body, 44)
    _, _, queued, _, inode = _QUEUES.unpack_from(body, 52)
    info = _attribute(body, _INFO)
    if info is None:
        return None

    def number(offset: int, form: str) -> int:
        whole = offset + struct.calcsize(form) <= len(info)
        return int(struct.unpack_from(form, info, offset)[0]) if whole else 0

    return Connection(
        inode=inode,
        cookie=cookie,
        local=_address(family, source),
        remote=_address(family, target),
        rtt_s=number(_RTT_US, "=I") / 1e6,
        min_rtt_s=number(_MIN_RTT_US, "=I") / 1e6,
        retransmits=number(_RETRANSMITS, "=I"),
        acked_bytes=number(_ACKED, "=Q"),
        received_bytes=number(_RECEIVED, "=Q"),
        busy_s=number(_BUSY_US, "=Q") / 1e6,
        delivery_bytes_per_s=float(number(_DELIVERY, "=Q")),
        idle_s=min(number(_SINCE_SENT_MS, "=I"), number(_SINCE_RECEIVED_MS, "=I")) / 1e3,
        queued_bytes=queued,
    )


def _attribute(body: bytes, wanted: int) -> bytes | None:
    at = _MESSAGE_BYTES
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if length < 4:
            return None
        if kind == wanted:
            return body[at + 4 : at + length]
        at += (length + 3) & ~3
    return None


def _address(family: int, packed: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, packed[:4])
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)
