"""A campaign's records -> the figures of a field study (arXiv 2410.12588, table 1), and each node's
history. Pure.

In: `ProbeRecord`s. Out: a `ProbeStudy`: per size how many probes were hit, by what, for how long,
at what cost; and which nodes are named again and again, more often than chance would have it.

    SizeRow(nodes=4, jobs=107, hit=43, causes=(("network congestion", 42), ("CPU contention", 1)),
            mean_duration_s=1440.0, mean_jct_increase_pct=15.45, …)
    NodeHistory(node="gpu-17", probes=31, slow=9, named=8, spells=3, chance=0.0004, …)

A job of the study is an attempt that measured enough: one that trained so far that it had something
to compare with, and finished, or was told to end after half its training. A node is compared with
all others by Fisher's exact test: how likely would at least so many of the culprits found be this
one, were all nodes alike? As many nodes are tested, the likelihoods are corrected for that (Holm
1979). Probes that follow closely may see one and the same trouble: `spells` counts how often a node
was named anew after probes that did not name it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from failslow.probe.result import ProbeResult
from failslow.probe.store_parts import ProbeRecord

__all__ = ["NodeHistory", "ProbeStudy", "SizeRow", "StudyJob", "study_probes"]

_ENOUGH = 0.5
_LIKELY = 0.05
"""A node as often named as chance alone would do it less often than that is a candidate..."""
_FEWEST = 2
"""...if it was named by more than one probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJob:
    """One probe that measured."""

    probe: str
    attempt: int
    partial: bool
    """It was told to end before its time."""
    result: ProbeResult

    @property
    def hit(self) -> bool:
        """A fail-slow was found."""
        return self.result.is_slow

    @property
    def cause(self) -> str:
        """Of one that was hit."""
        return self.result.cause or "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """Probes of one size, or of all. Means are over those that were hit; None without any."""

    nodes: int | None
    """Of each; None: of all sizes."""
    jobs: int
    hit: int
    causes: tuple[tuple[str, int], ...]
    """(cause, jobs), the most frequent first."""
    mean_duration_s: float | None
    """How long a job was slow."""
    mean_jct_increase_pct: float | None
    worst_slowdown: float | None
    preempted: int
    """Attempts that others than the campaign told to end before their time; one that had measured
    enough is among `jobs`..."""
    failed: int
    """...and attempts that could not train."""

    @property
    def hit_pct(self) -> float | None:
        """Share of the jobs, in percent."""
        return 100.0 * self.hit / self.jobs if self.jobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """What the probes say of one node."""

    node: str
    probes: int
    """It took part in."""
    slow: int
    """Of these, were hit, whoever was at fault."""
    named: int
    """Of these, name it as a culprit; of a slow link both ends are."""
    spells: int
    """Times it was named anew, after a probe with it that did not name it."""
    causes: tuple[tuple[str, int], ...]
    """(cause, probes) where it is named."""
    worst_slowdown: float | None
    last_named_t: float | None
    """Epoch seconds at which the last probe that names it ended."""
    chance: float | None
    """Likelihood, corrected, of being named so often by chance; None: no other node to compare."""

    @property
    def is_drain_candidate(self) -> bool:
        """Named by several probes, more often than chance would explain."""
        return self.named >= _FEWEST and self.chance is not None and self.chance < _LIKELY


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStudy:
    """A store, studied."""

    sizes: tuple[SizeRow, ...]
    """Smallest first."""
    total: SizeRow
    nodes: tuple[NodeHistory, ...]
    """Drain candidates first, then by how often they are named."""
    jobs: tuple[StudyJob, ...]
    """In the order they began."""

    @property
    def drain_candidates(self) -> tuple[str, ...]:
        """Names."""
        return tuple(node.node for node in self.nodes if node.is_drain_candidate)


def study_probes(records: Iterable[ProbeRecord], *, duration_s: float) -> ProbeStudy:
    """The study over `records`. duration_s: of training, of one that finishes."""
    records = list(records)
    jobs = [
        StudyJob(probe=r.probe, attempt=r.attempt, partial=r.ending != "finished", result=r.result)
        for r in records
        if r.result is not None and _measured(r, r.result, duration_s)
    ]
    jobs.sort(key=lambda job: (job.result.begin_t, job.probe))
    of_size: dict[int, list[ProbeRecord]] = defaultdict(list)
    for record in records:
        of_size[record.wanted_nodes].append(record)
    return ProbeStudy(
        sizes=tuple(
            _row(size, of_size[size], [job for job in jobs if len(job.result.nodes) == size])
            for size in sorted(of_size)
        ),
        total=_row(None, records, jobs),
        nodes=_nodes(jobs),
        jobs=tuple(jobs),
    )


def _measured(record: ProbeRecord, result: ProbeResult, duration_s: float) -> bool:
    if result.reference_iteration_s is None and result.healthy_iteration_s is None:
        return False  # too few iterations to say anything: that is not "healthy"
    if record.ending == "finished":
        return True
    measured_s = min(result.duration_s, result.trained_s)  # start-up measures nothing
    return result.state == "preempted" and measured_s >= _ENOUGH * duration_s


def _row(nodes: int | None, records: Sequence[ProbeRecord], jobs: Sequence[StudyJob]) -> SizeRow:
    hit = [job for job in jobs if job.hit]
    endings = Counter(record.ending for record in records)
    return SizeRow(
        nodes=nodes,
        jobs=len(jobs),
        hit=len(hit),
        causes=_ranked(job.cause for job in hit),
        mean_duration_s=fmean(job.result.slow_s for job in hit) if hit else None,
        mean_jct_increase_pct=(
            100.0 * fmean(job.result.jct_increase_share for job in hit) if hit else None
        ),
        worst_slowdown=max((job.result.slowdown for job in hit), default=None),
        preempted=endings["preempted"],
        failed=endings["failed"],
    )


def _ranked(causes: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(causes).items(), key=lambda pair: (-pair[1], pair[0])))


def _nodes(jobs: Sequence[StudyJob]) -> tuple[NodeHistory, ...]:
    """jobs: in the order they began."""
    of_node: dict[str, list[StudyJob]] = defaultdict(list)
    for job in jobs:
        for node in job.result.known_nodes:
            of_node[node].append(job)
    names = sorted(of_node)
    counts = [
        (sum(_names(job, node) for job in of_node[node]), len(of_node[node])) for node in names
    ]
    found = [
        _history(node, of_node[node], chance)
        for node, chance in zip(names, _chances(counts), strict=True)
    ]
    found.sort(key=lambda h: (not h.is_drain_candidate, -h.named, -h.slow, h.node))
    return tuple(found)


def _names(job: StudyJob, node: str) -> bool:
    return job.hit and node in job.result.culprit_nodes


def _history(node: str, jobs: Sequence[StudyJob], chance: float | None) -> NodeHistory:
    named = [job for job in jobs if _names(job, node)]
    is_named = [_names(job, node) for job in jobs]
    return NodeHistory(
        node=node,
        probes=len(jobs),
        slow=sum(job.hit for job in jobs),
        named=len(named),
        spells=sum(now and not before for before, now in pairwise([False, *is_named])),
        causes=_ranked(job.cause for job in named),
        worst_slowdown=max((job.result.slowdown for job in named), default=None),
        last_named_t=max((job.result.end_t for job in named), default=None),
        chance=chance,
    )


def _chances(counts: Sequence[tuple[int, int]]) -> list[float | None]:
    """For each (named, probes): how likely so many or more, were all nodes alike; corrected.

    One-sided Fisher, node against all others; Holm's correction over the nodes.
    """
    if len(counts) < 2:
        return [None] * len(counts)
    import numpy as np
    from scipy.stats import hypergeom

    named, probes = np.array(counts, dtype=np.int64).T
    single = hypergeom.sf(named - 1, probes.sum(), named.sum(), probes)
    order = np.argsort(single, kind="stable")
    corrected = np.empty(len(counts))
    factors = np.arange(len(counts), 0, -1)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(single[order] * factors))
    return [float(value) for value in corrected]
