"""Ends a command that has something to undo, whatever it is told to end by.

In: SIGTERM or SIGHUP while the block runs. Out: SystemExit in it, 143 or 129:

    with leaving_politely(), TemporaryDirectory() as scratch: ...
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["leaving_politely"]


@contextmanager
def leaving_politely() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by way of every `finally`; what nohup ignores stays ignored."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    handled = {n: old for n, old in before.items() if old != signal.SIG_IGN}
    for number in handled:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, old in handled.items():
            signal.signal(number, old)
