"""S3: which worker goes where, so that the slow parts cost least.

In: a `TopologyModel` and the placement in force, shape (pp, dp). Out: a better placement, or why
there is none worth moving for:

    search = plan_topology(model, placement, cost_s=15.0, horizon_s=600.0)
    search.placement     # ((0, 1), (3, 2)), or None
    search.reason        # "2.15 s to 1.26 s an iteration (x1.71), 2 of 4 blocks move"

A congested link wants to carry activations, or nothing, instead of gradients; stragglers want to
share stages. Nothing here knows that: it is what minimising the predicted iteration time does,
then the number of stages with stragglers, then the number of blocks that move.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from failslow.decide.proof import Proof
from failslow.decide.swaps import Swaps
from failslow.decide.topology import Blocks, TopologyModel
from failslow.errors import PlanError

__all__ = ["TopologySearch", "best_placement", "plan_topology"]

EXACT_PLACEMENTS = 50_000
"""Placements looked at one by one: all of 8 blocks are 40,320."""
_EXACT_BLOCKS, _EXACT_HOSTS = 64, 8
_CHUNK = 1 << 17
"""Blocks evaluated at a time: bounds memory."""
_SAME = 1e-9
"""Iteration times closer than this share are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySearch:
    """What a search found."""

    placement: tuple[tuple[int, ...], ...] | None
    """Block at each (stage, replica); None: stay."""
    best: tuple[tuple[int, ...], ...] | None
    """The placement that gains enough, whether or not that is worth the move; None: none does."""
    reason: str
    """One sentence with the numbers."""
    before_s: float
    after_s: float
    """Predicted seconds per iteration now, and at best."""
    moved: int
    """Blocks that change places."""
    slow_stages: int
    """Stages that hold a straggler at best."""
    exact: bool
    """Every placement was looked at or excluded; else a local search's best."""


def plan_topology(
    model: TopologyModel,
    current: ArrayLike,
    *,
    cost_s: float = 0.0,
    horizon_s: float = math.inf,
    min_gain: float = 0.05,
    seed: int = 0,
) -> TopologySearch:
    """The best placement, or None where it would not pay.

    cost_s: what the change costs; horizon_s: for how long it is expected to help. Refused when the
    predicted gain, horizon_s · (1 − after / before), is below the cost, or iterations would become
    faster by less than the share `min_gain`. Raises PlanError unless `current` is a placement.
    """
    placement = _checked(model, current)
    found, exact = best_placement(model, placement, seed=seed)
    before_s, after_s = model.predict(placement), model.predict(found)
    moved = int(np.count_nonzero(found != placement))
    share = 1.0 - after_s / before_s if before_s > 0.0 else 0.0
    gain_s = horizon_s * share if share > 0.0 else 0.0
    told = f"{before_s:.4g} s to {after_s:.4g} s an iteration"
    gains, pays = share >= min_gain, True
    if not gains:
        pays = False
        reason = f"the best placement takes {told}: below a gain of {100 * min_gain:.3g} %"
    elif gain_s < cost_s:
        pays = False
        reason = (
            f"{told} saves {gain_s:.4g} s in the {horizon_s:.4g} s ahead: less than the "
            f"{cost_s:.4g} s that moving costs"
        )
    else:
        reason = f"{told} (x{before_s / after_s:.2f}), {moved} of {placement.size} blocks move"
    best = tuple(tuple(row) for row in found.tolist()) if gains else None
    return TopologySearch(
        placement=best if pays else None,
        best=best,
        reason=reason,
        before_s=before_s,
        after_s=after_s,
        moved=moved if pays else 0,
        slow_stages=model.slow_stages(found),
        exact=exact,
    )


def best_placement(
    model: TopologyModel, current: Blocks, *, seed: int = 0, exact: bool | None = None
) -> tuple[Blocks, bool]:
    """(placement, whether there is no faster one): the fastest; of equals the calmest.

    Every placement is looked at where up to 50,000 differ, which holds for any 8 blocks and for
    more where most are alike. On up to 8 hosts of several blocks branch and bound goes on from what
    exchanges of two blocks reach, until it has excluded all others: of equals not always the
    calmest then. Where that takes more than about a second, and on more hosts, it is a local
    search's best, which the same `seed` repeats. `exact` forces that all are looked at, or the
    local search alone.
    """
    kinds = _kinds(model) if exact or model.slowdown.size <= _EXACT_BLOCKS else None
    if exact or (exact is None and kinds is not None and _few_differ(kinds)):
        assert kinds is not None
        return _enumerate(model, current, kinds), True
    if exact is None and kinds is not None and len(np.unique(model.host)) <= _EXACT_HOSTS:
        proved, is_best = _proved(model, current)
        if is_best:
            return proved, True
        found = _descend(model, current, seed)
        return (found if model.predict(found) < model.predict(proved) else proved), False
    return _descend(model, current, seed), False


def _checked(model: TopologyModel, current: ArrayLike) -> Blocks:
    placement = np.asarray(current, dtype=np.int64)
    blocks = model.slowdown.size
    if placement.shape != (model.pp, model.dp) or not np.array_equal(
        np.sort(placement, axis=None), np.arange(blocks)
    ):
        raise PlanError(
            f"the current placement has shape {placement.shape}; give each of the {blocks} blocks "
            f"one place in a grid ({model.pp}, {model.dp})"
        )
    return placement


# -- all placements ----------------------------------------------------------------------------


def _kinds(model: TopologyModel) -> NDArray[np.int64]:
    """(B,): equal numbers for blocks that can be exchanged without any difference.

    Exchanging a and b makes none when their slowdowns agree and every link looks the same; that
    is an equivalence: if (a b) and (b c) change nothing, neither does (a c) = (a b)(b c)(a b).
    """
    pair = model.link[np.ix_(model.host, model.host)]
    blocks = len(model.slowdown)
    kind = np.full(blocks, -1)
    firsts: list[int] = []
    for block in range(blocks):
        for number, first in enumerate(firsts):
            if model.slowdown[block] != model.slowdown[first]:
                continue
            order = np.arange(blocks)
            order[[block, first]] = first, block
            if np.array_equal(pair[np.ix_(order, order)], pair):
                kind[block] = number
                break
        else:
            kind[block] = len(firsts)
            firsts.append(block)
    return kind


def _few_differ(kinds: NDArray[np.int64]) -> bool:
    """Whether the placements that differ are few enough to look at all."""
    counts = np.bincount(kinds).tolist()
    log_number = math.lgamma(len(kinds) + 1) - sum(math.lgamma(n + 1) for n in counts)
    # the more blocks, the longer each takes
    return log_number <= math.log(EXACT_PLACEMENTS * min(1.0, 8.0 / len(kinds)))


def _enumerate(model: TopologyModel, current: Blocks, kinds: NDArray[np.int64]) -> Blocks:
    """Every placement up to exchanges within a kind; the best by (time, slow stages, moved).

    How many blocks must move to give every place a block of the wanted kind is the number of
    places whose present block is of another kind.
    """
    present = kinds[current].ravel()
    by_kind = np.argsort(kinds, kind="stable")
    best: tuple[float, int, int] | None = None
    chosen = present
    rows = _arrangements(np.bincount(kinds).tolist())
    for patterns in np.array_split(rows, math.ceil(rows.size / _CHUNK)):
        placements = np.empty_like(patterns)
        places = np.argsort(patterns, axis=1, kind="stable")
        np.put_along_axis(placements, places, np.broadcast_to(by_kind, patterns.shape), axis=1)
        placements = placements.reshape(-1, model.pp, model.dp)
        times = model.predict_many(placements)
        fastest = float(times.min())
        level = np.flatnonzero(times <= fastest * (1.0 + _SAME))
        slow = model.stragglers()[placements[level]].any(axis=-1).sum(axis=-1)
        moved = np.count_nonzero(patterns[level] != present, axis=1)
        at = int(np.lexsort((moved, slow))[0])
        key = (fastest, int(slow[at]), int(moved[at]))
        if best is None or _beats(key, best):
            best, chosen = key, patterns[level[at]]
    return _settle(current, kinds, chosen.reshape(model.pp, model.dp))


def _beats(key: tuple[float, int, int], best: tuple[float, int, int]) -> bool:
    if abs(key[0] - best[0]) > _SAME * best[0]:
        return key[0] < best[0]
    return key[1:] < best[1:]


def _arrangements(counts: list[int]) -> NDArray[np.int64]:
    """Every different row of counts[k] times k, for all kinds k."""
    places = sum(counts)
    rows = np.full((1, places), -1)
    for kind, count in enumerate(counts):
        free = np.nonzero(rows < 0)[1].reshape(len(rows), -1)
        picks = np.array(list(itertools.combinations(range(free.shape[1]), count)))
        rows = np.repeat(rows, len(picks), axis=0)
        np.put_along_axis(rows, free[:, picks].reshape(-1, count), kind, axis=1)
    return rows


def _settle(current: Blocks, kinds: NDArray[np.int64], wanted: NDArray[np.int64]) -> Blocks:
    """A block of the wanted kind at each place; one that is there already stays."""
    placement = np.where(kinds[current] == wanted, current, -1)
    for kind in range(int(kinds.max()) + 1):
        free = np.setdiff1d(np.flatnonzero(kinds == kind), placement)
        placement[(placement < 0) & (wanted == kind)] = free
    return placement


# -- branch and bound --------------------------------------------------------------------------


def _proved(model: TopologyModel, current: Blocks) -> tuple[Blocks, bool]:
    """The fastest, or the best found until that took too long; whether it is the fastest."""
    proof, swaps = Proof(model), Swaps(model)
    best = swaps.improve(current, swaps.suspects())
    time_s = model.predict(best)
    while (found := proof.faster(time_s)) is not None:
        best = swaps.improve(found, swaps.suspects())
        time_s = min(model.predict(found), model.predict(best))
    return swaps.take_back(current, best), proof.complete


# -- local search ------------------------------------------------------------------------------


def _descend(model: TopologyModel, current: Blocks, seed: int) -> Blocks:
    """Exchanges of two blocks as long as one helps, from here and from a few shaken placements."""
    swaps = Swaps(model)
    rng = np.random.default_rng(seed)
    suspects = swaps.suspects()
    if not len(suspects):
        return current
    best = swaps.improve(current, suspects)
    best_key = swaps.key(best)
    starts = swaps.layouts()
    for number in range(len(starts) + swaps.restarts(len(suspects))):
        start = starts[number] if number < len(starts) else _shaken(best, suspects, rng)
        found = swaps.improve(start, suspects)
        key = swaps.key(found)
        # another arrangement altogether has to be faster, not just tidier
        if key.time_s < best_key.time_s * (1.0 - _SAME) or (
            number >= len(starts) and swaps.better(key, best_key)
        ):
            best, best_key = found, key
    return swaps.take_back(current, best)


def _shaken(placement: Blocks, suspects: Blocks, rng: np.random.Generator) -> Blocks:
    """`placement` with up to three suspects exchanged with any blocks."""
    shaken = placement.copy()
    flat = shaken.ravel()
    places = np.flatnonzero(np.isin(flat, suspects))
    for place in rng.choice(places, size=min(3, len(places)), replace=False):
        other = rng.integers(flat.size)
        flat[[place, other]] = flat[[other, place]]
    return shaken
