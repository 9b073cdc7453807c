"""What a fault is to the guard that applies it, and what the guard is to a fault.

In: nothing. Out: two protocols and the check that all faults of the network share.

A fault is a frozen dataclass; its fields are all that travels to the guard:

    {"kind": "throttle", "pid": 4711, "to": 0.7, "threads": 1, "method": "auto"}
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

from failslow.errors import InjectError
from failslow.inject.namespaces import is_host_network
from failslow.inject.steps import Step

__all__ = ["Fault", "Guarding", "refuse_host_network"]


class Guarding(Protocol):
    """What a fault may use while it starts."""

    def promise(self, step: Step) -> None:
        """Write down what undoes the change that is made next."""

    def promised(self, step: Step) -> bool:
        """Whether another injection that is not yet undone has promised the same."""

    def lock(self) -> AbstractContextManager[None]:
        """No other injection starts or ends meanwhile."""

    def act(self, *arguments: str, namespace: str | None = None) -> str:
        """Start an actor (`failslow.inject.actors`); its first line. Raises InjectError."""


class Fault(Protocol):
    """One fault that can be applied and undone."""

    kind: ClassVar[str]

    def check(self) -> None:
        """Raises InjectError where the fault is refused; changes nothing."""

    def targets(self) -> tuple[str, ...]:
        """What no second fault of the kind may hold at the same time."""

    def summary(self) -> str:
        """The fault in a few words: "process 4711 to 0.70 of a core"."""

    def target_pid(self) -> int | None:
        """The process whose end ends the fault."""

    def start(self, guard: Guarding) -> str:
        """Apply it; how it was done. Raises InjectError; what was promised is then undone."""


def refuse_host_network(namespace: str | None, *, what: str, force: bool) -> None:
    """Raises InjectError where the fault would hit the machine's own network, unless forced."""
    if not force and is_host_network(namespace):
        raise InjectError(
            f"{what} is in this machine's own network, which others use too: name a network "
            "namespace (`ip netns`), or insist with --force"
        )
