"""The GPT of examples/hybrid_gpt with as many replicas as the world has workers.

In: what torchrun gives a worker, TESTBED_FOLDER. Out: losses<world size>.jsonl and a checkpoint
there.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

__all__ = ["MICROBATCHES", "MODEL"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid_gpt"
MICROBATCHES = 12
MODEL = ("--width", "64", "--layers", "2", "--sequences", "1", "--length", "32")


def main() -> None:
    """Train; the second start goes on from the checkpoint."""
    folder = Path(os.environ["TESTBED_FOLDER"])
    sys.argv = [
        str(EXAMPLE / "train.py"),
        *("--dp", os.environ["WORLD_SIZE"], "--micro-batches", str(MICROBATCHES)),
        *("--steps", "100000", *MODEL),
        *("--work-ms", "15", "--dilute", "6", "--checkpoint", str(folder / "checkpoint")),
        *("--losses", str(folder / f"losses{os.environ['WORLD_SIZE']}.jsonl")),
    ]
    sys.path.insert(0, str(EXAMPLE))
    runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
