"""What a series of telemetry says for or against a cause: one sentence with numbers.

In: a series, the time of onset, and what kind of change would matter (`Cue`). Out: a `Fact`:

    For CPU contention: rank 3 waited for a core 0.41 s/s, before 0.01 s/s (+52 MADs, r 0.96,
    0.2 s after onset; back to 0.01 s/s with relief).
    Against network congestion: mlx5_0:1 handled 0 congestion notifications/s, before 0/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from failslow.localize.correlation import OnsetStep, onset_step
from failslow.localize.windows import Floats

__all__ = ["CONGESTION", "CONTENTION", "DEGRADATION", "Cue", "Fact", "weigh"]

CONTENTION = "CPU contention"
DEGRADATION = "device degradation"
CONGESTION = "network congestion"
_FEWEST = 3
_SCALES = {" %": 100.0, " ms": 1000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """A series that speaks for a cause when it changes with onset."""

    cause: str
    text: str
    """What it is: "rank 3 waited for a core"."""
    unit: str = ""
    """As people read it: a value of 0.2 with " %" is 20 %, with " ms" 200 ms."""
    least: float
    """The smallest change that counts, in the series' own unit..."""
    factor: float = 1.0
    """...and as many times the level before."""
    falls: bool = False
    """It is a fall that speaks for the cause."""
    detail: str = ""
    """Of the cause: "thermal"."""
    standing: bool = False
    """So high as `least`, and so much higher than where nothing is slow, it tells of the cause
    although it was so before: a GPU slow from its start."""
    decides: bool = True
    """It is enough by itself; else it only supports."""

    @property
    def scale(self) -> float:
        """A value times this is in `unit`."""
        return _SCALES.get(self.unit, 1.0)


@dataclass(frozen=True, slots=True)
class Fact:
    """One cue against one series."""

    cue: Cue
    speaks: Literal["for", "against", "neither"]
    step: OnsetStep

    @property
    def stands(self) -> bool:
        """It speaks for its cause by its level, not by a change."""
        return self.speaks == "for" and not self.step.clear

    @property
    def weight(self) -> float:
        """In which cues of different units compare: how many times the least that counts it moved
        (or stands at), at most 20."""
        moved = self.step.during - (0.0 if self.stands else self.step.before)
        return min(abs(moved) / self.cue.least, 20.0)

    @property
    def sentence(self) -> str:
        """For a person."""
        start = {"for": "For", "against": "Against", "neither": "Not clear for"}[self.speaks]
        cue, step = self.cue, self.step
        now, before = _say(step.during, cue), _say(step.before, cue)
        if self.stands:
            return f"{start} {cue.cause}: {cue.text} {now}, as before."
        text = f"{start} {cue.cause}: {cue.text} {now}, before {before}"
        if self.speaks == "against":
            return f"{text}."
        tail = f"{step.effect:+.0f} MADs, r {step.correlation:.2f}, {_when(step.lag_s)}"
        if step.after is not None:
            back = "back to" if step.returned else "and still"
            tail += f"; {back} {_say(step.after, cue)} with relief"
        return f"{text} ({tail})."


def weigh(
    cue: Cue,
    t: Floats,
    x: Floats | None,
    *,
    onset_t: float,
    relief_t: float | None,
    usual: float = 0.0,
) -> Fact | None:
    """What the series says; None where there is too little of it.

    For: a clear change of the right direction and enough size. Against: no such change. Neither:
    enough on the whole, but not out of the noise. usual: what a standing one must exceed.
    """
    if x is None:
        return None
    step = onset_step(t, x, onset_t, relief_t, least=cue.least)
    if step is None:
        return _from_the_start(cue, t, x, onset_t, usual)
    low, high = (step.during, step.before) if cue.falls else (step.before, step.during)
    if high - low >= cue.least and high >= cue.factor * low:
        return Fact(cue, "for" if step.clear else "neither", step)
    stands = cue.standing and step.during - usual >= cue.least
    return Fact(cue, "for" if stands else "against", step)


def _from_the_start(cue: Cue, t: Floats, x: Floats, onset_t: float, usual: float) -> Fact | None:
    """There was no time before, or it was not sampled."""
    during = x[(t > onset_t) & np.isfinite(x)]
    if not cue.standing or len(during) < _FEWEST:
        return None
    level = float(np.median(during))
    step = OnsetStep(
        before=level,
        during=level,
        effect=0.0,
        order=0.5,
        correlation=0.0,
        lag_s=0.0,
        samples=(0, len(during)),
    )
    return Fact(cue, "for" if level - usual >= cue.least else "against", step)


def _when(lag_s: float) -> str:
    if abs(lag_s) < 0.05:
        return "at onset"
    return f"{abs(lag_s):.1f} s {'after' if lag_s > 0 else 'before'} onset"


def _say(value: float, cue: Cue) -> str:
    """A number with three digits and its unit.

    >>> _say(0.0412, Cue(cause="", text="", unit=" ms", least=0))
    '41.2 ms'
    >>> _say(2.1e10, Cue(cause="", text="", unit=" B/s", least=0))
    '21 GB/s'
    """
    scaled, unit = value * cue.scale, cue.unit
    if unit.endswith(("B/s", "bit/s")):
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(scaled) >= factor:
                scaled, unit = scaled / factor, f" {letter}{unit.strip()}"
                break
    if abs(scaled) < 0.001:
        return f"0{unit}"
    return f"{scaled:.3g}{unit}" if abs(scaled) < 1000 else f"{scaled:,.0f}{unit}"
