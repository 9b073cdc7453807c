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
    Case("megatron_seconds.log", "megatron", 6, time=" 105.31"),
    Case("deepspeed.log", "deepspeed", 8, time="=100.0"),
    Case("deepspeed_breakdown.log", "deepspeed", 4),
    Case("deepspeed_pipeline.log", "deepspeed", 6, time=" 0.187"),
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
    Case("hf_trainer_state.json", "hf_trainer", 7, by_line=False),
    Case("hf_trainer_printed.log", "hf_trainer", 5),
    Case("llamafactory.jsonl", "llamafactory", 11),
    Case("mmcv.log.json", "mmengine", 14, time=" 0.465"),
    Case("mmengine_scalars.json", "mmengine", 8, time=" 0.33"),
    Case("mmengine.log", "mmengine", 6, time=" 0.3101"),
    Case("detectron2_metrics.json", "detectron2", 12, time=" 0.2549"),
    Case("detectron2.log", "detectron2", 7),
    Case("maskrcnn_benchmark.log", "detectron2", 8, time=" 0.1603"),
    Case("meters_imagenet.log", "meters", 10, time=" 0.365"),
    Case("meters_torchvision.log", "meters", 10, time=" 0.4201"),
    Case("meters_timm.log", "meters", 10, time=" 0.352"),
    Case("mxnet.log", "mxnet", 8, time=" 321.000000"),
    Case("paddle_seg.log", "paddle", 8, time=" 0.5300"),
    Case("paddle_clas.log", "paddle", 8),
    Case("paddle_nlp.log", "paddle", 6, time=" 0.35003"),
    Case("paddle_nlp_trainer.log", "paddle", 6, time=" 3.8000"),
    Case("fairseq.log", "fairseq", 8, time="=23040.5"),
    Case("fairseq_json.log", "fairseq", 6, time='"23040.5'),
    Case("transformer.log", "fairseq", 8, time=" 40300.000"),
    Case("nemo_bar.log", "lightning", 8, time="=1.50"),
    Case("nemo_lines.log", "lightning", 8, time=" 2.550"),
    Case("nemo_metrics.csv", "lightning", 8, time=",2.5300"),
    Case(
        "events.out.tfevents.1700000000.host.1.0",
        "tensorboard",
        10,
        by_line=False,
        text=False,
        needs="tensorboard",
    ),
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
    ("mxnet_darknet53_late_slow.log", "mxnet", 3000),
    # 1,820 lines name a speed, 140 of them that of a whole epoch
    ("mxnet_simple_pose_batch_change.log", "mxnet", 1680),
    ("paddle_hrnet.log", "paddle", 26),
    ("transformer_tokens_slow.log", "fairseq", 3149),
    ("modded_nanogpt_window_ramp.txt", "modded-nanogpt", 1750),
)
