"""Watches a worker that got no RANK before torch was imported: once it joins a process group.

In: torch's note of the process's default group, as `srun python`, mpirun and `mp.spawn` scripts
make it. Out: the hook and, from one worker a node, the agent, with rank and number of workers as
the group has them. Nothing of failslow's heavier parts is imported before that.

    {"RANK": "3", "WORLD_SIZE": "8", "FAILSLOW_JOB": "slurm-4711.0", …}     what `watch` is told
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from failslow.capture.autoload import is_wanted, refuse, watch

__all__ = ["watch_once_joined", "worker_environment"]

_PLACE = "_update_default_pg"
"""Of torch.distributed.distributed_c10d: what every way to a default group goes through."""
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_MARK = "FAILSLOW_LAUNCHED"


def watch_once_joined() -> None:
    """Have this process watched when it joins its first process group; until then it costs
    nothing."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    original = getattr(c10d, _PLACE, None)
    if original is None:  # a torch without torch.distributed, or one that has it elsewhere
        return
    joined = False

    def update(group: Any) -> None:
        nonlocal joined
        original(group)
        if joined or group is None:
            return
        joined = True
        if getattr(c10d, _PLACE) is update:  # else somebody has put theirs over it
            setattr(c10d, _PLACE, original)
        try:
            _joined(group)
        except Exception as error:
            refuse(error)

    setattr(c10d, _PLACE, update)


def _joined(group: Any) -> None:
    from failslow.capture import hook

    if not is_wanted() or hook.status()["mode"] != "off":
        return
    environ = worker_environment(os.environ, group.rank(), group.size())
    watch(environ, joined=True)
    if _MARK in environ:
        os.environ[_MARK] = environ[_MARK]


def worker_environment(environ: Mapping[str, str], rank: int, world_size: int) -> dict[str, str]:
    """The environment as torchrun would have it, as far as it can be known.

    A launcher's numbers count only where they are the group's: a task of it may have started the
    workers itself.
    """
    known = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    for its_rank, its_size, its_local in _LAUNCHERS:
        told = (environ.get(its_rank), environ.get(its_size))
        if told == (known["RANK"], known["WORLD_SIZE"]) and environ.get(its_local):
            known["LOCAL_RANK"] = environ[its_local]
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if not environ.get("FAILSLOW_JOB") and run in ("", "none") and not environ.get("MASTER_PORT"):
        # nothing that all workers agree on and no other job has, but who started them
        known["FAILSLOW_JOB"] = (
            f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
            if environ.get("SLURM_JOB_ID")
            else f"local-{os.getppid()}"
        )
    return {**environ, **known}
