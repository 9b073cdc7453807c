"""Seconds per iteration where a log prints a rate: samples/s or tokens/s.

In: rates, with the work of an iteration where the header states it. Out: records in the builder.
What the header does not say the log's clock does: work = rate · seconds passed / iterations.

    records.add(step=20, rate=171.41, clock_s=1681782426.6, stated=128.0)   # -> 0.7467 s
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from failslow.ingest.base import NAN, SeriesBuilder

__all__ = ["RateRecords", "work_by_clock"]

_TRUST = 1.25
"""Stated work that is off from what the clock says by more than this factor is another unit."""
_COARSE = 100
"""Whole-number rates below this many units move in steps of over 1 %."""


@dataclass(frozen=True, slots=True)
class _Rate:
    step: int
    rate: float
    clock_s: float
    stated: float
    work: float
    step_size: float
    writer: str


class RateRecords:
    """Collects rates and hands them to a builder as durations, run by run.

    unit: what the rate counts ("samples"), for warnings. whole: an iteration's work is a whole
    number of units. Call `flush` after the last record.
    """

    def __init__(self, builder: SeriesBuilder, unit: str, *, whole: bool) -> None:
        self._builder, self._unit, self._whole = builder, unit, whole
        self._records: list[_Rate] = []

    def add(
        self,
        *,
        step: int,
        rate: float,
        clock_s: float = NAN,
        stated: float = NAN,
        work: float = NAN,
        step_size: float = 1.0,
        writer: str = "",
    ) -> None:
        """A rate over the iterations up to `step`.

        stated: what the rate counts in one iteration, as the header says. work: passed on; NaN:
        what the rate counts. step_size: how much `step` grows in an iteration.
        """
        self._records.append(_Rate(step, rate, clock_s, stated, work, step_size, writer))

    def new_run(self, note: str, *, config_changed: bool = False) -> None:
        """The records before this belong to an earlier run."""
        self.flush()
        self._builder.new_run(note, config_changed=config_changed)

    def flush(self) -> None:
        """Hand all records so far to the builder."""
        rows: dict[str, list[int]] = defaultdict(list)
        for row, record in enumerate(self._records):
            rows[record.writer].append(row)
        converted: dict[int, tuple[float, int, float]] = {}
        for own in rows.values():
            converted.update(zip(own, self._convert([self._records[r] for r in own]), strict=True))
        # in the order of the file, which tells ranks side by side from a restart elsewhere
        for row, record in enumerate(self._records):
            duration_s, iterations, work = converted[row]
            self._builder.add(
                step=record.step,
                duration_s=duration_s,
                iterations=iterations,
                clock_s=record.clock_s,
                work=work if math.isnan(record.work) else record.work,
                writer=record.writer,
            )
        self._records.clear()

    def _convert(self, records: list[_Rate]) -> Iterator[tuple[float, int, float]]:
        """(seconds per iteration, iterations or 0, work) of each record of one writer."""
        step = np.array([record.step for record in records], np.int64)
        rate = np.array([record.rate for record in records])
        clock_s = np.array([record.clock_s for record in records])
        size, stated = records[0].step_size, records[0].stated
        by_clock = work_by_clock(rate, step / size, clock_s)
        if not stated > 0 or not stated / _TRUST < by_clock < stated * _TRUST:
            stated = stated if math.isnan(by_clock) else by_clock
            if self._whole and stated >= 2:
                stated = round(stated)
        if not stated > 0:
            self._builder.warn(
                f"neither the work of an iteration nor a clock is in the log: times are seconds "
                f"per {self._unit}"
            )
        with np.errstate(divide="ignore"):
            duration_s = (stated if stated > 0 else 1.0) / rate
        if stated > 0 and np.median(rate) < _COARSE and bool((rate == np.rint(rate)).all()):
            duration_s = self._by_differences(duration_s, step / size, clock_s)
        iterations = np.zeros(len(step), np.int64)
        if size != 1:
            iterations[1:] = np.rint(np.diff(step) / size).clip(min=0)
            iterations[0] = min(iterations[1] if len(step) > 1 else 1, max(1, step[0] / size))
        work = np.full(len(step), stated if stated > 0 else NAN)
        return zip(duration_s.tolist(), iterations.tolist(), work.tolist(), strict=True)

    def _by_differences(
        self,
        duration_s: NDArray[np.float64],
        progress: NDArray[np.float64],
        clock_s: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Durations from the clock, where it has them, for a rate of too few digits."""
        passed, grown = np.diff(clock_s), np.diff(progress)
        usable = (passed > 0) & (grown > 0)
        if usable.any():
            self._builder.warn(
                f"{self._unit}/s is printed with too few digits: times are differences of the "
                f"log's clock"
            )
        result = duration_s.copy()
        result[1:][usable] = passed[usable] / grown[usable]
        return result


def work_by_clock(
    rate: NDArray[np.float64], progress: NDArray[np.float64], clock_s: NDArray[np.float64]
) -> float:
    """Work per iteration from rates (work/s) and the log's clock; NaN when the clock is silent.

    The median over the records of rate · clock difference / iterations.
    """
    grown, passed = np.diff(progress), np.diff(clock_s)
    usable = (grown > 0) & (passed > 0) & np.isfinite(rate[1:]) & (rate[1:] > 0)
    if not usable.any():
        return NAN
    return float(np.median(rate[1:][usable] * passed[usable] / grown[usable]))
