"""The page of a job of a million iterations: how long it takes, how large it is, what it shows.

In: nothing, or the number of records. Out: seconds, megabytes, points.

    python benchmarks/report_million.py [RECORDS]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from failslow.detect import analyze
from failslow.records import StepSeries
from failslow.report import job_picture, write_html


def series_of(records: int) -> StepSeries:
    """Iterations of 0.5 s with 2 % noise, 2 % spikes, and three fail-slows, one of 60 records."""
    rng = np.random.default_rng(0)
    seconds = 0.5 * np.exp(0.02 * rng.standard_normal(records))
    for start, length, slowdown in ((0.2, 5000, 1.3), (0.5, 60, 1.5), (0.8, 20000, 1.2)):
        first = int(start * records)
        seconds[first : first + length] *= slowdown
    seconds[rng.choice(records, records // 50, replace=False)] *= 4.0
    return StepSeries(
        source="million.log",
        format="megatron",
        step=np.arange(1, records + 1),
        duration_s=seconds,
        end_s=np.cumsum(seconds),
        iterations=np.ones(records, np.int64),
        work=np.full(records, np.nan),
        data_s=np.full(records, np.nan),
        run=np.zeros(records, np.int64),
        start_time=1_700_000_000.0,
    )


def main() -> None:
    """Print what the page of a long job costs."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    series = series_of(records)
    began = time.perf_counter()
    analysis = analyze(series)
    analysed = time.perf_counter()
    picture = job_picture(series, analysis)
    pictured = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_html(page, [picture])
        size = page.stat().st_size
    written = time.perf_counter()
    own = len(json.dumps(picture.payload, separators=(",", ":")))
    print(f"records      {records:,}")
    print(f"points       {picture.drawn:,} drawn, {len(picture.payload['spikes']['y']):,} spikes")
    print(f"episodes     {len(analysis.episodes)} found, {len(picture.payload['episodes'])} drawn")
    print(f"detect       {analysed - began:.2f} s")
    print(f"picture      {pictured - analysed:.2f} s")
    print(f"write        {written - pictured:.2f} s")
    print(f"file         {size / 1e6:.2f} MB, of which {own / 1e6:.2f} MB are the job's")


if __name__ == "__main__":
    main()
