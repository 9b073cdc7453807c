"""A thread for what may never return: a store that was stopped, a device that hangs.

In: a call and what it may take. Out: its result, or `Lost`; after that nothing is asked of the
thread any more, and the trainer goes on without it.

    helper.call(lambda: store.get("address"), limit_s=0.5)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

__all__ = ["Helper", "Lost"]

T = TypeVar("T")


class Lost(Exception):
    """The helper does not come back."""


class Helper:
    """One daemon thread; calls run in it one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lost = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T], *, limit_s: float, what: str) -> T:
        """The result of `work`, or what it raises. Raises Lost when it takes longer than
        `limit_s`, and at once ever after."""
        if self._lost:
            raise Lost(self._lost)
        future: Future[T] = Future()
        self._calls.put((work, future))
        try:
            return future.result(max(0.0, limit_s))
        except FutureTimeoutError:
            if future.done():
                raise  # its own
            self._lost = f"{what}: no answer within {limit_s:.1f} s"
            raise Lost(self._lost) from None

    def end(self) -> None:
        """The thread ends after what it is at."""
        self._calls.put(None)
        if not self._lost:
            self._thread.join(0.5)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # the caller gets it
                future.set_exception(error)
            del work, future, item  # what they hold must not live until the next call
