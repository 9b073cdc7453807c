"""modded-nanogpt speed-run logs.

In: the log, its own source code first. Out: time of each step by differences of the training
time so far, which leaves out validation and is printed in whole milliseconds.

    step:12/1750 train_loss:6.4103 train_time:258ms step_avg:134.85ms
"""

from __future__ import annotations

import re

import numpy as np

from failslow.ingest.base import SeriesBuilder, Source, split_prefix, undo_cumulative

__all__ = ["READER", "ModdedNanoGptReader"]

_STEP = re.compile(r"\bstep:(\d{1,18})/\d+ (.*?)train_time:(\d{1,18}(?:\.\d+)?)ms step_avg:")
_WINDOW = re.compile(
    r"attn_blocksize = .*\bstep\b|get_window_size|window_size_blocks|sliding_window_num_blocks"
    r"|\bws_schedule\b"
)


class ModdedNanoGptReader:
    """`step:n/N ... train_time:Xms step_avg:Yms`, cumulative."""

    name = "modded-nanogpt"
    summary = "step:12/1750 train_loss:6.4103 train_time:258ms step_avg:134.85ms"
    priority = 50

    def matches(self, line: str) -> bool:
        """Whether the line is a step's."""
        return "train_time:" in line and _STEP.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Every training line; validation lines only where there are no others."""
        training: list[tuple[int, float, str]] = []
        validation: list[tuple[int, float, str]] = []
        for line in source.lines():
            match = _STEP.search(line) if "train_time:" in line else None
            if match is not None:
                kind = validation if "val_loss:" in match[2] else training
                kind.append((int(match[1]), float(match[3]) / 1000, split_prefix(line)[0]))
            elif not builder.planned_ramp and _WINDOW.search(line) is not None:
                builder.planned_ramp = "the attention window grows by schedule"
        records = training or validation
        step = np.array([record[0] for record in records], np.int64)
        elapsed_s = np.array([record[1] for record in records])
        writer = np.array([record[2] for record in records])
        iterations, duration_s = np.zeros(len(step), np.int64), np.zeros(len(step))
        for name in np.unique(writer):
            own = writer == name
            iterations[own], duration_s[own] = undo_cumulative(step[own], elapsed_s[own])
        for row in range(len(step)):
            builder.add(
                step=int(step[row]),
                duration_s=float(duration_s[row]),
                iterations=int(iterations[row]),
                writer=str(writer[row]),
            )


READER = ModdedNanoGptReader()
