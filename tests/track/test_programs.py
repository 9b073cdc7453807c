"""Iterations of made-up programs from their calls alone: every trap that has a name."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.track.streams import (
    DP,
    TP,
    Call,
    Followed,
    Played,
    Stretch,
    barrier,
    ddp,
    every,
    follow,
    fsdp,
    hybrid,
    iterations_in,
    play,
    scalars,
    start_up,
)

from failslow.config import TrackConfig


def experts(index: int) -> Stretch:
    """Tokens are routed anew each time: all-to-alls of any size, gradients of fixed ones."""
    sizes = np.random.default_rng(index).integers(10, 100, 8) * 256
    gradients = [Call("allreduce_", 1_000_000), Call("allreduce_", 500_000)]
    return Stretch([Call("alltoall_base_", int(size)) for size in sizes] + gradients)


def varied(index: int, choices: int) -> Stretch:
    """One sequence length an iteration, of `choices`: its activations have another size."""
    size = 6400 * int(np.random.default_rng(index).integers(1, choices + 1))
    gradients = [Call("allreduce_", 3_000_000, DP), Call("allreduce_", 1_500_000, DP)]
    return Stretch([Call("allreduce_", size, TP) for _ in range(8)] + gradients)


def gathers(batches: int) -> Stretch:
    """Evaluation under FSDP: forward passes gather as training does."""
    forward = fsdp(reduce=False)[:13]
    return Stretch([*forward * batches, Call("allreduce_", 8)], steps=False)


def generation(batches: int) -> Stretch:
    """Evaluation of a hybrid job: forward passes, then a number reduced over all ranks."""
    forward = hybrid(1)[:5]
    return Stretch([*forward * batches, Call("allreduce_", 4)], steps=False)


LONG = [
    Call("allreduce_" if code else "_allgather_base_", int(size) * 1000)
    for code, size in zip(
        np.random.default_rng(0).integers(0, 2, 1000),
        np.random.default_rng(1).integers(1, 50, 1000),
        strict=True,
    )
]

STEADY: dict[str, tuple[list[Call], int]] = {
    "ddp": (list(ddp().calls), 3),
    "ddp one bucket": (list(ddp((4_000_000,)).calls), 1),
    "ddp equal buckets": (list(ddp((4_000_000,) * 7 + (100_000,)).calls), 8),
    "ddp many equal buckets": (list(ddp((4_000_000,) * 24 + (100_000,)).calls), 25),
    "ddp two buckets of one size": (list(ddp((4_000_000,) * 2).calls), 2),
    "63 of 64 alike": ([Call("allreduce_", 99_000)] * 63 + [Call("allreduce_", 50_000)], 64),
    "fsdp": (fsdp(), 38),
    "fsdp 32 layers": (fsdp(32), 98),
    "fsdp all of one size": (fsdp(32, root=False), 96),
    "fsdp accumulating 4": (fsdp(4, reduce=False) * 3 + fsdp(4), 41),
    "fsdp accumulating 16": (fsdp(4, reduce=False) * 15 + fsdp(4), 149),
    "tp pp dp first stage": (hybrid(4), 42),
    "tp pp dp last stage": (hybrid(4, first_stage=False), 42),
    "tp pp dp 16 micro-batches": (hybrid(16), 162),
    "tp pp dp 64 micro-batches": (hybrid(64, first_stage=False), 642),
    "1000 calls": (LONG, 1000),
}

WITH_OTHERS: dict[str, tuple[list[Stretch], int]] = {
    "evaluation every 2": (every(60, 2, ddp(), scalars(4)), 3),
    "evaluation every 5": (every(60, 5, ddp(), scalars(20)), 3),
    "evaluation every 50, long": (every(160, 50, ddp(), scalars(300)), 3),
    "evaluation every 5, one bucket": (every(60, 5, ddp((4_000_000,)), scalars(20)), 1),
    "fsdp evaluation every 5": (every(60, 5, Stretch(fsdp()), gathers(5)), 38),
    "fsdp evaluation every 20, long": (every(100, 20, Stretch(fsdp()), gathers(50)), 38),
    "hybrid evaluation every 7": (every(60, 7, Stretch(hybrid(4)), generation(10)), 42),
    "checkpoint every 5": (every(60, 5, ddp(), barrier()), 3),
    "checkpoint every 17": (every(60, 17, Stretch(fsdp()), barrier()), 38),
    "a logged loss every 10": (
        every(60, 10, Stretch(fsdp()), Stretch([Call("allreduce_", 4)], 0.001, steps=False)),
        38,
    ),
    "experts": ([experts(index) for index in range(60)], 10),
    "any sequence length": ([varied(index, 1000) for index in range(60)], 10),
    "three sequence lengths": ([varied(index, 3) for index in range(60)], 10),
}

CHANGES: dict[str, tuple[Stretch, Stretch, int]] = {
    "another model": (ddp(), Stretch(fsdp(), 0.2), 38),
    "another accumulation": (
        Stretch(fsdp(4, reduce=False) * 3 + fsdp(4)),
        Stretch(fsdp(4, reduce=False) * 7 + fsdp(4), 0.2),
        77,
    ),
    "layers unfrozen": (ddp(), ddp((4_000_000, 2_000_000, 900_000, 77_000)), 4),
    "a pipeline grown": (Stretch(hybrid(4)), Stretch(hybrid(8), 0.2), 82),
}


def assert_each_sample_is_one_iteration(found: Followed, played: Played) -> None:
    wrong = [sample.step for sample in found.samples if iterations_in(sample, played.ends_s) != 1]
    assert wrong == []
    assert [sample.step for sample in found.samples] == list(range(len(found.samples)))


def assert_times_are_true(found: Followed, played: Played) -> None:
    """Within 1 %: the median of usual iterations, and the sum."""
    ends = played.ends_s
    usual = [sample for sample in found.samples if not sample.foreign_calls]
    spans = [np.searchsorted(ends, sample.end_s) for sample in usual]
    true = np.diff(ends)[np.array(spans) - 1]
    median = np.median([sample.duration_s for sample in usual])
    assert median == pytest.approx(np.median(true), rel=0.01)
    first = found.samples[0]
    begin = np.searchsorted(ends, first.end_s - first.duration_s)
    end = np.searchsorted(ends, found.samples[-1].end_s)
    total = sum(sample.duration_s for sample in found.samples)
    assert total == pytest.approx(ends[end] - ends[begin], rel=0.01)


@pytest.mark.parametrize("name", STEADY)
def test_a_steady_program_is_followed(name: str) -> None:
    calls, period = STEADY[name]
    played = play([start_up(), *[Stretch(calls)] * (60 if period < 1000 else 20)])
    found = follow(played.unmarked, played.ends_s)
    state = found.tracker.state
    assert (state.phase, state.source, state.period_calls) == ("locked", "period", period)
    assert state.run == 0
    assert found.first_followed(period) <= 12
    assert len(found.samples) >= len(played.ends_s) - 2
    assert_each_sample_is_one_iteration(found, played)
    assert_times_are_true(found, played)
    assert all(sample.calls == period for sample in found.samples)


@pytest.mark.parametrize("name", WITH_OTHERS)
def test_foreign_calls_and_changing_sizes_are_tolerated(name: str) -> None:
    stretches, period = WITH_OTHERS[name]
    played = play([start_up(), *stretches])
    found = follow(played.unmarked, played.ends_s)
    state = found.tracker.state
    assert (state.source, state.period_calls, state.run) == ("period", period, 0)
    assert found.first_followed(period) <= 12
    assert len(found.samples) >= len(played.ends_s) - 2
    assert_each_sample_is_one_iteration(found, played)
    assert_times_are_true(found, played)
    assert {sample.calls for sample in found.samples} == {period}


@pytest.mark.parametrize("before", [20, 40, 900])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_program_is_followed_within_12_iterations(name: str, before: int) -> None:
    first, second, period = CHANGES[name]
    before = min(before, 30_000 // len(first.calls))
    played = play([start_up(), *[first] * before, *[second] * 40])
    found = follow(played.unmarked, played.ends_s)
    assert found.periods[-1][1] == period
    assert found.first_followed(period, before) <= before + 12
    assert found.tracker.state.run == 1
    later = [sample for sample in found.samples if sample.run == 1]
    assert len(later) >= 38 - 12
    for sample in found.samples:
        assert iterations_in(sample, played.ends_s) == 1
    assert np.median([sample.duration_s for sample in later]) == pytest.approx(
        second.seconds, rel=0.01
    )


def test_the_anchor_is_the_one_call_on_the_widest_group() -> None:
    played = play([start_up(), *[Stretch(hybrid(4))] * 20])
    anchor = follow(played.unmarked, played.ends_s).tracker.state.anchor
    assert anchor is not None
    assert (anchor.op, anchor.group_size, anchor.size_bytes) == ("allreduce_", 8, 4)
    assert anchor.unique


def test_without_a_unique_call_the_place_in_the_period_serves() -> None:
    played = play([start_up(), *[Stretch(fsdp(8, root=False))] * 30])
    found = follow(played.unmarked, played.ends_s)
    anchor = found.tracker.state.anchor
    assert anchor is not None
    assert not anchor.unique
    assert anchor.op == "_reduce_scatter_base_"
    assert_times_are_true(found, played)


def test_gathers_alone_are_no_iterations() -> None:
    played = play([start_up(), Stretch(fsdp(32, reduce=False) * 3, steps=False)])
    found = follow(played.unmarked, played.ends_s)
    assert found.samples == []
    assert found.tracker.state.phase == "searching"


def test_evaluation_longer_than_training_is_not_followed() -> None:
    played = play([start_up(), *[ddp()] * 40, scalars(3000), *[ddp()] * 40])
    found = follow(played.unmarked, played.ends_s)
    assert_each_sample_is_one_iteration(found, played)
    assert found.tracker.state.run == 0
    assert [s.foreign_calls for s in found.samples if s.foreign_calls] == [3000]


def test_a_stream_that_never_repeats_says_so_and_keeps_its_memory() -> None:
    rng = np.random.default_rng(3)
    calls = [Call("allreduce_", int(size)) for size in rng.integers(100, 10**9, 9000)]
    played = play([Stretch(calls, steps=False)])
    played.calls["op"] = rng.integers(1, 9, len(calls))
    found = follow(played.calls, played.ends_s, config=TrackConfig(buffer_calls=2048))
    assert found.samples == []
    assert "2048 calls" in found.tracker.state.note


def test_a_period_of_100_000_calls_is_followed() -> None:
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 300, 100_000) * 1000
    unit: Sequence[Call] = [Call("allreduce_", int(size)) for size in sizes]
    played = play([start_up(), *[Stretch(unit, 40.0)] * 7])
    found = follow(played.unmarked, played.ends_s, block=20_000)
    assert found.tracker.state.period_calls == 100_000
    assert found.locked_at is not None
    assert found.locked_at <= 6
    assert_each_sample_is_one_iteration(found, played)
    assert_times_are_true(found, played)
