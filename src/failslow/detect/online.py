"""The detector: one timing record at a time, or a whole series, the same result either way.

In: `StepSample`s, or a `StepSeries`. Out: `DetectEvent`s:

    DetectEvent(kind="suspected", index=1204, first_index=1200, slowdown=1.41, ...)
    DetectEvent(kind="onset",     index=1212, first_index=1200, slowdown=1.40, confidence=0.999)
    DetectEvent(kind="level",     index=1390, first_index=1380, slowdown=1.83, ...)
    DetectEvent(kind="relief",    index=1540, first_index=1528, slowdown=1.00, ...)

Method (arXiv 2410.12588 §4.2, BOCD with verification, and what real logs taught). Everything
happens on the excess: log time, minus what the work explains, minus the log of the healthy level.
A stretch is slow when its median excess is at least log(min_slowdown) *and* that is far outside
what the job's own noise, with its correlation, can do. "The median of the last L is slow" is
asked for many L at once (`windows.py`), so steps, bursts and slow drift fall under one rule. BOCD
then gives the posterior of a change point at the onset; a stretch without one is a drift and must
be seen over more records.

The healthy level is a running median. It cannot creep up on slow drift, which is measured against
the reference: the level that the regime began with, lowered by lasting speed-ups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from failslow.detect.change import onset_posterior
from failslow.detect.feed import BACK, GRID, WARMUP, WARMUP_RECORDS, Feed
from failslow.detect.level import HealthyLevel
from failslow.detect.stretch import CERTAIN, MIN_SLOW, SUSPECT, Stretch, creeps
from failslow.detect.windows import (
    WINDOWS,
    Noise,
    locate_fall,
    locate_rise,
    majority_ends,
    standard_error,
)
from failslow.stats.robust import mad

__all__ = ["Detector"]

Floats = NDArray[np.float64]

_DRIFT_RECORDS = 32


class Detector(Feed):
    """Online fail-slow detection on one series of iteration times.

    `update(sample)` takes one record, `extend(series)` many; both return the events they caused.
    """

    # -- healthy: look for an onset, a drift, a speed-up ------------------------------------------

    def _scan_healthy(self, at: int) -> int:
        """Look at records from `at` on; returns the first one not looked at."""
        level = self._level
        assert level is not None
        if self._warming:
            if (
                at - self._warm_from < WARMUP_RECORDS
                and self._history.values(at, at + 1)[0] - level.log_s >= WARMUP
            ):
                self._clean = self._fed = at + 1
                return at + 1
            self._warming = False
            self._clean = self._fed = max(self._fed, self._warm_from, self._clean)
        begin = max(self._clean, at - WINDOWS[-1] + 1)
        excess = self._history.values(begin, self._count) - level.log_s
        offset = at - begin
        slow = self._slow_ends(excess, offset, level.noise)
        crept = level.log_s - level.reference_log_s
        if crept > 0.02:
            slow |= majority_ends(excess + crept >= self._slow, offset, WINDOWS[3:])
        fast = majority_ends(excess <= -self._slow, offset, WINDOWS[2:])
        calm = majority_ends(excess < self._slow / 2, offset, WINDOWS[:1])
        position = 0
        while True:
            watch = slow | fast | calm if self._suspicion else slow | fast
            position += int(np.argmax(watch[position:]))
            if position >= len(watch) or not watch[position]:
                return self._count
            now = at + position
            if slow[position]:
                if now >= self._next_try and self._try_onset(now):
                    return now + 1
            elif calm[position] and self._suspicion:
                self._suspicion = False
                self._say("cleared", now, 0.0)
            if fast[position] and self._try_speedup(now):
                return now + 1
            position += 1
            if position >= len(watch):
                return self._count

    def _slow_ends(self, excess: Floats, offset: int, noise: Noise) -> NDArray[np.bool_]:
        """Positions at which a window ends that may hold a slow stretch."""
        quiet = [w for w in WINDOWS if SUSPECT * standard_error(noise, 2 * w) <= self._slow]
        ends = majority_ends(excess >= self._slow, offset, tuple(quiet))
        for window in WINDOWS[: len(WINDOWS) - len(quiet)]:
            # so few records of so noisy a job say something only when they are far out
            height = SUSPECT * standard_error(noise, 2 * window)
            ends |= majority_ends(excess >= height, offset, (window,))
        return ends

    def _try_onset(self, now: int) -> bool:
        """Suspect or confirm a slow stretch that ends at record `now`."""
        level = self._level
        assert level is not None
        longest = 0
        bases = [level.log_s]
        if level.log_s - level.reference_log_s > 0.02:
            bases.append(level.reference_log_s)
        for base in bases:
            for stretch in self._rises(now, base, level.noise):
                longest = max(longest, stretch.count)
                if not self._suspicion and self._rules.suspicious(stretch):
                    self._suspicion = True
                    self._say("suspected", stretch.first, stretch.median, now=now, base=base)
                if self._confirm(stretch, now, base, level):
                    return True
        # A stretch of n records changes little with the next one: look again after n/8.
        self._next_try = now + max(1, longest // 8)
        return False

    def _rises(self, now: int, base: float, noise: Noise) -> Iterator[Stretch]:
        """The slow stretches ending at `now` that the windows point at, each one once."""
        begin = max(self._clean, now - BACK + 1)
        excess = self._history.values(begin, now + 1) - base
        seen: set[int] = set()
        for length in WINDOWS:
            if length > len(excess):
                return
            height = float(np.median(excess[-length:]))
            if height < self._slow:
                continue
            first = locate_rise(excess, height)
            if first not in seen:
                seen.add(first)
                yield self._measure(begin + first, excess[first:], base, noise)

    def _measure(self, first: int, excess: Floats, base: float, noise: Noise) -> Stretch:
        iterations = self._history.iterations(first, first + len(excess))
        return self._rules.measure(first, excess, base, iterations, noise)

    def _confirm(self, stretch: Stretch, now: int, base: float, level: HealthyLevel) -> bool:
        if not self._rules.slow_for_sure(stretch, base):
            return False
        before = max(self._clean, stretch.first - GRID)
        excess = self._history.values(before, now + 1) - base
        iterations = self._history.iterations(stretch.first, now + 1)
        if self._rules.usual(excess[stretch.first - before :], iterations, level.spikes):
            return False
        posterior = onset_posterior(excess, stretch.first - before, level.noise)
        gradual = posterior <= self.config.change_probability or creeps(
            excess, stretch.first - before, self._slow
        )
        if gradual and stretch.count < _DRIFT_RECORDS:
            return False
        if self._went_back(stretch, base):
            return True
        first = self._slow_since(stretch, base)
        self._suspicion, self._episode = False, True
        self._base, self._level_from = base, first
        self._set_slow_level(stretch.median)
        self._say(
            "onset",
            first,
            stretch.median,
            now=now,
            base=base,
            confidence=posterior,
            gradual=gradual,
        )
        return True

    def _slow_since(self, stretch: Stretch, base: float) -> int:
        """Where the slowness began: a restart's warm-up as slow as all that follows is of it."""
        if stretch.first != self._warm_from + WARMUP_RECORDS:
            return stretch.first
        warm = self._history.values(self._warm_from, stretch.first) - base
        same = abs(float(np.median(warm)) - stretch.median) < self._slow
        return self._warm_from if same else stretch.first

    def _went_back(self, stretch: Stretch, base: float) -> bool:
        """Whether a speed-up merely ended: the level is that of an earlier, longer stretch."""
        assert self._level is not None
        for log_s, wall_s in self._earlier:
            if abs(base + stretch.median - log_s) < self._healthy and wall_s > self._level.wall_s:
                self._say(
                    "speedup",
                    stretch.first,
                    stretch.median,
                    note="back to the speed it had before its faster stretch",
                )
                self._settle(stretch, log_s)
                return True
        return False

    def _settle(self, stretch: Stretch, log_s: float) -> None:
        """Make the stretch the new healthy level."""
        assert self._level is not None
        self._earlier.append((self._level.log_s, self._level.wall_s))
        self._level = self._level_at(log_s)
        self._suspicion = False
        self._clean = self._fed = self._level_born = stretch.first

    def _try_speedup(self, now: int) -> bool:
        level = self._level
        assert level is not None
        begin = max(self._clean, now - BACK + 1)
        excess = self._history.values(begin, now + 1) - level.log_s
        for length in WINDOWS[2:]:
            if length > len(excess):
                return False
            depth = float(np.median(excess[-length:]))
            if depth > -self._slow:
                continue
            first = locate_fall(excess, 0.0, depth)
            stretch = self._measure(begin + first, excess[first:], level.log_s, level.noise)
            if (
                stretch.median <= -self._slow
                and -stretch.median >= CERTAIN * stretch.error
                and self._rules.lasting(stretch, level.log_s + stretch.median)
            ):
                self._say("speedup", stretch.first, stretch.median, now=now)
                self._settle(stretch, level.log_s + stretch.median)
                return True
        return False

    # -- in an episode: look for relief and for other levels --------------------------------------

    def _scan_episode(self, at: int) -> int:
        begin = max(self._level_from, at - WINDOWS[-1] + 1)
        excess = self._history.values(begin, self._count) - self._base
        offset = at - begin
        calm = majority_ends(excess < self._healthy, offset, WINDOWS)
        other = majority_ends(np.abs(excess - self._slow_level) >= self._slow, offset, WINDOWS)
        for position in np.flatnonzero(calm | other):
            now = at + int(position)
            if now < self._next_try:
                continue
            if calm[position] and self._try_relief(now):
                return now + 1
            if self._try_level(now):
                return now + 1
            self._next_try = now + max(1, (now - self._level_from) // 64)
        return self._count

    def _try_relief(self, now: int) -> bool:
        assert self._level is not None
        begin = max(self._level_from, now - BACK + 1)
        excess = self._history.values(begin, now + 1) - self._base
        # healthy ends and slow begins half-way between 5 % and 10 %, however slow it was
        first = locate_fall(excess, self._slow + self._healthy, 0.0)
        stretch = self._measure(begin + first, excess[first:], self._base, self._level.noise)
        # an episode may have eased to a level that is hardly slow; relief must stay possible, and
        # the fall is from where it was last a fail-slow: that it has left there is proved
        above = max(self._last_slow, self._slow) - stretch.median
        if not (
            stretch.median < self._healthy
            and self._rules.lasting(stretch, self._base)
            and above >= SUSPECT * stretch.error
        ):
            return False
        self._relieve(self._slow_until(stretch.first), stretch.median, now)
        self._clean = self._fed = stretch.first
        return True

    def _slow_until(self, first: int) -> int:
        """Where the slowness ended: what a restart before `first` takes to warm up is not of it."""
        warm = self._history.values(self._warm_from, first) - self._base - self._slow_level
        restarted = self._level_from < self._warm_from < first <= self._warm_from + WARMUP_RECORDS
        return self._warm_from if restarted and (warm >= WARMUP).all() else first

    def _settle_low(self, records: int) -> None:
        """End an episode that goes on at a level which is no fail-slow, nor quite healthy."""
        begin = max(self._level_from, self._count - BACK)
        excess = self._history.values(begin, self._count) - self._base
        if len(excess) >= records and float(np.median(excess[-records:])) < self._slow:
            first = begin + locate_fall(excess, self._slow + self._healthy, 0.0)
            level = float(np.median(excess[first - begin :]))
            note = f"settled at x{math.exp(level):.2f}: no fail-slow"
            self._relieve(first, level, self._count - 1, note)

    def _relieve(self, first: int, excess: float, now: int, note: str = "") -> None:
        self._say("relief", first, excess, now=now, base=self._base, note=note)
        self._episode = False
        self._clean = self._fed = first
        self._next_try = now + 1

    def _try_level(self, now: int) -> bool:
        assert self._level is not None
        begin = max(self._level_from, now - BACK + 1)
        excess = self._history.values(begin, now + 1) - self._base
        inside = excess - self._slow_level
        # bursts are a level of their own kind: their spread counts as noise
        noise = self._level.noise
        noise = Noise(max(mad(inside), noise.sigma), noise.rho, len(inside))
        recent = float(np.median(inside[-min(len(inside), 12) :]))
        if abs(recent) < self._slow:
            return False
        first = locate_rise(inside, recent) if recent > 0 else locate_fall(inside, 0.0, recent)
        stretch = self._measure(begin + first, excess[first:], self._base, noise)
        change = stretch.median - self._slow_level
        if not (
            abs(change) >= max(self._slow, CERTAIN * stretch.error)
            and self._rules.lasting(stretch, self._base)
            and stretch.median >= self._healthy
        ):
            return False
        if stretch.first - self._level_from >= MIN_SLOW:
            self._say("level", stretch.first, stretch.median, now=now, base=self._base)
            self._level_from = stretch.first
        self._set_slow_level(stretch.median)
        return True
