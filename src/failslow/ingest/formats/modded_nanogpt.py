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

_STEP = re.compile(r"\bstep:(\d+)/\d+ (.*?)train_time:(\d+(?:\.\d+)?)ms step_avg:")
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
        training: dict[str, list[tuple[int, float]]] = {}
        validation: dict[str, list[tuple[int, float]]] = {}
        for line in source.lines():
            match = _STEP.search(line) if "train_time:" in line else None
            if match is not None:
                kind = validation if "val_loss:" in match[2] else training
                record = (int(match[1]), float(match[3]) / 1000)
                kind.setdefault(split_prefix(line)[0], []).append(record)
            elif not builder.planned_ramp and _WINDOW.search(line) is not None:
                builder.planned_ramp = "the attention window grows by schedule"
        for writer, records in (training or validation).items():
            step = np.array([record[0] for record in records], np.int64)
            elapsed_s = np.array([record[1] for record in records])
            iterations, duration_s = undo_cumulative(step, elapsed_s)
            for row in zip(step, duration_s, iterations, strict=True):
                builder.add(
                    step=int(row[0]),
                    duration_s=float(row[1]),
                    iterations=int(row[2]),
                    writer=writer,
                )


READER = ModdedNanoGptReader()
