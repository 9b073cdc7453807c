"""The test bed itself: real training on four nodes feels real faults and recovers; all is gone
afterwards, whatever ends its owner."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.testbed import TRAIN_DDP, Iteration, TestBed, Worker, until

from failslow.errors import LabError
from failslow.inject import congest, throttle
from failslow.inject.cgroups import cpu_group
from failslow.lab.sweep import NAMESPACES, dead_beds, sweep

ROOT = Path(__file__).resolve().parents[2]
_SHOW = """
import json, os, socket
with open("/proc/net/dev") as file:
    interfaces = sorted(line.split(":")[0].strip() for line in file if ":" in line)
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS".split()
print(json.dumps([*(os.environ[n] for n in names), socket.gethostname(), *interfaces]))
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if reason := TestBed.available():
        pytest.skip(reason)


def _traces(name: str) -> list[str]:
    """What is there of a bed: namespaces, groups, rings, processes."""
    group = cpu_group()
    assert group is not None
    found = [p.name for p in NAMESPACES.glob(f"{name}*")] if NAMESPACES.is_dir() else []
    found += [p.name for p in group.root.glob(f"{name}w*")]
    found += [p.name for p in Path("/dev/shm").glob(f"{name}n*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"FAILSLOW_JOB={name}-".encode() in words or f"\0{name}\0".encode() in words:
                found.append(entry.name)
    return found


def test_workers_see_their_rank_their_node_and_its_network(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(_SHOW)
    with TestBed(nodes=2, folder=tmp_path) as bed:
        workers = bed.launch(script, workers_per_node=2, env={"OMP_NUM_THREADS": "3"})
        bed.wait(60)
        name = bed.name
        seen = [worker.text() for worker in workers]

    for rank, text in enumerate(seen):
        node, local = divmod(rank, 2)
        expected = [rank, 4, local, 2, node, "10.77.0.1", 3, f"{name}n{node}", "eth0", "lo"]
        assert text == "[" + ", ".join(f'"{value}"' for value in expected) + "]\n"
    assert _traces(name) == []


def test_a_worker_is_python_itself_in_a_group_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import signal; print('up', flush=True); signal.pause()")
    with TestBed(nodes=1, folder=tmp_path) as bed:
        one, two = bed.launch(script, workers_per_node=2, cores=[0])
        until(lambda: all(w.text() for w in (one, two)))
        assert _members(one) == {one.pid}
        assert b"wait.py" in Path(f"/proc/{one.pid}/cmdline").read_bytes()
        assert os.sched_getaffinity(two.pid) == {0}
        bed.kill()
        assert one.process.poll() == -signal.SIGKILL
        # and the next job finds the nodes free
        bed.launch(TRAIN_DDP, args=["--help"])
        bed.wait(60)


def _members(worker: Worker) -> set[int]:
    return set(map(int, (worker.group / "cgroup.procs").read_text().split()))


def test_a_failing_rank_is_told_with_its_text(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, signal, sys\n"
        "sys.exit('no data for rank 1') if os.environ['RANK'] == '1' else signal.pause()\n"
    )
    with TestBed(nodes=2, folder=tmp_path) as bed:
        bed.launch(script)
        with pytest.raises(LabError, match=r"rank 1: exit 1\nno data for rank 1"):
            bed.wait(60)


def test_beds_stand_side_by_side(tmp_path: Path) -> None:
    with TestBed(nodes=1, folder=tmp_path) as one, TestBed(nodes=1, folder=tmp_path) as two:
        assert one.name != two.name
        assert one.nodes[0].address == two.nodes[0].address
    assert _traces(one.name) == []
    assert _traces(two.name) == []


def test_an_exception_takes_the_bed_down(tmp_path: Path) -> None:
    bed = TestBed(nodes=1, folder=tmp_path)

    def fail_inside() -> None:
        with bed:
            bed.launch(TRAIN_DDP, args=["--seconds", "60"])
            raise RuntimeError("a test failed")

    with pytest.raises(RuntimeError, match="a test failed"):
        fail_inside()
    assert _traces(bed.name) == []
    assert bed.workers[0].process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("reaper_too", [False, True])
def test_a_killed_owner_leaves_no_bed(tmp_path: Path, reaper_too: bool) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import signal; signal.pause()")
    code = (
        "import signal, sys\n"
        "from tests.testbed import TestBed\n"
        "with TestBed(nodes=2) as bed:\n"
        "    bed.launch(sys.argv[1])\n"
        "    print(bed.name, bed._reaper.pid, bed.folder, flush=True)\n"
        "    signal.pause()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    name, reaper, folder = owner.stdout.readline().split()
    assert Path(folder).parent == tmp_path
    group = cpu_group()
    assert group is not None
    assert len(_traces(name)) >= 7  # 3 namespaces, 2 groups, 2 folders of rings

    if reaper_too:
        os.kill(int(reaper), signal.SIGKILL)
    owner.kill()
    owner.communicate()

    if reaper_too:
        # the next bed, of whomever, would sweep it too
        until(lambda: name in dead_beds(group.root) or _traces(name) == [])
        sweep(name, group.root)
        assert _traces(name) == []
    else:
        until(lambda: _traces(name) == [] and not Path(folder).exists())


def _median_s(iterations: list[Iteration]) -> float:
    return statistics.median(i.duration_s for i in iterations)


@pytest.mark.slow
def test_training_feels_a_throttled_worker_and_a_congested_link_and_recovers(
    tmp_path: Path,
) -> None:
    def next_median_s(count: int) -> float:
        """Median of the iterations that begin from now on, by the trainer's own clock."""
        begin_s = time.monotonic()

        def fresh() -> list[Iteration]:
            bed.check()
            return [i for i in bed.iterations(0) if i.start_s >= begin_s]

        until(lambda: len(fresh()) >= count, limit_s=90)
        return _median_s(fresh())

    with TestBed(nodes=4, folder=tmp_path) as bed:
        workers = bed.launch(TRAIN_DDP, args=["--seconds", "100", "--gradient-mb", "2"])
        bed.until_iterations(5, limit_s=90)  # the first ones are slow by themselves
        healthy_s = next_median_s(20)
        with throttle(workers[2].pid, to=0.08) as injection:
            assert str(workers[2].group) in injection.how
            throttled_s = next_median_s(4)
        after_throttle_s = next_median_s(10)
        one, zero = bed.nodes[1], bed.nodes[0]
        with congest(one.namespace, one.interface, 40, dst=zero.address):
            congested_s = next_median_s(4)
        after_link_s = next_median_s(10)
        bed.kill()

    assert throttled_s > 1.5 * healthy_s
    assert congested_s > 1.5 * healthy_s
    assert after_throttle_s < 0.7 * throttled_s
    assert after_link_s < 0.7 * congested_s
    assert _traces(bed.name) == []


@pytest.mark.parametrize("watched", [False, True])
def test_training_ends_by_itself_after_its_steps(tmp_path: Path, watched: bool) -> None:
    options = ["--steps", "4", "--iteration-ms", "70", "--micro-batches", "2"]
    with TestBed(nodes=2, folder=tmp_path) as bed:
        env = {"FAILSLOW": "1"} if watched else {}
        bed.launch(TRAIN_DDP, args=options, env=env)
        if watched:
            until(lambda: all(list(node.rings.glob("*.ring")) for node in bed.nodes))
        bed.wait(90)
        recorded = [bed.iterations(rank) for rank in range(2)]
        rings = [list(node.rings.glob("*.ring")) for node in bed.nodes]

    for iterations in recorded:
        assert [i.step for i in iterations] == [0, 1, 2, 3]
        assert all(a.end_s <= b.start_s for a, b in pairwise(iterations))
        assert all(0.03 < i.compute_s <= i.duration_s for i in iterations)
    assert watched or rings == [[], []]
