"""Which probe to start next: the plan of a campaign and what is left of it. Pure: no clock, no I/O.

In: a `CampaignPlan`, the attempts a store remembers, and the time as an argument. Out: one `Step`
after the other, and what every probe came to:

    >>> plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=2), SizeClass(nodes=4, probes=1)))
    >>> campaign = Campaign(plan)
    >>> campaign.next(0.0)
    Start(probe='1n-0001', attempt=1, size=SizeClass(nodes=1, probes=2))
    >>> campaign.started("1n-0001", 0.0)
    >>> campaign.next(5.0)                        # one at a time, so until it ends
    Wait(until_t=None)
    >>> campaign.ended("1n-0001", "finished")
    >>> campaign.next(9.0).probe
    '4n-0001'

The sizes are mixed evenly, so that a campaign cut short has probed all of them. A probe that was
preempted or failed goes behind those not tried so often: one that always fails holds up nobody.
After failures it waits, longer after each: what ails a scheduler for a minute ends no campaign.
No probe overtakes a larger one that waits for nodes, or the larger would wait for ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from failslow.errors import ConfigError

__all__ = [
    "Attempt",
    "Campaign",
    "CampaignPlan",
    "Ending",
    "Halt",
    "Over",
    "SizeClass",
    "Start",
    "Step",
    "Tally",
    "Wait",
]

Ending = Literal["finished", "preempted", "failed", "stopped"]
"""finished: measured to its end · preempted: others took its place · failed: no result came of it ·
stopped: the campaign itself was. All but the first are tried again, the last without limit."""
_MOST_BACKOFF_S, _MOST_DOUBLINGS = 300.0, 64
_MOST_PROBES = 1_000_000
"""At a minute each, two years of them; each costs some hundred bytes from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """So many probes of one size."""

    nodes: int
    probes: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.probes < 1:
            raise ConfigError(
                f"{self.nodes} nodes x {self.probes} probes: both must be at least 1; leave out "
                "a size nothing is wanted of"
            )

    @property
    def name(self) -> str:
        """What its probes are called after: "4n"."""
        return f"{self.nodes}n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """What a campaign is to do, and what it may take."""

    sizes: tuple[SizeClass, ...]
    concurrency: int = 1
    """Probes that run, or wait in a scheduler's queue, at the same time."""
    max_nodes: int | None = None
    """Nodes they may have together; None: as many as they need."""
    spacing_s: float = 0.0
    """From one start to the next, at least."""
    retries: int = 2
    """How often a probe that was preempted or failed is tried again."""
    failures_in_a_row: int = 5
    """Failed attempts one after the other that end a campaign: then it is no bad luck, and none of
    them is counted against its probe."""
    backoff_s: float = 10.0
    """From one start to the next, at least, after a failed attempt; twice as long after each more
    in a row, up to five minutes."""

    def __post_init__(self) -> None:
        sizes = [size.nodes for size in self.sizes]
        if not sizes or len(set(sizes)) < len(sizes):
            raise ConfigError(
                f"sizes of {sizes} nodes: a campaign needs one at least, and each once; "
                "add the probes of like sizes up"
            )
        probes = sum(size.probes for size in self.sizes)
        if probes > _MOST_PROBES:
            raise ConfigError(
                f"{probes} probes in all; a campaign has at most {_MOST_PROBES}: ask for fewer, "
                "and add more when they have run"
            )
        for name, value, least in (
            ("concurrency", self.concurrency, 1),
            ("spacing", self.spacing_s, 0),
            ("retries", self.retries, 0),
            ("failures in a row", self.failures_in_a_row, 1),
            ("backoff", self.backoff_s, 0),
        ):
            if not least <= value < math.inf:
                raise ConfigError(f"{name} is {value:g}; it must be at least {least}, and finite")
        if self.max_nodes is not None and self.max_nodes < max(sizes):
            raise ConfigError(
                f"a probe of {max(sizes)} nodes never fits into {self.max_nodes}; raise the "
                "limit of nodes or leave the size out"
            )

    def pause_s(self, failures: int) -> float:
        """From one start to the next, after so many failures in a row."""
        if not failures:
            return self.spacing_s
        # a float holds no larger powers than some 2**1000
        backoff_s = self.backoff_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)
        return max(self.spacing_s, min(_MOST_BACKOFF_S, backoff_s))

    def probes(self) -> dict[str, SizeClass]:
        """Every probe by name, in the order they are first tried in."""
        places = [
            ((number + 0.5) / size.probes, size.nodes, f"{size.name}-{number + 1:04d}", size)
            for size in self.sizes
            for number in range(size.probes)
        ]
        return {name: size for _, _, name, size in sorted(places, key=lambda place: place[:3])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a probe that has ended."""

    probe: str
    number: int
    """From 1."""
    ending: Ending
    started_t: float
    """Epoch seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start this attempt now, and say so by `started`."""

    probe: str
    attempt: int
    size: SizeClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing may start before `until_t`, or, with None, before a running probe ends."""

    until_t: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Nothing is left to start, and nothing runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Start nothing more: so many attempts failed one after the other."""

    failures: int


Step = Start | Wait | Over | Halt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How far a campaign is, in probes."""

    total: int
    finished: int
    given_up: int
    """As often preempted or failed as the plan allows."""
    running: int

    @property
    def left(self) -> int:
        """Neither finished nor given up; those that run are among them."""
        return self.total - self.finished - self.given_up


class Campaign:
    """Applies the plan. Whatever order and times probes end at, its limits hold.

    past: attempts of earlier runs. Those of probes the plan does not have are ignored.
    """

    def __init__(self, plan: CampaignPlan, past: Iterable[Attempt] = ()) -> None:
        self.plan = plan
        self._probes = plan.probes()
        self._place = {name: place for place, name in enumerate(self._probes)}
        self._attempts: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()
        self._forgiven: Counter[str] = Counter()
        self._row: list[str] = []
        """Probes of the failed attempts since the last that did not fail, of earlier runs too."""
        self._finished: set[str] = set()
        self._running: set[str] = set()
        self._last_start_t: float | None = None
        self._failures = 0
        for attempt in past:
            if attempt.probe in self._probes:
                self._attempts[attempt.probe] = max(self._attempts[attempt.probe], attempt.number)
                self._count(attempt.probe, attempt.ending)
                self._last_start_t = max(self._last_start_t or 0.0, attempt.started_t)

    def next(self, now_t: float) -> Step:
        """What to do at `now_t` (epoch seconds); changes nothing."""
        if self._failures >= self.plan.failures_in_a_row:
            return Halt(failures=self._failures)
        waiting = [name for name in self._probes if self._is_open(name)]
        if not waiting:
            return Wait(until_t=None) if self._running else Over()
        if len(self._running) >= self.plan.concurrency:
            return Wait(until_t=None)
        name = min(waiting, key=lambda name: (self._tried[name], self._place[name]))
        size = self._probes[name]
        if self.plan.max_nodes is not None:
            taken = sum(self._probes[other].nodes for other in self._running)
            if taken + size.nodes > self.plan.max_nodes:
                return Wait(until_t=None)
        if self._last_start_t is not None:
            # before the last start: the clock was set back, and says nothing
            due_t = self._last_start_t + self.plan.pause_s(self._failures)
            if self._last_start_t <= now_t < due_t:
                return Wait(until_t=due_t)
        return Start(probe=name, attempt=self._attempts[name] + 1, size=size)

    def started(self, probe: str, now_t: float) -> None:
        """The attempt `next` told of has been started at `now_t`."""
        if not self._is_open(probe):
            raise ValueError(f"{probe} has no attempt to start")
        self._attempts[probe] += 1
        self._running.add(probe)
        self._last_start_t = now_t

    def ended(self, probe: str, ending: Ending) -> None:
        """The running attempt of `probe` has ended so."""
        self._running.remove(probe)
        self._count(probe, ending)
        if ending == "failed":
            self._failures += 1
        elif ending != "stopped":
            self._failures = 0

    def tally(self) -> Tally:
        """How far it is."""
        return Tally(
            total=len(self._probes),
            finished=len(self._finished),
            given_up=len(self.given_up),
            running=len(self._running),
        )

    @property
    def given_up(self) -> frozenset[str]:
        """Probes that are not tried again, as often as they were preempted or failed."""
        busy = self._finished | self._running
        return frozenset(n for n in self._probes if n not in busy and not self._is_open(n))

    @property
    def retries_for_all(self) -> int:
        """With which none of the probes would be given up by now."""
        spent = (self._spent(name) for name in self._probes if name not in self._finished)
        return max(self.plan.retries, max(spent, default=0))

    def _is_open(self, name: str) -> bool:
        """Whether it may be started once more."""
        return (
            name not in self._finished
            and name not in self._running
            and self._spent(name) <= self.plan.retries
        )

    def _spent(self, name: str) -> int:
        """How often it was preempted or failed, but for what was no fault of its own."""
        return self._tried[name] - self._forgiven[name]

    def _count(self, name: str, ending: Ending) -> None:
        if ending == "stopped":
            return
        if ending == "finished":
            self._finished.add(name)
        else:
            self._tried[name] += 1
        if ending != "failed":
            self._row.clear()
            return
        self._row.append(name)
        if len(self._row) == self.plan.failures_in_a_row:
            self._forgiven.update(self._row)
        elif len(self._row) > self.plan.failures_in_a_row:
            self._forgiven[name] += 1
