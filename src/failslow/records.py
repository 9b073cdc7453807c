"""The frozen records the stages exchange. Units are in the names; seconds everywhere.

Ingest, capture and the simulator make `StepSample`s, or many at once as the columns of a
`StepSeries`; detect turns them into `Episode`s; an analysis of one job is a `JobAnalysis`. The
records of a suspicion are in `suspects`, those from a verdict to its outcome in `steering`.

    StepSample(step=120, duration_s=0.571, end_s=68.5, iterations=10, work=524288.0)
    CALL_COLUMNS  the columns of a live call stream that capture fills and track reads
    Episode(start_step=13800, end_step=13842, start_s=..., slowdown=1.19, kind="fail_slow", ...)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from failslow.steering import (
    Command,
    CulpritPace,
    Decision,
    Finding,
    JobFacts,
    LevelOption,
    Measurement,
    Outcome,
    Plan,
    Rung,
    SteerMode,
    Verdict,
)
from failslow.suspects import CallCell, Diagnosis, RankProfile, Suspect, group_label

__all__ = [
    "CALL_COLUMNS",
    "KIND_CALL",
    "KIND_OPTIMIZER_STEP",
    "KIND_PAUSE",
    "KIND_TRAINER_STEP",
    "KIND_WAIT",
    "CallCell",
    "CollectiveCall",
    "Command",
    "Culprit",
    "CulpritPace",
    "Decision",
    "Diagnosis",
    "Episode",
    "EpisodeKind",
    "Finding",
    "JobAnalysis",
    "JobFacts",
    "Level",
    "LevelOption",
    "Measurement",
    "OperationTrace",
    "Outcome",
    "ParallelLayout",
    "Plan",
    "RankProfile",
    "Run",
    "Rung",
    "SteerMode",
    "StepSample",
    "StepSeries",
    "Suspect",
    "Verdict",
    "group_label",
]

EpisodeKind = Literal["fail_slow", "workload_change"]

KIND_CALL = 1
"""`kind` of a row that is one collective (or send, or recv) a worker called."""
KIND_WAIT = 2
"""`kind` of a row for a wait on an earlier call: blocked from `start_ns` for `wait_ns`."""
KIND_OPTIMIZER_STEP = 4
"""`kind` of a row for a finished optimizer step; `size_bytes`: the optimizer's ordinal, or 0."""
KIND_TRAINER_STEP = 5
"""`kind` of a row for the trainer's own `step()`; `size_bytes`: the step index it gave, or -1;
`wait_ns`: the work it told, 0 none."""
KIND_PAUSE = 6
"""`kind` of a row for our own pause: the worker stood still from `start_ns` to `end_ns`."""

CALL_COLUMNS = np.dtype(
    [
        ("kind", np.uint8),
        ("op", np.uint8),
        ("group", np.uint16),
        ("group_size", np.uint32),
        ("peer", np.int32),
        ("size_bytes", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("wait_ns", np.int64),
        ("call_ns", np.uint32),
    ]
)
"""One row a call, in the order one rank made them; a structured array may hold more columns.

op indexes a table of op names; group is the rank's own number for a process group; peer the
root or the other side of a send, -1 none. Times are of one steady clock. end_ns: when the
collective was complete, 0 unknown; call_ns: host time inside the call; wait_ns: time the caller
was blocked in `wait` for it. Rows of kinds not named here may be among them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective (or send, or recv) of one worker, as its ring recorded it."""

    seq: int
    """Number of the record in the worker's ring, from 1."""
    op: str
    """Name in torch's c10d dispatcher: "allreduce_", "_allgather_base_", "send" ..."""
    group: int
    """The worker's own number for the process group."""
    group_size: int
    size_bytes: int
    """The whole message, the same on every rank of the group (uneven all-to-alls aside)."""
    dtype: str
    """"" for none and for types without a code."""
    peer: int | None
    """Root, or the other side of a send or recv, as a rank of the group."""
    thread: int
    start_s: float
    """When the host entered the call (CLOCK_MONOTONIC)."""
    call_s: float
    """Host time inside the call; where the host only enqueues this is no duration."""
    wait_s: float
    """How long the caller was blocked waiting for it."""
    duration_s: float | None
    """From the start to its completion; None when nobody knows."""
    is_upper_bound: bool = False
    """`duration_s` is too long: it was complete before its caller asked."""
    is_async: bool = False
    failed: bool = False
    """It raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One timing record: the mean time of an iteration over `iterations` iterations."""

    step: int
    """Step value in the file (or the trainer's index) of the last iteration covered."""
    duration_s: float
    """Mean seconds per iteration."""
    end_s: float
    """When the sample ended, seconds after the first sample began."""
    iterations: int = 1
    """Training iterations this sample stands for."""
    work: float | None = None
    """Work per iteration (tokens, or samples when tokens are unknown); None when unknown."""
    data_s: float | None = None
    """Seconds per iteration spent waiting for data; None when unknown."""
    run: int = 0
    """Index into the runs of the series; grows by one at a restart or a new header."""
    compute_s: float | None = None
    """Live only: seconds per iteration in which the worker was in no collective; None unknown."""
    calls: int | None = None
    """Live only: collectives per iteration, foreign ones left out; None unknown."""
    foreign_calls: int = 0
    """Live only: calls in it that are not of the iteration (evaluation, checkpoint); 0 is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of the program inside a log."""

    note: str = ""
    """What the log says of it: "step numbers restart at 1", "batch_size 128 -> 32"."""
    config_changed: bool = False
    """The header names another configuration than the run before: its times do not compare."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSeries:
    """The timing records of one job as columns of equal length n, in the order they happened.

    Durations are finite and > 0; `end_s` never decreases. Unknown `work`, `data_s` are NaN.
    """

    source: str
    format: str
    step: NDArray[np.int64]
    duration_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    iterations: NDArray[np.int64]
    work: NDArray[np.float64]
    data_s: NDArray[np.float64]
    run: NDArray[np.int64]
    runs: tuple[Run, ...] = (Run(),)
    start_time: float | None = None
    """Epoch seconds at which the first sample began; None when the log has no clock."""
    clocked: bool = False
    """`end_s` comes from the log's own clock, so it holds pauses; else from summed durations."""
    planned_ramp: str = ""
    """Why the work per iteration is known to drift by design ("attention window grows"), or ""."""
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.duration_s)

    def sample(self, index: int) -> StepSample:
        """The record at `index` as a `StepSample`; IndexError outside the series."""
        work, data_s = float(self.work[index]), float(self.data_s[index])
        return StepSample(
            step=int(self.step[index]),
            duration_s=float(self.duration_s[index]),
            end_s=float(self.end_s[index]),
            iterations=int(self.iterations[index]),
            work=None if np.isnan(work) else work,
            data_s=None if np.isnan(data_s) else data_s,
            run=int(self.run[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A stretch of one speed inside an episode."""

    start_step: int
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A worker and what of it is slow; a log of one rank names none."""

    rank: int
    what: Literal["compute", "communication", "data", "host"]
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Onset to relief of one fail-slow, or a change of the work. `end_*` None: ongoing.

    `start_*` is where the slow iterations begin; `end_step` the first healthy step after them.
    """

    start_step: int
    end_step: int | None
    start_s: float
    end_s: float | None
    duration_s: float
    iteration_s: float
    """Median seconds per iteration inside the episode, spikes left out."""
    baseline_s: float
    """Healthy seconds per iteration at the work of the time."""
    slowdown: float
    """iteration_s / baseline_s."""
    peak_slowdown: float
    """Slowdown of its slowest timing record, spikes left out."""
    lost_s: float
    """Wall seconds over healthy inside the episode, spikes left out."""
    confidence: float
    """Posterior probability of the onset being a change point."""
    kind: EpisodeKind = "fail_slow"
    culprits: tuple[Culprit, ...] = ()
    levels: tuple[Level, ...] = ()
    note: str = ""
    first_index: int = 0
    """Index of the first slow record in the series."""
    last_index: int = 0
    """Index of the last slow record in the series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnalysis:
    """What the detector found in one job. Fields are those of schema failslow.analysis/1."""

    source: str
    format: str
    iterations: int
    first_step: int
    last_step: int
    start_time: float | None
    healthy_iteration_s: float
    wall_s: float
    lost_s: float
    """Seconds lost to fail-slow episodes."""
    jct_increase_pct: float
    """100 · lost / (wall − lost): how much longer the job took than it would have."""
    episodes: tuple[Episode, ...]
    spikes: int
    spike_lost_s: float
    warnings: tuple[str, ...] = ()
    spike_index: tuple[int, ...] = field(default=(), repr=False)
    """Indices of the spike records in the series, for the picture."""

    @property
    def fail_slows(self) -> tuple[Episode, ...]:
        """The episodes that are faults, workload changes left out."""
        return tuple(e for e in self.episodes if e.kind == "fail_slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How a job's workers are arranged: data parallel × pipeline stages × tensor parallel."""

    dp: int
    pp: int
    tp: int = 1
    vpp: int = 1
    """Model chunks (virtual stages) on each pipeline stage."""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationTrace:
    """What the traced workers did in the traced steps: columns of equal length n, a row an
    operation. Unknown sequence, chunk and micro-batch numbers are -1."""

    source: str
    layout: ParallelLayout
    kinds: tuple[str, ...]
    """Names `kind` indexes: "forward-compute", "grads-reduce-scatter" ..."""
    step: NDArray[np.int64]
    dp: NDArray[np.int32]
    """Data-parallel rank."""
    stage: NDArray[np.int32]
    """Pipeline stage."""
    rank: NDArray[np.int32]
    """Global rank of the worker."""
    kind: NDArray[np.int16]
    start_s: NDArray[np.float64]
    """When the worker entered the operation; for communication that includes waiting for peers.
    Counted from anything that is common to the workers of a step."""
    duration_s: NDArray[np.float64]
    seq: NDArray[np.int32]
    """Ordinal among the worker's operations of this kind in this step."""
    chunk: NDArray[np.int32]
    """Model chunk on the stage (`mc`)."""
    microbatch: NDArray[np.int32]
    global_chunk: NDArray[np.int32]
    """Model chunk in the model (`gmc`): chunk · pp + stage."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfCause:
    """Something that makes the steps slower than they need be."""

    what: Literal["worker", "stage imbalance", "data imbalance", "communication", "none"]
    where: str
    share: float
    """Of the time over the ideal, what goes when this alone is put right; 0..1 and a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfFix:
    """What a change would bring."""

    what: str
    """"balance the stages", "replace the worker" ..."""
    where: str
    gain_pct: float
    """Of the replayed step time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WhatIf:
    """What would have been: schema failslow.whatif/1, whose definitions are in design §4.

    Slowdowns are mean step times over the ideal's: with all durations the trace's own, and, by
    replica, stage and kind, with only theirs.
    """

    source: str
    layout: ParallelLayout
    steps: NDArray[np.int64]
    measured_s: NDArray[np.float64]
    replayed_s: NDArray[np.float64]
    ideal_s: NDArray[np.float64]
    """A number a step."""
    dp_ranks: tuple[int, ...]
    """The replicas traced, and..."""
    dp_slowdown: NDArray[np.float64]
    stages: tuple[int, ...]
    stage_slowdown: NDArray[np.float64]
    operation_slowdown: tuple[tuple[str, float], ...]
    """(kind, slowdown), the slowest first."""
    worker_slowdown: NDArray[np.float64]
    """(replicas, stages): the smaller of the two slowdowns; NaN where nothing was traced."""
    worker_rank: NDArray[np.int32]
    """(replicas, stages): global ranks; -1 where nothing was traced."""
    diagnosis: tuple[WhatIfCause, ...]
    fixes: tuple[WhatIfFix, ...]
    warnings: tuple[str, ...] = ()

    @property
    def slowdown(self) -> float:
        """Mean replayed over mean ideal step time."""
        return float(self.replayed_s.mean() / self.ideal_s.mean())

    @property
    def launch_slowdown(self) -> float:
        """Mean measured over mean replayed: gaps between operations, which no replay holds."""
        return float(self.measured_s.mean() / self.replayed_s.mean())
