"""From the journal of a watched probe to its result. Pure.

In: the journal's entries, torn or whole, how the job ended, the fleet's reference for devices of
its model. Out: a `ProbeResult`. Slowness is counted from the probe's own healthy iterations; where
it never had any, from the fleet's.

    result = read_result(read_journal(path), spec, Ending(begin_t=…, end_t=…, state="done"), fleet)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from failslow.journal import JournalEntry
from failslow.probe.accuse import Accused, Case, accuse
from failslow.probe.fleet import FleetReference
from failslow.probe.job import grid_of
from failslow.probe.measures import NodeSeries, measures, node_series
from failslow.probe.result import ProbeResult, ProbeSpec, ProbeState, nameless
from failslow.records import Diagnosis, Episode, Finding, StepSample, Verdict

__all__ = ["Ending", "devices_of", "read_result"]

_FEWEST = 12
"""Iterations without which nothing is said."""
_WARM_UP = 3
_AT_LEAST_S = 3.0
_HEALTHY = 1.075
"""Half-way between slow (10 %) and well again (5 %), as the detector has it."""
_SPIKE = 2.0
_SMALL = 1.21
"""Below it a fail-slow that nobody is named for may be the cluster's own unrest."""
_SHORT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the job ended, as whoever ran it knows."""

    begin_t: float
    end_t: float
    state: ProbeState
    error: str = ""
    node: str = ""
    """Name of the node of rank 0."""


def devices_of(entries: Iterable[JournalEntry], workers: int) -> tuple[str, ...]:
    """As `ProbeResult.devices`: what each worker's benchmarks ran on, else what NVML says."""
    ran_on: dict[int, str] = {}
    seen_on: dict[int, str] = {}
    for entry in entries:
        record = entry.record
        if not isinstance(record, Mapping):
            continue
        if entry.kind == "validation":
            for result in _mappings(record.get("results")):
                rank, device = result.get("rank"), result.get("device")
                if isinstance(rank, int) and isinstance(device, str) and device:
                    ran_on[rank] = device
        elif entry.kind == "telemetry" and isinstance(gpus := record.get("gpus"), Mapping):
            for gpu in _mappings([*gpus.values()]):
                if isinstance(name := gpu.get("name"), str) and isinstance(gpu.get("ranks"), list):
                    seen_on.update((rank, name) for rank in gpu["ranks"] if isinstance(rank, int))
    found = [ran_on.get(rank, seen_on.get(rank, "")) for rank in range(workers)]
    return tuple(sorted(set(found))) if all(found) else ()


def _mappings(found: object) -> list[Mapping[str, Any]]:
    """What comes from other machines may be anything."""
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class _Step:
    begin_t: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    """One fail-slow."""

    begin_t: float
    slow_s: float
    slowdown: float
    lost_s: float
    ids: tuple[str, ...]
    """Of the episodes in the journal that tell of it; "" is the look at the start."""


@dataclass(slots=True)
class _Told:
    """What the journal says, sorted."""

    not_healthy_s: float = math.inf
    steps: list[_Step] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=dict)
    """{rank: node}."""
    healthy_s: float | None = None
    episodes: list[tuple[str, float, Episode]] = field(default_factory=list)
    """(id, begin, the last record of it)."""
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    diagnoses: dict[str, list[Diagnosis]] = field(default_factory=dict)
    telemetry: list[JournalEntry] = field(default_factory=list)
    _open: bool = False

    def take(self, entry: JournalEntry) -> None:
        record = entry.record
        if isinstance(record, StepSample):
            self._step(entry, record)
        elif isinstance(record, Episode):
            self._episode(entry, record)
        elif isinstance(record, Verdict):
            self.verdicts.setdefault(record.episode, []).append(record)
        elif isinstance(record, Diagnosis):
            self.diagnoses.setdefault(record.episode, []).append(record)
        elif entry.kind == "telemetry":
            self.telemetry.append(entry)

    def _step(self, entry: JournalEntry, sample: StepSample) -> None:
        if entry.rank is not None:
            node = entry.tags.get("node")
            if isinstance(node, str) and node:
                self.nodes[entry.rank] = node
            return
        self.steps.append(_Step(entry.t - sample.duration_s, sample.duration_s))
        healthy_s = entry.tags.get("healthy_s")
        if isinstance(healthy_s, float) and 0 < healthy_s < self.not_healthy_s:
            self.healthy_s = healthy_s

    def _episode(self, entry: JournalEntry, episode: Episode) -> None:
        event, id = entry.tags.get("event"), str(entry.tags.get("id", ""))
        begin_t = entry.tags.get("start_t")
        if not isinstance(begin_t, float) or episode.kind != "fail_slow":
            return
        if event != "onset" and self._open and self.episodes and self.episodes[-1][0] == id:
            self.episodes.pop()
        # one that is over, and whose name comes again, has come again
        self._open = event not in ("relief", "abandoned")
        # not one that was taken back
        if episode.slowdown > 1.0 and episode.baseline_s < self.not_healthy_s:
            self.episodes.append((id, begin_t, episode))


def read_result(
    entries: Iterable[JournalEntry],
    spec: ProbeSpec,
    ending: Ending,
    fleet: FleetReference | None = None,
    *,
    devices: tuple[str, ...] = (),
    not_healthy_s: float = math.inf,
) -> ProbeResult:
    """The result; of a journal with too few iterations one that says so, and never an error.

    devices: as of the result. not_healthy_s: an iteration the detector was told to take for
    healthy, of devices of another model: what it saw against that is no fail-slow.
    """
    told = _Told(not_healthy_s=not_healthy_s)
    for entry in entries:
        told.take(entry)
    told.steps.sort(key=lambda step: step.begin_t)
    grid = grid_of(spec)
    series = node_series(told.telemetry)
    base = ProbeResult(
        probe_id=spec.probe_id,
        campaign=spec.campaign,
        nodes=_nodes(told, spec, ending),
        devices=devices,
        workers=spec.workers,
        tp=grid.tp,
        pp=grid.pp,
        dp=grid.dp,
        preset=spec.preset,
        begin_t=ending.begin_t,
        end_t=max(ending.begin_t, ending.end_t),
        state=ending.state,
        error=ending.error,
        iterations=len(told.steps),
        fleet_iteration_s=fleet.iteration_s if fleet else None,
        result="unknown",
        **asdict(measures(series.values())),
    )
    if len(told.steps) < _FEWEST:
        return replace(base, evidence=(f"Only {len(told.steps)} iterations were seen.",))
    times = _slow_times(told, fleet)
    accused = _accused(told, times, series)
    alone = times.from_start and accused.result == "unknown"
    if fleet and alone and times.slowdown < fleet.limit_alone:
        times = _slow_times(told, None)
        accused = _accused(told, times, series)
    times, left_out = _worth_counting(told, times)
    unrest = (left_out,) if left_out else ()
    if left_out:
        accused = _accused(told, times, series)
    found = replace(
        base,
        healthy_iteration_s=times.healthy_s,
        reference_iteration_s=times.reference_s,
        reference_source="fleet" if times.from_start else "own start",
    )
    if not times.slow:
        return replace(found, result="healthy", evidence=unrest)
    total_s = sum(step.duration_s for step in told.steps)
    lost_s = min(sum(part.lost_s for part in times.slow), total_s * (1.0 - 1e-9))
    start = [] if not times.from_start else [_from_start_text(times, fleet)]
    return replace(
        found,
        result=accused.result,
        cause=accused.cause,
        onset_delay_s=max(0.0, times.slow[0].begin_t - told.steps[0].begin_t),
        slow_s=sum(part.slow_s for part in times.slow),
        slowdown=times.slowdown,
        lost_s=lost_s,
        jct_increase_share=lost_s / (total_s - lost_s),
        culprits=accused.culprits,
        culprit_causes=accused.causes,
        culprit_nodes=accused.nodes,
        evidence=(*start, *accused.evidence, *unrest),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """When and how much it was slow."""

    slow: tuple[_Slow, ...]
    healthy_s: float | None
    reference_s: float
    from_start: bool = False

    @property
    def slowdown(self) -> float:
        return max((part.slowdown for part in self.slow), default=1.0)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(id for part in self.slow for id in part.ids))


def _worth_counting(told: _Told, times: _Times) -> tuple[_Times, str]:
    """Without small fail-slows that nobody is to blame for, and what is said of these.

    A machine that is a tenth slower for some seconds is no node to be drained, and a study that
    counts it finds fail-slows in every probe that is long enough. Small and unproved is left out
    where all suspects were measured and are well, and where the rest of it is over within
    seconds.
    """
    small = [part for part in times.slow if part.slowdown < _SMALL and not _is_blamed(told, part)]
    well = [part for part in small if _all_well(told, part)]
    rest = [part for part in small if part not in well]
    trained_s = told.steps[-1].begin_t + told.steps[-1].duration_s - told.steps[0].begin_t
    if sum(part.slow_s for part in rest) >= min(_SHORT_S, trained_s / 2):
        rest = []
    left = [part for part in times.slow if part in well or part in rest]
    if not left:
        return times, ""
    total_s, most = sum(part.slow_s for part in left), max(part.slowdown for part in left)
    why = "none of the suspects was found slow" if not rest else "soon over, and nobody proved slow"
    text = f"Not counted: {total_s:.0f} s at ×{most:.2f} at most; {why}."
    return replace(times, slow=tuple(part for part in times.slow if part not in left)), text


def _is_blamed(told: _Told, part: _Slow) -> bool:
    """Held against the fleet it has limits of its own, else somebody was found slow."""
    return "" in part.ids or any(v.findings for id in part.ids for v in told.verdicts.get(id, ()))


def _all_well(told: _Told, part: _Slow) -> bool:
    """Whether every suspect, or every worker where nobody was suspected, was found well."""
    well = {key for id in part.ids for v in told.verdicts.get(id, ()) for key in v.well}
    links = {node for key in well if key.startswith("link ") for node in key[5:].split(">")}
    diagnoses = [d for id in part.ids for d in told.diagnoses.get(id, ())]
    suspects = diagnoses[-1].suspects if diagnoses else ()
    for suspect in suspects:
        ranks = {*suspect.ranks, *suspect.peer_ranks}
        if suspect.what == "compute":
            fast = all(_device(rank) in well for rank in ranks)
        else:  # of a group no link is told apart
            fast = all(told.nodes.get(rank, "") in links - {""} for rank in ranks)
        if not fast:
            return False
    return bool(suspects) or all(_device(rank) in well for rank in told.nodes)


def _device(rank: int) -> str:
    return Finding(what="device", slowdown=1.0, ranks=(rank,)).key


def _accused(told: _Told, times: _Times, series: Mapping[str, NodeSeries]) -> Accused:
    cases = [
        Case(
            verdicts=told.verdicts.get(id, []),
            diagnoses=told.diagnoses.get(id, []),
            spans=tuple((s.begin_t, s.begin_t + s.slow_s) for s in times.slow if id in s.ids),
        )
        for id in times.ids
    ]
    return accuse(
        cases,
        nodes=told.nodes,
        series=series,
        slowdown=times.slowdown,
        trained=(told.steps[0].begin_t, told.steps[-1].begin_t + told.steps[-1].duration_s),
    )


def _slow_times(told: _Told, fleet: FleetReference | None) -> _Times:
    own = [
        _Slow(
            begin_t=begin_t,
            slow_s=episode.duration_s,
            slowdown=episode.slowdown,
            lost_s=episode.lost_s,
            ids=(id,),
        )
        for id, begin_t, episode in told.episodes
    ]
    first = None if fleet is None else _slow_from_start(told.steps, fleet)
    if first is None or fleet is None:
        healthy_s = told.healthy_s or _well(told.steps, own)
        return _Times(slow=tuple(own), healthy_s=healthy_s, reference_s=healthy_s)
    begin_t, end_t = told.steps[0].begin_t, first.begin_t + first.slow_s
    inside = [part for part in own if part.begin_t < end_t]
    ids = ("", *(id for part in inside for id in part.ids))
    after = [part for part in own if part.begin_t >= end_t]
    rest = [step for step in told.steps if step.begin_t >= end_t]
    slow = (replace(first, ids=ids, begin_t=begin_t), *after)
    return _Times(
        slow=slow,
        healthy_s=_well(rest, after) if len(rest) >= _FEWEST else None,
        reference_s=fleet.iteration_s,
        from_start=True,
    )


def _well(steps: Sequence[_Step], slow: Sequence[_Slow]) -> float:
    """Median of the iterations outside fail-slows; of all, when all are slow."""
    spans = [(part.begin_t, part.begin_t + part.slow_s) for part in slow]
    outside = [
        step.duration_s
        for step in steps[_WARM_UP:]
        if not any(begin_t <= step.begin_t < end_t for begin_t, end_t in spans)
    ]
    return median(outside or [step.duration_s for step in steps])


def _slow_from_start(steps: Sequence[_Step], fleet: FleetReference) -> _Slow | None:
    """The stretch from the first iteration on in which the fleet's are faster; None: there is none.

    The first iterations warm up: they neither prove it nor are they its end.
    """
    ratios = [step.duration_s / fleet.iteration_s for step in steps]
    usable = range(_WARM_UP, len(ratios) - _FEWEST + 1)
    end = next((k for k in usable if median(ratios[k : k + _FEWEST]) < _HEALTHY), None)
    if end is None:
        end = len(ratios)
    else:
        end += next(i for i, ratio in enumerate(ratios[end:]) if ratio < _HEALTHY)
    stretch = steps[:end]
    level = median(ratios[min(_WARM_UP, end - 1) : end])
    slow_s = sum(step.duration_s for step in stretch)
    if end < _WARM_UP + _FEWEST or slow_s < _AT_LEAST_S or level < fleet.limit:
        return None
    most_s = _SPIKE * level * fleet.iteration_s
    lost_s = sum(
        max(0.0, (s.duration_s if s.duration_s < most_s else level * fleet.iteration_s))
        - fleet.iteration_s
        for s in stretch
    )
    last = stretch[-1]
    return _Slow(
        begin_t=steps[0].begin_t,
        # the clock's time: our own pauses in it are no iterations
        slow_s=last.begin_t + last.duration_s - steps[0].begin_t,
        slowdown=level,
        lost_s=max(0.0, lost_s),
        ids=("",),
    )


def _from_start_text(times: _Times, fleet: FleetReference | None) -> str:
    assert fleet is not None
    now_s = times.slow[0].slowdown * fleet.iteration_s
    return (
        f"Slow from its first iteration: {1e3 * now_s:.4g} ms, where {fleet.probes} probes before "
        f"took {1e3 * fleet.iteration_s:.4g} ms (limit x{fleet.limit:.2f})."
    )


def _nodes(told: _Told, spec: ProbeSpec, ending: Ending) -> tuple[str, ...]:
    """Names by node rank, as the workers' records have them."""
    found = [
        told.nodes.get(index * spec.workers_per_node, nameless(index))
        for index in range(spec.nodes)
    ]
    if ending.node:
        found[0] = ending.node
    return tuple(found)
