"""What a training loop may tell of itself: where an iteration ends, and how much work it was.

In: the loop's own count and tokens. Out: a step mark in the worker's ring, which outranks what
torch's optimizer hook and the stream of collectives tell:

    for batch in loader:
        train(batch)
        failslow.step(work=batch.numel())
"""

from __future__ import annotations

import math
import sys
from typing import SupportsFloat

__all__ = ["step"]

_HOOK = "failslow.capture.hook"
_MOST_WORK = 1 << 62


class _Count:
    """Iterations of this process."""

    next = 0


def step(index: int | None = None, *, work: SupportsFloat | None = None) -> None:
    """An iteration has ended; call it once an iteration, on every worker, after `optimizer.step()`.

    index: the trainer's own; left out, the one after the last, from 0. work: tokens or samples of
    the iteration, the global batch's or this worker's, always the same kind: a job that changes
    them is not taken for a slow one. A plain number: a device's tensor would be waited for. A loop
    with a `Coordinator` sets `share.work` instead.

    Nothing happens where the process is not watched. Nothing raises: what is no positive number
    counts as not told.
    """
    if not isinstance(index, int):
        index = _Count.next
    _Count.next = index + 1
    # not imported for it: where the hook is not loaded, nobody watches
    hook = sys.modules.get(_HOOK)
    if hook is not None:
        hook.mark_step(index, whole(work))


def whole(work: SupportsFloat | None) -> int:
    """`work` as a step mark holds it: a whole number, 0 where it is not told.

    >>> whole(4096), whole(0.2), whole(None), whole(float("nan")), whole(-3)
    (4096, 1, 0, 0, 0)
    """
    try:
        value = 0.0 if work is None else float(work)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return 0
    if not math.isfinite(value) or value <= 0.0:
        return 0
    return min(_MOST_WORK, max(1, round(value)))
