"""What the transfers of groups and pairs take, against healthy times or comparable ones.

In: rows of calls (one for each call of an iteration, now and in healthy times) with the least
time over their ranks. Out: `Transfers`, a row for each group and each directed pair:

    judge(unit=..., call=..., healthy=..., kind=..., took_s=..., times=..., ...)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Transfers", "judge", "lower_median", "mix", "numbers", "unique"]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """A row for each group's collectives, and for each directed pair of ranks in a group."""

    group: Ints
    """Index into `Table.groups`."""
    src: Ints
    """Global rank; -1: a whole group."""
    dst: Ints
    now_s: Floats
    """Seconds per iteration when nobody is late, over the calls that `expected_s` is known of."""
    expected_s: Floats
    """The same in healthy times, or of comparable groups; nan: nothing to compare to."""
    extra_s: Floats
    """How much longer each of its ranks is blocked by it, per iteration, at least."""
    noise: Floats
    """Spread of what comparable ones take, over what they take; 0 unknown."""
    by_healthy: Bools
    """Compared with itself in healthy times."""
    waited_s: Floats
    """Seconds each of its ranks is blocked by it at least, per iteration: longer than in healthy
    times where these are known, else at all."""

    @classmethod
    def none(cls) -> Transfers:
        """Of a job without any."""
        ints, floats = np.empty(0, np.int64), np.empty(0)
        return cls(ints, ints, ints, floats, floats, floats, floats, floats > 0, floats)


def judge(
    *,
    unit: Ints,
    call: Words,
    healthy: Bools,
    kind: Words,
    took_s: Floats,
    times: Floats,
    ends: tuple[Ints, Ints, Ints],
    cell_row: Ints,
    cell_rank: Ints,
    cell_wait_s: Floats,
) -> Transfers:
    """Rows of calls, and of cells with the call they belong to, -> what each unit takes."""
    count = int(unit.max(initial=-1)) + 1
    before = np.full(len(unit), np.nan)
    known, at = np.unique(call[healthy], return_index=True)
    if len(known):
        place = np.minimum(np.searchsorted(known, call), len(known) - 1)
        found = known[place] == call
        before[found] = took_s[healthy][at][place[found]]
    peers, spread = _of_peers(kind, took_s, healthy)
    now = ~healthy
    by_healthy = np.bincount(unit[now & np.isfinite(before)], minlength=count) > 0
    reference = np.where(by_healthy[unit], before, peers)
    used = np.isfinite(reference)

    def total(values: Floats, rows: Bools) -> Floats:
        weights = (values * times)[rows]
        return np.bincount(unit[rows], weights=weights, minlength=count).astype(np.float64)

    now_s, expected_s = total(took_s, used & now), total(reference, used & now)
    # each rank's own increase; what it waited in healthy times counts only where that is known
    compared = np.bincount(unit[used & now], minlength=count) > 0
    both = used & by_healthy[unit] & np.isin(call, call[now])
    asked = now & (used | ~compared[unit])
    weight = np.where(asked, 1.0, np.where(healthy & both, -1.0, 0.0))
    # one number for a unit and a rank: sorting pairs as such takes ten times as long
    ranks, rank = np.unique(cell_rank, return_inverse=True)
    pair = unit[cell_row] * len(ranks) + rank.reshape(-1)
    pairs, inverse = np.unique(pair, return_inverse=True)
    waits = np.bincount(inverse.reshape(-1), weights=cell_wait_s * weight[cell_row])
    waited_s = np.full(count, np.inf)
    np.minimum.at(waited_s, pairs // max(len(ranks), 1), waits)
    noise_s = total(np.where(by_healthy[unit], 0.0, spread), used & now)
    one = np.zeros(count, np.int64)
    one[unit[::-1]] = np.arange(len(unit))[::-1]
    shown = np.bincount(unit[now], minlength=count) > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        return Transfers(
            group=ends[0][one][shown],
            src=ends[1][one][shown],
            dst=ends[2][one][shown],
            now_s=np.where(expected_s > 0, now_s, total(took_s, now))[shown],
            expected_s=np.where(expected_s > 0, expected_s, np.nan)[shown],
            extra_s=np.clip(np.minimum(now_s - expected_s, waited_s), 0.0, None)[shown],
            waited_s=waited_s[shown],
            noise=np.where(expected_s > 0, noise_s / expected_s, 0.0)[shown],
            by_healthy=by_healthy[shown],
        )


def _of_peers(kind: Words, took_s: Floats, healthy: Bools) -> tuple[Floats, Floats]:
    """(lower median of comparable calls now, spread below it); nan where there is no other."""
    median, spread = np.full(len(kind), np.nan), np.zeros(len(kind))
    now = np.flatnonzero(~healthy)
    order = now[np.lexsort((took_s[now], kind[now]))]
    for members in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1):
        if len(members) > 1:
            median[members], spread[members] = lower_median(took_s[members])
    return median, spread


def lower_median(ascending: Floats) -> tuple[float, float]:
    """(the lower of the two middle values, standard deviation by the shortest half).

    Those that are slow, up to a half, move neither. (The shortest interval that holds half of a
    Gaussian's values is 1.349 standard deviations wide; of few values it is too narrow.)
    """
    count = len(ascending)
    half = (count + 1) // 2
    widths = ascending[half - 1 :] - ascending[: count - half + 1]
    spread = float(widths.min()) / 1.349 * (1.0 + 2.0 / np.sqrt(count))
    return float(ascending[(count - 1) // 2]), spread


def numbers(values: Iterable[Any], names: list[Any] | None = None) -> Ints:
    """Values as numbers in the order of their first appearance, listed in `names`."""
    values = list(values)
    known = {value: index for index, value in enumerate(dict.fromkeys(values))}
    coded = np.fromiter(map(known.__getitem__, values), np.int64, len(values))
    if names is not None:
        names.extend(known)
    return coded


def unique(keys: NDArray[Any]) -> Ints:
    return np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)


def mix(*columns: NDArray[Any]) -> Words:
    """A 64-bit hash of each row (splitmix64's finaliser), so that no table of rows is kept."""
    value = np.zeros(len(columns[0]), np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            value = (value + column.astype(np.int64).view(np.uint64)) * np.uint64(
                0x9E3779B97F4A7C15
            ) + np.uint64(0x632BE59BD9B4E019)
            value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            value ^= value >> np.uint64(31)
    return value
