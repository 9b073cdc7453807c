"""What the Coordinator of a simulated job would tell the controller of it.

In: a `Scenario`. Out: its `JobFacts`, times left unknown: `localize.calibrate` fills them in.

    job_facts(scenario)      # JobFacts(pp=2, dp=4, tp=8, microbatches=64, hosts=("node0", …), …)
"""

from __future__ import annotations

from failslow.records import JobFacts
from failslow.simulate.scenario import Scenario
from failslow.simulate.streams import node_name

__all__ = ["job_facts"]


def job_facts(scenario: Scenario) -> JobFacts:
    """Its grid, its hosts, and what it cannot bear."""
    w, each = scenario.workload, scenario.cluster.devices_per_node
    no_split = ""
    if w.ep > 1:
        no_split = "experts exchange tokens between replicas"
    elif w.schedule == "interleaved" and w.vpp > 1:
        no_split = "the interleaved schedule needs equal numbers"
    return JobFacts(
        pp=w.pp,
        dp=w.dp,
        tp=w.ranks_per_worker,
        microbatches=w.dp * w.micro_batches,
        least_microbatches=w.pp if w.pp > 1 else 1,
        hosts=tuple(node_name(rank // each) for rank in range(w.ranks)),
        no_redistribution=no_split,
        least_hosts=0,  # a spare takes the place of one that is left out
    )
