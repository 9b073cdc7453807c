"""Who looks slow: the profiles of a job's workers -> a `Diagnosis`, without stopping anything.

In: each worker's `RankProfile` of now, and of healthy times where there are any. Out: suspects,
the likeliest first, with the numbers behind them:

    diagnose(profiles, healthy, episode="e1745735301", slowdown=1.4)
    # Diagnosis(suspects=(Suspect(what="compute", ranks=(5,), slowdown=1.52, extra_s=0.031, ...),))

A worker is slow when it spends more time by itself than in healthy times, or than workers that do
the same work on the same device model, and others wait for it. Blame so follows the dependencies:
who is late because it waited has not spent the time itself. A link is slow when its transfers take
longer although nobody is late. Only what explains a good part of the slowness is named: a wrong
name costs a healthy machine. (After FALCON, arXiv 2410.12588, section 4.2.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from failslow.localize.compare import Table
from failslow.localize.compare_links import lower_median
from failslow.records import Diagnosis, Measurement, RankProfile, Suspect

__all__ = ["UNCOMPARED", "diagnose"]

UNCOMPARED = "nothing to compare to"
_MIN_RATIO = 1.1
_MIN_EXTRA = 0.05
"""Share of an iteration that a suspect must take longer."""
_MIN_SHARE = 0.25
"""Share of the job's slowness that it must explain, where that is known."""
_LEAST_OWN = 1e-3
"""Share of an iteration that a worker is taken to spend by itself at least."""
_SLOW = 1.05
"""Iterations this much over healthy ones are worth a look."""
_MOST_SIGMAS, _FEW_SIGMAS = 5.0, 1.5
"""Distance from comparable ones in their own spread: of n Gaussian values the largest is at about
the root of 2 ln n; so much beyond that, and no further than the first."""
_USUAL_SPREAD = 0.03
"""Workers that do the same work differ by so much where they are too few to show it:"""
_MANY = 64
_ERRORS = 4.0
"""Distance in standard errors of the medians, at most; of few workers the same as in sigmas."""
_WAITED_FOR = 0.3
"""Share of its extra time that others must wait for a slow worker."""
_COMMON_QUANTILE = 0.25
"""What even the least slow three quarters of all have become slower by is nobody's own."""
_ALIKE = 1.1
"""Factors by which workers have become slower are about the same where their middle half is so
close together."""
_COMMON_LINKS = 4
"""Links from which on the same holds for them."""
_NAMED = 16

Floats = NDArray[np.float64]


def diagnose(
    profiles: Sequence[RankProfile],
    healthy: Sequence[RankProfile],
    *,
    episode: str,
    slowdown: float,
) -> Diagnosis:
    """Compare the workers of a job.

    healthy: may lack ranks; empty for a job that is slow from its start, which peers alone then
    show. slowdown: of the job's iterations over healthy ones; ≤ 1 unknown (what profiles of
    healthy times show outranks it). Raises ValueError when a rank has two profiles of one time.
    """
    if not profiles:
        return Diagnosis(episode=episode, suspects=(), note="no worker sent a profile")
    return _Diagnosing(Table(profiles, healthy), slowdown).result(episode)


class _Diagnosing:
    """The numbers of one diagnosis."""

    def __init__(self, table: Table, slowdown: float) -> None:
        self.table, count = table, table.count
        self.iteration_s = float(np.median(table.iteration_s[:count]))
        self.healthy_s: float | None = None
        """Of an iteration; None unknown."""
        if len(table.iteration_s) > count:
            self.healthy_s = float(np.median(table.iteration_s[count:]))
        elif slowdown > 1.0:
            self.healthy_s = self.iteration_s / slowdown
        own, error = table.own()
        # who only waits spends nothing by itself, and so many times nothing is no slowdown
        own = np.maximum(own, _LEAST_OWN * self.iteration_s)
        self._all_own_s = own
        self.own_s, self.error_s = own[:count], error[:count]
        self.expected_s = np.full(count, np.nan)
        """What each worker should spend by itself."""
        self.expected_error_s = np.zeros(count)
        self.noise = np.zeros(count)
        """Relative spread of comparable workers."""
        self.common = 1.0
        """By how much all have become slower."""
        self.alike = False
        """...they have done so by about the same factor."""
        self._expect(own, error)
        self.links = table.transfers()
        self.common_links = 1.0
        known = self.links.expected_s[self.links.by_healthy]
        if len(known) >= _COMMON_LINKS:
            ratios = self.links.now_s[self.links.by_healthy] / known
            self.common_links = max(1.0, _lower_quantile(ratios))

    @property
    def extra_s(self) -> float | None:
        """Seconds an iteration takes longer than in healthy times; None unknown."""
        return None if self.healthy_s is None else self.iteration_s - self.healthy_s

    @property
    def slow(self) -> bool:
        """As far as is known."""
        return self.healthy_s is None or self.iteration_s >= _SLOW * self.healthy_s

    def result(self, episode: str) -> Diagnosis:
        """All that can be said."""
        table = self.table
        ranks = tuple(sorted(table.rank[: table.count].tolist()))
        missing = tuple(sorted(table.mentioned - set(ranks)))
        suspects, notes = [], []
        if self.slow:
            suspects = self._workers()
            suspects += self._slow_links({rank for s in suspects for rank in s.ranks})
            if not suspects and self.extra_s is not None:
                suspects = self._uncompared()
        else:
            notes.append(
                f"iterations take {self.iteration_s:.4g} s, in healthy times "
                f"{self.healthy_s:.4g} s: nothing is slow now"
            )
        if missing:
            notes.append(f"no profile of ranks {_few(missing)}")
        unknown = tuple(sorted(table.rank[: table.count][~np.isfinite(self.own_s)].tolist()))
        if unknown and self.slow:
            notes.append(f"what ranks {_few(unknown)} spend by themselves cannot be seen")
        imbalance = self._imbalance()
        # what is uneven may be all there is to it where healthy times are not known
        blameless = self.timed or not imbalance
        told = not (suspects or missing or unknown or self.extra_s is None)
        everyone = told and self.slow and blameless
        if everyone:
            notes.append(self._everyone())
        suspects.sort(key=lambda s: (-s.score, s.ranks, s.peer_ranks))
        return Diagnosis(
            episode=episode,
            suspects=tuple(suspects[:_NAMED]),
            everyone=everyone,
            compute_alike=everyone and self._compute_alike,
            imbalance=imbalance,
            ranks=ranks,
            missing=missing,
            note="; ".join(notes),
        )

    # -- workers -------------------------------------------------------------------------------

    def _expect(self, own: Floats, error: Floats) -> None:
        """By healthy times where there are any, else by peers."""
        before = self.table.before()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.own_s / own[before]
        self.timed = bool((before >= 0).all())
        timed = (before >= 0) & np.isfinite(ratio) & (ratio > 0)
        if timed.any():
            sorted_ratios = np.sort(ratio[timed])
            self.common = _lower_quantile(sorted_ratios)
            upper = float(np.quantile(sorted_ratios, 1.0 - _COMMON_QUANTILE, method="higher"))
            self.alike = bool(timed.all()) and upper <= _ALIKE * self.common
            middle, spread = lower_median(sorted_ratios)
            self.expected_s[timed] = own[before][timed] * self.common
            self.expected_error_s[timed] = error[before][timed] * self.common
            self.noise[timed] = spread / middle
        ratios = []
        alike = [members for members in self._peers() if len(members) > 1]
        for members in alike:
            ascending = members[np.argsort(self.own_s[members])]
            middle, _ = lower_median(self.own_s[ascending])
            if middle > 0:
                ratios.append(self.own_s[members] / middle)
                rest = members[~timed[members]]
                self.expected_s[rest] = middle
                at = ascending[(len(ascending) - 1) // 2]
                self.expected_error_s[rest] = self.error_s[at]
        if ratios:
            _, spread = lower_median(np.sort(np.concatenate(ratios)))
            few = sum(map(len, ratios)) < _MANY
            self.noise[~timed] = max(spread, _USUAL_SPREAD if few else 0.0)

    def _peers(self) -> list[NDArray[np.int64]]:
        """Workers that compare, those apart whose own time is unknown."""
        known = np.flatnonzero(np.isfinite(self.own_s))
        roles = self.table.roles[known]
        order = known[np.argsort(roles, kind="stable")]
        edges = np.flatnonzero(np.diff(self.table.roles[order])) + 1
        return [part for part in np.split(order, edges) if len(part)]

    def _workers(self) -> list[Suspect]:
        table = self.table
        extra = self.own_s - self.expected_s
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.own_s / self.expected_s
            errors = extra / np.hypot(self.error_s, self.expected_error_s)
            sigmas = (ratio - 1.0) / self.noise
        late, late_known = self._lateness()
        far = _far(table.count)
        named = (
            (ratio >= _MIN_RATIO)
            & self._matters(extra)
            & ~(sigmas < far)  # nan or inf where there is no spread
            & ~(errors < min(_ERRORS, far))
            & (~late_known | (late >= _WAITED_FOR * extra))
        )
        blocked = table.iteration_s[: table.count] - self.own_s
        usual = float(np.nanmedian(blocked)) if named.any() else None
        suspects = []
        for index in np.flatnonzero(named).tolist():
            sure = min(_finite(errors[index]) / min(_ERRORS, far), _finite(sigmas[index]) / far)
            numbers = [
                _seconds("own time per iteration", self.own_s[index], self.expected_s[index]),
                _seconds("blocked per iteration", blocked[index], usual),
            ]
            if late_known[index]:
                numbers.append(_seconds("others wait for it per iteration", late[index]))
            suspects.append(
                Suspect(
                    what="compute",
                    ranks=(int(table.rank[index]),),
                    slowdown=float(ratio[index]),
                    extra_s=float(extra[index]),
                    score=self._share(extra[index]) * (1.0 - float(np.exp(-sure))),
                    measurements=tuple(numbers),
                )
            )
        return suspects

    def _lateness(self) -> tuple[Floats, NDArray[np.bool_]]:
        """(how much longer than usual others wait for each worker, whether that is known).

        Noise makes them wait for anybody: usual is what they do in healthy times, or for peers.
        """
        table, before = self.table, self.table.before()
        late, known = table.lateness, table.lateness_known
        usual = np.zeros(table.count)
        for members in self._peers():
            if len(members) > 1:
                usual[members] = lower_median(np.sort(late[members]))[0]
        usual = np.where(before >= 0, late[before], usual)
        return late[: table.count] - usual, known[: table.count]

    # -- links ---------------------------------------------------------------------------------

    def _slow_links(self, culprits: set[int]) -> list[Suspect]:
        """Groups and pairs; `culprits`: workers that are slow themselves."""
        links = self.links
        expected_s = links.expected_s * np.where(links.by_healthy, self.common_links, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = links.now_s / expected_s
            sigmas = (ratio - 1.0) / links.noise
            # what all links share is no part of what this one costs
            extra = links.extra_s * np.clip(
                (links.now_s - expected_s) / (links.now_s - links.expected_s), 0.0, 1.0
            )
        named = (ratio >= _MIN_RATIO) & self._matters(extra) & ~(sigmas < _far(len(ratio)))
        suspects = []
        for index in np.flatnonzero(named).tolist():
            share = self._share(extra[index])
            score = share * (1.0 - float(np.exp(-(ratio[index] - 1.0) / 0.3)))
            suspect = replace(
                self._link(index, links.now_s[index], expected_s[index]),
                slowdown=float(ratio[index]),
                extra_s=float(extra[index]),
                score=score,
            )
            if culprits & {*suspect.ranks, *suspect.peer_ranks}:
                if share < 0.5:
                    continue  # a slow worker also moves its data slowly
                suspect = replace(suspect, score=score / 2, note="one of its workers is slow")
            suspects.append(suspect)
        return _with_common_rank(suspects)

    def _link(self, index: int, now_s: float, expected_s: float | None = None) -> Suspect:
        """A group or a pair, not weighed yet."""
        links = self.links
        pair = links.src[index] >= 0
        group = int(links.group[index])
        return Suspect(
            what="link" if pair else "group",
            ranks=(int(links.src[index]),) if pair else self.table.groups[group],
            peer_ranks=(int(links.dst[index]),) if pair else (),
            label=self.table.labels[group],
            slowdown=1.0,
            extra_s=0.0,
            score=0.0,
            measurements=(_seconds("transfer per iteration", now_s, expected_s),),
        )

    # -- what cannot be compared -----------------------------------------------------------------

    def _uncompared(self) -> list[Suspect]:
        """What might be slow but has neither a healthy time nor a peer."""
        table, suspects = self.table, []
        alone = np.isnan(self.expected_s) & np.isfinite(self.own_s)
        if alone.any():
            usual = lower_median(np.sort(self.own_s[np.isfinite(self.own_s)]))[0]
            extra = self.own_s - usual
            late, _ = self._lateness()
            named = alone & (self.own_s >= _MIN_RATIO * usual) & (late >= _WAITED_FOR * extra)
            for index in np.flatnonzero(named & self._matters(extra)).tolist():
                own = _seconds("own time per iteration", self.own_s[index], usual)
                suspect = Suspect(
                    what="compute",
                    ranks=(int(table.rank[index]),),
                    slowdown=float(self.own_s[index] / usual),
                    extra_s=float(extra[index]),
                    score=0.2 * self._share(extra[index]),
                    measurements=(own,),
                    note=f"{UNCOMPARED}: no worker does the same work",
                )
                suspects.append(suspect)
        links = self.links
        waited = np.minimum(links.waited_s, links.now_s)
        for index in np.flatnonzero(np.isnan(links.expected_s) & self._matters(waited)).tolist():
            suspect = replace(
                self._link(index, links.now_s[index]),
                extra_s=float(waited[index]),
                score=0.1 * self._share(waited[index]),
                note=UNCOMPARED,
            )
            suspects.append(suspect)
        return suspects

    @property
    def _compute_alike(self) -> bool:
        return self.alike and self.common >= _SLOW > self.common_links

    def _everyone(self) -> str:
        count = self.table.count
        if self.common >= _SLOW:
            return (
                f"all {count} workers spend x{self.common:.2f} of their healthy time by themselves"
            )
        if self.common_links >= _SLOW:
            return f"transfers take x{self.common_links:.2f} of their healthy time in all groups"
        return "no worker is late more than the others: shared storage, pauses that go round, ..."

    def _imbalance(self) -> str:
        """The kind of work that takes longest, where that is by design as far as can be told."""
        before, own = self.table.before(), self._all_own_s
        usable = np.where(before >= 0, own[before], self.own_s)
        times, members = [], []
        for peers in self._peers():
            mine = usable[peers][np.isfinite(usable[peers])]
            if len(mine):
                times.append(lower_median(np.sort(mine))[0])
                members.append(peers)
        if len(times) < 2:
            return ""
        worst = int(np.argmax(times))
        usual = lower_median(np.sort(np.delete(times, worst)))[0]
        if usual <= 0 or times[worst] < _MIN_RATIO * usual:
            return ""
        return f"{self._work_of(members[worst])} x{times[worst] / usual:.2f} of what others do"

    def _work_of(self, members: NDArray[np.int64]) -> str:
        table = self.table
        stage, stages = int(table.stage[members[0]]), int(table.stages[members[0]])
        if stage >= 0:
            which = {0: "the first stage", stages - 1: "the last stage"}
            return f"{which.get(stage, f'stage {stage} of {stages}')} computes"
        ranks = sorted(table.rank[members].tolist())
        device = table.profiles[members[0]].device
        return f"ranks {_few(ranks)}{f' ({device})' * bool(device)} compute"

    # -- weights ---------------------------------------------------------------------------------

    def _matters(self, extra_s: Floats) -> NDArray[np.bool_]:
        """It takes so much longer that it explains a part of the job's slowness."""
        least_s = _MIN_EXTRA * self.iteration_s
        if self.extra_s is not None:
            least_s = max(least_s, _MIN_SHARE * self.extra_s)
        return np.asarray(extra_s >= least_s)

    def _share(self, extra_s: float) -> float:
        """Of the job's slowness, or where that is unknown of an iteration."""
        whole = self.extra_s if self.extra_s else self.iteration_s
        return float(min(1.0, extra_s / whole))


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)


def _with_common_rank(suspects: list[Suspect]) -> list[Suspect]:
    """Several slow links that share one rank point to its host."""
    if len(suspects) < 2:
        return suspects
    ends = [{*s.ranks, *s.peer_ranks} for s in suspects]
    common = sorted(set.intersection(*ends))
    if len(common) != 1:
        return suspects
    text = f"rank {common[0]} is an end of all {len(suspects)} slow links"
    return [replace(s, note="; ".join(filter(None, (s.note, text)))) for s in suspects]


def _lower_quantile(values: Floats) -> float:
    return float(np.quantile(values, _COMMON_QUANTILE, method="lower"))


def _far(count: int) -> float:
    """Sigmas from which one of so many stands out."""
    return min(_MOST_SIGMAS, _FEW_SIGMAS + math.sqrt(2.0 * math.log(max(1, count))))


def _finite(value: float) -> float:
    """A distance of which nothing is known counts as large."""
    return float(value) if np.isfinite(value) else 1e9


def _seconds(what: str, value: float, expected: float | None = None) -> Measurement:
    usual = expected if expected is not None and np.isfinite(expected) else None
    return Measurement(what=what, value=float(value), unit="s", expected=usual)
