"""From a verdict and what remedies cost to what is to be done: pure planners, no clock, no torch.

In: the job's pace, `Verdict`s, `CulpritPace`s, `Outcome`s, `Command`s. Out: `Decision`s with a
`Plan`, every one with its arithmetic.

    policy = Policy(LayoutPlanner(facts, config), config)
    for decision in policy.update(event, now_s): ...    # carry out those with `apply`
    policy.due_s()                                      # when to send a Tick

`allocate` is S2, `plan_topology` S3, `Ladder` the rule by which levels follow one another, and
`compare` tells what other policies would have made of the faults of a journal.
"""

from failslow.decide.allocate import (
    Allocation,
    allocate,
    even_split,
    pipeline_costs,
    reallocate,
)
from failslow.decide.events import Event, Pace, Relieved, Tick
from failslow.decide.incident import (
    Incident,
    Stretch,
    learn_history,
    read_facts,
    read_incidents,
)
from failslow.decide.learned import History, choose_theta
from failslow.decide.levels import Assessment, InForce, LayoutPlanner, Planner
from failslow.decide.placement import TopologySearch, best_placement, plan_topology
from failslow.decide.policy import Policy
from failslow.decide.redecide import redecide
from failslow.decide.replay import (
    POLICIES,
    PolicyName,
    RecordedPlanner,
    Replayed,
    compare,
    replay,
)
from failslow.decide.ski import Ladder
from failslow.decide.topology import TopologyModel

__all__ = [
    "POLICIES",
    "Allocation",
    "Assessment",
    "Event",
    "History",
    "InForce",
    "Incident",
    "Ladder",
    "LayoutPlanner",
    "Pace",
    "Planner",
    "Policy",
    "PolicyName",
    "RecordedPlanner",
    "Relieved",
    "Replayed",
    "Stretch",
    "Tick",
    "TopologyModel",
    "TopologySearch",
    "allocate",
    "best_placement",
    "choose_theta",
    "compare",
    "even_split",
    "learn_history",
    "pipeline_costs",
    "plan_topology",
    "read_facts",
    "read_incidents",
    "reallocate",
    "redecide",
    "replay",
]
