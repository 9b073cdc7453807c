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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.probe.fake_probe import fake_command
from tests.slurm_cluster import SlurmCluster

from failslow.errors import ConfigError, MissingDependencyError, ProbeError
from failslow.probe.campaign import Campaign, CampaignPlan, Halt, Over, SizeClass
from failslow.probe.executors import Executor, Job, LocalExecutor, Seat
from failslow.probe.result import ProbeResult, ProbeSpec
from failslow.probe.runner import CampaignStop, TrainingJob, run_campaign
from failslow.probe.store import StoreWriter, read_store

_LIMIT_S = 60.0
_PREEMPTING = """
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


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
    marks = Path(os.environ.get("FAKE_PROBE_MARKS", "/nowhere"))
    for mark in marks.glob(f"long-1-{nodes}-*"):  # of the same on Slurm
        mark.unlink()
    job = executor.start(spec("long", nodes), tmp_path / "p")
    until(lambda: job.state() == "running")
    if executor.name == "ray":  # whose nodes have folders of their own
        until(lambda: len(list(marks.glob(f"long-1-{nodes}-*"))) == nodes)
    else:  # the first node has met all others; they may say so before
        until(lambda: "all nodes" in _text(tmp_path / "p" / "node0.log"))

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

    more = _PREEMPTING.format(grace_s=0)
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


@pytest.fixture
def told_sbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[dict[str, str], ProbeSpec], dict[str, object]]:
    """What sbatch is told of a probe, by the options of a user; without Slurm."""
    from failslow.probe.executors import slurm

    def told(options: dict[str, str], of: ProbeSpec) -> dict[str, object]:
        found = slurm.SlurmExecutor(options, command=fake_command)._parameters(of)
        more = found["additional_parameters"]
        assert isinstance(more, dict)
        return {"srun": found["srun_args"], **more}

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace())
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/true")
    return told


def test_slurm_gives_a_probe_its_cores_its_gpus_and_nodes_of_its_own(
    told_sbatch: Callable[[dict[str, str], ProbeSpec], dict[str, object]],
) -> None:
    cpu = replace(spec("quick"), workers_per_node=8)
    gpu = replace(cpu, preset="gpu")

    told = told_sbatch({}, cpu)
    assert (told["cpus-per-task"], told["srun"]) == (8, ["--cpus-per-task=8"])
    assert told["exclusive"] is True
    assert "gpus-per-node" not in told
    told = told_sbatch({"partition": "p"}, gpu)
    assert (told["cpus-per-task"], told["srun"]) == (8, ["--cpus-per-task=8"])
    assert (told["gpus-per-node"], told["exclusive"], told["partition"]) == (8, True, "p")


def test_slurm_options_of_the_user_outrank_ours(
    told_sbatch: Callable[[dict[str, str], ProbeSpec], dict[str, object]],
) -> None:
    gpu = replace(spec("quick"), preset="gpu")

    assert told_sbatch({"exclusive": "user"}, gpu)["exclusive"] == "user"
    assert "exclusive" not in told_sbatch({"exclusive": "no"}, gpu)
    told = told_sbatch({"cpus_per_task": "12", "gpus-per-node": "h100:2"}, gpu)
    assert (told["cpus-per-task"], told["srun"]) == ("12", ["--cpus-per-task=12"])
    assert told["gpus-per-node"] == "h100:2"
    assert "cpus_per_task" not in told
    # sbatch refuses the two together
    told = told_sbatch({"cpus-per-gpu": "6"}, gpu)
    assert (told["cpus-per-gpu"], told["srun"]) == ("6", None)
    assert "cpus-per-task" not in told


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("nodes", "say sizes by --probes"),
        ("N", "say sizes by --probes"),
        ("ntasks_per_node", "processes a node by --workers"),
        *((key, "leave it out") for key in ("array", "job-name", "output", "signal", "requeue")),
    ],
)
def test_slurm_options_that_a_campaign_depends_on_are_refused(key: str, remedy: str) -> None:
    from failslow.probe.executors.slurm import SlurmExecutor

    with pytest.raises(ConfigError, match=f"the campaign sets .* of its jobs itself; .*{remedy}"):
        SlurmExecutor({"partition": "p", key: "2"})


class FakeSlurm:
    """Answers as Slurm's commands, at the time that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from failslow.probe.executors import slurm

        self.now_s = 100.0
        self.says: str | None = ""
        """Of squeue."""
        self.given: list[str] = []
        monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(slurm._Queue, "command", staticmethod(self._command))
        self.queue = slurm._Queue()

    def _command(self, *argv: str) -> str | None:
        if argv[0] != "squeue":
            self.given.append(" ".join(argv))
            return ""
        assert "--format=%i %T %r" in argv
        return self.says

    def states(self, job: Job, says: str | None, *times_s: float) -> list[str]:
        self.says = says
        found: list[str] = []
        for at_s in times_s:
            self.now_s = at_s
            found.append(job.state())
        return found


@pytest.mark.parametrize(
    "reason",
    ["PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "QOSMaxNodePerJobLimit",
     "AssocMaxWallDurationPerJobLimit", "QOSMaxGRESPerJob", "QOSMinCpuNotSatisfied", "InvalidQOS"],
)  # fmt: skip
def test_slurm_job_that_can_never_start_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    from failslow.probe.executors.slurm import SlurmJob

    slurm = FakeSlurm(monkeypatch)
    job = SlurmJob(slurm.queue, "7", tmp_path)

    stuck = f"7 PENDING {reason}\n8 PENDING Resources\n"
    assert set(slurm.states(job, stuck, 100.0, 130.0, 159.0)) == {"queued"}
    assert slurm.given == [], "nodes may just be down"
    assert slurm.states(job, stuck, 162.0, 162.2) == ["queued"] * 2
    assert slurm.given == ["scancel --state=PENDING 7"], "once an answer"
    assert slurm.states(job, None, 170.0, 180.0) == ["queued"] * 2
    assert len(slurm.given) == 1, "a controller that does not answer is not asked more"
    assert slurm.states(job, "8 PENDING Resources\n", 190.0, 196.0) == ["running", "ended"]
    assert job.result() is None
    assert f"Slurm can never start job 7: {reason}; change what --slurm asks for" in job.why()
    assert not job.preempted()


@pytest.mark.parametrize(
    "reason",
    ["Resources", "Priority", "None", "BeginTime", "JobHeldUser", "QOSMaxJobsPerUserLimit",
     "AssocGrpCpuLimit", "ReqNodeNotAvail, UnavailableNodes:node1", "PartitionDown"],
)  # fmt: skip
def test_slurm_job_that_waits_its_turn_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    from failslow.probe.executors.slurm import SlurmJob

    slurm = FakeSlurm(monkeypatch)
    job = SlurmJob(slurm.queue, "7", tmp_path)

    assert set(slurm.states(job, f"7 PENDING {reason}\n", 100.0, 200.0, 9e4)) == {"queued"}
    assert slurm.given == []


def test_slurm_job_that_could_not_start_for_a_moment_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from failslow.probe.executors.slurm import SlurmJob

    slurm = FakeSlurm(monkeypatch)
    job = SlurmJob(slurm.queue, "7", tmp_path)
    slurm.states(job, "7 PENDING PartitionNodeLimit\n", 100.0, 150.0)
    slurm.states(job, "7 PENDING Resources\n", 155.0)
    slurm.states(job, "7 PENDING PartitionNodeLimit\n", 158.0, 200.0)
    assert slurm.states(job, "7 RUNNING None\n", 210.0, 300.0) == ["running"] * 2
    assert slurm.given == []

    slurm.states(job, "", 310.0, 320.0)

    assert "job 7 said nothing" in job.why()


@pytest.mark.slow
def test_slurm_takes_back_a_real_job_that_can_never_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    from failslow.probe.executors import slurm

    monkeypatch.setattr(slurm, "_STUCK_S", 2.0)
    more = """
PartitionName=short Nodes=ALL MaxTime=1
PartitionName=small Nodes=ALL MaxNodes=1
"""
    with SlurmCluster(nodes=2, more=more) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environ[name])
        for partition, told in (("short", "PartitionTimeLimit"), ("small", "PartitionNodeLimit")):
            executor = slurm.SlurmExecutor({"partition": partition}, command=fake_command)
            job = executor.start(spec("quick", 2), tmp_path / partition)

            assert ended(job) is None
            assert f"can never start job {job.number}: {told}" in job.why()
            assert not job.preempted()
            assert cluster.job(job.number)["JobState"] == "CANCELLED"


@pytest.mark.slow
def test_slurm_gives_two_probes_different_nodes(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    from failslow.probe.executors.slurm import SlurmExecutor

    executor = SlurmExecutor(command=fake_command)
    try:
        jobs = [executor.start(spec("long", 2), tmp_path / name) for name in "abc"]
        until(lambda: [job.state() for job in jobs[:2]] == ["running"] * 2)

        # of four cores of each node two are free
        assert jobs[2].state() == "queued"
        had = [slurm_cluster.run("squeue", "-h", "-o", "%N", "-j", j.number) for j in jobs[:2]]
        assert len(set(had)) == 2
    finally:
        executor.close()


@pytest.mark.slow
def test_a_campaign_tries_again_what_slurm_took_the_nodes_of(tmp_path: Path) -> None:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    from failslow.probe.executors.slurm import SlurmExecutor

    # the first leaves nothing, the second what it has, the third ends by itself
    kinds = {1: "stubborn", 2: "long", 3: "quick"}

    def by_attempt(spec: ProbeSpec, **more: Any) -> tuple[str, ...]:
        kind = kinds[int(spec.probe_id.rpartition(".")[2])]
        return fake_command(replace(spec, probe_id=f"{kind}-{spec.probe_id}"), **more)

    training = TrainingJob(workers_per_node=2, duration_s=10.0)
    plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=1),), retries=2, failures_in_a_row=1)
    store = tmp_path / "s"

    def carry_out() -> Over | Halt | None:
        executor = SlurmExecutor({"partition": "low"}, command=by_attempt)
        with StoreWriter(store, job=training.as_dict()) as writer:
            try:
                return run_campaign(Campaign(plan), training, writer, executor, stop=CampaignStop())
            finally:
                executor.close()

    with (
        SlurmCluster(nodes=1, more=_PREEMPTING.format(grace_s=10)) as cluster,
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor() as threads,
    ):
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environ[name])
        running = threads.submit(carry_out)
        for attempt in (1, 2):
            log = store / "probes" / f"1n-0001.{attempt}" / "node0.log"
            until(partial(_says_or_done, log, running))
            cluster.submit("#!/bin/sh\ntrue\n", "--partition=high", "--exclusive")
        end = running.result(_LIMIT_S)

    records = read_store(store).records
    assert [(r.attempt, r.ending, r.result is not None) for r in records] == [
        (1, "preempted", False),
        (2, "preempted", True),
        (3, "finished", True),
    ], [r.why for r in records]
    assert end == Over()


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


@pytest.mark.parametrize(
    ("has", "workers", "nodes", "each"),
    [
        ([4, 4, 4], 2, 3, 3),
        ([5, 5], 2, 2, 3),
        ([8, 8], 8, 2, 8),
        ([1, 1], 1, 2, 1),
        ([0, 16, 12, 9], 4, 3, 9),
        ([16, 4, 4], 4, 1, 9),
        ([16, 4, 4], 4, 2, 4),  # too few large ones: better one that may share than none
        ([], 2, 1, 2),
    ],
)
def test_ray_takes_over_half_of_each_node(
    has: list[float], workers: int, nodes: int, each: int
) -> None:
    from failslow.probe.executors.ray import _each

    assert _each(has, replace(spec("quick", nodes), workers_per_node=workers)) == each


class FakeRay:
    """A cluster of one node with four CPUs, of which a call may raise."""

    class RayError(Exception):
        pass

    class NodeDiedError(RayError):
        pass

    class ActorDiedError(RayError):
        def __init__(self, said: str, *, preempted: bool) -> None:
            super().__init__(said)
            self.preempted = preempted

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=self.RayError, NodeDiedError=self.NodeDiedError)
        self.lost: Exception | None = None
        """What calls raise."""
        self.groups: list[int] = []

    def _ask(self) -> None:
        if self.lost is not None:
            raise self.lost

    def nodes(self) -> list[dict[str, object]]:
        self._ask()
        return [{"Alive": True, "Resources": {"CPU": 4.0}}]

    def wait(
        self, references: list[object], *, timeout: float
    ) -> tuple[list[object], list[object]]:
        assert timeout == 0
        self._ask()
        return references, []

    def get(self, _reference: object) -> object:
        self._ask()
        return "127.0.0.1:1"

    def kill(self, _actor: object) -> None:
        self._ask()

    def started(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
        """A probe that runs on it."""
        from failslow.probe.executors.ray import RayExecutor

        monkeypatch.setitem(sys.modules, "ray", self)
        executor = RayExecutor("", command=fake_command)
        call = SimpleNamespace(remote=lambda *_: self._ask())
        actor = SimpleNamespace(address=call, run=call, stop=call)

        def group(_spec: ProbeSpec, each: int) -> SimpleNamespace:
            self._ask()
            self.groups.append(each)
            return SimpleNamespace(ready=object)

        monkeypatch.setattr(executor, "group", group)
        monkeypatch.setattr(executor, "actors", lambda *_: [actor])
        monkeypatch.setattr(executor, "release", lambda _: self._ask())
        return executor.start(spec("long"), folder)


@pytest.mark.parametrize(
    "lost", [RuntimeError("GCS is gone\nand more"), ConnectionError(), FakeRay.RayError("away")]
)
def test_a_lost_ray_cluster_is_a_failed_probe_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: Exception
) -> None:
    ray = FakeRay()
    ray.lost = lost
    told = str(lost).partition("\n")[0] or type(lost).__name__

    with pytest.raises(ProbeError, match=rf"the Ray cluster takes no probe: {told}; see what"):
        ray.started(monkeypatch, tmp_path)

    # nor where it is lost between one call and the next
    ray = FakeRay()
    here = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: here)
    ray.lost = lost
    with pytest.raises(ProbeError, match="the Ray cluster takes no probe"):
        ray.started(monkeypatch, tmp_path)

    ray = FakeRay()
    job = ray.started(monkeypatch, tmp_path)
    assert ray.groups == [3]
    ray.lost = lost
    assert job.state() == "ended"
    assert (job.result(), job.preempted()) == (None, False)
    assert f"the cluster lost it: {told}" in job.why()
    job.stop()
    job.kill()


def test_a_probe_of_a_lost_ray_cluster_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = FakeRay()
    job = ray.started(monkeypatch, tmp_path)
    job._actors, job._runs = job._executor.actors(), [object()]
    ray.lost = ConnectionError("gone")

    job.stop()
    job.kill()

    assert job.state() == "ended"


@pytest.mark.parametrize(
    ("error", "preempted"),
    [
        (FakeRay.ActorDiedError("The actor died\npid: 7", preempted=True), True),
        (FakeRay.ActorDiedError("The actor died of a preemption?", preempted=False), False),
        (FakeRay.NodeDiedError("node 7: AUTOSCALER_DRAIN_PREEMPTED"), True),
        (FakeRay.NodeDiedError("node 7: missed heartbeats"), False),
        (FakeRay.RayError("ray::_Node.run()\nValueError: preempted"), False),
    ],
)
def test_ray_remembers_that_a_node_was_taken_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, preempted: bool
) -> None:
    ray = FakeRay()
    job = ray.started(monkeypatch, tmp_path)
    assert not job.preempted()
    ray.lost = error

    assert job.state() == "ended"

    assert job.preempted() is preempted
    assert "the cluster lost it" in job.why()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets and files to the collector
def test_ray_gives_two_probes_different_nodes(ray_cluster: None, tmp_path: Path) -> None:
    from failslow.probe.executors.ray import RayExecutor

    executor = RayExecutor("", command=fake_command)
    try:
        jobs = [executor.start(spec("long", 3), tmp_path / name) for name in "ab"]
        until(lambda: jobs[0].state() == "running")
        for _ in range(20):  # two of the four CPUs of each node are enough for its workers
            assert jobs[1].state() == "queued"
            time.sleep(0.1)
        jobs[0].stop()
        until(lambda: jobs[0].state() == "ended")
        until(lambda: jobs[1].state() == "running")
    finally:
        executor.close()


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


def _says_or_done(log: Path, running: Future[Any]) -> bool:
    return "all nodes" in _text(log) or running.done()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
