"""The entry point torch calls while it is imported (group `torch.backends`).

In: the environment. Out: with FAILSLOW=1 in a worker (RANK is set) the capture hook and, from a
node's first worker, the node's agent (`failslow.runtime.launch`); else nothing at all. An
exception here would make `import torch` fail: none leaves.

    FAILSLOW=1 torchrun --nproc-per-node 4 train.py
"""

from __future__ import annotations

import os
import sys

from failslow.errors import FailslowError

__all__ = ["autoload"]

_OFF = ("", "0", "false", "no", "off")


def autoload() -> None:
    """Install the hook if the environment asks for it; never raises, never says a thing twice."""
    try:
        environ = os.environ
        if environ.get("FAILSLOW", "").strip().lower() in _OFF or not environ.get("RANK"):
            return
        from failslow.capture import hook

        hook.install()

        from failslow.runtime.launch import launch

        keeper = launch()
        if keeper is not None:
            hook.now_and_then(keeper.look, keeper.EVERY_S)
    except Exception as error:
        # fail open: the job runs unwatched, and says why
        reason = error if isinstance(error, FailslowError) else repr(error)
        sys.stderr.write(f"failslow: this worker is not watched: {reason}\n")
