"""One worker's iterations from its call records, by the best source there is.

In: call records of one rank in the order it made them, in blocks of any size. Out: a
`StepSample` an iteration, and what is known of the source:

    tracker = Tracker(ops=reader.description["ops"])
    batch = reader.read()
    for sample in tracker.update(batch.records, lost=batch.lost):
        ...                      # StepSample(step=41, duration_s=0.0601, end_s=81.23, ...)
    tracker.state                # TrackState(phase="locked", source="optimizer", ...)

The sources, best first: the trainer's own step marks, torch's optimizer hook, the period of the
call stream. Pure: no clock, no torch, and the same samples however the records are divided.

What calls alone cannot tell, a mark can: micro-batches that all reduce gradients, in a job that
makes no other call at its step, look like iterations; so does a short evaluation after every
second iteration look like part of it once it makes a quarter of the calls; a job that replays
CUDA graphs makes none. A unit of one or two calls is followed from its 9th repeat, but its
samples are held until the 65th, lest it be a loop inside an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from failslow.config import TrackConfig
from failslow.records import KIND_CALL, KIND_PAUSE, KIND_TRAINER_STEP, StepSample
from failslow.track.follow import Crossing, crossings
from failslow.track.marks import MarkFollower
from failslow.track.rows import RowMaker, Rows
from failslow.track.samples import SampleMaker
from failslow.track.stream import PeriodFollower
from failslow.track.units import OpKinds

__all__ = ["Anchor", "Source", "TrackState", "Tracker"]

Source = Literal["step", "optimizer", "period"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The call whose return to its caller is taken for the boundary."""

    op: str
    group: int
    group_size: int
    size_bytes: int
    position: int
    """Index in the period."""
    unique: bool
    """It occurs once in a period, so that it is known without its position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackState:
    """How a worker's iterations are told apart at the moment."""

    phase: Literal["searching", "locked"]
    source: Source | None
    """None while searching."""
    period_calls: int | None
    """Collectives an iteration makes; None unknown."""
    anchor: Anchor | None
    """Of source "period" only."""
    run: int
    """Grows when iterations stop being comparable: another program or another source."""
    iterations: int
    """Samples given so far."""
    calls: int
    """Collectives seen so far."""
    lost_records: int
    note: str = ""
    """What a user should know or do, "" nothing."""


class Tracker:
    """Follows one rank. ops: names of the op codes, those of torch's c10d dispatcher."""

    def __init__(self, *, ops: Sequence[str], config: TrackConfig | None = None) -> None:
        self._config = config or TrackConfig()
        self._names = tuple(ops)
        self._ops = OpKinds.of(ops)
        self._maker = RowMaker()
        self._samples = SampleMaker()
        self._marks = {"step": MarkFollower(), "optimizer": MarkFollower()}
        self._last_boundary: dict[str, Crossing] = {}
        self._period = PeriodFollower(self._ops, self._config.buffer_calls)
        self._source: Source | None = None
        self._series: tuple[str, int] | None = None
        self._calls = self._iterations = self._lost = 0

    def update(
        self,
        calls: NDArray[Any],
        *,
        lost: int = 0,
        pauses: Sequence[tuple[float, float]] = (),
    ) -> list[StepSample]:
        """The iterations that ended in `calls`.

        calls: structured array with at least the columns of `CALL_COLUMNS`; of records of kind
        pause the iterations are left out, other kinds are passed over. lost: records missing just
        before it. pauses: (start_s, end_s) on the records' clock to leave out of the iterations;
        to be told no later than with the records that follow them. Samples end on that clock too.
        """
        for start_s, end_s in pauses:
            self._samples.pause(start_s, end_s)
        for row in calls[calls["kind"] == KIND_PAUSE]:
            self._samples.stood(int(row["start_ns"]), int(row["end_ns"]))
        if lost:
            self._lost += lost
            self._period.lose()
            for marks in self._marks.values():
                marks.lose()
        rows = self._maker.rows(calls)
        samples: list[StepSample] = []
        begin = 0
        for mark in np.flatnonzero(rows["kind"] != KIND_CALL).tolist():
            samples += self._take_calls(rows[begin:mark])
            samples += self._take_mark(rows[mark : mark + 1])
            begin = mark + 1
        samples += self._take_calls(rows[begin:])
        self._iterations += len(samples)
        return samples

    def finish(self) -> list[StepSample]:
        """The iterations held back as unsure, now that no record will follow."""
        samples: list[StepSample] = []
        if self._source is None:
            for generation, crossing in self._period.finish():
                samples += self._cross(("period", generation), crossing)
        self._iterations += len(samples)
        return samples

    @property
    def state(self) -> TrackState:
        """What is known now."""
        source = self._source
        unit = self._period.unit
        if source is None and self._period.locked:
            source = "period"
        anchor = None
        period_calls: int | None = None
        if source == "period" and unit is not None:
            row = unit.rows[unit.anchor]
            period_calls = len(unit.keys)
            anchor = Anchor(
                op=self._names[row["op"]] if row["op"] < len(self._names) else str(row["op"]),
                group=int(row["group"]),
                group_size=int(row["group_size"]),
                size_bytes=int(row["size_bytes"]),
                position=unit.anchor,
                unique=unit.anchor_occurs_once,
            )
        elif source is not None:
            period_calls = self._marks[source].usual_calls
        return TrackState(
            phase="searching" if source is None else "locked",
            source=source,
            period_calls=period_calls,
            anchor=anchor,
            run=self._samples.run,
            iterations=self._iterations,
            calls=self._calls,
            lost_records=self._lost,
            note=self._note(source),
        )

    def _note(self, source: Source | None) -> str:
        if source in ("step", "optimizer") and self._calls == 0:
            return (
                "iterations make no collective calls that can be seen (CUDA graphs replay none): "
                "times come from step marks alone"
            )
        if source == "optimizer" and self._marks[source].wavers:
            return (
                "optimizers come and go or step irregularly, so that iterations hardly compare; "
                "mark them with failslow.step()"
            )
        if source is None and self._period.buffered >= self._config.buffer_calls // 2:
            return (
                f"no iteration repeats within {self._config.buffer_calls} calls; mark iterations "
                "with failslow.step(), or raise buffer_calls"
            )
        return ""

    def _take_calls(self, rows: Rows) -> list[StepSample]:
        if not len(rows):
            return []
        self._calls = int(rows["calls"][-1]) + 1
        ends_at = max(marks.ends_at_calls for marks in self._marks.values())
        if self._calls <= ends_at:
            return []  # marks are there, or one was: the next will tell more than calls can
        if ends_at:
            rows = rows[len(rows) - (self._calls - ends_at) :]
            self._forget_marks()
        samples: list[StepSample] = []
        for generation, crossing in self._period.feed(rows):
            samples += self._cross(("period", generation), crossing)
        return samples

    def _forget_marks(self) -> None:
        self._source = None
        self._marks = {"step": MarkFollower(), "optimizer": MarkFollower()}
        self._last_boundary.clear()

    def _take_mark(self, rows: Rows) -> list[StepSample]:
        """A mark counts once it has bounded an iteration, if no better source is in use."""
        is_step = int(rows["kind"][0]) == KIND_TRAINER_STEP
        source: Source = "step" if is_step else "optimizer"
        if source == "optimizer" and self._source == "step":
            return []
        if self._period.fed:
            self._period = PeriodFollower(self._ops, self._config.buffer_calls)
        marks, value = self._marks[source], int(rows["size_bytes"][0])
        at = crossings(rows)[0]._replace(work=int(rows["work"][0]))
        crossing = marks.mark(at, 0 if is_step else value)
        if crossing is None:
            return []
        before = self._last_boundary.get(source)
        self._last_boundary[source] = crossing
        step = value if is_step and value >= 0 else None
        series = (source, marks.boundary or 0)
        if self._source == source:
            return self._cross(series, crossing, step)
        if not marks.locked or before is None:
            return []
        self._source = source
        if before.at_ns >= self._samples.last_ns:  # else it was timed by another source
            self._cross(series, before, None if step is None else step - 1)
        return self._cross(series, crossing, step)

    def _cross(
        self, series: tuple[str, int], crossing: Crossing, step: int | None = None
    ) -> list[StepSample]:
        if series != self._series:
            self._series = series
            self._samples.new_run()
            crossing = crossing._replace(opens=True)
        return self._samples.add([crossing], step=step)
