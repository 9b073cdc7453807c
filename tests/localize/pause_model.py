"""A job of few ranks, its agents and its controller, in which everything may be late or die.

The parts under test are real (`PauseLead`, `PauseNode`, `PauseWorker`); the bus, mailboxes, shared
counts, time and the training program are played. The program: every rank makes call after call on
one group of all ranks, and comes back from a call when all have made it.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from failslow.config import LocalizeConfig
from failslow.localize.pause import PauseLead
from failslow.localize.pause_node import Attend, GroupCount, PauseNode, Post, Tell, WorkerView
from failslow.localize.pause_worker import PauseWorker

__all__ = ["LIMIT_S", "SLICE_S", "World"]

SLICE_S = 0.05
"""Waiting workers look at least so often."""
CONFIG = LocalizeConfig(
    ready_timeout_s=2.5,
    prepare_timeout_s=6.0,
    silence_s=1.0,
    pauses_per_hour=1000,
    max_pause_share=1.0,
)
SCRIPT = [{"do": "stub", "limit_s": 1.0}]
LIMIT_S = CONFIG.ready_timeout_s + 2.0
"""The longest that any rank may stand still: for the word, and for its script."""
KEY, NUMBER = "0 default_pg gloo", 0


@dataclass
class Rank:
    """One training process."""

    node: int
    worker: PauseWorker = field(default_factory=lambda: PauseWorker(silence_s=CONFIG.silence_s))
    state: str = "computes"
    """computes · counted (made the count, not yet looked at the word) · stands · runs · called"""
    count: int = 0
    """Calls begun, in shared memory."""
    issued: int = 0
    word: float = 0.0
    down: deque[dict[str, Any]] = field(default_factory=deque)
    up: deque[dict[str, Any]] = field(default_factory=deque)
    alive: bool = True
    stood_s: float = 0.0
    began_s: float = 0.0
    script_s: float = 0.1
    last_stay_s: float = 0.0


class World:
    """Everything; each method is one thing that may happen next."""

    def __init__(self, ranks: int, nodes: int) -> None:
        self.now_s = 1000.0
        self.ranks = [Rank(node=index % nodes) for index in range(ranks)]
        self.nodes: list[PauseNode | None] = [PauseNode() for _ in range(nodes)]
        self.lead: PauseLead | None = PauseLead(CONFIG, mode="advise")
        self.orders: list[deque[dict[str, Any]]] = [deque() for _ in range(nodes)]
        self.reports: list[deque[tuple[int, dict[str, Any]]]] = [deque() for _ in range(nodes)]
        self.committed: dict[int, int] = {}
        """{pause: times its commit was given}."""
        self.ready: dict[int, dict[int, int]] = {}
        """{pause: {rank: the call it stood before}}."""
        self.ran: dict[int, set[int]] = {}

    def clone(self) -> World:
        return copy.deepcopy(self)

    # -- what may happen ---------------------------------------------------------------------------

    def step(self, index: int) -> None:
        """A rank does the next thing."""
        rank = self.ranks[index]
        if not rank.alive:
            return
        if rank.state == "computes":
            rank.count += 1
            rank.state = "counted"
        elif rank.state == "counted":
            rank.state = "called"
            if rank.word:
                self._read(rank)
                letters = rank.worker.arrive(NUMBER, rank.count, self.now_s, rank.word)
                self._say(index, letters)
                if rank.worker.state == "holding":
                    rank.state, rank.stood_s = "stands", self.now_s
                elif rank.worker.state == "idle":
                    rank.word = 0.0
            if rank.state == "called":
                rank.issued = rank.count
        elif rank.state in ("stands", "runs"):
            self._look(index)
        elif all(other.issued >= rank.count for other in self.ranks):
            rank.state = "computes"

    def agent(self, index: int) -> None:
        """An agent takes a turn."""
        node = self.nodes[index]
        if node is None:
            return
        mine = {r: rank for r, rank in enumerate(self.ranks) if rank.node == index}
        while self.orders[index]:
            node.order(self.orders[index].popleft(), self.now_s)
        for r, rank in mine.items():
            while rank.up:
                node.letter(r, rank.up.popleft(), self.now_s)
        for _ in range(3):
            views = [
                WorkerView(
                    rank=r,
                    alive=rank.alive,
                    speaks=True,
                    counts=(GroupCount(NUMBER, KEY, rank.count),),
                )
                for r, rank in mine.items()
            ]
            posted = False
            for action in node.turn(views, self.now_s):
                if isinstance(action, Tell):
                    self.reports[index].append((action.rank, copy.deepcopy(action.body)))
                elif isinstance(action, Attend):
                    mine[action.rank].word = self.now_s
                elif isinstance(action, Post):
                    posted = True
                    mine[action.rank].down.append(copy.deepcopy(action.letter))
            if not posted:
                break

    def controller(self, index: int | None = None) -> None:
        """The controller takes what came from one node, or from all, and the time."""
        if self.lead is None:
            return
        for number, reports in enumerate(self.reports):
            while reports and index in (None, number):
                self._order(self.lead.report(*reports.popleft(), self.now_s))
        self._order(self.lead.tick(self.now_s))

    def begin(self) -> None:
        """A pause is ordered."""
        if self.lead is not None and not self.lead.active:
            self._order(self.lead.begin(SCRIPT, range(len(self.ranks)), self.now_s))

    def call_off(self) -> None:
        """What the pause is for is over."""
        if self.lead is not None:
            self._order(self.lead.call_off("well again", self.now_s))

    def lose_order(self, node: int) -> None:
        if self.orders[node]:
            self.orders[node].popleft()

    def lose_report(self, node: int) -> None:
        if self.reports[node]:
            self.reports[node].popleft()

    def repeat_order(self, node: int) -> None:
        if self.orders[node]:
            self.orders[node].append(copy.deepcopy(self.orders[node][0]))

    def repeat_report(self, node: int) -> None:
        if self.reports[node]:
            self.reports[node].append(copy.deepcopy(self.reports[node][0]))

    def kill_agent(self, node: int) -> None:
        self.nodes[node] = None
        self.reports[node].clear()  # what it had not sent yet

    def start_agent(self, node: int) -> None:
        if self.nodes[node] is None:
            self.nodes[node] = PauseNode()

    def kill_controller(self) -> None:
        self.lead = None

    def start_controller(self) -> None:
        if self.lead is None:
            self.lead = PauseLead(CONFIG, mode="advise")

    def kill_rank(self, index: int) -> None:
        self.ranks[index].alive = False

    def hang_script(self, index: int) -> None:
        """The script will not end by itself on this rank."""
        self.ranks[index].script_s = 1e9

    def wait(self, seconds: float) -> None:
        """Time passes; who stands still looks around all the while."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + SLICE_S)
            for index, rank in enumerate(self.ranks):
                if rank.alive and rank.state in ("stands", "runs"):
                    self._look(index)

    # -- what must always hold ---------------------------------------------------------------------

    def check(self) -> None:
        running = {r.worker.id for r in self.ranks if r.alive and r.state == "runs"}
        assert len(running) <= 1, f"two pauses at once: {running}"
        for rank in self.ranks:
            if rank.alive and rank.state in ("stands", "runs"):
                assert self.now_s - rank.stood_s <= LIMIT_S + 2 * SLICE_S
            assert rank.last_stay_s <= LIMIT_S + 2 * SLICE_S
        for number, times in self.committed.items():
            assert times == 1, f"pause {number} was committed {times} times"
            stood = self.ready[number]
            assert len(stood) == len(self.ranks), "committed although not all were ready"
            assert len(set(stood.values())) == 1, f"not one boundary: {stood}"
        for number, who in self.ran.items():
            assert number in self.committed, "a script ran without a commit"
            assert who <= self.ready[number].keys()

    def calm(self) -> None:
        """Nothing fails any more, and the controller wants nothing more: training must go on."""
        before = [rank.count for rank in self.ranks]
        for _ in range(400):
            for index in range(len(self.ranks)):
                for _ in range(3):
                    self.step(index)
            for index in range(len(self.nodes)):
                self.agent(index)
            self.controller()
            self.wait(SLICE_S)
            self.check()
            if all(rank.count >= was + 8 for rank, was in zip(self.ranks, before, strict=True)):
                return
        if all(rank.alive for rank in self.ranks):
            raise AssertionError("training does not go on")
        # a rank is dead: the others may wait for it in their call, but not in ours
        assert {rank.state for rank in self.ranks if rank.alive} <= {
            "called",
            "computes",
            "counted",
        }

    # -- parts -------------------------------------------------------------------------------------

    def _look(self, index: int) -> None:
        rank = self.ranks[index]
        if rank.state == "stands":
            self._read(rank)
            step, letters = rank.worker.look(self.now_s, rank.word)
            self._say(index, letters)
            if step == "run":
                rank.state, rank.began_s = "runs", self.now_s
                self.ran.setdefault(rank.worker.id, set()).add(index)
            elif step == "go":
                self._go(rank)
        else:
            took_s = self.now_s - rank.began_s
            if took_s >= min(rank.script_s, rank.worker.limit_s):
                rank.up.append(rank.worker.finish([index], "", rank.began_s, self.now_s))
                self._go(rank)

    def _go(self, rank: Rank) -> None:
        rank.last_stay_s = self.now_s - rank.stood_s
        if rank.worker.state == "idle":
            rank.word = 0.0
        rank.state, rank.issued = "called", rank.count

    def _read(self, rank: Rank) -> None:
        while rank.down:
            letters = rank.worker.letter(rank.down.popleft(), self.now_s)
            self._say(self.ranks.index(rank), letters)

    def _say(self, index: int, letters: list[dict[str, Any]]) -> None:
        for letter in letters:
            if letter["say"] == "ready":
                self.ready.setdefault(letter["id"], {})[index] = letter["count"]
            self.ranks[index].up.append(letter)

    def _order(self, bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            if body["do"] == "commit":
                self.committed[body["id"]] = self.committed.get(body["id"], 0) + 1
            for orders in self.orders:
                orders.append(copy.deepcopy(body))
