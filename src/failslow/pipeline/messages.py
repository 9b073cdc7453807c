"""What the pipeline is told, and what it answers.

In: nothing. Out: frozen records. Events come from the node agents and the clock; instructions go
to the journal and to people.

    WorkerSamples(node="gpu-17", rank=3, worker="41822-991", session=1, counted=True, samples=(...))
    Write(kind="health", record={"what": "agent", "ok": False, ...}, t=1745735250.9, tags={})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from failslow.records import StepSample

__all__ = [
    "AgentBeat",
    "BusReport",
    "Event",
    "Instruction",
    "Order",
    "Report",
    "Say",
    "Tick",
    "WorkerSamples",
    "WorkerState",
    "Write",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSamples:
    """Iterations of one worker, as its node's agent timed them."""

    node: str
    rank: int
    worker: str
    """Which process: its pid and start time. Another one: the worker was restarted."""
    session: int
    """Which start of the agent: another one counts steps anew."""
    counted: bool
    """No record was lost so far, so `step` counts from the worker's first iteration."""
    told: bool = False
    """`step` is the trainer's own index."""
    samples: tuple[StepSample, ...]
    """`end_s` is epoch seconds by the worker's clock, and rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What an agent knows of one worker."""

    rank: int
    worker: str
    world_size: int
    alive: bool
    records: int = 0
    lost_records: int = 0
    faults: int = 0
    iterations: int = 0
    source: str = ""
    """What tells its iterations apart: step, optimizer, period; "" while searching."""
    note: str = ""
    """What a user should know or do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBeat:
    """An agent lives, and these are its node's workers."""

    node: str
    session: int
    workers: tuple[WorkerState, ...]
    leaving: bool = False
    """Its workers are gone and it has sent everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An agent, or one of its workers, answers an order or tells something of its own."""

    node: str
    rank: int | None = None
    """None: the node as a whole."""
    topic: str
    """What it is about: "profile", "telemetry", "pause", "steer"."""
    body: Mapping[str, Any]
    """Plain values; who handles the topic checks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusReport:
    """Counts of the controller's own end of the message bus since it began."""

    refused: int = 0
    """Messages sealed with another token."""
    stale: int = 0
    """Messages whose sender's clock is far off."""
    missed: int = 0
    """Messages that never came."""
    outage_s: float = 0.0
    """Since when the bus does not answer."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; send one a few times a second."""


Event = WorkerSamples | AgentBeat | Report | BusReport | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Append this to the journal: the arguments of `JournalWriter.append`."""

    record: Any
    t: float
    kind: str
    tags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def event(self) -> str:
        """Which turn of a suspicion or an episode it tells: "suspected", "onset" …; "" none."""
        own = self.record if isinstance(self.record, Mapping) else self.tags
        return str(own.get("event", ""))


@dataclass(frozen=True, slots=True)
class Say:
    """Tell whoever looks at the log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Tell the agents to do something."""

    topic: str
    """As in `Report`."""
    body: Mapping[str, Any]
    """Plain values."""
    node: str = ""
    """The one agent it is for; "" all."""


Instruction = Write | Say | Order
