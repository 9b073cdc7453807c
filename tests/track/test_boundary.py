"""Which moment is taken for the boundary: when the caller came back from the anchor call."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.track.streams import Call, Played, Stretch, follow, fsdp, hybrid, play, start_up

from failslow.records import KIND_CALL


def early_or_late(played: Played, rank_early_s: NDArray[np.float64]) -> Played:
    """The stream of a rank that comes to its last call this much sooner and waits so much longer.

    All ranks return from it at the moment they did before; rank_early_s: one an iteration.
    """
    calls = played.calls.copy()
    ends = np.searchsorted(calls["start_ns"], np.round(played.ends_s * 1e9).astype(np.int64))
    last = ends - 1
    assert (calls["kind"][last] == KIND_CALL).all()
    early_ns = np.round(rank_early_s * 1e9).astype(np.int64)
    calls["start_ns"][last] -= early_ns
    calls["wait_ns"][last] += early_ns
    return Played(calls, played.ends_s)


@pytest.mark.parametrize("program", [fsdp(6), hybrid(4)], ids=["fsdp", "hybrid"])
def test_a_ranks_own_haste_and_delay_at_the_anchor_are_not_in_its_times(
    program: list[Call],
) -> None:
    rng = np.random.default_rng(3)
    stretch = Stretch(program, 0.1, rest=0.02)
    played = play([start_up(), *[stretch] * 80], noise=0.001)
    haste_s = rng.uniform(0.0, 0.1 / (2 * len(program)), 80)
    hasty = early_or_late(played, haste_s)
    found = follow(hasty.unmarked, hasty.ends_s)
    durations = np.array([sample.duration_s for sample in found.samples])
    true = np.diff(played.ends_s)[-len(durations) :]
    assert len(durations) >= 70
    assert np.abs(durations / true - 1.0).max() < 0.003
    assert haste_s.std() > 0.003 * 0.1, "starts are worse than that"


def test_the_wait_at_the_boundary_belongs_to_the_iteration_it_ends() -> None:
    rng = np.random.default_rng(4)
    program = fsdp(6)
    played = play([start_up(), *[Stretch(program, 0.1)] * 60], noise=0.001)
    haste_s = rng.uniform(0.0, 0.002, 60)
    found = follow(early_or_late(played, haste_s).unmarked, played.ends_s)
    # every call blocks for 50 µs, and the last for its haste besides
    for sample, early_s in zip(found.samples[::-1], haste_s[::-1], strict=False):
        blocked_s = len(program) * 50e-6 + early_s
        assert sample.compute_s == pytest.approx(sample.duration_s - blocked_s, abs=1e-6)
