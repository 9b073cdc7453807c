"""A small real job that `failslow doctor` runs to see whether records flow.

In: RANK and WORLD_SIZE, FAILSLOW as a user would set it, and the path of a rendezvous file. Out:
one JSON object a line on stdout as each stage is reached, the last with what capture says of
itself; then it waits for stdin to end, so that its ring can be read meanwhile:

    {"stage": "torch", "version": "2.13.0", "mode": "dispatcher"}
    {"stage": "group"}
    {"stage": "trained", "iterations": 40, "status": {"mode": "dispatcher", "records": 91, …}}

It trains with DistributedDataParallel because its C++ reducer is what the weaker mode of capture
does not see.
"""

from __future__ import annotations

import json
import os
import sys

__all__ = ["ITERATIONS", "main"]

ITERATIONS = 40
"""Enough for an agent to tell iterations apart, which takes a dozen."""


def main(rendezvous: str) -> None:
    """Train, report, wait for the end of stdin; ends the process."""
    import torch  # the autoload entry point runs in here
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from failslow import capture
    from failslow.capture import hook

    _say(stage="torch", version=torch.__version__, mode=capture.status()["mode"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    _say(stage="group")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    _say(stage="trained", iterations=ITERATIONS, status=capture.status())
    sys.stdin.read()
    hook.uninstall()
    # gloo may abort an ordinary exit, and doctor would take that for a fault of the job
    os._exit(0)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
