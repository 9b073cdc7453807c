"""The controller's clock, whatever is done to the system's."""

from __future__ import annotations

from itertools import pairwise

import pytest

from failslow.runtime.controller import SteadyClock


class Turned:
    """A controller's turns, five a second, by clocks that are set."""

    def __init__(self) -> None:
        self.steady_s, self.set_s = 1000.0, 1.7e9
        self.clock = SteadyClock(lambda: self.steady_s + self.set_s, lambda: self.steady_s)

    def turns(self, passed_s: float) -> list[float]:
        """What it tells meanwhile."""
        told = []
        for _ in range(round(5 * passed_s)):
            self.steady_s += 0.2
            told.append(self.clock.now_s())
        return told

    def behind_s(self) -> float:
        return self.steady_s + self.set_s - self.clock.now_s()


@pytest.fixture
def turned() -> Turned:
    return Turned()


def test_one_that_is_set_forward_is_followed_by_and_by(turned: Turned) -> None:
    turned.turns(10.0)
    turned.set_s += 120.0
    told = turned.turns(40.0)
    assert turned.behind_s() < 6.0
    steps = [later - sooner for sooner, later in pairwise(told)]
    assert min(steps) == pytest.approx(0.2, abs=1e-3)
    assert max(steps) < 1.1, "nobody who speaks once a second is taken for silent"


@pytest.mark.parametrize("by_s", [-3600.0, 3.0])
def test_one_that_is_set_back_or_hardly_is_not_followed(turned: Turned, by_s: float) -> None:
    before_s = turned.clock.now_s()
    turned.set_s += by_s
    assert turned.turns(30.0)[-1] - before_s == pytest.approx(30.0, abs=1e-3)


def test_a_controller_that_stood_still_does_not_leap(turned: Turned) -> None:
    turned.set_s += 3600.0
    before_s = turned.clock.now_s()
    turned.steady_s += 60.0
    assert turned.clock.now_s() - before_s < 66.0
