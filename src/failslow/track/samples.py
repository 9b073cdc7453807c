"""From crossings of an iteration's boundary to step samples.

In: `Crossing`s in the order of time, pauses to leave out. Out: a `StepSample` from each crossing
to the next:

    StepSample(step=119, duration_s=0.0601, end_s=81.23, work=66560.0, compute_s=0.0512,
               calls=2, foreign_calls=0, run=0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from failslow.records import StepSample
from failslow.track.follow import Crossing

__all__ = ["SampleMaker"]

_KEPT_PAUSES = 256
_JUST_NS = 10_000_000


class SampleMaker:
    """Counts iterations and times them; `end_s` is on the clock of the calls."""

    def __init__(self) -> None:
        self.run = 0
        self.step = -1
        """Index of the last iteration that ended."""
        self._last: Crossing | None = None
        self._sampled = False
        self._recent_s: deque[float] = deque(maxlen=15)
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_KEPT_PAUSES)
        self._stood: deque[tuple[int, int]] = deque(maxlen=_KEPT_PAUSES)
        self._work: float | None = None
        self._told = False
        """The trainer tells the work."""

    @property
    def last_ns(self) -> int:
        """When the last boundary was crossed; before any, long ago."""
        return -(1 << 62) if self._last is None else self._last.at_ns

    def pause(self, start_s: float, end_s: float) -> None:
        """Leave [start_s, end_s) out of the iterations that contain it."""
        if end_s > start_s:
            self._pauses.append((start_s, end_s))

    def stood(self, start_ns: int, end_ns: int) -> None:
        """This worker was made to stand still: that iteration is taken to be as long as usual.

        Cutting the time out would not do: who came first had waited anyway, and who goes on first
        waits for the others in its next call. Without a sample, its step would be missed.
        """
        self._stood.append((start_ns, end_ns))

    def new_run(self) -> None:
        """Iterations from here on do not compare with those before."""
        if self._sampled:
            self.run += 1
            self._sampled = False
        self._work, self._told = None, False

    def add(self, crossed: Iterable[Crossing], *, step: int | None = None) -> list[StepSample]:
        """The iterations that end at `crossed`. step: the trainer's own index, if it told.

        The compute time of one that holds calls nobody was seen to wait for is not known.
        """
        samples = []
        for crossing in crossed:
            last, self._last = self._last, crossing
            if crossing.work > 0 and not self._told:
                self.new_run()  # until now the bytes moved stood for it
                self._told = True
            if last is None:
                self.step = self.step if step is None else step
                continue
            elapsed_s = (crossing.at_ns - last.at_ns) / 1e9
            paused_s = self._paused_s(last.at_ns / 1e9, crossing.at_ns / 1e9)
            stood = self._stood_ns(last.at_ns, crossing.at_ns)
            if crossing.opens or elapsed_s <= paused_s:
                missed = self._missed(elapsed_s - sum(stood) / 1e9)
                self.step = self.step + missed if step is None else step
                continue
            self.step = self.step + 1 if step is None else step
            if stood:
                if not self._recent_s:
                    continue
                paused_s = elapsed_s - median(self._recent_s)
            samples.append(self._sample(last, crossing, elapsed_s, paused_s))
        return samples

    def _sample(
        self, last: Crossing, now: Crossing, elapsed_s: float, paused_s: float
    ) -> StepSample:
        compute_s = None
        if not paused_s and now.unwaited <= last.unwaited:
            compute_s = max(0.0, elapsed_s - (now.blocked_ns - last.blocked_ns) / 1e9)
        if not now.foreign and not self._told:
            self._work = float(now.moved_bytes - last.moved_bytes)
        work = self._work
        if self._told:
            work = float(now.work) if now.work > 0 else None
        elif work is None:
            work = float(now.moved_bytes - last.moved_bytes)
        if not paused_s:
            self._recent_s.append(elapsed_s)
        self._sampled = True
        return StepSample(
            step=self.step,
            duration_s=elapsed_s - paused_s,
            end_s=now.at_ns / 1e9,
            work=work,
            run=self.run,
            compute_s=compute_s,
            calls=now.calls - last.calls - now.foreign,
            foreign_calls=now.foreign,
        )

    def _paused_s(self, start_s: float, end_s: float) -> float:
        return sum(max(0.0, min(end_s, b) - max(start_s, a)) for a, b in self._pauses)

    def _stood_ns(self, start_ns: int, end_ns: int) -> list[int]:
        """Of each time it stood in [start_ns, end_ns], or just before: how much of it was inside.

        An iteration that begins with the call it stood before has the wait for the others in it.
        """
        return [
            max(0, min(end_ns, end) - max(start_ns, start))
            for start, end in self._stood
            if start < end_ns and start_ns < end + _JUST_NS
        ]

    def _missed(self, elapsed_s: float) -> int:
        """How many iterations a stretch without boundaries held, by their usual length."""
        return round(elapsed_s / median(self._recent_s)) if self._recent_s else 0
