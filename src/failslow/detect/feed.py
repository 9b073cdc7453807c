"""Takes records in, keeps the state of a regime, and has what is new looked at.

In: `StepSample`s, or a `StepSeries`. Out: corrected log times in the history, scanned in pieces
that never cross a grid point: so it makes no difference how a series is cut.

    piece of 1..64 records -> work explained away -> history -> scan -> at grid points: level, noise

A *regime* is a stretch within which times compare; a run of another configuration begins one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from failslow.config import DetectConfig
from failslow.detect.events import DetectEvent, EventKind
from failslow.detect.history import History
from failslow.detect.level import HealthyLevel
from failslow.detect.stretch import Rules
from failslow.detect.work import WorkModel
from failslow.records import Run, StepSample, StepSeries

__all__ = ["BACK", "GRID", "WARMUP", "WARMUP_RECORDS", "Feed"]

Floats = NDArray[np.float64]

BACK = 4096  # an onset is looked for at most so many records back
GRID = 64  # in the steady state, level and noise are renewed every 64 records
WARMUP = math.log(1.5)
WARMUP_RECORDS = 20
_FIRST_LEVEL = 10  # records before there is a healthy level to compare with
_EARLY_GRID = (_FIRST_LEVEL, 12, 16, 20, 24, 32, 40, 48, 56)
_SETTLED = 256


class Feed(ABC):
    """Input, regime state and output of the detector; what to look for is the subclass's."""

    @abstractmethod
    def _scan_healthy(self, at: int) -> int:
        """Look at records from `at` on; returns the first one not looked at."""

    @abstractmethod
    def _scan_episode(self, at: int) -> int:
        """The same while an episode is on."""

    @abstractmethod
    def _settle_low(self, records: int) -> None:
        """End an episode that has gone on for `records` at a level that is no fail-slow."""

    @abstractmethod
    def _relieve(self, first: int, excess: float, now: int, note: str = "") -> None:
        """End the episode at record `first`."""

    def __init__(self, config: DetectConfig | None = None) -> None:
        self.config = config or DetectConfig()
        self._rules = rules = Rules(self.config)
        self._slow, self._healthy = rules.slow, rules.healthy
        self._history = History(BACK + 2 * GRID)  # from before an onset up to a piece ahead
        self._count = 0
        self._run = 0
        self._events: list[DetectEvent] = []
        self.explained_log_s = 0.0
        """Of the record `update` took last: what its work adds to the log of its time."""
        self._begin_regime()

    # -- input ---------------------------------------------------------------------------------

    def update(self, sample: StepSample, run: Run | None = None) -> list[DetectEvent]:
        """Take one record; `run` describes its run when it is the first of that run."""
        if sample.run != self._run:
            self._begin_run(sample.run, run or Run())
        work = sample.work or 0.0
        explained = self._push(
            np.array([math.log(sample.duration_s)]),
            np.array([float(sample.iterations)]),
            np.array([math.log(work) if work > 0 else math.nan]),
        )
        self.explained_log_s = float(explained[0])
        return self._take_events()

    def extend(self, series: StepSeries) -> tuple[list[DetectEvent], Floats]:
        """Take a series; returns the events and each record's log correction for its work."""
        n = len(series)
        correction = np.zeros(n)
        log_s = np.log(series.duration_s)
        iterations = series.iterations.astype(np.float64)
        log_work = np.full(n, np.nan)
        np.log(series.work, out=log_work, where=series.work > 0)
        ends = np.append(np.flatnonzero(np.diff(series.run)) + 1, n)
        at = 0
        for stop in ends:
            if at < n and series.run[at] != self._run:
                self._begin_run(int(series.run[at]), series.runs[series.run[at]])
            while at < stop:
                piece = slice(at, min(int(stop), at + self._until_grid()))
                correction[piece] = self._push(log_s[piece], iterations[piece], log_work[piece])
                at = piece.stop
        return self._take_events(), correction

    @property
    def suspected(self) -> bool:
        """Slow iterations are being watched, or an episode is on."""
        return self._suspicion or self._episode

    @property
    def base_log_s(self) -> float | None:
        """Log of the healthy iteration time at the reference work; None before there is one."""
        if self._episode:
            return self._base
        return self._level.log_s if self._level else None

    # -- regimes: stretches within which times compare -------------------------------------------

    def _begin_regime(self) -> None:
        self._work = WorkModel()
        self._level: HealthyLevel | None = None
        self._start = self._clean = self._fed = self._level_born = self._warm_from = self._count
        """First record of the regime; first that windows may reach back to; first that the
        healthy level has not taken in; first that it was given; first of a restart's warm-up."""
        self._warming = False
        self._suspicion = self._episode = False
        self._next_try = 0
        self._base = self._slow_level = self._last_slow = 0.0
        self._level_from = 0
        self._earlier: list[tuple[float, float]] = []

    def _begin_run(self, run: int, described: Run) -> None:
        self._run = run
        if described.config_changed:
            self._say("run", self._count, 0.0, note=described.note)
            self._begin_regime()
        elif self._level:
            self._warming, self._warm_from = True, self._count

    # -- one piece, never across a grid point ----------------------------------------------------

    def _until_grid(self) -> int:
        done = self._count - self._start
        return next((p - done for p in _EARLY_GRID if done < p), GRID - done % GRID)

    def _push(self, log_s: Floats, iterations: Floats, log_work: Floats) -> Floats:
        known = log_work[~np.isnan(log_work)]
        if len(known) == 0 or self._work.is_reference(known):
            correction = np.zeros(len(log_s))
            self._take(log_s, iterations)
            return correction
        # What the work explains depends on the state, and that may change with each record.
        correction = np.empty(len(log_s))
        for i in range(len(log_s)):
            base = self.base_log_s
            correction[i] = self._work.correct(
                float(log_work[i]),
                None if base is None else float(log_s[i]) - base,
                learn=not self.suspected,
            )
            self._take(log_s[i : i + 1] - correction[i], iterations[i : i + 1])
        return correction

    def _take(self, log_s: Floats, iterations: Floats) -> None:
        at = self._count
        self._history.push(log_s, iterations)
        self._count += len(log_s)
        while self._level and at < self._count:
            at = self._scan_episode(at) if self._episode else self._scan_healthy(at)
        done = self._count - self._start
        if done in _EARLY_GRID or done % GRID == 0:
            self._renew_level()

    def _set_slow_level(self, excess: float) -> None:
        self._slow_level = excess
        if excess >= self._slow:
            self._last_slow = excess

    def _renew_level(self) -> None:
        """At a grid point: take the healthy records since the last one into level and noise."""
        if self._episode:
            first = self._history.values(self._level_from, self._level_from + _SETTLED)
            if len(first):  # else long gone from the history, and known since
                self._set_slow_level(float(np.median(first)) - self._base)
            self._settle_low(_SETTLED)
        elif self._level is None:
            values = self._history.values(self._start, self._count)
            if len(values) >= _FIRST_LEVEL:
                self._level = self._level_at(float(np.median(values)))
                slow = values - self._level.log_s >= WARMUP
                warm = int(np.argmin(slow)) if not slow.all() else 0
                self._clean = self._fed = self._level_born = self._start + warm
                self._renew_level()
        elif self._suspicion:
            self._level.watch(self._history.values(self._clean, self._count))
        elif self._fed < self._count:
            self._level.take(
                self._history.values(self._fed, self._count),
                self._history.iterations(self._fed, self._count),
            )
            self._fed = self._count
            self._clean = max(self._clean, self._level_born + self._level.warm_up)

    def _level_at(self, log_s: float) -> HealthyLevel:
        known_s = self.config.healthy_iteration_s
        return HealthyLevel(log_s, self._slow, math.log(known_s) if known_s else math.inf)

    # -- output ------------------------------------------------------------------------------------

    def _say(
        self,
        kind: EventKind,
        first: int,
        excess: float,
        *,
        now: int | None = None,
        base: float | None = None,
        confidence: float = 0.0,
        gradual: bool = False,
        note: str = "",
    ) -> None:
        if base is None:
            base = self.base_log_s or 0.0
        self._events.append(
            DetectEvent(
                kind=kind,
                index=first if now is None else now,
                first_index=first,
                slowdown=math.exp(excess),
                base_log_s=base,
                confidence=confidence,
                gradual=gradual,
                note=note,
            )
        )

    def _take_events(self) -> list[DetectEvent]:
        events, self._events = self._events, []
        return events
