"""What goes wrong in a simulated job, when, and what it slows.

In: settings. Out: at any time the factor a fault acts with, and its effect on devices and links.
Factors say how many times slower: 1.4 takes 1.4 times as long, 4 leaves a quarter of a bandwidth.

    Congest(node=3, from_s=600, for_s=1800, factor=4).level(700.0)        # 4.0
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from failslow.config import StageConfig
from failslow.simulate.cluster import Cluster

__all__ = ["AnyFault", "Congest", "CpuContention", "Effects", "Flap", "SlowDevice", "Thermal"]

_RAMP_STEPS = 20


@dataclass(slots=True)
class Effects:
    """How many times slower everything is at one time."""

    device: NDArray[np.float64]
    """(ranks,)"""
    node: NDArray[np.float64]
    """(nodes,): traffic in and out of each."""
    leaf: NDArray[np.float64]
    """(leaves,): traffic through the uplinks of each."""
    link: dict[tuple[int, int], float] = field(default_factory=dict)
    """Traffic from one node to another."""

    @classmethod
    def none(cls, cluster: Cluster) -> Effects:
        """Nothing is slow."""
        return cls(np.ones(cluster.ranks), np.ones(cluster.nodes), np.ones(cluster.leaves))

    def slow_node(self, node: int, level: float) -> None:
        """All devices of a node."""
        each = len(self.device) // len(self.node)
        self.device[node * each : (node + 1) * each] *= level


class _Fault(StageConfig):
    """Acts from `from_s` on, for `for_s` seconds of the job, or to its end."""

    from_s: float = Field(ge=0)
    for_s: float | None = Field(None, gt=0)
    factor: float = Field(gt=1.0)

    cause: ClassVar[str]
    what: ClassVar[Literal["compute", "communication"]]

    def level(self, time_s: float) -> float:
        """The factor at a time of the job; 1 before and after."""
        return self.factor if self._acts(time_s) else 1.0

    def _acts(self, time_s: float) -> bool:
        return self.from_s <= time_s and (self.for_s is None or time_s < self.from_s + self.for_s)

    @property
    @abstractmethod
    def where(self) -> str:
        """What it acts on, in words."""

    @abstractmethod
    def apply(self, level: float, effects: Effects) -> None:
        """Add the fault, at a level, to the effects."""

    @abstractmethod
    def misplaced(self, cluster: Cluster) -> str:
        """Why it cannot be in this cluster, or ""."""


class SlowDevice(_Fault):
    """A device computes slower."""

    kind: Literal["slow_device"] = "slow_device"
    rank: int = Field(ge=0)
    cause = "GPU degradation"
    what = "compute"

    @property
    def where(self) -> str:
        return f"rank {self.rank}"

    def apply(self, level: float, effects: Effects) -> None:
        effects.device[self.rank] *= level

    def misplaced(self, cluster: Cluster) -> str:
        return _too_large("rank", self.rank, cluster.ranks, "devices")


class Thermal(_Fault):
    """A node's devices heat up: slower and slower over `ramp_s`, then at the full factor; with
    `rank` only that device."""

    kind: Literal["thermal"] = "thermal"
    node: int | None = Field(None, ge=0)
    rank: int | None = Field(None, ge=0)
    ramp_s: float = Field(300.0, ge=0)
    cause = "thermal throttling"
    what = "compute"

    @model_validator(mode="after")
    def _one_target(self) -> Thermal:
        if (self.node is None) == (self.rank is None):
            raise ValueError("thermal needs either node or rank")
        return self

    @property
    def where(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank}"

    def level(self, time_s: float) -> float:
        if not self._acts(time_s):
            return 1.0
        share = 1.0 if not self.ramp_s else min(1.0, (time_s - self.from_s) / self.ramp_s)
        # in steps, so that a job has few different states
        return 1.0 + (self.factor - 1.0) * round(share * _RAMP_STEPS) / _RAMP_STEPS

    def apply(self, level: float, effects: Effects) -> None:
        if self.rank is not None:
            effects.device[self.rank] *= level
        elif self.node is not None:
            effects.slow_node(self.node, level)

    def misplaced(self, cluster: Cluster) -> str:
        if self.rank is not None:
            return _too_large("rank", self.rank, cluster.ranks, "devices")
        return _too_large("node", self.node or 0, cluster.nodes, "nodes")


class CpuContention(_Fault):
    """Neighbours take a node's CPUs: all its devices wait for their launches."""

    kind: Literal["cpu_contention"] = "cpu_contention"
    node: int = Field(ge=0)
    cause = "CPU contention"
    what = "compute"

    @property
    def where(self) -> str:
        return f"node {self.node}"

    def apply(self, level: float, effects: Effects) -> None:
        effects.slow_node(self.node, level)

    def misplaced(self, cluster: Cluster) -> str:
        return _too_large("node", self.node, cluster.nodes, "nodes")


class _NetworkFault(_Fault):
    node: int | None = Field(None, ge=0)
    link: tuple[int, int] | None = None
    leaf: int | None = Field(None, ge=0)
    what = "communication"

    @model_validator(mode="after")
    def _one_target(self) -> _NetworkFault:
        if [self.node, self.link, self.leaf].count(None) != 2:
            raise ValueError("give one of node, link and leaf")
        return self

    @property
    def where(self) -> str:
        if self.link is not None:
            return f"link {self.link[0]} → {self.link[1]}"
        return f"node {self.node}" if self.leaf is None else f"leaf {self.leaf}"

    def apply(self, level: float, effects: Effects) -> None:
        if self.link is not None:
            effects.link[self.link] = effects.link.get(self.link, 1.0) * level
        elif self.node is not None:
            effects.node[self.node] *= level
        elif self.leaf is not None:
            effects.leaf[self.leaf] *= level

    def misplaced(self, cluster: Cluster) -> str:
        if self.leaf is not None:
            return _too_large("leaf", self.leaf, cluster.leaves, "leaves")
        named = self.link or (self.node or 0,)
        return _too_large("node", max(named), cluster.nodes, "nodes")


class Congest(_NetworkFault):
    """Traffic is slow: of a node, from one node to another, or through a leaf's uplinks."""

    kind: Literal["congest"] = "congest"
    cause = "network congestion"


class Flap(_NetworkFault):
    """A link that comes and goes: congested for `duty` of every period."""

    kind: Literal["flap"] = "flap"
    period_s: float = Field(60.0, gt=0)
    duty: float = Field(0.5, gt=0, le=1)
    cause = "flapping link"

    def level(self, time_s: float) -> float:
        within_s = (time_s - self.from_s) % self.period_s
        on = self._acts(time_s) and within_s < self.duty * self.period_s
        return self.factor if on else 1.0


AnyFault: TypeAlias = Annotated[
    SlowDevice | Thermal | CpuContention | Congest | Flap, Field(discriminator="kind")
]


def _too_large(name: str, value: int, limit: int, of: str) -> str:
    if value < limit:
        return ""
    return f"{name} ({value}) must be below the cluster's {limit} {of}"
