"""The detector over a whole log, and what it cost.

In: a `StepSeries`. Out: a `JobAnalysis`: episodes with their lost time, spikes, warnings.

    analyze(series) -> JobAnalysis(iterations=4800, healthy_iteration_s=0.571, lost_s=312.0, ...)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

from failslow.config import DetectConfig
from failslow.detect.events import DetectEvent
from failslow.detect.online import Detector
from failslow.detect.stretch import CERTAIN
from failslow.detect.windows import WINDOWS, locate_rise
from failslow.records import Episode, JobAnalysis, Level, StepSeries
from failslow.stats.robust import mad, median

__all__ = ["analyze"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_WARMUP = math.log(1.5)
_FEW = 20


@dataclass(slots=True)
class _Draft:
    first: int
    base_log_s: float
    confidence: float
    gradual: bool
    levels: list[int]
    end: int | None = None
    gaps: list[slice] = field(default_factory=list)
    """Healthy in between: flapping."""

    def slow(self, end: int) -> Flags:
        """Which of its records, up to `end`, are of no gap."""
        flags = np.ones(end, dtype=np.bool_)
        for gap in self.gaps:
            flags[gap] = False
        return flags[self.first :]


def analyze(series: StepSeries, config: DetectConfig | None = None) -> JobAnalysis:
    """Find the fail-slows of one job.

    The episodes are those the online detector says, sample by sample; only lost time, spikes and
    medians are worked out afterwards. Definitions: design §4 (`healthy_iteration_s`, `lost_s`,
    `jct_increase_pct`).
    """
    config = config or DetectConfig()
    events, correction = Detector(config).extend(series)
    return _Summary(series, config, events, correction).analysis()


class _Summary:
    def __init__(
        self,
        series: StepSeries,
        config: DetectConfig,
        events: list[DetectEvent],
        correction: Floats,
    ) -> None:
        self.series, self.config, self.events = series, config, events
        self.slow = math.log(config.min_slowdown)
        self.log_s = np.log(series.duration_s) - correction
        self.correction = correction
        self.warnings = list(series.warnings)
        n = len(series)
        self.begins_s = series.end_s - series.duration_s * series.iterations
        drafts = self._drafts()
        self.inside = np.zeros(n, dtype=np.bool_)
        for draft in drafts:
            self.inside[draft.first : draft.end] = True
        self.base = self._base(drafts)
        excess = self.log_s - self.base
        self.drafts = drafts
        self.warm = self._warm_up(excess)
        self.spike = self._spikes(excess) & ~self.warm

    def analysis(self) -> JobAnalysis:
        series = self.series
        if len(series) < _FEW:
            self.warnings.append(
                f"only {len(series)} timing records: too few to tell a fail-slow from chance "
                f"({_FEW} at least)"
            )
        self._say_restarts()
        episodes = [self._episode(draft) for draft in self.drafts]
        episodes += self._workload_changes()
        episodes.sort(key=lambda e: e.first_index)
        self._say_open_end()
        healthy = ~(self.inside | self.spike | self.warm)
        if not healthy.any():
            healthy = ~self.inside
        own_s = np.exp(self.base + self.correction)
        if healthy.any():
            healthy_s = median(series.duration_s[healthy], series.iterations[healthy])
        else:  # slow throughout, but for what a changed configuration left behind
            healthy_s = median(own_s, series.iterations)
        lost_s = sum(e.lost_s for e in episodes if e.kind == "fail_slow")
        wall_s = float(series.end_s[-1])
        spike_lost_s = ((series.duration_s - own_s) * series.iterations)[self.spike].sum()
        return JobAnalysis(
            source=series.source,
            format=series.format,
            iterations=int(series.iterations.sum()),
            first_step=int(series.step[0]),
            last_step=int(series.step[-1]),
            start_time=series.start_time,
            healthy_iteration_s=healthy_s,
            wall_s=wall_s,
            lost_s=lost_s,
            jct_increase_pct=100.0 * lost_s / (wall_s - lost_s) if wall_s > lost_s else 0.0,
            episodes=tuple(episodes),
            spikes=int(self.spike.sum()),
            spike_lost_s=float(spike_lost_s),
            warnings=tuple(self.warnings),
            spike_index=tuple(int(i) for i in np.flatnonzero(self.spike)),
        )

    # -- events to episodes ------------------------------------------------------------------

    def _drafts(self) -> list[_Draft]:
        drafts: list[_Draft] = []
        for event in self.events:
            if event.kind == "onset":
                last = drafts[-1] if drafts else None
                if last and last.end is not None and self._close(last, event):
                    last.gaps.append(slice(last.end, event.first_index))
                    last.levels.append(event.first_index)
                    last.end = None
                else:
                    drafts.append(
                        _Draft(
                            first=event.first_index,
                            base_log_s=event.base_log_s,
                            confidence=event.confidence,
                            gradual=event.gradual,
                            levels=[event.first_index],
                        )
                    )
            elif event.kind == "level":
                drafts[-1].levels.append(event.first_index)
            elif event.kind == "relief" and drafts:
                drafts[-1].end = event.first_index
                if event.first_index <= drafts[-1].first:  # taken back: it was no slowness
                    drafts.pop()
            elif event.kind == "run" and drafts and drafts[-1].end is None:
                drafts[-1].end = event.first_index  # what follows cannot be compared with it
            elif event.kind == "speedup":
                self._warn_speedup(event)
        return drafts

    def _close(self, last: _Draft, event: DetectEvent) -> bool:
        assert last.end is not None
        if self.series.planned_ramp and last.gradual != event.gradual:
            return False  # the fault ended; what follows is the plan
        if (self.series.run[last.end : event.first_index + 1] != self.series.run[last.first]).any():
            return False
        healthy_s = math.exp(last.base_log_s)
        gap_s = max(self.config.merge_gap_s, self.config.min_iterations * healthy_s)
        return bool(self.begins_s[event.first_index] - self.begins_s[last.end] <= gap_s)

    def _warn_speedup(self, event: DetectEvent) -> None:
        step = int(self.series.step[event.first_index])
        if event.note:
            self.warnings.append(f"from step {step} on x{event.slowdown:.2f}: {event.note}")
        elif event.first_index > _FEW:
            self.warnings.append(
                f"iterations are x{1 / event.slowdown:.2f} faster from step {step} on: slow from "
                "the start, or less work; a log alone cannot tell"
            )

    # -- each record's healthy time -------------------------------------------------------------

    def _base(self, drafts: list[_Draft]) -> Floats:
        """Log healthy time of each record at the reference work, shape (n,)."""
        n = len(self.series)
        base = np.full(n, np.nan)
        cuts = sorted({0, n, *(e.first_index for e in self.events if e.kind in ("run", "speedup"))})
        for begin, end in itertools.pairwise(cuts):
            healthy = self.log_s[begin:end][~self.inside[begin:end]]
            if len(healthy):
                base[begin:end] = np.median(healthy)
        for draft in drafts:
            base[draft.first : draft.end] = draft.base_log_s
        return base

    def _warm_up(self, excess: Floats) -> Flags:
        """The first records of a run as long as they are much slower than what follows."""
        warm = np.zeros(len(excess), dtype=np.bool_)
        starts = np.append(0, np.flatnonzero(np.diff(self.series.run)) + 1)
        for start in starts:
            piece = excess[start : start + _FEW] >= _WARMUP
            piece &= ~self.inside[start : start + _FEW]
            length = len(piece) if piece.all() else int(np.argmin(piece))
            warm[start : start + length] = True
        return warm

    def _spikes(self, excess: Floats) -> Flags:
        healthy = excess[~self.inside]
        sigma = mad(healthy, 0.0) if len(healthy) else 0.0
        spike = (excess >= max(self.slow, 5.0 * sigma)) & ~self.inside
        for draft in self.drafts:
            piece = slice(draft.first, draft.end)
            spike[piece] = _isolated_peaks(excess[piece])
        return spike

    # -- episodes ---------------------------------------------------------------------------------

    def _episode(self, draft: _Draft) -> Episode:
        series = self.series
        end = len(series) if draft.end is None else draft.end
        piece = slice(draft.first, end)
        kept = ~self.spike[piece]
        duration_s, iterations = series.duration_s[piece], series.iterations[piece]
        own_s = np.exp(self.base[piece] + self.correction[piece])
        ratio = duration_s / own_s
        # where most of it is gaps, or bursts that look like spikes, what is slow speaks for it
        slow = draft.slow(end)
        typical = next(
            (
                flags
                for flags in (kept, kept & slow)
                if flags.any()
                and median(ratio[flags], iterations[flags]) >= self.config.min_slowdown
            ),
            slow,
        )
        start_s = float(self.begins_s[draft.first])
        # not where the next record begins: a job is stopped, and started again later
        end_s = None if draft.end is None else float(series.end_s[end - 1])
        planned = bool(series.planned_ramp) and draft.gradual
        notes = ["flapping"] if draft.gaps else []
        if planned:
            notes.append(series.planned_ramp)
        elif draft.gradual:
            notes.append("gradual or in bursts: no single change point")
        stall = self._data_stall(draft.first, end)
        if stall:
            notes.append(stall)
        if draft.first and series.run[draft.first] != series.run[draft.first - 1]:
            notes.append("since the restart")
        lost_s = float(((duration_s - own_s) * iterations)[kept].sum())
        return Episode(
            start_step=int(series.step[draft.first]),
            end_step=None if draft.end is None else int(series.step[draft.end]),
            start_s=start_s,
            end_s=end_s,
            duration_s=(float(series.end_s[-1]) if end_s is None else end_s) - start_s,
            iteration_s=median(duration_s[typical], iterations[typical]),
            baseline_s=median(own_s[typical], iterations[typical]),
            slowdown=median(ratio[typical], iterations[typical]),
            peak_slowdown=float(ratio[kept | typical].max()),
            lost_s=0.0 if planned else max(0.0, lost_s),
            confidence=min(1.0, draft.confidence),
            kind="workload_change" if planned else "fail_slow",
            levels=self._levels(draft, end),
            note="; ".join(notes),
            first_index=draft.first,
            last_index=end - 1,
        )

    def _levels(self, draft: _Draft, end: int) -> tuple[Level, ...]:
        excess = (self.log_s - self.base)[draft.first : end]
        slow, weights = draft.slow(end), self.series.iterations[draft.first : end]
        anew = {gap.stop for gap in draft.gaps}
        levels: list[tuple[int, float]] = []
        for i, j in itertools.pairwise([*draft.levels, end]):
            piece = np.flatnonzero(slow[i - draft.first : j - draft.first]) + i - draft.first
            if not len(piece):
                continue
            level = median(excess[piece], weights[piece])
            # slow again as before is no other level
            if i not in anew or abs(level - levels[-1][1]) >= self.slow:
                levels.append((i, level))
        return tuple(
            Level(start_step=int(self.series.step[i]), slowdown=math.exp(level))
            for i, level in levels
        )

    def _data_stall(self, first: int, end: int) -> str:
        """Whether waiting for data explains most of the slowness, in words."""
        data_s = self.series.data_s
        inside, before = data_s[first:end], data_s[max(0, first - 200) : first]
        if np.isnan(inside).all() or np.isnan(before).all():
            return ""
        extra_s = float(np.nanmedian(inside) - np.nanmedian(before))
        slow_s = float(
            np.median(self.series.duration_s[first:end])
            - np.median(self.series.duration_s[max(0, first - 200) : first])
        )
        if slow_s <= 0 or extra_s < 0.5 * slow_s:
            return ""
        return f"data stall: waiting for data explains {min(100.0, 100 * extra_s / slow_s):.0f} %"

    def _say_restarts(self) -> None:
        series = self.series
        starts = np.flatnonzero(np.diff(series.run)) + 1
        plain = [i for i in starts if not series.runs[series.run[i]].config_changed]
        if plain:
            steps = ", ".join(str(series.step[i]) for i in plain[:5])
            more = ", …" if len(plain) > 5 else ""
            times = "once" if len(plain) == 1 else f"{len(plain):,} times"
            self.warnings.append(f"restarted {times}, at step {steps}{more}")

    def _say_open_end(self) -> None:
        last = next((e for e in reversed(self.events) if e.kind != "level"), None)
        if last and last.kind == "suspected" and self._too_short(last.first_index):
            step = int(self.series.step[last.first_index])
            self.warnings.append(
                f"the last iterations, from step {step} on, are x{last.slowdown:.2f} slow; "
                "the log ends before that can be called a fail-slow"
            )

    def _too_short(self, first: int) -> bool:
        """Whether the records from `first` to the end may be too few to call them slow."""
        wall_s = float(self.series.end_s[-1] - self.begins_s[first])
        healthy_s = math.exp(float(self.base[first] + self.correction[first]))
        need_s = max(self.config.min_duration_s, self.config.min_iterations * healthy_s)
        return len(self.series) - first <= 2 * WINDOWS[-1] or wall_s <= 2 * need_s

    # -- changes of the work -----------------------------------------------------------------------

    def _workload_changes(self) -> list[Episode]:
        """Stretches slower because the work is more, or the configuration another."""
        found: list[Episode] = []
        runs = [e for e in self.events if e.kind == "run"]
        cuts = [0, *(e.first_index for e in runs), len(self.series)]
        for k, event in enumerate(runs):
            found += self._new_configuration(cuts[k], cuts[k + 1], cuts[k + 2], event.note)
        for begin, end in itertools.pairwise(cuts):
            found += self._work_growth(begin, end)
        return found

    def _new_configuration(self, before: int, begin: int, end: int, note: str) -> list[Episode]:
        """The run begin..end-1 against before..begin-1: slower by iteration, or by unit of work."""
        before_s = self._healthy_s(before, begin)
        note = note or "new configuration"
        slower = self._change(begin, end, before_s, note)
        work = [float(np.median(self.series.work[i:j])) for i, j in ((before, begin), (begin, end))]
        if slower or not (work[0] > 0 and work[1] > 0):
            return slower
        return self._change(begin, end, before_s * work[1] / work[0], note + " (per unit of work)")

    def _work_growth(self, begin: int, end: int) -> list[Episode]:
        grown = self.correction[begin:end]
        if not len(grown) or np.ptp(grown) < self.slow:
            return []
        # so many records of work that varies by itself have a median that tells something
        spread = 1.05 * float(np.median(np.abs(np.diff(grown))))  # as MAD, sqrt(2) more in diffs
        lasting = max(5, math.ceil((CERTAIN * 1.25 * spread / self.slow) ** 2)) | 1
        if len(grown) < lasting:
            return []
        smooth = _running_median(grown, lasting)
        start_level = float(np.median(smooth[: max(1, min(_FEW, len(smooth) // 4))]))
        high = smooth - start_level >= self.slow
        found: list[Episode] = []
        edges = np.flatnonzero(np.diff(np.concatenate(([False], high, [False])).astype(np.int8)))
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            if b - a < lasting:
                continue
            first = int(a)
            while first > 0 and smooth[first - 1] - start_level > 0.02:
                first -= 1
            if lasting > 5:  # smoothed over so many records, a step lies somewhere between
                rise = float(np.median(smooth[a:b])) - start_level
                first += locate_rise(grown[first : a + lasting] - start_level, rise)
            own_s = math.exp(float(np.median(self.base[begin:end])) + start_level)
            found += self._change(
                begin + first, begin + int(b), own_s, self._work_note(begin + first, begin + int(b))
            )
        return found

    def _work_note(self, first: int, end: int) -> str:
        before = np.nanmedian(self.series.work[max(0, first - 20) : max(first, 1)])
        after = np.nanmedian(self.series.work[first:end])
        return f"work per iteration {before:g} -> {after:g}"

    def _healthy_s(self, begin: int, end: int) -> float:
        keep = ~(self.inside | self.spike | self.warm)[begin:end]
        if not keep.any():
            return 0.0
        return median(
            self.series.duration_s[begin:end][keep], self.series.iterations[begin:end][keep]
        )

    def _change(self, begin: int, end: int, before_s: float, note: str) -> list[Episode]:
        series = self.series
        after_s = self._healthy_s(begin, end)
        if not before_s or after_s < before_s * self.config.min_slowdown:
            return []
        last = end == len(series)
        start_s = float(self.begins_s[begin])
        end_s = float(series.end_s[end - 1])
        slowdown = after_s / before_s
        return [
            Episode(
                start_step=int(series.step[begin]),
                end_step=None if last else int(series.step[end]),
                start_s=start_s,
                end_s=None if last else end_s,
                duration_s=end_s - start_s,
                iteration_s=after_s,
                baseline_s=before_s,
                slowdown=slowdown,
                peak_slowdown=slowdown,
                lost_s=0.0,
                confidence=1.0,
                kind="workload_change",
                levels=(Level(start_step=int(series.step[begin]), slowdown=slowdown),),
                note=note,
                first_index=begin,
                last_index=end - 1,
            )
        ]


def _isolated_peaks(excess: Floats) -> Flags:
    """Records of an episode twice as slow as its neighbourhood, at most three in a row."""
    out = np.zeros(len(excess), dtype=np.bool_)
    if len(excess) < 9:
        return out
    high = excess - _running_median(excess, 9) >= math.log(2.0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], high, [False])).astype(np.int8)))
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        if b - a <= 3:
            out[a:b] = True
    return out


def _running_median(values: Floats, width: int) -> Floats:
    if len(values) < width:
        return np.full(len(values), float(np.median(values)))
    return np.asarray(median_filter(values, width, mode="nearest"), dtype=np.float64)
