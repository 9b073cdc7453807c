"""N nodes on one machine: network namespaces on a bridge, with real workers that real faults hit.

In: a script and how often to run it. Out: its processes, each with plain RANK variables, a network
interface and a control group of its own, and what they print.

    with TestBed(nodes=4, folder=Path("bed")) as bed:
        bed.launch("train.py", args=["--steps", "20"], env={"FAILSLOW": "1"})
        bed.wait(60)
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from failslow.errors import LabError
from failslow.inject.cgroups import CpuGroup, cpu_group
from failslow.lab.sweep import NAMESPACES, dead_beds, kill, run, start_ticks, sweep

__all__ = ["Node", "TestBed", "Worker"]

_WEIGHT = {1: 16 * 1024, 2: 1600}
"""Of a worker's control group, 16 times the usual: what else runs here hardly slows it."""
_beds = itertools.count()
_Bed = TypeVar("_Bed", bound="TestBed")


@dataclass(frozen=True)
class Node:
    """One made-up host."""

    index: int
    namespace: str
    """Name of its network namespace, and its host name."""
    address: str
    interface: ClassVar[str] = "eth0"

    @property
    def rings(self) -> Path:
        """Where capture puts this node's rings: hosts don't share /dev/shm."""
        return Path("/dev/shm") / self.namespace


@dataclass(frozen=True)
class Worker:
    """One process of the job."""

    rank: int
    node: Node
    process: subprocess.Popen[bytes]
    group: Path
    """Its cpu control group; a quota can be written there."""
    log: Path
    """What it printed: stdout and stderr in the order they came."""

    @property
    def pid(self) -> int:
        """The Python process itself."""
        return self.process.pid

    def text(self) -> str:
        """What it printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class TestBed:
    """Nodes with an interface `eth0` each, joined by a bridge; everything goes at the end.

    egress_mbit: shape every node's egress to this rate. folder: for logs and records; a temporary
    one, removed at the end, if left out. Nothing is set up before the `with` block. When the owner
    dies, whatever kills it, a second process takes the bed down.
    """

    __test__ = False  # not a test, for all its name

    def __init__(
        self, nodes: int = 4, *, egress_mbit: float | None = None, folder: Path | None = None
    ) -> None:
        number = next(_beds)
        self.name = f"fs{os.getpid()}{'' if number == 0 else _letters(number)}"
        self.nodes = tuple(Node(i, f"{self.name}n{i}", f"10.77.0.{i + 1}") for i in range(nodes))
        self.egress_mbit = egress_mbit
        self.workers: tuple[Worker, ...] = ()
        self._given_folder = folder
        self._folder: Path | None = None
        self._group_root = Path()
        self._group_version = 1
        self._reaper: subprocess.Popen[bytes] | None = None
        self._launches = itertools.count()

    @staticmethod
    def available() -> str | None:
        """None where a bed can be made, else the reason, for `pytest.skip`."""
        if not sys.platform.startswith("linux"):
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "network namespaces and control groups need root"
        for tool in ("ip", "tc", "nsenter", "unshare"):
            if shutil.which(tool) is None:
                return f"{tool} is not installed (iproute2, util-linux)"
        group = cpu_group()
        if group is None:
            return "no cpu control group is to be seen"
        probe = CpuGroup(group.root / f"fs{os.getpid()}w9999", group.version, group.root)
        try:
            probe.path.mkdir()
            probe.weight_file().write_text(str(_WEIGHT[group.version]), encoding="ascii")
            # veth, bridge and htb in a namespace that vanishes with the command
            trial = (
                "ip link add br0 type bridge && ip link add eth0 type veth peer name p0 && "
                "tc qdisc add dev eth0 root handle 1: htb"
            )
            run("unshare", "--net", "sh", "-c", trial)
        except (OSError, RuntimeError) as error:
            return f"no test bed here: {error}"
        finally:
            with suppress(OSError):
                probe.path.rmdir()
        return None

    @property
    def folder(self) -> Path:
        """Logs (rank0.log) and the trainer's own records (rank0.jsonl)."""
        if self._folder is None:
            raise LabError("the bed is not up; use it in a with block")
        return self._folder

    def __enter__(self: _Bed) -> _Bed:
        group = cpu_group()
        if group is None:
            raise LabError(str(self.available()))
        self._group_root, self._group_version = group.root, group.version
        for bed in dead_beds(group.root):
            sweep(bed, group.root)
        self._folder = self._given_folder or Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        owner = [str(os.getpid()), str(start_ticks(os.getpid()))]
        reaper = Path(__file__).with_name("sweep.py")
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(reaper), self.name, str(group.root), *owner],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            self._wire()
        except BaseException:
            self._take_down()
            raise
        return self

    def _wire(self) -> None:
        """Namespaces, bridge, addresses."""
        switch = f"{self.name}sw"
        made = [f"netns add {name}" for name in (switch, *(n.namespace for n in self.nodes))]
        made += [
            f"link add eth0 netns {n.namespace} type veth peer name p{n.index} netns {switch}"
            for n in self.nodes
        ]
        run("ip", "-batch", "-", stdin="\n".join(made))
        ports = "".join(
            f"link set p{n.index} master br0\nlink set p{n.index} up\n" for n in self.nodes
        )
        bridge = "link add br0 type bridge\nlink set br0 up\nlink set lo up\n"
        run("ip", "-n", switch, "-batch", "-", stdin=bridge + ports)
        for node in self.nodes:
            up = f"link set lo up\naddr add {node.address}/24 dev eth0\nlink set eth0 up\n"
            run("ip", "-n", node.namespace, "-batch", "-", stdin=up)
            if self.egress_mbit is not None:
                self.shape(node, self.egress_mbit)
            node.rings.mkdir(mode=0o700, exist_ok=True)

    @staticmethod
    def shape(node: Node, egress_mbit: float) -> None:
        """Set the rate of everything that leaves the node: its network card, so to speak."""
        rate = f"{round(egress_mbit * 1e6)}bit"
        shaping = (
            "qdisc replace dev eth0 root handle 1: htb default 1\n"
            f"class replace dev eth0 parent 1: classid 1:1 htb rate {rate} ceil {rate} "
            "burst 64k cburst 64k quantum 60000\n"
        )
        run("tc", "-n", node.namespace, "-batch", "-", stdin=shaping)

    def launch(
        self,
        script: str | Path,
        *,
        workers_per_node: int = 1,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
    ) -> tuple[Worker, ...]:
        """Start one Python process a worker; returns at once. One job at a time.

        cores: rank r and what watches it are pinned to core r modulo their number. env outranks
        what the bed sets; FAILSLOW variables of this process are not passed on.
        """
        if any(w.process.poll() is None for w in self.workers):
            raise LabError("a job runs in this bed already; kill it first")
        kill(self.name, self._group_root)  # what the last job left behind
        number = next(self._launches)
        world = workers_per_node * len(self.nodes)
        common = {
            **{k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")},
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(workers_per_node),
            "GROUP_WORLD_SIZE": str(len(self.nodes)),
            "MASTER_ADDR": self.nodes[0].address,
            "MASTER_PORT": str(29500 + number),
            "TESTBED_FOLDER": str(self.folder),
            # read only where FAILSLOW=1 is given
            "FAILSLOW_JOB": f"{self.name}-{number}",
            "FAILSLOW_TOKEN": os.urandom(32).hex(),
        }
        workers = []
        for rank in range(world):
            node = self.nodes[rank // workers_per_node]
            variables = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % workers_per_node),
                "GROUP_RANK": str(node.index),
                "FAILSLOW_CAPTURE_FOLDER": str(node.rings),
                # a machine of its own, though all run on one kernel
                "FAILSLOW_NODE": node.namespace,
                **(env or {}),
            }
            if cores is not None:
                # a node's monitoring on the node's own core. Linux 6.18 divides a control group's
                # weight among the cores it runs on, from moment to moment, and who shares one with
                # a group whose weight went up and down there may then get none of it for 30 s
                variables["FAILSLOW_RUNTIME_CORES"] = str(cores[rank % len(cores)])
            workers.append(self._start(rank, node, [str(script), *args], variables))
            self.workers = tuple(workers)
            if cores is not None:
                os.sched_setaffinity(workers[-1].pid, {cores[rank % len(cores)]})
        return self.workers

    def _start(
        self, rank: int, node: Node, command: Sequence[str], variables: Mapping[str, str]
    ) -> Worker:
        """Start a rank: into its control group, its namespaces, then the same pid is Python."""
        group = self._group(rank)
        log = self.folder / f"rank{rank}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*_way(node, group, node.namespace), sys.executable, *command],
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Worker(rank, node, process, group.path, log)

    def way_into(self, node: Node, *, host: str = "") -> tuple[str, ...]:
        """Arguments that put a command on the node, in the control group of a first worker there.

        The command keeps the pid. host: what it takes for its host name; the namespace's, if left
        out. Rings of the node belong into `node.rings`: say so by FAILSLOW_CAPTURE_FOLDER.
        """
        return _way(node, self._group(node.index), host or node.namespace)

    def _group(self, number: int) -> CpuGroup:
        """A worker's control group, made if absent."""
        group = CpuGroup(
            self._group_root / f"{self.name}w{number}", self._group_version, self._group_root
        )
        group.path.mkdir(exist_ok=True)
        group.weight_file().write_text(str(_WEIGHT[group.version]), encoding="ascii")
        return group

    def wait(self, timeout_s: float) -> None:
        """Until every worker has ended with 0. LabError with the first failing one's text."""
        deadline_s = time.monotonic() + timeout_s
        while running := [w for w in self.workers if w.process.poll() is None]:
            self.check()
            if time.monotonic() > deadline_s:
                raise LabError(
                    f"ranks {[w.rank for w in running]} still run after {timeout_s} s:\n"
                    + running[0].text()[-4000:]
                )
            time.sleep(0.02)
        self.check()

    def check(self) -> None:
        """LabError where a worker has failed, with the end of what it printed."""
        for worker in self.workers:
            code = worker.process.poll()
            if code not in (None, 0):
                raise LabError(f"rank {worker.rank}: exit {code}\n{worker.text()[-4000:]}")

    def kill(self) -> None:
        """Kill every process of the job, children and monitors too; returns once they are gone."""
        for worker in self.workers:
            worker.process.kill()  # it may not have entered its group yet
            worker.process.wait()
        kill(self.name, self._group_root)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._take_down()

    def _take_down(self) -> None:
        try:
            self.kill()
            sweep(self.name, self._group_root)
        finally:
            if self._reaper is not None and self._reaper.stdin is not None:
                self._reaper.stdin.close()
                self._reaper.wait()


def _way(node: Node, group: CpuGroup, host: str) -> tuple[str, ...]:
    """What leads into a control group and a node's namespaces."""
    enter = (
        'echo $$ > "$1"; net=$2; host=$3; shift 3; exec nsenter --net="$net" '
        'unshare --uts sh -c \'echo "$0" > /proc/sys/kernel/hostname; exec "$@"\' '
        '"$host" "$@"'
    )
    namespace = str(NAMESPACES / node.namespace)
    return ("sh", "-c", enter, "sh", str(group.processes_file), namespace, host)


def _letters(number: int) -> str:
    """1 -> a, 27 -> aa: digits would run into those of the pid or of the node."""
    text = ""
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("a") + rest) + text
    return text
