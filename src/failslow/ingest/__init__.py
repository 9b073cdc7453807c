"""Logs and traces -> `StepSeries`: one reader a format behind one registry.

In: paths of training logs. Out: a `StepSeries` a job. `read_log` detects the format from the
content; `readers()` lists what is known. Add a format: a module in `formats/` with a `READER`,
its name here, a sample and a test.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from failslow.ingest.base import Reader, SeriesBuilder, Source

__all__ = ["Reader", "SeriesBuilder", "Source", "readers"]

_FORMATS = (
    "megatron",
    "deepspeed",
    "mllog",
    "torchtitan",
    "nanogpt",
    "llmc",
    "modded_nanogpt",
    "hf_trainer",
    "llamafactory",
    "mmengine",
    "detectron2",
    "meters",
    "mxnet",
    "paddle",
    "fairseq",
    "lightning",
    "tensorboard",
    "table",
    "journal",
)


@cache
def readers() -> tuple[Reader, ...]:
    """Every reader, in the order of the registry."""
    return tuple(import_module(f"failslow.ingest.formats.{name}").READER for name in _FORMATS)
