"""TensorBoard event files, read with the `tensorboard` package (the extra `failslow[tensorboard]`).

A file `events.out.tfevents.1700000000.host.123.0` is a sequence of checksummed records; the first
holds the text `brain.Event:2`, the others scalars such as

    wall_time: 1700000012.5  step: 20  tag: "iteration-time"  value: 0.571

Where a scalar is a known step time, its values are the durations. Else the wall times of the
training scalar with the most points are: their differences also hold what happened in between
(evaluation, checkpoints), and a warning says so.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from failslow.errors import InputError, MissingDependencyError
from failslow.ingest.base import NAN, SeriesBuilder, Source

__all__ = ["READER", "TensorboardReader"]

_STEP_TIMES = (
    "iteration-time",  # Megatron-LM
    "train_step_timing in s",  # NeMo
    "time_metrics/end_to_end(s)",  # torchtitan
    "perf/step_time",
    "perf/time_per_step",  # verl
    "timing_s/step",
    "train/step_time",
    "step_time",
    "train/time",  # mmengine
    "time",  # mmcv, detectron2
)
_DATA_TIMES = ("time_metrics/data_loading(s)", "train/data_time", "data_time")
_NOT_TRAINING = ("val", "test", "eval", "dev", "valid", "validation")
_CLOCK_WARNING = (
    "no scalar of step times in it: times are differences of the wall times of {!r}, so "
    "evaluation and checkpoints in between count"
)


class _Point(NamedTuple):
    step: int
    wall_s: float
    value: float


class TensorboardReader:
    """Reads TensorBoard event files."""

    name = "tensorboard"
    summary = "events.out.tfevents.1700000000.host.123.0 (binary)"
    priority = 60

    def matches(self, line: str) -> bool:
        """The version that the first record of an event file holds."""
        return "brain.Event:" in line

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Raises MissingDependencyError without `tensorboard`, InputError without scalars."""
        scalars = _scalars(source)
        data_s = {point.step: point.value for tag in _DATA_TIMES for point in scalars.get(tag, ())}
        timed = next((tag for tag in _STEP_TIMES if tag in scalars), None)
        if timed is not None:
            for point in scalars[timed]:
                builder.add(
                    step=point.step,
                    duration_s=point.value,
                    clock_s=point.wall_s,
                    data_s=data_s.get(point.step, NAN),
                )
            return
        training = [tag for tag in scalars if tag.split("/")[0].lower() not in _NOT_TRAINING]
        if not training:
            raise InputError(
                f"{source.name}: no scalar of training in it; its scalars: "
                f"{', '.join(sorted(scalars)) or 'none'}"
            )
        tag = max(training, key=lambda name: (len(scalars[name]), "loss" in name, name))
        builder.warn(_CLOCK_WARNING.format(tag))
        before: _Point | None = None
        for point in scalars[tag]:
            if before is not None and point.step > before.step:
                iterations = point.step - before.step
                builder.add(
                    step=point.step,
                    duration_s=(point.wall_s - before.wall_s) / iterations,
                    iterations=iterations,
                    clock_s=point.wall_s,
                )
            elif before is not None:
                builder.new_run(f"steps restart at {point.step}")
            before = point


@contextmanager
def _plain_file(source: Source) -> Iterator[str]:
    """A path to the events as they were written: `tensorboard` reads neither pipes nor gzip."""
    with tempfile.NamedTemporaryFile(prefix="events.out.tfevents.") as copy:
        with source.open() as raw:
            shutil.copyfileobj(raw, copy)
        copy.flush()
        yield copy.name


def _scalars(source: Source) -> dict[str, list[_Point]]:
    """Every scalar's points in the order they were written."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise MissingDependencyError(
            f"{source.name}: reading TensorBoard event files needs tensorboard; "
            f"pip install 'failslow[tensorboard]'"
        ) from None
    found: dict[str, list[_Point]] = {}
    with _plain_file(source) as path:
        for event in EventFileLoader(path).Load():
            for value in event.summary.value:
                scalar = _scalar(value, make_ndarray)
                if scalar is not None:
                    point = _Point(event.step, event.wall_time, scalar)
                    found.setdefault(value.tag, []).append(point)
    return found


def _scalar(value: Any, make_ndarray: Any) -> float | None:
    """The number of a summary value; None for histograms, images and text."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name != "scalars":
        return None
    array = make_ndarray(value.tensor)
    return float(array.reshape(-1)[0]) if array.size == 1 else None


READER = TensorboardReader()
