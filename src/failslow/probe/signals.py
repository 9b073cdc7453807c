"""Which signals tell a probe, or a campaign of them, to end, and when they mean it urgently.

In: a handler. Out: it is called for SIGTERM, SIGINT and SIGHUP until the block is left:

    with Stop.on_signals() as stop:
        …
        stop.count      # 0: go on · 1: end · 2 and more: end at once
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stop", "handled"]


class Stop:
    """Whether, and how urgently, something is to end."""

    def __init__(self) -> None:
        self.count = 0
        self.number: int | None = None
        """The last signal."""
        self._asked = 0

    def __call__(self, number: int, _frame: object = None) -> None:
        """A signal came. A terminal that goes sends SIGHUP, maybe more than once: that is no hurry,
        nor is the first SIGTERM after it."""
        if number == signal.SIGHUP:
            if self.count:
                return
            self.count = 1
        else:
            self._asked += 1
            self.count = max(self.count, self._asked)
        self.number = number

    @classmethod
    @contextmanager
    def on_signals(cls) -> Iterator[Stop]:
        """SIGTERM, SIGINT and SIGHUP count, until the block is left."""
        stop = cls()
        with handled(stop):
            yield stop


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
