"""Where this node is in a probe, and what the probe is called, by options and the environment.

In: what `failslow probe run` was given, and the variables of a Slurm step or a launcher. Out: how
many nodes, a `Place`, a name; all nodes of a probe come to the same:

    place_of(None, None, None, {"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2",
                                "SLURM_STEP_NODELIST": "gpu[017-020]", "SLURM_JOB_ID": "41822"})
    # (4, Place(node_rank=2, host="gpu017", port=21822))
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping

from failslow.errors import ConfigError
from failslow.probe.job import Place
from failslow.runtime.slurm import expand

__all__ = ["made_up_name", "place_of"]


def place_of(
    nodes: int | None, node_rank: int | None, rendezvous: str | None, environ: Mapping[str, str]
) -> tuple[int, Place]:
    """How many nodes, and where this one is among them."""
    count = nodes or _number(environ, "SLURM_STEP_NUM_NODES", "GROUP_WORLD_SIZE") or 1
    if count == 1:
        if node_rank:
            raise ConfigError(f"--node-rank {node_rank} of one node; give --nodes as well")
        return 1, Place()
    rank = node_rank
    if rank is None:
        rank = _number(environ, "SLURM_NODEID", "GROUP_RANK")
    if rank is None or rank >= count:
        raise ConfigError(
            f"--node-rank ({'not given' if rank is None else rank}) must be from 0 to "
            f"{count - 1} on {count} nodes"
        )
    host, port = _meeting(rendezvous, environ)
    return count, Place(node_rank=rank, host=host, port=port)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((int(v) for n in names if (v := environ.get(n, "")).isdecimal()), None)


def _meeting(rendezvous: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """Where the workers of all nodes meet."""
    if rendezvous is None and environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        rendezvous = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    if rendezvous is None and environ.get("SLURM_STEP_NODELIST"):
        number = _number(environ, "SLURM_JOB_ID") or 0
        host = expand(environ["SLURM_STEP_NODELIST"])[0]
        rendezvous = f"{host}:{20_000 + number % 10_000}"
    if rendezvous is None:
        raise ConfigError(
            "several nodes need a place to meet; give --rendezvous HOST:PORT, an address of node 0"
        )
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--rendezvous {rendezvous!r} is no HOST:PORT, as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def made_up_name(place: Place, environ: Mapping[str, str]) -> str:
    """A name: all nodes come to the same one."""
    if place.port == 0:
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if environ.get("SLURM_JOB_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', '0')}"
    return f"at-{zlib.crc32(f'{place.host}:{place.port}'.encode()):08x}"
