"""The planners of decide: how fast, how near the best, how far from the clairvoyant.

    $ python benchmarks/planners.py
    S2  512 replicas, one slow replica  0.298 ms  (0.631)  limit 1
    S2  512 replicas, all different  0.3103 ms  (0.562)  limit 1
    S2  100,000 replicas, one slow replica  24.41 ms  (33.8)  limit 100
    S2  100,000 replicas, all different  29.11 ms  (42.3)  limit 100
    S2  changes of plan in 10,000 measurements of ±1.2 %  1 changes  limit 1
    S3  8 nodes, all 40,320 placements  49.37 ms  (65.7)
    S3  1,024 nodes, 12 stragglers, 12 congested links  878.6 ms  (892)  limit 10000
    S3  local search behind the best, 300 small jobs: mean (worst)  0 %  (0)  limit 1
    S3  8 nodes of 2 blocks, 24 jobs: exact  100 %
    S3  8 nodes of 2 blocks, 24 jobs  13.39 ms  (287)
    S3  8 nodes of 2 blocks, 24 jobs: what branch and bound adds, mean (most)  0 %  (0)
    S3  8 nodes of 4 blocks, 24 jobs: exact  87.5 %
    S3  8 nodes of 4 blocks, 24 jobs  33.27 ms  (1.03e+03)
    S3  8 nodes of 4 blocks, 24 jobs: what branch and bound adds, mean (most)  0.6314 %  (11.8)
    S3  a ring link of four stages at a quarter of its speed  1.488 x faster  limit 1.23
    S3  four stragglers into one stage: x1.68 becomes  1.334 x healthy  limit 1.4
    rental, two levels: mean worst case (worst of 2,000)  2 x best  (2)  limit 2
    rental, S1 to S4, additive costs: mean worst case (worst of 2,000)  2 x best  (2)  limit 2
    rental, S1 to S4, full prices: mean worst case (worst of 2,000)  2.663 x best  (3.98)  limit 4
    rental, the default costs and a slowdown of 1.4: worst case  2.027 x best  limit 4
    learned, 10 min, cost 600 s: x1.126 of the best becomes  1.073 x best  (2.24)  limit 3
    learned, 24 min, cost 15 s: x1.149 of the best becomes  1.075 x best  (3)  limit 3
    learned, 24 min, cost 600 s: x1.283 of the best becomes  1.221 x best  (2.25)  limit 3
    learned, 72 min, cost 600 s: x1.444 of the best becomes  1.402 x best  (3)  limit 3
    policy, a verdict in a job of 64 blocks, plans included  3.196 ms
    policy, a tick while a fault is on  15.97 us

Times are processor time of one core: the median, and the slowest in brackets. Ratios are exact for
each case; the worst of many random cases is shown beside the proved bound. Those figures are of an
AMD EPYC core, columns closed up.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: the limits are of one core

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from failslow.config import DecideConfig
from failslow.decide import (
    Ladder,
    LayoutPlanner,
    Pace,
    Policy,
    Tick,
    TopologyModel,
    allocate,
    best_placement,
    choose_theta,
    even_split,
    plan_topology,
    reallocate,
)
from failslow.records import Finding, JobFacts, Verdict
from failslow.stats.survival import SurvivalCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number beside what it is held against."""

    what: str
    value: float
    worst: float | None
    limit: float | None
    unit: str


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure the planners: speed, gap to the best, ratio to the clairvoyant.",
        epilog="example: python benchmarks/planners.py --cases 200 --json",
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each time")
    parser.add_argument("--cases", type=int, default=2000, help="random cases of each ratio")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.cases) < 1:
        parser.error("--repeats and --cases must be at least 1")

    figures = [
        *splitting(arguments.repeats, arguments.seed),
        *placing(arguments.repeats, arguments.cases, arguments.seed),
        *renting(arguments.cases, arguments.seed),
        *learning(arguments.seed),
        *deciding(),
    ]
    if arguments.json:
        found = {"numpy": np.__version__, "figures": [asdict(figure) for figure in figures]}
        print(json.dumps(found, indent=1))
        return
    for figure in figures:
        worst = "" if figure.worst is None else f"({figure.worst:.3g})"
        limit = "" if figure.limit is None else f"limit {figure.limit:g}"
        print(f"{figure.what:68} {figure.value:8.4g} {figure.unit:10} {worst:9} {limit}".rstrip())


# -- S2 ------------------------------------------------------------------------------------------


def splitting(repeats: int, seed: int) -> Iterator[Figure]:
    """The exact allocation, and how calm it stays."""
    rng = np.random.default_rng(seed)
    for replicas, limit_ms in ((512, 1.0), (100_000, 100.0)):
        for kind in ("one slow replica", "all different"):
            slope = 0.1 * (1 + 0.01 * rng.standard_normal(replicas))
            slope[replicas // 2] *= 2
            if kind == "all different":
                slope = rng.uniform(0.01, 1.0, replicas)
            fixed = rng.uniform(0.0, 0.3, replicas)
            split = partial(allocate, fixed, slope, 8 * replicas)
            yield timed(f"S2  {replicas:,} replicas, {kind}", split, repeats, limit_ms)
    counts, changes = even_split(128, 16), 0
    truth = np.ones(16)
    truth[3] = 1.8
    for _ in range(10_000):
        found = reallocate(counts, np.zeros(16), truth * rng.uniform(0.988, 1.012, 16))
        changes += found.counts != counts
        counts = found.counts
    yield Figure(
        what="S2  changes of plan in 10,000 measurements of ±1.2 %",
        value=changes,
        worst=None,
        limit=1,
        unit="changes",
    )


# -- S3 ------------------------------------------------------------------------------------------


def placing(repeats: int, cases: int, seed: int) -> Iterator[Figure]:
    """The topology search."""
    rng = np.random.default_rng(seed)
    eight = random_job(rng, 4, 2, stragglers=8, links=3)
    yield timed("S3  8 nodes, all 40,320 placements", partial(search, eight), repeats, None)
    large = random_job(rng, 16, 64, stragglers=12, links=12)
    few = max(1, repeats // 5)
    yield timed(
        "S3  1,024 nodes, 12 stragglers, 12 congested links", partial(search, large), few, 1e4
    )
    gaps = []
    shapes = ((2, 4, 1), (4, 2, 1), (4, 2, 2), (2, 4, 4), (2, 3, 1), (8, 1, 1))
    for number in range(min(cases, 300)):
        pp, dp, per_host = shapes[number % len(shapes)]
        slow, congested = rng.integers(0, 4, 2)
        job = random_job(rng, pp, dp, per_host, stragglers=int(slow), links=int(congested))
        job = replace(job, stage_s=rng.uniform(0.08, 0.12, pp))
        start = in_order(job)
        local, _ = best_placement(job, start, exact=False, seed=number)
        exact, _ = best_placement(job, start, exact=True)
        gaps.append(100 * (job.predict(local) / job.predict(exact) - 1))
    yield Figure(
        what=f"S3  local search behind the best, {len(gaps)} small jobs: mean (worst)",
        value=statistics.mean(gaps),
        worst=max(gaps),
        limit=1,
        unit="%",
    )
    for per_host, grids in ((2, ((4, 4), (2, 8), (8, 2))), (4, ((4, 8), (8, 4)))):
        yield from proving(np.random.default_rng(seed), per_host, grids, min(cases, 24))
    congested = job_of(4, 2, ring_share=0.2)
    congested.link[2, 3] = 4.0
    found = plan_topology(congested, in_order(congested))
    yield Figure(
        what="S3  a ring link of four stages at a quarter of its speed",
        value=found.before_s / found.after_s,
        worst=None,
        limit=1.23,
        unit="x faster",
    )
    spread = job_of(4, 4, microbatches=3, ring_share=0.0)
    healthy_s = spread.predict(in_order(spread))
    spread.slowdown[in_order(spread)[:, 0]] = 1.7
    found = plan_topology(spread, in_order(spread))
    yield Figure(
        what=f"S3  four stragglers into one stage: x{found.before_s / healthy_s:.2f} becomes",
        value=found.after_s / healthy_s,
        worst=None,
        limit=1.4,
        unit="x healthy",
    )


def proving(
    rng: np.random.Generator, per_host: int, grids: tuple[tuple[int, int], ...], cases: int
) -> Iterator[Figure]:
    """Eight nodes of several blocks: how often the search is exact, and how long it takes."""
    took_ms, gaps, proved = [], [], 0
    for number in range(cases):
        slow, congested = rng.integers(0, 5, 2)
        pp, dp = grids[number % len(grids)]
        job = random_job(rng, pp, dp, per_host, stragglers=int(slow), links=int(congested))
        job = replace(job, stage_s=rng.uniform(0.08, 0.12, pp), dp_s=rng.uniform(0.1, 0.6, pp))
        start = time.process_time()
        found, exact = best_placement(job, in_order(job), seed=number)
        took_ms.append(1e3 * (time.process_time() - start))
        local, _ = best_placement(job, in_order(job), exact=False, seed=number)
        gaps.append(100 * (job.predict(local) / job.predict(found) - 1))
        proved += exact
    what = f"S3  8 nodes of {per_host} blocks, {cases} jobs"
    share = 100 * proved / cases
    yield Figure(what=f"{what}: exact", value=share, worst=None, limit=None, unit="%")
    yield Figure(
        what=what, value=statistics.median(took_ms), worst=max(took_ms), limit=None, unit="ms"
    )
    yield Figure(
        what=f"{what}: what branch and bound adds, mean (most)",
        value=statistics.mean(gaps),
        worst=max(gaps),
        limit=None,
        unit="%",
    )


def job_of(
    pp: int, dp: int, per_host: int = 1, *, microbatches: int = 8, ring_share: float = 0.3
) -> TopologyModel:
    """A healthy job: stages of 0.1 s, rings that take `ring_share` of the pipeline's time."""
    hosts = pp * dp // per_host
    link = np.ones((hosts, hosts))
    np.fill_diagonal(link, 0.1)
    return TopologyModel(
        stage_s=[0.1] * pp,
        microbatches=microbatches,
        slowdown=np.ones(pp * dp),
        host=np.arange(pp * dp) // per_host,
        link=link,
        dp_s=[ring_share * 0.1 * (microbatches + pp - 1)] * pp,
        pp_s=0.004,
    )


def random_job(
    rng: np.random.Generator, pp: int, dp: int, per_host: int = 1, *, stragglers: int, links: int
) -> TopologyModel:
    """Stragglers anywhere; congested links anywhere and among those the rings use."""
    job = job_of(pp, dp, per_host)
    slow = rng.choice(pp * dp, stragglers, replace=False)
    job.slowdown[slow] = rng.uniform(1.2, 1.8, len(slow))
    for number in range(links):
        row, column = rng.integers(pp), rng.integers(dp)
        here, there = in_order(job)[row, column], in_order(job)[row, (column + 1) % dp]
        if number % 2:
            here, there = rng.integers(pp * dp, size=2)
        if job.host[here] != job.host[there]:
            job.link[job.host[here], job.host[there]] = rng.uniform(1.5, 6.0)
    return job


def in_order(job: TopologyModel) -> np.ndarray:
    """Block n at place n."""
    return np.arange(job.pp * job.dp).reshape(job.pp, job.dp)


def search(job: TopologyModel) -> object:
    """One search from the placement in order."""
    return plan_topology(job, in_order(job))


# -- the policy ----------------------------------------------------------------------------------


def renting(cases: int, seed: int) -> Iterator[Figure]:
    """Ski rental against the clairvoyant."""
    rng = np.random.default_rng(seed)
    for what, paid, additive, bound in (
        ("two levels", 1, False, 2.0),
        ("S1 to S4, additive costs", 3, True, 2.0),
        ("S1 to S4, full prices", 3, False, 4.0),
    ):
        ratios = []
        for _ in range(cases):
            spread = rng.choice([0.1, 1.0, 4.0])
            cost_s = (0.0, *np.exp(np.sort(rng.uniform(0.0, spread, paid))))
            rate = (1.0, *np.sort(np.exp(rng.uniform(-8.0, 0.0, paid)))[::-1])
            ratios.append(Ladder(cost_s=cost_s, rate=rate, additive=additive).worst_ratio())
        yield Figure(
            what=f"rental, {what}: mean worst case (worst of {cases:,})",
            value=statistics.mean(ratios),
            worst=max(ratios),
            limit=bound,
            unit="x best",
        )
    config = DecideConfig()
    usual = Ladder(
        cost_s=(
            0.0,
            config.redistribute_cost_s,
            config.topology_cost_s,
            config.restart_cost_s,
        ),
        rate=(1 - 1 / 1.4, 1 - 1 / 1.12, 1 - 1 / 1.06, 0.0),
    )
    yield Figure(
        what="rental, the default costs and a slowdown of 1.4: worst case",
        value=usual.worst_ratio(),
        worst=None,
        limit=4.0,
        unit="x best",
    )


def learning(seed: int) -> Iterator[Figure]:
    """Ski rental that has seen 200 durations like those of the field study (means of minutes)."""
    rng = np.random.default_rng(seed)
    trust, pasts = 0.5, 30
    for mean_min, cost_s in ((10, 600.0), (24, 15.0), (24, 600.0), (72, 600.0)):
        ladder = Ladder(cost_s=(0.0, cost_s), rate=(1 - 1 / 1.4, 1 - 1 / 1.05))

        def durations(count: int, mean_s: float = 60.0 * mean_min) -> np.ndarray:
            return rng.lognormal(np.log(mean_s) - 0.5, 1.0, count)

        future = durations(20_000)
        best_s = float(np.mean(ladder.clairvoyant_s(future)))
        plain = float(np.mean(ladder.online_s(future))) / best_s
        learned, worst = [], []
        for _ in range(pasts):
            theta = choose_theta(ladder, SurvivalCurve.fit(durations(200)), trust=trust)
            learned.append(float(np.mean(ladder.online_s(future, theta))) / best_s)
            worst.append(ladder.worst_ratio(theta))
        yield Figure(
            what=f"learned, {mean_min} min, cost {cost_s:g} s: x{plain:.3f} of the best becomes",
            value=statistics.mean(learned),
            worst=max(worst),
            limit=1 + 1 / trust,
            unit="x best",
        )


def deciding() -> Iterator[Figure]:
    """What an event costs the controller."""
    config = DecideConfig(mode="auto", redistribute_cost_s=1e9, topology_cost_s=1e9)
    facts = JobFacts(pp=4, dp=16, microbatches=128, stage_s=(0.1,) * 4, dp_s=0.2, pp_s=0.002)
    policy = Policy(LayoutPlanner(facts, config), config)
    policy.update(Pace(episode="e1", slowdown=1.4, lost_s=0.0), 0.0)
    culprit = Finding(what="device", slowdown=1.5, ranks=(5,), host="gpu-5")
    start = time.process_time()
    policy.update(Verdict(episode="e1", findings=(culprit,)), 1.0)
    yield Figure(
        what="policy, a verdict in a job of 64 blocks, plans included",
        value=1e3 * (time.process_time() - start),
        worst=None,
        limit=None,
        unit="ms",
    )
    start = time.process_time()
    for second in range(2000):
        policy.update(Tick(), 2.0 + second)
    yield Figure(
        what="policy, a tick while a fault is on",
        value=1e6 * (time.process_time() - start) / 2000,
        worst=None,
        limit=None,
        unit="us",
    )


def timed(what: str, work: Callable[[], object], repeats: int, limit_ms: float | None) -> Figure:
    """Milliseconds of processor time: median and slowest."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - start))
    return Figure(
        what=what, value=statistics.median(taken), worst=max(taken), limit=limit_ms, unit="ms"
    )


if __name__ == "__main__":
    main()
