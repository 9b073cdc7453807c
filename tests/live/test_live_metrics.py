"""What Prometheus gets: scraped from a real server, names and labels pinned."""

from __future__ import annotations

import json
import logging
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import failslow
from failslow.journal import JournalWriter, read_journal
from failslow.records import Culprit, Episode, StepSample
from failslow.runtime.metrics import PORT_VARIABLE, TROUBLES, Metrics
from failslow.runtime.scrape import MetricsServer

DOCS = Path(__file__).resolve().parents[2] / "docs"
WORKER = ("job", "node", "rank")
PINNED = {
    "failslow_build_info": ("gauge", ("version",)),
    "failslow_capture_faults_total": ("counter", WORKER),
    "failslow_compute_seconds": ("gauge", WORKER),
    "failslow_episode_active": ("gauge", ("job",)),
    "failslow_episodes_total": ("counter", ("job",)),
    "failslow_healthy_iteration_seconds": ("gauge", ("job",)),
    "failslow_iteration_seconds": ("gauge", WORKER),
    "failslow_iterations_total": ("counter", WORKER),
    "failslow_last_iteration_timestamp_seconds": ("gauge", WORKER),
    "failslow_lost_seconds_total": ("counter", ("job",)),
    "failslow_monitoring_healthy": ("gauge", ("job",)),
    "failslow_monitoring_troubles": ("gauge", ("job", "what")),
    "failslow_records_dropped_total": ("counter", WORKER),
    "failslow_records_total": ("counter", WORKER),
    "failslow_slowdown_ratio": ("gauge", ("job",)),
    "failslow_suspected": ("gauge", ("job",)),
    "failslow_workers_left_out": ("gauge", ("job",)),
}
PROCESS = {
    "failslow_agent_process_cpu_seconds_total",
    "failslow_agent_process_max_fds",
    "failslow_agent_process_open_fds",
    "failslow_agent_process_resident_memory_bytes",
    "failslow_agent_process_start_time_seconds",
    "failslow_agent_process_virtual_memory_bytes",
}


def sample(step: int = 1, duration_s: float = 0.1, **more: Any) -> StepSample:
    return StepSample(step=step, duration_s=duration_s, end_s=step * 0.1, **more)


def episode(*, lost_s: float, end_step: int | None = None, start_step: int = 100) -> Episode:
    return Episode(
        start_step=start_step,
        end_step=end_step,
        start_s=10.0,
        end_s=None if end_step is None else 20.0,
        duration_s=10.0,
        iteration_s=0.14,
        baseline_s=0.1,
        slowdown=1.4,
        peak_slowdown=1.5,
        lost_s=lost_s,
        confidence=0.99,
        culprits=(Culprit(rank=1, what="compute", slowdown=2.0),),
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(job="pretrain7", node="gpu-17")


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    made = metrics.serve(0)
    assert made is not None
    with made:
        yield made


def scrape(
    server: MetricsServer,
) -> dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]]:
    """{sample name: (type, {labels: value})} of what the server answers."""
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    found: dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for item in family.samples:
            where = tuple(sorted(item.labels.items()))
            found.setdefault(item.name, (family.type, {}))[1][where] = item.value
    return found


def value(server: MetricsServer, name: str, **labels: str) -> float | None:
    """One value of a scrape; None: not shown."""
    where = tuple(sorted({"job": "pretrain7", **labels}.items()))
    return scrape(server).get(name, ("", {}))[1].get(where)


def fill(metrics: Metrics) -> None:
    """Something of everything."""
    for rank in (0, 1):
        metrics.observe(sample(compute_s=0.05), t=1e9, rank=rank, node="gpu-17")
        metrics.ring(rank, records=1000, dropped=3, faults=1)
    metrics.observe(sample(), t=1e9, workers=2)
    metrics.observe({"event": "suspected", "id": "e1"}, t=1e9, kind="suspicion")
    metrics.observe(episode(lost_s=4.0), t=1e9, id="e1", event="onset", slowdown_now=1.41)
    metrics.observe({"what": "agent", "ok": False, "node": "gpu-18"}, t=1e9, kind="health")


def test_names_types_and_labels_are_those_pinned(metrics: Metrics, server: MetricsServer) -> None:
    fill(metrics)
    found = scrape(server)

    ours = {name: item for name, item in found.items() if name not in PROCESS}
    shape = {
        name: (kind, tuple(sorted({label for where in values for label, _ in where})))
        for name, (kind, values) in ours.items()
    }
    assert shape == PINNED
    assert set(found) >= PROCESS


def test_values_are_those_of_the_records(metrics: Metrics, server: MetricsServer) -> None:
    fill(metrics)
    worker = {"rank": "1", "node": "gpu-17"}
    metrics.observe(sample(step=17, duration_s=0.2, iterations=16), t=2e9, rank=1, node="gpu-17")

    assert value(server, "failslow_iteration_seconds", **worker) == 0.2
    assert value(server, "failslow_iterations_total", **worker) == 17
    assert value(server, "failslow_compute_seconds", **worker) is None  # unknown is not 0
    assert value(server, "failslow_last_iteration_timestamp_seconds", **worker) == 2e9
    assert value(server, "failslow_records_dropped_total", **worker) == 3
    assert value(server, "failslow_capture_faults_total", **worker) == 1
    assert value(server, "failslow_healthy_iteration_seconds") == 0.1
    assert value(server, "failslow_slowdown_ratio") == 1.41
    assert value(server, "failslow_episode_active") == 1
    assert value(server, "failslow_lost_seconds_total") == 4
    assert value(server, "failslow_monitoring_healthy") == 0
    assert value(server, "failslow_monitoring_troubles", what="agent") == 1
    version = scrape(server)["failslow_build_info"][1]
    assert version == {(("version", failslow.__version__),): 1.0}


def test_the_healthy_time_comes_from_whoever_knows_it(
    metrics: Metrics, server: MetricsServer
) -> None:
    def healthy() -> float | None:
        return value(server, "failslow_healthy_iteration_seconds")

    alive = {"what": "controller", "ok": True, "event": "alive"}
    metrics.observe(alive, kind="health")
    assert healthy() is None
    metrics.observe(alive | {"healthy_s": 0.5}, kind="health")
    assert healthy() == 0.5
    metrics.observe(sample(), healthy_s=0.6, workers=4)
    assert healthy() == 0.6
    metrics.observe({"event": "suspected", "baseline_s": 0.7}, kind="suspicion")
    assert healthy() == 0.7


def test_before_the_job_says_anything_nothing_is_claimed_of_it(
    metrics: Metrics, server: MetricsServer
) -> None:
    assert value(server, "failslow_episode_active") is None
    assert value(server, "failslow_monitoring_healthy") is None


def test_an_episode_from_suspicion_to_relief(metrics: Metrics, server: MetricsServer) -> None:
    def shown() -> tuple[float | None, ...]:
        names = ("suspected", "episode_active", "slowdown_ratio", "episodes_total")
        return tuple(value(server, f"failslow_{name}") for name in names)

    metrics.observe({"event": "suspected", "id": "e1"}, kind="suspicion")
    assert shown() == (1, 0, 1, 0)
    metrics.observe({"event": "cleared", "id": "e1"}, kind="suspicion")
    assert shown() == (0, 0, 1, 0)
    metrics.observe(episode(lost_s=1.0), id="e2", event="onset", slowdown_now=1.4)
    assert shown() == (1, 1, 1.4, 1)
    metrics.observe(episode(lost_s=1.5), id="e2", event="level", slowdown_now=1.8)
    assert shown() == (1, 1, 1.8, 1)
    metrics.observe(episode(lost_s=2.0, end_step=150), id="e2", event="relief", slowdown_now=1.0)
    assert shown() == (0, 0, 1, 1)
    # opened again: the same episode, a further stretch
    metrics.observe(episode(lost_s=3.0, start_step=160), id="e2", event="onset", slowdown_now=1.4)
    assert shown() == (1, 1, 1.4, 1)
    assert value(server, "failslow_lost_seconds_total") == 5
    # taken back: a counter does not fall
    back = episode(lost_s=0.0, start_step=160, end_step=160)
    metrics.observe(back, id="e2", event="relief", slowdown_now=1.0)
    assert value(server, "failslow_lost_seconds_total") == 5


def test_the_time_lost_in_many_episodes_is_kept(metrics: Metrics, server: MetricsServer) -> None:
    for start in range(1, 201):
        done = episode(lost_s=1.0, start_step=start, end_step=start + 5)
        metrics.observe(done, id=f"e{start}", event="relief")

    assert value(server, "failslow_lost_seconds_total") == 200
    assert value(server, "failslow_episodes_total") == 200


def test_troubles_come_and_go_and_only_known_ones_become_labels(
    metrics: Metrics, server: MetricsServer
) -> None:
    for node in ("a", "b"):
        metrics.observe({"what": "agent", "ok": False, "node": node}, kind="health")
    metrics.observe({"what": "x" * 50, "ok": False}, kind="health")
    assert value(server, "failslow_monitoring_troubles", what="agent") == 2
    metrics.observe({"what": "x" * 50, "ok": True}, kind="health")
    metrics.observe({"what": "agent", "ok": True, "node": "a"}, kind="health")
    assert value(server, "failslow_monitoring_troubles", what="agent") == 1
    metrics.observe({"what": "agent", "ok": True, "node": "b"}, kind="health")
    assert value(server, "failslow_monitoring_healthy") == 1
    metrics.observe({"what": "job", "ok": True, "event": "between"}, kind="health")
    assert value(server, "failslow_monitoring_troubles", what="job") == 0  # only evaluates
    metrics.observe({"what": "job", "ok": False}, kind="health")
    assert value(server, "failslow_monitoring_troubles", what="job") == 1
    assert value(server, "failslow_monitoring_healthy") == 1  # that the job hangs is well seen

    shown = scrape(server)["failslow_monitoring_troubles"][1]
    assert {dict(where)["what"] for where in shown} == set(TROUBLES)


def test_there_are_never_more_series_than_allowed() -> None:
    metrics = Metrics(job="big", node="n", max_workers=4)
    server = metrics.serve(0)
    assert server is not None
    with server:
        for rank in range(10):
            metrics.observe(sample(), rank=rank)
            metrics.ring(rank, records=1, dropped=0)
        assert len(scrape(server)["failslow_iteration_seconds"][1]) == 4
        assert scrape(server)["failslow_workers_left_out"][1] == {(("job", "big"),): 6.0}
        metrics.forget(0)
        metrics.observe(sample(), rank=9)
        ranks = {dict(w)["rank"] for w in scrape(server)["failslow_iteration_seconds"][1]}
        assert ranks == {"1", "2", "3", "9"}


def test_a_restarted_worker_on_another_node_leaves_no_old_series(
    metrics: Metrics, server: MetricsServer
) -> None:
    metrics.observe(sample(), rank=1, node="gpu-17")
    metrics.observe(sample(), rank=1, node="gpu-18")

    assert len(scrape(server)["failslow_iteration_seconds"][1]) == 1


def test_entries_read_from_a_journal_count_like_their_records(
    metrics: Metrics, server: MetricsServer, tmp_path: Path
) -> None:
    writer = JournalWriter(tmp_path / "journal.jsonl")
    writer.append(sample(duration_s=0.3), t=5.0, rank=3, node="gpu-20", state="ok")
    writer.append(sample(), t=5.0, workers=1)
    writer.append(episode(lost_s=7.0), t=6.0, id="e1", event="onset", slowdown_now=1.4)
    writer.append({"what": "ring", "ok": False, "rank": 3}, t=7.0, kind="health")
    writer.close()
    for entry in read_journal(writer.path):
        metrics.observe(entry)

    assert value(server, "failslow_iteration_seconds", rank="3", node="gpu-20") == 0.3
    assert value(server, "failslow_iterations_total", rank="3", node="gpu-20") == 1
    assert value(server, "failslow_lost_seconds_total") == 7
    assert value(server, "failslow_monitoring_troubles", what="ring") == 1


def test_a_job_name_may_hold_anything(tmp_path: Path) -> None:
    name = 'a"b\\c\nd é'
    metrics = Metrics(job=name, node="n")
    metrics.observe(sample(), rank=0)
    server = metrics.serve(0)
    assert server is not None
    with server:
        (where,) = scrape(server)["failslow_iteration_seconds"][1]
    assert dict(where)["job"] == name


def test_it_listens_on_loopback_alone_unless_told_otherwise(metrics: Metrics) -> None:
    server = metrics.serve(0)
    assert server is not None
    with server:
        assert server.address == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    other = metrics.serve(0, "127.0.0.2")
    assert other is not None
    with other:
        assert other.address == "127.0.0.2"


def test_a_taken_port_is_one_warning_and_no_error(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken, caplog.at_level(logging.WARNING):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert metrics.serve(taken.getsockname()[1]) is None

    (record,) = caplog.records
    assert PORT_VARIABLE in record.getMessage()
    assert "Address already in use" in record.getMessage()


def test_the_port_comes_from_the_environment_and_a_bad_one_is_a_warning(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    assert metrics.serve() is None
    monkeypatch.setenv(PORT_VARIABLE, "0")
    server = metrics.serve()
    assert server is not None
    server.close()
    monkeypatch.setenv(PORT_VARIABLE, "ninety")
    assert metrics.serve() is None
    assert "FAILSLOW_METRICS_PORT=ninety is no port" in caplog.text


def test_after_close_nobody_answers_and_a_client_that_leaves_is_quiet(
    metrics: Metrics, capfd: pytest.CaptureFixture[str]
) -> None:
    server = metrics.serve(0)
    assert server is not None
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert scrape(server)
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=5)

    assert capfd.readouterr() == ("", "")


def expressions(board: Any) -> Iterator[str]:
    """Every query in a dashboard."""
    if isinstance(board, dict):
        for key, item in board.items():
            if key in ("expr", "query", "definition") and isinstance(item, str):
                yield item
            else:
                yield from expressions(item)
    elif isinstance(board, list):
        for item in board:
            yield from expressions(item)


def test_every_query_of_the_dashboard_uses_an_existing_metric() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    queries = [query for query in expressions(board) if "failslow" in query]

    used = {name for query in queries for name in re.findall(r"\bfailslow_[a-z_]+", query)}
    assert used <= set(PINNED) | PROCESS
    assert used >= {
        "failslow_iteration_seconds",
        "failslow_slowdown_ratio",
        "failslow_episode_active",
        "failslow_lost_seconds_total",
        "failslow_records_dropped_total",
        "failslow_monitoring_healthy",
    }
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] and panel["title"] and panel["gridPos"] for panel in panels)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {variable["name"] for variable in board["templating"]["list"]} >= {"job", "datasource"}
    assert all(
        'job=~"$job"' in query for query in queries if "{" in query and "label_" not in query
    )


def test_every_metric_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(failslow_[a-z_]+)`", text))

    assert documented >= set(PINNED)
    assert documented <= set(PINNED) | PROCESS
