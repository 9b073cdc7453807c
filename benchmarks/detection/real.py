"""False alarms and finds on real training logs, against what a careful reader saw in them.

    FAILSLOW_REAL_LOGS=…/logs python -m benchmarks.detection.real

In: a folder of public training logs. Out: a row a log: the slow stretches a reader marked (in
records from 0), what the detector found, and whether the one explains the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from failslow.detect import analyze
from failslow.ingest import read_log
from failslow.records import Episode

__all__ = ["READINGS", "Finding", "Reading", "judge", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader sees in a log. Stretches are (first, last) records."""

    file: str
    slow: tuple[tuple[int, int], ...] = ()
    """Must be found."""
    arguable: tuple[tuple[int, int], ...] = ()
    """Short or bursty: a find is no false alarm, nor is none a miss."""
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A reading held against what the detector found."""

    reading: Reading
    found: tuple[Episode, ...]
    missed: int
    false_alarms: int


READINGS = (
    Reading(file="mllog_sd_64gpu_slow.txt", slow=((15, 23),), what="x1.9, recovers"),
    Reading(file="mllog_sd_clean.txt", what="clean"),
    Reading(file="mllog_llama405b_1536gpu_spikes.txt", what="8 isolated spikes"),
    Reading(file="mllog_gpt3_10752gpu_clean.txt", what="clean"),
    Reading(file="mllog_maskrcnn_running_mean.txt", what="a speed-up behind running means"),
    Reading(
        file="mxnet_darknet53_late_slow.log",
        slow=((2818, 2846), (2867, 2881)),
        # bursts too: 8 of 12 records slow, median x1.14; 8 of 10, median x1.22
        arguable=((2716, 2727), (2894, 2903)),
        what="x1.31 in bursts, x1.22",
    ),
    Reading(file="mxnet_simple_pose_batch_change.log", what="batch 128 -> 32: a workload change"),
    Reading(file="transformer_tokens_slow.log", slow=((659, 774), (829, 942)), what="x1.41 twice"),
    Reading(
        file="llmc_gpt2_bursts.log",
        slow=((8300, 8341),),
        arguable=((2806, 2811), (9002, 9006)),
        what="bursty x1.19; many short bursts",
    ),
    Reading(file="deepspeed_chat_clean.log", what="flat"),
    Reading(file="megatron_four_restarts.out", what="four runs, slow first iterations"),
    Reading(file="modded_nanogpt_window_ramp.txt", what="+13 % by plan: a workload change"),
    Reading(file="paddle_hrnet.log", what="26 records"),
)


def judge(reading: Reading, episodes: Sequence[Episode]) -> Finding:
    """Count the marked stretches no fail-slow overlaps, and fail-slows that overlap none."""
    alarms = tuple(e for e in episodes if e.kind == "fail_slow")
    allowed = (*reading.slow, *reading.arguable)
    return Finding(
        reading=reading,
        found=alarms,
        missed=sum(not any(_overlap(e, s) for e in alarms) for s in reading.slow),
        false_alarms=sum(not any(_overlap(e, s) for s in allowed) for e in alarms),
    )


def _overlap(episode: Episode, stretch: tuple[int, int]) -> bool:
    return episode.first_index <= stretch[1] and episode.last_index >= stretch[0]


def main(
    *,
    folder: Annotated[
        Path, typer.Argument(envvar="FAILSLOW_REAL_LOGS", help="Where the logs lie.")
    ] = Path("../shared/data/logs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what is found in each real log, and the sums."""
    present = [r for r in READINGS if (folder / r.file).exists()]
    if not present:
        raise typer.BadParameter(f"{folder} holds none of the logs; set FAILSLOW_REAL_LOGS")
    findings = [judge(r, analyze(read_log(folder / r.file)).episodes) for r in present]
    missed = sum(f.missed for f in findings)
    false_alarms = sum(f.false_alarms for f in findings)
    if as_json:
        sums = {"logs": len(findings), "missed": missed, "false_alarms": false_alarms}
        print(json.dumps({"schema": "failslow.benchmark.real/1", **sums}))
        return
    table = Table(title="real logs")
    for column in ("log", "a reader sees", "found (records)", "missed", "false"):
        table.add_column(column)
    for f in findings:
        found = ", ".join(f"{e.first_index}-{e.last_index} x{e.slowdown:.2f}" for e in f.found)
        table.add_row(f.reading.file, f.reading.what, found, str(f.missed), str(f.false_alarms))
    console = Console()
    console.print(table)
    console.print(f"{len(findings)} logs: {missed} missed, {false_alarms} false alarms")


if __name__ == "__main__":
    typer.run(main)
