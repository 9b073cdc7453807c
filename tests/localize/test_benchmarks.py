"""Scripts run by real processes: what they measure, what they leave alone, what may go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.localize.benching import Bench, bench, is_crowded
from tests.transport.servers import free_port

from failslow.inject import throttle
from failslow.localize.benchmarks import describe_place, run, run_script
from failslow.localize.benchmarks.accounts import Books
from failslow.localize.benchmarks.helper import Helper, Lost
from failslow.localize.benchmarks.meeting import NoMeeting
from failslow.localize.benchmarks.transfer import receive_all, send_all
from failslow.localize.judge import judge
from failslow.localize.script import Script, WorkerPlace, expected_s, plan, reference_script

pytestmark = pytest.mark.timeout(240)
"""Four processes that import torch at once, on a machine that does other things as well."""

SHORT: dict[str, Any] = {"dtype": "float32", "size": 256, "repeats": 3, "least_s": 0.05}
SIZES: dict[str, Any] = {"sizes_bytes": [4096, 65536], "repeats": 2}


def gemm(*ranks: int, limit_s: float = 1.0, **changed: Any) -> dict[str, Any]:
    return {"do": "gemm", "ranks": list(ranks), "limit_s": limit_s, **SHORT, **changed}


def p2p(*pairs: tuple[int, int], limit_s: float = 1.0, **changed: Any) -> dict[str, Any]:
    return {
        "do": "p2p",
        "pairs": [list(pair) for pair in pairs],
        "limit_s": limit_s,
        **SIZES,
        **changed,
    }


def alone(script: Script, **more: Any) -> list[dict[str, Any]]:
    """Run in this process, without any job."""
    return run_script(script, rank=0, world_size=1, device="cpu", **more)


def as_nodes(places: list[WorkerPlace]) -> list[WorkerPlace]:
    """Each worker as a node of its own."""
    from dataclasses import replace

    return [replace(place, node=f"n{place.rank}") for place in places]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("bench"), 4) as running:
        yield running


def test_the_reference_script_measures_everybody_and_touches_nothing(job: Bench) -> None:
    places = job.places()
    assert len({(p.device, p.unit) for p in places}) == 1
    workers = as_nodes(places)
    script = reference_script(workers)
    reports = job.reports(job.order(script))
    for report in reports:
        assert report["changed"] == []
        assert report["threads"][0] == report["threads"][1]
        assert report["recorded"] <= 1  # the barrier before it, at most
        assert report["sum"] == 4.0
        assert report["took_s"] < 5.0
    results = [result for report in reports for result in report["results"]]
    assert [r for r in results if r["error"]] == []
    assert {r["rank"] for r in results if r["do"] == "gemm"} == {0, 1, 2, 3}
    assert {(r["rank"], r["what"]) for r in results if r["do"] == "host"} == {
        (rank, what) for rank in range(4) for what in ("core", "memory")
    }
    received = [r for r in results if r["do"] == "p2p" and r["by"] == r["peer"]]
    assert len({(r["rank"], r["peer"], r["size_bytes"]) for r in received}) == 8 * 3
    for result in results:
        if result["do"] == "p2p":
            assert 0.0 <= result["waited"] <= 1.0
            if result["by"] == result["rank"]:
                continue
        assert 0.0 < result["min_s"] <= result["median_s"]
        assert result["repeats"] >= 3
        if result["do"] != "p2p":
            assert result["cpu_s"] <= 1.1 * result["wall_s"] + 0.01


def test_modes_a_trainer_may_be_in_neither_change_nor_matter(job: Bench) -> None:
    job.places()
    reports = job.reports(job.order([gemm(0, 1), p2p((0, 1), (3, 2))], odd_modes=True))
    for report in reports:
        assert report["changed"] == []
        assert [r["error"] for r in report["results"]] == [""] * len(report["results"])
    assert [len(report["results"]) for report in reports] == [2, 3, 2, 1]
    assert [r["dtype"] for r in reports[0]["results"] if r["do"] == "gemm"] == ["float32"]


def test_a_throttled_worker_is_named(job: Bench) -> None:
    workers = as_nodes(job.places())
    script = reference_script(workers)
    healthy = job.run(script)
    # stopped by signals: a quota would not bite where others take more than it leaves
    with throttle(job.pids[2], to=0.35, method="signal"):
        for _ in range(6):
            slow = job.run(plan(None, workers))
            if not is_crowded(slow):
                break
        else:
            pytest.skip("other work on this machine takes the cores these workers need")
    found = judge(slow, healthy, workers, episode="e")
    devices = [finding for finding in found.findings if finding.what == "device"]
    # the core's other half at work may make another one look slow for a moment, but not held
    assert devices[0].ranks == (2,), found
    assert [finding.ranks for finding in devices if finding.evidence] == [(2,)], found
    # how long it was stopped depends on when its stopper got a core
    assert devices[0].slowdown > 1.5
    assert not [finding for finding in found.findings if finding.what == "link"], found
    assert "stopped" in devices[0].evidence[0]


def test_a_rank_that_does_not_come_costs_its_own_transfers(job: Bench) -> None:
    job.places()
    script = [gemm(0, 1, 2, 3), p2p((0, 1), (2, 3), limit_s=0.5), p2p((1, 2), (3, 0), limit_s=0.5)]
    reports = job.reports(job.order(script, absent=[3]))
    errors = {
        (r["rank"], r["peer"]): r["error"]
        for report in reports
        for r in report["results"]
        if r["do"] == "p2p" and r["error"]
    }
    assert set(errors) == {(2, 3), (3, 0)}
    assert "rank 3 did not come" in errors[2, 3]
    measured = {(r["rank"], r["peer"]) for p in reports for r in p["results"] if r["do"] == "p2p"}
    assert {(0, 1), (1, 2)} <= measured
    for report in reports:
        assert report["took_s"] < 4.0
        assert report["changed"] == []
        assert report["sum"] == 4.0
    found = judge([r for p in reports for r in p["results"]], [], job.places(), episode="e")
    assert "2>3" in found.note


def test_the_time_of_a_script_is_bounded_whatever_is_in_it(job: Bench) -> None:
    job.places()
    script = [gemm(0, 1, 2, 3, least_s=0.5, limit_s=0.6)] * 10
    reports = job.reports(job.order(script, more={"within_s": 1.5}))
    for report in reports:
        assert report["took_s"] < 3.5
        assert report["results"][-1]["error"] == "no time was left for it"


def test_a_transfer_that_is_cut_off_costs_its_pair_no_later_one(job: Bench) -> None:
    cut = p2p((0, 1), sizes_bytes=[1 << 28], limit_s=0.05)
    results = job.run([p2p((0, 1)), cut, p2p((1, 0)), p2p((0, 1)), p2p((1, 2))])
    told = [f"{r['stage']} by {r['by']}: {r['error']}" for r in results if r["error"]]
    assert {line[0] for line in told} == {"1"}, told


def test_a_rank_killed_on_the_way_holds_up_nobody(tmp_path: Path) -> None:
    with bench(tmp_path, 3) as job:
        job.places()
        stages = [p2p((0, 2)), p2p((1, 2)), gemm(0, 1, 2)] * 8
        number = job.order(stages, dying=[2], die_after_s=0.2, more={"within_s": 3.0})
        for report in job.reports(number, ranks=[0, 1]):
            assert report["took_s"] < 5.0
            assert [r for r in report["results"] if r["do"] == "gemm" and not r["error"]]
            assert [r for r in report["results"] if r["do"] == "p2p" and r["error"]]
        for pid in job.pids[:2]:
            os.kill(pid, signal.SIGKILL)  # a collective with the dead would not end


class SlowLink:
    """A channel on which anything received takes 20 ms."""

    def send(self, message: torch.Tensor, limit_s: float) -> None:
        del message, limit_s

    def receive(self, message: torch.Tensor, limit_s: float) -> None:
        del message, limit_s
        time.sleep(0.02)

    def close(self) -> None:
        pass


def test_a_link_that_leaves_time_for_one_transfer_only_is_told_by_that_one() -> None:
    (result,) = receive_all(
        SlowLink(),
        sizes_bytes=[1 << 18, 1 << 20],
        repeats=3,
        until_s=time.perf_counter() + 0.05,
        device=torch.device("cpu"),
    )
    assert result["seconds"] is None
    assert result["size_bytes"] == 1 << 18
    assert result["at_least_s"] >= 0.02
    assert "no time was left" in result["error"]


class CutOff:
    """A channel on which the second message asked for is cut off."""

    def __init__(self) -> None:
        self._asked = 0

    def send(self, message: torch.Tensor, limit_s: float) -> None:
        del message, limit_s
        if self._asked == 2:
            time.sleep(0.02)
            raise RuntimeError("Timed out")

    def receive(self, message: torch.Tensor, limit_s: float) -> None:
        del limit_s
        self._asked += 1
        message.fill_(1 << 18)

    def close(self) -> None:
        pass


def test_a_sender_that_is_cut_off_tells_since_when_it_was_asked() -> None:
    begin_s = time.perf_counter()
    result = send_all(
        CutOff(), sizes_bytes=[1 << 18], until_s=begin_s + 1.0, device=torch.device("cpu")
    )
    assert (result["asked"], result["error"]) == (2, "Timed out")
    assert 0.02 <= result["since_s"] <= time.perf_counter() - begin_s


_STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("up", flush=True)
time.sleep(1000)
"""


def test_a_stopped_store_costs_the_transfers_and_a_bounded_time() -> None:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", _STORE, str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        store = vars(torch.distributed)["TCPStore"]("127.0.0.1", port, is_master=False)
        server.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        script = [gemm(0), p2p((0, 1)), gemm(0)]
        results = run_script(
            script, rank=0, world_size=2, device="cpu", store_or_group=store, name="a"
        )
        assert time.monotonic() - start_s < 5.0
        assert [r["do"] for r in results] == ["gemm", "p2p", "gemm"]
        assert [bool(r["error"]) for r in results] == [False, True, False]
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def test_whatever_is_wrong_with_a_script_is_in_the_results() -> None:
    results = alone(
        [
            gemm(0),
            {"do": "dance", "ranks": [0]},
            gemm(0, dtype="float"),
            gemm(0, dtype="int2000"),
            gemm(0, size=1 << 22),
            {"do": "gemm", "ranks": [0]},
            p2p((0, 5)),
            {"do": "host", "ranks": [0], "limit_s": 0.2},
        ]
    )
    errors = [result["error"] for result in results]
    assert errors[0] == errors[-1] == errors[-2] == ""
    assert errors[1] == "'dance' is no benchmark; there are gemm, host and p2p"
    assert errors[3] == "'int2000' is no type of torch"
    assert "MB are free on cpu; the matrices need 201326592" in errors[4]
    assert errors[5] == "'dtype'"
    assert "torch.distributed is not initialised" in errors[6]
    assert alone([gemm(3)]) == []
    assert alone([{"do": "gemm", "ranks": 3}])[0]["do"] == "all"


def test_who_waits_for_nobody_asks_the_store_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def meet(*_: object, name: str, **__: object) -> None:
        asked.append(name)
        raise NoMeeting("there is no store")

    monkeypatch.setattr(run, "Meeting", meet)
    (result,) = alone([gemm(*range(100), wait=False), gemm(5)], name="apart")
    assert result["error"] == ""
    assert asked == []
    alone([gemm(*range(100))], name="together")
    assert asked == ["together"]


def test_a_place_is_what_workers_are_planned_with() -> None:
    place = WorkerPlace(**describe_place(3, torch.device("cpu"), node="n7"))
    assert (place.rank, place.node, place.device_id) == (3, "n7", "")
    assert place.device.startswith("cpu")
    assert place.host == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_books_tell_running_from_waiting() -> None:
    books = Books()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    account = books.close()
    assert account.cpu_s >= 0.05
    assert account.wall_s >= account.cpu_s
    # what is neither run nor waited for is the books' own error
    assert account.cpu_s + account.queued_s == pytest.approx(account.wall_s, rel=0.15)


def test_a_helper_that_hangs_is_left_behind() -> None:
    helper = Helper("test")
    assert helper.call(lambda: 7, limit_s=1.0, what="seven") == 7
    fails: Callable[[], int] = lambda: 1 // 0  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        helper.call(fails, limit_s=1.0, what="nothing")
    with pytest.raises(Lost, match=r"sleep: no answer within 0\.1 s"):
        helper.call(lambda: time.sleep(0.5), limit_s=0.1, what="sleep")
    start_s = time.monotonic()
    with pytest.raises(Lost, match="sleep"):
        helper.call(lambda: 7, limit_s=1.0, what="seven")
    assert time.monotonic() - start_s < 0.1
    helper.end()


def test_what_a_script_is_expected_to_take_is_about_what_it_takes(job: Bench) -> None:
    script = reference_script(as_nodes(job.places()))
    took_s = max(report["took_s"] for report in job.reports(job.order(script)))
    assert took_s < 2.0 * expected_s(script)
