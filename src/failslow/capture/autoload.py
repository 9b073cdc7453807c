"""The entry point torch calls while it is imported (group `torch.backends`).

In: the environment. Out: with FAILSLOW=1 in a worker (RANK is set) the capture hook and, from a
node's first worker, the node's agent (`failslow.runtime.launch`). Without a RANK the same once the
process joins a process group (`capture.joining`), as under srun and mp.spawn; plain python gets
nothing. An exception here would make `import torch` fail: none leaves.

    FAILSLOW=1 torchrun --nproc-per-node 4 train.py
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from failslow.errors import FailslowError
from failslow.saying import say

__all__ = ["autoload", "is_wanted", "refuse", "watch"]

_OFF = ("", "0", "false", "no", "off")


def autoload() -> None:
    """Install the hook if the environment asks for it; never raises, never says a thing twice."""
    try:
        if not is_wanted():
            return
        if os.environ.get("RANK"):
            watch(os.environ)
            return
        from failslow.capture.joining import watch_once_joined

        watch_once_joined()
    except Exception as error:
        refuse(error)


def is_wanted() -> bool:
    """Whether FAILSLOW is on."""
    return os.environ.get("FAILSLOW", "").strip().lower() not in _OFF


def watch(environ: MutableMapping[str, str], *, joined: bool = False) -> None:
    """Watch this worker, whose job and rank `environ` tells; joined: as in `launch`."""
    from failslow.capture import hook

    hook.install(environ=environ)

    from failslow.runtime.launch import launch

    keeper = launch(environ, joined=joined)
    if keeper is not None:
        hook.now_and_then(keeper.look, keeper.EVERY_S)


def refuse(error: Exception) -> None:
    """Fail open: the job runs unwatched, and says why."""
    reason = error if isinstance(error, FailslowError) else repr(error)
    say(f"this worker is not watched: {reason}")
