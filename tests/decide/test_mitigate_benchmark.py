"""`benchmarks/mitigate.py`: what its exit code rests on, and which faults its second run meets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import mitigate

from failslow.demo import Drill


def drill(**target: int) -> Drill:
    """One that went as it should."""
    return Drill(
        fault="link" if "peer" in target else "throttle",
        target=target,
        onset_delay_s=2.0,
        verdict_delay_s=2.0,
        culprit_correct=True,
        named=(),
        cause="",
        level="S2",
        plan=(),
        healthy_s=0.1,
        slow_s=0.2,
        mitigated_s=0.1,
        optimum_s=0.1,
        pause_s=None,
        action_s=None,
        relieved=True,
    )


@pytest.mark.parametrize(("others", "code"), [([3.0, 2.0, 1.0], 0), ([3.0, 2.5, 1.0], 1)])
def test_losses_that_differ_from_the_run_without_fail_it(
    monkeypatch: pytest.MonkeyPatch, others: list[float], code: int
) -> None:
    losses = {"auto": [3.0, 2.0], "observe": others}
    again: list[Sequence[Drill]] = []

    def run(
        _folder: object, mode: str, *_: object, struck: Sequence[Drill] = ()
    ) -> tuple[list[Drill], list[float]]:
        again.append(struck)
        return [drill(rank=1)], losses[mode]

    monkeypatch.setattr(mitigate, "_run", run)
    monkeypatch.setattr(mitigate, "losses_without", lambda *_, **__: [3.0, 2.0])
    assert mitigate.main(["--events", "1"]) == code
    assert [len(drills) for drills in again] == [0, 1]


def test_the_same_links_are_struck_again_wherever_the_ring_lies() -> None:
    nodes = [SimpleNamespace(namespace=f"n{n}", address=f"10.0.0.{n}") for n in range(4)]

    def job(placement: list[int]) -> Any:
        bed = SimpleNamespace(nodes=nodes)
        return SimpleNamespace(bed=bed, pids=[1, 2, 3, 4], placement=lambda: placement)

    moved = [fault.target for fault in mitigate._faults(job([0, 2, 1, 3]), 4, 0)]
    struck = [drill(**target) for target in moved]
    faults = list(mitigate._faults(job([0, 1, 2, 3]), 4, 0, struck))
    assert [fault.target for fault in faults] == moved
    plain = [fault.target for fault in mitigate._faults(job([0, 1, 2, 3]), 4, 0)]
    assert plain != moved
