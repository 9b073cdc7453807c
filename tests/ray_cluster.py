"""A real Ray cluster on this machine, each node a raylet with a loopback address of its own.

In: how many nodes. Out: an address that drivers join.

    with ray_cluster(nodes=4) as address:
        ray.init(address=address)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["ray_cluster"]


@contextmanager
def ray_cluster(nodes: int, *, cpus: int = 4) -> Iterator[str]:
    """Its address. This process's environment is set for a driver, and what is set before counts.

    cpus: of each node.
    """
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        folder = Path("/tmp") / f"ray{os.getpid()}"  # a socket's path must be short
        folder.mkdir()
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray takes 127.0.0.1 for another machine's
        addresses = [f"127.0.0.{n + 2}" for n in range(nodes)]
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cpus,
                "node_ip_address": addresses[0],
                "include_dashboard": False,
            },
        )
        try:
            for address in addresses[1:]:
                cluster.add_node(num_cpus=cpus, node_ip_address=address)
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
