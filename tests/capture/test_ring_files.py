"""The ring as a file: who may see it, where it goes, what is left of the dead, a full disk."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_writer import append, make, writing

from failslow.capture import layout
from failslow.capture.layout import from_runs, to_runs
from failslow.capture.reader import RingReader
from failslow.capture.ring import (
    MAX_CAPACITY,
    find_rings,
    job_name,
    process_start_ticks,
    remove_stale,
    ring_bytes,
    ring_capacity,
)
from failslow.errors import CaptureError
from failslow.runtime.supervise import worker_lives


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


def test_long_names_that_differ_at_their_end_stay_two() -> None:
    one, two = (job_name({"TORCHELASTIC_RUN_ID": "x" * 99 + end}) for end in "ab")
    assert one != two
    assert len(one) == len(two) == 80
    assert job_name({"TORCHELASTIC_RUN_ID": "x" * 80}) == "x" * 80


def test_the_start_of_a_process_is_known_only_while_it_lives() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start_ticks(process.pid) is not None
    process.kill()
    process.wait()
    assert process_start_ticks(process.pid) is None
    process.communicate()


def test_a_name_cut_inside_a_character_is_no_obstacle() -> None:
    code = (
        "from pathlib import Path\nname = b'train_' + 'ü'.encode() * 9\n"
        "Path('/proc/self/comm').write_bytes(name); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8")
        ticks = process_start_ticks(process.pid)
        assert ticks is not None
        assert worker_lives(f"{process.pid}-{ticks}")
        process.kill()


def in_a_container(shm_mib: int, code: str, **environ: str) -> str:
    """What `code` prints where /dev/shm has that size."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mount = f'mount -t tmpfs -o size={shm_mib}m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], **environ},
    )
    if "permission denied" in done.stderr.lower():
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_RING = """
from failslow.capture.ring import RingWriter
from failslow.mailbox import Mailbox
ring = RingWriter.create(job="j", rank=0, world_size=8, description={})
mailbox = Mailbox.create(ring.path)
print(ring.path.parent, ring.path.stat().st_size + mailbox.path.stat().st_size)
ring.close(), mailbox.remove()
"""


@pytest.mark.parametrize(
    ("shm_mib", "workers", "named", "taken"),
    [
        (64, 8, False, "temp"),  # a container's: data loaders and NCCL need it
        (64, 1, False, "/dev/shm"),
        (1024, 8, False, "/dev/shm"),
        (64, 8, True, "/dev/shm"),  # at somebody's word
    ],
)
def test_a_small_shared_memory_is_left_to_the_training(
    tmp_path: Path, shm_mib: int, workers: int, named: bool, taken: str
) -> None:
    environ = {"LOCAL_WORLD_SIZE": str(workers), "TMPDIR": str(tmp_path)}
    if named:
        environ["FAILSLOW_CAPTURE_FOLDER"] = "/dev/shm"
    folder, size = in_a_container(shm_mib, _RING, **environ).split()
    assert folder == taken.replace("temp", str(tmp_path))
    assert int(size) == ring_bytes(1 << 16)
    check = (
        "import os; from failslow.runtime.doctor.machine import machine_checks\n"
        "check = next(iter(machine_checks(os.environ))); print(check.status, check.found)"
    )
    told = in_a_container(shm_mib, check, **environ)
    if taken == "temp":
        assert told.startswith("warn /dev/shm has 64.0 MiB left")
        assert "more than a tenth of it" in told
    else:
        assert told.startswith("pass /dev/shm has room")


def test_a_full_shared_memory_sends_the_run_folder_elsewhere_for_good(tmp_path: Path) -> None:
    code = """
import os
from pathlib import Path
from failslow.runtime.folder import RunFolder
filler = Path("/dev/shm/filler")
try:
    with filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
except OSError:
    pass
first = RunFolder("job", os.environ)
first.token(), first.write("address", "tcpstore://127.0.0.1:1")
filler.unlink()
print(first.path.parent, RunFolder("job", os.environ).path.parent, os.listdir("/dev/shm"))
"""
    assert in_a_container(1, code, TMPDIR=str(tmp_path)) == f"{tmp_path} {tmp_path} []"


def test_a_run_folder_in_use_stays_in_use_when_memory_becomes_full(tmp_path: Path) -> None:
    code = """
import os
from pathlib import Path
from failslow.runtime.folder import RunFolder
first = RunFolder("job", os.environ)
token = first.token()
try:
    with Path("/dev/shm/filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
except OSError:
    pass
second = RunFolder("job", os.environ)
print(second.path.parent, second.token() == token)
try:
    second.write("address", "x" * 9000)
except OSError:
    print(sorted(os.listdir(second.path)))
"""
    told = in_a_container(1, code, TMPDIR=str(tmp_path))
    assert told == "/dev/shm True\n['room', 'token']"
