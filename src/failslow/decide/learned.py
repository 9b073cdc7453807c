"""Ski rental that has seen the durations of earlier fail-slows, and does not rely on them.

In: a `Ladder` of levels and the `SurvivalCurve` of past durations. Out: θ, by which every threshold
of the rule is multiplied: below 1 where faults usually last long, above where they soon pass.

    >>> from failslow.stats.survival import SurvivalCurve
    >>> ladder = Ladder(cost_s=(0.0, 60.0), rate=(0.5, 0.0))
    >>> choose_theta(ladder, SurvivalCurve.fit([30.0, 40.0, 50.0]), trust=0.5)    # soon over: wait
    1.0
    >>> choose_theta(ladder, SurvivalCurve.fit([3000.0, 4000.0]), trust=0.5)      # do it early
    0.5

θ is the one in [λ, 1/λ] that is cheapest on average over the past, λ = `trust` in (0, 1]; λ = 1 is
plain ski rental, λ → 0 believes the past. For two levels this is the clamped prediction of Purohit,
Svitkina & Kumar (NeurIPS 2018), with a distribution as the advice (arXiv 2603.29233).

**Robustness**: whatever comes, the cost is at most 1 + 1/λ times the clairvoyant's for two levels
and for additive costs, and 1 + k/λ for k paid levels at full price. These are the bounds of `ski`
for θ, which are largest at the ends of [λ, 1/λ].

**Consistency**: if durations follow the past, two levels cost on average at most 1 + λ times what
the best threshold of all costs, chosen with the distribution known; and for any levels never more
than plain ski rental, since θ = 1 is among those compared. Proof of 1 + λ. Let b be the price, r
and ρ < r the rates, z a threshold on the loss, C_z(t) its cost for duration t, x = r·t the loss by
then; C_z = x if x < z, else z + b + ρ·(t − z/r). It is enough that for every z some θ·b in [λb,
b/λ] costs at most (1 + λ)·C_z(t) for all t, for then the average does, and ours is the least.

* λb ≤ z ≤ b/λ: itself.
* z < λb: take λb. If x < z both pay x. If z ≤ x < λb ours pays x < λb < C_z, as C_z ≥ b. Else ours
  pays (λb − z)·(1 − ρ/r) ≤ λb more, and C_z ≥ b.
* z > b/λ (never, too): take b/λ. If x < b/λ both pay x. If b/λ ≤ x < z ours pays at most x + b, and
  b ≤ λx = λ·C_z. Else ours pays no more than C_z, having gone down to ρ earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from failslow.decide.ski import Ladder
from failslow.errors import PlanError
from failslow.stats.survival import SurvivalCurve

__all__ = ["History", "choose_theta", "expected_s"]

History = Mapping[str, SurvivalCurve]
"""Durations by what was slow: "device", "host", "link"; "" stands for all of them."""

_ATOMS = 400
"""Durations that stand for a longer history."""


def choose_theta(ladder: Ladder, durations: SurvivalCurve, *, trust: float) -> float:
    """The θ in [trust, 1 / trust] that costs least on average over `durations`.

    Exactly: times of level changes are θ times those of θ = 1, so between the θ at which one of
    them passes one of the durations the average cost is linear and rises with θ; only the lowest θ
    and those just beyond such a passing can be best. Of equals the one nearest to 1.
    Raises PlanError unless 0 < trust <= 1.
    """
    if not 0.0 < trust <= 1.0:
        raise PlanError(f"trust is {trust}; give a number above 0 (believe) and up to 1 (do not)")
    times, weights = _thinned(durations)
    passings = [
        np.nextafter(times / when_s, np.inf) * (1.0 + 1e-12)
        for when_s in ladder.times_s()
        if 0.0 < when_s < np.inf
    ]
    candidates = np.concatenate([[trust, 1.0, 1.0 / trust], *passings])
    candidates = np.unique(candidates[(candidates >= trust) & (candidates <= 1.0 / trust)])
    costs = np.array([float(ladder.online_s(times, theta) @ weights) for theta in candidates])
    level = np.flatnonzero(costs <= costs.min() * (1.0 + 1e-12))
    return float(candidates[level[np.argmin(np.abs(np.log(candidates[level])))]])


def expected_s(ladder: Ladder, durations: SurvivalCurve, theta: float) -> float:
    """What the rule with `theta` pays on average over `durations`."""
    times, weights = durations.masses()
    return float(ladder.online_s(times, theta) @ weights)


def _thinned(durations: SurvivalCurve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distribution in at most 400 durations, neighbours together at the longest of them."""
    times, weights = durations.masses()
    if len(times) <= _ATOMS:
        return times, weights
    starts = np.linspace(0, len(times), _ATOMS, endpoint=False).astype(int)
    ends = np.append(starts[1:], len(times)) - 1
    return times[ends], np.add.reduceat(weights, starts)
