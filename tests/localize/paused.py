"""A controller for tests: it speaks over a job's real bus, and leads pauses with a `PauseLead`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.runtime.watched import WatchedJob
from tests.transport.servers import until

from failslow.config import LocalizeConfig
from failslow.localize.pause import TOPIC, PauseLead, PauseResult
from failslow.pipeline import Order, Report
from failslow.runtime.transport import Endpoint, from_url
from failslow.runtime.wire import AGENTS, ORDERS, decode, encode_order
from failslow.steering import SteerMode

__all__ = ["JOB", "SCRIPT", "Control", "Told"]

JOB = Path(__file__).with_name("pause_job.py")
SCRIPT: list[dict[str, Any]] = [{"do": "stub", "limit_s": 1.0}]


class Control:
    """Leads pauses of `job`; the job's own controller only runs the bus meanwhile."""

    def __init__(
        self, job: WatchedJob, *, mode: SteerMode = "advise", bus: str = "", **settings: Any
    ) -> None:
        """bus: its address, where it is not the controller's own."""
        self.job = job
        rings = job.folder / "rings"
        job.until(lambda: list(rings.glob("*.run")))
        (folder,) = rings.glob("*.run")
        job.until(lambda: bus or (folder / "address").exists())
        job.until((folder / "token").exists)
        name = folder.name.removesuffix(".run").split("-", 2)[2]
        self.endpoint = Endpoint(
            from_url(bus or (folder / "address").read_text()),
            job=name,
            sender="test",
            token=(folder / "token").read_text().strip(),
        )
        # a message sent before the bus is reached may come too late
        self.endpoint.poll(AGENTS, 0.0)
        job.until(lambda: self.endpoint.health().transport.connected)
        many = {"pauses_per_hour": 1000, "max_pause_share": 1.0, **settings}
        self.config = LocalizeConfig(**many)
        self.lead = PauseLead(self.config, mode=mode)
        self.said: list[tuple[float, int | None, dict[str, Any]]] = []
        """(when, rank, body) of all reports about pauses."""
        self.given: list[tuple[float, dict[str, Any]]] = []
        """Orders."""

    def begin(self, script: Sequence[dict[str, Any]] = SCRIPT) -> None:
        self._order(self.lead.begin(script, range(len(self.job.processes)), time.time()))

    def turn(self) -> None:
        """Take what comes within a hundredth of a second."""
        for message in self.endpoint.poll(AGENTS, 0.01):
            for event in decode(message.payload):
                if isinstance(event, Report) and event.topic == TOPIC:
                    self.said.append((time.time(), event.rank, dict(event.body)))
                    self._order(self.lead.report(event.rank, event.body, time.time()))
        self._order(self.lead.tick(time.time()))

    def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        """Lead on until `condition`."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert not self.job.failed(), self.job.story()
            assert time.monotonic() < deadline_s, f"{self.given[-3:]}\n{self.said[-12:]}"
            self.turn()

    def pause(self, script: Sequence[dict[str, Any]] = SCRIPT) -> PauseResult:
        """A whole pause."""
        self.begin(script)
        self.until(lambda: not self.lead.active)
        assert self.lead.result is not None
        return self.lead.result

    def heard(self, *words: str) -> list[dict[str, Any]]:
        return [body for _, _, body in self.said if body["say"] in words]

    def close(self) -> None:
        self.endpoint.close(0.2)

    def _order(self, bodies: Sequence[dict[str, Any]]) -> None:
        for body in bodies:
            self.given.append((time.time(), body))
            self.endpoint.publish(ORDERS, encode_order(Order(topic=TOPIC, body=body)))


class Told:
    """What the ranks of a job wrote at its end."""

    def __init__(self, job: WatchedJob) -> None:
        files = sorted(job.folder.glob("rank*.json"))
        self.ranks = [json.loads(path.read_text()) for path in files]

    def longest_s(self, begin: int = 20) -> float:
        """The longest iteration of any rank after so many."""
        return max(
            float(later - sooner)
            for rank in self.ranks
            for sooner, later in zip(rank["ends"][begin:], rank["ends"][begin + 1 :], strict=False)
        )

    def same_as(self, other: Told) -> int:
        """Iterations that both did, with the same losses and parameters to the last bit."""
        counts = set()
        for mine, its in zip(self.ranks, other.ranks, strict=True):
            count = min(len(mine["losses"]), len(its["losses"]))
            assert mine["losses"][:count] == its["losses"][:count]
            shas = [step for step in mine["shas"] if step in its["shas"]]
            assert all(mine["shas"][step] == its["shas"][step] for step in shas)
            assert len(shas) == count // 10
            counts.add(count)
        (common,) = counts
        return common


def advance(job: WatchedJob, by: int, limit_s: float = 60.0) -> None:
    """Wait until every rank has done so many more iterations, to the next twenty."""

    def done() -> int:
        files = [job.folder / f"progress{rank}" for rank in range(len(job.processes))]
        texts = [file.read_text() if file.exists() else "" for file in files]
        return min(int(text.split()[0]) if text else 0 for text in texts)

    goal = done() + by

    def there() -> bool:
        assert not job.failed(), job.story()
        return done() >= goal

    until(there, limit_s)
