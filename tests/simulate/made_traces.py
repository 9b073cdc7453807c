"""Operation traces with known durations, as a job of some layout would leave them.

In: a layout, and what each computation takes. Out: an `OperationTrace`, and the step times. Every
start is found by asking for what it needs (memoised recursion); nothing of the replay is used.
Each worker gathers parameters, computes its schedule (receiving and sending blockingly, as
Megatron does), reduces gradients, clips with all others, and updates.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from failslow.records import OperationTrace, ParallelLayout
from failslow.simulate.schedule import Computation, Schedule, stage_orders, sweep_order

__all__ = ["Job", "Own", "make_trace", "rows_of", "write_csv", "write_json_lines"]

Own = Callable[[int, int, Computation], float]
"""Seconds of a computation, from step, replica and computation."""
Row = dict[str, int | float | str]

GATHER_S, TRANSFER_S, REDUCE_S, CLIP_S, UPDATE_S = 0.02, 0.001, 0.05, 0.004, 0.03
_GOING = {True: "forward", False: "backward"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is traced."""

    schedule: Schedule = "1f1b"
    dp: int = 2
    pp: int = 4
    vpp: int = 1
    micro_batches: int = 4
    steps: int = 3
    gap_s: float = 0.0
    """Before each computation, in which nothing recorded happens."""
    overlapped: bool = False
    """Gradients are reduced chunk by chunk, beside computation."""
    idle_transfers: bool = False
    """Sends and recvs that carry nothing are recorded too."""
    clock_error_s: float = 0.0
    """Clocks of workers differ by up to this."""


def make_trace(job: Job, own_s: Own) -> tuple[OperationTrace, np.ndarray]:
    """The trace, and how long each step took."""
    rows: list[Row] = []
    times = []
    for step in range(job.steps):
        made = _Step(job, step, own_s)
        rows += made.rows()
        times.append(made.end_s)
    return _trace(job, rows), np.array(times)


def rows_of(trace: OperationTrace) -> list[Row]:
    """The trace in the columns of its file."""
    columns: dict[str, np.ndarray] = {
        "dp_rank": trace.dp,
        "stage": trace.stage,
        "rank": trace.rank,
        "step": trace.step,
        "optype": np.array(trace.kinds)[trace.kind],
        "start_ts": trace.start_s,
        "duration": trace.duration_s,
        "seq_id": trace.seq,
        "mc": trace.chunk,
        "mb_id": trace.microbatch,
        "gmc": trace.global_chunk,
    }
    lists = {name: column.tolist() for name, column in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def write_csv(path: Path, rows: list[Row], columns: list[str] | None = None) -> Path:
    """`rows` as CSV; gzip when the name says so."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_json_lines(path: Path, rows: list[Row]) -> Path:
    """`rows` as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class _Step:
    """One step: when everything starts and ends."""

    def __init__(self, job: Job, step: int, own_s: Own) -> None:
        self.job, self.step, self.own = job, step, own_s
        self.orders = stage_orders(
            job.schedule,
            stages=job.pp,
            micro_batches=job.micro_batches,
            chunks_per_stage=job.vpp,
        )
        self.chunks = job.pp * job.vpp
        self.start = cache(self._start)
        self.arrival = cache(self._arrival)
        self.reduced = cache(self._reduced)
        for _, c in sweep_order(self.orders):  # what each asks for is known: no deep recursion
            for d in range(job.dp):
                self.start(d, c)
        self.workers = [(d, s) for d in range(job.dp) for s in range(job.pp)]
        clip_starts = {worker: self._tail_start(*worker) for worker in self.workers}
        self.clip_starts = clip_starts
        self.clip_end = max(clip_starts.values()) + CLIP_S
        self.end_s = self.clip_end + UPDATE_S

    # -- computations --------------------------------------------------------------------------

    def _place(self, c: Computation) -> tuple[int, int]:
        stage = c.chunk % self.job.pp
        return stage, self.orders[stage].index(c)

    def free(self, d: int, c: Computation) -> float:
        """When the worker has finished what comes before `c`."""
        stage, place = self._place(c)
        if place == 0:
            return GATHER_S
        return self.end(d, self.orders[stage][place - 1])

    def _needs(self, c: Computation) -> Computation | None:
        chunk = c.chunk - 1 if c.forward else c.chunk + 1
        if 0 <= chunk < self.chunks:
            return Computation(c.forward, chunk, c.micro_batch)
        return None

    def _arrival(self, d: int, c: Computation) -> float:
        """When what `c` needs has been received; the recv is posted when the worker is free."""
        sender = self._needs(c)
        assert sender is not None
        return max(self.free(d, c), self.end(d, sender)) + TRANSFER_S

    def _start(self, d: int, c: Computation) -> float:
        ready = self.free(d, c) if self._needs(c) is None else self.arrival(d, c)
        return ready + self.job.gap_s

    def end(self, d: int, c: Computation) -> float:
        return self.start(d, c) + self.own(self.step, d, c)

    # -- gradients -----------------------------------------------------------------------------

    def _last_backward(self, chunk: int) -> Computation:
        return [c for c in self.orders[chunk % self.job.pp] if c.chunk == chunk and not c.forward][
            -1
        ]

    def _reduced(self, stage: int, nth: int) -> tuple[dict[int, float], float]:
        """(start by replica, end) of the nth reduction of a stage, last chunk first."""
        local = self.job.vpp - 1 - nth
        before = self.reduced(stage, nth - 1)[1] if nth else 0.0
        made = self._last_backward(local * self.job.pp + stage)
        starts = {}
        for d in range(self.job.dp):
            ready = (
                self.end(d, made) if self.job.overlapped else self.end(d, self.orders[stage][-1])
            )
            starts[d] = max(ready, before)
        return starts, max(starts.values()) + REDUCE_S

    def _tail_start(self, d: int, stage: int) -> float:
        done = self.end(d, self.orders[stage][-1])
        return max(done, self.reduced(stage, self.job.vpp - 1)[1])

    # -- rows ----------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        rng = np.random.default_rng(self.step)
        for d, stage in self.workers:
            error = self.job.clock_error_s * rng.uniform(-1, 1)
            rows += self._worker_rows(d, stage, 100.0 * self.step + error)
        return rows

    def _worker_rows(self, d: int, stage: int, clock: float) -> list[Row]:
        rows: list[Row] = []

        def add(kind: str, start: float, end: float, chunk: int = -1, mb: int = -1) -> None:
            rows.append(
                {
                    "dp_rank": d,
                    "stage": stage,
                    "step": self.step,
                    "optype": kind,
                    "start_ts": clock + start,
                    "duration": end - start,
                    "mc": chunk // self.job.pp if chunk >= 0 else -1,
                    "mb_id": mb,
                    "gmc": chunk,
                }
            )

        add("params-all-gather", 0.0, GATHER_S)
        for c in self.orders[stage]:
            way = _GOING[c.forward]
            if self._needs(c) is not None:
                add(f"{way}-recv", self.free(d, c), self.arrival(d, c))
            elif self.job.idle_transfers:
                add(f"{way}-recv", self.free(d, c), self.free(d, c))
            add(f"{way}-compute", self.start(d, c), self.end(d, c), c.chunk, c.micro_batch)
            reader = Computation(c.forward, c.chunk + (1 if c.forward else -1), c.micro_batch)
            if 0 <= reader.chunk < self.chunks:
                add(f"{way}-send", self.end(d, c), max(self.end(d, c), self.arrival(d, reader)))
            elif self.job.idle_transfers:
                add(f"{way}-send", self.end(d, c), self.end(d, c))
        for nth in range(self.job.vpp):
            starts, end = self.reduced(stage, nth)
            add("grads-reduce-scatter", starts[d], end)
        start = self.clip_starts[d, stage]
        add("optimizer-clip-main-grad", start, self.clip_end)
        add("optimizer", self.clip_end, self.end_s)
        return rows


def _trace(job: Job, rows: list[Row]) -> OperationTrace:
    kinds = sorted({str(row["optype"]) for row in rows})
    count: dict[tuple[object, ...], int] = {}
    seq = []
    for row in rows:
        key = (row["step"], row["dp_rank"], row["stage"], row["optype"])
        seq.append(count.get(key, 0))
        count[key] = seq[-1] + 1

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    dp, stage = column("dp_rank").astype(np.int32), column("stage").astype(np.int32)
    return OperationTrace(
        source="made",
        layout=ParallelLayout(dp=job.dp, pp=job.pp, vpp=job.vpp),
        kinds=tuple(kinds),
        step=column("step").astype(np.int64),
        dp=dp,
        stage=stage,
        rank=stage * job.dp + dp,
        kind=np.array([kinds.index(str(row["optype"])) for row in rows], dtype=np.int16),
        start_s=column("start_ts").astype(np.float64),
        duration_s=column("duration").astype(np.float64),
        seq=np.array(seq, dtype=np.int32),
        chunk=column("mc").astype(np.int32),
        microbatch=column("mb_id").astype(np.int32),
        global_chunk=column("gmc").astype(np.int32),
    )
