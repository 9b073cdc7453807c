"""The ski-rental rule against its own simulation, its bounds, and the clairvoyant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from failslow.decide.ski import Ladder
from failslow.errors import PlanError

costs = st.floats(0.01, 1000.0)
rates = st.floats(0.0, 1.0)


@st.composite
def ladders(draw: st.DrawFn, levels: int | None = None, additive: bool | None = None) -> Ladder:
    paid = draw(st.integers(1, 5)) if levels is None else levels - 1
    return Ladder(
        cost_s=(0.0, *draw(st.lists(costs, min_size=paid, max_size=paid))),
        rate=(draw(st.floats(0.01, 1.0)), *draw(st.lists(rates, min_size=paid, max_size=paid))),
        additive=draw(st.booleans()) if additive is None else additive,
    )


def step_by_step(ladder: Ladder, duration_s: float, theta: float) -> float:
    """The rule, followed literally: lose until the next useful level's cost is reached."""
    at, lost_s, paid_s, now_s = ladder.useful()[0], 0.0, 0.0, 0.0
    for level in ladder.useful()[1:]:
        wait_s = (theta * ladder.cost_s[level] - lost_s) / ladder.rate[at]
        if now_s + wait_s > duration_s:
            break
        now_s, lost_s = now_s + wait_s, theta * ladder.cost_s[level]
        paid_s += ladder.cost_s[level] - (ladder.cost_s[at] if ladder.additive else 0.0)
        at = level
    return paid_s + lost_s + ladder.rate[at] * (duration_s - now_s)


@given(ladders(), st.floats(0.0, 1e5), st.floats(0.2, 5.0))
def test_cost_is_that_of_following_the_rule(
    ladder: Ladder, duration_s: float, theta: float
) -> None:
    assume(all(abs(when / (duration_s + 1e-9) - 1) > 1e-9 for when in ladder.times_s(theta)))
    found = ladder.online_s(duration_s, theta)
    assert found == pytest.approx(step_by_step(ladder, duration_s, theta), rel=1e-9, abs=1e-9)
    assert ladder.online_s(np.full((2, 3), duration_s), theta).shape == (2, 3)


@given(ladders(levels=2))
def test_two_levels_cost_at_most_twice_the_clairvoyant(ladder: Ladder) -> None:
    assert ladder.worst_ratio() <= 2.0 + 1e-9


@given(ladders(additive=True))
def test_additive_costs_stay_within_twice_the_clairvoyant(ladder: Ladder) -> None:
    assert ladder.worst_ratio() <= 2.0 + 1e-9


@given(ladders(levels=4, additive=False))
def test_four_levels_stay_below_four_times_the_clairvoyant(ladder: Ladder) -> None:
    assert ladder.worst_ratio() < 4.0


@given(ladders(), st.floats(0.1, 10.0))
def test_moved_thresholds_keep_their_bound(ladder: Ladder, theta: float) -> None:
    paid = len(ladder.useful()) - 1
    bound = max(theta + paid, 1.0 + paid / theta)
    if ladder.additive:
        bound = 1.0 + max(theta, 1.0 / theta)
    assert ladder.worst_ratio(theta) <= bound * (1 + 1e-9)


@given(ladders(), st.floats(0.3, 3.0))
def test_worst_ratio_is_the_worst_over_all_durations(ladder: Ladder, theta: float) -> None:
    durations = np.geomspace(1e-3, 1e7, 400)
    durations = np.concatenate([durations, [when for when in ladder.times_s(theta) if when < 1e9]])
    durations = durations[durations > 0]
    ratios = ladder.online_s(durations, theta) / ladder.clairvoyant_s(durations)
    assert ratios.max() <= ladder.worst_ratio(theta) * (1 + 1e-6)


@given(ladders())
def test_useful_levels_are_the_cheapest_ones_of_some_duration(ladder: Ladder) -> None:
    cost, rate = np.array(ladder.cost_s), np.array(ladder.rate)
    useful = list(ladder.useful())
    for duration in (0.0, *np.geomspace(1e-3, 1e7, 200)):
        every = cost + rate * duration
        assert min(every[useful]) <= every.min() * (1 + 1e-9)
    assert (np.diff(cost[useful]) >= 0).all()
    assert (np.diff(rate[useful]) < 0).all()


def test_level_that_saves_nothing_is_passed_over() -> None:
    assert Ladder(cost_s=(0.0, 1.0, 10.0), rate=(0.4, 0.4, 0.1)).useful() == (0, 2)
    assert Ladder(cost_s=(0.0, 1.0, 10.0), rate=(0.4, 0.1, 0.1)).useful() == (0, 1)
    assert Ladder(cost_s=(0.0, 9.9, 10.0), rate=(0.4, 0.39, 0.1)).useful() == (0, 2)


def test_free_remedy_is_taken_at_once() -> None:
    ladder = Ladder(cost_s=(0.0, 0.0, 10.0), rate=(0.4, 0.1, 0.0))
    assert ladder.useful() == (1, 2)
    assert ladder.online_s(50.0) == pytest.approx(5.0)


def test_nothing_to_gain_means_waiting_for_ever() -> None:
    ladder = Ladder(cost_s=(0.0, 5.0), rate=(0.0, 0.0))
    assert ladder.times_s() == ()
    assert ladder.worst_ratio() == 1.0


@pytest.mark.parametrize(
    ("cost_s", "rate", "told"),
    [
        ((), (), "0 costs and 0 rates"),
        ((0.0, 1.0), (0.1,), "2 costs and 1 rates"),
        ((1.0,), (0.1,), r"doing nothing costs 1\.0 s"),
        ((0.0, float("nan")), (0.1, 0.0), "a cost of nan"),
        ((0.0, 1.0), (-0.1, 0.0), r"a rate of -0\.1"),
    ],
)
def test_impossible_levels_are_refused(
    cost_s: tuple[float, ...], rate: tuple[float, ...], told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        Ladder(cost_s=cost_s, rate=rate)
