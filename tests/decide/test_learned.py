"""Ski rental with a history: robust whatever comes, and near the best if the past repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.decide.learned import choose_theta, expected_s
from failslow.decide.ski import Ladder
from failslow.errors import PlanError
from failslow.stats.survival import SurvivalCurve

pasts = st.lists(st.tuples(st.floats(0.1, 1e4), st.booleans()), min_size=1, max_size=30).map(
    lambda seen: SurvivalCurve.fit(*zip(*seen, strict=True))
)
trusts = st.floats(0.05, 1.0)


@st.composite
def ladders(draw: st.DrawFn, levels: int | None = None, additive: bool | None = None) -> Ladder:
    paid = draw(st.integers(1, 3)) if levels is None else levels - 1
    return Ladder(
        cost_s=(0.0, *draw(st.lists(st.floats(0.5, 2e3), min_size=paid, max_size=paid))),
        rate=(
            draw(st.floats(0.05, 1.0)),
            *draw(st.lists(st.floats(0.0, 1.0), min_size=paid, max_size=paid)),
        ),
        additive=draw(st.booleans()) if additive is None else additive,
    )


def threshold_s(ladder: Ladder, durations: np.ndarray, z: float) -> np.ndarray:
    """What two levels cost when the dearer is taken once z seconds are lost."""
    rate, after, price = ladder.rate[0], ladder.rate[1], ladder.cost_s[1]
    lost = rate * durations
    return np.where(lost < z, lost, z + price + after * (durations - z / rate))


@given(ladders(), pasts, trusts)
def test_cost_stays_within_the_stated_factor_of_the_clairvoyant(
    ladder: Ladder, past: SurvivalCurve, trust: float
) -> None:
    theta = choose_theta(ladder, past, trust=trust)
    assert trust <= theta <= 1 / trust
    paid = max(1, len(ladder.useful()) - 1)
    bound = 1 + (1 if ladder.additive else paid) / trust
    assert ladder.worst_ratio(theta) <= bound * (1 + 1e-9)


@given(ladders(), pasts, trusts)
def test_it_never_pays_more_than_ski_rental_if_the_past_repeats(
    ladder: Ladder, past: SurvivalCurve, trust: float
) -> None:
    theta = choose_theta(ladder, past, trust=trust)
    assert expected_s(ladder, past, theta) <= expected_s(ladder, past, 1.0) * (1 + 1e-9)


@given(ladders(levels=2, additive=False), pasts, trusts)
def test_it_pays_little_more_than_the_best_threshold_if_the_past_repeats(
    ladder: Ladder, past: SurvivalCurve, trust: float
) -> None:
    if len(ladder.useful()) == 1:
        return
    times, weights = past.masses()
    lost = ladder.rate[0] * times
    rules = [0.0, 1e12, *(lost * (1 + 1e-9)), *np.geomspace(1e-3, 1e6, 40)]
    best = min(float(threshold_s(ladder, times, z) @ weights) for z in rules)
    theta = choose_theta(ladder, past, trust=trust)
    assert expected_s(ladder, past, theta) <= (1 + trust) * best * (1 + 1e-6)


@given(ladders(), pasts, trusts)
def test_no_other_multiplier_in_reach_is_cheaper(
    ladder: Ladder, past: SurvivalCurve, trust: float
) -> None:
    theta = choose_theta(ladder, past, trust=trust)
    least = expected_s(ladder, past, theta)
    for other in np.geomspace(trust, 1 / trust, 60):
        assert least <= expected_s(ladder, past, float(other)) * (1 + 1e-9)


@given(ladders(), pasts)
def test_no_trust_is_plain_ski_rental(ladder: Ladder, past: SurvivalCurve) -> None:
    assert choose_theta(ladder, past, trust=1.0) == 1.0


def test_short_faults_are_waited_out_and_long_ones_acted_on_early() -> None:
    ladder = Ladder(cost_s=(0.0, 60.0), rate=(0.5, 0.0))
    rng = np.random.default_rng(0)
    short = SurvivalCurve.fit(rng.uniform(100.0, 200.0, 2000))
    long = SurvivalCurve.fit(rng.uniform(3000.0, 9000.0, 2000))
    assert choose_theta(ladder, short, trust=0.3) > 1.6
    assert choose_theta(ladder, long, trust=0.3) == 0.3


@pytest.mark.parametrize("trust", [0.0, -1.0, 1.5, float("nan")])
def test_trust_that_is_none_is_refused(trust: float) -> None:
    with pytest.raises(PlanError, match="above 0"):
        choose_theta(
            Ladder(cost_s=(0.0, 1.0), rate=(0.5, 0.0)), SurvivalCurve.fit([1.0]), trust=trust
        )
