"""The machines of a simulated job: nodes, devices, links.

In: settings. Out: which node and leaf a rank is on, and how fast devices and links are. Nodes are
numbered through all groups; so are leaves of `nodes_per_leaf` nodes under one spine.

    Cluster(groups=(NodeGroup(nodes=16),)).ranks      # 128
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from failslow.config import StageConfig

__all__ = ["Cluster", "NodeGroup"]

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"


class NodeGroup(StageConfig):
    """Nodes with devices of one kind."""

    nodes: int = Field(2, ge=1)
    device: str = "H800"
    tflops: float = Field(990.0, gt=0)
    """Peak of a device in the precision of the matrix products."""


class Cluster(StageConfig):
    """Groups of nodes on one spine-leaf network. Defaults: H800 nodes with 400 Gbit/s a device."""

    groups: tuple[NodeGroup, ...] = Field((NodeGroup(),), min_length=1)
    devices_per_node: int = Field(8, ge=1)
    node_gbyte_per_s: float = Field(200.0, gt=0)
    """Between devices of a node, each (NVLink; 32 for PCIe)."""
    node_latency_us: float = Field(3.0, ge=0)
    network_gbyte_per_s: float = Field(50.0, gt=0)
    """Of a device's own share of the network cards, either way."""
    network_latency_us: float = Field(8.0, ge=0)
    nodes_per_leaf: int = Field(16, ge=1)
    oversubscription: float = Field(1.0, ge=1.0)
    """Bandwidth of a leaf's nodes over that of its uplinks."""

    @property
    def nodes(self) -> int:
        """All nodes."""
        return sum(group.nodes for group in self.groups)

    @property
    def ranks(self) -> int:
        """All devices."""
        return self.nodes * self.devices_per_node

    @property
    def leaves(self) -> int:
        """Switches the nodes hang on."""
        return -(-self.nodes // self.nodes_per_leaf)

    def node_of(self, rank: Ints | int) -> Ints:
        """The node of a rank."""
        return np.asarray(rank, dtype=np.int64) // self.devices_per_node

    def leaf_of(self, node: Ints | int) -> Ints:
        """The leaf switch of a node."""
        return np.asarray(node, dtype=np.int64) // self.nodes_per_leaf

    def tflops_of_ranks(self) -> Floats:
        """(ranks,): peak of each device."""
        each = [np.full(g.nodes * self.devices_per_node, g.tflops) for g in self.groups]
        return np.concatenate(each)
