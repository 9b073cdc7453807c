"""The kernel's own measurements of TCP connections, without a tool: sock_diag over netlink.

In: nothing; it sees the network namespace of the caller. Out: the established connections, each
with round trip, retransmissions, bytes and delivery rate, as `ss -ti` shows them:

    Connection(inode=81231, local="10.77.0.1", remote="10.77.0.2", rtt_s=0.00031, …)

linux/inet_diag.h and linux/tcp.h define the layout; fields a kernel does not have yet are 0.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Container, Iterator
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
_INODE = struct.Struct("=I")
_QUEUED_AT, _INODE_AT = 60, 68
_LIMIT_S = 0.2
# of struct tcp_info: last data sent at 44, received 52, rtt 68, total_retrans 100, bytes_acked 120,
# bytes_received 128, min_rtt 148, delivery_rate 160, busy_time 168
_TCP_INFO = struct.Struct("=44xI4xI12xI28xI16xQQ12xI8xQQ")


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


def connections(inodes: Container[int] | None = None) -> Iterator[Connection]:
    """The established TCP connections of this network namespace, or those with such inodes.

    Raises OSError.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.settimeout(_LIMIT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = struct.pack(
                "=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED
            )
            size_bytes = _HEADER.size + len(wanted)
            link.send(_HEADER.pack(size_bytes, _BY_FAMILY, _REQUEST_DUMP, family, 0) + wanted)
            yield from _answer(link, family, inodes)


def _answer(link: socket.socket, asked: int, inodes: Container[int] | None) -> Iterator[Connection]:
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
            if kind == _BY_FAMILY:
                inode = _INODE.unpack_from(body, _INODE_AT)[0]
                if inodes is None or inode in inodes:
                    found = _connection(body, inode)
                    if found is not None:
                        yield found


def _connection(body: bytes, inode: int) -> Connection | None:
    family = body[0]
    _, _, source, target = _ADDRESSES.unpack_from(body, 4)
    (cookie,) = struct.unpack_from("=Q", body, 44)
    (queued,) = _INODE.unpack_from(body, _QUEUED_AT)
    info = _attribute(body, _INFO)
    if info is None:
        return None
    if len(info) < _TCP_INFO.size:
        info += bytes(_TCP_INFO.size - len(info))
    (
        since_sent_ms, since_received_ms, rtt_us, retransmits, acked, received, min_rtt_us,
        delivery, busy_us,
    ) = _TCP_INFO.unpack_from(info)  # fmt: skip
    return Connection(
        inode=inode,
        cookie=cookie,
        local=_address(family, source),
        remote=_address(family, target),
        rtt_s=rtt_us / 1e6,
        min_rtt_s=min_rtt_us / 1e6,
        retransmits=retransmits,
        acked_bytes=acked,
        received_bytes=received,
        busy_s=busy_us / 1e6,
        delivery_bytes_per_s=float(delivery),
        idle_s=min(since_sent_ms, since_received_ms) / 1e3,
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
