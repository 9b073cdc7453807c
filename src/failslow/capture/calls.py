"""Ring records -> calls: later waits and completions are joined to the call they belong to.

In: what `RingReader.read` brings, batch after batch. Out: CALL rows with their completion:

    joiner = CallJoiner(hold_ns=2_000_000_000)
    calls = joiner.update(batch.records, now_ns=time.monotonic_ns())   # dtype CALL_DTYPE
    calls["duration_ns"]           # -1 where nobody knows when the call was complete

The time a host spends inside a call is not a duration: it may only have enqueued. A duration
comes from a caller that blocked until the end, or from a completion the backend reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from failslow.capture.layout import CALL, DONE, FLAG_ASYNC, FLAG_ERROR, FLAG_LATE, WAIT
from failslow.capture.reader import RECORD_DTYPE
from failslow.records import CollectiveCall

__all__ = ["CALL_DTYPE", "CallJoiner", "to_calls"]

CALL_DTYPE = np.dtype([*RECORD_DTYPE.descr, ("duration_ns", "<i8")])
"""`RECORD_DTYPE` and `duration_ns`: from the call's start to its completion, -1 unknown. With
FLAG_LATE an upper bound."""


class CallJoiner:
    """Joins the records of one ring. Calls come out in the order of their numbers."""

    def __init__(self, *, hold_ns: int = 2_000_000_000) -> None:
        """hold_ns: how long a call is kept back for news of its completion."""
        self._hold_ns = hold_ns
        self._held = np.empty(0, dtype=CALL_DTYPE)

    def update(self, records: NDArray[np.void], *, now_ns: int) -> NDArray[np.void]:
        """New records in, finished calls out: those complete, and those held long enough.

        A call that waits for news holds back the later ones, so that order is kept.
        """
        new = records[records["kind"] == CALL]
        fresh = np.zeros(len(new), dtype=CALL_DTYPE)
        for name in RECORD_DTYPE.names or ():
            fresh[name] = new[name]
        known = fresh["end_ns"] > 0
        fresh["duration_ns"] = np.where(known, fresh["end_ns"] - fresh["start_ns"], -1)
        calls = np.concatenate([self._held, fresh])
        self._join(calls, records[records["kind"] == WAIT])
        self._join(calls, records[records["kind"] == DONE])
        settled = (calls["duration_ns"] >= 0) & (calls["flags"] & FLAG_LATE == 0)
        settled |= calls["start_ns"] < now_ns - self._hold_ns
        count = len(calls) if settled.all() else int(np.argmin(settled))
        self._held = calls[count:]
        return calls[:count]

    @staticmethod
    def _join(calls: NDArray[np.void], news: NDArray[np.void]) -> None:
        if not len(calls) or not len(news):
            return
        at = np.searchsorted(calls["seq"], news["size_bytes"].astype(np.uint64))
        found = at < len(calls)
        found[found] = calls["seq"][at[found]] == news["size_bytes"][found]
        at, news = at[found], news[found]
        if not len(news):
            return
        done = news["kind"] == DONE
        np.add.at(calls["wait_ns"], at, news["wait_ns"])
        # A wait tells the end only where no completion was reported.
        use = done | (calls["end_ns"][at] == 0)
        at, news, done = at[use], news[use], done[use]
        calls["end_ns"][at] = news["end_ns"]
        calls["flags"][at] |= news["flags"] & (FLAG_LATE | FLAG_ERROR)
        calls["flags"][at[done]] &= np.uint8(0xFF & ~FLAG_LATE)
        # A device that measured the call itself knows when it began there.
        begun = np.where(done & (news["start_ns"] > 0), news["start_ns"], calls["start_ns"][at])
        calls["duration_ns"][at] = np.maximum(news["end_ns"] - begun, 0)


def to_calls(
    calls: NDArray[np.void], *, ops: Sequence[str], dtypes: Sequence[str]
) -> list[CollectiveCall]:
    """Rows of `CallJoiner.update` as dataclasses; ops, dtypes: of the ring's description."""
    return [
        CollectiveCall(
            seq=int(row["seq"]),
            op=ops[row["op"]],
            group=int(row["group"]),
            group_size=int(row["group_size"]),
            size_bytes=int(row["size_bytes"]),
            dtype=dtypes[row["dtype"]],
            peer=None if row["peer"] < 0 else int(row["peer"]),
            thread=int(row["thread"]),
            start_s=int(row["start_ns"]) / 1e9,
            call_s=int(row["call_ns"]) / 1e9,
            wait_s=int(row["wait_ns"]) / 1e9,
            duration_s=None if row["duration_ns"] < 0 else int(row["duration_ns"]) / 1e9,
            is_upper_bound=bool(row["flags"] & FLAG_LATE),
            is_async=bool(row["flags"] & FLAG_ASYNC),
            failed=bool(row["flags"] & FLAG_ERROR),
        )
        for row in calls
    ]
