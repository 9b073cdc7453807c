"""Which signals tell a probe, or a campaign of them, to end.

In: a handler. Out: it is called for SIGTERM, SIGINT and SIGHUP until the block is left:

    with handled(stop):
        …
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["handled"]


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A SIGHUP that is ignored stays so: by nohup, this is to outlive its terminal."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
