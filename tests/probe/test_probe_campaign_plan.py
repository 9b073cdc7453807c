"""The planner: its limits hold whatever ends when, and what a store remembers is not done again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.errors import ConfigError
from failslow.probe.campaign import (
    Attempt,
    Campaign,
    CampaignPlan,
    Ending,
    Halt,
    Over,
    SizeClass,
    Start,
    Wait,
)
from failslow.probe.runner import TrainingJob

_PLANS = st.builds(
    CampaignPlan,
    sizes=st.lists(
        st.builds(SizeClass, nodes=st.integers(1, 4), probes=st.integers(1, 6)),
        min_size=1,
        max_size=3,
        unique_by=lambda size: size.nodes,
    ).map(tuple),
    concurrency=st.integers(1, 4),
    max_nodes=st.none() | st.integers(4, 8),
    spacing_s=st.sampled_from([0.0, 1.0, 7.5]),
    retries=st.integers(0, 2),
    failures_in_a_row=st.integers(1, 4),
    backoff_s=st.sampled_from([0.0, 4.0, 10.0]),
)
_ENDINGS: tuple[Ending, ...] = ("finished", "preempted", "failed", "stopped")


class Cluster:
    """Runs a campaign by chance: each probe for some seconds, ending as the dice say."""

    def __init__(self, plan: CampaignPlan, seed: int, *, failing: float = 0.3) -> None:
        self.plan, self.pick, self.failing = plan, random.Random(seed), failing
        self.now_t = 1000.0
        self.starts: list[tuple[float, str, int]] = []
        self.done: list[Attempt] = []

    def run(self, *, most: int = 10_000) -> Over | Halt | None:
        """Until it is over or halted; None: after `most` endings, when all that run is stopped."""
        campaign = Campaign(self.plan, self.done)
        running: dict[str, tuple[float, int]] = {}
        sizes = self.plan.probes()
        ended = 0
        while True:
            step = campaign.next(self.now_t)
            assert step == campaign.next(self.now_t), "asking changes nothing"
            if isinstance(step, Start):
                campaign.started(step.probe, self.now_t)
                self.starts.append((self.now_t, step.probe, step.attempt))
                running[step.probe] = (self.now_t + self.pick.uniform(1, 9), step.attempt)
                assert len(running) <= self.plan.concurrency
                taken = sum(sizes[name].nodes for name in running)
                assert self.plan.max_nodes is None or taken <= self.plan.max_nodes
                assert campaign.tally().running == len(running)
                continue
            if isinstance(step, Over | Halt) and not running:
                return step
            ends = min((end for end, _ in running.values()), default=float("inf"))
            if isinstance(step, Wait) and step.until_t is not None and step.until_t < ends:
                assert step.until_t > self.now_t, "waiting goes on"
                self.now_t = step.until_t
                continue
            assert running, f"{step} and nothing runs"
            self.now_t = ends
            name = min(running, key=lambda name: running[name])
            self._end(campaign, running, name, self._dice())
            ended += 1
            if ended >= most:
                for name in list(running):
                    self._end(campaign, running, name, "stopped")
                return None

    def _dice(self) -> Ending:
        if self.pick.random() >= self.failing:
            return "finished"
        return self.pick.choice(["preempted", "failed"])

    def _end(
        self,
        campaign: Campaign,
        running: dict[str, tuple[float, int]],
        name: str,
        ending: Ending,
    ) -> None:
        _, number = running.pop(name)
        campaign.ended(name, ending)
        started_t = next(t for t, probe, n in self.starts if (probe, n) == (name, number))
        self.done.append(Attempt(probe=name, number=number, ending=ending, started_t=started_t))


@given(plan=_PLANS, seed=st.integers(0, 10_000), interrupt=st.integers(1, 12))
def test_every_limit_holds_and_every_probe_comes_to_an_end(
    plan: CampaignPlan, seed: int, interrupt: int
) -> None:
    cluster = Cluster(plan, seed)

    # interrupted again and again, and halted now and then: the same command goes on
    for _ in range(1000):
        end = cluster.run(most=interrupt)
        if isinstance(end, Over):
            break
    assert isinstance(end, Over)

    times = [t for t, _, _ in cluster.starts]
    assert all(b - a >= plan.spacing_s - 1e-9 for a, b in pairwise(times))
    forgiven = Counter(a.probe for a in _in_rows(cluster.done, plan.failures_in_a_row))
    tried = Counter((a.probe, a.number) for a in cluster.done)
    assert max(tried.values()) == 1, "no attempt twice"
    for name in plan.probes():
        mine = [a for a in cluster.done if a.probe == name]
        assert [a.number for a in mine] == list(range(1, len(mine) + 1))
        finished = [a for a in mine if a.ending == "finished"]
        spent = sum(a.ending in ("preempted", "failed") for a in mine) - forgiven[name]
        assert len(finished) <= 1
        assert spent <= plan.retries + 1
        assert finished or spent == plan.retries + 1
        assert not finished or mine[-1] is finished[0], "none after it finished"
    tally = Campaign(plan, cluster.done).tally()
    assert (tally.left, tally.running) == (0, 0)
    assert tally.finished == sum(a.ending == "finished" for a in cluster.done)


def _in_rows(done: list[Attempt], least: int) -> list[Attempt]:
    """Failed attempts of which as many followed one another as end a campaign."""
    rows: list[list[Attempt]] = [[]]
    for attempt in done:
        if attempt.ending == "failed":
            rows[-1].append(attempt)
        elif attempt.ending != "stopped":
            rows.append([])
    return [attempt for row in rows if len(row) >= least for attempt in row]


@given(plan=_PLANS, seed=st.integers(0, 1000))
def test_without_failures_all_run_once_in_the_order_of_the_plan(
    plan: CampaignPlan, seed: int
) -> None:
    cluster = Cluster(plan, seed, failing=0.0)

    assert isinstance(cluster.run(), Over)

    assert [name for _, name, _ in cluster.starts] == list(plan.probes())


@given(plan=_PLANS)
def test_sizes_are_mixed_evenly(plan: CampaignPlan) -> None:
    order = [size.nodes for size in plan.probes().values()]

    for size in plan.sizes:
        for done in range(len(order) + 1):
            due = size.probes * done / len(order)
            assert abs(order[:done].count(size.nodes) - due) <= len(plan.sizes)


def test_more_probes_than_before_are_added_to_those_that_were() -> None:
    small = CampaignPlan(sizes=(SizeClass(nodes=1, probes=3),))
    cluster = Cluster(small, 1, failing=0.0)
    cluster.run()

    larger = replace(small, sizes=(SizeClass(nodes=1, probes=5), SizeClass(nodes=2, probes=1)))
    cluster.plan = larger
    cluster.run()

    assert {name for _, name, _ in cluster.starts[3:]} == {"1n-0004", "1n-0005", "2n-0001"}


def test_what_failed_goes_behind_those_not_tried() -> None:
    campaign = Campaign(CampaignPlan(sizes=(SizeClass(nodes=1, probes=3),)))
    order = []
    for now_t in range(0, 4000, 1000):
        step = campaign.next(now_t)
        assert isinstance(step, Start)
        order.append((step.probe, step.attempt))
        campaign.started(step.probe, now_t)
        campaign.ended(step.probe, "failed" if step.probe == "1n-0001" else "finished")

    assert order == [("1n-0001", 1), ("1n-0002", 1), ("1n-0003", 1), ("1n-0001", 2)]


def test_a_row_of_failures_halts_and_the_next_run_tries_anew() -> None:
    plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=9),), failures_in_a_row=3)
    cluster = Cluster(plan, 1)
    cluster._dice = lambda: "failed"  # type: ignore[method-assign]  # loaded dice

    assert cluster.run() == Halt(failures=3)
    assert cluster.run() == Halt(failures=3)
    assert len(cluster.done) == 6


def test_a_row_of_failures_uses_up_no_retries_and_a_few_do() -> None:
    plan = CampaignPlan(
        sizes=(SizeClass(nodes=1, probes=9),), failures_in_a_row=3, retries=0, concurrency=1
    )
    cluster = Cluster(plan, 1)
    cluster._dice = lambda: "failed"  # type: ignore[method-assign]  # loaded dice
    assert cluster.run() == Halt(failures=3)
    campaign = Campaign(plan, cluster.done)
    assert (campaign.tally().given_up, campaign.given_up) == (0, frozenset())
    assert campaign.next(9e9) == Start(probe="1n-0004", attempt=1, size=plan.sizes[0])

    few = Campaign(plan, cluster.done[:2])
    assert few.given_up == {"1n-0001", "1n-0002"}
    assert few.retries_for_all == 1
    assert not Campaign(replace(plan, retries=1), cluster.done[:2]).given_up


def _starts_t(campaign: Campaign, endings: Sequence[Ending], now_t: float = 0.0) -> list[float]:
    """When each attempt starts, where each ends as soon as it has begun."""
    found: list[float] = []
    for ending in endings:
        step = campaign.next(now_t)
        while isinstance(step, Wait):
            assert step.until_t is not None
            assert step.until_t > now_t
            now_t = step.until_t
            step = campaign.next(now_t)
        assert isinstance(step, Start), step
        campaign.started(step.probe, now_t)
        campaign.ended(step.probe, ending)
        found.append(now_t)
    return found


@pytest.mark.parametrize(
    ("spacing_s", "pauses_s"),
    [
        (0.0, [10, 20, 40, 80, 160, 300, 300]),
        (60.0, [60, 60, 60, 80, 160, 300, 300]),
        (400.0, [400] * 7),
    ],
)
def test_after_each_failure_in_a_row_it_waits_longer(
    spacing_s: float, pauses_s: list[float]
) -> None:
    size = SizeClass(nodes=1, probes=20)
    plan = CampaignPlan(sizes=(size,), spacing_s=spacing_s, failures_in_a_row=9)

    times = _starts_t(Campaign(plan), ["failed"] * 8)

    assert [b - a for a, b in pairwise(times)] == pauses_s
    assert plan.pause_s(10**6) == max(300.0, spacing_s)


def test_an_outage_of_a_minute_halts_no_campaign_and_is_forgotten() -> None:
    plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=20),))
    four: tuple[Ending, ...] = ("failed",) * 4
    times = _starts_t(Campaign(plan), [*four, "finished", "failed", "finished"])

    assert times[3] > 60.0, "the fourth of five is after it"
    assert times[4:] == [150.0, 150.0, 160.0]
    # being preempted or stopped is no failure of anybody
    assert _starts_t(Campaign(plan), ["preempted", "stopped", "finished"]) == [0.0, 0.0, 0.0]
    assert _starts_t(Campaign(plan), ["failed", "stopped", "finished"]) == [0.0, 10.0, 20.0]


def test_a_new_run_does_not_wait_for_failures_of_the_last() -> None:
    plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=9),))
    past = [
        Attempt(probe=f"1n-000{n}", number=1, ending="failed", started_t=100.0 * n)
        for n in range(1, 6)
    ]

    assert isinstance(Campaign(plan, past).next(501.0), Start)


def test_a_clock_that_was_set_back_stops_nothing() -> None:
    plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=2),), spacing_s=60.0)
    past = Attempt(probe="1n-0001", number=1, ending="finished", started_t=5000.0)

    assert Campaign(plan, [past]).next(5010.0) == Wait(until_t=5060.0)
    assert isinstance(Campaign(plan, [past]).next(4000.0), Start)


def test_a_smaller_probe_does_not_overtake_one_that_waits_for_nodes() -> None:
    sizes = (SizeClass(nodes=1, probes=4), SizeClass(nodes=4, probes=1))
    campaign = Campaign(CampaignPlan(sizes=sizes, concurrency=9, max_nodes=4))
    begun = []
    while isinstance(step := campaign.next(0.0), Start):
        campaign.started(step.probe, 0.0)
        begun.append(step.probe)

    assert begun == ["1n-0001", "1n-0002"]
    assert step == Wait(until_t=None)
    for probe in begun:
        campaign.ended(probe, "finished")
    assert campaign.next(0.0) == Start(probe="4n-0001", attempt=1, size=sizes[1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sizes": ()}, "one at least"),
        ({"sizes": (SizeClass(nodes=1, probes=1),) * 2}, "each once"),
        ({"max_nodes": 1}, "never fits into 1"),
        (
            {"sizes": (SizeClass(nodes=1, probes=10**6), SizeClass(nodes=2, probes=1))},
            "1000001 probes in all; a campaign has at most 1000000: ask for fewer",
        ),
        ({"concurrency": 0}, "concurrency is 0; it must be at least 1"),
        ({"spacing_s": -1.0}, "spacing is -1"),
        ({"spacing_s": float("nan")}, "spacing is nan"),
        ({"spacing_s": float("inf")}, "spacing is inf; it must be at least 0, and finite"),
        ({"retries": -1}, "retries is -1"),
        ({"failures_in_a_row": 0}, "failures in a row is 0"),
        ({"backoff_s": -1.0}, "backoff is -1"),
    ],
)
def test_a_plan_out_of_range_says_value_and_limit(change: dict[str, object], told: str) -> None:
    plan = CampaignPlan(sizes=(SizeClass(nodes=2, probes=1),))

    with pytest.raises(ConfigError, match=told):
        replace(plan, **change)  # type: ignore[arg-type]  # names come from the table


@pytest.mark.parametrize(("nodes", "backoff_s"), [(None, 10.0), (1, 0.0)])
def test_only_a_scheduler_is_waited_for(nodes: int | None, backoff_s: float) -> None:
    from failslow.cli.campaign import _plan

    found = _plan(
        ["1x3"],
        SimpleNamespace(nodes=nodes),
        concurrency=1,
        max_nodes=None,
        spacing_s=0.0,
        retries=1,
        training=TrainingJob(),
    )

    assert found.backoff_s == backoff_s


def test_endings_are_all_told_apart() -> None:
    plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=1),), retries=0)
    left = {}
    for ending in _ENDINGS:
        past = Attempt(probe="1n-0001", number=1, ending=ending, started_t=0.0)
        left[ending] = Campaign(plan, [past]).next(9.0)

    assert left["finished"] == left["preempted"] == left["failed"] == Over()
    assert left["stopped"] == Start(probe="1n-0001", attempt=2, size=plan.sizes[0])
