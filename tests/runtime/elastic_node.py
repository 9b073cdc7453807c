"""One node of an elastic job: `failslow run --restarts` around torchrun, training to its end.

In: RANK (here the node's number), MASTER_ADDR, MASTER_PORT, TESTBED_FOLDER, NODES ("2:3"), SPARE (a
node's number: it comes when the others train). Out: what torchrun and the training write. Started
on each node of a test bed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Become the launcher."""
    environ = dict(os.environ)
    node = int(environ.pop("RANK"))
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        environ.pop(name, None)
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    while environ.get("SPARE") == str(node) and not _trains(Path(environ["TESTBED_FOLDER"])):
        time.sleep(0.2)
    failslow = str(Path(sys.executable).with_name("failslow"))
    command = [
        *(failslow, "run", "--mode", "auto", "--restarts", "2", "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", environ["NODES"]),
        *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
        *("--rdzv-endpoint", f"{host}:{port}"),
        *("--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=3,join_timeout=600"),
        *("--local-addr", f"10.77.0.{node + 1}"),
        str(Path(__file__).with_name("elastic_train.py")),
    ]
    os.execve(failslow, command, environ)


def _trains(folder: Path) -> bool:
    return any(folder.glob("losses*.jsonl"))


if __name__ == "__main__":
    main()
