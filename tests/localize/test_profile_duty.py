"""The duty that profiles a node's workers, on scripted workers; and its messages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.localize.made_streams import Faults, Grid, Streams, run

from failslow.capture.layout import CALL, OPS
from failslow.capture.reader import RECORD_DTYPE, Group
from failslow.mailbox import Mailbox
from failslow.pipeline import Order, Report
from failslow.profile_wire import profile_body, read_profile_body
from failslow.records import CallCell, RankProfile, StepSample
from failslow.runtime.duty_profile import ProfileDuty

EPOCH_S = 1.7e9
GRID = Grid(dp=2)


class Scripted:
    """A worker whose ring brings what a made-up job did, as time passes."""

    def __init__(self, streams: Streams, rank: int, backend: str = "gloo") -> None:
        self.rank, self.pid = rank, 100 + rank
        self.worker = f"{self.pid}-1"
        self.world_size = streams.grid.world
        self.ended = False
        self.fresh: NDArray[np.void] = np.empty(0, RECORD_DTYPE)
        self.samples: list[StepSample] = []
        self.profiled: list[bool] = []
        self.description: dict[str, Any] = {"ops": OPS, "host": "machine-7"}
        groups = streams.grid.groups(rank)
        self.groups: Sequence[Group] = [
            Group(
                number=number, name=name, desc=name, backend=backend, size=len(ranks),
                rank=ranks.index(rank), ranks=ranks, time_ns=0,
            )
            for number, (name, ranks) in enumerate(groups.items())
        ]  # fmt: skip
        self._records = streams.records(rank, 0.0)
        self._samples = streams.samples(rank, EPOCH_S)

    @property
    def mailbox(self) -> Mailbox | None:
        return None

    def count(self, number: int) -> int:
        return 0 * number

    def set_profile(self, on: bool) -> None:
        self.profiled.append(on)

    def to_epoch_s(self, monotonic_ns: float) -> float:
        return EPOCH_S + monotonic_ns / 1e9

    def read(self, before_s: float, now_s: float) -> None:
        """What came between the two moments."""
        at = self._records["start_ns"] / 1e9
        self.fresh = self._records[(at >= before_s) & (at < now_s)]
        ends = [s.end_s - EPOCH_S for s in self._samples]
        self.samples = [
            s for s, end in zip(self._samples, ends, strict=True) if before_s <= end < now_s
        ]


class Node:
    """Scripted workers and the duty, turned every tenth of a second of made-up time."""

    def __init__(self, workers: list[Scripted], gpus: Path = Path("/nowhere")) -> None:
        self.workers = workers
        self.duty = ProfileDuty(node="gpu-17", gpus=gpus)
        self.now_s = 0.0

    def until(self, now_s: float) -> list[Report]:
        reports: list[Report] = []
        while self.now_s < now_s:
            before_s, self.now_s = self.now_s, self.now_s + 0.1
            for worker in self.workers:
                worker.read(before_s, self.now_s)
                self.duty.observe(worker)
            reports += self.duty.turn(self.workers, self.now_s)
        return reports

    def order(self, **body: Any) -> None:
        self.duty.order(Order(topic="profile", body=body), self.now_s)


@pytest.fixture(scope="module")
def streams() -> Streams:
    return run(GRID, Faults(), iterations=260)  # of 0.2 s each


@pytest.fixture
def node(streams: Streams) -> Node:
    return Node([Scripted(streams, rank) for rank in range(2)])


def test_a_healthy_profile_is_made_once_and_by_itself(node: Node) -> None:
    reports = node.until(15.0)
    assert [(r.node, r.rank, r.topic, r.body["why"]) for r in reports] == [
        ("gpu-17", 0, "profile", "healthy"),
        ("gpu-17", 1, "profile", "healthy"),
    ]
    profile = read_profile_body(reports[0].body)
    assert profile.iterations >= 19
    assert profile.host == "machine-7"
    assert profile.node == "gpu-17"
    assert profile.device == "cpu"
    assert profile.compute_s == pytest.approx(0.124, rel=0.05)
    assert [w.profiled for w in node.workers] == [[True, False]] * 2
    assert not node.until(30.0)


def test_an_order_is_carried_out_for_as_long_and_as_many_as_it_says(node: Node) -> None:
    node.until(15.0)
    node.order(why="suspicion", for_s=2.0, min_iterations=8)
    assert not node.until(16.9)
    long = node.until(18.0)
    assert [r.body["why"] for r in long] == ["suspicion"] * 2
    assert 7 <= long[0].body["iterations"] <= 16
    node.order(why="suspicion", for_s=0.0, min_iterations=20)
    (first, _) = node.until(24.0)
    assert first.body["iterations"] >= 19


def test_an_order_ends_at_the_limit(node: Node) -> None:
    node.until(15.0)
    node.order(why="suspicion", for_s=1.0, min_iterations=10_000)
    assert not node.until(29.8)
    reports = node.until(31.0)
    assert len(reports) == 2
    assert [w.profiled[-1] for w in node.workers] == [False] * 2


def test_an_order_before_the_healthy_profile_takes_its_place(node: Node) -> None:
    """Somebody asks because the job is slow: what comes is not to pass for healthy."""
    node.until(5.0)
    assert node.workers[0].profiled == [True]
    node.order(why="suspicion", for_s=2.0, min_iterations=8)
    assert [r.body["why"] for r in node.until(30.0)] == ["suspicion"] * 2
    node.order(why="healthy", for_s=2.0, min_iterations=8)
    assert [r.body["why"] for r in node.until(35.0)] == ["healthy"] * 2


def test_nothing_of_a_profile_is_from_before_it_was_asked_for(node: Node) -> None:
    node.until(15.0)
    node.order(why="suspicion", for_s=2.0, min_iterations=8)
    profile = read_profile_body(node.until(18.0)[0].body)
    assert profile.start_t >= EPOCH_S + 15.0


def test_a_worker_that_ends_or_is_another_is_left_out(node: Node) -> None:
    node.until(15.0)
    node.order(why="suspicion", for_s=2.0, min_iterations=8)
    node.until(15.5)
    node.workers[0].ended = True
    assert [r.rank for r in node.until(20.0)] == [1]


def test_a_worker_without_iterations_has_no_profile(node: Node) -> None:
    node.workers[0]._samples = []
    assert [r.rank for r in node.until(15.0)] == [1]
    node.order(why="suspicion", for_s=1.0, min_iterations=1)
    assert [r.rank for r in node.until(40.0)] == [1]


def test_profiling_ends_with_the_agent(node: Node) -> None:
    node.until(15.0)
    node.order(why="suspicion", for_s=10.0, min_iterations=8)
    node.until(16.0)
    node.duty.close()
    assert [w.profiled[-1] for w in node.workers] == [False] * 2


@pytest.mark.parametrize(
    "body", [{}, {"for_s": "long", "min_iterations": None}, {"for_s": math.nan}, {"for_s": -4}]
)
def test_an_order_that_makes_no_sense_is_taken_for_the_usual(
    node: Node, body: dict[str, Any]
) -> None:
    node.until(15.0)
    node.order(**body)
    assert len(node.until(31.0)) == 2


def test_the_device_s_model_is_the_driver_s(streams: Streams, tmp_path: Path) -> None:
    def device() -> str:
        node = Node([Scripted(streams, 0, backend="cuda:nccl")], gpus=tmp_path)
        return str(node.until(15.0)[0].body["device"])

    for index in range(2):
        (tmp_path / f"0000:{index}").mkdir()
        (tmp_path / f"0000:{index}" / "information").write_text(
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {index}\nGPU UUID: \t GPU-1\n"
        )
    assert device() == "NVIDIA H200"
    (tmp_path / "0000:1" / "information").write_text("Model: \t\t NVIDIA A100\n")
    assert device() == "", "which of the two it is cannot be told"


def test_a_worker_s_own_word_on_its_device_outranks_the_driver_s(streams: Streams) -> None:
    workers = [Scripted(streams, rank, backend="cuda:nccl") for rank in range(2)]
    workers[0].description["device"] = {"id": "GPU-5fd4", "model": "NVIDIA H200"}
    told, silent = (read_profile_body(report.body) for report in Node(workers).until(15.0))
    assert (told.device, told.device_id) == ("NVIDIA H200", "GPU-5fd4")
    assert (silent.device, silent.device_id) == ("", "")


def test_a_host_is_a_machine_whatever_its_containers_are_called(streams: Streams) -> None:
    workers = [Scripted(streams, rank) for rank in range(2)]
    for worker in workers:
        worker.description |= {"host": f"container-{worker.rank}", "boot_id": "8c1f"}
    profiles = [read_profile_body(report.body) for report in Node(workers).until(15.0)]
    assert [profile.host for profile in profiles] == ["8c1f"] * 2
    assert [profile.node for profile in profiles] == ["gpu-17"] * 2  # what people call it


def test_a_node_that_was_named_is_a_machine_of_its_own(streams: Streams) -> None:
    """As the nodes of a test bed: they compute at the same time."""
    worker = Scripted(streams, 0)
    worker.description |= {"host": "vm", "boot_id": "8c1f"}
    node = Node([worker])
    node.duty = ProfileDuty(node="n2", named=True)
    assert read_profile_body(node.until(15.0)[0].body).host == "n2"


@pytest.mark.parametrize(
    ("backend", "nic", "trees"), [("gloo", "eth0", False), ("cuda:nccl", "", True)]
)
def test_what_messages_go_through_and_along_is_what_the_backend_was_told(
    streams: Streams, backend: str, nic: str, *, trees: bool
) -> None:
    worker = Scripted(streams, 0, backend=backend)
    worker.description |= {"gloo_interface": "eth0", "nccl_algorithms": "Tree"}
    profile = read_profile_body(Node([worker]).until(15.0)[0].body)
    assert (profile.nic, profile.trees) == (nic, trees)


def test_a_pattern_names_no_interface(streams: Streams) -> None:
    worker = Scripted(streams, 0)
    worker.description["gloo_interface"] = "eth0,eth1"
    assert read_profile_body(Node([worker]).until(15.0)[0].body).nic == ""


# -- messages ------------------------------------------------------------------------------------


def wide(ranks: int, cells: int) -> RankProfile:
    groups = [tuple(range(start, 8 * ranks, 8)) for start in range(4)]
    return RankProfile(
        rank=3, node="gpu-17", host="gpu-17", device="NVIDIA H200", start_t=1.7e9,
        end_t=1.7e9 + 3.1234567891, iterations=20, iteration_s=0.0912345678, compute_s=None,
        cells=tuple(
            CallCell(
                group=groups[index % 4], label="mesh_dp", op="allreduce_",
                size_bytes=1_000_000 + index, position=index, calls=20,
                duration_s=0.0012345678901 * index, wait_s=0.0001234567891, gap_s=1 / 3,
                spread_s=1 / 7, least_s=1 / 9, hidden_s=1 / 11, overlap=1 / 13,
            )
            for index in range(cells)
        ),
    )  # fmt: skip


def test_a_message_gives_back_the_profile(streams: Streams) -> None:
    for profile in (*streams.profiles(), wide(4, 3)):
        body = profile_body(profile, why="healthy")
        assert body["why"] == "healthy"
        assert read_profile_body(json.loads(json.dumps(body))) == profile


def test_a_message_of_wide_groups_stays_small_and_shares_them() -> None:
    profile = wide(512, 512)
    text = json.dumps(profile_body(profile, why="suspicion"))
    assert len(text) < 200_000
    once, again = (read_profile_body(json.loads(text)) for _ in range(2))
    assert [c.group for c in once.cells] == [c.group for c in profile.cells]
    assert once.cells[0].group is once.cells[4].group is again.cells[0].group
    assert once.cells[7].gap_s == pytest.approx(profile.cells[7].gap_s, rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "three"},
        {"cells": None},
        {"cells": [{}]},
        {"cells": [{"group": 7}]},
        {"groups": [[[0, 10**12, 1]]]},
        {"groups": [[[5, 1, 1]]]},
        {"groups": 3},
        {"iterations": None},
    ],
)
def test_a_message_that_is_no_profile_is_refused(change: dict[str, Any]) -> None:
    body = json.loads(json.dumps(profile_body(wide(4, 3)))) | change
    with pytest.raises(ValueError, match=r"no profile|group|run of ranks"):
        read_profile_body(body)


def test_the_made_records_are_what_a_ring_holds(streams: Streams) -> None:
    records = streams.records(0, 0.0)
    assert records["seq"].tolist() == list(range(1, len(records) + 1))
    assert set(records["kind"]) == {CALL, 4}
