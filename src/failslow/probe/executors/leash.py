"""Run as a script: becomes a command that gets SIGTERM when whoever started it dies.

In: the pid of its parent and a command line. Out: the command, with the same pid.

    python -I -S leash.py 4711 failslow probe run …

A script, and no `preexec_fn`: the parent may have threads, and only the child may be changed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["leashed"]

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def leashed(command: Sequence[str]) -> list[str]:
    """`command`, for a child of this process that ends when it does; as it is outside Linux.

    The signal comes at the end of the *thread* that starts the child.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def _main(parent: int, command: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)  # it died before we were bound to it
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
