"""What failslow says inside a training process: one line on stderr, and never at the job's cost.

In: a text. Out: the line, or nothing where stderr is closed, full or broken; no exception:

    failslow: this worker is not watched: no room for a ring: /dev/shm: No space left on device
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Write `failslow: text`; never raises."""
    line = f"failslow: {text}\n"
    with contextlib.suppress(Exception):
        stream = sys.stderr
        if stream is None:  # closed when Python started: descriptor 2 may be anything by now
            return
        try:
            handle = stream.fileno()
        except Exception:  # a notebook's, a test's
            stream.write(line)
            return
        # past Python's buffer: what cannot be written would stay there, and exit with code 120
        os.write(handle, line.encode(errors="replace"))
