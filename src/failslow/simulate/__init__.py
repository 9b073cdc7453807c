"""Jobs that never ran, and jobs that ran, run again: the simulator, and what-if replay.

In: a `Scenario`, or an `OperationTrace`. Out: a `SimulatedJob` with a `StepSeries` as any log
gives, or a `WhatIf`.

    simulate(Scenario().slow_device(rank=3, from_s=200, for_s=600, factor=1.4)).series
    watch_job(scenario, Path("run/journal.jsonl"))     # in simulate.watched: by the live pipeline
    what_if(read_trace("trace.parquet")).diagnosis     # (WhatIfCause(what="stage imbalance", ...),)
"""

from __future__ import annotations

from failslow.simulate.cluster import Cluster, NodeGroup
from failslow.simulate.job import FaultTruth, SimulatedJob, simulate
from failslow.simulate.noise import Noise
from failslow.simulate.scenario import Scenario, load_scenario
from failslow.simulate.score import FaultScore, Score, score
from failslow.simulate.whatif import what_if
from failslow.simulate.workload import Workload

__all__ = [
    "Cluster",
    "FaultScore",
    "FaultTruth",
    "NodeGroup",
    "Noise",
    "Scenario",
    "Score",
    "SimulatedJob",
    "Workload",
    "load_scenario",
    "score",
    "simulate",
    "what_if",
]
