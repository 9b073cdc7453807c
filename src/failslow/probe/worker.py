"""Runs a training script in a process that dies with whoever started it. Standard library only.

    python worker.py PARENT_PID train.py --steps 100

In: the pid of the probe, the script, its arguments. Out: the script, as if it had been started
itself. A probe that is killed leaves no training behind, which would wait for its peers for long.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; at once, if it already has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main(arguments: list[str]) -> None:
    """Become the script."""
    die_with(int(arguments[0]))
    sys.argv = arguments[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
