"""Joining waits and completions to their calls, from records as a ring holds them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from failslow.capture.calls import CallJoiner, to_calls
from failslow.capture.layout import (
    CALL,
    DONE,
    DTYPES,
    FLAG_ASYNC,
    FLAG_ERROR,
    FLAG_LATE,
    OPS,
    OPTIMIZER_STEP,
    WAIT,
)
from failslow.capture.reader import RECORD_DTYPE

ALLREDUCE = OPS.index("allreduce_")


def rows(*values: dict[str, int]) -> np.ndarray:
    out = np.zeros(len(values), dtype=RECORD_DTYPE)
    for index, value in enumerate(values):
        for name, number in value.items():
            out[name][index] = number
    return out


def call(seq: int, start: int, end: int = 0, **more: int) -> dict[str, int]:
    return {"seq": seq, "kind": CALL, "op": ALLREDUCE, "start_ns": start, "end_ns": end, **more}


def wait(seq: int, of: int, start: int, end: int, flags: int = 0) -> dict[str, int]:
    times = {"start_ns": start, "end_ns": end, "wait_ns": end - start}
    return {"seq": seq, "kind": WAIT, "size_bytes": of, "flags": flags, **times}


def done(seq: int, of: int, end: int, start: int = 0) -> dict[str, int]:
    return {"seq": seq, "kind": DONE, "size_bytes": of, "start_ns": start, "end_ns": end}


def test_the_time_in_an_enqueueing_call_is_no_duration() -> None:
    (late,) = CallJoiner(hold_ns=10).update(rows(call(1, 100, call_ns=7)), now_ns=1000)
    assert (late["duration_ns"], late["end_ns"]) == (-1, 0)


def test_a_blocking_call_lasts_until_its_wait_ended() -> None:
    (one,) = CallJoiner().update(rows(call(1, 100, 350, wait_ns=200)), now_ns=400)
    assert (one["duration_ns"], one["wait_ns"]) == (250, 200)


def test_a_later_wait_that_blocked_ends_the_call() -> None:
    joiner = CallJoiner(hold_ns=1000)
    assert not len(joiner.update(rows(call(1, 100)), now_ns=200))
    (one,) = joiner.update(rows(wait(2, 1, 300, 450)), now_ns=460)
    assert (one["duration_ns"], one["wait_ns"], one["flags"]) == (350, 150, 0)


def test_a_wait_that_did_not_block_bounds_the_end_until_a_completion_tells() -> None:
    joiner = CallJoiner(hold_ns=1000)
    assert not len(joiner.update(rows(call(1, 100), wait(2, 1, 300, 301, FLAG_LATE)), now_ns=310))
    (one,) = joiner.update(rows(done(3, 1, 180)), now_ns=320)
    assert (one["duration_ns"], one["flags"], one["wait_ns"]) == (80, 0, 1)
    (bound,) = CallJoiner(hold_ns=5).update(
        rows(call(1, 100), wait(2, 1, 300, 301, FLAG_LATE)), now_ns=310
    )
    assert (bound["duration_ns"], bound["flags"]) == (201, FLAG_LATE)


def test_a_device_that_measured_the_call_knows_its_start() -> None:
    (one,) = CallJoiner().update(rows(call(1, 100), done(2, 1, 900, start=500)), now_ns=950)
    assert (one["duration_ns"], one["end_ns"], one["start_ns"]) == (400, 900, 100)


def test_an_unfinished_call_holds_back_later_ones_until_time_is_up() -> None:
    joiner = CallJoiner(hold_ns=100)
    assert not len(joiner.update(rows(call(1, 100), call(2, 110, 120)), now_ns=150))
    assert joiner.update(rows(), now_ns=300)["seq"].tolist() == [1, 2]


def test_news_of_calls_never_seen_and_foreign_kinds_are_ignored() -> None:
    records = rows(
        wait(1, 0, 5, 9), wait(2, 77, 5, 9), {"seq": 3, "kind": OPTIMIZER_STEP}, call(4, 10, 20)
    )
    out = CallJoiner().update(records, now_ns=50)
    assert (out["seq"].tolist(), out["wait_ns"].tolist()) == ([4], [0])


@given(st.data())
def test_batches_of_any_cut_give_the_same_calls(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    order = data.draw(st.permutations(range(count)))
    values = [call(n + 1, 100 * n + 1, flags=FLAG_ASYNC) for n in range(count)]
    values += [wait(count + 1 + n, of + 1, 5000 + n, 5000 + n + of) for n, of in enumerate(order)]
    whole = CallJoiner(hold_ns=10**9).update(rows(*values), now_ns=10_000)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    joiner = CallJoiner(hold_ns=10**9)
    parts = [
        joiner.update(rows(*values[start:end]), now_ns=10_000)
        for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(whole) == count


def test_a_row_becomes_the_dataclass_with_seconds() -> None:
    record = call(
        7, 2_000_000_000, 2_500_000_000, wait_ns=400_000_000, call_ns=100_000, size_bytes=64,
        dtype=DTYPES.index("float32"), group=3, group_size=8, peer=-1, thread=42,
        flags=FLAG_ERROR | FLAG_ASYNC,
    )  # fmt: skip
    (one,) = to_calls(
        CallJoiner().update(rows(record), now_ns=3_000_000_000), ops=OPS, dtypes=DTYPES
    )
    assert (one.op, one.dtype, one.group, one.group_size, one.peer) == (
        "allreduce_", "float32", 3, 8, None,
    )  # fmt: skip
    assert (one.start_s, one.duration_s, one.wait_s, one.call_s) == (2.0, 0.5, 0.4, 0.0001)
    assert one.failed
    assert one.is_async
    assert not one.is_upper_bound
