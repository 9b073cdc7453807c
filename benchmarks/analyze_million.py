"""`failslow analyze` as a user runs it, on a Megatron log of a million lines.

    python -m benchmarks.analyze_million [--lines 1000000] [--html] [--json]

In: a generated log with known slow stretches. Out: wall and processor seconds and peak memory of
the whole process (start-up, reading, detection, output), and whether the stretches were found.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.ingest_megatron import write_megatron_log

__all__ = ["main"]


def main() -> None:
    """Write the log, analyse it in a process of its own, print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--html", action="store_true", help="write the page too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "train.log"
        truth = write_megatron_log(log, options.lines, options.seed)
        command = [sys.executable, "-c", "from failslow.cli import main; main()"]
        command += ["analyze", str(log), "--json"]
        if options.html:
            command += ["--html", str(Path(folder) / "report.html")]
        began_s = time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True)
        wall_s = time.monotonic() - began_s
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        size_mb = log.stat().st_size / 1e6
    episodes = json.loads(done.stdout)["jobs"][0]["episodes"]
    figures = {
        "lines": options.lines,
        "log_mb": round(size_mb),
        "wall_s": round(wall_s, 2),
        "processor_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(used.ru_maxrss / 1024),
        "slow_stretches": len(truth),
        "episodes": len(episodes),
    }
    if options.json:
        print(json.dumps({"schema": "failslow.benchmark.analyze_million/1", **figures}))
        return
    for name, value in figures.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
