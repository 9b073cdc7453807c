"""One row a sample: the contract suite (test_contract.py) runs over all of them.

A format joins by a small hand-made sample in `samples/` and a row here; a real log by a row in
`REAL_LOGS`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CASES", "REAL_LOGS", "REAL_LOG_FOLDER", "SAMPLES", "Case"]

SAMPLES = Path(__file__).parent / "samples"
REAL_LOG_FOLDER = Path(
    os.environ.get("FAILSLOW_REAL_LOGS")
    or Path(__file__).parents[2].parent / "shared" / "data" / "logs"
)


@dataclass(frozen=True)
class Case:
    """A sample file and what its reader must make of it."""

    sample: str
    format: str
    records: int
    time: str = ""
    """One record's time or rate as the sample prints it, the character before it included, found
    once: replaced by nan, 0 and a negative number it must cost that record alone. "" where a time
    follows from several numbers."""
    by_line: bool = True
    """A log of lines, which may carry rank prefixes, noise and copies; False: one document."""
    text: bool = True
    """False: a binary file."""
    needs: str = ""
    """A library without which the case is skipped."""

    def __str__(self) -> str:
        return self.sample


CASES = (
    Case("megatron.log", "megatron", 12, time=" 571.3"),
    Case("megatron_deepspeed.log", "megatron", 6, time="=15990.4"),
    Case("deepspeed.log", "deepspeed", 8, time="=100.0"),
    Case("deepspeed_breakdown.log", "deepspeed", 4),
    Case("mllog_throughput.txt", "mllog", 7, time=" 640.5"),
    Case("mllog_step_time.txt", "mllog", 8, time=" 15.214459"),
    Case("mllog_running_mean.txt", "mllog", 8),
    Case("torchtitan.log", "torchtitan", 7, time=" 6,302"),
    Case("nanogpt.log", "nanogpt", 7, time=" 202.50"),
    Case("nanochat.log", "nanogpt", 5, time=" 350.90"),
    Case("llmc.log", "llmc", 6, time=" 1654.70"),
    Case("modded_nanogpt.txt", "modded-nanogpt", 10),
    Case("table.csv", "csv", 5, time=",801.75"),
    Case("table.tsv", "csv", 5, time="\t801.75"),
    Case("table.jsonl", "jsonl", 5, time=" 0.80175"),
    Case("journal.jsonl", "journal", 6, time=" 0.75"),
)

REAL_LOGS = (
    # file, format, records
    ("deepspeed_chat_clean.log", "deepspeed", 736),
    ("llmc_gpt2_bursts.log", "llmc", 10_756),
    ("megatron_four_restarts.out", "megatron", 1200),
    ("mllog_gpt3_10752gpu_clean.txt", "mllog", 220),
    # 246 rows, six of which sum up a block of 40 iterations
    ("mllog_llama405b_1536gpu_spikes.txt", "mllog", 240),
    ("mllog_maskrcnn_running_mean.txt", "mllog", 800),
    ("mllog_sd_64gpu_slow.txt", "mllog", 100),
    ("mllog_sd_clean.txt", "mllog", 70),
    ("modded_nanogpt_window_ramp.txt", "modded-nanogpt", 1750),
)
