"""A process that appends to a ring as fast as it can, for the tests that kill it.

`python ring_writer.py FOLDER CAPACITY COUNT`: COUNT 0 runs until killed. Each record's fields
are functions of its number, so that a reader can tell a whole one from a torn one.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

from failslow.capture.layout import CALL
from failslow.capture.ring import RingWriter


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
