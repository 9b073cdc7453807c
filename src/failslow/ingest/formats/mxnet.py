"""MXNet's speedometer, as in Gluon, GluonCV and `Module.fit`.

    Namespace(batch_size=64, dtype='float16', log_interval=50, num_gpus=4, num_workers=30, ...)
    Epoch[0] Batch [49]	Speed: 1733.85 samples/sec	accuracy=0.663	lr=0.003
    INFO:root:Epoch[0] Batch [0-20]	Speed: 1733.85 samples/sec	accuracy=0.663
    [Epoch 0][Batch 49], Speed: 30.12 samples/sec, CrossEntropy=1.204

The speed is that of the batches since the line before; batches count from 0 in every epoch. The
batch size is the header's, per GPU where it gives `num_gpus`. A header after a record begins a
run; when it changes what decides the speed, times of the two runs do not compare.
"""

from __future__ import annotations

import re
from math import isnan

from failslow.ingest.base import NAN, NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import EpochSteps, clock_in, number

__all__ = ["READER", "MxnetReader"]

_LINE = re.compile(
    r"[Ee]poch\s*\[?\s*(?P<epoch>\d{1,9})(?:/\d+)?\]?[\],\s]*"
    r"\[?[Bb]atch\s*\[?(?:\d+-)?(?P<batch>\d{1,18})(?:\]?/\[?(?P<length>\d{1,18}))?\]?"
    rf".*?[Ss]peed:?\s*(?P<speed>{NUMBER})\s*samples/s"
)
_NODE = re.compile(r"\bNode\[(\d+)\]")
_HEADER = re.compile(r"\bNamespace\((.*)\)")
_SETTING = re.compile(r"(\w+)=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|[^,]*)")
_DECIDES_SPEED = (
    "batch_size",
    "dtype",
    "num_gpus",
    "gpus",
    "num_workers",
    "log_interval",
    "model",
    "network",
    "mode",
    "input_size",
    "image_shape",
    "data_shape",
    "crop_size",
    "kv_store",
    "use_rec",
    "use_se",
    "batch_norm",
    "syncbn",
    "mixup",
)


class MxnetReader:
    """Reads MXNet's `Speed: … samples/sec` lines."""

    name = "mxnet"
    summary = "Epoch[0] Batch [49]  Speed: 1733.85 samples/sec"
    priority = 10

    def matches(self, line: str) -> bool:
        """An epoch, a batch and a speed."""
        return "samples/s" in line and _LINE.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Without a batch size in the log the times are those of one sample."""
        steps = EpochSteps()
        used: dict[str, str] = {}
        pending: dict[str, str] | None = None
        for line in source.lines():
            writer, rest = split_prefix(line)
            if "Namespace(" in rest:
                header = _HEADER.search(rest)
                if header is not None:
                    pending = dict(_SETTING.findall(header[1]))
                continue
            match = _LINE.search(rest) if "samples/s" in rest else None
            if match is None:
                continue
            if pending is not None:  # of several headers in a row the last one ran
                if len(builder):
                    note = _changes(used, pending)
                    builder.new_run(note or "a new header", config_changed=bool(note))
                    steps = EpochSteps()
                used, pending = pending, None
            batch = _batch_size(used)
            if isnan(batch):
                builder.warn(
                    "no header names the batch size: times are seconds per sample, not per "
                    "iteration"
                )
            speed = float(match["speed"])
            node = _NODE.search(rest)
            index = int(match["batch"]) + 1
            builder.add(
                step=steps.step(int(match["epoch"]), index, int(match["length"] or 0)),
                duration_s=(1.0 if isnan(batch) else batch) / speed if speed else NAN,
                clock_s=clock_in(rest),
                work=batch,
                writer=writer or (node[0] if node else ""),
            )


def _batch_size(settings: dict[str, str]) -> float:
    """Samples per iteration; GluonCV multiplies the batch size by the number of GPUs."""
    gpus = number(settings.get("num_gpus", "1"))
    return number(settings.get("batch_size")) * (gpus if gpus > 1 else 1)


def _changes(before: dict[str, str], after: dict[str, str]) -> str:
    """What of the settings that decide the speed changed: `batch_size 64 -> 16`."""
    return ", ".join(
        f"{key} {before.get(key, 'unset').strip(_QUOTES)} -> "
        f"{after.get(key, 'unset').strip(_QUOTES)}"
        for key in _DECIDES_SPEED
        if before.get(key) != after.get(key)
    )


_QUOTES = "'\""

READER = MxnetReader()
