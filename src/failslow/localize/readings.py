"""Results of benchmarks as numbers that compare. Pure.

In: results as they came from the workers, JSON of unknown health. Out: readings; what is damaged,
failed, or of an unknown rank is left out.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from failslow.localize.levels import Reading

__all__ = [
    "GemmReading",
    "HostReading",
    "LinkReading",
    "gemm_readings",
    "host_readings",
    "link_readings",
    "listed",
    "merge_checks",
    "merge_runs",
    "unmeasured",
]

Result = Mapping[str, Any]
_MOST_COUNTED = 25
"""Samples that follow each other are not independent: more of them say no more."""
_FEW = (1.0, 1.0, 1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)
"""What a median absolute deviation of so many samples falls short of that of many (Croux and
Rousseeuw, 1992)."""
_CROWD_DOUBT = 0.2
"""Who waits for a core finds its caches cold: running, too, takes longer, by an unknown factor."""
_STOPPED_SHARE = 0.03
"""Time neither run nor waited for a core, below which it is the books' own error."""
_HELD_SHARE = 0.05
_CUT_OFF_S = 0.1
"""A transfer cut off sooner may only have begun late."""
_LISTED, _REASONS = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmReading:
    """One worker's matrix products."""

    rank: int
    kind: str
    """"float16 8192": only equal ones compare."""
    device: Reading
    waiting: Reading | None = None
    """Wall time over the time it did not wait for a core; None where nobody kept the books."""
    held: float = 0.0
    """Share of that time a quota held it..."""
    stopped: float = 0.0
    """...and in which it neither ran nor waited."""

    @property
    def run_share(self) -> float:
        """What quota and signals left to it."""
        return 1.0 - self.held - self.stopped

    @property
    def is_held(self) -> bool:
        """Whether it was kept from running, by whomever."""
        return self.held + self.stopped > _HELD_SHARE

    def facts(self) -> tuple[str, ...]:
        """What the books say, in words."""
        found = []
        if self.held > _STOPPED_SHARE:
            found.append(f"a quota held the process for {self.held:.0%} of the time")
        if self.stopped > _STOPPED_SHARE:
            found.append(f"the process was stopped for {self.stopped:.0%} of the time")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """One host check of one worker."""

    rank: int
    what: str
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReading:
    """Transfers of one size over one directed link."""

    sender: int
    receiver: int
    size_bytes: int
    reading: Reading


def gemm_readings(results: Iterable[Result], ranks: Container[int]) -> list[GemmReading]:
    """The matrix products among the results."""
    found = []
    for result in results:
        rank = _rank(result, "rank", ranks)
        if result.get("do") != "gemm" or rank is None or (typical_s := _typical(result)) is None:
            continue
        kind = f"{result.get('dtype', '')} {result.get('size', '')}".strip()
        books = _books(result)
        if books is None:
            found.append(GemmReading(rank=rank, kind=kind, device=_plain(result, typical_s)))
            continue
        found.append(
            GemmReading(
                rank=rank,
                kind=kind,
                device=books.reading(result),
                waiting=Reading(books.wall_s / (books.wall_s - books.others_s), noise=0.03),
                held=books.held_s / books.own_s,
                stopped=books.stopped_s / books.own_s,
            )
        )
    return found


def host_readings(results: Iterable[Result], ranks: Container[int]) -> list[HostReading]:
    """The host checks among the results."""
    found = []
    for result in results:
        rank = _rank(result, "rank", ranks)
        if result.get("do") != "host" or rank is None or (typical_s := _typical(result)) is None:
            continue
        books = _books(result)
        reading = books.reading(result) if books else _plain(result, typical_s)
        found.append(HostReading(rank=rank, what=str(result.get("what", "")), reading=reading))
    return found


def link_readings(results: Iterable[Result], ranks: Container[int]) -> list[LinkReading]:
    """The transfers among the results; those cut off are so marked."""
    results = list(results)
    sending = {
        _transfer(result, ranks): result
        for result in results
        if result.get("do") == "p2p" and result.get("by") == result.get("rank")
    }
    found = []
    for result in results:
        sender, receiver = _rank(result, "rank", ranks), _rank(result, "peer", ranks)
        size = result.get("size_bytes")
        if result.get("do") != "p2p" or sender is None or receiver is None:
            continue
        if not isinstance(size, int) or size < 1:
            continue
        theirs = sending.get(_transfer(result, ranks), {})
        excused = (_positive(result.get("waited")) or 0.0) + (
            _positive(theirs.get("waited")) or 0.0
        )
        excused = min(1.0, excused)
        if _typical(result) is not None and (middle_s := _positive(result.get("median_s"))):
            # few samples: the middle one, and the fastest must be slow as well
            low_s = _positive(result.get("min_s"))
            reading = Reading(middle_s, noise=_noise(result), low_s=low_s, excused=excused)
        elif (at_least_s := _at_least_s(result, theirs)) >= _CUT_OFF_S:
            reading = Reading(at_least_s, low_s=at_least_s, excused=excused, at_least=True)
        else:
            continue
        found.append(
            LinkReading(sender=sender, receiver=receiver, size_bytes=size, reading=reading)
        )
    return found


def _at_least_s(result: Result, theirs: Result) -> float:
    """For how long a message had been under way when it was cut off; 0.0: nobody can say.

    The receiver counts from its asking, which may itself be late: the message was under way since
    the sender was asked.
    """
    at_least_s = _positive(result.get("at_least_s")) or 0.0
    asked, heard = result.get("asked"), theirs.get("asked")
    if not isinstance(asked, int) or not isinstance(heard, int):
        return at_least_s
    return 0.0 if heard < asked else min(at_least_s, _positive(theirs.get("since_s")) or 0.0)


def listed(names: Iterable[str]) -> str:
    """As people can read them: of a thousand the first few.

    >>> listed(["0>1", "1>2"]), listed(str(rank) for rank in range(1000))
    ('0>1, 1>2', '0, 1, 2, 3, 4, 5, 6, 7 and 992 more')
    """
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - _LISTED} more" if len(each) > _LISTED else ""
    return ", ".join(each[:_LISTED]) + more


def unmeasured(failed: Mapping[str, Sequence[str]], one: str, many: str) -> list[str]:
    """Who could not be measured and why; failed: {error: who}. Many workers have many reasons.

    >>> unmeasured({"no memory": ["3"]}, "rank", "ranks")
    ['rank 3 not measured: no memory']
    """
    most = sorted(failed.items(), key=lambda item: -len(item[1]))
    found = [
        f"{many if len(who) > 1 else one} {listed(who)} not measured: {error}"
        for error, who in most[:_REASONS]
    ]
    rest = [name for _, who in most[_REASONS:] for name in who]
    if rest:
        found.append(f"{many} {listed(rest)} not measured either")
    return found


def merge_runs(readings: Iterable[GemmReading]) -> dict[int, GemmReading]:
    """One a rank, of several rounds: the faster, and the one in which it waited less.

    What a quota or signals took in every round is no accident of one of them: it is averaged.
    """
    rounds: dict[int, list[GemmReading]] = {}
    for reading in readings:
        rounds.setdefault(reading.rank, []).append(reading)
    return {rank: _merged(several) for rank, several in rounds.items()}


def _merged(rounds: Sequence[GemmReading]) -> GemmReading:
    waits = [r.waiting for r in rounds if r.waiting is not None]
    waiting = min(waits, key=lambda w: w.value_s) if waits else None
    if not all(r.is_held for r in rounds):
        return replace(min(rounds, key=lambda r: r.device.value_s), waiting=waiting)
    fastest = min(rounds, key=lambda r: r.device.value_s * r.run_share)
    held = sum(r.held for r in rounds) / len(rounds)
    stopped = sum(r.stopped for r in rounds) / len(rounds)
    merged = replace(fastest, held=held, stopped=stopped, waiting=waiting)
    return replace(merged, device=fastest.device.times(fastest.run_share / merged.run_share))


def merge_checks(readings: Iterable[HostReading]) -> list[HostReading]:
    """One a rank and check: the faster of several rounds."""
    best: dict[tuple[int, str], HostReading] = {}
    for reading in readings:
        known = best.setdefault((reading.rank, reading.what), reading)
        if reading.reading.value_s < known.reading.value_s:
            best[reading.rank, reading.what] = reading
    return list(best.values())


@dataclass(frozen=True, slots=True)
class _Books:
    """Where a worker's time on a CPU went."""

    wall_s: float
    cpu_s: float
    others_s: float
    """Waiting for a core that others had."""
    held_s: float
    stopped_s: float

    @property
    def own_s(self) -> float:
        """What is the processor's own doing."""
        return self.cpu_s + self.held_s + self.stopped_s

    def reading(self, result: Result) -> Reading:
        """Its own time per product. The fastest sample is stretched as the whole is: a quota may
        leave single products alone."""
        repeats = _repeats(result)
        low_s = _positive(result.get("min_s"))
        return Reading(
            self.own_s / repeats,
            noise=_noise(result),
            doubt=_CROWD_DOUBT * self.others_s / self.wall_s,
            low_s=None if low_s is None else low_s * self.own_s / self.cpu_s,
        )


def _books(result: Result) -> _Books | None:
    wall_s, cpu_s = _positive(result.get("wall_s")), _positive(result.get("cpu_s"))
    if wall_s is None or cpu_s is None:
        return None
    queued_s = min(wall_s, _positive(result.get("queued_s")) or 0.0)
    # the kernel counts time held by a quota as waiting
    held_s = min(queued_s, _positive(result.get("throttled_s")) or 0.0)
    others_s = min(queued_s - held_s, 0.98 * wall_s)
    stopped_s = wall_s - cpu_s - queued_s
    if stopped_s < _STOPPED_SHARE * wall_s:
        stopped_s = 0.0
    return _Books(wall_s, cpu_s, others_s, held_s, stopped_s)


def _plain(result: Result, typical_s: float) -> Reading:
    return Reading(typical_s, noise=_noise(result))


def _typical(result: Result) -> float | None:
    return None if result.get("error") else _positive(result.get("seconds"))


def _noise(result: Result) -> float:
    """Standard error of a mean (or median) over it, by the spread of the samples."""
    middle_s, spread_s = _positive(result.get("median_s")), _positive(result.get("mad_s"))
    if middle_s is None or spread_s is None:
        return 0.0
    count = min(_MOST_COUNTED, _repeats(result))
    few = _FEW[count] if count < len(_FEW) else 1.0
    return min(1.0, 1.2533 * 1.4826 * few * spread_s / middle_s / math.sqrt(count))


def _repeats(result: Result) -> int:
    count = result.get("repeats")
    return max(1, count) if isinstance(count, int) else 1


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0.0 < value < math.inf else None


def _transfer(result: Result, ranks: Container[int]) -> tuple[str, int | None, int | None]:
    """One of a stage, whoever of its two ends tells of it."""
    stage = str(result.get("stage"))
    return stage, _rank(result, "rank", ranks), _rank(result, "peer", ranks)


def _rank(result: Result, name: str, ranks: Container[int]) -> int | None:
    value = result.get(name)
    return value if isinstance(value, int) and value in ranks else None
