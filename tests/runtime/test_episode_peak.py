"""`Episode.peak_slowdown` of a live episode: its slowest iteration, spikes left out."""

from __future__ import annotations

import pytest
from tests.runtime.scripted import Scripted

from failslow.records import Episode


def peak_of(job: Scripted) -> float:
    relief = job.said("episode")[-1]
    assert relief.tags["event"] == "relief"
    assert isinstance(relief.record, Episode)
    return relief.record.peak_slowdown


@pytest.mark.parametrize("deeper", [1.0, 1.7])
def test_the_slowest_iteration_counts_and_a_spike_does_not(deeper: float) -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.4)
    if deeper > 1.0:
        job.iterate(60, 0.1, slow=deeper)
    job.iterate(1, 0.1, slow=2.2)  # the slowest of all
    job.iterate(30, 0.1, slow=1.4)
    job.iterate(1, 0.1, slow=6.0)  # a spike
    job.iterate(30, 0.1, slow=1.4)
    job.iterate(60, 0.1)
    assert peak_of(job) == pytest.approx(2.2, rel=0.03)
