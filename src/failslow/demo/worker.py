"""Runs a training script in a process that dies with whoever started it.

    python worker.py PARENT_PID 127.0.0.1:41234 train.py --steps 100

In: the pid of whoever starts it, where to serve the store at which the workers meet ("": nowhere),
the script, its arguments. Out: the script, as if it had been started itself. A demo or a probe that
is killed leaves no training behind, which would wait for its peers for long.

torch's own store listens on all interfaces, whatever MASTER_ADDR says; the one served here on its
address alone, and the script takes it for that of a launcher.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LOOPBACK", "STORE_IS_SERVED", "training_command"]

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Nothing of training on one node is for others to reach."""
STORE_IS_SERVED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""As torchrun tells its workers: the store is there, and none of them is to listen."""
_PR_SET_PDEATHSIG = 1


def training_command(
    training: Sequence[str], *, serves: str = "", python: str = sys.executable
) -> list[str]:
    """training: a script and its arguments. serves: HOST:PORT, of rank 0 on one node."""
    return [python, __file__, str(os.getpid()), serves, *training]


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; at once, if it already has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main(arguments: list[str]) -> None:
    """Become the script."""
    parent, address, *sys.argv = arguments
    die_with(int(parent))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    store: object = None
    if address:
        from failslow.runtime.transport.tcpstore import serve

        store = serve(f"tcpstore://{address}")
    runpy.run_path(sys.argv[0], run_name="__main__")
    del store  # served as long as the script ran


if __name__ == "__main__":
    main(sys.argv[1:])
