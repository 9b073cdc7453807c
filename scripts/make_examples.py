"""Write the sample logs of `examples/logs/`: invented jobs, the same bytes every time.

In: nothing (an output folder, if another is wanted). Out: four logs of under 60 KB together:

    megatron_slow.log      a fail-slow of ×1.4 that comes and goes
    nanogpt_clean.log      healthy, with a long iteration at every checkpoint
    mxnet_batch_change.log a second run with a larger batch in float32: a workload change
    mllog_spikes.txt       healthy, with isolated spikes

    python scripts/make_examples.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

START = datetime(2026, 3, 2, 9, 0, tzinfo=timezone.utc)


def main() -> None:
    """Write every sample into the folder named, `examples/logs` if none is."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "examples" / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    samples = {
        "megatron_slow.log": megatron(),
        "nanogpt_clean.log": nanogpt(),
        "mxnet_batch_change.log": mxnet(),
        "mllog_spikes.txt": mllog(),
    }
    for name, lines in samples.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def noisy(base_s: float, count: int, noise: float, seed: int) -> np.ndarray:
    """`count` iteration times around `base_s` with relative noise."""
    return base_s * np.exp(noise * np.random.default_rng(seed).standard_normal(count))


def megatron() -> list[str]:
    """2,000 iterations logged every 20; ×1.4 from 900 to 1,300."""
    per_line, batch = 20, 256
    times = noisy(0.82, 100, 0.012, seed=1)
    times[0] = 2.9  # compilation and warm-up
    times[45:65] *= 1.4
    lines = ["[before the start of training step] datetime: 2026-03-02 09:00:00"]
    clock = START
    for k, time_s in enumerate(times.tolist(), start=1):
        clock += timedelta(seconds=time_s * per_line)
        loss = 10.8 * k**-0.22
        lines.append(
            f" [{clock:%Y-%m-%d %H:%M:%S}] iteration {k * per_line:8d}/    2000 | "
            f"consumed samples: {k * per_line * batch:12d} | "
            f"elapsed time per iteration (ms): {time_s * 1e3:.1f} | "
            f"learning rate: 3.000E-04 | global batch size: {batch:5d} | "
            f"lm loss: {loss:.6E} | grad norm: 0.412 |"
        )
    return lines


def nanogpt() -> list[str]:
    """240 lines, one in ten iterations; every 250 iterations a checkpoint costs a long one."""
    lines = []
    times = noisy(0.2475, 240, 0.008, seed=2)
    times[25::25] *= 14.0
    for k, time_s in enumerate(times.tolist()):
        step = k * 10
        loss = 3.1 + 7.8 * (step + 10) ** -0.35
        if step and step % 250 == 0:
            lines.append(f"step {step}: train loss {loss:.4f}, val loss {loss + 0.02:.4f}")
            lines.append("saving checkpoint to out")
        lines.append(f"iter {step}: loss {loss:.4f}, time {time_s * 1e3:.2f}ms, mfu 41.27%")
    return lines


def mxnet() -> list[str]:
    """Two runs in one file: batch 64 in float16, then batch 128 in float32, slower a sample."""
    lines = []
    clock = START
    for run, (batch, dtype, healthy) in enumerate(
        ((64, "float16", 640.0), (128, "float32", 400.0))
    ):
        arguments = f"Namespace(batch_size={batch}, dtype='{dtype}', lr=0.1, num_gpus=1)"
        lines.append(f"{clock:%Y-%m-%d %H:%M:%S} INFO {arguments}")
        for k, factor in enumerate(noisy(1.0, 80, 0.015, seed=3 + run).tolist()):
            speed = healthy / factor
            clock += timedelta(seconds=50 * batch / speed)
            lines.append(
                f"INFO:root:Epoch[{k // 20}] Batch [{(k % 20 + 1) * 50 - 1}]\t"
                f"Speed: {speed:.2f} samples/sec\taccuracy={0.2 + 0.006 * k:.6f}"
            )
    return lines


def mllog() -> list[str]:
    """60 measured iterations of an MLPerf run, five of them spikes."""
    times = noisy(1.93, 60, 0.006, seed=5)
    times[[11, 22, 37, 48, 57]] *= 3.2
    clock = START.timestamp()

    def line(key: str, value: object, **metadata: object) -> str:
        record = {
            "namespace": "",
            "time_ms": round(clock * 1e3),
            "event_type": "POINT_IN_TIME",
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        return f":::MLLOG {json.dumps(record)}"

    lines = [line("global_batch_size", 1152)]
    for k, time_s in enumerate(times.tolist(), start=1):
        clock += time_s
        stats = {"train_step_time": round(time_s, 6), "reduced_train_loss": 9.1}
        lines.append(line("tracked_stats", stats, step=k * 1152))
    lines.append(line("run_stop", None, status="success"))
    return lines


if __name__ == "__main__":
    main()
