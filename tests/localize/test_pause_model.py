"""The protocol of a pause, over all orders of events: parts die, messages are lost or doubled."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.localize.pause_model import World

RANKS = st.integers(0, 3)
NODES = st.integers(0, 1)
SEEN: Counter[str] = Counter()
"""What happened over all examples: a model in which nothing is ever committed proves nothing."""


class Pauses(RuleBasedStateMachine):
    """Any order of events, of 3 or 4 ranks on one or two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(1, 1)

    @initialize(ranks=st.integers(3, 4), nodes=st.integers(1, 2), rounds=st.integers(0, 14))
    def start(self, ranks: int, nodes: int, rounds: int) -> None:
        """Somewhere in a pause that has gone well so far."""
        self.world = World(ranks, nodes)
        self.turns(rounds=8)
        self.world.begin()
        self.turns(rounds=rounds)

    @rule(rounds=st.integers(1, 12))
    def turns(self, rounds: int) -> None:
        """All goes well for a while: only then do pauses get far."""
        world = self.world
        for _ in range(rounds):
            for index in range(len(world.ranks)):
                for _ in range(3):
                    world.step(index)
            for index in range(len(world.nodes)):
                world.agent(index)
            world.controller()
            world.wait(0.05)

    @rule(index=RANKS, times=st.integers(1, 4))
    def step(self, index: int, times: int) -> None:
        for _ in range(times):
            self.world.step(index % len(self.world.ranks))

    @rule(index=NODES)
    def agent(self, index: int) -> None:
        self.world.agent(index % len(self.world.nodes))

    @rule(index=NODES)
    def controller(self, index: int) -> None:
        self.world.controller(index % len(self.world.nodes))

    @rule()
    def begin(self) -> None:
        self.world.begin()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.1, 3.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(index=NODES, what=st.sampled_from(["lose_order", "lose_report"]))
    def lose(self, index: int, what: str) -> None:
        getattr(self.world, what)(index % len(self.world.nodes))

    @rule(index=NODES, what=st.sampled_from(["repeat_order", "repeat_report"]))
    def repeat(self, index: int, what: str) -> None:
        getattr(self.world, what)(index % len(self.world.nodes))

    @rule(index=NODES, dead=st.booleans())
    def agent_dies_or_starts(self, index: int, dead: bool) -> None:
        world = self.world
        (world.kill_agent if dead else world.start_agent)(index % len(world.nodes))

    @rule(dead=st.booleans())
    def controller_dies_or_starts(self, dead: bool) -> None:
        (self.world.kill_controller if dead else self.world.start_controller)()

    @precondition(lambda self: self.world.committed)
    @rule(index=RANKS)
    def a_script_hangs(self, index: int) -> None:
        self.world.hang_script(index % len(self.world.ranks))

    @precondition(lambda self: any(r.worker.state != "idle" for r in self.world.ranks))
    @rule(index=RANKS)
    def rank_dies(self, index: int) -> None:
        self.world.kill_rank(index % len(self.world.ranks))

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        SEEN["committed"] += len(world.committed)
        SEEN["stood"] += len(world.ready)
        SEEN["ran on some only"] += sum(len(who) < len(world.ranks) for who in world.ran.values())
        world.calm()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "examples", [80, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_nobody_stands_too_long_and_nobody_runs_without_the_commit(examples: int) -> None:
    SEEN.clear()
    limits = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=examples < 1000,
        suppress_health_check=list(HealthCheck),
    )
    Pauses.TestCase.settings = limits
    Pauses.TestCase("runTest").runTest()
    assert SEEN["committed"] >= examples // 10, SEEN
    assert SEEN["stood"] > SEEN["committed"], SEEN


# -- every single fault at every single moment -----------------------------------------------------

Event = tuple[str, int]
ROUNDS, SHORT, LONG = 26, 6, 60
"""Rounds of a schedule: a pause is over after some twenty of 0.05 s."""


def schedule(ranks: int, nodes: int, rounds: int) -> list[Event]:
    """What happens when all goes well."""
    one: list[Event] = [("step", rank) for rank in range(ranks) for _ in range(3)]
    one += [*(("agent", node) for node in range(nodes)), ("controller", 0), ("wait", 0)]
    return one * rounds


def faults(ranks: int, nodes: int) -> list[tuple[str, int, int]]:
    """(what, to whom, for so many rounds; 0 for good, or at once)."""
    found = [("kill_rank", rank, 0) for rank in range(ranks)]
    found += [("freeze step", rank, rounds) for rank in range(ranks) for rounds in (SHORT, LONG)]
    for node in range(nodes):
        for what in ("lose_order", "lose_report", "repeat_order", "repeat_report"):
            found.append((what, node, 0))
        for rounds in (SHORT, LONG):
            found += [("kill_agent", node, rounds), ("freeze agent", node, rounds)]
    found.append(("call_off", 0, 0))
    found += [
        (what, 0, n) for n in (SHORT, LONG) for what in ("kill_controller", "freeze controller")
    ]
    return found


def play(world: World, event: Event, frozen: str) -> None:
    what, index = event
    if frozen == f"freeze {what} {index}":
        return
    if what == "wait":
        world.wait(0.05)
    elif what == "controller":
        world.controller()
    else:
        getattr(world, what)(index)


def suffer(world: World, rest: list[Event], fault: tuple[str, int, int]) -> str:
    """Go on from here with this fault; how the pause ended."""
    what, index, rounds = fault
    frozen, left, ranks = "", rounds, len(world.ranks)
    if what.startswith("freeze"):
        frozen = f"{what} {index}"
    else:
        getattr(world, what)(*([] if what in ("kill_controller", "call_off") else [index]))
    for event in rest:
        play(world, event, frozen)
        left -= event[0] == "wait"
        if left == 0 and event[0] == "wait":
            frozen = ""
            if what == "kill_agent":
                world.start_agent(index)
            elif what == "kill_controller":
                world.start_controller()
                world.begin()  # the new one knows nothing of the pause it may be in
        world.check()
    world.calm()
    if not world.committed:
        return "not committed"
    return "ran on all" if all(len(who) == ranks for who in world.ran.values()) else "ran on some"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "nodes", "every"),
    [
        (3, 2, 13),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for case in ((3, 1, 1), (3, 3, 1), (4, 2, 1))
        ),
    ],
)
def test_one_fault_at_any_moment(ranks: int, nodes: int, every: int) -> None:
    world = World(ranks, nodes)
    for event in schedule(ranks, nodes, 8):
        play(world, event, "")
    world.begin()
    events = schedule(ranks, nodes, ROUNDS)
    ends: Counter[str] = Counter()
    for moment, event in enumerate(events):
        if moment % every == 0:
            for fault in faults(ranks, nodes):
                ends[suffer(world.clone(), events[moment:] + events, fault)] += 1
        play(world, event, "")
    assert world.ran == {number: set(range(ranks)) for number in world.committed}
    assert len(world.committed) == 1, "without a fault all goes well"
    assert ends["not committed"] > 20, ends
    assert ends["ran on all"] > 20, ends
    # a commit that one worker never hears of: the others run the script by themselves
    assert ends["ran on some"] > 0, ends
