"""Real training on this machine, real faults, and what failslow makes of them.

In: how many nodes, which faults. Out: a `Drill` a fault: when it was noticed, who was named, what
was done, how fast training was before, during and after. `failslow demo` shows it, and
`benchmarks/mitigate.py` is a longer one.
"""

from __future__ import annotations

from failslow.demo.drill import SETTINGS, Drill, Fault, faults_here, run_drill
from failslow.demo.job import SteeredJob, losses_without, steered_job, train_script

__all__ = [
    "SETTINGS",
    "Drill",
    "Fault",
    "SteeredJob",
    "faults_here",
    "losses_without",
    "run_drill",
    "steered_job",
    "train_script",
]
