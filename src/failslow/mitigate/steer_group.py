"""How all workers come to carry out the same order at the same step, or none.

In: at agreed steps, what rank 0 has to say. Out: the same on every worker, and one decision. A
process group of its own over gloo, so that whatever goes wrong with it is not the training's:

    wait, order = group.hear(wait=5, order=None)     # rank 0's arguments, on every rank
    against = group.vote("")                         # "" where every worker is ready

Two broadcasts carry an order, then every worker says whether it is ready, and an entry in the job's
store, the first that is made, decides: a worker that cannot see how the vote ended reads it there.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from failslow.capture import hook
from failslow.errors import PlanError
from failslow.mitigate.move_wire import GroupWire, leave, read_word, word

__all__ = ["SteerGroup", "why_alone", "why_no_gloo"]

_MOST_BYTES = 1 << 20
_CONNECT_S, _CONNECT_RANK_S = 30.0, 0.05
"""For all to be connected; gloo waits five times as long for one that cannot be."""
_FILES_LEFT = 64
"""For whatever else the training opens."""


def why_no_gloo(connections: int) -> str:
    """Why this worker cannot be in a group over gloo with so many others; "" it can, alone."""
    try:
        if problem := _too_few_files(connections):
            return problem
        dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10.0))
    except Exception as error:
        return f"gloo: {error}"
    return ""


def _too_few_files(connections: int) -> str:
    """Why so many connections, and as many again for a change of places, cannot be had."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + 2 * connections + _FILES_LEFT
    if limit in (resource.RLIM_INFINITY, -1) or needed <= limit:
        return ""
    return (
        f"{connections} connections need some {needed} open files, and {limit} are allowed; "
        "raise ulimit -n"
    )


def why_alone() -> str:
    """Why no other host could connect to this worker's gloo; "" nothing is known.

    Where no interface is named it listens at what the host's own name stands for: 127.0.1.1 on many
    a Debian.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        if name:
            own = psutil.net_if_addrs().get(name, ())
            found = [a.address for a in own if a.family in (socket.AF_INET, socket.AF_INET6)]
        else:
            host = socket.gethostname()
            found = [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
        address = found[0].partition("%")[0] if found else "127.0.0.1"
        if not ip_address(address).is_loopback:
            return ""
    except (OSError, ValueError):  # no name, or none that can be one
        address = "127.0.0.1"  # gloo's own way out
    return f"gloo listens at {address} alone; set GLOO_SOCKET_IFNAME to an interface between hosts"


class SteerGroup:
    """Made by all workers together; its calls are made by all of them in the same order.

    They raise what torch raises when a worker is gone or late. The group is of no use afterwards:
    `close` it, so that the others' next call fails at once as well.
    """

    def __init__(self, limit_s: float) -> None:
        """limit_s: how long the others may take to come; as long as the training's own groups."""
        _close_forgotten()
        # all are here: who cannot be reached now never can
        connect_s = min(limit_s, _CONNECT_S + _CONNECT_RANK_S * dist.get_world_size())
        with hook.quiet():
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=connect_s), group_desc="failslow_steer"
            )
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), self._group)
        self._forget = weakref.finalize(self, _forgotten.append, self._group)
        self._forget.atexit = False
        self._head = torch.zeros(2, dtype=torch.int64, device="cpu")  # whatever the default is

    def gather(self, **content: Any) -> Sequence[dict[str, Any]]:
        """What every rank says (a few hundred bytes of plain values), by rank."""
        with hook.quiet():
            return self._gather(content)

    def _gather(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        mine = torch.frombuffer(bytearray(word(**content)), dtype=torch.uint8)
        words = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(words, mine, group=self._group)
        return [read_word(told.numpy().tobytes()) for told in words]

    def hear(self, wait: int, order: dict[str, Any] | None) -> tuple[int, dict[str, Any] | None]:
        """(steps until the next call, what is ordered) as rank 0 says."""
        text = b"" if order is None else json.dumps(order).encode()
        with hook.quiet():
            self._head[0], self._head[1] = wait, len(text)
            dist.broadcast(self._head, 0, group=self._group)
            wait, size = self._head.tolist()
            if not size:
                return wait, None
            if not 0 < size <= _MOST_BYTES:
                raise PlanError(f"rank 0 announces an order of {size} bytes")
            body = torch.zeros(size, dtype=torch.uint8, device="cpu")
            if len(text) == size:
                body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(body, 0, group=self._group)
        heard = json.loads(body.numpy().tobytes())
        if not isinstance(heard, dict):
            raise PlanError("rank 0 ordered something that is no object")
        return wait, heard

    def vote(self, problem: str, after_s: float = 0.0) -> str:
        """Why there is a "no", the same everywhere; "" where every worker is ready.

        after_s: seconds since the order came in which this worker met its problem; the first one
        counts, as others may be there for waiting for that worker.
        Raises where even the store does not answer: whether the others go on as ordered is then
        unknown.
        """
        with hook.quiet():
            begin_s = time.monotonic()
            try:
                mine = {"no": problem, "after_s": after_s} if problem else {"ok": True}
                words = self._gather(mine)
                noes = [
                    (told.get("after_s", 0.0), f"rank {rank}: {told['no']}")
                    for rank, told in enumerate(words)
                    if "no" in told
                ]
                against = min(noes)[1] if noes else ""
            except Exception as error:
                took_s = time.monotonic() - begin_s
                with suppress(Exception):  # closed here
                    leave(self._group)  # who is far from the one that is gone would go on waiting
                against = problem or f"the vote failed after {took_s:.3g} s: {error}"
            if GroupWire(self._group).settle(commit=not against):
                return ""
        return against or "another worker could not see the vote"

    def close(self) -> None:
        """Leave for good."""
        self._forget.detach()
        with suppress(Exception), hook.quiet():
            dist.destroy_process_group(self._group)


_forgotten: list[dist.ProcessGroup] = []
"""Of Coordinators that are gone: torch keeps them, their connections and threads."""


def _close_forgotten() -> None:
    """Now, as all workers are about to make a group: nobody is within another call."""
    gc.collect()  # a Coordinator's callbacks refer to it
    while _forgotten:
        with suppress(Exception), hook.quiet():  # destroyed with all others
            dist.destroy_process_group(_forgotten.pop())
