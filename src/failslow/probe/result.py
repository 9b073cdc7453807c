"""What a probe is asked, how it is started, and what it found. No torch, nothing is opened.

In: a `ProbeSpec`. Out: the command that runs it on a node, and of a finished probe one JSON line:

    >>> spec = ProbeSpec(probe_id="c1-0007", campaign="c1", nodes=2, workers_per_node=2)
    >>> command(spec, out="r.json", node_rank=0, rendezvous="10.0.0.1:29400", python="python")
    ... # doctest: +NORMALIZE_WHITESPACE
    ('python', '-m', 'failslow', 'probe', 'run', '--probe-id', 'c1-0007', '--campaign', 'c1',
     '--nodes', '2', '--workers', '2', '--duration', '60', '--preset', 'cpu', '--seed', '0',
     '--node-rank', '0', '--rendezvous', '10.0.0.1:29400', '--out', 'r.json', '--quiet')

    {"schema":"failslow.probe/1","probe_id":"c1-0007","campaign":"c1","size_class":"multi-node",
     "nodes":["node0","node1"],"devices":["NVIDIA H200"],"workers":4,"tp":1,"pp":2,"dp":2,
     "preset":"gpu","begin_t":1745735241.0,"end_t":1745735301.4,"state":"done","error":"",
     "iterations":390,"healthy_iteration_s":0.121,"reference_iteration_s":0.121,
     "reference_source":"own start","fleet_iteration_s":0.122,"result":"communication",
     "cause":"network congestion","onset_delay_s":14.2,"slow_s":31.0,"slowdown":1.62,
     "lost_s":11.9,"jct_increase_share":0.24,"culprits":["link node1>node0"],
     "culprit_causes":["network congestion"],
     "culprit_nodes":["node0","node1"],"evidence":[…],"sm_utilisation_share":null,
     "cnp_per_s":null,"temperature_c":null,"temperature_max_c":null,
     "latency_cv_intra_node":0.05,"latency_cv_inter_node":0.31}
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

__all__ = [
    "SCHEMA",
    "Preset",
    "ProbeResult",
    "ProbeSpec",
    "ProbeState",
    "ResultClass",
    "SizeClass",
    "check_duration",
    "command",
    "nameless",
]

SCHEMA = "failslow.probe/1"
SizeClass = Literal["single-node", "multi-node"]
ProbeState = Literal["done", "preempted", "failed"]
"""done: ran its time · preempted: told to end before; what is measured counts · failed: it could
not train, `error` says why."""
ResultClass = Literal["healthy", "compute", "communication", "both", "unknown"]
"""unknown: slow, and nothing proves by what; or, of a probe that failed, nothing was measured."""
ReferenceSource = Literal["own start", "fleet", ""]
Preset = Literal["cpu", "gpu"]

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_LONGEST_S = 7 * 86_400.0
"""A probe is a look, not a load."""
_WORTH_A_LOOK = 1.1
_NAMELESS = re.compile(r"node \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One finished probe. Measures are None where the machine has none to give."""

    probe_id: str
    campaign: str = ""
    nodes: Annotated[tuple[str, ...], Field(min_length=1)]
    """Host names, in the order of node ranks; `nameless` where one is not known."""
    devices: tuple[str, ...] = ()
    """Models its workers computed on, each once, sorted: "NVIDIA H200", "cpu AMD EPYC"; (): not
    known of all workers."""
    workers: _Count
    """Of the whole probe."""
    tp: _Count = 1
    pp: _Count = 1
    dp: _Count = 1
    preset: Preset = "cpu"
    begin_t: _Seconds
    """Epoch seconds at which it was started..."""
    end_t: _Seconds
    """...and at which its last worker had ended."""
    state: ProbeState
    error: str = ""
    """Of a failed probe, one line."""
    iterations: Annotated[int, Field(ge=0)] = 0
    healthy_iteration_s: _Seconds | None = None
    """Median of this probe's iterations outside fail-slows; None: too few, or never healthy."""
    reference_iteration_s: _Seconds | None = None
    """What the slowdown is counted from..."""
    reference_source: ReferenceSource = ""
    """...its own healthy iterations; the fleet's, of a probe that was slow from its start."""
    fleet_iteration_s: _Seconds | None = None
    """What earlier probes of these sizes took; None: no history was given, or too short a one."""
    result: ResultClass
    cause: str = ""
    """A class as of `localize.evidence.job_cause`: "CPU contention", "device degradation",
    "network congestion", "several at once: …", "unknown"; "" of a healthy probe."""
    onset_delay_s: _Seconds | None = None
    """From the first iteration to the first slow one; 0: slow from its start; None: never."""
    slow_s: _Seconds = 0.0
    """How long it was slow, all fail-slows together."""
    slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Of the iterations of the worst fail-slow over the reference; 1 of a healthy probe."""
    lost_s: _Seconds = 0.0
    jct_increase_share: _Share = 0.0
    """lost / (training time − lost): 0.24 = a completion time 24 % longer."""
    culprits: tuple[str, ...] = ()
    """What the verdicts name: "device rank 1 of node0", "host node0", "link node1>node0"."""
    culprit_causes: tuple[str, ...] = ()
    """One for each culprit, with its detail: "device degradation (thermal)"; "" unknown."""
    culprit_nodes: tuple[str, ...] = ()
    """The hosts in `culprits`, each once, sorted; of a link both ends."""
    evidence: tuple[str, ...] = ()
    """Facts for and against, one sentence each."""
    sm_utilisation_share: _Share | None = None
    """Mean over the probe's GPUs and time, 0..1."""
    cnp_per_s: _Share | None = None
    """Congestion notification packets a second: mean over time, summed over ports and nodes."""
    temperature_c: _Number | None = None
    """Mean over the probe's GPUs and time..."""
    temperature_max_c: _Number | None = None
    """...and the highest."""
    latency_cv_intra_node: _Share | None = None
    """Standard deviation over mean of round trips inside nodes..."""
    latency_cv_inter_node: _Share | None = None
    """...and between nodes."""

    @property
    def size_class(self) -> SizeClass:
        """The study's: one node, or several."""
        return "single-node" if len(self.nodes) == 1 else "multi-node"

    @property
    def is_slow(self) -> bool:
        """The study's "hit"."""
        return self.result != "healthy" and self.onset_delay_s is not None

    @property
    def duration_s(self) -> float:
        """Wall time from start to end."""
        return self.end_t - self.begin_t

    @property
    def trained_s(self) -> float:
        """Time its iterations took together; 0 where so few were seen that nothing is said."""
        pace_s = self.reference_iteration_s or self.healthy_iteration_s
        return 0.0 if pace_s is None else self.iterations * pace_s + self.lost_s

    @property
    def worth_keeping(self) -> bool:
        """Whether somebody may ask for its journal: it was slow, or slower than the fleet, or
        there is more to say of it."""
        healthy_s, fleet_s = self.healthy_iteration_s, self.fleet_iteration_s
        if self.result != "healthy" or self.evidence:
            return True
        return bool(healthy_s and fleet_s and healthy_s >= _WORTH_A_LOOK * fleet_s)

    @property
    def known_nodes(self) -> tuple[str, ...]:
        """Those whose names are known, each once."""
        named = (node for node in self.nodes if _NAMELESS.fullmatch(node) is None)
        return tuple(dict.fromkeys(named))

    def to_json(self) -> str:
        """One line of schema failslow.probe/1, without a line end."""
        about: dict[str, Any] = {"schema": SCHEMA, "size_class": self.size_class}
        return json.dumps(about | asdict(self), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "probe result") -> ProbeResult:
        """The result of a line; keys it does not know are left aside.

        Raises ValueError, one line with `where` and the key at fault.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f"{where}: no record of schema {SCHEMA}")
        try:
            result = _adapter().validate_json(json.dumps(found), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "record"
            raise ValueError(f"{where}: {place}: {first['msg']}") from None
        for wrong in result._contradictions():
            raise ValueError(f"{where}: {wrong}")
        return result

    def _contradictions(self) -> list[str]:
        found = []
        if self.end_t < self.begin_t:
            found.append(f"end_t ({self.end_t}) is before begin_t ({self.begin_t})")
        if self.tp * self.pp * self.dp != self.workers:
            found.append(
                f"tp {self.tp} × pp {self.pp} × dp {self.dp} is not workers ({self.workers})"
            )
        if len(self.culprit_causes) != len(self.culprits):
            found.append(
                f"culprit_causes has {len(self.culprit_causes)} entries for "
                f"{len(self.culprits)} culprits"
            )
        return found


@lru_cache
def _adapter() -> TypeAdapter[ProbeResult]:
    return TypeAdapter(ProbeResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """A probe to run."""

    probe_id: str
    """Letters, digits and . _ -; unique, for files are named by it."""
    campaign: str = ""
    nodes: int = 1
    workers_per_node: int = 4
    duration_s: float = 60.0
    """Of training; start-up comes on top."""
    iterations: int | None = None
    """End once so many were seen instead, if that is sooner; some more may pass meanwhile."""
    preset: Preset = "cpu"
    """Sizes of the job; probes compare only within a preset and layout."""
    seed: int = 0

    def __post_init__(self) -> None:
        """ValueError with value and limit where a field is out of range."""
        if not self.probe_id or not all(c.isalnum() or c in "._-" for c in self.probe_id):
            raise ValueError(
                f"probe_id ({self.probe_id!r}) must be letters, digits and . _ -: it names files"
            )
        if self.nodes < 1 or self.workers_per_node < 1:
            raise ValueError(
                f"nodes ({self.nodes}) and workers_per_node ({self.workers_per_node}) must be at "
                "least 1"
            )
        check_duration(self.duration_s)
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations ({self.iterations}) must be at least 1")

    @property
    def workers(self) -> int:
        """Of all nodes."""
        return self.nodes * self.workers_per_node

    @property
    def size_class(self) -> SizeClass:
        """As of its result."""
        return "single-node" if self.nodes == 1 else "multi-node"

    def again(self, probe_id: str) -> ProbeSpec:
        """The same under another name: a retry."""
        return replace(self, probe_id=probe_id)


def nameless(index: int) -> str:
    """Stands for a node whose name is not known; no host is called so."""
    return f"node {index}"


def check_duration(duration_s: float) -> None:
    """ValueError with value and limit where no probe can train for so long."""
    if not 0 < duration_s <= _LONGEST_S:
        raise ValueError(
            f"duration_s ({duration_s}) must be over 0 and at most {_LONGEST_S:.0f}, a week"
        )


def command(
    spec: ProbeSpec,
    *,
    out: str | Path | None = None,
    folder: str | Path | None = None,
    history: Sequence[str | Path] = (),
    node_rank: int | None = None,
    rendezvous: str | None = None,
    python: str = sys.executable,
) -> tuple[str, ...]:
    """What runs `spec` on one node; with several, run it once on each.

    out: where the node of rank 0 writes its `ProbeResult` (one JSON line, atomically; also of a
    probe that was preempted or failed). folder: keep journal and output there; a scratch folder if
    left out. history: files of earlier results, JSON lines, for the fleet's reference.

    node_rank, rendezvous ("HOST:PORT" on the node of rank 0): left out, they come from the
    scheduler's environment (a Slurm step with one task a node). Several nodes need one secret:
    the caller sets FAILSLOW_TOKEN, 16 characters or more, to the same on all.

    SIGTERM ends the probe within seconds, with a partial result; a second one at once. Exit code:
    0 done (healthy or not) or preempted, 1 failed.
    """
    argv = [python, "-m", "failslow", "probe", "run", "--probe-id", spec.probe_id]
    if spec.campaign:
        argv += ["--campaign", spec.campaign]
    argv += ["--nodes", str(spec.nodes), "--workers", str(spec.workers_per_node)]
    argv += ["--duration", f"{spec.duration_s:g}"]
    if spec.iterations is not None:
        argv += ["--iterations", str(spec.iterations)]
    argv += ["--preset", spec.preset, "--seed", str(spec.seed)]
    if node_rank is not None:
        argv += ["--node-rank", str(node_rank)]
    if rendezvous is not None:
        argv += ["--rendezvous", rendezvous]
    for path in history:
        argv += ["--history", str(path)]
    if folder is not None:
        argv += ["--dir", str(folder)]
    if out is not None:
        argv += ["--out", str(out)]
    return (*argv, "--quiet")
