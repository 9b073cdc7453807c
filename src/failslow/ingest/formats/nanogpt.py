"""nanoGPT, build-nanogpt and nanochat.

In: stdout. Out: the time of the last iteration of each log interval, work in tokens.

    iter 120: loss 3.9214, time 135.21ms, mfu 41.20%
    step 00120/21400 (0.56%) | loss: 3.921410 | ... | dt: 135.21ms | tok/sec: 387,804 | mfu: 41.2
"""

from __future__ import annotations

import re

from failslow.ingest.base import NUMBER, RunHeader, SeriesBuilder, Source, split_prefix

__all__ = ["READER", "NanoGptReader"]

_ITER = re.compile(rf"\biter (\d{{1,18}}): loss {NUMBER}, time ({NUMBER})ms")
_STEP = re.compile(
    rf"\bstep\s+(\d{{1,18}})(?:/\d+ \([\d.]+%\))? \| loss.*\| dt: ({NUMBER})ms \| tok/sec: "
)
_TOKENS = re.compile(
    r"tokens per iteration will be: ([\d,]+)|total desired batch size: ([\d,]+)"
    r"|Total batch size ([\d,]+) =>"
)


class NanoGptReader:
    """`iter N: loss L, time X ms, mfu M` and `step N | loss: L | ... | dt: X ms | tok/sec: T`."""

    name = "nanogpt"
    summary = "iter 120: loss 3.9214, time 135.21ms, mfu 41.20%"
    priority = 50

    def matches(self, line: str) -> bool:
        """Whether the line is an iteration's."""
        return "ms" in line and _record(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every iteration; the header's tokens per iteration are the work."""
        header = RunHeader()
        for line in source.lines():
            record = _record(line) if "ms" in line else None
            if record is not None:
                header.open_run(builder)
                builder.add(
                    step=int(record[1]),
                    duration_s=float(record[2]) / 1000,
                    work=header.get("tokens per iteration"),
                    writer=split_prefix(line)[0],
                )
            elif "atch size" in line or "tokens per iteration" in line:
                tokens = _TOKENS.search(line)
                if tokens is not None:
                    count = tokens[tokens.lastindex or 0].replace(",", "")
                    header.note("tokens per iteration", count)


def _record(line: str) -> re.Match[str] | None:
    if "iter " in line:
        return _ITER.search(line)
    return _STEP.search(line) if "| dt: " in line else None


READER = NanoGptReader()
