"""What a check is.

Check("autoload", "fail", "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch loads no plugin …",
      remedy="unset TORCH_DEVICE_BACKEND_AUTOLOAD")
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["OFF", "Check", "Status", "nodes_of", "read_text"]

Status = Literal["pass", "warn", "fail", "info"]

OFF = ("0", "false", "no", "off")
"""What switches a variable off, besides nothing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question doctor asks, and its answer."""

    name: str
    status: Status
    """"info" is worth knowing and never wrong."""
    found: str
    remedy: str = ""
    """What to do, for "warn" and "fail"."""


def nodes_of(environ: Mapping[str, str]) -> int | None:
    """Nodes of the job this environment belongs to; None when it belongs to none."""
    for name in ("GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if world.isdecimal() and local.isdecimal() and int(local):
        return math.ceil(int(world) / int(local))
    return None


def read_text(path: str) -> str:
    """The file without surrounding blanks; "" when it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
