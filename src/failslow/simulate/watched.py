"""A simulated job watched by the code that watches live ones: agents' messages in, orders out.

In: a `Scenario`, settings, where to write the journal. Out: the journal, as of any watched job, and
what the job's iterations really were:

    watched = watch_job(load_scenario("slow_gpu.yaml"), Path("run/journal.jsonl"))
    watched.lost_s          # then: failslow report run

Every iteration each worker's samples go to `Pipeline.handle`; its orders are carried out as agents
and a `Coordinator` do it: profiles are made of the workers' calls, all workers pause at a boundary
and measure, telemetry is told, micro-batches are redistributed, workers change places, hosts are
left out. Nothing of the pipeline knows that the job is simulated. Time is the job's own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from failslow.config import DecideConfig, DetectConfig, LocalizeConfig, RuntimeConfig
from failslow.journal import JournalWriter, read_journal
from failslow.localize.pause import TOPIC as PAUSE
from failslow.localize.script import expected_s
from failslow.pipeline import (
    AgentBeat,
    Event,
    Instruction,
    Order,
    Pipeline,
    Report,
    Say,
    Tick,
    WorkerSamples,
    WorkerState,
    Write,
)
from failslow.profile_wire import profile_body
from failslow.records import Outcome, Plan, Rung, StepSample
from failslow.simulate.bench import run_bench
from failslow.simulate.course import Course, Step
from failslow.simulate.facts import job_facts
from failslow.simulate.scenario import Scenario
from failslow.simulate.sensors import node_windows
from failslow.simulate.streams import job_profiles, node_name

__all__ = ["START_T", "Settings", "WatchedJob", "watch_job"]

START_T = 1_750_000_000.0
"""When a simulated job starts, unless told otherwise: equal scenarios give equal journals."""
_TICK_S, _BEAT_S = 1.0, 4.0
_REPLY_S = 0.1
_PROFILE_LIMIT_S = 15.0
"""An agent collects a profile for no longer, unless told otherwise (`runtime.duty_profile`)."""
_SETTLED = 20
"""Iterations before the first, healthy profile."""
_COMMIT_S = 0.2
_SAVE_S = 20.0
"""Of what S4 costs, the part for which the old processes are still there: they save the job."""
_COSTS_S: Mapping[Rung, float] = {"S1": 0.05, "S2": 0.05, "S3": 2.0, "S4": 600.0}
"""How long training stands still for going to a level; S4 with what is done again."""
_STEER = "steer"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """What really happened."""

    journal: Path
    duration_s: Sequence[float]
    """Of each iteration."""
    healthy_s: Sequence[float]
    """...had there been no fault."""
    idle_s: float
    """Training stood still: for pauses, and for going to levels."""

    @property
    def lost_s(self) -> float:
        """Wall time that faults, and what was done about them, cost."""
        return sum(self.duration_s) - sum(self.healthy_s) + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of each stage; None for its defaults."""

    detect: DetectConfig | None = None
    runtime: RuntimeConfig | None = None
    decide: DecideConfig | None = None
    localize: LocalizeConfig | None = None


def watch_job(
    scenario: Scenario,
    journal: Path,
    *,
    settings: Settings | None = None,
    costs_s: Mapping[Rung, float] = _COSTS_S,
    start_t: float = START_T,
    say: Callable[[str], None] = lambda _: None,
) -> WatchedJob:
    """Run the scenario to its end under watch. `journal` should not exist yet.

    settings: mode "auto" of `decide` has plans carried out. costs_s: what going to a level really
    costs. say: told what a controller would log.
    """
    writer = JournalWriter(journal)
    try:
        return _Run(
            scenario,
            writer,
            settings=settings or Settings(),
            costs_s=costs_s,
            start_t=start_t,
            say=say,
        ).run()
    finally:
        writer.close()


@dataclass(slots=True)
class _Clock:
    """Seconds since the job began, and who waits for which of them."""

    now_s: float = 0.0
    waiting: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: Any = field(default_factory=count)

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.waiting, (when_s, next(self.numbers), do))


class _Run:
    """The job, its agents and its Coordinator."""

    def __init__(
        self,
        scenario: Scenario,
        writer: JournalWriter,
        *,
        settings: Settings,
        costs_s: Mapping[Rung, float],
        start_t: float,
        say: Callable[[str], None],
    ) -> None:
        self._first, self._writer, self._settings = scenario, writer, settings
        self._costs_s, self._start_t, self._say = costs_s, start_t, say
        self._course = Course(scenario)
        self._clock, self._launch = _Clock(), 0
        self._durations: list[float] = []
        self._healthy: list[float] = []
        self._idle_s = 0.0
        self._last: Step | None = None
        self._orders: deque[Order] = deque()
        self._armed: dict[str, Any] | None = None
        self._steer: dict[str, Any] | None = None
        self._saved: str = ""
        self._facts = job_facts(scenario)
        each = scenario.cluster.devices_per_node
        self._node = [node_name(rank // each) for rank in range(scenario.workload.ranks)]
        self._beats: list[AgentBeat] = []
        self._pipeline = self._start()

    def run(self) -> WatchedJob:
        """All iterations."""
        for index in range(self._first.iterations):
            self._at_boundary()
            step = self._course.step(index, self._clock.now_s)
            self._pass(step.duration_s)
            self._last = step
            self._durations.append(step.duration_s)
            self._healthy.append(step.healthy_s)
            self._report(index, step)
        self._leave()
        return WatchedJob(
            journal=self._writer.path,
            duration_s=self._durations,
            healthy_s=self._healthy,
            idle_s=self._idle_s,
        )

    # -- agents ------------------------------------------------------------------------------------

    def _start(self) -> Pipeline:
        """A start of the job: another one after each restart."""
        self._launch += 1
        each = self._first.cluster.devices_per_node
        names = dict.fromkeys(self._node)
        self._beats = [
            AgentBeat(
                node=name,
                session=self._launch,
                workers=tuple(
                    WorkerState(
                        rank=rank,
                        worker=self._worker(rank),
                        world_size=len(self._node),
                        alive=True,
                        source="step",
                    )
                    for rank in range(at * each, (at + 1) * each)
                ),
            )
            for at, name in enumerate(names)
        ]
        given = self._settings
        pipeline = Pipeline(
            launch=f"simulated-{self._launch}",
            detect=given.detect,
            runtime=given.runtime,
            decide=given.decide,
            localize=given.localize,
            since_t=self._t,
        )
        entries = [] if self._launch == 1 else list(read_journal(self._writer.path))
        self._pipeline = pipeline
        self._do(pipeline.start(entries, self._t))
        self._clock.at(self._clock.now_s, self._beat)
        self._clock.at(self._clock.now_s, lambda: self._letter(asdict(self._facts), "facts"))
        return pipeline

    @property
    def _t(self) -> float:
        return self._start_t + self._clock.now_s

    def _worker(self, rank: int) -> str:
        return f"{rank}-{self._launch}"

    def _beat(self) -> None:
        for beat in self._beats:
            self._give(beat)
        self._clock.at(self._clock.now_s + _BEAT_S, self._beat)

    def _report(self, index: int, step: Step) -> None:
        """Every worker's iteration, and what its Coordinator tells now and then."""
        own, end_t = step.own_s.tolist(), self._t
        for rank, node in enumerate(self._node):
            sample = StepSample(
                step=index,
                duration_s=step.duration_s,
                end_s=end_t,
                compute_s=min(own[rank], step.duration_s),
            )
            self._give(
                WorkerSamples(
                    node=node,
                    rank=rank,
                    worker=self._worker(rank),
                    session=self._launch,
                    counted=True,
                    told=True,
                    samples=(sample,),
                )
            )
        optimizer_s = self._first.workload.optimizer_ms * 1e-3
        for rank, number in enumerate(step.counts.tolist()):
            seconds = (own[rank] - optimizer_s) / number
            self._letter({"rank": rank, "step": index, "microbatch_s": seconds}, "pace")
        if index + 1 == _SETTLED:
            self._profile("healthy", _SETTLED)

    def _letter(self, body: Mapping[str, Any], what: str) -> None:
        self._give(
            Report(node=self._node[0], rank=0, topic=_STEER, body={"what": what, **dict(body)})
        )

    def _profile(self, why: str, iterations: int, limit_s: float = _PROFILE_LIMIT_S) -> None:
        """What the agents collected; an iteration may take too long for them."""
        each_s = self._last.duration_s if self._last else 0.0
        seen = min(iterations, int(limit_s / each_s)) if each_s else 0
        if not seen:
            return
        profiles = job_profiles(
            self._course.scenario,
            at_s=self._clock.now_s,
            iterations=seen,
            window=len(self._durations),
            devices=self._course.devices,
            start_t=self._start_t,
        )
        for profile in profiles:
            body = profile_body(profile, why=why)
            self._give(Report(node=profile.node, rank=profile.rank, topic="profile", body=body))

    def _telemetry(self, body: Mapping[str, Any], node: str) -> None:
        windows = node_windows(
            self._course.scenario,
            since_s=self._clock.now_s - float(body["last_s"]),
            until_s=self._clock.now_s,
            start_t=self._start_t,
        )
        for window in windows:
            if node in ("", window["node"]):
                self._give(Report(node=window["node"], topic="telemetry", body=window))

    # -- time --------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        """Time goes by: ticks, signs of life, answers that are due."""
        end_s = self._clock.now_s + seconds
        while self._clock.now_s < end_s:
            due_s = self._clock.waiting[0][0] if self._clock.waiting else end_s
            self._clock.now_s = max(
                self._clock.now_s, min(end_s, due_s, self._clock.now_s + _TICK_S)
            )
            while self._clock.waiting and self._clock.waiting[0][0] <= self._clock.now_s:
                heapq.heappop(self._clock.waiting)[2]()
            self._give(Tick())

    def _give(self, event: Event) -> None:
        self._do(self._pipeline.handle(event, self._t))

    def _do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Say):
                self._say(instruction.text)
            elif isinstance(instruction, Write):
                self._writer.append(
                    instruction.record,
                    t=instruction.t,
                    kind=instruction.kind,
                    **instruction.tags,
                )
            else:
                self._take(instruction)

    # -- orders ------------------------------------------------------------------------------------

    def _take(self, order: Order) -> None:
        clock, body = self._clock, dict(order.body)
        if order.topic == "profile":
            each_s = self._last.duration_s if self._last else 0.0
            wait_s = max(float(body["for_s"]), int(body["min_iterations"]) * each_s)
            limit_s = float(body.get("limit_s", _PROFILE_LIMIT_S))
            asked = partial(self._profile, str(body["why"]), int(body["min_iterations"]), limit_s)
            clock.at(clock.now_s + min(wait_s, limit_s), asked)
        elif order.topic == "telemetry":
            clock.at(clock.now_s + _REPLY_S, lambda: self._telemetry(body, order.node))
        elif order.topic == PAUSE:
            self._pause(body)
        elif order.topic == _STEER:
            self._steer = body
        elif order.topic == "restart":
            self._saved = str(body["id"])
            each = self._first.cluster.devices_per_node
            nodes = [self._node.index(name) // each for name in body["evict"]]
            self._course.leave(nodes)
            w = self._first.workload
            self._course.steer(
                split=(w.micro_batches,) * w.dp, devices=range(len(self._course.devices))
            )

    def _pause(self, body: dict[str, Any]) -> None:
        """An agent's part in a pause."""
        if body["do"] == "survey":
            calls, each_s = len(self._durations), self._last.duration_s if self._last else 1.0
            groups = [["0 simulated", calls, 1, each_s]]
            self._answer({"say": "groups", "id": body["id"], "speaks": True, "groups": groups})
        elif body["do"] == "arm":
            self._armed = body
            self._answer({"say": "armed", "id": body["id"]})
        elif body["do"] == "release":
            self._armed = None
        elif body["do"] == "commit" and self._armed is not None:
            self._measure(self._armed)

    def _answer(self, body: dict[str, Any]) -> None:
        """All workers say the same, a moment later."""

        def tell() -> None:
            for rank, node in enumerate(self._node):
                self._give(Report(node=node, rank=rank, topic=PAUSE, body=body))

        self._clock.at(self._clock.now_s + _REPLY_S, tell)

    def _measure(self, armed: dict[str, Any]) -> None:
        self._armed = None
        script = armed["script"]
        pause_s = _COMMIT_S + expected_s(script)
        results = run_bench(
            script, self._course.scenario, at_s=self._clock.now_s, seed=self._first.seed
        )
        self._idle_s += pause_s
        self._pass(pause_s)
        for rank, node in enumerate(self._node):
            body = {
                "say": "done",
                "id": armed["id"],
                "results": results.get(rank, []),
                "error": "",
                "pause_s": pause_s,
                "waited_s": _COMMIT_S,
                "step": len(self._durations),
            }
            self._give(Report(node=node, rank=rank, topic=PAUSE, body=body))

    def _at_boundary(self) -> None:
        """Between two iterations: pauses begin, plans are carried out."""
        if self._armed is not None:
            body = {"say": "ready", "id": self._armed["id"]}
            for rank, node in enumerate(self._node):
                self._give(Report(node=node, rank=rank, topic=PAUSE, body=body))
        if self._steer is not None:
            self._carry_out(self._steer)
        if self._saved:
            self._saved = ""
            self._leave()
            self._clock.waiting.clear()
            # nobody watches while it is started anew
            down_s = max(0.0, self._costs_s["S4"] - _SAVE_S)
            self._idle_s += down_s
            self._clock.now_s += down_s
            self._pipeline = self._start()

    def _leave(self) -> None:
        """The workers have ended."""
        for beat in self._beats:
            self._give(replace(beat, leaving=True))
        self._do(self._pipeline.finish(self._t))

    def _carry_out(self, order: dict[str, Any]) -> None:
        self._steer = None
        plan = Plan(**order["plan"])
        cost_s = min(self._costs_s[plan.level], _SAVE_S)
        self._idle_s += cost_s
        self._pass(cost_s)
        self._course.steer(split=plan.microbatches or None, devices=plan.placement or None)
        outcome = Outcome(episode=str(order["episode"]), level=plan.level, ok=True, cost_s=cost_s)
        self._letter({"id": order["id"], **asdict(outcome)}, "outcome")
