"""The pipeline recurrence: equal to an event-by-event simulation, and to closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.pipeline_events import run_events

from failslow.errors import ConfigError
from failslow.simulate.pipeline import Pipeline
from failslow.simulate.schedule import Computation, Schedule, stage_orders, sweep_order


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """(schedule, stages, micro-batches, chunks a stage)."""
    schedule: Schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    stages = draw(st.integers(1, 5))
    if schedule == "interleaved":
        return schedule, stages, stages * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return schedule, stages, draw(st.integers(1, 9)), 1


@given(pipelines(), st.integers(0, 2**32 - 1))
def test_every_computation_is_when_an_event_simulation_has_it(
    shape: tuple[Schedule, int, int, int], seed: int
) -> None:
    schedule, stages, micro_batches, per_stage = shape
    chunks, cases = stages * per_stage, 2
    rng = np.random.default_rng(seed)
    forward_s, backward_s = rng.integers(1, 9, (2, chunks, cases)).astype(float)
    onward_s, back_s = rng.integers(0, 4, (2, chunks - 1, cases)).astype(float)
    orders = stage_orders(
        schedule, stages=stages, micro_batches=micro_batches, chunks_per_stage=per_stage
    )
    pipeline = Pipeline(
        schedule, stages=stages, micro_batches=micro_batches, chunks_per_stage=per_stage
    )
    seen: dict[Computation, tuple[list[float], list[float]]] = {}

    times = pipeline.run(
        forward_s,
        backward_s,
        onward_s,
        back_s,
        watch=lambda _, c, start, end: seen.update({c: (start.tolist(), end.tolist())}),
    )

    for case in range(cases):

        def own_s(c: Computation, case: int = case) -> float:
            return float((forward_s if c.forward else backward_s)[c.chunk, case])

        def transfer_s(c: Computation, case: int = case) -> float:
            return float(onward_s[c.chunk, case] if c.forward else back_s[c.chunk - 1, case])

        events = run_events(orders, chunks, own_s, transfer_s)
        assert {c: (start[case], end[case]) for c, (start, end) in seen.items()} == events
        for stage, order in enumerate(orders):
            assert times.stage_end_s[stage, case] == max(events[c][1] for c in order)
        for chunk in range(chunks):
            last = max(end for c, (_, end) in events.items() if c.chunk == chunk and not c.forward)
            assert times.chunk_end_s[chunk, case] == last


@given(pipelines())
def test_each_stage_computes_everything_once_and_forward_before_backward(
    shape: tuple[Schedule, int, int, int],
) -> None:
    schedule, stages, micro_batches, per_stage = shape
    orders = stage_orders(
        schedule, stages=stages, micro_batches=micro_batches, chunks_per_stage=per_stage
    )

    for stage, order in enumerate(orders):
        chunks = range(stage, stages * per_stage, stages)
        assert sorted((c.forward, c.chunk, c.micro_batch) for c in order) == [
            (forward, chunk, m)
            for forward in (False, True)
            for chunk in chunks
            for m in range(micro_batches)
        ]
        place = {c: n for n, c in enumerate(order)}
        assert all(
            place[Computation(True, c.chunk, c.micro_batch)] < n
            for c, n in place.items()
            if not c.forward
        )


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 8), (8, 4), (6, 30)])
def test_equal_stages_take_the_time_of_the_textbook(stages: int, micro_batches: int) -> None:
    one, free = np.full((stages, 1), 1.0), np.zeros((stages - 1, 1))

    for schedule in ("gpipe", "1f1b"):
        pipeline = Pipeline(schedule, stages=stages, micro_batches=micro_batches)
        end = pipeline.run(one, 2 * one, free, free).stage_end_s.max()
        assert end == 3 * (micro_batches + stages - 1)


@pytest.mark.parametrize("per_stage", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(per_stage: int) -> None:
    stages, micro_batches = 4, 8
    chunks = stages * per_stage
    one, free = np.full((chunks, 1), 1 / per_stage), np.zeros((chunks - 1, 1))
    pipeline = Pipeline(
        "interleaved", stages=stages, micro_batches=micro_batches, chunks_per_stage=per_stage
    )

    end = pipeline.run(one, 2 * one, free, free).stage_end_s.max()

    assert end == pytest.approx(3 * (micro_batches + (stages - 1) / per_stage))


def test_1f1b_holds_no_more_micro_batches_than_stages_behind_it() -> None:
    for stage, order in enumerate(stage_orders("1f1b", stages=4, micro_batches=12)):
        held = np.cumsum([1 if c.forward else -1 for c in order])
        assert held.max() == 4 - stage


def test_micro_batches_that_do_not_fill_the_groups_of_an_interleaved_schedule_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"micro_batches \(6\) must be a multiple of pp \(4\)"):
        stage_orders("interleaved", stages=4, micro_batches=6, chunks_per_stage=2)
    with pytest.raises(ConfigError, match=r"vpp \(2\) needs schedule interleaved"):
        stage_orders("1f1b", stages=4, micro_batches=8, chunks_per_stage=2)


def test_orders_that_wait_for_each_other_are_noticed() -> None:
    first, second = stage_orders("gpipe", stages=2, micro_batches=1)

    with pytest.raises(ValueError, match="wait for each other"):
        sweep_order([first[::-1], second])
