"""What is written down and read back, and control groups as machines of other kinds show them."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.errors import InjectError
from failslow.inject import Burn, Congest, Flood, Throttle
from failslow.inject.cgroups import CpuGroup, cpu_group, limit_words
from failslow.inject.guard import fault_from_json, fault_to_json
from failslow.inject.ledger import Ledger, Record, ledger_folder
from failslow.inject.processes import ProcessId, boot_id
from failslow.inject.quota import limit_process
from failslow.inject.shaping import Shape
from failslow.inject.steps import (
    DissolveGroup,
    EndProcess,
    HandBack,
    RemoveShape,
    RestoreFile,
    Resume,
    Step,
    step_from_json,
    step_to_json,
)

_TEXT = st.text(max_size=20)
_COUNT = st.integers(0, 2**40)
_PROCESS = st.builds(ProcessId, _COUNT, _COUNT)
_SHAPE = st.builds(
    Shape, st.none() | _TEXT, _COUNT, _TEXT, _TEXT, _TEXT, _COUNT, own_root=st.booleans()
)
_STEP = st.one_of(
    st.builds(RestoreFile, _TEXT, _TEXT),
    st.builds(HandBack, _TEXT),
    st.builds(DissolveGroup, _TEXT, _TEXT),
    st.builds(RemoveShape, _SHAPE),
    st.builds(EndProcess, _PROCESS),
    st.builds(Resume, _PROCESS),
)


@given(_STEP)
def test_steps_come_back_from_disk_as_they_were(step: Step) -> None:
    assert step_from_json(json.loads(json.dumps(step_to_json(step)))) == step


@pytest.mark.parametrize("data", [{}, {"do": "FormatDisk"}, {"do": "Resume", "process": {}}])
def test_steps_of_no_known_kind_are_refused(data: dict[str, object]) -> None:
    with pytest.raises(InjectError, match="unknown undo step"):
        step_from_json(data)


@pytest.mark.parametrize(
    "fault",
    [
        Throttle(4711, 0.7, threads=2, method="signal"),
        Burn((0, 1), load=0.5, beside=4711),
        Congest("/run/netns/a", "eth0", 50_000_000, dst="10.0.0.2", force=True),
        Flood("/run/netns/a", None, "10.0.0.2", has_sink=False, rate_bits=8, protocol="udp"),
    ],
)
def test_faults_reach_their_guard_as_they_were(fault: Throttle | Burn | Congest | Flood) -> None:
    assert fault_from_json(json.loads(json.dumps(fault_to_json(fault)))) == fault


@given(st.builds(lambda x: 0.01 * 1.02**x, st.integers(0, 600)))
def test_a_quota_is_what_was_asked_for_and_within_the_kernels_limits(cores: float) -> None:
    period_us, quota_us = map(int, limit_words(cores, version=1))
    assert quota_us / period_us == pytest.approx(cores, rel=0.01)
    assert 10_000 <= period_us <= 1_000_000
    assert quota_us >= 1_000
    assert limit_words(cores, version=2) == [f"{quota_us} {period_us}"]


def _machine(tmp_path: Path, *, mounts: str, member: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "7").mkdir()
    (proc / "self/mountinfo").write_text(mounts)
    (proc / "7/cgroup").write_text(member)
    return proc


def test_version_1_is_found_beside_version_2(tmp_path: Path) -> None:
    proc = _machine(
        tmp_path,
        mounts="31 23 0:28 / /sys/fs/cgroup rw shared:9 - tmpfs tmpfs rw\n"
        "32 31 0:29 / /c/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:38 / /c/unified rw - cgroup2 cgroup2 rw\n",
        member="3:cpuset:/elsewhere\n1:cpu,cpuacct:/job/a:b\n0::/else\n",
    )
    assert cpu_group(7, proc=proc) == CpuGroup(
        Path("/c/cpu,cpuacct/job/a:b"), 1, Path("/c/cpu,cpuacct")
    )


def test_version_2_is_found_where_it_has_the_cpu_controller(tmp_path: Path) -> None:
    mounts = f"41 31 0:38 / {tmp_path}/c rw - cgroup2 cgroup2 rw\n"
    proc = _machine(tmp_path, mounts=mounts, member="0::/user/job\n")
    assert cpu_group(7, proc=proc) is None
    (tmp_path / "c").mkdir()
    (tmp_path / "c/cgroup.controllers").write_text("memory cpu\n")
    assert cpu_group(7, proc=proc) == CpuGroup(tmp_path / "c/user/job", 2, tmp_path / "c")


def test_a_container_sees_its_part_of_the_tree(tmp_path: Path) -> None:
    mounts = "32 31 0:29 /docker/4f2 /c/cpu rw - cgroup cgroup rw,cpu\n"
    proc = _machine(tmp_path, mounts=mounts, member="1:cpu:/docker/4f2/job\n")
    assert cpu_group(7, proc=proc) == CpuGroup(Path("/c/cpu/job"), 1, Path("/c/cpu"))
    (proc / "7/cgroup").write_text("1:cpu:/docker/other\n")
    assert cpu_group(7, proc=proc) is None


class _Promises:
    """A guard that only remembers what it was promised."""

    def __init__(self, *others: _Promises) -> None:
        self.steps: list[Step] = []
        self._others = others

    def promise(self, step: Step) -> None:
        self.steps.append(step)

    def promised(self, step: Step) -> bool:
        return any(step in other.steps for other in self._others)

    def undo(self) -> None:
        while self.steps:
            self.steps.pop().undo()

    def lock(self) -> nullcontext[None]:
        return nullcontext()

    def act(self, *arguments: str, namespace: str | None = None) -> str:
        raise NotImplementedError


@pytest.mark.parametrize("alone", [True, False])
def test_in_version_2_the_controller_is_handed_down_and_members_stay_in_leaves(
    tmp_path: Path, alone: bool
) -> None:
    # plain files stand for the kernel's: this machine may have only version 1
    root, parent, leaf = tmp_path, tmp_path / "user", tmp_path / "user/job"
    leaf.mkdir(parents=True)
    (root / "cgroup.subtree_control").write_text("cpu memory\n")
    (parent / "cgroup.subtree_control").write_text("memory\n")
    me = os.getpid()
    (leaf / "cgroup.procs").write_text(f"{me}\n" if alone else f"{me}\n1\n")
    (leaf / "cpu.max").write_text("max 100000\n")
    (leaf / "cpu.weight").write_text("100\n")
    guard = _Promises()

    path = limit_process(guard, CpuGroup(leaf, 2, root), me, cores=0.5, threads=1)

    handed = HandBack(str(parent))
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu"
    assert (path / "cpu.max").read_text() == "5000 10000"
    if alone:
        assert path == leaf
        assert guard.steps == [handed, RestoreFile(str(leaf / "cpu.max"), "max 100000")]
    else:
        assert path == parent / f"failslow-{me}"
        assert (path / "cgroup.procs").read_text() == str(me)
        assert (path / "cpu.weight").read_text() == "100\n"
        assert guard.steps == [handed, DissolveGroup(str(path), str(leaf))]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_of_two_limits_under_one_group_the_last_takes_the_controller_back(
    tmp_path: Path, first_ends_first: bool
) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("memory\n")
    leaves = [tmp_path / "a", tmp_path / "b"]
    for leaf in leaves:
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text(f"{os.getpid()}\n")
        (leaf / "cpu.max").write_text("max 100000\n")
    first = _Promises()
    second = _Promises(first)
    for guard, leaf in zip((first, second), leaves, strict=True):
        limit_process(guard, CpuGroup(leaf, 2, tmp_path), os.getpid(), cores=0.5, threads=1)
        control.write_text("cpu memory\n")  # as the kernel shows what was asked of it

    ends, stays = (first, second) if first_ends_first else (second, first)
    ends.undo()
    assert control.read_text() == "cpu memory\n"
    stays.undo()
    assert control.read_text() == "-cpu"
    assert [(leaf / "cpu.max").read_text() for leaf in leaves] == ["max 100000", "max 100000"]


def test_the_tightest_limit_up_the_tree_counts(tmp_path: Path) -> None:
    leaf = tmp_path / "a/b"
    leaf.mkdir(parents=True)
    (leaf / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a/cpu.max").write_text("50000 100000\n")
    group = CpuGroup(leaf, 2, tmp_path)
    assert group.limit_cores() is None
    assert group.tightest_limit_cores() == 0.5
    group.set_limit(0.25)
    assert (leaf / "cpu.max").read_text() == "2500 10000"
    assert group.tightest_limit_cores() == 0.25


def test_a_record_of_another_boot_is_forgotten_not_carried_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "kernel-file"
    file.write_text("new")
    restore = RestoreFile(str(file), "old")
    nobody = ProcessId(1, 0)
    record = Record("cpu", ("core 0",), "core 0", nobody, nobody, "another boot", (restore,))
    ledger = Ledger(tmp_path)
    ledger.write(record)
    assert ledger.records() == [record]
    assert not record.in_force
    record.undo()
    assert file.read_text() == "new"
    Record("cpu", ("core 0",), "core 0", nobody, nobody, boot_id(), (restore,)).undo()
    assert file.read_text() == "old"


def test_every_step_is_tried_and_all_failures_are_told(tmp_path: Path) -> None:
    busy = tmp_path / "group"
    (busy / "not-empty").mkdir(parents=True)
    file = tmp_path / "kernel-file"
    file.write_text("new")
    steps = (RestoreFile(str(file), "old"), RestoreFile(str(tmp_path), "a folder"))
    one = ProcessId(1, 0)
    record = Record("cpu", ("core 0",), "core 0", one, one, boot_id(), steps)
    with pytest.raises(InjectError, match=r"cannot undo cpu of core 0: RestoreFile: .*tries again"):
        record.undo()
    assert file.read_text() == "old"


def test_records_lie_where_only_their_user_writes() -> None:
    assert ledger_folder({"FAILSLOW_INJECT_FOLDER": "/x"}) == Path("/x")
    assert ledger_folder({}).is_absolute()
