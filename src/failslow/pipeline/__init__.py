"""The controller's brain: what agents see of the workers in, journal records out. Pure.

In: `WorkerSamples`, `AgentBeat`s, `Report`s, `BusReport`s and `Tick`s, each with the time. Out:
`Order`s to the agents, `Say`s for people, and `Write`s for the journal:

    {"t":…,"kind":"step","step":812,"duration_s":0.0601,"end_s":48.7,…,"workers":4,"healthy_s":0.06}
    {"t":…,"kind":"step","rank":3,"node":"gpu-17","step":812,"duration_s":0.0602,"iterations":16,
     "compute_s":0.051,"worker":"41822-991","healthy_s":0.0601,"state":"ok"|"slow"|"silent",…}
    {"t":…,"kind":"suspicion","event":"suspected"|"cleared","id":"e1745735301","step":812,
     "first_step":807,"first_t":…,"slowdown":1.41,"baseline_s":0.06,"culprits":[…]}
    {"t":…,"kind":"episode","event":"onset"|"level"|"update"|"relief"|"abandoned",
     "id":"e1745735301","start_t":…,"end_t":null,"slowdown_now":1.40, …fields of `Episode`…}
    {"t":…,"kind":"health","what":"agent","ok":false,"node":"gpu-17","ranks":[2,3],"since_t":…,
     "message":"monitoring of node gpu-17 is blind since …"}
    {"t":…,"kind":"health","what":"controller","ok":true,"event":"started"|"alive"|"resumed"|
     "ended","launch":"41822-991","healthy_s":0.06,"evicted":0,"message":""}
    {"t":…,"kind":"action","what":"ordered","id":3,"level":"S2","episode":"e1745735301","plan":{…}}
    {"t":…,"kind":"outcome","id":3,…fields of `Outcome`…}; without an id: not answered, or measured
    {"t":…,"kind":"action","what":"standing","microbatches":[9,5,9,9],"placement":[0,1,2,3],
     "next_id":4}; "anew": the workers were started again, no order before it counts
    {"t":…,"kind":"action","what":"pausing","episode":"e1745735301","why":"suspects","pause_s":1.3}
    {"t":…,"kind":"action","what":"learnt","layout":{"dp":4,…},"levels":{"S2":{"cost_s":[…],…}}}
    {"t":…,"kind":"culpritpace","key":"device rank 2","slowdown":1.97}
    {"t":…,"kind":"action","what":"pace","episode":"e1745735301","slowdown":1.1,"lost_s":31.2}

A step without a rank is the job's, one line an iteration. A worker's line sums up its iterations
since the one before (`iterations` of them), one a second or less often. A suspicion's id is that
of the episode it may become; an onset with the id of an episode that ended reopens it. What the
policy goes by while something is done about a fault is told as it changes: each culprit's own pace,
and the job's, which for a while is not that of the episode's level.

Times are of the controller's clock, those of iterations (and so of suspicions and episodes) of the
job's: the median of its workers' clocks. Telemetry is put on the job's clock too, whatever its
node's says ("ahead_s"). A worker's own lines keep to its node's clock, which it goes on by.

A health trouble (what, node, rank) begins with `ok` false and ends with `ok` true; `what` is one of
controller, bus, agent, worker, job, ring, tracker, coverage, token, clock, messages. The controller
says it is alive every ten seconds; with that, every minute or less often, it repeats what is in
force and the job's facts, for a controller that goes on reads the journal's end only.
"""

from __future__ import annotations

from failslow.pipeline.core import Pipeline
from failslow.pipeline.messages import (
    AgentBeat,
    BusReport,
    Event,
    Instruction,
    Order,
    Report,
    Say,
    Tick,
    WorkerSamples,
    WorkerState,
    Write,
)

__all__ = [
    "AgentBeat",
    "BusReport",
    "Event",
    "Instruction",
    "Order",
    "Pipeline",
    "Report",
    "Say",
    "Tick",
    "WorkerSamples",
    "WorkerState",
    "Write",
]
