"""S2: how many micro-batches each data-parallel replica runs, so that the slowest is done soonest.

In: what a replica costs, `fixed_s + per_microbatch_s · m` seconds for m micro-batches, and bounds
on m. Out: whole numbers that sum to the total, with the smallest possible maximum:

    >>> fixed_s, per_microbatch_s = pipeline_costs([[0.1, 0.1], [0.1, 0.2], [0.1, 0.1], [0.1, 0.1]])
    >>> allocate(fixed_s, per_microbatch_s, total=32)
    Allocation(counts=(9, 5, 9, 9), makespan_s=1.1, moved=3)

A 1F1B or GPipe pipeline whose stages need t_1 … t_P for a micro-batch takes
Σt + (m − 1) · max t = (Σt − max t) + m · max t: filling and draining cost once, the slowest stage
every time. FALCON (arXiv 2410.12588, §5.2) solves the relaxation with a general solver; this is
exact and takes microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from failslow.errors import PlanError

__all__ = ["Allocation", "allocate", "even_split", "pipeline_costs", "reallocate"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_LISTED = 64
"""Candidates worth listing one by one, however few the replicas."""
_LONGEST_S = 1e15
"""No cost is that long; beyond it sums of costs could overflow."""
_SHORTEST_S = 1e-200
"""A slope below it is taken for none where a bound is only guessed."""
_RESOLUTION = 2.0**-48
"""Slopes this small beside the makespan are lost in its last bits: division cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Micro-batches of each replica."""

    counts: tuple[int, ...]
    makespan_s: float
    """Seconds until the slowest replica is done."""
    moved: int
    """Micro-batches that run on another replica than in the split it was asked to stay near."""


def even_split(total: int, replicas: int) -> tuple[int, ...]:
    """`total` micro-batches over `replicas`, the first ones taking the remainder.

    Raises PlanError when there is no replica or a negative total.
    """
    if replicas < 1 or total < 0:
        raise PlanError(
            f"{total} micro-batches over {replicas} replicas; give at least one replica and no "
            "negative total"
        )
    each, more = divmod(total, replicas)
    return (each + 1,) * more + (each,) * (replicas - more)


def pipeline_costs(stage_s: ArrayLike) -> tuple[Floats, Floats]:
    """(fixed_s, per_microbatch_s), shape (D,), of D replicas' pipelines.

    stage_s: shape (D, P), seconds a stage computes for one micro-batch, waiting left out.
    """
    times = np.atleast_2d(np.asarray(stage_s, dtype=np.float64))
    slowest: Floats = times.max(axis=-1)
    return times.sum(axis=-1) - slowest, slowest


def allocate(
    fixed_s: ArrayLike,
    per_microbatch_s: ArrayLike,
    total: int,
    *,
    least: ArrayLike = 1,
    most: ArrayLike | None = None,
    near: ArrayLike | None = None,
) -> Allocation:
    """The split of `total` micro-batches over D replicas whose slowest replica is fastest.

    fixed_s, per_microbatch_s: shape (D,), finite, >= 0. least, most: bounds on each replica's
    count, shape (D,) or one number; `most` None is unbounded. Of all optimal splits the one that
    moves the fewest micro-batches away from `near` (None: the even split) is taken; which of
    several, the levelest by cost and then by index decides.
    Raises PlanError when the bounds cannot be met or a cost is none.

    Why it is exact. A replica's cost c_d(m), as computed in float64, never falls as m rises, since
    rounding is monotone. So the count of micro-batches that fit below a makespan, N(T) = Σ_d
    max{m ≤ most_d : c_d(m) ≤ T} (at least least_d), is a step function of T, and the best makespan
    is the largest of the least_d costs and of the smallest T with N(T) ≥ total. Bisection keeps
    N(low) < total ≤ N(high) until few micro-batches have a cost in (low, high]; these are listed,
    and the (total − N(low))-th smallest of their costs is that T: no tolerance anywhere. Every
    split within least_d and max{m : c_d(m) ≤ makespan} is optimal, and clipping `near` to this
    box, then adding or taking what is missing, is the least possible movement: each count outside
    the box has to enter it, and what is missing has to go somewhere.
    """
    fixed, slope, lower, upper = _checked(fixed_s, per_microbatch_s, total, least, most)
    wanted = even_split(total, len(fixed)) if near is None else near
    target = np.asarray(wanted, dtype=np.int64)
    if target.shape != fixed.shape:
        raise PlanError(f"near has shape {target.shape}; give one count for each of {len(fixed)}")
    counts = _fill(fixed, slope, lower, upper, total)
    makespan_s = float((fixed + slope * counts).max())
    box = _capacity(fixed, slope, lower, upper, makespan_s)
    nearest = np.clip(target, lower, box)
    if nearest.sum() <= total:
        counts = _fill(fixed, slope, nearest, box, total)
    else:
        counts = _fill(fixed, slope, lower, nearest, total)
    moved = int(np.maximum(target - counts, 0).sum())
    return Allocation(counts=tuple(counts.tolist()), makespan_s=makespan_s, moved=moved)


def reallocate(
    current: ArrayLike,
    fixed_s: ArrayLike,
    per_microbatch_s: ArrayLike,
    *,
    min_gain: float = 0.05,
    least: ArrayLike = 1,
    most: ArrayLike | None = None,
) -> Allocation:
    """`current`, unless the best split makes the slowest replica faster by more than `min_gain`.

    For plans that follow measurements: a plan is kept unless its makespan is over (1 + min_gain)
    times the best one. If every measured cost stays within a factor r of the truth from below and
    above together (r = 1.02: ±1 %) and r² ≤ 1 + min_gain, then

    * every change is a real improvement, and
    * as long as the truth does not change, the split changes at most once.

    Proof. Let C be the true makespan and K, K' those measured now and later: K' ≤ r·K for any
    split. If B was chosen, K(B) ≤ K(A) for all A, so later K'(B) ≤ r·K(B) ≤ r·K(A) ≤ r²·K'(A)
    ≤ (1 + min_gain)·K'(A): B stays. And K(A) > (1 + min_gain)·K(B) gives C(A) > C(B) in the
    same way. Raises PlanError as `allocate` does.
    """
    held = np.asarray(current, dtype=np.int64)
    total = int(held.sum())
    best = allocate(fixed_s, per_microbatch_s, total, least=least, most=most, near=held)
    fixed, slope, lower, upper = _checked(fixed_s, per_microbatch_s, total, least, most)
    if ((held < lower) | (held > upper)).any():
        return best
    makespan_s = float((fixed + slope * held).max())
    if makespan_s > (1.0 + min_gain) * best.makespan_s:
        return best
    return Allocation(counts=tuple(held.tolist()), makespan_s=makespan_s, moved=0)


def _checked(
    fixed_s: ArrayLike,
    per_microbatch_s: ArrayLike,
    total: int,
    least: ArrayLike,
    most: ArrayLike | None,
) -> tuple[Floats, Floats, Counts, Counts]:
    """The inputs as arrays of one shape. Raises PlanError."""
    fixed = np.asarray(fixed_s, dtype=np.float64)
    slope = np.asarray(per_microbatch_s, dtype=np.float64)
    if fixed.ndim != 1 or not len(fixed) or fixed.shape != slope.shape:
        raise PlanError(
            f"fixed_s has shape {fixed.shape}, per_microbatch_s {slope.shape}; give both one "
            "number for each replica"
        )
    for name, values in (("fixed_s", fixed), ("per_microbatch_s", slope)):
        bad = ~((values >= 0.0) & (values <= _LONGEST_S))
        if bad.any():
            at = int(np.argmax(bad))
            raise PlanError(
                f"{name} of replica {at} is {values[at]}; measure it again: seconds from 0 to "
                f"{_LONGEST_S:g} are needed"
            )
    try:
        lower = np.broadcast_to(np.asarray(least, dtype=np.int64), fixed.shape)
        upper = np.broadcast_to(
            np.asarray(total if most is None else most, dtype=np.int64), fixed.shape
        )
    except ValueError:
        raise PlanError(
            f"bounds need one number, or one for each of {len(fixed)} replicas"
        ) from None
    crossed = (lower < 0) | (upper < lower)
    if most is not None and crossed.any():
        at = int(np.argmax(crossed))
        raise PlanError(
            f"replica {at} may run {lower[at]} to {upper[at]} micro-batches; "
            "give 0 <= least <= most"
        )
    if lower.min() < 0 or total < lower.sum():
        raise PlanError(
            f"{total} micro-batches are fewer than the {lower.sum()} that {len(fixed)} replicas "
            "need at least; lower `least` (>= 0), or train with more micro-batches"
        )
    if total > upper.sum():
        raise PlanError(
            f"{total} micro-batches are more than the {upper.sum()} that {len(fixed)} replicas "
            "can run; raise `most`, or train with fewer micro-batches"
        )
    # what the others need at least is out of a replica's reach
    return fixed, slope, lower, np.minimum(upper, total - lower.sum() + lower)


def _fill(fixed: Floats, slope: Floats, lower: Counts, upper: Counts, total: int) -> Counts:
    """From `lower` on, always one more for the replica it costs least, until `total` are placed."""
    missing = total - int(lower.sum())
    if missing == 0:
        return lower
    low_s, below, n_below = -1.0, lower, total - missing
    high_s = _guess(fixed, slope, lower, missing)
    above = _capacity(fixed, slope, lower, upper, high_s)
    if (n_above := int(above.sum())) < total:
        low_s, below, n_below = high_s, above, n_above
        high_s, above, n_above = float((fixed + slope * upper).max()), upper, int(upper.sum())
    while n_above - n_below > max(_LISTED, 2 * len(fixed)):
        middle_s = low_s + 0.5 * (high_s - low_s)
        if not low_s < middle_s < high_s:
            # neighbouring floats: every candidate costs high_s
            room = above - below
            before = np.cumsum(room) - room
            taken: Counts = below + np.clip(total - n_below - before, 0, room)
            return taken
        middle = _capacity(fixed, slope, lower, upper, middle_s)
        count = int(middle.sum())
        if count < total:
            low_s, below, n_below = middle_s, middle, count
        else:
            high_s, above, n_above = middle_s, middle, count
    return _take_cheapest(fixed, slope, below, above, total - n_below)


def _take_cheapest(
    fixed: Floats, slope: Floats, below: Counts, above: Counts, wanted: int
) -> Counts:
    """`below` and the `wanted` cheapest micro-batches up to `above`; equals by index."""
    room = above - below
    replica = np.repeat(np.arange(len(room)), room)
    ordinal = np.arange(len(replica)) - np.repeat(np.cumsum(room) - room, room)
    cost = fixed[replica] + slope[replica] * (below[replica] + 1 + ordinal)
    limit = np.partition(cost, wanted - 1)[wanted - 1]
    taken = cost < limit
    level = np.flatnonzero(cost == limit)
    taken[level[: wanted - int(np.count_nonzero(taken))]] = True
    return below + np.bincount(replica[taken], minlength=len(room))


def _guess(fixed: Floats, slope: Floats, lower: Counts, missing: int) -> float:
    """A makespan at which about all fit, where no upper bound binds."""
    start_s = float((fixed + slope * lower).max())
    steepest = float(slope.max())
    if steepest < _SHORTEST_S:
        return start_s
    rate = float(np.sum(1.0 / np.maximum(slope, _RESOLUTION * max(steepest, start_s))))
    return start_s + missing / rate + steepest


def _capacity(fixed: Floats, slope: Floats, lower: Counts, upper: Counts, limit_s: float) -> Counts:
    """The most micro-batches of each replica that cost at most `limit_s`, `lower` at least."""
    if ((slope > 0.0) & (slope < _RESOLUTION * limit_s)).any():
        return _searched_capacity(fixed, slope, lower, upper, limit_s)
    flat = slope == 0.0
    steps = (limit_s - fixed) / np.where(flat, 1.0, slope)
    if flat.any():
        steps[flat] = np.where(fixed[flat] <= limit_s, upper[flat], -1)
    most: Counts = np.clip(steps, lower, upper).astype(np.int64)
    # the quotient is off by one at most: ask the cost itself
    most += (most < upper) & (fixed + slope * (most + 1) <= limit_s)
    most -= (most > lower) & (fixed + slope * most > limit_s)
    return most


def _searched_capacity(
    fixed: Floats, slope: Floats, lower: Counts, upper: Counts, limit_s: float
) -> Counts:
    """`_capacity` by bisection over the counts: slower, and right for any cost."""
    low, high = lower.copy(), upper.copy()
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = fixed + slope * middle <= limit_s
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low
