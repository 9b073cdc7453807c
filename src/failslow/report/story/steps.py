"""The steps of a long journal, read fast: a million lines in seconds.

In: raw lines of kind "step". Out: columns of the job's iterations, and what each worker said of
itself. Where a journal is long only some of each worker's lines are read: they are nearly all of
it, and each sums up about a second.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

__all__ = ["JobColumns", "StepLines", "WorkerColumns", "is_step"]

Floats = NDArray[np.float64]
_STEP, _RANK, _WITHIN = b'"kind":"step"', b'"rank":', 64
"""The writer puts kind and rank near a line's begin."""
_RANK_NUMBER = re.compile(rb'"rank":(\d+)')
_BATCH = 2000


def is_step(line: bytes) -> bool:
    """Whether it is one of these, without reading it."""
    return _STEP in line[:_WITHIN]


@dataclass(slots=True)
class JobColumns:
    """The job's iterations, as they came."""

    t: array[float] = field(default_factory=lambda: array("d"))
    step: array[int] = field(default_factory=lambda: array("q"))
    duration_s: array[float] = field(default_factory=lambda: array("d"))
    iterations: array[int] = field(default_factory=lambda: array("q"))
    work: array[float] = field(default_factory=lambda: array("d"))
    data_s: array[float] = field(default_factory=lambda: array("d"))
    healthy_s: array[float] = field(default_factory=lambda: array("d"))
    run: array[int] = field(default_factory=lambda: array("q"))
    foreign: array[int] = field(default_factory=lambda: array("q"))
    start: array[int] = field(default_factory=lambda: array("q"))
    """Which start of the job it belongs to."""

    def __len__(self) -> int:
        return len(self.t)

    def add(self, found: Mapping[str, Any], start: int) -> None:
        """One line. Raises KeyError, TypeError or ValueError and leaves the columns as they are."""
        t, duration_s, step = float(found["t"]), float(found["duration_s"]), int(found["step"])
        iterations = int(found.get("iterations", 1))
        run, foreign = int(found.get("run", 0)), int(found.get("foreign_calls") or 0)
        work, data_s = _number(found.get("work")), _number(found.get("data_s"))
        healthy_s = _number(found.get("healthy_s"))
        if not (0.0 < duration_s < 1e300 and iterations >= 1 and -1e12 < t < 1e12):
            raise ValueError("no iteration")
        self.t.append(t)
        self.step.append(step)
        self.duration_s.append(duration_s)
        self.iterations.append(iterations)
        self.work.append(work)
        self.data_s.append(data_s)
        self.healthy_s.append(healthy_s)
        self.run.append(run)
        self.foreign.append(foreign)
        self.start.append(start)


@dataclass(slots=True)
class WorkerColumns:
    """One worker's records: each the mean over its iterations since the one before."""

    node: str = ""
    """The latest."""
    nodes: dict[str, None] = field(default_factory=dict)
    """All it has been on, in order."""
    iterations: int = 0
    t: array[float] = field(default_factory=lambda: array("d"))
    compute_s: array[float] = field(default_factory=lambda: array("d"))
    steps: JobColumns = field(default_factory=JobColumns)
    """Kept while the job has no lines of its own."""


class StepLines:
    """Takes raw step lines in any order.

    stride: of a worker's lines only one in `stride` is read.
    """

    def __init__(self, stride: int = 1) -> None:
        self.job = JobColumns()
        self.workers: dict[int, WorkerColumns] = {}
        self.skipped = 0
        self.unknown = 0
        self.last_t = float("-inf")
        self.first_t = float("inf")
        self._stride = stride
        self._seen: dict[bytes, int] = {}
        self._batch: list[bytes] = []
        self.start = 0
        """Starts of the job so far."""

    def take(self, line: bytes) -> None:
        """A line that `is_step`."""
        if self._stride > 1 and _RANK in line[:_WITHIN]:
            number = _RANK_NUMBER.search(line)
            rank = number[1] if number else b""
            seen = self._seen.get(rank, -1) + 1
            self._seen[rank] = seen
            if seen % self._stride:
                return
        self._batch.append(line)
        if len(self._batch) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Read what is waiting; `start` counts for all of it."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        try:
            found: Iterable[Any] = from_json(b"[" + b",".join(batch) + b"]", cache_strings="keys")
        except ValueError:
            found = self._one_by_one(batch)
        for record in found:
            self._record(record)

    def _one_by_one(self, batch: list[bytes]) -> list[Any]:
        found = [_parsed(line) for line in batch]
        self.skipped += found.count(None)
        return [record for record in found if record is not None]

    def _record(self, found: Mapping[str, Any]) -> None:
        try:
            rank = found.get("rank")
            if rank is None:
                self.job.add(found, self.start)
            else:
                self._worker(int(rank), found)
            t = float(found["t"])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            self.unknown += 1  # another version's
            return
        self.last_t, self.first_t = max(self.last_t, t), min(self.first_t, t)

    def _worker(self, rank: int, found: Mapping[str, Any]) -> None:
        worker = self.workers.get(rank)
        if worker is None:
            worker = self.workers[rank] = WorkerColumns()
        t, iterations = float(found["t"]), int(found.get("iterations", 1))
        compute_s = _number(found.get("compute_s"))
        if not len(self.job):
            worker.steps.add(found, self.start)
        worker.node = str(found.get("node") or worker.node)
        worker.nodes[worker.node] = None
        worker.iterations += iterations * self._stride
        worker.t.append(t)
        worker.compute_s.append(compute_s)


def _parsed(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError:
        return None  # cut short by a crash


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
