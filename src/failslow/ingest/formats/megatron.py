"""Megatron-LM and Megatron-DeepSpeed.

In: stdout of the last rank. Out: the mean time over each log interval, work in samples (tokens
where the line gives the sequence length).

    55:  [2026-06-26 14:26:21.227730] iteration        3/     300 | consumed samples:         1008
    | elapsed time per iteration (ms): 1281.4 | ... | global batch size:   336 | lm loss: ...

BigScience's Megatron-DeepSpeed (BLOOM) writes `(s)`; some forks add `current time: 1706860208.35`.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from failslow.ingest.base import (
    NAN,
    RunHeader,
    SeriesBuilder,
    Source,
    parse_clock,
    split_prefix,
)

__all__ = ["READER", "MegatronReader"]

_TIME = "elapsed time per iteration ("
_UNIT_S = {"ms": 1e-3, "s": 1.0}
_ITERATION = re.compile(r"\biteration +\d+/ *\d+ \|")
_ARGUMENT = re.compile(
    r"\s(global_batch_size|micro_batch_size|seq_length|world_size|tensor_model_parallel_size"
    r"|pipeline_model_parallel_size|num_layers|hidden_size) \.{3,} (\S+)\s*$"
)


class MegatronReader:
    """`iteration N/ M | ... | elapsed time per iteration (ms): X | ...`, with or without a date."""

    name = "megatron"
    summary = "iteration 10/ 300 | ... | elapsed time per iteration (ms): 571.3 | ..."
    priority = 70

    def matches(self, line: str) -> bool:
        """Whether the line reports the elapsed time per iteration."""
        line = _plain(line)
        return _TIME in line and _ITERATION.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every complete line; one cut off inside its time is skipped."""
        header, before = RunHeader(), (0, 0.0)
        for raw in source.lines():
            line = raw
            at = line.find(_TIME)  # plain string searches: a million lines in seconds
            if at < 0:
                line = _plain(raw)
                at = line.find(_TIME)
            if at < 0:
                if " ...." in line:
                    argument = _ARGUMENT.search(line)
                    if argument is not None:
                        header.note(argument[1], argument[2])
                continue
            start = line.find("iteration ")
            slash = line.find("/", start)
            end = line.find(" |", at)
            if not 0 <= start < slash < at < end:
                continue
            unit, _, number = line[at + len(_TIME) : end].partition("):")
            try:
                step = int(line[start + 10 : slash])
                duration_s = float(number) * _UNIT_S[unit]
            except (KeyError, ValueError):
                continue
            samples = _field(line, "global batch size:", slash)
            if math.isnan(samples):
                total = _field(line, "consumed samples:", slash)
                if step > before[0]:
                    samples = (total - before[1]) / (step - before[0])
                before = (step, total)
            tokens = _field(line, "actual seqlen:", end)
            writer, dated = _head(line[:start])
            if math.isnan(dated):
                dated = _field(line, "current time:", slash)
            header.open_run(builder)
            builder.add(
                step=step,
                duration_s=duration_s,
                clock_s=dated,
                work=samples if math.isnan(tokens) else samples * tokens,
                writer=writer,
            )


def _plain(line: str) -> str:
    """The line with `name=value` of newer Megatron-DeepSpeed written `name: value`."""
    if "elapsed_time_per_iteration_ms=" not in line:
        return line
    line = line.replace("elapsed_time_per_iteration_ms=", _TIME + "ms):")
    line = line.replace("iteration=", "iteration ")
    for name in ("consumed_samples=", "global_batch_size=", "actual_seqlen="):
        line = line.replace(name, name[:-1].replace("_", " ") + ":")
    return line


def _field(line: str, name: str, start: int) -> float:
    at = line.find(name, start)
    end = line.find("|", at)
    if at < 0 or end < 0:
        return NAN
    try:
        return float(line[at + len(name) : end])
    except ValueError:
        return NAN


def _head(head: str) -> tuple[str, float]:
    """(writer, clock) of what stands before the word iteration."""
    opened = head.find("[20")
    if opened < 0:
        return _writer(head), NAN
    closed = head.find("]", opened)
    return _writer(head[:opened]), parse_clock(head[opened + 1 : closed]) if closed > 0 else NAN


@lru_cache(maxsize=1024)
def _writer(label: str) -> str:
    return split_prefix(label + "[")[0]  # some labels are known by the bracket that follows


READER = MegatronReader()
