"""Records the real call streams the tests of `track` replay.

In: the scenarios of tests/capture/job.py, run here as real multi-process torch jobs. Out: one
compressed file a scenario in tests/track/recordings, rank 0's view (and the last rank's of a
pipeline), with the script's own timestamps to compare against:

    records            structured array, columns of `failslow.records.CALL_COLUMNS`
    ops                op names; `records["op"]` indexes it
    group_ranks        global ranks of group i, padded with -1
    true_step_end_ns   when each iteration ended by the script's own clock (same clock)
    losses             the script's losses
    every, changed_at  what the scenario says of itself, -1 when nothing

    python scripts/record_streams.py ddp fsdp
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from job_launch import Job, launch

from failslow.capture.layout import OPS
from failslow.records import CALL_COLUMNS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "track" / "recordings"
SCENARIOS = {
    # scenario: (ranks, iterations, milliseconds of computation an iteration)
    "ddp": (2, 150, 25.0),
    "ddp_accumulate": (2, 120, 25.0),
    "ddp_sync_each": (2, 120, 40.0),
    "fsdp": (2, 120, 25.0),
    "fsdp_accumulate": (2, 60, 60.0),
    "hybrid": (8, 40, 10.0),
    "evaluation": (2, 120, 25.0),
    "checkpoint": (2, 120, 25.0),
    "experts": (2, 120, 25.0),
    "change": (2, 160, 25.0),
}


def record(scenario: str, ranks: int, iterations: int, work_ms: float) -> list[Path]:
    """Run one scenario and write its recordings; returns their paths."""
    written = []
    with tempfile.TemporaryDirectory(prefix="failslow-record-") as name:
        job_file = str(ROOT / "tests" / "capture" / "job.py")
        command = [job_file, scenario, "--iterations", str(iterations), "--out", name]
        with launch([*command, "--work-ms", str(work_ms)], world=ranks) as job:
            job.wait(timeout_s=180)
            for rank in sorted({0, ranks - 1} if scenario == "hybrid" else {0}):
                truth = json.loads((Path(name) / f"rank{rank}.json").read_text())[scenario]
                suffix = f"_rank{rank}" if scenario == "hybrid" else ""
                written.append(save(job, rank, truth, FOLDER / f"{scenario}{suffix}.npz"))
    return written


def save(job: Job, rank: int, truth: dict[str, object], path: Path) -> Path:
    """One rank's ring and truth as a compressed file."""
    reader = job.ring(rank)
    batch = reader.read()
    if batch.lost or reader.faults:
        raise SystemExit(f"{path.name}: {batch.lost} records lost, {reader.faults} faults")
    records = np.empty(len(batch.records), dtype=CALL_COLUMNS)
    for column in CALL_COLUMNS.names or ():
        records[column] = batch.records[column]
    groups = reader.groups()
    group_ranks = np.full((len(groups), max(group.size for group in groups)), -1, dtype=np.int32)
    for group in groups:
        if group.ranks is not None:
            group_ranks[group.number, : group.size] = group.ranks
    marks = truth["marks"]
    assert isinstance(marks, dict)
    np.savez_compressed(
        path,
        records=records,
        ops=np.array(OPS),
        group_ranks=group_ranks,
        true_step_end_ns=np.array(truth["step_end_ns"], dtype=np.int64),
        losses=np.array(truth["losses"]),
        every=np.int64(marks.get("every", -1)),
        changed_at=np.int64(marks.get("changed_at", -1)),
    )
    reader.close()
    return path


def main() -> None:
    """Record the named scenarios, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], help="default: all")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for scenario in parser.parse_args().scenario or SCENARIOS:
        for path in record(scenario, *SCENARIOS[scenario]):
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.1f} kB", flush=True)


if __name__ == "__main__":
    main()
