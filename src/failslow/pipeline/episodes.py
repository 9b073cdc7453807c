"""From what the detector says to the journal's records of suspicions and episodes.

In: the job's iterations and the `DetectEvent`s each one caused. Out: `Write`s:

    {"kind":"suspicion","event":"suspected","id":"e1745735301","first_step":1200,"slowdown":1.41,…}
    {"kind":"episode","event":"onset","id":"e1745735301","start_step":1200,"slowdown":1.40,…}

The events of one episode carry the same id: onset, level, update (every few seconds, with the
time lost so far), relief; abandoned when it cannot be followed to its end.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from failslow.config import DetectConfig
from failslow.detect import DetectEvent
from failslow.pipeline.messages import Instruction, Say, Write
from failslow.pipeline.series import JobStep
from failslow.records import Culprit, Episode, Level

__all__ = ["EpisodeBook", "FindCulprits"]

FindCulprits = Callable[[float], tuple[Culprit, ...]]
"""Which workers are slow themselves, given the seconds an iteration takes longer."""
_KEPT = 4200
"""The detector looks back 4,096 records."""
_MANY = 65_536


class _Past(NamedTuple):
    step: int
    begin_t: float
    end_s: float
    duration_s: float
    heft: float
    """Times as long as one of the reference work it should take, by its work."""


@dataclass(slots=True)
class _Ongoing:
    id: str
    first_index: int
    first: _Past
    base_s: float
    """Healthy, at the reference work."""
    confidence: float
    note: str
    levels: list[tuple[int, float]]
    """(step, slowdown)."""
    durations: array[float] = field(default_factory=lambda: array("d"))
    """As if of the reference work."""
    heft: float = 1.0
    """Of the last iteration."""
    lost_s: float = 0.0
    peak: float = 1.0
    said_t: float = 0.0
    culprits: tuple[Culprit, ...] = ()

    def take(self, past: _Past) -> None:
        duration_s, self.heft = past.duration_s / past.heft, past.heft
        self.durations.append(duration_s)
        if len(self.durations) > _MANY:
            del self.durations[::2]
        self.lost_s += self.excess_s(past)
        if not self.is_spike(duration_s):
            self.peak = max(self.peak, duration_s / self.base_s)

    def is_spike(self, duration_s: float) -> bool:
        """Whether it is too long, for the reference work, even for the episode's present level."""
        return duration_s >= 2.0 * self.levels[-1][1] * self.base_s

    def excess_s(self, past: _Past) -> float:
        """Seconds an iteration lost; a spike counts as an ordinary one of the episode."""
        duration_s = past.duration_s / past.heft
        if self.is_spike(duration_s):
            duration_s = self.levels[-1][1] * self.base_s
        return past.heft * (duration_s - self.base_s)

    @property
    def slowdown(self) -> float:
        return median(self.durations) / self.base_s if self.durations else self.levels[-1][1]


class EpisodeBook:
    """Keeps the job's present episode."""

    def __init__(self, config: DetectConfig, *, update_s: float) -> None:
        self._config, self._update_s = config, update_s
        self._past: deque[_Past] = deque(maxlen=_KEPT)
        self._taken = 0
        self._suspected: str | None = None
        self._ended: tuple[str, float, float] | None = None
        """Of the last episode: id, when it ended, healthy seconds."""
        self.ongoing: _Ongoing | None = None
        self.held = False
        """Something is done about the fault: healthy job time does not end the episode."""
        self._looks_well = False
        """The detector has said relief while the episode was held."""

    @property
    def slowdown_now(self) -> float:
        """Of the present level; 1 outside an episode."""
        return self.ongoing.levels[-1][1] if self.ongoing else 1.0

    @property
    def lost_s(self) -> float:
        """Seconds the present episode has lost."""
        return self.ongoing.lost_s if self.ongoing else 0.0

    @property
    def active(self) -> str | None:
        """Id of the episode that is on."""
        return self.ongoing.id if self.ongoing else None

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """Workers named by the present episode."""
        return self.ongoing.culprits if self.ongoing else ()

    def take(
        self,
        step: JobStep,
        events: list[DetectEvent],
        find_culprits: FindCulprits,
        *,
        heft: float = 1.0,
    ) -> list[Instruction]:
        """One iteration that was given to the detector, and what that said.

        heft: by its work it should take so many times as long as one of the reference work.
        """
        sample = step.sample
        begin_t = step.t - sample.duration_s
        past = _Past(sample.step, begin_t, sample.end_s, sample.duration_s, heft)
        self._past.append(past)
        self._taken += 1
        if self.ongoing:
            self.ongoing.take(past)
        out: list[Instruction] = []
        for event in events:
            if event.kind in ("suspected", "cleared"):
                out += self._suspicion(event, step, find_culprits)
            elif event.kind == "onset" and not self.ongoing:
                out += self._onset(event, step, find_culprits)
            elif event.kind in ("level", "onset") and self.ongoing:
                self._looks_well = False
                self.ongoing.culprits = find_culprits(self._extra_s(event))
                out += self._level(event, step)
            elif event.kind == "relief" and self.ongoing and self.held:
                self._looks_well = True
                out += self._level(event, step)
            elif event.kind == "relief" and self.ongoing:
                out += self._relief(event, step)
            elif event.kind in ("run", "speedup") and self.ongoing:
                out += self.abandon(step, event.note or "iterations became faster for good")
        if self.ongoing and self._looks_well and not self.held:
            out += self._end(step, past)
        if self.ongoing and step.t - self.ongoing.said_t >= self._update_s:
            out += self._write("update", step)
        return out

    def abandon(self, step: JobStep, why: str) -> list[Instruction]:
        """The ongoing episode cannot be followed to its end."""
        if not self.ongoing:
            return []
        self.ongoing.note = "; ".join(filter(None, (self.ongoing.note, why)))
        out = self._write("abandoned", step, say="is not followed further:")
        self.ongoing, self._looks_well = None, False
        return out

    def refresh(self, step: JobStep) -> list[Instruction]:
        """The ongoing episode's record as of now."""
        return self._write("update", step) if self.ongoing else []

    def rename(self, id: str) -> None:
        """The ongoing episode is the one the journal knows by `id`."""
        if self.ongoing:
            self.ongoing.id = id

    # -- events ------------------------------------------------------------------------------------

    def _suspicion(
        self, event: DetectEvent, step: JobStep, find_culprits: FindCulprits
    ) -> list[Instruction]:
        first = self._at(event.first_index)
        if event.kind == "suspected" or self._suspected is None:
            self._suspected = self._name(first)
        base_s = math.exp(event.base_log_s) * self._past[-1].heft
        suspected = event.kind == "suspected"
        culprits = find_culprits(self._extra_s(event)) if suspected else ()
        record: dict[str, Any] = {
            "event": event.kind,
            "id": self._suspected,
            "step": step.sample.step,
            "first_step": first.step,
            "first_t": first.begin_t,
            "slowdown": event.slowdown,
            "baseline_s": base_s,
            "culprits": culprits,
        }
        if not suspected:
            self._suspected = None
            return [Write(kind="suspicion", record=record, t=step.t)]
        text = (
            f"suspected: iterations are x{event.slowdown:.2f} slow since step {first.step} "
            f"({1e3 * base_s:.4g} ms healthy){_named(culprits)}"
        )
        return [Write(kind="suspicion", record=record, t=step.t), Say(text)]

    def _onset(
        self, event: DetectEvent, step: JobStep, find_culprits: FindCulprits
    ) -> list[Instruction]:
        first = self._at(event.first_index)
        id = self._suspected or self._name(first)
        self._suspected = None
        note = "gradual or in bursts: no single change point" if event.gradual else ""
        if self._ended and id == self._ended[0]:
            note = "; ".join(filter(None, (note, "flapping")))
        self.ongoing = _Ongoing(
            id=id,
            first_index=event.first_index,
            first=first,
            base_s=math.exp(event.base_log_s),
            confidence=min(1.0, event.confidence),
            note=note,
            levels=[(first.step, event.slowdown)],
        )
        for past in self._since(event.first_index):
            self.ongoing.take(past)
        self.ongoing.culprits = find_culprits(self._extra_s(event))
        return self._write("onset", step, say="has become")

    def _level(self, event: DetectEvent, step: JobStep) -> list[Instruction]:
        assert self.ongoing is not None
        self.ongoing.levels.append((self._at(event.first_index).step, max(1.0, event.slowdown)))
        return self._write("level", step, say="is now")

    def _end(self, step: JobStep, end: _Past) -> list[Instruction]:
        """What was done is undone, the culprits being well, and so is the job."""
        episode = self.ongoing
        assert episode is not None
        out = self._write("relief", step, end=end, say="is over:")
        self._ended = (episode.id, end.begin_t, episode.base_s)
        self.ongoing, self._looks_well = None, False
        return out

    def _relief(self, event: DetectEvent, step: JobStep) -> list[Instruction]:
        episode = self.ongoing
        assert episode is not None
        end = self._at(event.first_index)
        healthy = self._since(event.first_index)
        episode.lost_s -= sum(map(episode.excess_s, healthy))
        del episode.durations[max(0, len(episode.durations) - len(healthy)) :]
        withdrawn = event.first_index <= episode.first_index
        if withdrawn:
            episode.lost_s, episode.durations = 0.0, array("d")
        episode.note = "; ".join(
            filter(None, (episode.note, event.note, "taken back: no slowness" * withdrawn))
        )
        out = self._write("relief", step, end=end, say="is over:", withdrawn=withdrawn)
        self._ended = (episode.id, end.begin_t, episode.base_s)
        self.ongoing = None
        return out

    # -- records -----------------------------------------------------------------------------------

    def _write(
        self,
        event: str,
        step: JobStep,
        *,
        end: _Past | None = None,
        say: str = "",
        withdrawn: bool = False,
    ) -> list[Instruction]:
        episode = self.ongoing
        assert episode is not None
        episode.said_t = step.t
        start_s = episode.first.end_s - episode.first.duration_s
        end_s = None if end is None else max(start_s, end.end_s - end.duration_s)
        slowdown = 1.0 if withdrawn else episode.slowdown
        baseline_s = episode.heft * episode.base_s
        record = Episode(
            start_step=episode.first.step,
            end_step=None if end is None else end.step,
            start_s=start_s,
            end_s=end_s,
            duration_s=(step.sample.end_s if end_s is None else end_s) - start_s,
            iteration_s=slowdown * baseline_s,
            baseline_s=baseline_s,
            slowdown=slowdown,
            # a deeper level looks like spikes until it is known for one
            peak_slowdown=max(episode.peak, *(level for _, level in episode.levels)),
            lost_s=max(0.0, episode.lost_s),
            confidence=episode.confidence,
            culprits=episode.culprits,
            levels=tuple(Level(start_step=at, slowdown=slow) for at, slow in episode.levels),
            note=episode.note,
            first_index=episode.first_index,
            last_index=self._taken - 1,
        )
        tags: Mapping[str, Any] = {
            "event": event,
            "id": episode.id,
            "start_t": episode.first.begin_t,
            "end_t": None if end is None else end.begin_t,
            "slowdown_now": 1.0 if event == "relief" else episode.levels[-1][1],
        }
        out: list[Instruction] = [Write(kind="episode", record=record, t=step.t, tags=tags)]
        if say:
            tail = f"x{slowdown:.2f} since step {episode.first.step}"
            if end is not None:
                tail += f" to {end.step}"
            if event == "level":
                tail = f"x{episode.levels[-1][1]:.2f} since step {episode.levels[-1][0]}"
            if event == "abandoned":
                tail = episode.note
            text = f"fail-slow {episode.id} {say} {tail}, {record.lost_s:.1f} s lost"
            out.append(Say(text + _named(episode.culprits)))
        return out

    # -- the past ----------------------------------------------------------------------------------

    def _name(self, first: _Past) -> str:
        """The id of an episode that begins there; soon after another it is that one again."""
        if self._ended:
            id, ended_t, base_s = self._ended
            gap_s = max(self._config.merge_gap_s, self._config.min_iterations * base_s)
            if first.begin_t - ended_t <= gap_s:
                return id
        return f"e{first.begin_t:.0f}"

    def _at(self, index: int) -> _Past:
        """The iteration the detector knows by `index`, or the oldest one kept."""
        oldest = self._taken - len(self._past)
        return self._past[min(max(0, index - oldest), len(self._past) - 1)]

    def _since(self, index: int) -> list[_Past]:
        count = min(self._taken - index, len(self._past))
        return [self._past[i] for i in range(len(self._past) - count, len(self._past))]

    def _extra_s(self, event: DetectEvent) -> float:
        return (event.slowdown - 1.0) * math.exp(event.base_log_s) * self._past[-1].heft


def _named(culprits: tuple[Culprit, ...]) -> str:
    if not culprits:
        return ""
    return "; slow: " + ", ".join(f"rank {c.rank} {c.what} x{c.slowdown:.2f}" for c in culprits)
