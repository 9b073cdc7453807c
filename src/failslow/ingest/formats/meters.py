"""Average meters: the PyTorch ImageNet example, NVIDIA Apex, torchvision, timm, Swin and kin.

    Epoch: [3][  10/5005]	Time  0.345 ( 0.512)	Data  0.001 ( 0.050)	Loss 6.9e+00 (7.0e+00)
    Epoch: [3]  [  10/5004]  eta: 0:31:07  lr: 0.1  loss: 6.9 (7.0)  time: 0.3451  data: 0.0102  max mem: 5000
    Train: 3 [  10/1251 (  1%)]  Loss: 6.95 (6.95)  Time: 0.350s,  731.43/s  (0.400s,  640.00/s)  LR: 1.0e-05  Data: 0.010 (0.050)
    [2021-04-12 12:00:00 swin] INFO Train: [3/300][10/1251]	eta 0:31:07 lr 0.000001	time 0.3500 (0.4100)	loss 6.9 (6.9)
    2023-01-01,12:00:00 | INFO | Train Epoch: 3 [  4096/1281167 (0%)] Data (t): 0.010 Batch (t): 0.350, 731.43/s, 91.429/s/gpu LR: 0.001

What stands in parentheses is the mean since the epoch began and says little about now; the value
before it is used: the last iteration's, or a mean since the line before (open_clip) or of the last
20 (torchvision). Iterations, in open_clip samples, count from 0 in every epoch. Lines of `Test:`
are left out.
"""  # noqa: E501 - the log's own lines

from __future__ import annotations

import re

from failslow.ingest.base import NAN, NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import clock_in, number

__all__ = ["READER", "MetersReader"]

_HEADER = re.compile(
    r"(?<![\w-])(?:Epoch|Train|Training)\b:?\s*(?:\[?\s*(?P<epoch>\d{1,9})(?:/\d+)?\s*\]?)?\s*"
    r"\[\s*(?P<index>\d{1,18})/(?P<length>\d{1,18})\b[^\]]*\]"
)
_TIME = re.compile(
    rf"(?<![Dd]ata )(?<![\w/])(?:(?:[Bb]atch[_ ])?[Tt]ime:?|Batch \(t\):)\s+({NUMBER})s?[,\s]"
)
_DATA = re.compile(rf"(?<![\w/])[Dd]ata(?:[_ ][Tt]ime| \(t\))?:?\s+({NUMBER})")
_SPEED = re.compile(rf"\bSpeed\s+({NUMBER})\s+\(|(?<=\ds,)\s*({NUMBER})/s\b")
"""Only Apex and timm: others print a speed of another moment than the time."""
_EVALUATION = re.compile(r"\b(?:[Vv]al|[Tt]est|[Ee]val)")


class MetersReader:
    """Reads lines of average meters."""

    name = "meters"
    summary = "Epoch: [3][  10/5005]  Time  0.345 ( 0.512)  Data  0.001 ( 0.050)"
    priority = 30  # mmcv's text lines look much the same

    def matches(self, line: str) -> bool:
        """An epoch, a place in it and a time."""
        return _may_match(line) and _record(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Step = epoch · iterations per epoch + place in the epoch."""
        for line in source.lines():
            writer, rest = split_prefix(line)
            found = _record(rest) if _may_match(rest) else None
            if found is None:
                continue
            header, duration_s = found
            index, length = int(header["index"]), int(header["length"])
            data = _DATA.search(rest, header.end())
            speed = _SPEED.search(rest, header.end())
            builder.add(
                step=int(header["epoch"] or 0) * length + index,
                duration_s=duration_s,
                iterations=1 if index == 0 else 0,  # an epoch's first batch waits for the loader
                clock_s=clock_in(rest),
                work=number(speed[1] or speed[2]) * duration_s if speed else NAN,
                data_s=number(data[1]) if data else NAN,
                writer=writer,
            )


def _may_match(line: str) -> bool:
    return "ime" in line or "(t): " in line


def _record(line: str) -> tuple[re.Match[str], float] | None:
    header = _HEADER.search(line)
    if header is None or _EVALUATION.search(line, 0, header.start()):
        return None
    time = _TIME.search(line, header.end())
    return (header, float(time[1])) if time else None


READER = MetersReader()
