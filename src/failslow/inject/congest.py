"""Congest a link: limit what leaves an interface, as a whole or towards one address.

In: an interface of a network namespace and a rate. Out: an htb class with that rate, until undone.

    Congest(namespace="/run/netns/node0", interface="eth0", rate_bits=50_000_000, dst="10.77.0.3")
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar

from failslow.errors import InjectError
from failslow.inject.fault import Guarding, refuse_host_network
from failslow.inject.namespaces import Place
from failslow.inject.shaping import apply_shape, keep_namespace, plan_shape
from failslow.inject.steps import RemoveShape

__all__ = ["Congest"]


@dataclass(frozen=True)
class Congest:
    """Limit the egress of `interface` to `rate_bits` a second.

    namespace: the path of a network namespace; None is the one this process is in. dst: only what
    goes to this address.
    """

    kind: ClassVar[str] = "link"
    namespace: str | None
    interface: str
    rate_bits: int
    dst: str | None = None
    force: bool = False

    def check(self) -> None:
        """Raises InjectError for a value out of range, or the machine's own network."""
        if not 8_000 <= self.rate_bits <= 10**13:
            raise InjectError(f"rate ({self.rate_bits} bit/s) must be from 8kbit to 10tbit")
        if self.dst is not None:
            try:
                ipaddress.ip_address(self.dst)
            except ValueError:
                raise InjectError(f"{self.dst!r} is no address; write it as 10.77.0.3") from None
        refuse_host_network(self.namespace, what=self._name(), force=self.force)

    def _name(self) -> str:
        return Place(self.namespace, self.interface, None).name

    def targets(self) -> tuple[str, ...]:
        """The interface and the destination."""
        return (f"{self._name()} to {self.dst or 'everywhere'}",)

    def summary(self) -> str:
        """The link and its rate."""
        return f"{self.targets()[0]} at {self.rate_bits / 1e6:g} Mbit/s"

    def target_pid(self) -> int | None:
        """None: a link has no process."""
        return None

    def start(self, guard: Guarding) -> str:
        """Put the limit there. Raises InjectError."""
        keep_namespace(self.namespace)
        with guard.lock():
            shape = plan_shape(self.namespace, self.interface, dst=self.dst)
            guard.promise(RemoveShape(shape))
            apply_shape(shape, rate_bits=self.rate_bits, dst=self.dst)
        return f"htb class {shape.handle}:{shape.minor} on {self._name()}"
