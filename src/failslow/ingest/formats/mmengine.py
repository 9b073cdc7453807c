"""OpenMMLab: the JSON lines of mmcv and mmengine, and their text logs.

mmcv (`work_dirs/x/20210301_120000.log.json`), where `iter` may start anew every epoch, and
mmengine (`vis_data/scalars.json`), where it does not:

    {"mode": "train", "epoch": 1, "iter": 50, "lr": 0.002, "data_time": 0.05, "time": 0.35}
    {"lr": 0.002, "data_time": 0.05, "loss": 1.3, "time": 0.35, "iter": 50, "step": 50}

Their text logs, which have a clock:

    2021-03-01 12:00:18,123 - mmdet - INFO - Epoch [1][50/7330]	lr: 2.0e-03, eta: 1 day, 4:40:13, time: 0.350, data_time: 0.050, memory: 3900, loss: 1.3
    2022/08/30 12:00:18 - mmengine - INFO - Epoch(train)  [1][  50/7330]  lr: 2.0e-03  eta: 4:40:13  time: 0.3500  data_time: 0.0500  loss: 1.3

`time` and `data_time` are means since the line before (mmengine: of its last 10 iterations). Rows
of validation have a mode or tag of their own and are left out.
"""  # noqa: E501 - the log's own lines

from __future__ import annotations

import re
from typing import Any

from failslow.ingest.base import NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import EpochSteps, clock_in, json_object, number, whole

__all__ = ["READER", "MmengineReader"]

_TEXT = re.compile(
    r"\b(?:Epoch|Iter)(?:\(train\))?\s*(?:\[\s*(?P<epoch>\d{1,9})\])?"
    r"\[\s*(?P<index>\d{1,18})/(?P<length>\d{1,18})\]"
    rf".*?\btime: (?P<time>{NUMBER})[,\s](?:\s*data_time: (?P<data>{NUMBER}))?"
)


class MmengineReader:
    """Reads JSON lines and text logs of mmcv and mmengine."""

    name = "mmengine"
    summary = '{"mode": "train", "epoch": 1, "iter": 50, "data_time": 0.05, "time": 0.35}'
    priority = 50

    def matches(self, line: str) -> bool:
        """A training row with a time."""
        if 'time": ' in line:
            row = json_object(line) if "data_time" in line or '"mode"' in line else None
            return row is not None and _is_training(row)
        return "time: " in line and " - INFO - " in line and _TEXT.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """A new header of mmcv's JSON (`env_info`) begins a run."""
        counters: dict[str, EpochSteps] = {}
        for line in source.lines():
            writer, rest = split_prefix(line)
            steps = counters.setdefault(writer, EpochSteps())
            if rest.startswith("{"):
                row = json_object(rest)
                if row is None:
                    builder.warn("a line that is no whole JSON record was skipped")
                elif "env_info" in row:
                    builder.new_run("a new header")
                    counters[writer] = EpochSteps()
                elif _is_training(row):
                    _add_row(row, steps, builder, writer)
                continue
            match = _TEXT.search(rest) if "time: " in rest else None
            if match is None:
                continue
            index, length = int(match["index"]), int(match["length"])
            builder.add(
                step=steps.step(int(match["epoch"] or 0), index, length),
                duration_s=float(match["time"]),
                clock_s=clock_in(rest),
                data_s=number(match["data"]),
                writer=writer,
            )


def _is_training(row: dict[str, Any]) -> bool:
    """mmcv names the mode; mmengine gives validation rows neither `iter` nor a learning rate."""
    if "time" not in row and "train/time" not in row:
        return False
    if "mode" in row:
        return bool(row["mode"] == "train")
    if "iteration" in row:  # detectron2
        return False
    return "iter" in row or "lr" in row


def _add_row(row: dict[str, Any], steps: EpochSteps, builder: SeriesBuilder, writer: str) -> None:
    index = whole(row["iter"] if "iter" in row else row.get("step"))
    epoch = whole(row.get("epoch", 0))
    if index is None or epoch is None:
        builder.warn("a row without a usable iter was skipped")
        return
    builder.add(
        step=steps.step(epoch, index),
        duration_s=number(row.get("time", row.get("train/time"))),
        data_s=number(row.get("data_time", row.get("train/data_time"))),
        writer=writer,
    )


READER = MmengineReader()
