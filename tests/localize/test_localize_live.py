"""Real faults on real watched jobs in the test bed: the culprit is proved, and nobody else.

The short version of `benchmarks/localize.py`, which strikes a hundred times and more: twelve real
faults, each from its injection to its verdict, and once nothing, on one job a layout.
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
    ("tp2dp2", (("throttle", 1), ("egress", 2), ("nothing", 0), ("flood", 0))),
]
MORE: list[tuple[str, Faults]] = [
    ("dp4", (("two", 1), ("flood", 0), ("nothing", 0))),
    ("pp2dp2", (("throttle", 3), ("burner", 1), ("egress", 2), ("nothing", 0))),
    ("tp2dp2", (("burner", 2), ("link", 3), ("two", 3), ("off path", 0))),
]
UNFELT = {
    ("dp4", "off path"),
    ("tp2dp2", "off path"),
    ("tp2dp2", "link"),
    *((layout, "nothing") for layout, _ in STRIKES),
}
"""No traffic that training waits for takes these links."""
SPARE = 2
"""Faults that may be struck once more on a job, as the machine has moods of its own."""


def struck(folder: Path, layout: str, faults: Faults) -> tuple[list[Strike], str]:
    """The last strike of each fault, and all of them as text.

    Where training does not feel one, once more at the opposite rank.
    """
    with TestBed(nodes=4, egress_mbit=EGRESS_MBIT, folder=folder) as bed:
        job = WatchedLayout(bed, folder, layout)
        job.ready()
        last, every, spare = [], [], SPARE
        for fault, rank in faults:
            one = strike(job, fault, rank)
            every.append(one)
            while spare and not as_it_should_be(layout, one):
                spare -= 1
                one = strike(job, fault, rank if one.felt else (rank + 2) % 4)
                every.append(one)
            last.append(one)
        return last, "\n".join(map(str, every))


def as_it_should_be(layout: str, one: Strike) -> bool:
    """Named exactly, and felt where it can be."""
    return one.right and (one.felt or (layout, one.fault) in UNFELT)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layout", "faults"),
    [*STRIKES, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)],
)
def test_culprits_of_real_faults_are_named(layout: str, faults: Faults, tmp_path: Path) -> None:
    why = TestBed.available()
    if why is not None:
        pytest.skip(why)
    strikes, told = struck(tmp_path, layout, faults)
    assert all(as_it_should_be(layout, s) for s in strikes), told
    for s in strikes:
        if s.fault == "nothing":
            assert not s.named, told
        if s.pause_s is not None:
            assert s.pause_s <= 5.0, told
