"""After a plan the detector tells of the past for a while: that is no reason for more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from failslow.pipeline.aftermath import SETTLE, Aftermath
from failslow.records import Outcome

DONE = Outcome(episode="e1", level="S2", ok=True, cost_s=0.01, slowdown=None)


def test_the_slowness_before_a_plan_is_not_that_after_it() -> None:
    aftermath = Aftermath()
    aftermath.take(0.146, 1.46, healthy_s=0.1)
    assert aftermath.present(1.46) == 1.46
    aftermath.begin(DONE)
    measured = [aftermath.take(0.11, 1.46, healthy_s=0.1, waits=n == 5) for n in range(SETTLE + 10)]
    assert measured == [None] * len(measured), "an order that waits takes its iteration"
    assert aftermath.present(1.46) is None
    assert aftermath.take(0.11, 1.46, healthy_s=0.1) == pytest.approx(1.1)
    assert aftermath.present(1.46) == pytest.approx(1.1)
    assert aftermath.present(1.2) == 1.2, "the detector has seen another level"
    assert aftermath.present(1.46) == 1.46, "and this one came after it"


def test_what_was_not_carried_out_changes_nothing() -> None:
    aftermath = Aftermath()
    aftermath.take(0.146, 1.46, healthy_s=0.1)
    aftermath.begin(replace(DONE, ok=False))
    assert aftermath.present(1.46) == 1.46
    assert all(aftermath.take(0.11, 1.46, healthy_s=0.1) is None for _ in range(20))
