"""Processor telemetry from trees in the kernel's formats, and from this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.telemetry.trees import Machine

from failslow.telemetry.cpu import CpuSampler
from failslow.telemetry.processes import JobProcesses, WorkerProcess

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("version", [1, 2])
def test_a_workers_time_waits_and_quota_become_shares(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version=version)
    sampler = CpuSampler(lambda: {3: 50}, root=tmp_path)
    machine.process(50, threads={50: (10**9, 10**8), 51: (0, 0)}, ticks=100)
    machine.group(periods=100, throttled=10, held_us=5_000)
    assert not any(name.startswith("rank") for name in sampler.sample(1.0))

    machine.process(
        50,
        threads={50: (2 * 10**9, 7 * 10**8), 51: (5 * 10**8, 0), 52: (5 * 10**8, 4 * 10**8)},
        ticks=100 + 2 * TICKS,
        switches=(20, 8),
    )
    machine.group(periods=200, throttled=35, held_us=505_000)
    machine.machine(user=4 * TICKS, system=0, idle=4 * TICKS)
    values = sampler.sample(3.0)
    rank = {n.removeprefix("rank/3/"): v for n, v in values.items() if n.startswith("rank/3/")}
    expected = {
        "cpu_cores": 1.0,
        "runqueue_cores": 0.3,  # thread 50
        "runqueue_share": 1.0 / 3.0,
        "switches_per_s": 10.0,
        "forced_switches_per_s": 4.0,
        "throttled_share": 0.25,
        "throttled_cores": 0.25,
    }
    if version == 2:
        expected["pressure_share"] = 0.0
    assert rank == pytest.approx(expected)


def test_quotas_of_the_groups_above_count_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    sampler = CpuSampler(lambda: {0: 50}, root=tmp_path)
    machine.process(50, threads={50: (0, 0)}, group="/pod/job")
    machine.group("pod")
    machine.group("pod/job")
    sampler.sample(0.0)
    machine.group("pod", periods=10, throttled=5, held_us=300_000)
    assert sampler.sample(1.0)["rank/0/throttled_cores"] == pytest.approx(0.3)


def test_a_process_moved_to_another_group_is_followed_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, version=1)
    sampler = CpuSampler(lambda: {0: 50}, root=tmp_path)
    machine.process(50, threads={50: (0, 0)}, group="/a")
    machine.group("a", periods=1000, throttled=1000, held_us=9_000_000)
    sampler.sample(0.0)
    machine.process(50, threads={50: (0, 0)}, group="/a/failslow-50")
    machine.group("a/failslow-50", periods=10, throttled=1, held_us=1000)
    assert "rank/0/throttled_cores" not in sampler.sample(1.0)
    machine.group("a/failslow-50", periods=20, throttled=6, held_us=201_000)
    values = sampler.sample(2.0)
    assert values["rank/0/throttled_cores"] == pytest.approx(0.2)
    assert values["rank/0/throttled_share"] == pytest.approx(0.5)


def test_neighbours_are_who_is_not_of_the_job(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    sampler = CpuSampler(lambda: {0: 50}, job="j1", root=tmp_path)

    def at(now_s: int) -> dict[str, float]:
        ticks = now_s * TICKS
        machine.process(50, threads={50: (0, 0)}, ticks=ticks // 2)
        machine.process(60, threads={60: (0, 0)}, ticks=ticks // 4, parent=50)  # its loader
        machine.process(
            70, threads={70: (0, 0)}, ticks=ticks // 4, environ="A=1 FAILSLOW_JOB=j1 B=2"
        )
        machine.process(80, threads={80: (0, 0)}, ticks=ticks, environ="FAILSLOW_JOB=j11")
        machine.machine(user=2 * ticks, idle=ticks, steal=ticks)
        return dict(sampler.sample(float(now_s)))

    at(1)
    values = at(2)
    assert values["cpu/job_cores"] == pytest.approx(1.0)
    assert values["cpu/neighbour_cores"] == pytest.approx(1.0)
    assert values["cpu/busy_share"] == pytest.approx(0.5)
    assert values["cpu/steal_share"] == pytest.approx(0.25)


def test_pressure_is_a_share_of_the_time(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    sampler = CpuSampler(lambda: {0: 50}, root=tmp_path)
    machine.process(50, threads={50: (0, 0)})
    machine.group(pressure_us=1000)
    sampler.sample(0.0)
    machine.machine(pressure_us=400_000)
    machine.group(pressure_us=251_000)
    values = sampler.sample(1.0)
    assert values["cpu/pressure_share"] == pytest.approx(0.4)
    assert values["rank/0/pressure_share"] == pytest.approx(0.25)


def test_a_stopped_worker_is_seen_by_looking_often(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    sampler = CpuSampler(lambda: {0: 50}, root=tmp_path)
    machine.process(50, threads={50: (0, 0)})
    sampler.sample(0.0)
    for state in "SRTS":
        machine.process(50, threads={50: (0, 0)}, state=state)
        sampler.peek()
    assert sampler.sample(1.0)["rank/0/stopped_share"] == pytest.approx(0.25)
    assert "rank/0/stopped_share" not in sampler.sample(2.0)


def test_a_rank_that_got_another_process_begins_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    workers = {0: 50}
    sampler = CpuSampler(lambda: workers, root=tmp_path)
    machine.process(50, threads={50: (10**12, 10**12)}, ticks=1000)
    sampler.sample(0.0)
    workers[0] = 51
    machine.process(51, threads={51: (10**9, 10**9)}, ticks=10)
    assert "rank/0/cpu_cores" not in sampler.sample(1.0)
    machine.process(51, threads={51: (2 * 10**9, 10**9)}, ticks=10 + TICKS)
    assert sampler.sample(2.0)["rank/0/cpu_cores"] == pytest.approx(1.0)
    workers.clear()
    assert not any(name.startswith("rank") for name in sampler.sample(3.0))


def test_what_is_hidden_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    sampler = CpuSampler(lambda: {0: 50}, root=tmp_path)
    sampler.peek()
    assert sampler.sample(0.0) == {}
    sampler.sample(1.0)
    assert [text.split(":")[0] for text in sampler.missing] == [
        "no processor load",
        "no CPU pressure",
        "no run-queue wait",
    ]
    Machine(tmp_path)
    assert sampler.missing == ()


def test_threads_that_idle_are_looked_at_less_often_but_lose_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    threads = {50 + i: (10**6 * (i < 20), 0) for i in range(100)}
    machine.process(50, threads=threads)
    process = WorkerProcess(tmp_path / "proc", 50)
    first = process.counts()
    assert first is not None
    for turn in range(12):
        threads = {
            tid: (ran + 10**6 * (tid < 60 + turn), waited + 10**5 * (tid < 60 + turn))
            for tid, (ran, waited) in threads.items()
        }
        machine.process(50, threads=threads)
        process.counts()
    for _ in range(5):  # within which all are looked at
        last = process.counts()
    assert last is not None
    whole = sum(ran for ran, _ in threads.values()) / 1e9
    assert last.ran_s == pytest.approx(whole)
    assert last.waited_s == pytest.approx(sum(waited for _, waited in threads.values()) / 1e9)


def test_real_processes_of_the_job_are_found_by_kinship_and_environment() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; "
         "p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "FAILSLOW_JOB": "kin-test"})
    try:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        processes = JobProcesses("/proc", "kin-test")
        # the child of a process may have taken over its environment or not yet: look again
        deadline_s = time.monotonic() + 10
        while other.pid not in processes.refresh([child.pid]):
            processes = JobProcesses("/proc", "kin-test")
            assert time.monotonic() < deadline_s
        ours = processes.refresh([child.pid])
        assert {child.pid, grandchild, other.pid} <= ours
        assert os.getpid() not in ours
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for process in (child, other):
            process.kill()
            process.communicate()
