"""llm.c, its CUDA trainer's stdout and the PyTorch reference's.

In: stdout (main.log, which llm.c also writes, holds losses and no times). Out: the time of each
step, work in tokens. The tok/s of the line is smoothed and not used.

    step 5500/19560 | loss 3.286013 (+0.21z)| norm 0.2771 (-0.10z)| lr 5.09e-04 | 3630.88 ms
    | 37.2% bf16 MFU | 142871 tok/s
"""

from __future__ import annotations

import re

from failslow.errors import InputError
from failslow.ingest.base import NUMBER, RunHeader, SeriesBuilder, Source, split_prefix

__all__ = ["READER", "LlmcReader"]

_STEP = re.compile(rf"\bstep\s+(\d{{1,18}})/\d+ \|.*\| \(?({NUMBER}) ms\b")
_MAIN_LOG = re.compile(r"s:\d+ (?:tel|trl|eval):")
_SETTING = re.compile(
    r"\| (micro batch size B|sequence length T|total batch size|num_processes|device|precision"
    r"|weight init method)\s+\| (\S.*?)\s+\|"
)


class LlmcReader:
    """`step n/N | loss | norm | lr | X ms | MFU | tok/s`."""

    name = "llmc"
    summary = "step 5500/19560 | loss 3.29 | ... | 3630.88 ms | ... | 142871 tok/s"
    priority = 50

    def matches(self, line: str) -> bool:
        """Whether the line is a step's, or one of main.log."""
        if " ms" in line and "step" in line:
            return _STEP.search(line) is not None
        return line.startswith("s:") and _MAIN_LOG.match(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every step. Raises InputError for a main.log, which holds no times."""
        header, losses_only = RunHeader(), False
        for line in source.lines():
            match = _STEP.search(line) if " ms" in line else None
            if match is not None:
                header.open_run(builder)
                builder.add(
                    step=int(match[1]),
                    duration_s=float(match[2]) / 1000,
                    work=header.get("total batch size"),
                    writer=split_prefix(line)[0],
                )
            elif line.startswith("s:"):
                losses_only = losses_only or _MAIN_LOG.match(line) is not None
            elif "| " in line:
                setting = _SETTING.search(line)
                if setting is not None:
                    header.note(setting[1], setting[2])
        if losses_only and not len(builder):
            raise InputError(
                f"{source.name}: llm.c's main.log holds losses but no times; give the program's "
                f"stdout, whose lines read `{self.summary}`"
            )


READER = LlmcReader()
