"""How long a directed link takes for messages of several sizes.

In: two workers and their channel. Out: one result a size, made by the receiving side:

    {"size_bytes":4194304,"seconds":0.0341,"min_s":0.0339,"median_s":0.0341,"repeats":3,
     "waited":0.02,…}

waited: the share of that time in which the process waited for a core; then it was not the link
that was slow. The sending side reports its own.

The receiver asks for each message by its size and times it from asking to having it, so the two
clocks are never compared, and a worker that is scheduled late makes a message look longer, never
shorter. The channel is a process group of just these two, made for the pause: whatever is cut off
by its limit breaks nothing else.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from failslow.localize.benchmarks.accounts import Books
from failslow.localize.benchmarks.compute import summarize

__all__ = ["Channel", "open_channel", "receive_all", "send_all"]

_LEAST_TELLING = 64 * 1024
"""Bytes from which the time of a message is that of its transfer, not of setting out."""


class Channel(Protocol):
    """One end of a connection of two; a call that takes longer than its limit raises, and the
    channel is of no use afterwards."""

    @abstractmethod
    def send(self, message: torch.Tensor, limit_s: float) -> None:
        """Until it may be overwritten."""
        ...

    @abstractmethod
    def receive(self, message: torch.Tensor, limit_s: float) -> None:
        """Until it is all there."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Give it up, whatever is under way."""
        ...


def open_channel(store: Any, side: int, limit_s: float, device: torch.device) -> Channel:
    """Connect with the other side (0 or 1) through `store`. Raises RuntimeError.

    NCCL on CUDA devices, else gloo over the interfaces of GLOO_SOCKET_IFNAME.
    """
    if device.type == "cuda":
        return _NcclChannel(store, side, device)
    return _GlooChannel(store, side, limit_s)


class _GlooChannel:
    def __init__(self, store: Any, side: int, limit_s: float) -> None:
        self._peer = 1 - side
        timeout = timedelta(seconds=max(0.05, limit_s))
        # the class itself: torch's registry of groups knows nothing of it
        self._group: Any = dist.ProcessGroupGloo(store, side, 2, timeout)

    def send(self, message: torch.Tensor, limit_s: float) -> None:
        work = self._group.send([message], self._peer, 0)
        work.wait(timedelta(seconds=max(0.001, limit_s)))

    def receive(self, message: torch.Tensor, limit_s: float) -> None:
        work = self._group.recv([message], self._peer, 0)
        work.wait(timedelta(seconds=max(0.001, limit_s)))

    def close(self) -> None:
        del self._group


class _NcclChannel:
    """Written to NCCL's documentation; no GPU was at hand to run it on."""

    def __init__(self, store: Any, side: int, device: torch.device) -> None:
        self._peer, self._device = 1 - side, device
        options = dist.ProcessGroupNCCL.Options()
        # long: a work that outlives it would have the watchdog end the trainer. The limits here
        # are our own, and abort the communicator
        options._timeout = timedelta(hours=1)
        self._group: Any = dist.ProcessGroupNCCL(store, side, 2, options)

    def send(self, message: torch.Tensor, limit_s: float) -> None:
        self._finish(self._group.send([message], self._peer, 0), limit_s)

    def receive(self, message: torch.Tensor, limit_s: float) -> None:
        self._finish(self._group.recv([message], self._peer, 0), limit_s)

    def _finish(self, work: Any, limit_s: float) -> None:
        until_s = time.perf_counter() + limit_s
        while not work.is_completed():  # of the device; asking is all the waiting there is
            if time.perf_counter() > until_s:
                self._group.abort()
                raise RuntimeError(f"Timed out after {limit_s:.2f} s")
        work.wait()  # what follows on this stream comes after it

    def close(self) -> None:
        self._group.abort()
        del self._group


def send_all(
    channel: Channel, *, sizes_bytes: Sequence[int], until_s: float, device: torch.device
) -> dict[str, Any]:
    """Send what the other side asks for until it asks for nothing.

    until_s: on the clock of time.perf_counter. Where it was cut off the result has `asked`, how
    often it was asked, and `since_s`, how long ago the last time was: what did not come for longer
    was not asked for until then.
    """
    buffer = torch.ones(max(sizes_bytes), dtype=torch.uint8, device=device)
    asked = torch.zeros(1, dtype=torch.int64, device=device)
    books = Books(every_thread=True)
    cut: dict[str, Any] = {"error": ""}
    count, asked_s = 0, time.perf_counter()
    try:
        while True:
            channel.receive(asked, until_s - time.perf_counter())
            count, asked_s = count + 1, time.perf_counter()
            size = int(asked.item())
            if not 0 < size <= len(buffer):
                break
            channel.send(buffer[:size], until_s - time.perf_counter())
    except RuntimeError as failure:
        since_s = round(time.perf_counter() - asked_s, 4)
        cut = {"error": _text(failure), "asked": count, "since_s": since_s}
    return {"seconds": None, "waited": _waited(books), **cut}


def receive_all(
    channel: Channel,
    *,
    sizes_bytes: Sequence[int],
    repeats: int,
    until_s: float,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Ask for messages, the small ones first, as long as they can be expected in time.

    What was cut off, or was the only one there was time for, has `at_least_s` instead of `seconds`;
    larger sizes are not tried then.
    """
    sizes = sorted(sizes_bytes)
    buffer = torch.zeros(sizes[-1], dtype=torch.uint8, device=device)
    asked = torch.zeros(1, dtype=torch.int64, device=device)

    count = 0

    def ask(size: int) -> float:
        nonlocal count
        begin_s, count = time.perf_counter(), count + 1
        asked.fill_(size)
        channel.send(asked, until_s - begin_s)
        if size:
            channel.receive(buffer[:size], until_s - time.perf_counter())
        return time.perf_counter() - begin_s

    results: list[dict[str, Any]] = []
    size, begin_s = 1, time.perf_counter()
    books = Books(every_thread=True)
    try:
        ask(size)  # the other side may still be at the stage before
        size, begin_s = sizes[0], time.perf_counter()
        books = Books(every_thread=True)
        fastest_s, fastest_size = ask(size), size  # not counted: connections start slowly
        waited_first = _waited(books)
        for size in sizes:
            times_s: list[float] = []
            books = Books(every_thread=True)
            for _ in range(repeats):
                begin_s = time.perf_counter()
                # better to stop in time than to be cut off; small ones say little of large ones
                growth = size / fastest_size if fastest_size >= _LEAST_TELLING else 1.0
                if begin_s + 0.9 * fastest_s * growth > until_s:
                    break
                times_s.append(ask(size))
            if times_s:
                fastest_s, fastest_size = min(times_s), size
                result = {"size_bytes": size, **summarize(times_s), "waited": _waited(books)}
                results.append({**result, "error": ""})
            if len(times_s) < repeats:
                break
        if not results:  # the link is that slow
            cut: dict[str, Any] = {"seconds": None, "waited": waited_first, "size_bytes": sizes[0]}
            error = "after the first transfer no time was left"
            results.append({**cut, "at_least_s": round(fastest_s, 4), "error": error})
        ask(0)
    except RuntimeError as error:
        cut = {"seconds": None, "waited": _waited(books), "error": _text(error)}
        if size >= sizes[0]:
            at_least_s = round(time.perf_counter() - begin_s, 4)
            cut |= {"size_bytes": size, "at_least_s": at_least_s, "asked": count}
        results.append(cut)
    return results


def _text(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


def _waited(books: Books) -> float:
    account = books.close()
    return round(min(1.0, account.queued_s / max(1e-9, account.wall_s)), 3)
