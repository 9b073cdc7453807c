"""Profiles of the workers' calls -> what the heat map shows: each worker and group against peers.

In: `RankProfile`s of one round of profiling. Out: a `ProfileRound`, with a value for each worker
and column; a column is a group by its label, the first one the worker's whole iteration.

    own       time of its own before the calls, over the median of the same calls elsewhere
    healthy   the same against its own profile of healthy times
    late      seconds an iteration by which it arrives after the first of its group
    transfer  the calls' shortest time over their ranks, against comparable groups

Calls compare when label, op, bytes, place in the iteration and size of the group agree. Ratios of
less than a fiftieth of an iteration are damped: twice next to nothing is nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Literal, NamedTuple

from failslow.records import RankProfile, group_label

__all__ = ["WHOLE", "Metric", "ProfileBook", "ProfileRound"]

Metric = Literal["own", "healthy", "late", "transfer"]
WHOLE = "iteration"
_UNNAMED = "unnamed group"
_SMALLEST = 0.02
"""Of an iteration."""
_GAP_S = 30.0
"""Profiles further apart belong to two rounds."""
_MOST_ROUNDS = 8


class _Cell(NamedTuple):
    """A `CallCell` without what is not shown."""

    sign: tuple[str, str, int, int, int]
    """label, op, bytes, position, size of the group. Times: seconds of an iteration."""
    group: tuple[int, ...]
    peer: int | None
    time_s: float
    """Until complete; blocked, where that is unknown."""
    wait_s: float
    gap_s: float


@dataclass(slots=True)
class _Profile:
    rank: int
    node: str
    iterations: int
    iteration_s: float
    compute_s: float | None
    device: str
    cells: list[_Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRound:
    """One round of profiling."""

    t: float
    """When the last profile came."""
    why: str
    """"healthy", "suspicion", ""."""
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    """Of each rank."""
    columns: tuple[str, ...]
    """`WHOLE`, then the groups' labels."""
    values: Mapping[Metric, tuple[tuple[float | None, ...], ...]]
    """By metric: a row a rank, a value a column; seconds for `late`, else ratios; None unknown."""
    iteration_s: float
    iterations: int


@dataclass(slots=True)
class _Round:
    begin_t: float
    t: float
    why: str
    profiles: dict[int, _Profile] = field(default_factory=dict)


class ProfileBook:
    """Takes a journal's profiles as they come."""

    def __init__(self) -> None:
        self._rounds: list[_Round] = []
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Each group once: a thousand profiles name the same few."""

    def take(self, profile: RankProfile, t: float, why: str) -> None:
        """A profile of `why` came."""
        last = self._rounds[-1] if self._rounds else None
        fresh = (
            last is None or profile.rank in last.profiles or t - last.t > _GAP_S or why != last.why
        )
        if fresh or last is None:
            last = _Round(t, t, why)
            self._rounds.append(last)
            # the first is the healthy one; of the others the latest tell most
            if len(self._rounds) > _MOST_ROUNDS:
                del self._rounds[1]
        last.t = t
        last.profiles[profile.rank] = self._small(profile)

    def rounds(self) -> tuple[ProfileRound, ...]:
        """What is to be shown, oldest first."""
        found: list[ProfileRound] = []
        healthy: _Round | None = None
        for taken in self._rounds:
            if taken.why == "healthy" or (healthy is None and taken.why == ""):
                healthy = taken
            found.append(_compared(taken, healthy if healthy is not taken else None))
        return tuple(found)

    def _small(self, profile: RankProfile) -> _Profile:
        cells = []
        for cell in profile.cells:
            group = self._groups.setdefault(cell.group, cell.group)
            time_s = cell.wait_s if cell.duration_s is None else cell.duration_s
            if cell.least_s is not None:
                time_s = cell.least_s
            label = group_label(cell.label) or _UNNAMED
            sign = (label, cell.op, cell.size_bytes, cell.position, len(group))
            # a cell may stand for several calls of an iteration
            often = max(1.0, cell.calls / max(1, profile.iterations))
            times = (often * time_s, often * cell.wait_s, often * cell.gap_s)
            cells.append(_Cell(sign, group, cell.peer, *times))
        return _Profile(
            rank=profile.rank,
            node=profile.node,
            iterations=profile.iterations,
            iteration_s=profile.iteration_s,
            compute_s=profile.compute_s,
            device=profile.device,
            cells=cells,
        )


def _compared(taken: _Round, healthy: _Round | None) -> ProfileRound:
    profiles = [taken.profiles[rank] for rank in sorted(taken.profiles)]
    labels = list(dict.fromkeys(cell.sign[0] for p in profiles for cell in p.cells))
    iteration_s = median(p.iteration_s for p in profiles)
    floor_s = _SMALLEST * iteration_s
    # workers compare only with the same model of device
    usual_gap_s = _medians(
        ((p.device, cell.sign), cell.gap_s) for p in profiles for cell in p.cells
    )
    least_s, longest_s = _over_ranks(profiles)
    usual_transfer_s = _medians((sign, s) for (sign, *_), s in least_s.items())
    values: dict[Metric, tuple[tuple[float | None, ...], ...]] = {
        "own": _rows(
            profiles,
            labels,
            lambda p, cells: _ratio(
                sum(c.gap_s for c in cells),
                sum(usual_gap_s[p.device, c.sign] for c in cells),
                floor_s,
            ),
            _against_role(profiles, floor_s),
        ),
        "late": _rows(
            profiles,
            labels,
            lambda p, cells: _sum_or_none(
                longest_s[_place(c, p.rank)] - c.wait_s for c in cells if _is_shared(c)
            ),
            {},
        ),
        "transfer": _rows(
            profiles,
            labels,
            lambda p, cells: _ratio(
                sum(least_s[_place(c, p.rank)] for c in cells),
                sum(usual_transfer_s[c.sign] for c in cells),
                floor_s,
            ),
            {},
        ),
    }
    if healthy is not None:
        values["healthy"] = _against_healthy(profiles, labels, healthy, floor_s)
    return ProfileRound(
        t=taken.t,
        why=taken.why,
        ranks=tuple(p.rank for p in profiles),
        nodes=tuple(p.node for p in profiles),
        columns=(WHOLE, *labels),
        values=values,
        iteration_s=iteration_s,
        iterations=min(p.iterations for p in profiles),
    )


_Place = tuple[tuple[str, str, int, int, int], tuple[int, ...], int | None]


def _place(cell: _Cell, rank: int) -> _Place:
    """The call in which several workers meet; each alone in sends, and where nobody knows."""
    if not _is_shared(cell):
        return cell.sign, (rank,), cell.peer
    return cell.sign, cell.group, cell.peer


def _is_shared(cell: _Cell) -> bool:
    return len(cell.group) > 1 and not any(way in cell.sign[1] for way in ("send", "recv"))


def _over_ranks(profiles: Sequence[_Profile]) -> tuple[dict[_Place, float], dict[_Place, float]]:
    """Of each call the shortest time and the longest wait over the workers that meet in it."""
    least_s: dict[_Place, float] = {}
    longest_s: dict[_Place, float] = {}
    for p in profiles:
        for cell in p.cells:
            place = _place(cell, p.rank)
            least_s[place] = min(least_s.get(place, cell.time_s), cell.time_s)
            longest_s[place] = max(longest_s.get(place, cell.wait_s), cell.wait_s)
    return least_s, longest_s


def _rows(
    profiles: Sequence[_Profile],
    labels: Sequence[str],
    value: Callable[[_Profile, list[_Cell]], float | None],
    whole: Mapping[int, float],
) -> tuple[tuple[float | None, ...], ...]:
    rows = []
    for p in profiles:
        by_label: dict[str, list[_Cell]] = defaultdict(list)
        for cell in p.cells:
            by_label[cell.sign[0]].append(cell)
        cells = (value(p, by_label[label]) if label in by_label else None for label in labels)
        rows.append((whole.get(p.rank), *cells))
    return tuple(rows)


def _against_role(profiles: Sequence[_Profile], floor_s: float) -> dict[int, float]:
    """Own time of the whole iteration against workers that make the same calls."""
    roles: dict[object, list[_Profile]] = defaultdict(list)
    for p in profiles:
        if p.compute_s is not None:
            roles[p.device, frozenset(cell.sign for cell in p.cells)].append(p)
    found = {}
    for peers in roles.values():
        usual_s = median_low([p.compute_s or 0.0 for p in peers])
        found.update({p.rank: _ratio(p.compute_s or 0.0, usual_s, floor_s) for p in peers})
    return found


def _against_healthy(
    profiles: Sequence[_Profile], labels: Sequence[str], healthy: _Round, floor_s: float
) -> tuple[tuple[float | None, ...], ...]:
    before: dict[tuple[int, object], float] = {}
    for p in healthy.profiles.values():
        for cell in p.cells:
            before[p.rank, (cell.sign, cell.group, cell.peer)] = cell.gap_s
    whole = {}
    for p in profiles:
        known = healthy.profiles.get(p.rank)
        if known is not None and known.compute_s is not None and p.compute_s is not None:
            whole[p.rank] = _ratio(p.compute_s, known.compute_s, floor_s)

    def value(p: _Profile, cells: list[_Cell]) -> float:
        keys = [(p.rank, (c.sign, c.group, c.peer)) for c in cells]
        pairs = [
            (c.gap_s, before[key]) for c, key in zip(cells, keys, strict=True) if key in before
        ]
        return _ratio(sum(now for now, _ in pairs), sum(then for _, then in pairs), floor_s)

    return _rows(profiles, labels, value, whole)


def _sum_or_none(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) if known else None


def _ratio(seconds: float, usual_s: float, floor_s: float) -> float:
    return 1.0 + (seconds - usual_s) / max(usual_s, floor_s, 1e-9)


def _medians(pairs: Iterable[tuple[object, float]]) -> dict[object, float]:
    found: dict[object, list[float]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    # of two the lower: the one at fault is slow
    return {key: median_low(values) for key, values in found.items()}
