"""What runs on a node that a scheduler gave: the probe's command.

In: a command line and variables for it. Out: its exit code. Standard library only; submitit and Ray
call it by name, so nothing of the campaign travels but these arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from failslow.probe.executors.leash import leashed

__all__ = ["NodeProbe", "run_node"]


class NodeProbe:
    """One command, started at once; `tell` reaches it at most once."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """environ: more variables. log: a file for what it prints. Raises OSError."""
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                leashed(command),
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to our group must not reach it twice
            )
        self._told = False

    def tell(self) -> None:
        """SIGTERM, the first time; a second one would cost its result."""
        if not self._told:
            self._told = True
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Until it has ended: its exit code."""
        return self._process.wait()


def run_node(command: Sequence[str], environ: Mapping[str, str], folder: str) -> int:
    """Run it to its end as a task of a Slurm step. For the main thread.

    folder: it prints to `node<RANK>.log` there.

    Slurm sends a signal to all processes of a step: a SIGTERM reaches the probe by itself, and must
    not end us, who wait for it.
    """
    probe: NodeProbe | None = None
    early = False

    def survive(_number: int, _frame: FrameType | None) -> None:
        nonlocal early
        early = early or probe is None

    # a handler, as a signal that is ignored would be so by the probe too
    signal.signal(signal.SIGTERM, survive)
    log = Path(folder) / f"node{os.environ.get('SLURM_NODEID', '0')}.log"
    probe = NodeProbe(command, environ, log)
    if early:
        probe.tell()
    return probe.wait()
