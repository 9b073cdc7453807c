"""capture: a live torch job -> one fixed-size record per collective in shared memory.

The training process runs `autoload`, `hook` and `ring` (standard library and torch only); the
node agent, another process, runs `reader`. They share one file per worker:

    /dev/shm/failslow-0-pretrain7-r3-p41822.ring
"""

from __future__ import annotations

from typing import Any

__all__ = ["status"]


def status() -> dict[str, Any]:
    """How this process is captured: mode, ring file, calls recorded, ops missed, and why.

    For `failslow doctor`; see `failslow.capture.hook.status`. Needs torch.
    """
    from failslow.capture import hook

    return hook.status()
