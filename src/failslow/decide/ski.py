"""Ski rental over levels: when is a dearer remedy worth its price, if nobody knows how long?

In: what each level costs to go to and what is lost per second there. Out: which levels are worth
considering, when to go up, what that costs for any duration, and how far from the clairvoyant.

    >>> ladder = Ladder(cost_s=(0.0, 1.0, 15.0, 600.0), rate=(0.4, 0.1, 0.05, 0.0))
    >>> ladder.useful()                    # levels that are the cheapest for some duration
    (0, 1, 2, 3)
    >>> [round(when_s, 1) for when_s in ladder.times_s()]    # go up after so many seconds
    [2.5, 142.5, 11842.5]
    >>> round(float(ladder.online_s(300.0)), 2), float(ladder.clairvoyant_s(300.0))
    (38.88, 30.0)

The rule: stay until the time lost since onset reaches the cost of the next level, then go up.

Bounds. Let b_0 = 0 < b_1 < … < b_k be the costs of the useful levels, r_0 > r_1 > … > r_k ≥ 0 their
rates, OPT(t) = min_j b_j + r_j·t what a clairvoyant pays who goes to one level at once, and L(t)
what the rule has lost by t, prices not counted. Then L ≤ OPT: at level i, b_i ≤ L ≤ b_{i+1}. For
j > i, OPT's candidate costs b_j ≥ b_{i+1} ≥ L. For j ≤ i, level j was entered at L = b_j, and since
then less than r_j was lost each second, so L ≤ b_j + r_j·t. Prices paid by then:

* additive costs (going from i to j costs b_j − b_i): b_i ≤ L, so the rule pays at most 2·OPT;
  two levels are the case k = 1 (Karlin, Manasse, Rudolph & Sleator 1988);
* full prices: b_1 + … + b_i < i·L for i ≥ 2, so less than (1 + k)·OPT: below 4 for the ladder
  S1 … S4, where k = 3. For any number of levels 4 is the best known bound, 3.62 the best possible
  (Damaschke, *Nearly optimal strategies for special cases of on-line capital investment*, 2003).

Multiplying all thresholds by θ gives 1 + max(θ, 1/θ) and 1 + max(θ + k − 1, k/θ): θ ≤ 1 keeps L
≤ OPT while b_i ≤ L/θ; θ ≥ 1 makes L ≤ θ·OPT while b_i ≤ L/θ ≤ OPT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from failslow.errors import PlanError

__all__ = ["Ladder"]

Floats = NDArray[np.float64]

_FOR_EVER_S = 1e200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Levels 0 (do nothing, free) to k. Raises PlanError when a number is none or level 0 costs."""

    cost_s: Sequence[float]
    """Seconds that going to each level costs; with `additive`, from level 0."""
    rate: Sequence[float]
    """Seconds lost per second at each level, 0 to 1 for a slowdown: 1 − 1 / slowdown."""
    additive: bool = False
    """Going from level i to j costs cost_s[j] − cost_s[i], not cost_s[j]."""
    _chain: tuple[int, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.cost_s or len(self.cost_s) != len(self.rate):
            raise PlanError(
                f"{len(self.cost_s)} costs and {len(self.rate)} rates; give one of each for every "
                "level, doing nothing first"
            )
        for name, value in [("cost", c) for c in self.cost_s] + [("rate", r) for r in self.rate]:
            if not 0.0 <= value < math.inf:
                raise PlanError(f"a {name} of {value} is none; give a finite number >= 0")
        if self.cost_s[0] != 0.0:
            raise PlanError(f"doing nothing costs {self.cost_s[0]} s; the first level must be free")
        object.__setattr__(self, "_chain", self._envelope())

    def useful(self) -> tuple[int, ...]:
        """The levels that are a clairvoyant's choice for some duration, in order of cost.

        The others cannot help: for every duration one of these is at least as cheap.
        """
        return self._chain

    def clairvoyant_s(self, duration_s: ArrayLike) -> Floats:
        """What the best single level costs a fault of `duration_s`, any shape."""
        duration = np.asarray(duration_s, dtype=np.float64)
        cost, rate = np.asarray(self.cost_s), np.asarray(self.rate)
        best: Floats = (cost + rate * duration[..., None]).min(axis=-1)
        return best

    def times_s(self, theta: float = 1.0) -> tuple[float, ...]:
        """Seconds after onset at which the rule goes to each useful level but the first.

        theta: what thresholds are multiplied by. Infinite where a level is never reached.
        """
        when_s, times = 0.0, []
        theta = float(theta)  # numpy's warns where Python's division gives infinity
        for here, there in pairwise(self._chain):
            missing = theta * (self.cost_s[there] - self.cost_s[here])
            when_s += missing / self.rate[here]
            times.append(when_s)
        return tuple(times)

    def online_s(self, duration_s: ArrayLike, theta: float = 1.0) -> Floats:
        """What the rule pays for a fault of `duration_s`, any shape: losses and prices.

        A fault that ends the moment a level is reached has paid for it.
        """
        duration = np.asarray(duration_s, dtype=np.float64)
        paid = self.rate[self._chain[0]] * duration
        bought, lost_there_s = 0.0, 0.0
        for level, when_s, below in zip(
            self._chain[1:], self.times_s(theta), self._chain, strict=False
        ):
            if when_s > _FOR_EVER_S:
                break
            bought += self.cost_s[level] - self.additive * self.cost_s[below]
            lost_there_s = theta * self.cost_s[level]
            since = lost_there_s + self.rate[level] * (duration - when_s)
            paid = np.where(duration >= when_s, bought + since, paid)
        return paid

    def worst_ratio(self, theta: float = 1.0) -> float:
        """The largest online_s / clairvoyant_s over all durations, exactly.

        Between the times at which either changes level both are linear, so their ratio is
        monotone: only these times, and the one long after, need to be looked at.
        """
        chain = self._chain
        crossings = [self._crossing(*pair) for pair in pairwise(chain)]
        times = np.array([*self.times_s(theta), *crossings])
        times = times[(times > 0.0) & (times < _FOR_EVER_S)]
        if not times.size:
            return 1.0
        times = np.append(times, 1e6 * times.max())
        return float(np.max(self.online_s(times, theta) / self.clairvoyant_s(times)))

    def _envelope(self) -> tuple[int, ...]:
        """The lower envelope of the lines cost + rate · duration, from duration 0 on."""
        levels = range(len(self.cost_s))
        # free levels first; of these the one that loses least
        here = min(levels, key=lambda level: (self.cost_s[level], self.rate[level], level))
        chain = [here]
        while True:
            better = [level for level in levels if self.rate[level] < self.rate[here]]
            if not better:
                return tuple(chain)
            here = min(
                better, key=lambda level: (self._crossing(chain[-1], level), self.rate[level])
            )
            chain.append(here)

    def _crossing(self, here: int, there: int) -> float:
        """The duration from which level `there` is cheaper."""
        return (self.cost_s[there] - self.cost_s[here]) / (self.rate[here] - self.rate[there])
