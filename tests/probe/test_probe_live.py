"""Real probes: healthy, preempted, and with real faults in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.probe.probing import Probe, probe_here, probe_in_bed, until
from tests.testbed import TestBed
from tests.transport.servers import listening_addresses

from failslow.inject import congest, throttle
from failslow.probe import ProbeResult

pytest.importorskip("torch")

LINK_MBIT = 1000.0


def test_a_short_probe_is_healthy_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with probe_here(tmp_path, "--workers", "2", "--iterations", "40", "--probe-id", "short") as (
        probe,
        process,
    ):
        printed, errors = process.communicate(timeout=90)
        pids = [probe.pid(rank) for rank in (0, 1)]
    assert process.returncode == 0, errors + probe.text()
    result = probe.result()
    assert ProbeResult.from_json(printed) == result
    assert (result.probe_id, result.state, result.result) == ("short", "done", "healthy")
    assert (result.workers, result.dp, result.size_class) == (2, 2, "single-node")
    assert result.iterations >= 40
    assert result.healthy_iteration_s is not None
    assert result.begin_t < result.end_t
    assert result.latency_cv_intra_node is not None
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_preempted_probe_tells_what_it_found_within_seconds(tmp_path: Path) -> None:
    with probe_here(tmp_path, "--workers", "2", "--duration", "600") as (probe, process):
        until(probe.has_trained(20), 60, probe.text)
        nothing_listens_beyond_this_machine(process, probe)
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=20)
        took_s = time.monotonic() - begin_s
        pids = [probe.pid(rank) for rank in (0, 1)]
    assert process.returncode == 0, errors + probe.text()
    assert took_s < 6.0
    result = ProbeResult.from_json(printed)
    assert (result.state, result.result, result.error) == ("preempted", "healthy", "")
    assert result.iterations >= 20
    assert not any(psutil.pid_exists(pid) for pid in pids)


def nothing_listens_beyond_this_machine(process: subprocess.Popen[str], probe: Probe) -> None:
    pids = {process.pid, probe.pid(0), probe.pid(1)}
    pids |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    found = {pid: listening_addresses(pid) for pid in pids if psutil.pid_exists(pid)}
    assert "127.0.0.1" in set().union(*found.values()), "the store, at least"
    assert set().union(*found.values()) <= {"127.0.0.1", "::1"}, found


@pytest.mark.slow
def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    with probe_here(tmp_path, "--workers", "2", "--duration", "600") as (probe, process):
        until(probe.has_trained(20), 60, probe.text)
        os.kill(probe.pid(1), signal.SIGSTOP)  # it cannot end by itself
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=20)
        assert time.monotonic() - begin_s < 2.0
        pids = [probe.pid(rank) for rank in (0, 1)]
    assert json.loads(printed)["state"] == "preempted"
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_probe_that_is_killed_leaves_no_training_behind(tmp_path: Path) -> None:
    with probe_here(tmp_path, "--workers", "2", "--duration", "600") as (probe, process):
        until(probe.has_trained(5), 60, probe.text)
        workers = [psutil.Process(probe.pid(rank)) for rank in (0, 1)]
        process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=10)
        assert (len(gone), alive) == (2, [])


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with probe_here(tmp_path, "--workers", "2", "--duration", "600") as (probe, process):
        until(probe.has_trained(5), 60, probe.text)
        os.kill(probe.pid(1), signal.SIGKILL)
        printed, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert json.loads(printed)["state"] == "failed"
    assert errors.count("\n") == 1
    assert "worker" in errors


def has_reference(probe: Probe) -> bool:
    """Whether benchmarks are taken: a fault before that is one from the start."""
    taken = any(not entry.record.episode for entry in probe.entries("verdict"))
    return taken and probe.iterations() >= 60


def strike(
    probe: Probe, fault: Callable[[], AbstractContextManager[object]], seconds: float
) -> tuple[float, float]:
    """The fault, in a probe that is healthy; when it began and ended, epoch seconds."""
    until(lambda: has_reference(probe), 90, probe.text)
    begin_t = time.time()
    with fault():
        time.sleep(seconds)
    return begin_t, time.time()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "result", "cause"),
    [
        ("throttle", "compute", "device degradation"),
        ("link", "communication", "network congestion"),
    ],
)
def test_a_fault_in_one_of_four_nodes_is_found(
    tmp_path: Path, kind: str, result: str, cause: str
) -> None:
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=4, folder=tmp_path, egress_mbit=LINK_MBIT) as bed:
        two, three = bed.nodes[2:]
        with probe_in_bed(bed, "--duration", "60") as probe:
            faults: dict[str, Callable[[], AbstractContextManager[object]]] = {
                "throttle": lambda: throttle(probe.pid(2), to=0.5, method="signal"),
                "link": lambda: congest(three.namespace, "eth0", 40, dst=two.address),
            }
            begin_t, end_t = strike(probe, faults[kind], 16.0)
            bed.wait(90)
        found = probe.result()
    assert (found.state, found.result, found.cause) == ("done", result, cause), found.to_json()
    culprits = {
        "throttle": f"device rank 2 of {two.namespace}",
        "link": f"link {three.namespace}>{two.namespace}",
    }
    assert found.culprits == (culprits[kind],)
    assert found.nodes == tuple(node.namespace for node in bed.nodes)
    assert (found.tp, found.pp, found.dp, found.size_class) == (1, 2, 2, "multi-node")
    assert found.slowdown > 1.1
    assert abs(found.slow_s - (end_t - begin_t)) < 6.0
    assert found.onset_delay_s is not None
    assert found.latency_cv_inter_node is not None


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_probe_slow_from_its_start_is_found_by_the_fleets_history(tmp_path: Path) -> None:
    with probe_here(tmp_path / "before", "--iterations", "60") as (probe, process):
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        healthy = probe.result()
    history = tmp_path / "history.jsonl"
    assert healthy.healthy_iteration_s is not None
    before = [
        replace(healthy, probe_id=f"p{i}", healthy_iteration_s=healthy.healthy_iteration_s * spread)
        for i, spread in enumerate((0.99, 1.0, 0.995, 1.005, 1.01))
    ]
    history.write_text("".join(f"{r.to_json()}\n" for r in before), encoding="utf-8")

    options = ("--duration", "25", "--history", str(history))
    with probe_here(tmp_path / "slow", *options) as (probe, process):
        until(lambda: list(probe.folder.glob("workers-0.json")), 30, probe.text)
        with throttle(probe.pid(2), to=0.5, method="signal"):
            _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        result = probe.result()
    assert (result.result, result.cause) == ("compute", "device degradation"), result.to_json()
    assert result.culprits == (f"device rank 2 of {result.nodes[0]}",)
    assert (result.onset_delay_s, result.reference_source) == (0.0, "fleet")
    assert result.reference_iteration_s == healthy.healthy_iteration_s
    assert result.healthy_iteration_s is None
    assert result.slowdown > 1.3
    assert result.jct_increase_share > 0.2
