"""Who uses a run folder, so that two jobs of one name do not become one. Standard library only.

In: a worker that brings the monitoring up. Out: a line of the run folder's `claims`:

    {"job":"exp1","origin":"40112-8231907@127.0.0.1:33291/4026531840@elastic",
     "worker":"40120-8231950","node":"gpu-17","several":false,"journal":"/home/ada/failslow-runs/exp1","namespace":"pid:[402…]"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from failslow.capture.origin import Origin, worker_lives

__all__ = ["Claim", "dump_claims", "parse_claims", "pid_namespace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One start of a job on one node."""

    job: str
    """The name in its rings."""
    origin: str
    worker: str
    """PID-TICKS of the worker; the claim holds as long as it lives."""
    node: str
    several: bool
    """The job has other nodes."""
    journal: str
    """Its folder."""
    namespace: str
    """Where its pid means something."""

    def shares(self, mine: Claim) -> bool:
        """Whether `mine` may use the folder with it.

        Another node of this machine, as test beds have, meets the first one only later: where a
        job of several nodes comes up again, neither launcher nor address need be known yet.
        """
        if Origin.parse(self.origin).shares(Origin.parse(mine.origin)):
            return True
        return self.several and mine.several and self.node != mine.node

    @property
    def is_near(self) -> bool:
        """Whether its worker would be seen from here."""
        return self.namespace == pid_namespace()

    @property
    def lives(self) -> bool:
        """Whether its worker does, if near."""
        return worker_lives(self.worker)


def dump_claims(claims: Iterable[Claim]) -> str:
    """A line each."""
    return "".join(json.dumps(asdict(claim)) + "\n" for claim in claims)


def parse_claims(text: str) -> list[Claim]:
    """What `dump_claims` gave; lines that are none are passed over."""
    found = []
    for line in text.splitlines():
        try:
            claim = Claim(**json.loads(line))
            worker_lives(claim.worker)  # raises for one that is no process
        except (ValueError, TypeError, AttributeError):
            continue
        found.append(claim)
    return found


def pid_namespace() -> str:
    """The one of this process."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
