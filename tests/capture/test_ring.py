"""Records through the ring: against a plain model, and against a writer that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_writer import append, assert_whole, make, writing

from failslow.capture import layout
from failslow.capture.layout import CALL
from failslow.capture.reader import RECORD_DTYPE, RingReader
from failslow.capture.ring import (
    remove_stale,
)
from failslow.records import (
    CALL_COLUMNS,
    KIND_CALL,
    KIND_OPTIMIZER_STEP,
    KIND_TRAINER_STEP,
    KIND_WAIT,
)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    writer = make(tmp_path)
    assert writer.append(10, 20, 5, 1 << 40, 7, 4182, 3, 100_000, 4, CALL, 6, 1, 2) == 1
    (record,) = RingReader(writer.path).read().records
    assert record.tolist()[:-1] == (
        1, 10, 20, 5, 1 << 40, 7, 4182, 3, 100_000, 4, CALL, 6, 1, 2,
    )  # fmt: skip


def test_reader_and_writer_agree_on_the_layout() -> None:
    assert RECORD_DTYPE.itemsize == layout.RECORD.size == 64
    assert [RECORD_DTYPE[name].str[1:] for name, _ in layout.RECORD_FIELDS] == [
        kind.lstrip("<|") for _, kind in layout.RECORD_FIELDS
    ]
    assert layout.HEADER.size <= layout.OFFSET_HEAD


def test_the_ring_has_the_columns_and_kinds_of_a_call_stream() -> None:
    assert set(CALL_COLUMNS.names or ()) <= set(RECORD_DTYPE.names or ())
    assert (layout.CALL, layout.WAIT, layout.OPTIMIZER_STEP, layout.TRAINER_STEP) == (
        KIND_CALL,
        KIND_WAIT,
        KIND_OPTIMIZER_STEP,
        KIND_TRAINER_STEP,
    )


def test_a_long_call_saturates_instead_of_failing(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.append(0, 0, 0, 0, 10**12, 0, -1, 1, 1, CALL, 0, 0, 0)
    assert RingReader(writer.path).read().records["call_ns"][0] == 2**32 - 1


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.sampled_from([2, 8, 64, 256]),
    actions=st.lists(st.one_of(st.just("read"), st.integers(1, 300)), max_size=30),
)
def test_reads_equal_those_of_an_unbounded_list(
    tmp_path_factory: pytest.TempPathFactory, capacity: int, actions: list[str | int]
) -> None:
    writer = make(tmp_path_factory.mktemp("ring"), capacity=capacity)
    reader = RingReader(writer.path)
    written = seen = 0
    for action in [*actions, "read"]:
        if isinstance(action, int):
            for _ in range(action):
                written += 1
                assert append(writer, written) == written
            continue
        batch = reader.read()
        first = max(seen, written - capacity)  # the model: the newest `capacity` survive
        assert batch.records["seq"].tolist() == list(range(first + 1, written + 1))
        assert batch.lost == first - seen
        np.testing.assert_array_equal(batch.records["start_ns"], batch.records["seq"])
        seen = written
    writer.close()
    reader.close()


def test_a_record_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    writer = make(tmp_path)
    append(writer, 1)
    append(writer, 2)
    slot = layout.GROUPS_OFFSET + 256 * 1024 + 64  # of record 2
    whole = writer.memory[slot : slot + 64]
    writer.memory[slot + 40 : slot + 64] = bytes(24)  # its second half is not there yet
    reader = RingReader(writer.path)
    assert reader.read().records["seq"].tolist() == [1]
    writer.memory[slot : slot + 64] = whole
    batch = reader.read()
    assert (batch.records["seq"].tolist(), batch.lost) == ([2], 0)


def test_a_record_that_never_becomes_whole_is_given_up_and_counted(tmp_path: Path) -> None:
    writer = make(tmp_path, capacity=256)
    append(writer, 1)
    append(writer, 2)
    slot = layout.GROUPS_OFFSET + 256 * 1024 + 64
    writer.memory[slot : slot + 64] = bytes(64)  # the thread that took number 2 was killed
    reader = RingReader(writer.path)
    for n in range(3, 103):
        append(writer, n)
    batch = reader.read()
    assert batch.records["seq"].tolist() == [1, *range(3, 103)]
    assert batch.lost == 1


def test_threads_of_one_process_lose_and_repeat_nothing(tmp_path: Path) -> None:
    writer = make(tmp_path, capacity=1 << 14)

    def work() -> None:
        for n in range(2000):
            append(writer, n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    reader = RingReader(writer.path)
    got: list[int] = []
    while any(thread.is_alive() for thread in threads):
        batch = reader.read()
        assert batch.lost == 0
        got += batch.records["seq"].tolist()
        time.sleep(0.001)
    got += reader.read().records["seq"].tolist()
    assert got == list(range(1, 8001))


def test_a_writer_faster_than_the_reader_loses_only_the_oldest(tmp_path: Path) -> None:
    with writing(tmp_path, 1024, 300_000) as process:
        reader = RingReader(next(tmp_path.glob("*.ring")))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        got, lost, last, done = 0, 0, 0, False
        while not done:
            done = bool(process.stdout.read())
            batch = reader.read()
            assert_whole(batch.records)
            seq = batch.records["seq"].astype(np.int64)
            if len(seq):
                assert seq[0] > last
                assert (np.diff(seq) > 0).all()
                last = int(seq[-1])
            got, lost = got + len(seq), lost + batch.lost
            time.sleep(0.002)
        assert (got + lost, last) == (300_000, 300_000)
        assert lost > 0, "the test must make the writer lap the reader"


def test_a_writer_killed_in_the_middle_leaves_whole_records(tmp_path: Path) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with writing(folder, 4096, 0) as process:
            path = next(folder.glob("*.ring"))
            reader = RingReader(path)
            while reader.read().records.size == 0:
                time.sleep(0.001)
            time.sleep(0.02 * attempt)  # another moment each time
            process.send_signal(signal.SIGKILL)
            process.wait()
            batch = reader.read()
            assert_whole(batch.records)
            assert reader.read().records.size == 0
            assert not reader.alive
            assert not reader.closed
            assert remove_stale({"FAILSLOW_CAPTURE_FOLDER": str(folder)}) == [path]
            assert not path.exists()
