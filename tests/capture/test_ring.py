"""The ring against a plain model, against a writer that is killed, and against a full disk."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failslow.capture import layout
from failslow.capture.layout import CALL, from_runs, to_runs
from failslow.capture.reader import RECORD_DTYPE, RingReader
from failslow.capture.ring import (
    MAX_CAPACITY,
    RingWriter,
    find_rings,
    job_name,
    process_start_ticks,
    remove_stale,
    ring_capacity,
)
from failslow.errors import CaptureError
from failslow.records import (
    CALL_COLUMNS,
    KIND_CALL,
    KIND_OPTIMIZER_STEP,
    KIND_TRAINER_STEP,
    KIND_WAIT,
)

WRITER = Path(__file__).with_name("ring_writer.py")


def make(folder: Path, *, capacity: int = 64, rank: int = 0, job: str = "job") -> RingWriter:
    return RingWriter.create(
        job=job,
        rank=rank,
        world_size=4,
        description={"torch": "2.13"},
        capacity=capacity,
        environ={"FAILSLOW_CAPTURE_FOLDER": str(folder)},
    )


def append(writer: RingWriter, n: int) -> int:
    return writer.append(n, n + 1, n + 2, 3 * n, n, 9, -1, 2, 1, CALL, 6, 0, 0)


@contextmanager
def writing(folder: Path, capacity: int, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """The writer of ring_writer.py in a process of its own; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(folder), str(capacity), str(count)],
        stdout=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 20
        while not list(folder.glob("*.ring")):
            assert time.monotonic() < deadline, "the writer made no ring"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_whole(records: np.ndarray) -> None:
    """Every field is the function of the record's number that the writer wrote."""
    n = records["seq"].astype(np.int64)
    for field, value in {
        "start_ns": n,
        "end_ns": n + 1,
        "wait_ns": n + 2,
        "size_bytes": 3 * n,
        "call_ns": n % 1000,
        "thread": n % 7,
        "peer": n % 5,
        "op": n % 21,
        "dtype": n % 15,
        "group": n % 100,
    }.items():
        np.testing.assert_array_equal(records[field], value, err_msg=field)


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


def test_only_dead_processes_and_their_earlier_lives_lose_their_rings(tmp_path: Path) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    mine = make(tmp_path)
    assert remove_stale(environ) == []
    # the same pid, started at another time: the ring of a process whose pid was used again
    text = json.dumps(process_start_ticks(os.getpid())).encode()
    at = bytes(mine.memory[: layout.GROUPS_OFFSET]).index(text)
    mine.memory[at : at + len(text)] = b"1".rjust(len(text))
    assert remove_stale(environ) == [mine.path]


def test_rings_of_foreign_namespaces_stay_and_of_earlier_boots_go(tmp_path: Path) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    with writing(tmp_path, 64, 1):
        pass  # dead from here on
    (path,) = tmp_path.glob("*.ring")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"pid:[", b"pid:<", 1))
    assert remove_stale(environ) == []
    boot = json.loads(whole[4096:16384].split(b"\0")[0])["boot_id"].encode()
    path.write_bytes(whole.replace(boot, b"x" * len(boot), 1).replace(b"pid:[", b"pid:<", 1))
    assert remove_stale(environ) == [path]


def test_foreign_files_and_links_are_never_touched(tmp_path: Path) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    stem = f"failslow-{os.getuid()}-job-r0-p"
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / f"{stem}999999999.ring").symlink_to(target)
    (tmp_path / "failslow-notes.txt").write_text("mine")
    other = tmp_path / f"failslow-{os.getuid() + 1}-job-r0-p999999999.ring"
    other.write_bytes(b"of another user")
    assert remove_stale(environ) == []
    assert find_rings(environ=environ) == []
    assert target.read_bytes() == b"precious"


def test_rings_are_found_by_job(tmp_path: Path) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    first, second = make(tmp_path, job="a"), make(tmp_path, job="a-b", rank=1)
    assert find_rings("a", environ) == [first.path]
    assert find_rings("a-b", environ) == [second.path]
    assert find_rings(environ=environ) == sorted([first.path, second.path])


def test_others_cannot_read_it_and_closing_removes_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        writer = make(tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    reader = RingReader(writer.path)
    append(writer, 1)
    writer.close()
    assert not writer.path.exists()
    append(writer, 2)  # a late thread must not fault
    assert reader.closed
    assert reader.read().records["seq"].tolist() == [1, 2]


def test_description_groups_faults_and_control_cross_the_file(tmp_path: Path) -> None:
    writer = make(tmp_path, rank=3)
    reader = RingReader(writer.path)
    assert (reader.pid, reader.rank, reader.world_size) == (os.getpid(), 3, 4)
    assert reader.description["torch"] == "2.13"
    assert reader.description["job"] == "job"
    assert tuple(reader.description["ops"]) == layout.OPS
    assert reader.alive
    assert abs(reader.to_epoch_s(time.monotonic_ns()) - time.time()) < 0.1
    assert reader.groups() == []
    entry = {"id": 0, "name": "0", "desc": "world", "backend": "gloo", "size": 4, "rank": 3}
    assert writer.add_group({**entry, "ranks": to_runs([0, 1, 2, 3]), "time_ns": 5})
    assert writer.add_group({**entry, "id": 1, "ranks": None, "time_ns": 6})
    first, second = reader.groups()
    assert (first.number, first.ranks, first.backend, first.time_ns) == (0, (0, 1, 2, 3), "gloo", 5)
    assert (second.number, second.ranks) == (1, None)
    writer.count_fault()
    assert (reader.faults, writer.faults) == (1, 1)
    assert writer.memory[layout.OFFSET_CONTROL] == 0
    reader.set_profile(True)
    assert writer.memory[layout.OFFSET_CONTROL] == layout.CONTROL_PROFILE
    reader.set_profile(False)
    assert writer.memory[layout.OFFSET_CONTROL] == 0


def test_a_full_group_table_says_so(tmp_path: Path) -> None:
    writer = make(tmp_path)
    entry = {"name": "x" * 1000}
    added = 0
    while writer.add_group(entry):
        added += 1
        assert added < 1000
    assert added > 200


@given(st.lists(st.integers(0, 40), max_size=12))
def test_runs_of_ranks_lose_nothing(ranks: list[int]) -> None:
    assert from_runs(to_runs(ranks)) == ranks


def test_a_regular_group_of_any_size_is_one_run() -> None:
    assert to_runs(list(range(0, 100_000, 8))) == [[0, 100_000, 8]]


def test_a_full_tmpfs_refuses_at_start_and_leaves_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(CaptureError, match=r"No space left.*FAILSLOW_CAPTURE_FOLDER"):
            make(tmp_path, capacity=1 << 16)
        assert list(tmp_path.iterdir()) == []
        make(tmp_path, capacity=1 << 10).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_size_limit_refuses_at_start_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CaptureError, match="no room for a ring of 4"):
            make(tmp_path, capacity=1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=f"{tmp_path}/none: No such file"):
        make(tmp_path / "none")


@pytest.mark.parametrize("text", ["many", "1", "-5", str(MAX_CAPACITY + 1)])
def test_an_impossible_capacity_is_named_with_its_limits(text: str) -> None:
    with pytest.raises(CaptureError, match=rf"FAILSLOW_CAPTURE_RECORDS = '{text}'.*from 2 to"):
        ring_capacity({"FAILSLOW_CAPTURE_RECORDS": text})
    assert ring_capacity({}) == 1 << 16


def test_capacity_is_rounded_up_to_a_power_of_two(tmp_path: Path) -> None:
    assert make(tmp_path, capacity=1000).capacity == 1024
    assert make(tmp_path, capacity=1024, rank=1).capacity == 1024


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot be mapped"),
        (b"x" * 20_000, "is no ring"),
        (b"FAILSLOW" + b"\x63" + bytes(20_000), "ring version 99"),
    ],
)
def test_what_is_no_ring_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "bad.ring"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=f"bad.ring: {complaint}"):
        RingReader(path)


def test_a_ring_cut_short_is_refused(tmp_path: Path) -> None:
    writer = make(tmp_path)
    cut = tmp_path / "cut.ring"
    cut.write_bytes(writer.path.read_bytes()[:-64])
    with pytest.raises(CaptureError, match="cut short"):
        RingReader(cut)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"FAILSLOW_JOB": "pre/train 7"}, "pre_train_7"),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "abc"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "h-1"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "10.0.0.1-29500"),
        ({}, "local-0"),
    ],
)
def test_workers_agree_on_the_name_of_their_job(environ: dict[str, str], name: str) -> None:
    assert job_name(environ) == name


def test_the_start_of_a_process_is_known_only_while_it_lives() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start_ticks(process.pid) is not None
    process.kill()
    process.wait()
    assert process_start_ticks(process.pid) is None
    process.communicate()
