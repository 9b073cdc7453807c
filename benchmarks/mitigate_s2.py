"""S2 on a live job: one of four replicas is slowed twofold, and gets fewer micro-batches.

    python -m benchmarks.mitigate_s2 [--factor 2] [--micro-batches 32] [--json]

The job is examples/hybrid_gpt on four replicas, gloo, watched. Its compute is diluted (a fifth is
matrix products, the rest sleep), so that four workers fit on two cores; the fault stops rank 2's
process for part of every 20 ms (`failslow inject throttle`, by signals), for so long that its
micro-batches take twice as long by the ranks' own account. The plan is
`decide.allocate` on the micro-batch times that the ranks' Coordinators report while the fault is
on; it goes through a `SteerDuty` in this process, as through an agent. Prints iterations a second
healthy, slow and mitigated, the integer optimum for the measured times, and whether the losses are
those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from failslow.capture.ring import find_rings
from failslow.config import TrackConfig
from failslow.decide import allocate
from failslow.inject import throttle
from failslow.pipeline import Order, Report
from failslow.records import Plan
from failslow.runtime.duty_steer import SteerDuty
from failslow.runtime.node import NodeWatch

_TRAIN = Path(__file__).parents[1] / "examples" / "hybrid_gpt" / "train.py"
_WORLD, _SLOW = 4, 2
_TRIALS = 4
_FIRST = (
    ["sh", "-c", 'echo -15 > /proc/self/autogroup; exec nice -n -15 "$@"', "sh"]
    if os.geteuid() == 0
    else []
)
"""What else the machine does is not to be measured."""


class _Job:
    """Four ranks, and this process as their agent."""

    def __init__(self, folder: Path, arguments: list[str], *, watch: bool = True) -> None:
        folder.mkdir()
        self.duty = SteerDuty("here")
        self.reports: list[Report] = []
        self.steps: list[tuple[int, float, float]] = []
        """(step, duration_s, end_s) of rank 0's iterations."""
        self._folder = folder
        port = 20_000 + os.getpid() % 20_000 + watch
        self._ranks = [
            subprocess.Popen(
                [*_FIRST, sys.executable, str(_TRAIN), *arguments],
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")},
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(_WORLD),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "FAILSLOW": str(int(watch)),
                    "FAILSLOW_AGENT": "0",
                    "FAILSLOW_CAPTURE_FOLDER": str(folder),
                },
                stdout=(folder / f"out{rank}.txt").open("wb"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(_WORLD)
        ]
        self._watch = NodeWatch(
            node="here",
            session=1,
            find=partial(find_rings, None, {"FAILSLOW_CAPTURE_FOLDER": str(folder)}),
            config=TrackConfig(),
            say=lambda _: None,
        )

    def pid(self, rank: int) -> int:
        """Of a worker."""
        return next(worker.pid for worker in self._watch.workers if worker.rank == rank)

    def until(self, condition: Callable[[], object], limit_s: float = 120.0) -> None:
        """Be the agent until something holds."""
        end_s = time.monotonic() + limit_s
        while not condition():
            if any(p.poll() not in (None, 0) for p in self._ranks) or time.monotonic() > end_s:
                texts = [path.read_text()[-1500:] for path in sorted(self._folder.glob("*.txt"))]
                raise RuntimeError("\n".join([f"failed, or took over {limit_s:g} s", *texts]))
            now_s = time.monotonic()
            self._watch.discover()
            for event in self._watch.read():
                if event.rank == 0:
                    self.steps += [(s.step, s.duration_s, s.end_s or 0.0) for s in event.samples]
            for worker in self._watch.workers:
                for letter in worker.mailbox.receive() if worker.mailbox else ():
                    self.duty.letter(worker, letter, now_s)
            self.reports += self.duty.turn(self._watch.workers, now_s)
            time.sleep(0.05)

    def iterations(self, count: int) -> list[float]:
        """Durations of the next iterations, the first two left out."""
        first = len(self.steps) + 2
        self.until(lambda: len(self.steps) >= first + count)
        return [duration_s for _, duration_s, _ in self.steps[first : first + count]]

    def paces(self) -> list[float]:
        """Seconds a micro-batch of each rank by its next two letters, the later one."""
        since = len(self.reports)

        def said(rank: int) -> list[float]:
            return [
                float(report.body["microbatch_s"])
                for report in self.reports[since:]
                if report.rank == rank and report.body["what"] == "pace"
            ]

        self.until(lambda: all(len(said(rank)) >= 3 for rank in range(_WORLD)))
        return [median(said(rank)[1:]) for rank in range(_WORLD)]

    def finish(self, limit_s: float) -> None:
        """Until all ranks have ended by themselves."""
        self.until(lambda: all(p.poll() == 0 for p in self._ranks), limit_s)

    def kill(self) -> None:
        """End what still runs."""
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def _slowed(job: _Job, factor: float, healthy_s: float) -> Iterator[None]:
    """Rank 2's micro-batches take `factor` times `healthy_s`, within a twentieth."""
    share, leak = 1.0 / factor, 0.0
    for _ in range(_TRIALS):
        with throttle(job.pid(_SLOW), to=share, method="signal"):
            progress = healthy_s / job.paces()[_SLOW]
            if abs(progress * factor - 1.0) <= 0.05:
                yield
                return
        # of a sleep that is under way when the process is stopped, some passes all the same
        leak = (progress - share) / (1.0 - share)
        share = min(0.9, max(0.1, (1.0 / factor - leak) / (1.0 - leak)))
    raise RuntimeError(f"rank {_SLOW} cannot be slowed by {factor:g} here: is the machine busy?")


def _steer(job: _Job, counts: tuple[int, ...]) -> dict[str, Any]:
    plan = Plan(level="S2", predicted_slowdown=1.0, microbatches=counts)
    body = {"id": 1, "level": "S2", "episode": "benchmark", "plan": asdict(plan)}
    job.duty.order(Order(topic="steer", body=body), time.monotonic())

    def answers() -> list[dict[str, Any]]:
        return [dict(r.body) for r in job.reports if r.body["what"] == "outcome"]

    job.until(answers, 60.0)
    return answers()[0]


def main(
    factor: Annotated[float, typer.Option(help="by which rank 2 is slowed")] = 2.0,
    micro_batches: Annotated[int, typer.Option(help="of a step, over four replicas")] = 32,
    work_ms: Annotated[float, typer.Option(help="healthy compute of a micro-batch")] = 24.0,
    iterations: Annotated[int, typer.Option(help="measured in each phase")] = 20,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure once."""
    even = (micro_batches // _WORLD,) * _WORLD
    with tempfile.TemporaryDirectory(prefix="failslow-s2-") as name:
        folder = Path(name)
        options = f"--dp {_WORLD} --micro-batches {sum(even)} --ragged --sequences 1 --length 32"
        options = f"{options} --layers 1 --width 32 --steps {5 * iterations + 100} --dilute 4"
        live = _Job(
            folder / "live",
            [*options.split(), "--work-ms", str(work_ms), "--losses", str(folder / "live.json")],
        )
        try:
            live.until(lambda: len(live.steps) >= 8)
            healthy_s, healthy_paces = median(live.iterations(iterations)), live.paces()
            with _slowed(live, factor, healthy_paces[_SLOW]):
                slow_s, paces = median(live.iterations(iterations)), live.paces()
                plan = allocate([0.0] * _WORLD, paces, sum(even))
                outcome = _steer(live, plan.counts)
                mitigated_s = median(live.iterations(iterations))
            live.finish(300.0)
        finally:
            live.kill()
        plain = _Job(
            folder / "plain",
            [*options.split(), "--losses", str(folder / "plain.json")],
            watch=False,
        )
        try:
            plain.finish(300.0)
        finally:
            plain.kill()
        runs = [json.loads((folder / f"{kind}.json").read_text()) for kind in ("live", "plain")]
    apart = max(abs(a - b) for a, b in zip(*runs, strict=True))
    # what an iteration takes besides the slowest replica's micro-batches
    rest_s = healthy_s - max(n * t for n, t in zip(even, healthy_paces, strict=True))
    true_paces = [t * (factor if i == _SLOW else 1.0) for i, t in enumerate(healthy_paces)]
    optimum_s = allocate([0.0] * _WORLD, true_paces, sum(even)).makespan_s + max(rest_s, 0.0)
    result = {
        "micro_batches": sum(even),
        "iterations_per_s": {
            "healthy": round(1.0 / healthy_s, 3),
            "slow": round(1.0 / slow_s, 3),
            "mitigated": round(1.0 / mitigated_s, 3),
            "integer_optimum": round(1.0 / optimum_s, 3),
        },
        "microbatch_ms": [round(1e3 * t, 2) for t in paces],
        "plan": plan.counts,
        "order_took_s": outcome["cost_s"],
        "faster": round(slow_s / mitigated_s, 3),
        "of_optimum": round(optimum_s / mitigated_s, 3),
        "removed_pct": round(100.0 * (slow_s - mitigated_s) / (slow_s - healthy_s), 1),
        "optimum_removes_pct": round(100.0 * (slow_s - optimum_s) / (slow_s - healthy_s), 1),
        "losses_apart": apart,
        "losses_equal": apart < 1e-5,
    }
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:20} {value}")


if __name__ == "__main__":
    typer.run(main)
