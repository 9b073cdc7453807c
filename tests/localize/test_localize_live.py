"""Real faults on real watched jobs in the test bed: the culprit is proved, and nobody else.

The short version of `benchmarks/localize.py`, which strikes a hundred times and more: twelve faults
that training feels, each from its injection to its verdict, on one job a layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.localize import EGRESS_MBIT, Strike, WatchedLayout, strike
from tests.testbed import TestBed

Faults = tuple[tuple[str, int], ...]
"""(fault, rank)"""

STRIKES: list[tuple[str, Faults]] = [
    ("dp4", (("throttle", 2), ("off path", 0), ("link", 1), ("egress", 3), ("burner", 0))),
    ("pp2dp2", (("two", 0), ("off path", 0), ("flood", 1), ("link", 3))),
    ("tp2dp2", (("throttle", 1), ("egress", 2), ("nothing", 0), ("two", 3), ("flood", 0))),
]
MORE: list[tuple[str, Faults]] = [
    ("dp4", (("two", 1), ("flood", 0), ("nothing", 0))),
    ("pp2dp2", (("throttle", 3), ("burner", 1), ("egress", 2), ("nothing", 0))),
    ("tp2dp2", (("burner", 2), ("link", 3), ("off path", 0))),
]
UNFELT = {
    ("dp4", "off path"),
    ("tp2dp2", "off path"),
    ("tp2dp2", "link"),
    *((layout, "nothing") for layout, _ in STRIKES),
}
"""No traffic that training waits for takes these links."""
SPARE = 2
"""Faults that may be struck once more on a job."""


def struck(folder: Path, layout: str, faults: Faults) -> list[Strike]:
    """One after another; where training does not feel one, once more at the opposite rank."""
    with TestBed(nodes=4, egress_mbit=EGRESS_MBIT, folder=folder) as bed:
        job = WatchedLayout(bed, folder, layout)
        job.ready()
        strikes, spare = [], SPARE
        for fault, first in faults:
            rank = first
            strikes.append(strike(job, fault, rank))
            while spare and (layout, fault) not in UNFELT and not strikes[-1].felt:
                spare, rank = spare - 1, (rank + 2) % 4
                strikes.append(strike(job, fault, rank))
        return strikes


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layout", "faults"),
    [*STRIKES, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)],
)
def test_culprits_of_real_faults_are_named(layout: str, faults: Faults, tmp_path: Path) -> None:
    why = TestBed.available()
    if why is not None:
        pytest.skip(why)
    strikes = struck(tmp_path, layout, faults)
    told = "\n".join(map(str, strikes))
    assert all(s.right for s in strikes), told
    felt = [s.fault for s in strikes if s.felt and (layout, s.fault) not in UNFELT]
    assert felt == [fault for fault, _ in faults if (layout, fault) not in UNFELT], told
    for s in strikes:
        if s.fault == "nothing":
            assert not s.named, told
        if s.pause_s is not None:
            assert s.pause_s <= 5.0, told
