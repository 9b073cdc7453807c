"""Logs and traces -> `StepSeries`: one reader a format behind one registry.

In: paths of training logs. Out: a `StepSeries` a job. `read_log` detects the format from the
content; `readers()` lists what is known. Add a format: a module in `formats/` with a `READER`
(or `READERS`, where it knows several), its name in `registry.py`, a sample and a test.

    read_log("train.log").duration_s    # array([0.571, 0.569, ...]), seconds per iteration
"""

from __future__ import annotations

from failslow.ingest.base import Reader, SeriesBuilder, Source
from failslow.ingest.registry import detect_format, expand_paths, read_log, readers

__all__ = [
    "Reader",
    "SeriesBuilder",
    "Source",
    "detect_format",
    "expand_paths",
    "read_log",
    "readers",
]
