"""How fast the simulator and the what-if replay are, and how true the replay is.

    $ python benchmarks/simulate.py
    simulate, 1,000 iterations, processor time
             64 devices    0.54 s    115 MB; 3 of 3 faults found, 0 false;
               detector 20 us an iteration
          1,024 devices    1.06 s    147 MB; 3 of 3 faults found, 0 false;
               detector 19 us an iteration
         10,240 devices    1.66 s    182 MB; 3 of 3 faults found, 0 false;
               detector 16 us an iteration
        102,400 devices    4.17 s    242 MB; 3 of 3 faults found, 0 false;
               detector 16 us an iteration
    what-if, 256 workers x 32 steps, 688,128 operations    1.1 s
    published trace ST    replayed 0.11 % off at most, ideal 0.03 %, slowdowns 0.0009

Those figures are of one core that others used too. The memory is of the whole process.
The last needs the published trace: its folder in FAILSLOW_REAL_TRACES.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from failslow.detect import analyze
from failslow.ingest.traces import read_layout, read_trace
from failslow.records import OperationTrace, ParallelLayout
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload, score, simulate, what_if
from failslow.simulate.pipeline import Pipeline
from failslow.simulate.schedule import Computation

SIZES = (64, 1024, 10_240, 102_400)
KINDS = (
    *("backward-compute", "backward-recv", "backward-send", "forward-compute", "forward-recv"),
    *("forward-send", "grads-reduce-scatter", "optimizer", "optimizer-clip-main-grad"),
    "params-all-gather",
)
TRACES = Path(
    os.environ.get(
        "FAILSLOW_REAL_TRACES",
        Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces",
    )
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure the simulator and the what-if replay.",
        epilog="example: python benchmarks/simulate.py --iterations 200 --json",
    )
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="devices")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(simulated(arguments.one, arguments.iterations)))
        return
    sizes = []
    for size in arguments.sizes:  # a process each, so that the memory is its own
        command = [sys.executable, __file__, "--one", str(size)]
        command += ["--iterations", str(arguments.iterations)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        sizes.append(json.loads(done.stdout))
    replay, published = replayed(), compared()
    if arguments.json:
        result = {"simulate": sizes, "what_if": replay, "published": published}
        print(json.dumps(result, indent=2))
        return
    print(f"simulate, {arguments.iterations:,} iterations, processor time")
    for row in sizes:
        print(
            f"  {row['devices']:>9,} devices {row['seconds']:7.2f} s {row['megabytes']:6.0f} MB; "
            f"{row['faults'] - row['missed']} of {row['faults']} faults found, "
            f"{row['false_alarms']} false; detector "
            f"{row['detect_us_per_iteration']:.0f} us an iteration"
        )
    print(
        f"what-if, {replay['workers']} workers x {replay['steps']} steps, "
        f"{replay['operations']:,} operations    {replay['seconds']:.1f} s"
    )
    if published is None:
        print(f"published trace ST    not in {TRACES}")
        return
    print(
        f"published trace ST    replayed {published['replayed_off_pct']:.2f} % off at most, ideal "
        f"{published['ideal_off_pct']:.2f} %, slowdowns {published['slowdowns_off']:.4f}"
    )


def scenario(devices: int, iterations: int) -> Scenario:
    """A GPT-3-sized job on `devices`, with a fault of each kind in its course."""
    pp = min(16, max(2, devices // 64))
    dp = devices // (8 * pp)
    plain = Scenario(
        name=f"{devices:,} devices",
        cluster=Cluster(groups=(NodeGroup(nodes=devices // 8),)),
        workload=Workload(
            layers=96, hidden=12288, sequence=2048, tp=8, pp=pp, dp=dp, micro_batches=32
        ),
        iterations=iterations,
    )
    return (
        plain.congest(node=devices // 16, from_s=600, for_s=600, factor=20)
        .slow_device(rank=devices // 2, from_s=1500, for_s=600, factor=1.5)
        .thermal(node=0, from_s=2200, for_s=600, factor=1.7)
    )


def simulated(devices: int, iterations: int) -> dict[str, float]:
    """Seconds and memory of one simulation and its analysis, and how right that is."""
    told = scenario(devices, iterations)
    begin_s = time.process_time()
    job = simulate(told)
    simulated_s = time.process_time()
    analysis = analyze(job.series)
    result = score(job, analysis)
    analysed_s = time.process_time()
    faults = [fault for fault in result.faults if fault.truth.counts]
    return {
        "devices": devices,
        "iterations": len(job.series),
        "seconds": simulated_s - begin_s,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "faults": len(faults),
        "missed": result.missed,
        "false_alarms": result.false_alarms,
        "detect_us_per_iteration": 1e6 * (analysed_s - simulated_s) / len(job.series),
    }


def replayed(dp: int = 64, pp: int = 4, micro_batches: int = 16, steps: int = 32) -> dict[str, Any]:
    """Seconds to analyse a made trace of dp · pp workers."""
    trace = made_trace(dp, pp, micro_batches, steps)
    begin_s = time.process_time()
    found = what_if(trace)
    return {
        "workers": dp * pp,
        "steps": len(found.steps),
        "operations": len(trace),
        "seconds": time.process_time() - begin_s,
    }


def made_trace(dp: int, pp: int, micro_batches: int, steps: int) -> OperationTrace:
    """What a 1F1B job with 2 % noise on each stage would have recorded."""
    rng = np.random.default_rng(0)
    cases = dp * steps
    noise = np.exp(0.02 * rng.standard_normal((2, pp, cases)))
    transfer_s = np.full((pp - 1, cases), 0.001)
    blocks: list[tuple[str, int, int, int, NDArray[np.float64], NDArray[np.float64]]] = []
    gathered = 0.02
    free: dict[int, NDArray[np.float64]] = {s: np.zeros(cases) for s in range(pp)}
    ends: dict[Computation, NDArray[np.float64]] = {}

    def add(kind: str, stage: int, seq: int, start: Any, end: Any) -> None:
        shape = np.zeros(cases)
        mb = seq if kind.endswith("compute") else -1
        blocks.append((kind, stage, seq, mb, shape + start, shape + end))

    def watch(
        stage: int, c: Computation, start: NDArray[np.float64], end: NDArray[np.float64]
    ) -> None:
        way = "forward" if c.forward else "backward"
        need = c.needs(pp)
        if need is not None:
            arrived = ends[need] + 0.001
            add(
                f"{way}-recv",
                stage,
                c.micro_batch,
                free[stage],
                np.maximum(free[stage], arrived),
            )
            add(f"{way}-send", need.chunk, c.micro_batch, ends[need], arrived)
        add(f"{way}-compute", stage, c.micro_batch, start, end)
        free[stage], ends[c] = end, end

    times = Pipeline("1f1b", stages=pp, micro_batches=micro_batches).run(
        0.1 * noise[0], 0.2 * noise[1], transfer_s, transfer_s, watch=watch
    )
    stage_end = times.stage_end_s.reshape(pp, dp, steps)
    reduced = stage_end.max(axis=1, keepdims=True) + 0.05
    clipped = reduced.max() + 0.004
    for stage in range(pp):
        end = np.broadcast_to(reduced[stage], (dp, steps)).ravel()
        add("params-all-gather", stage, 0, -gathered, 0.0)
        add("grads-reduce-scatter", stage, 0, stage_end[stage].ravel(), end)
        add("optimizer-clip-main-grad", stage, 0, end, clipped)
        add("optimizer", stage, 0, clipped, clipped + 0.03)
    count = len(blocks)

    def column(place: int, dtype: Any) -> Any:
        return np.repeat(np.array([block[place] for block in blocks]), cases).astype(dtype)

    start = np.concatenate([block[4] for block in blocks])
    end = np.concatenate([block[5] for block in blocks])
    replica = np.tile(np.repeat(np.arange(dp), steps), count)
    step = np.tile(np.tile(np.arange(steps), dp), count)
    stages = column(1, np.int32)
    codes = np.array([KINDS.index(block[0]) for block in blocks])
    microbatch = column(3, np.int32)
    return OperationTrace(
        source="made",
        layout=ParallelLayout(dp=dp, pp=pp),
        kinds=KINDS,
        step=step.astype(np.int64),
        dp=replica.astype(np.int32),
        stage=stages,
        rank=(stages * dp + replica).astype(np.int32),
        kind=np.repeat(codes, cases).astype(np.int16),
        start_s=start,
        duration_s=end - start,
        seq=column(2, np.int32),
        chunk=np.where(microbatch >= 0, 0, -1).astype(np.int32),
        microbatch=microbatch,
        global_chunk=np.where(microbatch >= 0, stages, -1).astype(np.int32),
    )


def compared() -> dict[str, float] | None:
    """How far the replay of the published trace is from the published analysis."""
    if not (TRACES / "trace-ST.parquet").exists():
        return None
    trace = read_trace(TRACES / "trace-ST.parquet", read_layout(TRACES / "meta-ST.yaml"))
    theirs = json.loads((TRACES / "result-ST.json").read_text(encoding="utf-8"))
    found = what_if(trace)

    def off_pct(ours: NDArray[np.float64], name: str) -> float:
        expected = np.array([theirs[name][str(step)] for step in found.steps])
        return 100 * float(abs(ours / expected - 1).max())

    pairs = [
        *zip(found.dp_slowdown, map(str, found.dp_ranks), ["dp_rank"] * 99, strict=False),
        *zip(found.stage_slowdown, map(str, found.stages), ["stage"] * 99, strict=False),
        *((value, kind, "optype") for kind, value in found.operation_slowdown),
    ]
    return {
        "replayed_off_pct": off_pct(found.replayed_s, "step_t_nodelay"),
        "ideal_off_pct": off_pct(found.ideal_s, "step_t_noblk"),
        "slowdowns_off": max(
            abs(value - theirs[f"blocking_decompose_by_{by}"][key]) for value, key, by in pairs
        ),
    }


if __name__ == "__main__":
    main()
