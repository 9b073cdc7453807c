"""DeepSpeed.

In: stdout of rank 0. Out: seconds per iteration from samples/s and the batch size (from the
printed configuration, or the clock); without those lines from the pipeline engine's, or else from
the wall-clock breakdown.

    [2023-04-18 01:47:06,619] [INFO] [timer.py:199:stop] epoch=0/micro_step=20/global_step=20,
    RunningAvgSamplesPerSec=172.66, CurrSamplesPerSec=171.41, MemAllocated=3.96GB, ...
    steps: 100 loss: 0.0585 iter time (s): 0.186 samples/sec: 53.694
    [2024-04-21 02:45:40,723] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd: 3865.91
    | bwd: 11249.43 | bwd_inner: 10520.18 | bwd_allreduce: 729.09 | step: 888.45
"""

from __future__ import annotations

import re

from failslow.ingest.base import (
    NAN,
    NUMBER,
    RunHeader,
    SeriesBuilder,
    Source,
    parse_clock,
    split_prefix,
)
from failslow.ingest.rates import RateRecords

__all__ = ["READER", "DeepSpeedReader"]

_RATE = re.compile(
    rf"(?:global_step=|\b)(\d{{1,18}}), RunningAvgSamplesPerSec={NUMBER}, "
    rf"CurrSamplesPerSec=({NUMBER}),"
)
_BREAKDOWN = re.compile(
    rf"time \(ms\) \| (?:fwd|forward): ({NUMBER}) \| (?:bwd|backward): ({NUMBER}) .*"
    r"\bstep: (-?\d+\.\d\d|nan|inf)\b"  # always two digits: fewer are a line cut off
)
_PIPELINE = re.compile(
    rf"\bsteps: (\d{{1,18}}) loss: .*\biter time \(s\): (-?\d+\.\d{{3}}|nan|inf)\b"
    rf"(?: samples/sec: ({NUMBER}))?"
)
_STEP = re.compile(r"\bstep=(\d{1,18}), skipped=")
_SETTING = re.compile(r"\b(train_batch_size|world_size) \.{3,} (\d{1,18})\s*$")
_DATE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+)\]")


class DeepSpeedReader:
    """`CurrSamplesPerSec=X`, `iter time (s): X`, `time (ms) | fwd: X | bwd: Y | ... | step: Z`."""

    name = "deepspeed"
    summary = "... global_step=20, RunningAvgSamplesPerSec=172.66, CurrSamplesPerSec=171.41, ..."
    priority = 40

    def matches(self, line: str) -> bool:
        """Whether the line has the throughput, the time or the breakdown of a step."""
        if "CurrSamplesPerSec=" in line:
            return _RATE.search(line) is not None
        if "iter time (s): " in line:
            return _PIPELINE.search(line) is not None
        return "time (ms) |" in line and _BREAKDOWN.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """The throughput lines; where there are none the pipeline's, or else the breakdown."""
        if any("CurrSamplesPerSec=" in line for line in source.lines()):
            _read_rates(source, builder)
        elif any("iter time (s): " in line for line in source.lines()):
            _read_pipeline(source, builder)
        else:
            _read_breakdown(source, builder)


def _read_rates(source: Source, builder: SeriesBuilder) -> None:
    header = RunHeader()
    records = RateRecords(builder, "sample", whole=True)
    for line in source.lines():
        match = _RATE.search(line) if "CurrSamplesPerSec=" in line else None
        if match is not None:
            header.open_run(records)
            records.add(
                step=int(match[1]),
                rate=float(match[2]),
                clock_s=_clock(line),
                stated=header.get("train_batch_size"),
                writer=split_prefix(line)[0],
            )
        elif " ....." in line:
            setting = _SETTING.search(line)
            if setting is not None:
                header.note(setting[1], setting[2])
    records.flush()


def _read_pipeline(source: Source, builder: SeriesBuilder) -> None:
    for line in source.lines():
        match = _PIPELINE.search(line) if "iter time (s): " in line else None
        if match is not None:
            duration_s = float(match[2])
            samples = float(match[3] or NAN) * duration_s
            builder.add(
                step=int(match[1]),
                duration_s=duration_s,
                work=round(samples) if 0.5 < samples < 1e12 else NAN,  # of two rounded numbers
                writer=split_prefix(line)[0],
            )


def _read_breakdown(source: Source, builder: SeriesBuilder) -> None:
    builder.warn("times are forward + backward + optimizer step: data loading is not in them")
    step: dict[str, int] = {}
    named: dict[str, int] = {}
    before: dict[str, str] = {}
    for line in source.lines():
        if "time (ms) |" in line:
            match = _BREAKDOWN.search(line)
            writer = split_prefix(line)[0]
            if match is None or line == before.get(writer):  # a copy has no step number to tell
                continue
            before[writer] = line
            # the step number, where it is printed, comes on a line before the times
            step[writer] = named.pop(writer, step.get(writer, 0) + 1)
            builder.add(
                step=step[writer],
                duration_s=sum(float(part) for part in match.groups()) / 1000,
                clock_s=_clock(line),
                writer=writer,
            )
        elif "skipped=" in line:
            progress = _STEP.search(line)
            if progress is not None:
                named[split_prefix(line)[0]] = int(progress[1])


def _clock(line: str) -> float:
    date = _DATE.search(line)
    return parse_clock(date[1]) if date else NAN


READER = DeepSpeedReader()
