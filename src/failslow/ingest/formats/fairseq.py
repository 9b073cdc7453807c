"""fairseq's training lines, and those of the Transformer benchmarks derived from it.

    2023-03-01 10:00:35 | INFO | train_inner | epoch 001:    100 / 1000 loss=9.1, wps=23514.3, ups=2.86, wpb=8230, bsz=256, num_updates=100, train_wall=34, wall=42
    2023-03-01 10:00:35 | INFO | train_inner | {"epoch": 1, "update": 0.1, "wps": "23514.3", "ups": "2.86", "wpb": "8230", "num_updates": "100", "wall": "42"}
    Transformer | epoch 0 | step 10 |avg loss 16.0 |avg tokens 4746.000 |tokens/s 40822.725 |walltime 9.517 |

An update takes wpb / wps (or 1 / ups) seconds, a mean since the line before. Before fairseq 0.10
(no date, no `train_inner`) wps was a mean since the epoch began: there the time comes from `wall`,
in whole seconds. Validation and the summaries of an epoch have no `ups` of this form.
"""  # noqa: E501 - the log's own lines

from __future__ import annotations

import re
from math import isnan

from failslow.ingest.base import NAN, NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import ElapsedRecords, clock_in, find_number, number

__all__ = ["READER", "FairseqReader"]

_FIELD = re.compile(rf'\b(wps|ups|wpb|num_updates)(?:=|": "?)({NUMBER})[,"\s}}]')
_WALL = re.compile(rf'\bwall(?:=|": "?)({NUMBER})')
_TOKENS = re.compile(
    rf"\| step (?P<step>\d{{1,18}}) \|.*?\|avg tokens (?P<tokens>{NUMBER})"
    rf" \|tokens/s (?P<rate>{NUMBER}) \|(?:walltime (?P<wall>{NUMBER}) \|)?"
)


class FairseqReader:
    """Reads fairseq's simple, tqdm and json log formats, and `tokens/s … walltime` lines."""

    name = "fairseq"
    summary = "epoch 001:    100 / 1000 loss=9.1, wps=23514.3, ups=2.86, wpb=8230, num_updates=100"
    priority = 50

    def matches(self, line: str) -> bool:
        """An update and its words per second."""
        if "ups=" in line or '"ups": ' in line:
            return "num_updates" in line
        return "|tokens/s " in line and _TOKENS.search(line) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Adds the time of an update; its work is in tokens."""
        coarse: dict[str, ElapsedRecords] = {}
        for line in source.lines():
            writer, rest = split_prefix(line)
            if "|tokens/s " in rest:
                _add_tokens(rest, builder, writer)
            elif self.matches(rest):
                values = {key: number(value) for key, value in _FIELD.findall(rest)}
                step = values.get("num_updates", NAN)
                if not 0 <= step < 2**62:
                    continue
                clock_s, wall_s = clock_in(rest), find_number(_WALL, rest)
                if isnan(clock_s) and "train_inner" not in rest and not isnan(wall_s):
                    records = coarse.setdefault(writer, ElapsedRecords(builder, writer))
                    records.point(int(step), wall_s)
                    continue
                builder.add(
                    step=int(step),
                    duration_s=_update_s(values),
                    clock_s=clock_s,
                    work=values.get("wpb", NAN),
                    writer=writer,
                )
        for records in coarse.values():
            records.close()


def _update_s(values: dict[str, float]) -> float:
    """Seconds per update; wps has more digits than ups."""
    if "wps" in values and "wpb" in values:
        return values["wpb"] / values["wps"] if values["wps"] else NAN
    updates_per_s = values.get("ups", NAN)
    return 1 / updates_per_s if updates_per_s else NAN


def _add_tokens(line: str, builder: SeriesBuilder, writer: str) -> None:
    match = _TOKENS.search(line)
    if match is None:
        return
    tokens, rate = float(match["tokens"]), float(match["rate"])
    builder.add(
        step=int(match["step"]),
        duration_s=tokens / rate if rate else NAN,
        clock_s=number(match["wall"]),
        work=tokens,
        writer=writer,
    )


READER = FairseqReader()
