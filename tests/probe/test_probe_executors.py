"""One suite for all executors, on what they really use: processes, a Slurm cluster, a Ray cluster.

The probes are stand-ins that train nothing (fake_probe.py): what is tested is who starts, reaches
and ends them. The Ray cluster needs Ray, which `make` installs where there is a wheel of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.probe.fake_probe import fake_command
from tests.slurm_cluster import SlurmCluster

from failslow.errors import MissingDependencyError, ProbeError
from failslow.probe.executors import Executor, Job, LocalExecutor, Seat
from failslow.probe.result import ProbeResult, ProbeSpec

_LIMIT_S = 60.0


def until(condition: Callable[[], object], limit_s: float = _LIMIT_S) -> None:
    """Wait for `condition`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Four nodes."""
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    with SlurmCluster(nodes=4) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environ[name])
        yield cluster


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Four nodes, joined."""
    ray = pytest.importorskip("ray")
    from tests.ray_cluster import ray_cluster as cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv("FAKE_PROBE_MARKS", str(tmp_path_factory.mktemp("marks")))
        with cluster(nodes=4) as address:
            ray.init(address=address, _node_ip_address="127.0.0.2", log_to_driver=False)
            try:
                yield
            finally:
                ray.shutdown()


@pytest.fixture(
    params=[
        "local",
        pytest.param("slurm", marks=pytest.mark.slow),
        pytest.param(
            "ray",
            marks=[
                pytest.mark.slow,
                # Ray leaves sockets and files to the collector
                pytest.mark.filterwarnings("ignore"),
            ],
        ),
    ]
)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Each kind, with room for a probe of four nodes."""
    if request.param == "local":
        made: Executor = LocalExecutor([Seat(name=f"s{n}") for n in range(4)], command=fake_command)
    elif request.param == "slurm":
        request.getfixturevalue("slurm_cluster")
        from failslow.probe.executors.slurm import SlurmExecutor

        made = SlurmExecutor(command=fake_command)
    else:
        request.getfixturevalue("ray_cluster")
        from failslow.probe.executors.ray import RayExecutor

        made = RayExecutor("", command=fake_command)
    yield made
    made.close()


def spec(what: str, nodes: int = 1) -> ProbeSpec:
    """Two workers a node."""
    return ProbeSpec(probe_id=f"{what}-1", nodes=nodes, workers_per_node=2, duration_s=5.0)


def ended(job: Job) -> ProbeResult | None:
    """Its result, once it is there."""
    until(lambda: job.state() == "ended")
    return job.result()


# -- the contract ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_probe_comes_home_with_its_result(executor: Executor, tmp_path: Path, nodes: int) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text("one\ntwo\nthree\n")

    job = executor.start(spec("quick", nodes), tmp_path / "a b", history=[history])
    found = ended(job)

    assert found is not None, job.why()
    assert (found.state, len(found.nodes), found.iterations) == ("done", nodes, 3)
    assert job.why() == ""
    assert job.state() == "ended"
    job.stop()
    job.kill()
    assert job.result() == found


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_stopped_probe_gives_what_it_has(executor: Executor, tmp_path: Path, nodes: int) -> None:
    job = executor.start(spec("long", nodes), tmp_path / "p")
    until(lambda: job.state() == "running")
    if executor.name == "ray":  # whose nodes have folders of their own
        marks = Path(os.environ["FAKE_PROBE_MARKS"])
        until(lambda: len(list(marks.glob(f"long-1-{nodes}-*"))) == nodes)
    else:
        until(lambda: any("all nodes" in _text(log) for log in (tmp_path / "p").rglob("*log*")))

    for _ in range(3):  # it is told once
        job.stop()
    found = ended(job)

    assert found is not None, job.why()
    assert (found.state, len(found.nodes)) == ("preempted", nodes)


@pytest.mark.parametrize("what", ["crash", "torn"])
def test_no_result_is_explained_in_a_line(executor: Executor, tmp_path: Path, what: str) -> None:
    job = executor.start(spec(what), tmp_path / "p")

    assert ended(job) is None
    told = {"crash": "no torch here", "torn": "cannot be used"}[what]
    assert told in job.why()
    assert "\n" not in job.why()


def test_a_probe_that_failed_says_so_itself(executor: Executor, tmp_path: Path) -> None:
    found = ended(job := executor.start(spec("fails"), tmp_path / "p"))

    assert found is not None, job.why()
    assert (found.state, found.error) == ("failed", "worker 0 ended")


def test_a_killed_probe_leaves_nothing(executor: Executor, tmp_path: Path) -> None:
    job = executor.start(spec("long", 2), tmp_path / "p")
    until(lambda: job.state() == "running")

    job.kill()

    assert ended(job) is None
    assert job.why()
    until(lambda: not any("long-1" in c for c in _commands()))


def test_two_run_at_the_same_time_and_close_ends_them(executor: Executor, tmp_path: Path) -> None:
    jobs = [executor.start(spec("long", 2), tmp_path / name) for name in ("p", "q")]
    until(lambda: [job.state() for job in jobs] == ["running", "running"])

    executor.close()

    until(lambda: not any("long-1" in c for c in _commands()))


def test_an_old_result_is_not_taken_for_a_new_one(executor: Executor, tmp_path: Path) -> None:
    assert ended(executor.start(spec("quick"), tmp_path / "p")) is not None

    assert ended(executor.start(spec("crash"), tmp_path / "p")) is None


# -- of single executors ---------------------------------------------------------------------------


def test_a_machine_has_the_seats_it_has(tmp_path: Path) -> None:
    executor = LocalExecutor(command=fake_command)

    with pytest.raises(ProbeError, match="of 4 nodes does not fit on 1; run it with --executor"):
        executor.start(spec("quick", 4), tmp_path / "p")
    job = executor.start(spec("long"), tmp_path / "p")
    with pytest.raises(ProbeError, match="0 of 1 are free"):
        executor.start(spec("quick"), tmp_path / "q")
    job.kill()
    job.wait()
    assert ended(executor.start(spec("quick"), tmp_path / "q")) is not None


def test_seats_take_turns(tmp_path: Path) -> None:
    executor = LocalExecutor([Seat(name=n) for n in "abc"], command=fake_command)
    had = []
    for _ in range(4):
        job = executor.start(spec("quick"), tmp_path / "p")
        had += [seat.name for seat in executor.seats(job)]
        job.wait()

    assert had == ["a", "b", "c", "a"]


def test_a_seat_that_leads_nowhere_is_one_line(tmp_path: Path) -> None:
    executor = LocalExecutor([Seat(prefix=("/no/such/program",))], command=fake_command)
    job = executor.start(spec("quick"), tmp_path / "p")

    assert ended(job) is None
    assert "/no/such/program: No such file" in job.why()


def test_probes_end_when_the_campaign_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from failslow.probe.executors import LocalExecutor
from tests.probe.test_probe_executors import fake_command, spec
LocalExecutor(command=fake_command).start(spec("long"), Path({str(tmp_path)!r}))
print("started", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as campaign:
        assert campaign.stdout is not None
        campaign.stdout.readline()
        until(lambda: "all nodes" in _text(tmp_path / "node0.log"))
        campaign.send_signal(signal.SIGKILL)
    # it is told to end, and ends with what it has
    until((tmp_path / "result.json").exists, 20.0)
    assert '"preempted"' in (tmp_path / "result.json").read_text()


@pytest.mark.slow
def test_slurm_stops_a_probe_in_the_queue(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    from failslow.probe.executors.slurm import SlurmExecutor

    executor = SlurmExecutor({"begin": "now+1hour"}, command=fake_command)
    job = executor.start(spec("quick"), tmp_path / "p")
    until(lambda: job.state() == "queued")

    job.stop()

    assert ended(job) is None
    assert "wrote no result" in job.why()


@pytest.mark.slow
def test_slurm_says_why_it_takes_no_probe(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    from failslow.probe.executors.slurm import SlurmExecutor

    with pytest.raises(ProbeError, match=r"Slurm takes no probe: .*partition"):
        SlurmExecutor({"partition": "no-such"}, command=fake_command).start(
            spec("quick"), tmp_path / "p"
        )


@pytest.mark.slow
def test_slurm_clears_away_what_a_killed_campaign_left(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    from failslow.probe.executors.slurm import SlurmExecutor

    def of(campaign: str) -> ProbeSpec:
        return ProbeSpec(
            probe_id=f"{campaign}-1n-0001.1", campaign=campaign, workers_per_node=2, duration_s=5.0
        )

    later = {"begin": "now+1hour"}
    old = [
        SlurmExecutor(later, command=fake_command).start(of(name), tmp_path / name)
        for name in ("c1", "c2")
    ]
    until(lambda: [job.state() for job in old] == ["queued", "queued"])

    new = SlurmExecutor(later, command=fake_command).start(of("c1"), tmp_path / "new")

    until(lambda: old[0].state() == "ended")
    assert (old[1].state(), new.state()) == ("queued", "queued")
    for job in (old[1], new):
        job.stop()


@pytest.mark.slow
def test_slurm_says_that_it_took_the_nodes_away(tmp_path: Path) -> None:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    from failslow.probe.executors.slurm import SlurmExecutor

    more = """
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""
    with SlurmCluster(nodes=1, more=more) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environ[name])
        executor = SlurmExecutor({"partition": "low"}, command=fake_command)
        job = executor.start(spec("crash"), tmp_path / "a")
        assert ended(job) is None
        assert not job.preempted()
        job = executor.start(spec("stubborn"), tmp_path / "b")
        until(lambda: "all nodes" in _text(tmp_path / "b" / "node0.log"))

        cluster.submit("#!/bin/sh\ntrue\n", "--partition=high", "--exclusive")

        assert ended(job) is None
        assert job.preempted()


def test_without_slurm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from failslow.probe.executors.slurm import SlurmExecutor

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeError, match="sbatch is not to be found; run the campaign where"):
        SlurmExecutor()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'failslow\[slurm\]'"):
        SlurmExecutor()


def test_slurm_that_does_not_answer_has_not_ended_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from failslow.probe.executors import slurm

    slurm_says: str | None = None
    now_s = 100.0
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(slurm._Queue, "command", staticmethod(lambda *_: slurm_says))
    queue = slurm._Queue()

    def states(job: slurm.SlurmJob, says: str | None, *times_s: float) -> list[str]:
        nonlocal slurm_says, now_s
        slurm_says = says
        found: list[str] = []
        for at_s in times_s:
            now_s = at_s
            found.append(job.state())
        return found

    job = slurm.SlurmJob(queue, "7", tmp_path)
    assert set(states(job, None, 100.0, 105.0, 111.0, 300.0)) == {"queued"}, (
        "nobody said it is gone"
    )
    assert states(job, "7 RUNNING\n", 302.0) == ["running"]
    assert states(job, None, 340.0, 400.0) == ["running", "running"]
    assert states(job, "", 402.0, 408.0) == ["running", "ended"]

    now_s = 500.0
    lost = slurm.SlurmJob(queue, "8", tmp_path)  # one that no answer ever has
    assert states(lost, None, 500.0, 520.0) == ["queued", "queued"]
    assert states(lost, "", 530.0, 536.0) == ["running", "ended"]


def test_ray_takes_no_probe_that_its_nodes_have_no_room_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from failslow.probe.executors.ray import RayExecutor

    nodes = [{"Alive": n != 2, "Resources": {"CPU": 4.0 * n}} for n in range(4)]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    executor = RayExecutor("", command=fake_command)

    with pytest.raises(ProbeError, match="of 4 nodes does not fit on the 3 of this cluster"):
        executor.start(spec("quick", 4), tmp_path / "p")
    with pytest.raises(ProbeError, match=r"3 nodes with 2 CPUs each does not fit: 2 of the 3"):
        executor.start(spec("quick", 3), tmp_path / "p")
    gpu = replace(spec("quick"), preset="gpu")
    with pytest.raises(ProbeError, match=r"with 2 GPUs each does not fit: 0 of the 3 nodes"):
        executor.start(gpu, tmp_path / "p")


def test_a_node_of_ray_runs_its_own_python(tmp_path: Path) -> None:
    from failslow.probe.executors.ray import _Node

    code = "import sys; open(sys.argv[1] + '/result.json', 'w').write(sys.argv[2])"
    argv = ["/no/such/python", "-c", code, "@here", "measured"]

    assert _Node().run(argv, "", "@here", "") == (0, b"measured", "")


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from failslow.probe.executors.ray import RayExecutor

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'failslow\[ray\]'"):
        RayExecutor()


@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets and files to the collector
def test_ray_gives_each_node_of_a_probe_another_machine(ray_cluster: None, tmp_path: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    from failslow.probe.executors.ray import RayExecutor

    executor = RayExecutor("", command=fake_command)
    job = executor.start(spec("long", 4), tmp_path / "p")
    until(lambda: job.state() == "running")
    tables = [t for t in placement_group_table().values() if t["state"] == "CREATED"]
    places = {node for table in tables for node in table["bundles_to_node_id"].values()}
    executor.close()

    assert len(places) == 4
    assert len(ray.nodes()) == 4
    with pytest.raises(ProbeError, match="of 5 nodes does not fit on the 4"):
        executor.start(spec("quick", 5), tmp_path / "p")


def _commands() -> list[list[str]]:
    """Command lines of the stand-ins that run on this machine."""
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [line for line in found if any("fake_probe.py" in part for part in line)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
