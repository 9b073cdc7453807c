"""What is wrong with the monitoring itself, said once when it begins and once when it ends.

In: beats of the agents, counts, the time. Out: health records:

    {"kind":"health","what":"agent","ok":false,"node":"gpu-17","ranks":[2,3],"since_t":1745735301.2,
     "message":"monitoring of node gpu-17 is blind since …: its agent is silent (ranks 2-3)"}
    {"kind":"health","what":"agent","ok":true,"node":"gpu-17",…}

what: controller, bus, agent, names (two nodes have one name), worker, job (no iteration ends and no
collective is made), ring (records lost), tracker, coverage (workers nobody watches), token, clock,
messages. While only
collectives go on, as in an evaluation, nothing is wrong; that is told too, `ok`:

    {"kind":"health","what":"job","ok":true,"event":"between","since_t":1745735301.2,
     "message":"no training iteration since …; collectives go on: …"}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from failslow.pipeline.messages import AgentBeat, BusReport, Instruction, Say, WorkerState, Write
from failslow.pipeline.series import Worker

__all__ = ["HealthBook", "Trouble", "rank_list"]

_QUIET_AGAIN_S = 30.0
_COVERAGE_S = 60.0
_OUTAGE_S = 1.0


class Trouble(NamedTuple):
    """What is wrong, and where."""

    what: str
    node: str = ""
    rank: int | None = None


@dataclass(slots=True)
class _Agent:
    session: int
    seen_s: float
    workers: dict[int, WorkerState]
    leaving: bool

    @property
    def alive(self) -> set[int]:
        """Its workers that run."""
        if self.leaving:
            return set()
        return {rank for rank, state in self.workers.items() if state.alive}


class HealthBook:
    """Knows the agents and says what of the job cannot be seen.

    blind_after_s: silence of an agent or of a worker's records that counts.
    stall_after_s: time without an iteration that counts, and 20 usual iterations at least.
    alone: other nodes have no token to report with.
    """

    def __init__(self, *, blind_after_s: float, stall_after_s: float, alone: bool = False) -> None:
        self._alone = alone
        self._blind_after_s, self._stall_after_s = blind_after_s, stall_after_s
        self.agents: dict[str, _Agent] = {}
        self._bad: dict[Trouble, float] = {}
        """Troubles that are on, since when (epoch)."""
        self._counts: dict[Trouble, tuple[int, float]] = {}
        self._began_s: float | None = None
        self._world = 0
        self._outage_s = 0.0
        self._records: dict[int, int] = {}
        """Of each rank, as its agent last told: collectives read."""
        self._moved_s: float | None = None
        """When those of a rank last grew."""
        self._between = False
        """It has been told that collectives go on without iterations."""
        self._living: set[int] | None = None
        """`living` as long as it stays; it is asked for with every profile."""

    @property
    def troubles(self) -> list[Trouble]:
        """What is wrong now."""
        return sorted(self._bad, key=str)

    @property
    def watching(self) -> list[str]:
        """Nodes whose agent is heard."""
        if Trouble("bus") in self._bad:
            return []
        return [
            node
            for node, agent in self.agents.items()
            if not agent.leaving and Trouble("agent", node) not in self._bad
        ]

    @property
    def living(self) -> set[int]:
        """Ranks whose agent is heard and which run, as far as it knows; not to be changed."""
        if self._living is None:
            self._living = {
                rank
                for node, agent in self.agents.items()
                if not agent.leaving and Trouble("agent", node) not in self._bad
                for rank, state in agent.workers.items()
                if state.alive
            }
        return self._living

    def silent(self, rank: int) -> bool:
        """Whether its agent or its records are known to be missing."""
        for what, node, whose in self._bad:
            agent = self.agents.get(node) if what == "agent" else None
            if (what == "worker" and whose == rank) or (agent and rank in agent.workers):
                return True
        return False

    def beat(self, event: AgentBeat, now_s: float) -> list[Instruction]:
        """An agent reports."""
        self._began_s = now_s if self._began_s is None else self._began_s
        workers = {worker.rank: worker for worker in event.workers}
        ranks = sorted(workers)
        node = self._known_as(event.node, event.session, workers.keys())
        if node is None:
            return []  # it will tell of its workers soon
        known = self.agents.get(node)
        self.agents[node] = agent = _Agent(event.session, now_s, workers, event.leaving)
        if known is None or known.alive != agent.alive:
            self._living = None
        out: list[Instruction] = []
        if node != event.node and known is None:
            others = rank_list(sorted(self.agents[event.node].workers))
            text = (
                f"two nodes are called {event.node}, that of {others} and that of "
                f"{rank_list(ranks)}: give each a name of its own by FAILSLOW_NODE"
            )
            out += self._turn(Trouble("names", node), text, now_s)
        if event.leaving:
            self._forget(node)
            text = f"agent of node {node} has left: its workers ended"
            return [self._record(Trouble("agent", node), True, now_s, text, ranks=ranks, left=True)]
        again = known is not None and known.session != event.session
        if again or Trouble("agent", node) in self._bad:
            since_t, self._living = self._bad.pop(Trouble("agent", node), now_s), None
            how = "was restarted" if again else "answers again"
            text = f"the agent of node {node} {how}: {rank_list(ranks)} watched again"
            out.append(
                self._record(
                    Trouble("agent", node), True, now_s, text, ranks=ranks, since_t=since_t
                )
            )
            out.append(Say(text))
        elif ranks and (known is None or not known.workers.keys() >= workers.keys()):
            text = f"node {node} is watched: {rank_list(ranks)}"
            out.append(self._record(Trouble("agent", node), True, now_s, text, ranks=ranks))
        for worker in event.workers:
            self._world = max(self._world, worker.world_size)
            if self._records.get(worker.rank, worker.records) != worker.records:
                self._moved_s = now_s
            self._records[worker.rank] = worker.records
            out += self._growing(
                Trouble("ring", node, worker.rank), worker.lost_records, now_s,
                f"rank {worker.rank}: records are overwritten before node {node}'s agent reads "
                f"them ({worker.lost_records:,} so far); raise FAILSLOW_CAPTURE_RECORDS",
            )  # fmt: skip
            out += self._turn(Trouble("tracker", node, worker.rank), worker.note, now_s)
        return out

    def _known_as(self, name: str, session: int, ranks: Collection[int]) -> str | None:
        """Under which name an agent is known: nodes of one name have different ranks. None: it is
        not known which of them it is."""
        free, number = name, 1
        names = []
        while free in self.agents:
            names.append(free)
            number += 1
            free = f"{name} ({number})"
        for known in names:
            if self.agents[known].session == session:
                return known
        for known in names:
            agent = self.agents[known]
            gone = not agent.alive or Trouble("agent", known) in self._bad
            if gone or not agent.workers.keys().isdisjoint(ranks):
                return known
        return free if ranks or not names else None

    def bus(self, event: BusReport, now_s: float) -> list[Instruction]:
        """Counts of the controller's end of the bus."""
        if event.outage_s < self._outage_s:  # it is back: agents need a moment to be heard
            for agent in self.agents.values():
                agent.seen_s = now_s
        self._outage_s = event.outage_s
        text = ""
        if event.outage_s > self._blind_after_s:
            since = _clock(now_s - event.outage_s)
            text = f"monitoring is blind since {since}: the message bus does not answer"
        return [
            *self._turn(Trouble("bus"), text, now_s, now_s - event.outage_s),
            *self._growing(
                Trouble("token"), event.refused, now_s,
                "messages signed with another token are refused: some node is not watched; set "
                "FAILSLOW_TOKEN to the same value on all nodes",
            ),
            *self._growing(
                Trouble("clock"), event.stale, now_s,
                "messages are refused as too old or from the future: set the nodes' clocks",
            ),
            *self._growing(
                Trouble("messages"), event.missed, now_s,
                f"messages of agents were lost ({event.missed:,} so far)",
            ),
        ]  # fmt: skip

    def look(
        self, workers: Iterable[Worker], *, advanced_s: float | None, usual_s: float, now_s: float
    ) -> list[Instruction]:
        """Who has fallen silent by now.

        advanced_s: when the job's last iteration was complete, on the clock of `now_s`.
        """
        out: list[Instruction] = []
        if self._outage_s > _OUTAGE_S:
            return out  # that agents are not heard says nothing of them
        for node, agent in self.agents.items():
            silent_s = now_s - agent.seen_s
            if not agent.leaving and silent_s > self._blind_after_s:
                text = (
                    f"monitoring of node {node} is blind since {_clock(agent.seen_s)}: its agent "
                    f"is silent ({rank_list(sorted(agent.workers))}); training is not affected"
                )
                ranks = sorted(agent.workers)
                out += self._turn(Trouble("agent", node), text, now_s, agent.seen_s, ranks=ranks)
        limit_s = max(self._blind_after_s, 20.0 * usual_s)
        alive = self.living
        if advanced_s is not None:
            for worker in workers:
                quiet = (
                    worker.rank in alive
                    and worker.seen_s is not None
                    and advanced_s - worker.seen_s > limit_s
                )
                text = f"rank {worker.rank}'s records stopped while the job goes on" * quiet
                out += self._turn(
                    Trouble("worker", worker.node, worker.rank), text, now_s, worker.seen_s
                )
            out += self._standstill(advanced_s, max(self._stall_after_s, 20.0 * usual_s), now_s)
            began_s = self._began_s if self._began_s is not None else now_s
            if self._world and now_s - began_s > (
                self._blind_after_s if self._alone else _COVERAGE_S
            ):
                seen = {worker.rank for worker in workers if worker.seen_s is not None}
                missing = [rank for rank in range(self._world) if rank not in seen]
                text = ""
                if missing:
                    text = f"{rank_list(missing)} of {self._world} never reported" + (
                        ": their nodes have no token; set FAILSLOW_TOKEN to the same secret on "
                        "all nodes, or start the job by failslow run"
                        if self._alone
                        else ": is failslow installed and FAILSLOW=1 set there?"
                    )
                out += self._turn(Trouble("coverage"), text, now_s, ranks=missing)
        for key in [
            k for k, (_, grew_s) in self._counts.items() if now_s - grew_s > _QUIET_AGAIN_S
        ]:
            out += self._turn(key, "", now_s)
        return out

    def _standstill(self, advanced_s: float, stall_s: float, now_s: float) -> list[Instruction]:
        """No iteration ends: the job hangs, or does something else."""
        stalled = bool(self.living) and now_s - advanced_s > stall_s
        moved_s = max(advanced_s, self._moved_s or advanced_s)
        hangs = stalled and now_s - moved_s > stall_s
        text = f"no iteration has ended since {_clock(advanced_s)}"
        if moved_s - advanced_s > stall_s:
            text += f", and no collective was made since {_clock(moved_s)}"
        out = self._turn(Trouble("job"), f"{text}: the job hangs" * hangs, now_s, advanced_s)
        if stalled and not hangs and not self._between:
            text = (
                f"no training iteration since {_clock(advanced_s)}; collectives go on: an "
                "evaluation, a checkpoint, or steps that cannot be seen (tell them by "
                "failslow.step())"
            )
            record = self._record(
                Trouble("job"), True, now_s, text, event="between", since_t=advanced_s
            )
            out += [record, Say(text)]
        self._between = stalled and not hangs
        return out

    # -- transitions -------------------------------------------------------------------------------

    def _growing(self, key: Trouble, count: int, now_s: float, text: str) -> list[Instruction]:
        """A counter of troubles: bad while it grows."""
        before = self._counts.get(key, (0, 0.0))[0]
        if count <= before:
            if count < before:  # another process counts anew
                self._counts[key] = (count, self._counts[key][1])
            return []
        self._counts[key] = (count, now_s)
        return self._turn(key, text, now_s)

    def _turn(
        self,
        key: Trouble,
        text: str,
        now_s: float,
        since_s: float | None = None,
        **more: Any,
    ) -> list[Instruction]:
        """Say `text` when the trouble begins; "": it is over, said if it was on."""
        if bool(text) == (key in self._bad):
            return []
        self._living = None
        if text:
            self._bad[key] = now_s if since_s is None else since_s
            more["since_t"] = self._bad[key]
            return [self._record(key, False, now_s, text, **more), Say(text)]
        since_t = self._bad.pop(key)
        text = f"{key.what} is well again" + (f" (rank {key.rank})" if key.rank is not None else "")
        return [self._record(key, True, now_s, text, since_t=since_t, **more)]

    def _forget(self, node: str) -> None:
        self._living = None
        for key in [key for key in self._bad if key.node == node]:
            del self._bad[key]
        for key in [key for key in self._counts if key.node == node]:
            del self._counts[key]

    @staticmethod
    def _record(
        key: Trouble,
        ok: bool,
        now_s: float,
        message: str,
        **more: Any,
    ) -> Write:
        record: dict[str, Any] = {"what": key.what, "ok": ok}
        if key.node:
            record["node"] = key.node
        if key.rank is not None:
            record["rank"] = key.rank
        return Write(kind="health", record=record | more | {"message": message}, t=now_s)


def rank_list(ranks: list[int]) -> str:
    """Ranks as people write them.

    >>> rank_list([0, 1, 2, 5]), rank_list([3]), rank_list([])
    ('ranks 0-2, 5', 'rank 3', 'no ranks')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return "no ranks" if not ranks else f"rank{'s' * (len(ranks) > 1)} {text}"


def _clock(t: float) -> str:
    return datetime.fromtimestamp(t, tz=timezone.utc).strftime("%H:%M:%S UTC")
