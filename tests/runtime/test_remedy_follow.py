"""Under a plan the culprit's own time decides, also when nobody follows the job's any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.runtime.test_remedy import (
    EVEN,
    FACTS,
    Steered,
    in_force,
    levels,
    steered,
    struck,
    told,
)

from failslow.decide import InForce, LayoutPlanner, Policy, compare, read_incidents
from failslow.decide.redecide import redecide
from failslow.pipeline import Report, Tick, Write
from failslow.pipeline.own import OwnTimes
from failslow.pipeline.series import Worker
from failslow.records import Finding, StepSample, Verdict

UNIT_S = 0.0085


def train(job: Steered, count: int, unit_s: float = UNIT_S, *, tells: bool = True) -> None:
    """As `Steered.train`, a micro-batch taking `unit_s`, of which the workers tell."""
    for index in range(count):
        at = [job.placement.index(rank) for rank in job.ranks]
        own = [unit_s * job.counts[at[rank]] * job.slow[rank] for rank in job.ranks]
        noise = job.random.gauss(1.0, 0.01)
        job.now_s += (max(own) + 0.032) * noise
        for rank in job.ranks:
            duration_s = (max(own) + 0.032) * noise
            job.give(job.sample(rank, duration_s, compute_s=own[rank] * noise))
        job.give(Tick())
        if index % 10 == 9:
            job.beat()
            for rank in job.ranks if tells else ():
                told = {"what": "pace", "rank": rank, "step": 1, "microbatches": job.counts[rank]}
                told |= {"microbatch_s": unit_s * job.slow[rank]}
                job.give(Report(node="node0", rank=rank, topic="steer", body=told))


# -- the episode is given up under a plan ----------------------------------------------------------


@pytest.mark.parametrize(("unit_s", "tells"), [(UNIT_S, False), (UNIT_S, True), (0.02, True)])
def test_a_plan_whose_episode_is_abandoned_is_taken_back_once_the_culprit_is_well(
    unit_s: float, tells: bool
) -> None:
    job = steered()
    struck(job)
    job.train(60)
    job.run = 1  # the program has changed; with it, perhaps, what it works on
    train(job, 100, unit_s, tells=tells)
    assert job.events()[-1][0] == "abandoned"
    train(job, 300, unit_s, tells=tells)
    assert levels(job) == [("escalate", "S2")]
    assert job.counts[2] < 8
    job.slow[2] = 1.0
    train(job, 150, unit_s, tells=tells)
    assert levels(job) == [("escalate", "S2"), ("restore", "S1")]
    assert job.counts == EVEN
    assert not job.pipeline.remedy.holding


def test_nothing_is_reckoned_as_lost_that_nobody_measures() -> None:
    job = steered(allow_restart=True, restart_cost_s=20.0, confirmations=1)
    struck(job, no_restart="")
    job.train(60)
    job.run = 1
    job.train(20)
    assert job.events()[-1][0] == "abandoned"
    account = job.pipeline.remedy._policy._account
    assert account is not None
    lost_s = account.lost_s
    job.train(3000)
    assert account.lost_s == lost_s
    assert levels(job) == [("escalate", "S2")]
    assert job.restarts == []


# -- one of several culprits is well ---------------------------------------------------------------


@pytest.mark.parametrize("dp_s", [0.0, 0.005])
def test_a_split_for_a_worker_that_is_well_does_not_stay_for_a_link_it_cannot_help(
    dp_s: float,
) -> None:
    """The job would be slower for it than for the link, as long as that is slow."""
    job = steered()
    struck(job, dp_s=dp_s)
    job.train(60)
    link = Finding(what="link", slowdown=6.0, ranks=(), host="a", peer_host="b")
    told(job, findings=(link,))
    job.train(60)
    assert job.counts[2] < 8
    job.slow[2] = 1.0
    job.train(200)
    assert job.counts == EVEN == in_force(job).microbatches
    assert levels(job) == [("escalate", "S2"), ("replan", "S2")]
    assert job.said("decision")[-1].record.plan.predicted_slowdown < 1.3  # no more than the link's
    account = job.pipeline.remedy._policy._account
    assert account is not None
    assert account.base < 1.3  # nor is that of the worker still what doing nothing would leave
    told(job, well=(link.key,))
    job.train(200)
    assert levels(job)[-1] == ("restore", "S1")
    assert len(job.orders) == 2  # nothing was left to be undone
    assert not job.pipeline.remedy.holding


# -- what healthy times are ------------------------------------------------------------------------


def test_a_false_suspicion_does_not_fix_what_is_healthy_for_good() -> None:
    job = steered()
    job.facts()
    train(job, 200)
    job.slow[1] = 1.6
    train(job, 60)
    job.slow[1] = 1.0
    train(job, 200)
    assert job.events()[-1][0] == "relief"
    job.run = 1
    train(job, 300, 2 * UNIT_S)  # twice the work in a micro-batch
    job.slow[2] = 2.0
    train(job, 60, 2 * UNIT_S)
    own = job.pipeline.remedy.own_slowdowns()
    assert own == pytest.approx({0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}, abs=0.05)
    job.accuse(2, 2.0)
    train(job, 100, 2 * UNIT_S)
    assert levels(job) == [("escalate", "S2")]
    job.slow[2] = 1.0
    train(job, 200, 2 * UNIT_S)
    assert job.counts == EVEN


@pytest.mark.parametrize("tells", [True, False])
def test_what_is_slow_once_a_split_was_taken_back_is_not_held_for_healthy(tells: bool) -> None:
    """The new controller knows of no healthy times: peers tell that the culprit is slow yet."""
    job = steered()
    job.facts()
    train(job, 100)
    job.slow[2] = 1.3
    train(job, 40)
    job.accuse(2, 1.3)
    job.run = 1
    train(job, 300)
    assert job.events()[-1][0] == "abandoned"
    job.begin("launch-1", job.journal)
    train(job, 60, tells=tells)
    job.accuse(2, 1.3)
    train(job, 200, tells=tells)
    assert levels(job) == [("escalate", "S2"), ("restore", "S1"), ("escalate", "S2")]
    assert job.counts[2] < 8
    job.slow[2] = 1.0
    train(job, 100, tells=tells)
    assert job.counts == EVEN


class Told:
    """Own times of four workers that tell of their micro-batches."""

    def __init__(self, ranks: int = 4) -> None:
        self.workers = {rank: Worker(rank) for rank in range(ranks)}
        self.own = OwnTimes(self.workers)
        self.own.arrange(FACTS, InForce(microbatches=EVEN, placement=(0, 1, 2, 3)), INITIAL)

    def tell(self, count: int, seconds: float) -> None:
        for _ in range(count):
            for rank in self.workers:
                self.own.tell(rank, seconds)

    def learn(self, count: int, seconds: float) -> None:
        """So it is in healthy times, and a suspicion begins."""
        self.tell(count, seconds)
        self.own.learn()
        self.own.forget_told()


INITIAL = InForce(microbatches=EVEN, placement=(0, 1, 2, 3))


def test_a_suspicion_renews_what_is_healthy_and_its_onset_only_what_is_missing() -> None:
    told = Told()
    told.learn(10, 0.010)
    told.tell(10, 0.012)
    told.own.learn()
    assert told.own.slowdown(0) == pytest.approx(1.0)
    told.own.forget_told()
    told.tell(10, 0.024)  # what is told after the suspicion is slow
    told.own.learn(again=True)
    assert told.own.slowdown(0) == pytest.approx(2.0)


def test_one_letter_alone_renews_nothing() -> None:
    told = Told()
    told.learn(10, 0.010)
    told.tell(2, 0.020)
    told.own.learn()
    assert told.own.slowdown(0) == pytest.approx(2.0)


def test_after_a_change_of_the_program_peers_of_the_same_stage_tell_what_is_usual() -> None:
    told = Told()
    told.tell(10, 0.010)
    told.own.learn()
    told.own.change()
    blamed = {2}
    finding = Finding(what="device", slowdown=2.0, ranks=(2,), host="c")
    assert told.own.culprit(finding, blamed) is None
    for rank, seconds in enumerate((0.03, 0.03, 0.06, 0.03)):
        for _ in range(3):
            told.own.tell(rank, seconds)
    assert told.own.slowdown(2) is None
    assert told.own.culprit(finding, blamed) == pytest.approx(2.0)


# -- own time that does not depend on the number of micro-batches ----------------------------------


class Optimizing(Steered):
    """30 ms of a worker's own time are its optimizer's, as many micro-batches as it may run."""

    def train(self, count: int) -> None:
        for index in range(count):
            own = [0.030 + UNIT_S * n * k for n, k in zip(self.counts, self.slow, strict=True)]
            self.pass_by(own, max(own) + 0.032)
            if index % 10 == 9:
                self.beat()


@pytest.mark.parametrize("slow", [1.0, 1.7])
def test_a_culprit_proved_well_is_not_held_to_be_slow_for_its_few_micro_batches(
    slow: float,
) -> None:
    job = Optimizing(decide=steered().decide)
    struck(job)
    job.train(60)
    split = job.counts
    assert split[2] <= 5
    job.slow[2] = slow
    told(job, well=("device rank 2",))
    job.train(100)
    assert (job.counts == EVEN) == (slow == 1.0)
    assert job.said("culpritpace")[-1].record.slowdown == pytest.approx(slow, rel=0.3)


def test_who_was_given_more_micro_batches_is_not_called_slow() -> None:
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 3.0
    job.train(40)
    job.accuse(2, 3.0)
    job.train(100)
    assert min(job.counts[:2]) > 8 * 1.2
    (level,) = [e for e in job.said("episode") if e.tags["event"] == "level"]
    (culprit,) = level.record.culprits
    assert (culprit.rank, culprit.slowdown) == (2, pytest.approx(3.0, rel=0.05))


RECORDED_MS = (
    *(
        15.0,
        13.7,
        14.7,
        13.9,
        13.8,
        13.3,
        13.6,
        13.6,
        14.4,
        17.2,
        15.2,
        14.3,
        13.9,
        14.2,
        14.6,
        20.8,
    ),
    *(
        26.7,
        33.1,
        14.4,
        13.8,
        13.8,
        17.0,
        13.6,
        14.2,
        14.7,
        14.2,
        14.4,
        14.5,
        12.9,
        14.3,
        13.6,
        15.6,
    ),
    *(
        16.7,
        14.0,
        14.6,
        14.1,
        14.1,
        14.4,
        14.0,
        14.9,
        13.9,
        14.5,
        26.7,
        40.1,
        16.4,
        13.7,
        13.1,
        14.8,
    ),
)
"""Own time of a well worker on a busy machine with one micro-batch of four: 51.5 ms with all."""


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_a_worker_with_one_micro_batch_left_is_seen_to_be_well(slow: float) -> None:
    workers = {rank: Worker(rank) for rank in range(4)}
    own = OwnTimes(workers)
    even = InForce(microbatches=(4, 4, 4, 4), placement=(0, 1, 2, 3))
    own.arrange(FACTS, even, even)

    def sample(end_s: float, own_s: float) -> StepSample:
        return StepSample(step=0, duration_s=0.06, end_s=end_s, compute_s=own_s)

    workers[2].healthy.extend(sample(0.06 * n, 0.0515) for n in range(10))
    own.learn()
    split = InForce(microbatches=(5, 5, 1, 5), placement=(0, 1, 2, 3))
    seen = []
    for index, ms in enumerate(RECORDED_MS):
        workers[2].recent.append(sample(10.0 + 0.083 * index, slow * ms / 1e3))
        own.arrange(FACTS, split, even, since=index + 1)
        found = own.culprit(Finding(what="device", slowdown=3.1, ranks=(2,)), {2})
        seen += [found] if found is not None else []
    assert len(seen) > 40
    if slow == 1.0:
        assert max(seen) < 1.1  # no single one is taken for slow
        assert sum(found <= 1.05 for found in seen) > len(seen) * 0.8
    else:
        assert min(seen) > 1.3


# -- stages that take unequally long ---------------------------------------------------------------

OWN_S = (0.020, 0.020, 0.030, 0.030)
"""Of each position: two stages of two replicas."""


def train_stages(job: Steered, count: int) -> None:
    for index in range(count):
        own = [OWN_S[job.placement.index(rank)] * job.slow[rank] for rank in job.ranks]
        job.pass_by(own, max(own) * 2 + 0.05)
        if index % 10 == 0:
            job.beat()


@pytest.mark.parametrize("before", [150, 20])
def test_own_times_go_by_the_part_of_the_model_that_a_worker_has_since_it_was_moved(
    before: int,
) -> None:
    job = steered()
    job.facts(pp=2, dp=2, least_microbatches=2, no_topology_change="")
    job.counts = (16, 16)
    train_stages(job, 150)
    job.pipeline.remedy.own_slowdowns()
    # an earlier link fault exchanged ranks 0 and 2, and they stay where they are
    job.placement = (2, 1, 0, 3)
    force = InForce(microbatches=(16, 16), placement=job.placement)
    job.pipeline.remedy._policy.in_force = force
    job.pipeline.remedy.own_slowdowns()  # as at every iteration while it was done
    train_stages(job, before)
    job.slow[2] = 2.0
    train_stages(job, 40)
    own = job.pipeline.remedy.own_slowdowns()
    assert own == pytest.approx({0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}, abs=0.1)


def test_healthy_iterations_at_another_place_are_not_those_of_this_one() -> None:
    worker = Worker(0)
    own = OwnTimes({0: worker, **{rank: Worker(rank) for rank in (1, 2, 3)}})
    own.arrange(FACTS, INITIAL, INITIAL)

    def iterate(compute_s: float, count: int) -> None:
        for _ in range(count):
            worker.end_t = (worker.end_t or 0.0) + 1.0
            sample = StepSample(step=0, duration_s=1.0, end_s=worker.end_t, compute_s=compute_s)
            worker.healthy.append(sample)
            worker.recent.append(sample)

    iterate(0.02, 40)
    own.arrange(FACTS, InForce(microbatches=EVEN, placement=(3, 1, 2, 0)), INITIAL)
    iterate(0.03, 10)
    own.learn()
    assert own.slowdown(0) == pytest.approx(1.0)


# -- what the journal tells ------------------------------------------------------------------------


TWICE = Finding(what="device", slowdown=2.0, ranks=(2,), host=FACTS.hosts[2])


def accused(job: Steered, finding: Finding = TWICE) -> None:
    """As by an inquiry, which writes its verdict down."""
    verdict = Verdict(episode=job.pipeline.episode or "", findings=(finding,))
    job.out.append(Write(kind="verdict", record=verdict, t=job.now_s))
    job.out += job.pipeline.remedy.verdict(verdict, job.now_s)
    job.obey()


def worked_around() -> Steered:
    """Worker 2 is slow, and an inquiry has said so."""
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 2.0
    job.train(40)
    accused(job)
    return job


def test_a_journal_tells_why_a_plan_was_taken_back() -> None:
    job = worked_around()
    job.train(300)
    job.slow[2] = 1.0
    job.train(120)
    live = [e.record for e in job.said("decision")]
    assert [(d.action, d.level) for d in live] == [("escalate", "S2"), ("restore", "S1")]
    config = job.decide
    assert config is not None
    policy = Policy(LayoutPlanner(FACTS, config), config)
    again = redecide(job.journal, policy)
    assert [d.action for _, d in again] == ["escalate", "restore"]
    for (t, _), entry in zip(again, job.said("decision"), strict=True):
        assert t == pytest.approx(entry.t, abs=0.6)
    paces = job.said("culpritpace")
    assert paces[-1].record.slowdown < 1.05


def test_a_journal_tells_of_a_fault_that_follows_another_at_once() -> None:
    """The episode's own lines of it are of before the plan for the other was taken back."""
    job = worked_around()
    job.train(100)
    job.slow[0] = 3.0
    job.train(20)
    job.slow[2] = 1.0
    while levels(job)[-1] != ("restore", "S1"):
        job.train(1)
        assert job.step[0] < 400
    job.train(2)
    finding = Finding(what="device", slowdown=3.0, ranks=(0,), host=FACTS.hosts[0])
    accused(job, finding)
    job.train(60)
    live = job.said("decision")
    assert [e.record.action for e in live] == ["escalate", "restore", "escalate"]
    config = job.decide
    assert config is not None
    again = redecide(job.journal, Policy(LayoutPlanner(FACTS, config), config))
    assert [d.action for _, d in again] == [e.record.action for e in live]
    assert again[-1][0] == pytest.approx(live[-1].t, abs=0.1)


def test_a_fault_that_grows_under_a_plan_is_worth_one_to_other_policies_too() -> None:
    """The job shows only what the plan for both leaves, which is more than the first fault was."""
    job = steered()
    job.facts()
    job.train(100)
    job.slow[2] = 1.3
    job.train(40)
    accused(job, replace(TWICE, slowdown=1.3))
    job.train(100)
    job.slow[0] = job.slow[1] = 3.0
    job.train(30)
    for rank in (0, 1):
        accused(job, Finding(what="device", slowdown=3.0, ranks=(rank,), host=FACTS.hosts[rank]))
    job.train(100)
    job.slow = [1.0] * 4
    job.train(200)
    assert [level for _, level in levels(job)][-1] == "S1"
    (fault,) = read_incidents(job.journal)
    assert max(stretch.slowdown for stretch in fault.stretches) > 2.0
    results = compare([fault], ("wait", "ladder"), config=job.decide)
    assert "S2" in {decision.level for _, decision in results["ladder"][0].decisions}
    assert results["ladder"][0].total_s < 0.8 * results["wait"][0].total_s


def test_paces_do_not_make_a_journal_grow_and_end_with_the_fault() -> None:
    job = steered()
    struck(job)
    since_t = job.now_s
    job.train(1000)
    told = job.said("culpritpace")
    assert 3 <= len(told) <= (job.now_s - since_t) / 5.0
    jobs = [e for e in job.said("action") if e.record["what"] == "pace"]
    assert 1 <= len(jobs) <= 4
    job.slow[2] = 1.0
    job.train(120)
    assert in_force(job).microbatches == EVEN
    count = len(job.said("culpritpace"))
    job.train(300)
    assert len(job.said("culpritpace")) == count


def test_many_culprits_make_no_more_lines_than_one_a_second() -> None:
    job = steered()
    struck(job)
    job.accuse(0, 2.0)
    job.slow[0] = 2.0
    job.train(60)
    since_t = job.now_s
    for turn in range(60):  # their pace is never the same twice
        job.slow[0] = job.slow[2] = 1.5 + 0.5 * (turn % 2)
        job.train(10)
    told = [e for e in job.said("culpritpace") if e.t >= since_t]
    assert {e.record.key for e in told} == {"device rank 0", "device rank 2"}
    assert len(told) <= job.now_s - since_t + 2
