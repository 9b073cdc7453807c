"""Flood a path: our own sender and sink take the bandwidth that training needs.

In: where from and where to. Out: TCP or UDP streams between them, until undone.

    Flood("/run/netns/node0", "/run/netns/node2", address="10.77.0.3", streams=4)
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar

from failslow.errors import InjectError
from failslow.inject.fault import Guarding, refuse_host_network
from failslow.inject.namespaces import namespace_name

__all__ = ["PROTOCOLS", "Flood"]

PROTOCOLS = ("tcp", "udp")
_DISCARD_PORT = "9"


@dataclass(frozen=True)
class Flood:
    """Send from `source` to `address` on as many `streams`, at `rate_bits` a second in all.

    source, sink: paths of network namespaces; None is the one this process is in. has_sink: whether
    `address` is in `sink`, so that a receiver can be started there; TCP needs one. rate_bits 0: as
    fast as the path takes.
    """

    kind: ClassVar[str] = "flood"
    source: str | None
    sink: str | None
    address: str
    has_sink: bool = True
    rate_bits: int = 0
    streams: int = 4
    protocol: str = "tcp"
    force: bool = False

    def check(self) -> None:
        """Raises InjectError for a value out of range, or the machine's own network."""
        if self.protocol not in PROTOCOLS:
            raise InjectError(f"protocol {self.protocol!r} is none of {', '.join(PROTOCOLS)}")
        if not 1 <= self.streams <= 64:
            raise InjectError(f"streams ({self.streams}) must be from 1 to 64")
        if self.rate_bits and not 8_000 <= self.rate_bits <= 10**13:
            raise InjectError(f"rate ({self.rate_bits} bit/s) must be from 8kbit to 10tbit")
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise InjectError(f"{self.address!r} is no address; write it as 10.77.0.3") from None
        if self.protocol == "tcp" and not self.has_sink:
            raise InjectError(
                f"no receiver can be started at {self.address}, which is on another machine; "
                "use --protocol udp, or name a namespace"
            )
        refuse_host_network(self.source, what=self._name(), force=self.force)

    def _name(self) -> str:
        return "the current namespace" if self.source is None else namespace_name(self.source)

    def targets(self) -> tuple[str, ...]:
        """The path."""
        return (f"{self._name()} to {self.address}",)

    def summary(self) -> str:
        """The path and the load."""
        rate = f"{self.rate_bits / 1e6:g} Mbit/s" if self.rate_bits else "all it takes"
        return f"{self.targets()[0]} with {rate} of {self.protocol.upper()}"

    def target_pid(self) -> int | None:
        """None: a path has no process."""
        return None

    def start(self, guard: Guarding) -> str:
        """Start the sink, then the sender. Raises InjectError."""
        port = _DISCARD_PORT
        if self.has_sink:
            port = guard.act("sink", self.address, self.protocol, namespace=self.sink)
        amount = f"{self.streams}x{self.rate_bits}"
        guard.act("send", self.address, port, self.protocol, amount, namespace=self.source)
        return f"{self.streams} {self.protocol.upper()} streams to port {port}"
