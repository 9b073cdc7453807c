"""What levels cost outlives the controller that measured it."""

from __future__ import annotations

from typing import Any

from tests.runtime.test_remedy import EVEN, Steered, steered, struck

from failslow.decide.costs import CostBook

MEASURED = (0.001, "measured")


def costs(job: Steered) -> CostBook:
    return job.pipeline.remedy._policy.costs


def learnt(job: Steered) -> list[dict[str, Any]]:
    return [e.record for e in job.said("action") if e.record["what"] == "learnt"]


def experienced(**changes: Any) -> Steered:
    job = steered(**changes)
    struck(job)
    job.train(60)
    assert job.counts != EVEN
    assert costs(job).cost("S2") == MEASURED
    return job


def test_a_new_controller_knows_what_levels_cost() -> None:
    job = experienced()
    known = costs(job).learnt()
    assert learnt(job)[-1]["levels"] == known
    job.begin("launch-1", job.journal)
    assert costs(job).learnt() == known
    job.facts()  # the trainer tells them again
    assert costs(job).learnt() == known


def test_a_controller_killed_after_any_line_knows_what_was_told_until_then() -> None:
    job = experienced()
    entries = job.journal
    for number in range(len(entries) - 1, 0, -1):
        lines = entries[:number]
        if lines[-1].kind in ("step", "culpritpace"):
            continue
        told = [e.record for e in lines if e.kind == "action" and e.record["what"] == "learnt"]
        if not told:
            break
        other = steered()
        other.begin("launch-1", lines)
        assert costs(other).learnt() == told[-1]["levels"]


def test_what_was_learnt_is_told_again_for_a_journal_is_read_from_its_end() -> None:
    job = experienced()
    count = len(learnt(job))
    job.train(1300)  # more than a minute
    assert len(learnt(job)) > count
    entries = job.journal
    again = max(i for i, entry in enumerate(entries) if entry.kind == "jobfacts")
    job.begin("launch-1", entries[again - 1 :])  # from a sign of life of the controller on
    assert costs(job).cost("S2") == MEASURED


def test_a_later_job_of_the_same_layout_begins_with_it_and_without_its_refusals() -> None:
    job = experienced()
    costs(job).refuse("S3", "no state callbacks")
    job.train(20)
    assert learnt(job)[-1]["levels"]["S3"]["refused"]
    later = steered()
    later.begin("launch-2", job.journal)
    assert costs(later).cost("S2")[1] == "estimate"  # nobody knows its layout yet
    later.facts()
    assert costs(later).cost("S2") == MEASURED
    assert costs(later).refusal("S3") == ""
    # the same job keeps to what it refused
    job.begin("launch-1", job.journal)
    assert costs(job).refusal("S3") == "no state callbacks"


def test_a_job_of_another_layout_begins_with_estimates() -> None:
    job = experienced()
    for changes in (
        {"microbatches": 16},
        {"pp": 2, "dp": 2},
        {"hosts": ("a", "a", "b", "b")},
    ):
        later = steered()
        later.begin("launch-2", job.journal)
        later.facts(**changes)
        assert costs(later).cost("S2")[1] == "estimate"
        assert learnt(later) == []
