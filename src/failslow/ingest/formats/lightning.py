"""NeMo and PyTorch Lightning: progress bars, NeMo's lines, DLLogger and the CSV logger.

    Epoch 0: :   1%|▏     | 57/4900 [10:58<15:32:28, v_num=qhyq, reduced_train_loss=6.830, global_step=56.00, consumed_samples=7296.0, train_step_timing in s=11.30]
    Training epoch 0, iteration 1/249 | lr: 3.9e-06 | global_batch_size: 8 | global_step: 1 | reduced_train_loss: 1.653 | train_step_timing in s: 2.505 | consumed_samples: 16
    DLLL {"timestamp": "1739210331.717398", "step": 16, "data": {"global_step": 16.0, "consumed_samples": 34272.0, "train_step_timing in s": 92.28738164901733}}
    epoch,step,train_step_timing in s,val_loss

A bar rounds to three digits (`global_step=2e+3`), so the step comes from its count. It is redrawn
on validation too; a redraw of the same step is no new record. A plain Lightning bar without
`train_step_timing in s` has only the time since the epoch began, in whole seconds:

    Epoch 1:  12%|█▏    | 120/1000 [02:03<15:01,  0.97it/s, v_num=3, train_loss=2.1]
"""  # noqa: E501 - the log's own lines

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isnan

from failslow.ingest.base import NAN, NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import (
    Bar,
    ElapsedRecords,
    EpochSteps,
    clock_in,
    find_number,
    number,
    one_writer,
    parse_bar,
    whole,
)

__all__ = ["READER", "LightningReader"]

_KEY = "train_step_timing in s"
_TIMING = re.compile(rf'{_KEY}"?\s*[:=]\s*({NUMBER})')
_STEP = re.compile(rf'\bglobal_step"?\s*[:=]\s*({NUMBER})')
_BATCH = re.compile(r"\bglobal_batch_size: (\d{1,12})")
_TIMESTAMP = re.compile(r'"timestamp": "(\d+\.\d+)"')
_EPOCH = re.compile(r"Epoch (\d{1,9})")


class LightningReader:
    """Reads NeMo's and PyTorch Lightning's logs."""

    name = "lightning"
    summary = "Epoch 0:  1%| | 57/4900 [10:58<..., global_step=56.00, train_step_timing in s=11.30]"
    priority = 50

    def matches(self, line: str) -> bool:
        """A step's timing, the header of a CSV log that has one, or an epoch's bar."""
        if _KEY in line:
            return _TIMING.search(line) is not None or _is_header(line)
        return "Epoch " in line and "%|" in line and _epoch_bar(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Timed lines where there are any, else the bars' elapsed time."""
        lines = source.lines()
        timed = _TimedLines(builder)
        plain: dict[str, list[tuple[int, Bar]]] = {}
        for line, following in _with_next(lines):
            writer, rest = split_prefix(line)
            if _KEY in rest and _is_header(rest):
                _read_csv(rest, chain((following or "",), lines), builder)
                return
            placed = _epoch_bar(rest) if "%|" in rest else None
            match = _TIMING.search(rest) if _KEY in rest else None
            if match is None:
                if placed is not None:
                    plain.setdefault(writer, []).append(placed)
            elif following is not None or match.end() < len(rest):  # else it may be cut short
                timed.add(rest, float(match[1]), placed, writer)
        if plain and not len(builder):
            told = {writer: len(bars) for writer, bars in plain.items()}
            _read_bars(plain[one_writer(told, builder)], builder)


def _with_next(lines: Iterator[str]) -> Iterator[tuple[str, str | None]]:
    """Each line with the one after it; None after the last."""
    line = next(lines, None)
    while line is not None:
        following = next(lines, None)
        yield line, following
        line = following


class _TimedLines:
    """Lines with `train_step_timing in s`; a step redrawn is added once."""

    def __init__(self, builder: SeriesBuilder) -> None:
        self._builder = builder
        self._seen: dict[str, tuple[int, float]] = {}
        self._counters: dict[str, EpochSteps] = {}

    def add(
        self, line: str, duration_s: float, placed: tuple[int, Bar] | None, writer: str
    ) -> None:
        if placed is not None:
            epoch, bar = placed
            counter = self._counters.setdefault(writer, EpochSteps())
            step: int | None = counter.step(epoch, bar.count, bar.total)
        else:
            step = whole(find_number(_STEP, line))
        if step is None or self._seen.get(writer) == (step, duration_s):
            return
        self._seen[writer] = (step, duration_s)
        timestamp_s = find_number(_TIMESTAMP, line)
        self._builder.add(
            step=step,
            duration_s=duration_s,
            clock_s=clock_in(line) if isnan(timestamp_s) else timestamp_s,
            work=find_number(_BATCH, line),
            writer=writer,
        )


def _is_header(line: str) -> bool:
    columns = line.strip().split(",")
    return _KEY in columns and ("step" in columns or "global_step" in columns)


def _read_csv(header: str, lines: Iterable[str], builder: SeriesBuilder) -> None:
    """Rows of the CSV logger; validation's rows leave the timing empty."""
    columns = header.strip().split(",")
    place = "step" if "step" in columns else "global_step"
    consumed: dict[str, tuple[float, int]] = {}
    for line in lines:
        writer, rest = split_prefix(line)
        cells = rest.strip().split(",")
        row = dict(zip(columns, cells, strict=False))
        step, duration_s = whole(row.get(place)), number(row.get(_KEY))
        if step is None or isnan(duration_s) or len(cells) < len(columns):
            continue
        samples = number(row.get("consumed_samples"))
        before, since = consumed.get(writer, (NAN, step))
        consumed[writer] = samples, step
        work = (samples - before) / (step - since) if step > since else NAN
        builder.add(step=step, duration_s=duration_s, work=work, writer=writer)


def _epoch_bar(line: str) -> tuple[int, Bar] | None:
    """(epoch, bar) of a training bar; None for validation's, sanity checks' and downloads'."""
    bar = parse_bar(line)
    epoch = _EPOCH.search(bar.label) if bar is not None else None
    return (int(epoch[1]), bar) if epoch is not None and bar is not None else None


def _read_bars(bars: list[tuple[int, Bar]], builder: SeriesBuilder) -> None:
    """A bar starts at zero every epoch; a redraw at the same count ends a validation."""
    records, steps = ElapsedRecords(builder), EpochSteps()
    before_s, last = 0.0, (-1, Bar("", -1, 0, 0.0))
    for epoch, bar in bars:
        if epoch > last[0] >= 0:
            before_s += last[1].elapsed_s
        elapsed_s = before_s + bar.elapsed_s
        if (epoch, bar.count) == (last[0], last[1].count):
            records.pause(bar.elapsed_s - last[1].elapsed_s)
        records.point(steps.step(epoch, bar.count, bar.total), elapsed_s)
        last = (epoch, bar)
    records.close()


READER = LightningReader()
