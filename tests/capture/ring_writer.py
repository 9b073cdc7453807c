"""Rings for tests: made here, or filled by a process as fast as it can until it is killed.

`python ring_writer.py FOLDER CAPACITY COUNT`: COUNT 0 runs until killed. Each record's fields
are functions of its number, so that a reader can tell a whole one from a torn one.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from failslow.capture.layout import CALL
from failslow.capture.ring import RingWriter


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
        [sys.executable, __file__, str(folder), str(capacity), str(count)],
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


def main() -> None:
    folder, capacity, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    writer = RingWriter.create(
        job="writer",
        rank=0,
        world_size=1,
        description={},
        capacity=capacity,
        environ={**os.environ, "FAILSLOW_CAPTURE_FOLDER": folder},
    )
    for n in range(1, count + 1) if count else itertools.count(1):
        writer.append(
            n, n + 1, n + 2, 3 * n, n % 1000, n % 7, n % 5, 2, n % 21, CALL, n % 15, 0, n % 100
        )
        if n % 20_000 == 0:
            time.sleep(0.001)  # two cores are shared with the reader
    print("done", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
