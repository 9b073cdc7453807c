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

from failslow.ingest.base import NAN, NUMBER, RunHeader, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import EpochSteps, clock_in

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
    priority = 50

    def matches(self, line: str) -> bool:
        """An epoch, a batch and a speed."""
        return "samples/s" in line and _LINE.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Without a batch size in the log the times are those of one sample."""
        counters: dict[str, EpochSteps] = {}
        settings = RunHeader()
        for line in source.lines():
            writer, rest = split_prefix(line)
            if "Namespace(" in rest:
                for key, value in _settings(rest):
                    settings.note(key, value)
                continue
            match = _LINE.search(rest) if "samples/s" in rest else None
            if match is None:
                continue
            settings.open_run(builder)  # of several headers in a row the last one ran
            gpus = settings.get("num_gpus")  # GluonCV multiplies the batch size by it
            batch = settings.get("batch_size") * (gpus if gpus > 1 else 1)
            if isnan(batch):
                builder.warn(
                    "no header names the batch size: times are seconds per sample, not per "
                    "iteration"
                )
            speed = float(match["speed"])
            node = _NODE.search(rest)
            writer = writer or (node[0] if node else "")
            steps = counters.setdefault(writer, EpochSteps())
            index = int(match["batch"]) + 1
            builder.add(
                step=steps.step(int(match["epoch"]), index, int(match["length"] or 0)),
                duration_s=(1.0 if isnan(batch) else batch) / speed if speed else NAN,
                clock_s=clock_in(rest),
                work=batch,
                writer=writer,
            )


def _settings(line: str) -> list[tuple[str, str]]:
    """What of a header decides the speed, in the order of `_DECIDES_SPEED`."""
    header = _HEADER.search(line)
    found = dict(_SETTING.findall(header[1])) if header else {}
    return [(key, found[key].strip("'\"")) for key in _DECIDES_SPEED if key in found]


READER = MxnetReader()
