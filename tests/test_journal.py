"""A journal keeps every whole line through crashes, rotation and full disks."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.errors import JournalError
from failslow.journal import (
    GrowingJournal,
    JournalEntry,
    JournalWriter,
    decode_entry,
    encode_entry,
    read_journal,
)
from failslow.records import CallCell, Culprit, Episode, Level, RankProfile, StepSample

T = 1_745_735_250.9
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.builds(
    StepSample,
    step=st.integers(-(2**63), 2**63 - 1),
    duration_s=FLOATS,
    end_s=FLOATS,
    iterations=st.integers(0, 1000),
    work=st.none() | FLOATS,
    data_s=st.none() | FLOATS,
    run=st.integers(0, 9),
)
EPISODES = st.builds(
    Episode,
    start_step=st.integers(0, 10**9),
    end_step=st.none() | st.integers(0, 10**9),
    start_s=FLOATS,
    end_s=st.none() | FLOATS,
    duration_s=FLOATS,
    iteration_s=FLOATS,
    baseline_s=FLOATS,
    slowdown=FLOATS,
    peak_slowdown=FLOATS,
    lost_s=FLOATS,
    confidence=FLOATS,
    kind=st.sampled_from(["fail_slow", "workload_change"]),
    culprits=st.lists(
        st.builds(
            Culprit,
            rank=st.integers(0, 10**5),
            what=st.sampled_from(["compute", "communication", "data", "host"]),
            slowdown=FLOATS,
        ),
        max_size=3,
    ).map(tuple),
    levels=st.lists(
        st.builds(Level, start_step=st.integers(0, 10**9), slowdown=FLOATS), max_size=3
    ).map(tuple),
    note=st.text(),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def sample(step: int) -> StepSample:
    return StepSample(step=step, duration_s=0.5, end_s=1.0)


def steps(path: Path) -> list[int]:
    return [entry.record.step for entry in read_journal(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.jsonl"


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit: what is over it is cut off, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@given(record=SAMPLES | EPISODES, rank=st.none() | st.integers(0, 10**6))
def test_a_record_comes_back_as_it_was(record: Any, rank: int | None) -> None:
    line = encode_entry(record, t=T, rank=rank)
    assert b"\n" not in line
    kind = "step" if isinstance(record, StepSample) else "episode"
    entry = decode_entry(line)
    assert entry == JournalEntry(t=T, kind=kind, record=record, tags={"rank": rank})
    assert entry.rank == rank


@given(bare=st.dictionaries(st.text(min_size=1), PLAIN, max_size=5))
def test_an_unknown_kind_comes_back_bare(bare: dict[str, Any]) -> None:
    bare = {name: value for name, value in bare.items() if name not in ("t", "kind")}
    entry = decode_entry(encode_entry(bare, t=T, kind="weather"))
    assert entry == JournalEntry(t=T, kind="weather", record=bare)


@pytest.mark.parametrize("world", [8, 10_240])
def test_a_profile_of_a_wide_job_is_a_short_line(world: int) -> None:
    """Its groups written out for each call, those of 2,048 ranks would fill the journal thrice."""
    everybody, line = tuple(range(world)), tuple(range(3, world, 8))
    cells = tuple(
        CallCell(
            group=everybody if position % 2 else line, label="dp", op="allreduce_",
            size_bytes=1 << 20, position=position, calls=20, duration_s=0.004, wait_s=0.001,
            gap_s=0.05,
        )
        for position in range(30)
    )  # fmt: skip
    profile = RankProfile(
        rank=3, node="gpu-3", start_t=T, end_t=T + 3.0, iterations=20, iteration_s=0.5,
        compute_s=0.3, cells=cells,
    )  # fmt: skip
    text = encode_entry(profile, t=T, episode="e1")
    assert len(text) < 10_000
    entry = decode_entry(text)
    assert entry == JournalEntry(t=T, kind="rankprofile", record=profile, tags={"episode": "e1"})
    assert entry.record.cells[1].group is entry.record.cells[3].group or world == 8


def test_a_step_line_has_the_documented_form() -> None:
    line = json.loads(encode_entry(sample(120), t=T, rank=3))
    assert list(line)[:4] == ["t", "kind", "rank", "step"]
    assert (line["t"], line["kind"], line["rank"], line["step"]) == (T, "step", 3, 120)
    assert list(line)[3:] == [field.name for field in fields(StepSample)]
    assert line["work"] is None


def test_a_field_named_kind_does_not_hide_the_kind_of_the_line() -> None:
    episode = decode_entry(
        b'{"t":1,"kind":"episode","episode_kind":"workload_change","start_step":1,"end_step":null,'
        b'"start_s":0,"end_s":null,"duration_s":1,"iteration_s":1,"baseline_s":1,"slowdown":1.4,'
        b'"peak_slowdown":1.4,"lost_s":1,"confidence":1}'
    )
    assert episode.kind == "episode"
    assert episode.record.kind == "workload_change"


def test_fields_of_a_later_version_become_tags_and_old_lines_get_defaults() -> None:
    entry = decode_entry(b'{"t":1,"kind":"step","step":7,"duration_s":1,"end_s":2,"colour":"red"}')
    assert entry.record == StepSample(step=7, duration_s=1.0, end_s=2.0)
    assert entry.tags == {"colour": "red"}


def test_a_known_kind_that_does_not_fit_is_kept_bare() -> None:
    entry = decode_entry(b'{"t":1,"kind":"step","step":"many","rank":2}')
    assert entry.record == {"step": "many", "rank": 2}
    assert entry.rank == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_written_as_null_and_read_as_nan(value: float) -> None:
    record = StepSample(step=1, duration_s=value, end_s=1.0, work=value)
    line = encode_entry(record, t=T, load=[value])
    assert b"NaN" not in line
    assert b"Inf" not in line
    entry = decode_entry(line)
    assert math.isnan(entry.record.duration_s)
    assert entry.record.work is None
    assert entry.tags == {"load": [None]}
    level = {"levels": [{"start_step": 1, "slowdown": None}]}
    episode = json.loads(encode_entry(EPISODE, t=T)) | level
    assert math.isnan(decode_entry(json.dumps(episode)).record.levels[0].slowdown)


EPISODE = Episode(
    start_step=1,
    end_step=None,
    start_s=0.0,
    end_s=None,
    duration_s=1.0,
    iteration_s=1.0,
    baseline_s=0.7,
    slowdown=1.4,
    peak_slowdown=1.4,
    lost_s=0.3,
    confidence=1.0,
)


def test_numpy_values_paths_and_sets_have_a_json_form() -> None:
    values = {"a": np.float64(1.5), "b": np.arange(2), "c": Path("x/y"), "d": {3}}
    entry = decode_entry(encode_entry(values, t=T, kind="health"))
    assert entry.record == {"a": 1.5, "b": [0, 1], "c": "x/y", "d": [3]}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[1]",
        "null",
        '{"t":1}',
        '{"t":"x","kind":"step"}',
        '{"t":NaN,"kind":"a"}',
        '{"t":1' + "0" * 400 + ',"kind":"a"}',
        '{"t":1,"kind":"step","step":7',
        "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)
def test_what_is_no_entry_is_refused(line: str) -> None:
    with pytest.raises(JournalError, match="not a journal line"):
        decode_entry(line)


def test_what_has_no_json_form_is_dropped_and_counted(path: Path) -> None:
    writer = JournalWriter(path)
    assert not writer.append({"socket": object()}, t=T, kind="health")
    assert not writer.append({"a": 1}, t=T)
    assert not writer.append(sample(1), t=math.nan)
    assert writer.append(sample(2), t=T)
    assert (writer.health.written, writer.health.dropped) == (1, 3)
    assert steps(path) == [2]


def test_nothing_is_opened_before_the_first_entry_and_close_may_repeat(path: Path) -> None:
    writer = JournalWriter(path)
    writer.close()
    assert not path.parent.exists()
    assert writer.append(sample(1), t=T)
    writer.close()
    writer.close()
    assert writer.append(sample(2), t=T)
    assert steps(path) == [1, 2]


@given(cut=st.integers(1, 400))
def test_a_torn_last_line_harms_only_itself(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal.jsonl"
    writer = JournalWriter(path)
    for step in range(3):
        writer.append(sample(step), t=T)
    writer.close()
    lines = path.read_bytes().splitlines(keepends=True)
    whole = path.read_bytes()[: max(0, path.stat().st_size - cut)]
    path.write_bytes(whole)
    kept = [step for step in range(3) if len(b"".join(lines[: step + 1])) - 1 <= len(whole)]
    assert steps(path) == kept
    following = JournalWriter(path)
    assert following.append(sample(9), t=T)
    journal = read_journal(path)
    assert [entry.record.step for entry in journal] == [*kept, 9]
    assert journal.skipped <= 1


def test_a_killed_writer_leaves_only_whole_lines_and_its_place_to_the_next(path: Path) -> None:
    code = (
        "import sys, itertools, pathlib\n"
        "from failslow.journal import JournalWriter\n"
        "from failslow.records import StepSample\n"
        "writer = JournalWriter(pathlib.Path(sys.argv[1]), max_bytes=100_000, keep=1000)\n"
        "for step in itertools.count():\n"
        "    assert writer.append(StepSample(step=step, duration_s=1.0, end_s=1.0), t=1.0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline_s = time.monotonic() + 60
    while not path.with_name("journal.jsonl.3").exists():
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.01)
    refused = JournalWriter(path)
    assert not refused.append(sample(0), t=T)
    assert "another process writes it" in refused.health.last_error
    process.send_signal(signal.SIGKILL)
    process.wait()
    following = JournalWriter(path, max_bytes=100_000, keep=1000)
    assert following.append(sample(-1), t=T)
    found = steps(path)
    assert found == [*range(len(found) - 1), -1]
    assert len(found) > 1_500


def test_rotation_keeps_the_newest_files_in_order(path: Path) -> None:
    size = len(encode_entry(sample(10), t=T)) + 1
    writer = JournalWriter(path, max_bytes=10 * size, keep=3)
    for step in range(10, 99):
        assert writer.append(sample(step), t=T)
    names = sorted(os.listdir(path.parent))
    assert names == ["journal.jsonl", *(f"journal.jsonl.{n}" for n in (1, 2, 3))]
    assert all((path.parent / name).stat().st_size <= 10 * size for name in names)
    assert steps(path) == list(range(60, 99))


def test_a_line_longer_than_a_file_may_be_is_still_written_whole(path: Path) -> None:
    writer = JournalWriter(path, max_bytes=10, keep=5)
    for step in range(3):
        assert writer.append(sample(step), t=T)
    assert steps(path) == [0, 1, 2]


def test_a_full_disk_is_counted_and_outlived(path: Path) -> None:
    writer = JournalWriter(path)
    size = len(encode_entry(sample(10), t=T)) + 1
    with file_size_limit(5 * size + size // 2):
        results = [writer.append(sample(step), t=T) for step in range(10, 20)]
    assert results == [True] * 5 + [False] * 5
    assert writer.health.dropped == 5
    assert writer.health.last_error
    assert writer.append(sample(20), t=T)
    assert steps(path) == [*range(10, 15), 20]
    assert read_journal(path).skipped == 0


def test_a_writer_of_a_full_device_never_raises(path: Path, monkeypatch: Any) -> None:
    full = lambda _, flags: os.open("/dev/full", flags)  # noqa: E731
    monkeypatch.setattr("failslow.journal.writer.open_own", full)
    writer = JournalWriter(path)
    assert not writer.append(sample(1), t=T)
    assert "No space left" in writer.health.last_error


def test_what_others_planted_is_not_written_to(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was\n")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    writer = JournalWriter(path)
    assert not writer.append(sample(1), t=T)
    assert "is no regular file; remove it" in writer.health.last_error
    path.unlink()
    os.mkfifo(path)  # nobody reads it: opening it as usual would never return
    assert not writer.append(sample(2), t=T)
    path.unlink()
    assert writer.append(sample(3), t=T)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")  # while it is written
    assert not writer.append(sample(4), t=T)
    assert victim.read_text() == "as it was\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files another's")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.chown(path, 12345, 12345)
    writer = JournalWriter(path)
    assert not writer.append(sample(1), t=T)
    assert "owned by user 12345, not 0" in writer.health.last_error
    assert not path.read_bytes()
    assert list(path.parent.glob(".owner*")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links another's")
def test_a_folder_that_another_user_exchanged_is_refused(path: Path, tmp_path: Path) -> None:
    writer = JournalWriter(path)
    assert writer.append(sample(1), t=T)
    path.parent.rename(tmp_path / "away")
    (tmp_path / "victim").mkdir()
    path.parent.symlink_to(tmp_path / "victim")
    os.chown(path.parent, 12345, 12345, follow_symlinks=False)
    assert not writer.append(sample(2), t=T)
    assert "is a link of user 12345" in writer.health.last_error
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_folder_that_cannot_be_made_never_raises(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    writer = JournalWriter(tmp_path / "plain" / "journal.jsonl")
    assert not writer.append(sample(1), t=T)
    assert writer.health.dropped == 1


def test_a_rotation_that_fails_loses_no_entry(path: Path) -> None:
    writer = JournalWriter(path, max_bytes=200, keep=1)
    writer.append(sample(0), t=T)
    blocker = path.with_name("journal.jsonl.1")
    blocker.mkdir()
    (blocker / "in the way").touch()
    for step in range(1, 5):
        assert writer.append(sample(step), t=T)
    assert "not rotated" in writer.health.last_error
    (blocker / "in the way").unlink()
    blocker.rmdir()
    assert writer.append(sample(5), t=T)
    assert steps(path) == list(range(6))


def test_a_journal_deleted_or_moved_by_somebody_is_begun_anew(path: Path) -> None:
    writer = JournalWriter(path)
    writer.append(sample(0), t=T)
    path.unlink()
    writer.append(sample(1), t=T)
    path.rename(path.with_name("kept.jsonl"))
    writer.append(sample(2), t=T)
    assert steps(path) == [2]
    assert steps(path.with_name("kept.jsonl")) == [1]


@pytest.mark.parametrize(("fsync_s", "flushes"), [(None, 0), (0.0, 6), (2.0, 3)])
def test_flushing_follows_the_policy(
    path: Path, fsync_s: float | None, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    fsync = os.fsync

    def counting(file: int) -> None:
        flushed.append(file)
        fsync(file)

    monkeypatch.setattr(os, "fsync", counting)
    writer = JournalWriter(path, fsync_s=fsync_s)
    for second in range(6):
        assert writer.append(sample(second), t=T + second)
    assert len(flushed) == flushes


@pytest.mark.parametrize("settings", [{"max_bytes": 0}, {"keep": 0}])
def test_settings_out_of_range_are_refused(path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(JournalError, match="must be at least 1"):
        JournalWriter(path, **settings)


def test_a_missing_journal_is_an_error_with_a_remedy(path: Path) -> None:
    with pytest.raises(JournalError, match=r"no journal there; give the journal\.jsonl"):
        read_journal(path)


def test_following_sees_every_entry_across_rotations_once(path: Path) -> None:
    stop = threading.Event()
    found: list[int] = []

    def follow() -> None:
        journal = read_journal(path, follow=True, stop=stop, poll_s=0.001)
        found.extend(entry.record.step for entry in journal)

    reader = threading.Thread(target=follow)
    reader.start()  # before there is a file
    writer = JournalWriter(path, max_bytes=5_000, keep=1_000)
    for step in range(4_000):
        assert writer.append(sample(step), t=T)
    stop.set()
    reader.join(60)
    assert found == list(range(4_000))


def test_following_waits_for_the_rest_of_a_line(path: Path) -> None:
    path.parent.mkdir()
    line = encode_entry(sample(7), t=T)
    path.write_bytes(line[:20])
    entries = iter(read_journal(path, follow=True, poll_s=0.01))
    found: list[JournalEntry] = []
    reader = threading.Thread(target=lambda: found.append(next(entries)))
    reader.start()
    reader.join(0.2)
    assert found == []
    with path.open("ab") as file:
        file.write(line[20:] + b"\n")
    reader.join(20)
    assert found[0].record == sample(7)


def test_a_slow_follower_that_fell_behind_goes_on_with_the_oldest_kept(path: Path) -> None:
    size = len(encode_entry(sample(10), t=T)) + 1
    writer = JournalWriter(path, max_bytes=10 * size, keep=2)
    stop = threading.Event()
    for step in range(10, 20):
        writer.append(sample(step), t=T)
    entries = iter(read_journal(path, follow=True, stop=stop, poll_s=0.001))
    assert next(entries).record.step == 10
    for step in range(20, 80):
        writer.append(sample(step), t=T)
    stop.set()
    assert [entry.record.step for entry in entries] == [*range(11, 20), *range(50, 80)]


def test_a_growing_journal_is_read_once_across_rotations(path: Path) -> None:
    growing = GrowingJournal(path)
    assert growing.refresh() == []  # before there is a file
    writer = JournalWriter(path, max_bytes=2_000, keep=1_000)
    taken = []
    for step in range(500):
        assert writer.append(sample(step), t=T)
        if step % 7 == 0:
            taken += [entry.record.step for entry in growing.refresh()]
    taken += [entry.record.step for entry in growing.refresh()]
    assert taken == list(range(500))
    assert [entry.record.step for entry in growing.entries] == taken
    assert growing.refresh() == []


def test_a_growing_journal_waits_for_the_rest_of_a_line(path: Path) -> None:
    path.parent.mkdir()
    line = encode_entry(sample(7), t=T)
    path.write_bytes(line[:20])
    growing = GrowingJournal(path)
    assert growing.refresh() == []
    with path.open("ab") as file:
        file.write(line[20:] + b"\nno entry\n")
    assert [entry.record for entry in growing.refresh()] == [sample(7)]


def test_a_growing_journal_that_is_emptied_in_place_is_read_from_its_start(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"".join(encode_entry(sample(step), t=T) + b"\n" for step in range(3)))
    growing = GrowingJournal(path)
    assert len(growing.refresh()) == 3
    path.write_bytes(encode_entry(sample(9), t=T) + b"\n")
    assert [entry.record.step for entry in growing.refresh()] == [9]


def test_a_growing_journal_that_fell_behind_goes_on_with_the_oldest_kept(path: Path) -> None:
    size = len(encode_entry(sample(10), t=T)) + 1
    writer = JournalWriter(path, max_bytes=10 * size, keep=2)
    growing = GrowingJournal(path)
    for step in range(10, 20):
        writer.append(sample(step), t=T)
    growing.refresh()
    for step in range(20, 80):
        writer.append(sample(step), t=T)
    assert [entry.record.step for entry in growing.refresh()] == list(range(50, 80))


def test_several_threads_may_write(path: Path) -> None:
    writer = JournalWriter(path, max_bytes=20_000, keep=100)

    def write(rank: int) -> None:
        for step in range(300):
            assert writer.append(sample(step), t=T, rank=rank)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = list(read_journal(path))
    for rank in range(4):
        assert [e.record.step for e in entries if e.rank == rank] == list(range(300))
