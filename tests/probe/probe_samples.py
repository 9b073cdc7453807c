"""Results and records of probes for the tests of stores, campaigns and studies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from failslow.probe.campaign import Ending
from failslow.probe.result import ProbeResult
from failslow.probe.store import ProbeRecord

__all__ = ["record", "result"]


def result(
    *, nodes: tuple[str, ...] = ("node0",), begin_t: float = 1000.0, **more: Any
) -> ProbeResult:
    """Healthy, of two workers a node, unless `more` says else."""
    workers = 2 * len(nodes)
    healthy = ProbeResult(
        probe_id="c1-1n-0001.1",
        campaign="c1",
        nodes=nodes,
        workers=workers,
        dp=workers,
        begin_t=begin_t,
        end_t=begin_t + 60.0,
        state="done",
        iterations=390,
        healthy_iteration_s=0.121,
        result="healthy",
    )
    return replace(healthy, **more)


def record(
    probe: str = "1n-0001",
    *,
    attempt: int = 1,
    ending: Ending = "finished",
    found: ProbeResult | None = None,
    at_t: float = 1000.0,
    **more: Any,
) -> ProbeRecord:
    """A finished attempt; `more` goes into its result."""
    if found is None and ending != "failed":
        state = "done" if ending == "finished" else "preempted"
        found = result(begin_t=at_t, state=state, **more)
    return ProbeRecord(
        probe=probe,
        attempt=attempt,
        ending=ending,
        wanted_nodes=1 if found is None else len(found.nodes),
        executor="local",
        submitted_t=at_t - 1.0,
        ended_t=at_t + 61.0,
        why="" if ending == "finished" else "told to end",
        result=found,
    )
