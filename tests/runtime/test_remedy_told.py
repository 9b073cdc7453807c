"""What workers tell of their micro-batches, held against the split that is believed to be in force.

An answer that was lost, a journal that was lost, another training of which nobody spoke.
"""

from __future__ import annotations

from dataclasses import replace

from tests.runtime.test_remedy import EVEN, FACTS, Steered, in_force, levels, steered
from tests.runtime.test_remedy_follow import train

from failslow.decide import InForce
from failslow.pipeline import Order
from failslow.pipeline.toldsplit import ToldSplit


class Unheard(Steered):
    """Its Coordinator does as it is told, and while `lost` no answer of it arrives."""

    lost = False

    def answer(self, order: Order) -> None:
        if self.lost:
            self.counts = tuple(order.body["plan"]["microbatches"])
        else:
            super().answer(order)


def struck(*, lost: bool = False) -> Unheard:
    job = Unheard(decide=steered().decide)
    job.lost = lost
    job.facts()
    train(job, 100)
    job.slow[2] = 2.0
    train(job, 40)
    job.accuse(2, 2.0)
    train(job, 60)
    assert job.counts[2] < 8
    return job


def test_a_plan_whose_answer_was_lost_is_known_by_what_workers_tell() -> None:
    job = struck(lost=True)
    assert in_force(job).microbatches == EVEN
    train(job, 1500)
    assert len(job.orders) == 2  # it is given up as not answered, both times
    assert in_force(job).microbatches == job.counts
    assert job.pipeline.remedy.holding
    answered = [e.record.ok for e in job.said("outcome") if e.record.slowdown is None]
    assert answered == [False, False, True]
    job.lost = False
    job.slow[2] = 1.0
    train(job, 200)
    assert job.counts == EVEN == in_force(job).microbatches
    assert not job.pipeline.remedy.holding


def test_a_split_that_nobody_knows_of_is_taken_back() -> None:
    job = struck()
    job.begin("launch-1")  # its journal is lost
    job.facts()
    job.slow[2] = 1.0
    train(job, 60)
    assert job.counts != EVEN  # letters of a moment prove nothing
    train(job, 200)
    assert job.counts == EVEN == in_force(job).microbatches
    assert levels(job)[-1] == ("restore", "S1")
    assert job.said("decision")[-1].record.reason.startswith("workers tell of micro-batches [")


def test_a_plan_that_was_lost_is_made_again() -> None:
    job = struck()
    split = job.counts
    job.counts = EVEN  # another training, that has not spoken up
    train(job, 300)
    assert job.counts == split == in_force(job).microbatches
    assert levels(job) == [("escalate", "S2")] * 2


def test_letters_of_before_a_plan_that_come_after_it_prove_nothing() -> None:
    told = ToldSplit()
    force = InForce(microbatches=(9, 9, 5, 9), placement=(0, 1, 2, 3))

    def after(now_s: float, *counts: int) -> tuple[int, ...] | None:
        for rank, count in enumerate(counts):
            told.tell(rank, count)
        return told.other(FACTS, force, now_s)

    assert after(10.0, *EVEN) is None
    assert after(20.0, 8, 8, 8) is None  # nobody of the last replica
    assert after(21.0, *EVEN) is None
    assert after(30.0, *force.microbatches) is None
    assert after(40.0, 9, 8, 8, 8) is None  # some are old: that is no batch
    assert [after(50.0 + 6.0 * n, *EVEN) for n in range(3)] == [None, None, EVEN]


def test_workers_of_one_replica_that_tell_of_different_numbers_tell_nothing() -> None:
    told = ToldSplit()
    facts = replace(FACTS, dp=2, tp=2)
    force = InForce(microbatches=(16, 16), placement=(0, 1, 2, 3))
    for turn in range(5):
        for rank, count in enumerate((14, 18, 18, 18)):
            told.tell(rank, count)
        assert told.other(facts, force, 10.0 * turn) is None
    for turn in range(5, 9):
        for rank, count in enumerate((14, 14, 18)):
            told.tell(rank, count)
        last = told.other(facts, force, 10.0 * turn)
    assert last == (14, 18)
