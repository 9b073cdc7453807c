"""Prometheus metrics of one job, served by the node's agent.

In: what goes into the journal, `Metrics.observe` taking the same arguments as
`JournalWriter.append`, and the counts of each ring. Out: `http://127.0.0.1:PORT/metrics`:

    failslow_iteration_seconds{job="pretrain7",rank="3",node="gpu-17"} 0.571
    failslow_slowdown_ratio{job="pretrain7"} 1.39

`docs/metrics.md` lists every name. A rank is a label, so an agent shows its own workers and no
more than `max_workers`; nothing else that a job can choose becomes one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import failslow
from failslow.journal import JournalEntry
from failslow.records import Episode, StepSample
from failslow.runtime.scrape import MetricsServer

__all__ = ["PORT_VARIABLE", "TROUBLES", "Metrics"]

PORT_VARIABLE = "FAILSLOW_METRICS_PORT"
"""Where `Metrics.serve` listens; unset: nowhere."""
TROUBLES = (
    "agent",
    "bus",
    "clock",
    "controller",
    "coverage",
    "job",
    "messages",
    "names",
    "ring",
    "token",
    "tracker",
    "worker",
)
"""Values of the label `what`: what a health record can be about; others are not shown."""
_EPISODES_KEPT = 64
_log = logging.getLogger("failslow")


@dataclass(slots=True)
class _Worker:
    node: str
    iteration_s: float | None = None
    compute_s: float | None = None
    iterations: int = 0
    last_t: float | None = None
    records: int = 0
    dropped: int = 0
    faults: int = 0


@dataclass(slots=True)
class _Job:
    """What is known of the whole job; None: nothing, and nothing is shown."""

    seen: bool = False
    healthy_s: float | None = None
    suspected: bool = False
    active: str = ""
    """Id of the episode that is on."""
    slowdown: float = 1.0


class Metrics:
    """The numbers of one job as this process knows them. Safe to use from several threads.

    job, node: label values; node is where a worker runs unless its record says otherwise.
    """

    def __init__(self, *, job: str, node: str, max_workers: int = 1024) -> None:
        self._name, self._node, self._max_workers = job, node, max_workers
        self._lock = threading.Lock()
        self._workers: dict[int, _Worker] = {}
        self._refused: set[int] = set()
        self._job = _Job()
        self._episodes: set[str] = set()
        self._lost_s: dict[tuple[str, int], float] = {}
        """Of the latest stretches of episodes; older ones are summed in `_settled_s`."""
        self._settled_s = self._shown_lost_s = 0.0
        self._bad: dict[str, set[tuple[object, object]]] = {}
        """What of the monitoring is wrong: for which (node, rank)."""
        self.registry = CollectorRegistry()
        """What is served; further collectors of the process may be registered in it."""
        self.registry.register(_JobCollector(self))
        ProcessCollector(namespace="failslow_agent", registry=self.registry)

    def observe(
        self,
        record: Any,
        *,
        t: float | None = None,
        kind: str | None = None,
        **tags: Any,
    ) -> None:
        """Take one journal record; those of a kind it does not know change nothing.

        A `JournalEntry` brings its own t, kind and tags. A `StepSample` is that of the worker its
        tag `rank` names; of the job's own only the tag `healthy_s` counts. t: epoch seconds.
        """
        if isinstance(record, JournalEntry):
            self.observe(record.record, t=record.t, kind=record.kind, **record.tags)
            return
        with self._lock:
            if isinstance(record, StepSample):
                if tags.get("rank") is None:
                    self._take_healthy(tags)
                else:
                    self._take_step(record, t, int(tags["rank"]), tags.get("node"))
            elif isinstance(record, Episode):
                self._take_episode(record, tags)
            elif isinstance(record, Mapping) and kind == "suspicion":
                self._job.seen = True
                self._job.suspected = record.get("event") == "suspected"
                self._take_healthy(record)
            elif isinstance(record, Mapping) and kind == "health":
                self._take_health(record)

    def ring(
        self, rank: int, *, records: int, dropped: int, faults: int = 0, node: str | None = None
    ) -> None:
        """Counts of a worker's ring so far: records read, overwritten unread, lost to our faults.

        They restart at 0 with the worker's process, as Prometheus expects of a counter.
        """
        with self._lock:
            worker = self._worker(rank, node)
            if worker is not None:
                worker.records, worker.dropped, worker.faults = records, dropped, faults

    def forget(self, rank: int) -> None:
        """The worker has ended: its series end too."""
        with self._lock:
            self._workers.pop(rank, None)

    def serve(self, port: int | None = None, address: str = "127.0.0.1") -> MetricsServer | None:
        """Listen on `address`:`port` in a daemon thread; port 0 takes a free one.

        port None: $FAILSLOW_METRICS_PORT; where that is unset too, nothing happens. A port that
        cannot be had is one warning in the log of "failslow", and None: a job is watched all the
        same.
        """
        if port is None:
            text = os.environ.get(PORT_VARIABLE, "").strip()
            if not text:
                return None
            if not text.isdecimal() or int(text) > 65535:
                _log.warning(
                    "failslow: no metrics: %s=%s is no port; use 9464", PORT_VARIABLE, text
                )
                return None
            port = int(text)
        try:
            return MetricsServer(address, port, self.registry)
        except OSError as error:
            _log.warning(
                "failslow: no metrics on %s port %d: %s; set %s to a free port, or to 0",
                address,
                port,
                error.strerror or error,
                PORT_VARIABLE,
            )
            return None

    # -- what comes in -----------------------------------------------------------------------------

    def _worker(self, rank: int, node: str | None) -> _Worker | None:
        worker = self._workers.get(rank)
        if worker is None:
            if len(self._workers) >= self._max_workers:
                self._refused.add(rank)
                return None
            worker = self._workers[rank] = _Worker(node or self._node)
        worker.node = node or worker.node
        return worker

    def _take_step(self, sample: StepSample, t: float | None, rank: int, node: str | None) -> None:
        worker = self._worker(rank, node)
        if worker is not None:
            worker.iteration_s, worker.compute_s = sample.duration_s, sample.compute_s
            worker.iterations += sample.iterations
            worker.last_t = t

    def _take_healthy(self, source: Mapping[str, Any]) -> None:
        healthy_s = source.get("healthy_s", source.get("baseline_s"))
        if isinstance(healthy_s, (int, float)):
            self._job.healthy_s = float(healthy_s)

    def _take_episode(self, episode: Episode, tags: Mapping[str, Any]) -> None:
        job, id = self._job, str(tags.get("id", episode.start_step))
        job.seen, job.healthy_s = True, episode.baseline_s
        if episode.kind != "fail_slow":
            return
        self._episodes.add(id)
        self._lost_s[id, episode.start_step] = episode.lost_s
        while len(self._lost_s) > _EPISODES_KEPT:
            self._settled_s += self._lost_s.pop(next(iter(self._lost_s)))
        over = episode.end_step is not None or tags.get("event") in ("relief", "abandoned")
        job.suspected, job.active = not over, "" if over else id
        job.slowdown = 1.0 if over else float(tags.get("slowdown_now", episode.slowdown))

    def _take_health(self, record: Mapping[str, Any]) -> None:
        self._job.seen = True
        self._take_healthy(record)
        if record.get("event") in ("started", "resumed"):
            self._bad.clear()  # another controller, which finds its own
        where = (record.get("node"), record.get("rank"))
        bad = self._bad.setdefault(str(record.get("what")), set())
        if record.get("ok", True):
            bad.discard(where)
        else:
            bad.add(where)

    # -- what goes out -----------------------------------------------------------------------------

    def _collect(self) -> Iterator[Metric]:
        with self._lock:
            yield _gauge(
                "failslow_build_info",
                "Always 1; the version of failslow is its label.",
                ["version"],
                [([failslow.__version__], 1.0)],
            )
            yield from self._collect_workers()
            if self._job.seen:
                yield from self._collect_job()

    def _collect_workers(self) -> Iterator[Metric]:
        labels = ["job", "rank", "node"]
        known = [
            ([self._name, str(rank), worker.node], worker)
            for rank, worker in sorted(self._workers.items())
        ]
        for name, text, gauge in _WORKER_GAUGES:
            yield _gauge(name, text, labels, [(where, gauge(w)) for where, w in known])
        for name, text, count in _WORKER_COUNTERS:
            yield _counter(name, text, labels, [(where, count(w)) for where, w in known])
        yield _gauge(
            "failslow_workers_left_out",
            "Workers beyond the most that are shown.",
            ["job"],
            [([self._name], len(self._refused))],
        )

    def _collect_job(self) -> Iterator[Metric]:
        job, where = self._job, [self._name]
        # a counter never falls, though an episode may be taken back
        lost_s = self._settled_s + sum(self._lost_s.values())
        self._shown_lost_s = max(self._shown_lost_s, lost_s)
        for name, text, value in (
            ("failslow_healthy_iteration_seconds", "Iteration time when healthy.", job.healthy_s),
            (
                "failslow_slowdown_ratio",
                "Iteration time over healthy; 1: no episode.",
                job.slowdown,
            ),
            ("failslow_suspected", "1 while a fail-slow is suspected or on.", job.suspected),
            ("failslow_episode_active", "1 while a fail-slow is on.", bool(job.active)),
        ):
            yield _gauge(name, text, ["job"], [(where, value)])
        for name, text, count in (
            ("failslow_episodes_total", "Fail-slows so far.", len(self._episodes)),
            ("failslow_lost_seconds_total", "Time lost to fail-slows.", self._shown_lost_s),
        ):
            yield _counter(name, text, ["job"], [(where, count)])
        bad = {what: len(places) for what, places in self._bad.items()}
        blind = any(count for what, count in bad.items() if what != "job")
        yield _gauge(
            "failslow_monitoring_healthy",
            "0 while something of the job cannot be seen, else 1.",
            ["job"],
            [(where, not blind)],
        )
        yield _gauge(
            "failslow_monitoring_troubles",
            "Nodes or workers with this trouble; job: no iteration ends.",
            ["job", "what"],
            [([self._name, what], bad.get(what, 0)) for what in TROUBLES],
        )


_WORKER_GAUGES: tuple[tuple[str, str, Callable[[_Worker], float | None]], ...] = (
    ("failslow_iteration_seconds", "Last iteration of the worker.", lambda w: w.iteration_s),
    (
        "failslow_compute_seconds",
        "Time of its last iteration in which the worker was in no collective.",
        lambda w: w.compute_s,
    ),
    (
        "failslow_last_iteration_timestamp_seconds",
        "When its last iteration ended, seconds since 1970.",
        lambda w: w.last_t,
    ),
)
_WORKER_COUNTERS: tuple[tuple[str, str, Callable[[_Worker], float]], ...] = (
    ("failslow_iterations_total", "Iterations of the worker.", lambda w: w.iterations),
    ("failslow_records_total", "Collectives recorded and read.", lambda w: w.records),
    (
        "failslow_records_dropped_total",
        "Records overwritten before they were read.",
        lambda w: w.dropped,
    ),
    ("failslow_capture_faults_total", "Records lost to faults of failslow.", lambda w: w.faults),
)


class _JobCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return list(self._metrics._collect())


Values = Iterable[tuple[list[str], float | None]]


def _gauge(name: str, text: str, labels: list[str], values: Values) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    return _filled(family, values)


def _counter(name: str, text: str, labels: list[str], values: Values) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    return _filled(family, values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for where, value in values:
        if value is not None:
            family.add_metric(where, float(value))
    return family
