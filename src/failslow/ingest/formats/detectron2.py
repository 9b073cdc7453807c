"""detectron2: `metrics.json` and its printed log; maskrcnn-benchmark's log.

`metrics.json` has the median of the last 20 iterations; iterations count from 0:

    {"data_time": 0.008, "iteration": 19, "lr": 0.007, "time": 0.254, "total_loss": 1.92}

maskrcnn-benchmark prints the same median, and the mean of all iterations behind it:

    2019-03-02 10:11:12,345 maskrcnn_benchmark.trainer INFO: eta: 4:40:13  iter: 38060  loss: 0.5 (0.6)  time: 0.1679 (0.1806)  data: 0.0002 (0.0120)  lr: 0.02

detectron2 prints, as `time`, only the mean of all iterations, which hides what is slow now. The
line's clock (whole seconds, no year) has the truth, evaluation taken out; without a clock the
last iteration stands for the interval, or the mean is undone as far as its digits go:

    [07/27 12:54:51] d2.utils.events INFO:  eta: 4:40:13  iter: 199  total_loss: 1.2  time: 0.3123  last_time: 0.3050  data_time: 0.0101  lr: 0.002  max_mem: 2000M
"""  # noqa: E501 - the log's own lines

from __future__ import annotations

import re
from math import isnan

from failslow.ingest.base import NUMBER, SeriesBuilder, Source, parse_clock, split_prefix
from failslow.ingest.progress import (
    ElapsedRecords,
    clock_in,
    find_number,
    json_object,
    number,
    whole,
)

__all__ = ["READER", "Detectron2Reader"]

_LINE = re.compile(
    r"\biter: (?P<step>\d{1,18})\b.*?(?<![\w/])time: "
    rf"(?P<time>{NUMBER})(?P<mean> \({NUMBER}\))?\s"
)
_LAST = re.compile(rf"\blast_time: ({NUMBER})\s")
_DATA = re.compile(rf"(?<![\w/])data(?:_time)?: ({NUMBER})")
_CLOCK = re.compile(r"\[(\d\d)/(\d\d) (\d\d:\d\d:\d\d)[ \]]")
_EVALUATION = ("d2.evaluation", "Start inference", "inference")


class Detectron2Reader:
    """Reads detectron2's and maskrcnn-benchmark's logs."""

    name = "detectron2"
    summary = '{"data_time": 0.008, "iteration": 19, ..., "time": 0.254}'
    priority = 50

    def matches(self, line: str) -> bool:
        """A row of metrics.json, or a printed line with `iter` and `time`."""
        if '"iteration": ' in line:
            return '"time": ' in line
        return "iter: " in line and _LINE.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Medians as printed; the mean of all iterations only as a last resort."""
        printed: dict[str, _PrintedLog] = {}
        for line in source.lines():
            writer, rest = split_prefix(line)
            if '"iteration"' in rest:
                _add_row(rest, builder, writer)
                continue
            match = _LINE.search(rest) if "iter: " in rest else None
            own = printed.get(writer)
            if match is None:
                if own is not None:
                    own.other(rest)
            elif match["mean"]:
                builder.add(
                    step=int(match["step"]),
                    duration_s=float(match["time"]),
                    clock_s=clock_in(rest),
                    data_s=find_number(_DATA, rest),
                    writer=writer,
                )
            else:
                own = printed.setdefault(writer, _PrintedLog(builder, writer))
                own.training(rest, int(match["step"]), match["time"])
        for own in printed.values():
            own.close()


def _add_row(text: str, builder: SeriesBuilder, writer: str) -> None:
    row = json_object(text)
    if row is None:
        builder.warn("a line that is no whole JSON record was skipped")
        return
    step = whole(row.get("iteration"))
    if step is not None and "time" in row:  # rows of evaluation have none
        builder.add(
            step=step,
            duration_s=number(row["time"]),
            data_s=number(row.get("data_time")),
            writer=writer,
        )


class _PrintedLog:
    """detectron2's printed lines, whose `time` is the mean since the start."""

    def __init__(self, builder: SeriesBuilder, writer: str) -> None:
        self._builder, self._writer = builder, writer
        self._records = ElapsedRecords(builder, writer)
        self._step = -1
        self._evaluated_s: list[float] = []

    def other(self, line: str) -> None:
        """Evaluation speaks between two training lines: how long it did is no iteration's time."""
        if any(word in line for word in _EVALUATION):
            clock_s = _clock(line)
            if clock_s is not None:
                self._evaluated_s.append(clock_s)

    def training(self, line: str, step: int, mean: str) -> None:
        if step == self._step:  # the same line again
            return
        clock_s = _clock(line)
        data_s = find_number(_DATA, line)
        last_s = find_number(_LAST, line)
        count = step + 1
        digits = len(mean.partition(".")[2])
        elapsed_s = float(mean) * count if clock_s is None else clock_s
        resolution_s = 10.0**-digits * count if clock_s is None else 1.0
        if clock_s is None and not isnan(last_s):
            self._builder.add(step=step, duration_s=last_s, data_s=data_s, writer=self._writer)
        elif step < self._step:
            self._records.restart(step, elapsed_s)
        else:
            if self._evaluated_s:
                self._records.pause(self._evaluated_s[-1] - self._evaluated_s[0])
            self._records.point(step, elapsed_s, resolution_s=resolution_s, data_s=data_s)
        self._step, self._evaluated_s = step, []

    def close(self) -> None:
        self._records.close()


def _clock(line: str) -> float | None:
    """Seconds since New Year: the log does not print the year."""
    match = _CLOCK.search(line)
    if match is None:
        return None
    return parse_clock(f"1970-{match[1]}-{match[2]} {match[3]}")


READER = Detectron2Reader()
