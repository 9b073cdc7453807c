"""torchtitan.

In: stdout of one or more ranks. Out: seconds per iteration from tokens/s of one GPU and the
header's batch size, sequence length and mesh, or the line's clock; work in tokens.

    [rank0]:[titan] 2025-01-01 10:00:00,123 - root - INFO - step: 10  loss:  8.1043  grad_norm:
    0.4123  memory: 10.21GiB(10.75%)  tps: 4,321  tflops: 12.30  mfu: 4.50%
"""

from __future__ import annotations

import math
import re

from failslow.ingest.base import RunHeader, SeriesBuilder, Source, parse_clock, split_prefix
from failslow.ingest.rates import RateRecords

__all__ = ["READER", "TorchtitanReader"]

_STEP = re.compile(
    # the space at the end: a line cut off inside the number is none
    r"(?<!validate )\bstep:\s+(\d{1,18})\s+loss:.*?\b[tw]ps:\s+(-?[\d,.]+|nan|inf)\s"
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+")
_BATCH = re.compile(
    r"local batch size:? (\d+), global batch size:? (\d{1,18})[^,]*, sequence length:? (\d{1,18})"
)
_MESH = re.compile(
    r"Building \d-D device mesh with .*\[((?:\d{1,9}(?:, )?){1,6})\]"
    r"|device mesh with parallelism: (.+)"
)
_AXIS = re.compile(r"\b(?:pp|dp_replicate|dp_shard|cp|tp)=(\d{1,9})")


class TorchtitanReader:
    """`step: N loss: L ... tps: T tflops: F mfu: M`, dated, of one or more ranks."""

    name = "torchtitan"
    summary = "[titan] 2025-01-01 10:00:00,123 - root - INFO - step: 10  loss: 8.1 ... tps: 4,321"
    priority = 50

    def matches(self, line: str) -> bool:
        """Whether the line is a step's."""
        return "ps: " in line and _STEP.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every step of every rank."""
        header = RunHeader()
        records = RateRecords(builder, "token of one GPU", whole=False)
        for line in source.lines():
            match = _STEP.search(line) if "ps: " in line else None
            if match is not None:
                date = _DATE.search(line)
                header.open_run(records)
                tokens = header.get("global batch size") * header.get("sequence length")
                records.add(
                    step=int(match[1]),
                    rate=float(match[2].replace(",", "")),
                    clock_s=parse_clock(date[0]) if date else math.nan,
                    stated=tokens / header.get("GPUs"),
                    work=tokens,
                    writer=split_prefix(line)[0],
                )
            elif "batch size" in line:
                batch = _BATCH.search(line)
                if batch is not None:
                    header.note("global batch size", batch[2])
                    header.note("sequence length", batch[3])
            elif "device mesh" in line:
                mesh = _MESH.search(line)
                if mesh is not None:
                    sizes = re.findall(r"\d+", mesh[1]) if mesh[1] else _AXIS.findall(mesh[2])
                    header.note("GPUs", str(math.prod(int(size) for size in sizes)))
        records.flush()


READER = TorchtitanReader()
