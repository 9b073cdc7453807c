"""Workers whose first iterations were told apart otherwise than the later ones, and not alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.runtime.scripted import Scripted

from failslow.pipeline import Tick
from failslow.records import StepSample

PARTS = (14, 20, 14, 17)
"""Micro-batches of the first iteration that each worker's agent takes for iterations."""
WHOLE_S, PART_S = 0.58, 0.03


def begun(job: Scripted, *, first_told: int | None) -> None:
    """Parts of an iteration, then a stretch that nobody tells apart, then whole iterations.

    first_told: the step that the trainer tells from then on; None: agents count on, each with what
    it thinks that it missed.
    """
    for number in range(max(PARTS)):
        job.now_s += PART_S
        for rank, parts in enumerate(PARTS):
            if number < parts:
                job.give(job.sample(rank, PART_S))
    job.run += 1
    job.now_s += 0.4
    for rank in job.ranks:
        stretch_s = 0.4 + PART_S * (max(PARTS) - PARTS[rank])
        missed = round(stretch_s / PART_S)
        job.step[rank] = job.step[rank] + missed if first_told is None else first_told - 1
    job.give(Tick())


def train(job: Scripted, count: int, *, late: int = 0, told: bool = False) -> None:
    """told: by the trainer. late: rank 0's first iterations that are reported after the others'."""
    held = []
    for number in range(count):
        job.now_s += WHOLE_S
        for rank in job.ranks:
            event = replace(job.sample(rank, WHOLE_S), told=told)
            if rank == 0 and number < late:
                held.append(event)
                continue
            job.give(event)
        if number == late:
            for event in held:
                job.give(event)
        job.give(Tick())


def whole(job: Scripted) -> list[StepSample]:
    return [step for step in job.job_steps() if step.duration_s > 0.3]


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("first_told", [None, 0, 5000])
def test_an_iteration_is_one_whatever_its_parts_passed_for(
    first_told: int | None, late: int
) -> None:
    """Of sixty iterations ninety were told, each of some workers only."""
    job = Scripted()
    begun(job, first_told=first_told)
    train(job, 60, late=late, told=first_told is not None)
    steps = whole(job)
    assert len(steps) == 60
    assert [s.step for s in steps] == list(range(steps[0].step, steps[0].step + 60))
    if first_told is not None:
        assert steps[0].step == first_told
    workers = [e.tags["workers"] for e in job.said("step") if e.rank is None]
    assert workers[-60:] == [4] * 60
