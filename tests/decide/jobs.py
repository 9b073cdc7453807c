"""Jobs, culprits and planners the tests of decide share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from failslow.config import DecideConfig
from failslow.decide.levels import Assessment, InForce, Outlook
from failslow.records import Finding, JobFacts, Plan, Rung, Verdict

NOTHING_IGNORED: dict[str, Any] = {"min_gain": 1e-9, "relief_slowdown": 1 + 1e-9}
"""Settings under which every gain counts: what the theory assumes."""


def device(rank: int, slowdown: float = 2.0, host: str = "gpu-1") -> Finding:
    return Finding(what="device", slowdown=slowdown, ranks=(rank,), host=host)


def link(source: str, target: str, slowdown: float = 5.0) -> Finding:
    return Finding(what="link", slowdown=slowdown, ranks=(), host=source, peer_host=target)


def verdict(*findings: Finding, episode: str = "e1") -> Verdict:
    return Verdict(episode=episode, findings=findings)


def settings(**changed: Any) -> DecideConfig:
    """Carries plans out; S4 needs one verdict."""
    values = {"mode": "auto", "allow_restart": True, "confirmations": 1, "max_evictions": 100}
    return DecideConfig(**{**values, **changed})


def facts(**changed: Any) -> JobFacts:
    """Four replicas of one stage on four hosts, 0.1 s a micro-batch."""
    values: dict[str, Any] = {
        "pp": 1,
        "dp": 4,
        "microbatches": 32,
        "stage_s": (0.1,),
        "hosts": ("gpu-0", "gpu-1", "gpu-2", "gpu-3"),
    }
    return JobFacts(**{**values, **changed})


class Shares:
    """A planner that says of each level which share of any slowdown it removes."""

    def __init__(self, shares: Mapping[Rung, float]) -> None:
        self._shares = shares

    def initial(self) -> InForce:
        return InForce(microbatches=(8, 8), placement=(0, 1))

    def assess(
        self,
        findings: Sequence[Finding],  # noqa: ARG002  # the protocol's
        in_force: InForce,  # noqa: ARG002
        outlook: Outlook | None = None,  # noqa: ARG002
    ) -> tuple[Assessment, ...]:
        return tuple(
            Assessment(
                level=level,
                applicable=True,
                share=share,
                plan=Plan(
                    level=level,
                    predicted_slowdown=1.0 if level == "S4" else 1.1,
                    microbatches=(5, 11) if level == "S2" else (),
                    placement=(1, 0) if level == "S3" else (),
                    evict=("gpu-1",) if level == "S4" else (),
                ),
            )
            for level, share in self._shares.items()
        )
