"""S3 on a real congested link: the workers change places in the running job, and it goes faster.

In: nothing; root, for four nodes made of network namespaces. Out: a table, or `--json`:

    python benchmarks/mitigate_s3.py                     # about two minutes on two idle cores

The job is examples/hybrid_gpt, 2 stages x 2 replicas, a worker a node. One link that carries a
stage's gradients is congested, then the links of both. Each time transfers between all nodes are
timed, healthy and now; the planner is given what is slow and the healthy times, the workers hand
their state over, and the iterations that follow are compared with those before and with what the
cost model said. Last everybody goes back: no plan may be made for healthy links.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from failslow.config import DecideConfig
from failslow.decide import InForce, LayoutPlanner
from failslow.errors import MoveError
from failslow.inject import congest
from failslow.lab import TestBed
from failslow.mitigate.move import swap_state, transfer_group
from failslow.records import Finding, JobFacts

WORLD, PP, DP = 4, 2, 2
MICROBATCHES = 4
NOTHING, LINKS, PLACE, STOP = range(4)
PROBE_BYTES = 1 << 20
SLOW = 1.5
"""A transfer that takes so much longer than in healthy times has a slow link."""
CASES: dict[str, list[tuple[int, int]]] = {
    "one link": [(0, 1)],
    "two links": [(0, 1), (2, 3)],
}
TARGETS = {"one link": 1.3, "two links": 1.5}


# -- a worker ----------------------------------------------------------------------------------


def worker(folder: Path) -> None:
    """Train until told to stop; rank 0 looks for orders before each step."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "hybrid_gpt"))
    from data import Batches, read_corpus
    from layout import Grid, Layout
    from model import Shape
    from trainer import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = Trainer(
        grid=Grid.build(Layout(pp=PP, dp=DP), tuple(range(WORLD)), "cpu"),
        shape=Shape(width=256, length=32),
        batches=Batches(
            read_corpus(200_000), sequences=1, length=32, microbatches=MICROBATCHES, seed=0
        ),
        device=torch.device("cpu"),
        learning_rate=1e-3,
        clip=1.0,
        seed=0,
    )
    placement, done, step = tuple(range(WORLD)), 0, 0
    order = torch.zeros(2 + WORLD, dtype=torch.int64)
    with (folder / "steps.jsonl").open("a") as record:
        while True:
            if rank == 0:
                order.copy_(torch.tensor(_latest_order(folder)))
            dist.broadcast(order, 0)
            number, kind, *wanted = order.tolist()
            if number > done:
                done = number
                answer: dict[str, Any] = {"step": step}
                if kind == STOP:
                    break
                if kind == LINKS:
                    answer["links_s"] = _links()
                    answer["ring_s"] = _ring(trainer)
                elif kind == PLACE:
                    answer.update(_move(trainer, placement, tuple(wanted)))
                    placement = tuple(wanted)
                if rank == 0:
                    _put(folder / f"answer{number}.json", answer)
            begin_s = time.perf_counter()
            each = MICROBATCHES // DP
            first = each * trainer.grid.replica
            loss = trainer.step(step, range(first, first + each), MICROBATCHES)
            if rank == 0:
                row = {"step": step, "duration_s": time.perf_counter() - begin_s, "loss": loss}
                record.write(json.dumps(row) + "\n")
                record.flush()
            step += 1
    dist.barrier()
    time.sleep(0.3)
    os._exit(0)  # gloo aborts now and then where a peer has closed first


def _latest_order(folder: Path) -> list[int]:
    try:
        order: list[int] = json.loads((folder / "order.json").read_text())
    except FileNotFoundError:
        return [0] * (2 + WORLD)
    return order


def _put(path: Path, content: Any) -> None:
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").rename(path)


def _links() -> list[list[float]]:
    """Seconds in which PROBE_BYTES get from each rank to each other, one pair at a time."""
    me = dist.get_rank()
    data, word = torch.zeros(PROBE_BYTES, dtype=torch.uint8), torch.zeros(1)
    took = torch.zeros(WORLD, WORLD, dtype=torch.float64)
    for source in range(WORLD):
        for to in range(WORLD):
            dist.barrier()
            if source == to or me not in (source, to):
                continue
            tries = []
            for _ in range(3):
                if me == source:
                    begin_s = time.perf_counter()
                    dist.send(data, to)
                    dist.recv(word, to)
                    tries.append(time.perf_counter() - begin_s)
                else:
                    dist.recv(data, source)
                    dist.send(word, source)
            if tries:
                took[source, to] = min(tries)
    dist.all_reduce(took)
    rows: list[list[float]] = took.tolist()
    return rows


def _ring(trainer: Any) -> float:
    """Seconds of the gradients' all-reduce, everybody being there; the slowest stage's."""
    size = sum(p.numel() for p in trainer.parameters.values())
    flat = torch.zeros(size)
    tries = []
    for _ in range(3):
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(flat, group=trainer.grid.groups[1])
        tries.append(time.perf_counter() - begin_s)
    slowest = torch.tensor([min(tries)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _move(trainer: Any, now: tuple[int, ...], new: tuple[int, ...]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    try:
        with transfer_group(60.0) as group:
            moved = swap_state(
                trainer.state(), placement_now=now, placement_new=new, group=group, limit_s=60.0
            )
    except MoveError as error:
        return {"error": str(error)}
    trainer.move(new, moved.state)
    dist.barrier()
    return {"pause_s": time.perf_counter() - begin_s, "error": ""}


# -- the bench ---------------------------------------------------------------------------------


class Bench:
    """The running job and what is asked of it."""

    def __init__(self, bed: TestBed, patience_s: float) -> None:
        self._bed, self._patience_s = bed, patience_s
        self._orders = 0

    def steps(self) -> list[dict[str, Any]]:
        path = self._bed.folder / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def iteration_s(self, count: int) -> float:
        """Median of the next iterations, but for the first two."""
        goal = len(self.steps()) + count + 2
        self._until(lambda: len(self.steps()) >= goal)
        durations_s: list[float] = [row["duration_s"] for row in self.steps()[goal - count : goal]]
        return statistics.median(durations_s)

    def order(self, kind: int, placement: Sequence[int] = (0,) * WORLD) -> dict[str, Any]:
        """Have it done at the next step; the answer."""
        self._orders += 1
        _put(self._bed.folder / "order.json", [self._orders, kind, *placement])
        answer = self._bed.folder / f"answer{self._orders}.json"
        if kind == STOP:
            return {}
        self._until(answer.exists)
        content: dict[str, Any] = json.loads(answer.read_text())
        return content

    def _until(self, condition: Any) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while not condition():
            self._bed.check()
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the job stood still for {self._patience_s} s")
            time.sleep(0.02)


def findings(healthy: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> list[Finding]:
    """The links whose transfers take longer than they did."""
    return [
        Finding(what="link", slowdown=now[a][b] / healthy[a][b], ranks=(a,), peer_ranks=(b,))
        for a in range(WORLD)
        for b in range(WORLD)
        if a != b and now[a][b] > SLOW * healthy[a][b]
    ]


def measure(steps: int, healthy_mbit: float, slow_mbit: float) -> list[dict[str, Any]]:
    """One row for each case."""
    rows = []
    home = tuple(range(WORLD))
    with (
        tempfile.TemporaryDirectory(prefix="failslow-s3-") as name,
        TestBed(nodes=WORLD, egress_mbit=healthy_mbit, folder=Path(name)) as bed,
    ):
        bed.launch(__file__, args=["--worker", str(bed.folder)])
        bench = Bench(bed, patience_s=240.0)
        bench.iteration_s(3)
        healthy_s = bench.iteration_s(steps)
        calm = bench.order(LINKS)
        # a micro-batch's activations and gradients are small: what they take is their latency
        facts = JobFacts(
            pp=PP,
            dp=DP,
            microbatches=MICROBATCHES,
            least_microbatches=PP,
            dp_s=calm["ring_s"],
            pp_s=2 * 4 * 32 * 256 / PROBE_BYTES * statistics.median(_off_diagonal(calm["links_s"])),
            iteration_s=healthy_s,
            no_redistribution="only S3 is measured here",
        )
        planner = LayoutPlanner(facts, DecideConfig())
        for case, links in CASES.items():
            with ExitStack() as faults:
                for a, b in links:
                    node, there = bed.nodes[a], bed.nodes[b]
                    faults.enter_context(
                        congest(node.namespace, node.interface, slow_mbit, dst=there.address)
                    )
                slow_s = bench.iteration_s(steps)
                found = findings(calm["links_s"], bench.order(LINKS)["links_s"])
                _, s3, _ = planner.assess(found, InForce(placement=home))
                row: dict[str, Any] = {
                    "case": case,
                    "found": [f"{f.ranks[0]}>{f.peer_ranks[0]} x{f.slowdown:.1f}" for f in found],
                    "healthy_s": healthy_s,
                    "slow_s": slow_s,
                    "reason": s3.reason,
                }
                rows.append(row)
                if s3.plan is None:
                    continue
                row["placement"] = s3.plan.placement
                row.update(bench.order(PLACE, s3.plan.placement))
                if row["error"]:
                    continue
                row["moved_s"] = bench.iteration_s(steps)
                row["predicted_s"] = s3.plan.predicted_slowdown * healthy_s
                row["predicted_slow_s"] = (s3.undone or 1.0) * healthy_s
                row["faster"] = slow_s / row["moved_s"]
            bench.order(PLACE, home)
            healthy_s = bench.iteration_s(steps)
        found = findings(calm["links_s"], bench.order(LINKS)["links_s"])
        _, s3, _ = planner.assess(found, InForce(placement=home))
        rows.append({"case": "healthy", "found": [f.key for f in found], "reason": s3.reason})
        losses = [row["loss"] for row in bench.steps()]
        rows[-1]["losses"] = [losses[0], losses[-1]]
        bench.order(STOP)
        bed.wait(60.0)
    return rows


def _off_diagonal(rows: Sequence[Sequence[float]]) -> list[float]:
    return [rows[a][b] for a in range(WORLD) for b in range(WORLD) if a != b]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="iterations of each median")
    parser.add_argument("--healthy-mbit", type=float, default=200.0)
    parser.add_argument("--slow-mbit", type=float, default=40.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
    if reason := TestBed.available():
        raise SystemExit(reason)
    rows = measure(options.steps, options.healthy_mbit, options.slow_mbit)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['case']}: {', '.join(row['found']) or 'no slow link'}")
        if "faster" not in row:
            print(f"  stays: {row.get('error') or row['reason']}")
            continue
        print(
            f"  healthy {row['healthy_s'] * 1e3:.0f} ms, congested {row['slow_s'] * 1e3:.0f} ms, "
            f"moved to {row['placement']} {row['moved_s'] * 1e3:.0f} ms: x{row['faster']:.2f} "
            f"faster (target x{TARGETS[row['case']]}), pause {row['pause_s'] * 1e3:.0f} ms"
        )
        print(
            f"  the model said congested {row['predicted_slow_s'] * 1e3:.0f} ms, "
            f"moved {row['predicted_s'] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
