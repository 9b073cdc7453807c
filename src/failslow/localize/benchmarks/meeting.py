"""How the workers of a pause find each other and keep in step, over the training's own store.

In: that store. Out: a clone of it (a connection and time-outs of our own: the training's are not
touched), under a prefix no other pause has, used only in a thread that can be left behind:

    /default_pg/0//failslow/pause-7/done/3/5       rank 5 is through with stage 3
    /default_pg/0//failslow/pause-7/pair/0-2/4/…   the address of rank 0 for rank 2, from stage 4 on

Each worker takes its keys away at the end of the next pause: of this one somebody may be late, and
the store is in the memory of a worker that trains for weeks.

There is no barrier: a stage begins when those in the one before are through, or its limit is over,
and who was once missed is not waited for again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

from torch.distributed import distributed_c10d as c10d

from failslow.localize.benchmarks.helper import Helper, Lost
from failslow.localize.script_settings import MOST_AWAITED

__all__ = ["Meeting", "NoMeeting"]

T = TypeVar("T")
_SLOW_S = 0.3
_GRACE_S = 0.2
"""The helper's answer may come so much later than the time-out of what it does."""


class NoMeeting(Exception):
    """There is no store to meet at, or it does not answer."""


class Meeting:
    """One worker's part in one pause's meeting. Raises NoMeeting where nothing can be had."""

    _former: ClassVar[list[str]] = []
    """Keys that this process has left of the pause before."""
    _kept: ClassVar[tuple[Any, Any] | None] = None
    """The training's store and a clone of it that took too long to make to be given up again: a
    resolver that does not answer costs each connection seconds, more than a pause has."""

    def __init__(
        self, store_or_group: Any, *, name: str, rank: int, helper: Helper, limit_s: float
    ) -> None:
        self.missed: set[int] = set()
        """Ranks that did not finish a stage in its time."""
        self._rank = rank
        self._helper = helper
        self._prefix = f"failslow/{name}"
        self._keys: list[str] = []
        try:
            store = _store_of(store_or_group)
            kept = Meeting._kept
            if kept is not None and kept[0] is store:
                self._base = kept[1]
            else:
                self._base = self._call(lambda: _own(store), limit_s, "connecting to the store")
            self._store: Any = c10d.PrefixStore(self._prefix, self._base)
        except (Lost, RuntimeError, ValueError, KeyError) as error:
            raise NoMeeting(str(error)) from None

    def finish(self, stage: int) -> None:
        """Say that this rank is through with a stage."""
        key = self._mine(f"done/{stage}/{self._rank}")
        self._call(lambda: self._store.set(key, "1"), 0.5, "the store")

    def await_others(self, stage: int, ranks: Iterable[int], limit_s: float) -> None:
        """Until those ranks are through with a stage, or the time is over."""
        others = [rank for rank in ranks if rank != self._rank and rank not in self.missed]
        if not others or len(others) > MOST_AWAITED:
            return
        keys = {rank: f"done/{stage}/{rank}" for rank in others}

        def wait() -> set[int]:
            try:
                self._store.wait(list(keys.values()), timedelta(seconds=max(0.001, limit_s)))
            except RuntimeError:
                return {rank for rank, key in keys.items() if not self._store.check([key])}
            return set()

        self.missed |= self._call(wait, limit_s, "the store")

    def connect(self, peer: int, stage: int, make: Callable[[Any, float], T], limit_s: float) -> T:
        """What `make(store, limit_s)` builds once both ends of a pair are in this stage.

        Raises NoMeeting where the peer does not come.
        """
        # by stage: the addresses of a connection given up must not be taken for those of the next
        name = self._pair(peer, stage)
        pair = c10d.PrefixStore(name, self._store)
        self._mine(f"{name}/here/{self._rank}")
        self._mine(f"{name}/0/{int(self._rank > peer)}")  # gloo's: where this side listens
        until_s = time.monotonic() + limit_s

        def build() -> T:
            # what is built may not be interruptible, so first see that both have come
            pair.set(f"here/{self._rank}", "1")
            try:
                pair.wait([f"here/{peer}"], timedelta(seconds=max(0.001, limit_s)))
            except RuntimeError:
                raise NoMeeting(f"rank {peer} did not come within {limit_s:.1f} s") from None
            return make(pair, max(0.05, until_s - time.monotonic()))

        try:
            return self._call(build, limit_s, f"connecting to rank {peer}")
        except Lost as error:
            raise NoMeeting(str(error)) from None

    def give_up(self, peer: int, stage: int) -> None:
        """Tell the peer that what was connected in that stage is of no more use."""
        key = self._mine(f"{self._pair(peer, stage)}/given_up")
        self._call(lambda: self._store.set(key, "1"), 0.5, "the store")

    def is_given_up(self, peer: int, stage: int) -> bool:
        """Whether either end has told so."""
        key = f"{self._pair(peer, stage)}/given_up"
        return self._call(lambda: bool(self._store.check([key])), 0.5, "the store")

    def _pair(self, peer: int, stage: int) -> str:
        low, high = sorted((self._rank, peer))
        return f"pair/{low}-{high}/{stage}"

    def _mine(self, key: str) -> str:
        """A key that this rank makes, noted."""
        self._keys.append(f"{self._prefix}/{key}")
        return key

    def close(self) -> None:
        """Take away what the pause before has left, and give the connection back."""
        base, self._base, self._store = self._base, None, None
        former, Meeting._former = Meeting._former, self._keys

        def forget() -> None:
            nonlocal base
            with contextlib.suppress(RuntimeError):
                for key in former:
                    base.delete_key(key)
            base = None

        self._call(forget, 0.5, "closing the store")

    def _call(self, work: Callable[[], T], limit_s: float, what: str) -> T:
        # who is behind its limit must not take the store for dead
        return self._helper.call(work, limit_s=max(0.0, limit_s) + _GRACE_S, what=what)


def _store_of(store_or_group: Any) -> Any:
    """The store itself, that of a process group, or for None that of the training."""
    if store_or_group is None:
        if not c10d.is_initialized():
            raise ValueError("torch.distributed is not initialised: there is no store to meet at")
        return c10d._get_default_store()
    if isinstance(store_or_group, c10d.Store):
        return store_or_group
    return c10d._world.pg_map[store_or_group][1]


def _own(store: Any) -> Any:
    """A connection of our own where the kind of store has them."""
    # HashStore, FileStore and older torch have none; each wait has its own limit anyway
    began_s, own = time.monotonic(), store
    with contextlib.suppress(RuntimeError, AttributeError):
        own = store.clone()
    if time.monotonic() - began_s > _SLOW_S:  # for the next pause, if this one did not wait
        Meeting._kept = store, own
    return own
