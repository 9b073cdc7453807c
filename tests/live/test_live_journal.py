"""Reading a journal for a live view: quickly when it is long, and on when it is emptied."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from failslow.journal import JournalEntry, JournalWriter, read_journal
from failslow.records import StepSample


def sample(step: int) -> StepSample:
    return StepSample(step=step, duration_s=0.1, end_s=0.1 * step)


def write(path: Path, *, max_bytes: int) -> list[tuple[str, int]]:
    """1,000 steps with a health record before every 100th; what was written, in short."""
    writer = JournalWriter(path, max_bytes=max_bytes, keep=50)
    written = []
    for step in range(1000):
        if step % 100 == 0:
            writer.append({"n": step}, t=step, kind="health")
            written.append(("health", step))
        writer.append(sample(step), t=step, rank=step % 4)
        written.append(("step", step))
    writer.close()
    return written


def short(entries: list[JournalEntry]) -> list[tuple[str, int]]:
    return [(e.kind, e.record["n"] if e.kind == "health" else e.record.step) for e in entries]


def test_steps_far_from_the_end_are_passed_over_but_for_the_first_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for max_bytes in (1 << 20, 10_000):
        for old in tmp_path.iterdir():
            old.unlink()
        written = write(path, max_bytes=max_bytes)
        line = len(path.read_bytes().splitlines()[-1])
        found = short(list(read_journal(path, all_steps_bytes=150 * line)))
        everything = short(list(read_journal(path, all_steps_bytes=1 << 30)))

        assert everything == written
        far = [item for item in found if item[1] < 800]
        firsts = [(kind, n) for n in range(0, 800, 100) for kind in ("health", "step")]
        assert far == firsts
        assert found[-145:] == written[-145:]
        assert found == [item for item in written if item in set(found)]


def test_a_journal_emptied_in_place_is_followed_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    for step in range(50):
        writer.append(sample(step), t=step)
    stop = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        entries = read_journal(path, follow=True, stop=stop, poll_s=0.01)
        seen.extend(entry.record.step for entry in entries)

    thread = threading.Thread(target=follow)
    thread.start()
    deadline = time.monotonic() + 30
    try:
        while len(seen) < 50 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.truncate(path, 0)
        for step in range(100, 103):
            writer.append(sample(step), t=step)
        while len(seen) < 53 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()

    assert seen == [*range(50), 100, 101, 102]
