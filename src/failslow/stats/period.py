"""The period of a symbol sequence: the smallest lag at which it goes on repeating itself.

In: an integer array, one symbol an event (of a collective call stream: op, group and size
hashed together). Out: lags, and which positions each of them explains.

    >>> find_period(np.array([7, 7, 7, 9] * 5))
    4
    >>> [(level.lag, level.explained) for level in repeat_levels(np.array([7, 7, 7, 9] * 5))]
    [(1, 15), (4, 20)]

63 of 64 symbols agree with their neighbour in a program that does one thing 63 times and then
another; the match at lag 1 is 98 %, and yet the period is 64. So a lag is not judged by its
share of matches but by what lies in whole repeats of it. A foreign stretch then costs its own
length only, while at a plain lag it would also spoil the comparison of all around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray

__all__ = ["Level", "candidate_lags", "find_period", "match_counts", "repeat_levels", "repeating"]

_ALL_LAGS_BELOW = 192
"""Sequences shorter than this have every lag tried: cheaper than transforms."""
_BLOCKS_OF_A_LAG = 3
"""Different blocks of one length looked for."""
_EXACT_WORK = 1 << 20
"""One transform a symbol up to this many symbols × events, random phases beyond."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """A block that repeats at a lag, and what of the sequence it explains."""

    lag: int
    mask: NDArray[np.bool_]
    """True at each position inside whole repeats, shape (n,)."""
    explained: int
    """How many symbols those repeats hold, rests of one in the middle of things left out."""


def match_counts(
    symbols: NDArray[Any], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """For every lag 0 … n-1, how many i have symbols[i] == symbols[i + lag]; shape (n,).

    symbols: integers 0 … S-1. weights: (S,), what a match of each symbol counts; default 1.
    The sum over symbols of the autocorrelations of their indicators: exact to rounding with one
    transform a symbol where those are few. Otherwise each symbol gets a random phase and the
    autocorrelation of the phases estimates the count (Atallah, Chyzak, Dumas 2001, "A randomized
    algorithm for approximate string matching", Algorithmica 29); the standard error of a lag is
    at most its number of unequal pairs' square root, less than 1/500 of n from 10⁵ on.

    >>> match_counts(np.array([0, 1, 0, 1])).tolist()
    [4.0, 0.0, 2.0, 0.0]
    """
    count = len(symbols)
    if not count:
        return np.zeros(0)
    alphabet = int(symbols.max()) + 1
    weight = np.ones(alphabet) if weights is None else weights
    size = scipy.fft.next_fast_len(2 * count, real=True)
    if alphabet <= 8 or alphabet * count <= _EXACT_WORK:
        power = np.zeros(size // 2 + 1)
        for symbol in range(alphabet):
            power += weight[symbol] * np.abs(scipy.fft.rfft(symbols == symbol, size)) ** 2
        found: NDArray[np.float64] = scipy.fft.irfft(power, size)[:count]
        return np.round(found) if weights is None else np.maximum(found, 0.0)
    passes = 4 if count <= 1 << 16 else 2
    phases = np.random.default_rng(0).random((passes, alphabet))
    total = np.zeros(count)
    for phase in phases:
        codes = (np.sqrt(weight) * np.exp(2j * np.pi * phase)).astype(np.complex64)
        transform = scipy.fft.fft(codes[symbols], size)
        total += scipy.fft.ifft(np.abs(transform) ** 2)[:count].real
    return np.maximum(total / passes, 0.0)


def repeating(symbols: NDArray[Any], lag: int, repeats: int = 2) -> NDArray[np.bool_]:
    """Positions where one block of `lag` symbols occurs at least `repeats` times in a row.

    Of several blocks that do so, the one that fills most of the sequence; a block and its
    rotations are the same, and repeats of a shorter block are none.

    >>> repeating(np.array([1, 2, 1, 2, 5, 1, 2, 1]), lag=2).astype(int).tolist()
    [1, 1, 1, 1, 0, 0, 0, 0]
    >>> repeating(np.array([1, 1, 1, 1, 1, 2, 1, 2]), lag=2).astype(int).tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    blocks = _repeated_blocks(symbols, _pair_sums(symbols), lag, repeats)
    masks = [_mask(len(symbols), block) for block in blocks]
    return max(masks, key=np.count_nonzero, default=np.zeros(len(symbols), np.bool_))


def _pair_sums(symbols: NDArray[Any]) -> NDArray[np.uint64]:
    """Running sums of hashed neighbour pairs: over a repeated block they name its circle."""
    with np.errstate(over="ignore"):
        mixed = symbols.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        pairs = mixed[:-1] * np.uint64(0xBF58476D1CE4E5B9) + mixed[1:]
        pairs ^= pairs >> np.uint64(31)
        pairs *= np.uint64(0x94D049BB133111EB)
    return np.concatenate((np.zeros(1, np.uint64), np.cumsum(pairs, dtype=np.uint64)))


def _repeated_blocks(
    symbols: NDArray[Any], sums: NDArray[np.uint64], lag: int, repeats: int
) -> list[NDArray[np.int64]]:
    """Each block's stretches as rows (start, end); the block that fills most comes first."""
    count = len(symbols)
    breaks = np.flatnonzero(symbols[lag:] != symbols[:-lag])
    starts = np.concatenate(([0], breaks + 1))
    ends = np.concatenate((breaks, [count - lag]))
    long = ends - starts >= (repeats - 1) * lag
    starts, ends = starts[long], ends[long] + lag
    if not len(starts):
        return []
    block = np.unique(sums[starts + lag] - sums[starts], return_inverse=True)[1].reshape(-1)
    order = np.argsort(-np.bincount(block, weights=ends - starts), kind="stable")
    stretches = np.column_stack((starts, ends))
    blocks = [stretches[block == index] for index in order[:_BLOCKS_OF_A_LAG]]
    return [block for block in blocks if _is_primitive(symbols[block[0, 0] :][:lag])]


def _is_primitive(block: NDArray[Any]) -> bool:
    """It is not itself repeats of a shorter block."""
    size = len(block)
    divisors = (d for d in range(1, int(np.sqrt(size)) + 1) if size % d == 0)
    shorter = {d for pair in ((d, size // d) for d in divisors) for d in pair} - {size}
    return not any(np.array_equal(block[d:], block[:-d]) for d in shorter)


def _mask(count: int, stretches: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    for start, end in stretches.tolist():
        mask[start:end] = True
    return mask


def candidate_lags(symbols: NDArray[Any], max_lag: int, limit: int = 24) -> list[int]:
    """Lags 1 … max_lag worth a closer look, at most 2 · `limit`, ascending.

    The peaks of the share of matches, once with all matches equal and once with all *symbols*
    equal: the one call in 64 that differs is what tells 64 from 1. Multiples of a lag at which
    its matches only fade are left out.
    """
    count = len(symbols)
    max_lag = min(max_lag, count - 1)
    if count < _ALL_LAGS_BELOW or max_lag < 3:
        return list(range(1, max_lag + 1))
    occurrences = np.bincount(symbols)
    found: set[int] = set()
    for weights in (None, 1.0 / np.maximum(occurrences, 1)):
        each = np.ones(count) if weights is None else weights[symbols]
        possible = np.cumsum(each)[::-1][: max_lag + 1]
        share = np.round(match_counts(symbols, weights)[: max_lag + 1] / possible, 9)
        before = np.concatenate(([-1.0], share[1:-1]))
        after = np.concatenate((share[2:], [-1.0]))
        peaks = 1 + np.flatnonzero((share[1:] > before) & (share[1:] >= after) & (share[1:] > 0))
        order = peaks[np.lexsort((peaks, -share[peaks]))][: 8 * limit]
        chosen: list[int] = []
        for lag in order.tolist():
            if not any(lag % c == 0 and _fades(share, lag, c) for c in chosen):
                chosen.append(lag)
                if len(chosen) == limit:
                    break
        found.update(chosen)
    return sorted(found)


def _fades(share: NDArray[np.float64], lag: int, step: int) -> bool:
    """Whether the matches at `lag`, a multiple of `step`, are but the rest of those at `step`."""
    after = share[lag + step] if lag + step < len(share) else 0.0
    return bool(share[step] >= share[lag] and share[lag] <= max(share[lag - step], after))


def repeat_levels(
    symbols: NDArray[Any], *, max_lag: int | None = None, repeats: int = 2
) -> list[Level]:
    """The repeated blocks that each explain more than all shorter ones, or what none of them does.

    symbols: integers 0 … S-1, shape (n,). Lags ascend; of one lag there may be a few blocks, the
    most frequent first. A program that nests loops gives a level a loop, the innermost first;
    [] if nothing repeats.
    """
    count = len(symbols)
    levels: list[Level] = []
    sums = _pair_sums(symbols)
    new = np.ones(count, np.bool_)
    covered = explained = 0
    for lag in candidate_lags(symbols, min(max_lag or count, count // repeats)):
        for stretches in _repeated_blocks(symbols, sums, lag, repeats):
            mask = _mask(count, stretches)
            level = Level(lag, mask, _whole(stretches, lag, count))
            covers = int(np.count_nonzero(mask))
            if covers > covered or level.explained > explained or np.any(mask & new):
                levels.append(level)
                covered, explained = max(covered, covers), max(explained, level.explained)
                new &= ~mask
    return levels


def _whole(stretches: NDArray[np.int64], lag: int, count: int) -> int:
    """Symbols in whole repeats; a stretch that the sequence's end cuts short counts in full.

    Rests tell a repeat inside a period from the period: 01|01|0 explains all of 0101001010, but
    with a rest in every five.
    """
    ends = stretches[:, 1]
    lengths = ends - np.maximum(stretches[:, 0], np.concatenate(([0], ends[:-1])))  # they overlap
    cut = (stretches[:, 0] == 0) | (stretches[:, 1] == count)
    return int(np.where(cut, lengths, lengths // lag * lag).sum())


def _merit(level: Level) -> tuple[int, int]:
    return int(np.count_nonzero(level.mask)), level.explained


def find_period(
    symbols: NDArray[Any], *, repeats: int = 3, min_explained: float = 0.75
) -> int | None:
    """The smallest lag whose whole repeats explain the most of the sequence, None if too little.

    symbols: any integers, shape (n,). repeats: how often in a row a block must occur to count;
    min_explained: the share of positions that must lie in such repeats. Symbols inserted now and
    then are tolerated; a repeat inside the period is not taken for it once the period itself has
    been seen `repeats` times.

    >>> find_period(np.array([1, 2, 3] * 4 + [8] + [1, 2, 3] * 4))
    3
    >>> find_period(np.arange(40)) is None
    True
    """
    codes = np.unique(symbols, return_inverse=True)[1].reshape(-1)
    levels = repeat_levels(codes, repeats=repeats)
    best = max(levels, key=_merit, default=None)  # the first of equals
    if best is None or np.count_nonzero(best.mask) < min_explained * len(codes):
        return None
    return best.lag
