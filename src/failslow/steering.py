"""The records from a proven culprit to what was done about it; `records` exports them.

Localize makes `Verdict`s, decide turns them into `Decision`s with a `Plan`, mitigate answers with
`Outcome`s. One line of a journal each:

    {"kind":"verdict","episode":"e1745735301","findings":[{"what":"device","slowdown":1.52,
     "ranks":[5],"host":"gpu-17","device":"GPU 5",…}],…}
    {"kind":"decision","episode":"e1745735301","action":"escalate","level":"S2","from_level":"S1",
     "lost_s":1.02,"threshold_s":1.0,"options":[…],"plan":{"level":"S2","microbatches":[7,9,8,8]},…}
    {"kind":"outcome","episode":"e1745735301","level":"S2","ok":true,"cost_s":0.08,…}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Command",
    "CulpritPace",
    "Decision",
    "Finding",
    "JobFacts",
    "LevelOption",
    "Measurement",
    "Outcome",
    "Plan",
    "Rung",
    "SteerMode",
    "Verdict",
]

Rung = Literal["S1", "S2", "S3", "S4"]
"""S1 wait · S2 redistribute micro-batches · S3 change the topology · S4 restart elsewhere."""
SteerMode = Literal["observe", "advise", "auto"]
"""observe: episodes only · advise: verdicts and printed plans · auto: plans are carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One number a finding rests on."""

    what: str
    """"gemm bf16 4096", "send 16 MB", "run-queue wait" …"""
    value: float
    unit: str
    expected: float | None = None
    """What comparable peers or the healthy reference gave; None unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One component that validation proved slow."""

    what: Literal["device", "host", "link"]
    slowdown: float
    """Its time over the comparable healthy time, > 1: 1.5 is a device at two thirds of its speed,
    or a link that takes half as long again."""
    ranks: tuple[int, ...]
    """Workers it slows: the device's, the host's, those on a link's sending side; () with
    `peer_ranks`: all that these receive is slow, whoever sends it."""
    host: str = ""
    device: str = ""
    nic: str = ""
    peer_ranks: tuple[int, ...] = ()
    """A link is directed: the workers on its receiving side; (): all that `ranks` send is slow."""
    peer_host: str = ""
    cause: str = ""
    """"CPU contention", "device degradation (thermal)", "network congestion" …; "" unknown."""
    measurements: tuple[Measurement, ...] = ()
    evidence: tuple[str, ...] = ()
    """Facts for and against, one sentence each."""

    @property
    def key(self) -> str:
        """Names the component whatever its speed: "device rank 5", "link gpu-1>gpu-2"."""
        ranks = ",".join(map(str, self.ranks))
        if self.what == "link":
            peers = ",".join(map(str, self.peer_ranks))
            return f"link {self.host or ranks}>{self.peer_host or peers}"
        if self.what == "host":
            return f"host {self.host or 'of rank ' + ranks}"
        return f"device rank {ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one validation proved; without findings it found nothing."""

    episode: str
    """Id of the episode it explains."""
    findings: tuple[Finding, ...] = ()
    well: tuple[str, ...] = ()
    """`Finding.key` of what was measured and is as fast as it should be."""
    step: int | None = None
    """Iteration at whose boundary training was paused."""
    pause_s: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritPace:
    """How slow a culprit is now by its own time, whatever the job as a whole looks like."""

    key: str
    """`Finding.key`."""
    slowdown: float
    """Its own micro-batch or transfer time over the healthy one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A person overrides the policy: `failslow act`."""

    order: Literal["S2", "S3", "S4", "resume", "ignore"]
    """Go to a level and stay there · decide by yourself again · do nothing about these culprits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What planning must know of a job: its grid, its healthy times, and what it cannot bear.

    Positions are numbered row-major over (pp, dp, tp): ((stage · dp) + replica) · tp + shard.
    """

    pp: int
    dp: int
    tp: int = 1
    microbatches: int
    """Of an iteration of the whole job, over all replicas."""
    least_microbatches: int = 1
    """Fewest a replica can run; a 1F1B schedule needs as many as it has stages."""
    most_microbatches: int | None = None
    """Most a replica can run; None unbounded."""
    ranks: tuple[int, ...] = ()
    """Worker at each position; () = rank equals position."""
    hosts: tuple[str, ...] = ()
    """Host of each rank; () = a host of its own for every tensor-parallel block."""
    stage_s: tuple[float, ...] = ()
    """Healthy compute seconds per micro-batch of each stage; () = unknown, taken as equal."""
    dp_s: float = 0.0
    """Healthy seconds an iteration waits for the gradients' ring over links between hosts."""
    pp_s: float = 0.0
    """Healthy seconds in which one micro-batch's activations and gradients pass between hosts."""
    iteration_s: float = 0.0
    """Healthy seconds per iteration; 0 unknown."""
    no_redistribution: str = ""
    """Why replicas must run equal numbers of micro-batches ("FSDP shard axis"); "" = need not."""
    no_topology_change: str = ""
    """Why workers cannot change places ("no state callbacks given"); "" = they can."""
    no_restart: str = ""
    """Why the job cannot be restarted ("no checkpoint callback"); "" = it can."""
    meeting: tuple[int, ...] = ()
    """Ranks on the host where all meet to start again: without it they could not."""
    least_hosts: int = 1
    """Fewest hosts the job can start again on; 0: a scheduler finds others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done; only the fields of its level are filled."""

    level: Rung
    predicted_slowdown: float
    """Iteration time under the plan over the healthy one, the culprits being as slow as now."""
    microbatches: tuple[int, ...] = ()
    """S2 (and S1, which restores the even split; at S3 with the places): micro-batches of each
    replica."""
    placement: tuple[int, ...] = ()
    """S3: the worker (rank) at each position."""
    evict: tuple[str, ...] = ()
    """S4: hosts to leave out."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelOption:
    """One level as it looked when a decision was taken."""

    level: Rung
    applicable: bool
    reason: str = ""
    """Why it cannot help, or cannot be done."""
    cost_s: float
    """Seconds going there costs."""
    cost_source: Literal["estimate", "measured"] = "estimate"
    slowdown: float
    """Iteration time left there over the healthy one."""
    slowdown_source: Literal["estimate", "measured"] = "estimate"

    @property
    def loss_rate(self) -> float:
        """Seconds lost per second at this level: 1 − 1 / slowdown."""
        return max(0.0, 1.0 - 1.0 / self.slowdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of level, or why there is none, with its arithmetic."""

    episode: str
    action: Literal["stay", "escalate", "replan", "restore", "obey"]
    """stay: nothing helps · replan: same level, new plan · restore: back to S1 · obey: a person
    said so."""
    level: Rung
    """The level from now on."""
    from_level: Rung
    mode: SteerMode
    apply: bool
    """To be carried out; else it is advice."""
    culprits: tuple[str, ...]
    """`Finding.key` of each."""
    lost_s: float
    """Seconds lost to slowness since onset."""
    threshold_s: float | None
    """Seconds lost at which the level is worth its cost; None where no threshold was asked."""
    spent_s: float = 0.0
    """Seconds spent on actions since onset."""
    trust_factor: float = 1.0
    """What the level's cost was multiplied by to give the threshold; 1 = plain ski rental."""
    options: tuple[LevelOption, ...]
    plan: Plan | None = None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a plan."""

    episode: str
    level: Rung
    ok: bool
    cost_s: float
    """Seconds training stood still for it."""
    slowdown: float | None = None
    """Iteration time afterwards over the healthy one; None not measured (yet)."""
    error: str = ""
    """Why it failed, or was refused."""
    refused: bool = False
    """It can never work on this job, so it is not to be tried again."""
