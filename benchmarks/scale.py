"""Detector, localisation and planner on simulated jobs of 64 to 102,400 devices.

In: nothing. Out: a table, with --html a picture of how each grows, or JSON:

    $ python benchmarks/scale.py --html scale.html          # ten minutes on a busy core
    devices  simulate_s  found  false  detector_us  controller_ms  right  innocents  diagnose_s  …
         64        1.03    3/3      0           37            2.3    5/5          0        0.01  …
      1,024        2.20    3/3      0           37           27.5    5/5          0        0.18  …
     10,240        2.72    3/3      0           30          188.1    5/5          0        2.16  …
    102,400        7.08    3/3      0           33         2417.8    2/2          0        8.88  …

A process for each size, so that its memory is its own. *simulate*: processor seconds of 1,000
iterations. *found, false*: faults the detector found, false alarms. *detector*: microseconds an
iteration. *controller*: processor milliseconds in which `Pipeline.handle` takes all workers'
samples of one iteration. *right*: faults whose culprits localisation named, all of them and nobody
else, of faults of each kind (device, host, network card, link, two at once). *diagnose*: seconds to
compare the call profiles of all workers, now and healthy; *judge*: to plan the pause and judge what
it measured. *plan*: seconds for S2 to S4; *left*: of the slowdown under its plan, as the simulator
works it out, and as the plan promised.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failslow.config import DecideConfig
from failslow.decide import InForce, LayoutPlanner
from failslow.detect import analyze
from failslow.localize.calibrate import calibrate
from failslow.pipeline import AgentBeat, Pipeline, Tick, WorkerSamples, WorkerState
from failslow.records import StepSample
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload, score, simulate
from failslow.simulate.facts import job_facts
from failslow.simulate.inquire import Located, is_part, locate, true_findings
from failslow.simulate.streams import job_profiles, node_name
from failslow.simulate.truth import JobTruth

SIZES = (64, 1024, 10_240, 102_400)
LARGE = 50_000
"""From so many devices on not every kind of fault is localised: each takes a minute."""
ONSET_S, NOW_S = 100.0, 200.0
COLUMNS = (
    ("devices", "{:,}"),
    ("simulate_s", "{:.2f}"),
    ("found", "{}"),
    ("false", "{}"),
    ("detector_us", "{:.0f}"),
    ("controller_ms", "{:.1f}"),
    ("right", "{}"),
    ("innocents", "{}"),
    ("diagnose_s", "{:.2f}"),
    ("judge_s", "{:.2f}"),
    ("plan_s", "{:.3f}"),
    ("left", "{}"),
    ("memory_mb", "{:,.0f}"),
)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="devices, of 64 each")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw how each grows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.iterations)))
        return
    if not options.json:
        print("  ".join(f"{name:>{_width(name)}}" for name, _ in COLUMNS))
    rows = []
    for size in options.sizes:
        if size < 64 or size % 64:
            parser.error(f"--sizes {size} must be a multiple of 64")
        command = [sys.executable, __file__, "--one", str(size)]
        command += ["--iterations", str(options.iterations)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        if not options.json:
            cells = [(form.format(rows[-1][name]), _width(name)) for name, form in COLUMNS]
            print("  ".join(f"{cell:>{width}}" for cell, width in cells), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    if options.html is not None:
        draw(rows, options.html)


def _width(name: str) -> int:
    return max(len(name), 11 if name == "left" else 7)


def job(devices: int) -> Scenario:
    """A GPT-3-sized model on so many devices, healthy."""
    pp = min(16, max(2, devices // 64))
    return Scenario(
        name=f"{devices:,} devices",
        cluster=Cluster(groups=(NodeGroup(nodes=devices // 8),)),
        workload=Workload(
            layers=96,
            hidden=12288,
            sequence=2048,
            tp=8,
            pp=pp,
            dp=devices // (8 * pp),
            micro_batches=32,
        ),
    )


def faults(plain: Scenario) -> Iterator[tuple[str, Scenario]]:
    """(kind, the job with such a fault)."""
    nodes = plain.cluster.nodes
    middle, at = nodes // 2, ONSET_S
    device = plain.slow_device(rank=8 * middle + 3, from_s=at, factor=1.5)
    yield "device", device
    yield "link", plain.congest(link=(middle, middle + 1), from_s=at, factor=20)
    if plain.workload.ranks >= LARGE:
        return
    yield "card", plain.congest(node=middle, from_s=at, factor=20)
    yield "host", plain.cpu_contention(node=1, from_s=at, factor=1.6)
    yield "two", device.congest(link=(0, 1), from_s=at, factor=8)


def measure(devices: int, iterations: int) -> dict[str, Any]:
    """One row of the table."""
    plain = job(devices)
    row: dict[str, Any] = {"devices": devices}
    row |= detected(plain, iterations)
    row["controller_ms"] = controlled(plain, 10 if devices < LARGE else 3)
    places = 8 if devices < LARGE else 2
    healthy = job_profiles(plain, at_s=0.0, places=places)
    tried = right = innocents = 0
    diagnose_s, judge_s = [], []
    located: dict[str, Located] = {}
    for kind, scenario in faults(plain):
        found = locate(scenario, at_s=NOW_S, onset_s=ONSET_S, places=places, healthy=healthy)
        truth, named = true_findings(scenario, NOW_S), found.verdict.findings
        guilty = [any(is_part(f, true) for true in truth) for f in named]
        tried += 1
        right += all(guilty) and all(any(is_part(f, true) for f in named) for true in truth)
        innocents += not all(guilty)
        diagnose_s.append(found.diagnose_s)
        judge_s.append(found.judge_s)
        located[kind] = found
    row |= {
        "right": f"{right}/{tried}",
        "innocents": innocents,
        "diagnose_s": statistics.median(diagnose_s),
        "judge_s": statistics.median(judge_s),
    }
    facts = calibrate(job_facts(plain), healthy)
    del healthy
    struck = dict(faults(plain))
    row |= planned(struck["device"], located["device"], facts)
    row["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def detected(plain: Scenario, iterations: int) -> dict[str, Any]:
    """The detector on a job with three faults in its course."""
    told = (
        plain.but(iterations=iterations)
        .congest(node=plain.cluster.nodes // 2, from_s=600, for_s=600, factor=20)
        .slow_device(rank=plain.workload.ranks // 2, from_s=1500, for_s=600, factor=1.5)
        .thermal(node=0, from_s=2200, for_s=600, factor=1.7)
    )
    begin_s = time.process_time()
    made = simulate(told)
    simulated_s = time.process_time()
    analysis = analyze(made.series)
    analysed_s = time.process_time()
    result = score(made, analysis)
    counting = sum(fault.truth.counts for fault in result.faults)
    return {
        "simulate_s": simulated_s - begin_s,
        "found": f"{counting - result.missed}/{counting}",
        "false": result.false_alarms,
        "detector_us": 1e6 * (analysed_s - simulated_s) / len(made.series),
    }


def controlled(plain: Scenario, iterations: int) -> float:
    """Processor milliseconds in which the controller takes an iteration of all workers."""
    each, pipeline = plain.cluster.devices_per_node, Pipeline(launch="scale")
    now_s, step_s = 1e9, 1.0
    for node in range(plain.cluster.nodes):
        workers = tuple(
            WorkerState(rank=rank, worker=str(rank), world_size=plain.workload.ranks, alive=True)
            for rank in range(node * each, (node + 1) * each)
        )
        pipeline.handle(AgentBeat(node=node_name(node), session=1, workers=workers), now_s)
    begin_s = time.process_time()
    for index in range(iterations):
        now_s += step_s
        for rank in range(plain.workload.ranks):
            sample = StepSample(step=index, duration_s=step_s, end_s=now_s, compute_s=0.5)
            pipeline.handle(
                WorkerSamples(
                    node=node_name(rank // each),
                    rank=rank,
                    worker=str(rank),
                    session=1,
                    counted=True,
                    samples=(sample,),
                ),
                now_s,
            )
        pipeline.handle(Tick(), now_s)
    return 1e3 * (time.process_time() - begin_s) / iterations


def planned(scenario: Scenario, located: Located, facts: Any) -> dict[str, Any]:
    """S2, S3 and S4 against the slow device, and what S2 leaves."""
    begin_s = time.process_time()
    planner = LayoutPlanner(facts, DecideConfig())
    options = planner.assess(located.verdict.findings, planner.initial())
    took_s = time.process_time() - begin_s
    plan = options[0].plan
    if plan is None:
        return {"plan_s": took_s, "left": "none"}
    truth = JobTruth(scenario)
    left = truth.slowdown(NOW_S, in_force=InForce(microbatches=plan.microbatches))
    return {"plan_s": took_s, "left": f"{left:.3f}/{plan.predicted_slowdown:.3f}"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """How time and memory grow with the job, on logarithmic axes."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    lines = (
        ("detector, an iteration", "detector_us", 1e-6),
        ("controller, an iteration", "controller_ms", 1e-3),
        ("diagnose", "diagnose_s", 1.0),
        ("judge", "judge_s", 1.0),
        ("plan", "plan_s", 1.0),
        ("simulate 1,000 iterations", "simulate_s", 1.0),
    )
    devices = [row["devices"] for row in rows]
    figure = make_subplots(cols=2, subplot_titles=("processor time, s", "memory, MB"))
    for name, key, unit in lines:
        seconds = [row[key] * unit for row in rows]
        figure.add_scatter(x=devices, y=seconds, name=name, mode="lines+markers", row=1, col=1)
    memory = [row["memory_mb"] for row in rows]
    figure.add_trace(
        go.Scatter(x=devices, y=memory, mode="lines+markers", showlegend=False), row=1, col=2
    )
    figure.update_xaxes(
        type="log", title="devices", tickvals=devices, ticktext=[f"{d:,}" for d in devices]
    )
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_layout(title="How failslow grows with the job", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


if __name__ == "__main__":
    main()
