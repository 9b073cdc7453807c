"""A real Slurm cluster on this machine: munged, slurmctld and some slurmd, started by hand.

In: how many nodes. Out: commands that reach the cluster, and what it says of jobs and nodes.

    if reason := SlurmCluster.available():
        pytest.skip(reason)
    with SlurmCluster(nodes=4) as slurm:
        job = slurm.submit("#!/bin/sh\\nsrun hostname\\n", "--nodes", "2")
        slurm.until_job(job, "COMPLETED")
        with pytest.MonkeyPatch.context() as patch:   # for submitit, which finds it by SLURM_CONF
            patch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])

Its nodes, node1 … nodeN, share the machine, its host name and its files; a job tells them apart by
SLURMD_NODENAME. Everything listens on loopback, belongs to the user who runs the tests, lies in one
folder and goes at the end. Nothing is kept by slurmdbd: `sacct` knows no job, `scontrol show job`
does for five minutes after its end. A job that is requeued starts again after some
`cred_expire_s` seconds (Slurm's own default is two minutes).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

__all__ = ["SlurmCluster"]

_TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo", "scancel")
_SBIN = "/usr/sbin:/sbin"
_START_S, _STOP_S, _KILL_S = 60.0, 3.0, 10.0
_CANCEL_S = 15.0
"""A job's processes have KillWait seconds to end by themselves."""
_CONF = """
ClusterName=failslow
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={cred_expire_s}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=300
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName=node{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"


class SlurmCluster:
    """A cluster inside a `with` block. Raises RuntimeError when it does not come up.

    cpus: of each node. more: further lines of slurm.conf, for partitions and the like.
    """

    def __init__(
        self, nodes: int = 4, *, cpus: int = 4, cred_expire_s: int = 5, more: str = ""
    ) -> None:
        self.nodes = tuple(f"node{n}" for n in range(1, nodes + 1))
        self._cpus, self._cred_expire_s, self._more = cpus, cred_expire_s, more
        self._servers: list[subprocess.Popen[bytes]] = []
        self.folder = Path()
        """Of its own files; a short one, as a socket's path has to be."""
        self.environ: dict[str, str] = {}
        """What Slurm's commands need to reach it."""

    @staticmethod
    def available() -> str | None:
        """None where a cluster can be started, else the reason, for `pytest.skip`."""
        if not sys.platform.startswith("linux"):
            return "Slurm needs Linux"
        if os.geteuid() != 0:
            return "slurmd that starts jobs needs root"
        path = f"{os.environ.get('PATH', '')}:{_SBIN}"
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
        if missing:
            return f"{', '.join(missing)}: not installed (scripts/install-test-tools)"
        return None

    def __enter__(self) -> SlurmCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
        self.folder.chmod(0o755)  # munged takes no socket in a folder it cannot be reached in
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    # -- what is asked of it -----------------------------------------------------------------------

    def run(self, *command: str, limit_s: float = 60.0) -> str:
        """A command's output. Raises CalledProcessError, with what it said, where it fails."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if done.returncode:
            raise subprocess.CalledProcessError(
                done.returncode, command, done.stdout, f"{done.stderr}\n{self.logs()}"
            )
        return done.stdout

    def submit(self, script: str, *options: str, environ: Mapping[str, str] | None = None) -> str:
        """The id of a batch job; `script` is its text.

        Each start of it adds to `slurm-ID.out` in `folder`, unless an option says else. environ:
        more variables.
        """
        path = self.folder / f"job{time.monotonic_ns()}.sh"
        path.write_text(script)
        done = subprocess.run(
            [
                *("sbatch", "--parsable", "--open-mode", "append"),
                *("--output", f"{self.folder}/slurm-%j.out"),
                *(*options, str(path)),
            ],
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"sbatch: {done.stderr}\n{self.logs()}")
        return done.stdout.strip().partition(";")[0]

    def output(self, job: str) -> str:
        """What a job printed so far."""
        with suppress(FileNotFoundError):
            return (self.folder / f"slurm-{job}.out").read_text(errors="replace")
        return ""

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it: {"JobState": "RUNNING", "NodeList": …}."""
        return _fields(self.run("scontrol", "--oneliner", "show", "job", job))

    def node(self, node: str) -> dict[str, str]:
        """What `scontrol show node` says of it: {"State": "IDLE+DRAIN", "Reason": …}."""
        return _fields(self.run("scontrol", "--oneliner", "show", "node", node))

    def until_job(self, job: str, *states: str, limit_s: float = 60.0) -> dict[str, str]:
        """Wait until it is in one of `states`; its fields. Fails with the logs after `limit_s`."""
        self.until(
            lambda: self.job(job)["JobState"] in states,
            limit_s,
            lambda: f"job {job} is {self.job(job)['JobState']}, not {states}\n{self.output(job)}",
        )
        return self.job(job)

    def until(
        self,
        condition: Callable[[], object],
        limit_s: float = 60.0,
        told: Callable[[], str] = str,
    ) -> None:
        """Wait for `condition`; AssertionError with the cluster's logs after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {limit_s:g} s: {told()}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 15) -> str:
        """The end of each server's log, for error messages."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)

    # -- its servers -------------------------------------------------------------------------------

    def _start(self) -> None:
        user = psutil.Process().username()
        ports = _free_ports(len(self.nodes) + 1)
        host = socket.gethostname()
        nodes = [
            _NODE.format(n=n, host=host, port=port, cpus=self._cpus)
            for n, port in enumerate(ports[1:], 1)
        ]
        conf = self.folder / "slurm.conf"
        conf.write_text(
            _CONF.format(
                host=host,
                user=user,
                folder=self.folder,
                port=ports[0],
                cred_expire_s=self._cred_expire_s,
                nodes="\n".join(nodes),
            )
            + self._more
        )
        (self.folder / "state").mkdir()
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environ = {
            **own,
            "SLURM_CONF": str(conf),
            "PATH": f"{own.get('PATH', '')}:{_SBIN}",
        }
        self._serve_munge()
        self._serve("slurmctld", "-D", "-f", str(conf), "-i")
        for node in self.nodes:
            (self.folder / node).mkdir()
            self._serve("slurmd", "-D", "-f", str(conf), "-N", node)
        self.until(self._is_up, _START_S, lambda: "the cluster did not come up")

    def _serve_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        sock = self.folder / "munge.socket"
        self._serve(
            "munged",
            "--foreground",
            "--force",
            *("--key-file", str(key), "--socket", str(sock)),
            *(
                "--pid-file",
                f"{self.folder}/munged.pid",
                "--seed-file",
                f"{self.folder}/munge.seed",
            ),
            *("--log-file", f"{self.folder}/munged.own.log", "--num-threads", "2"),
        )
        self.until(sock.exists, _START_S, lambda: "munged did not come up")

    def _serve(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out.log").open("ab") as log:
            self._servers.append(
                subprocess.Popen(
                    command,
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,
                )
            )

    def _is_up(self) -> bool:
        dead = [server.args for server in self._servers if server.poll() is not None]
        if dead:
            raise RuntimeError(f"ended at once: {dead}\n{self.logs()}")
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return self._states() == ["idle"] * len(self.nodes)
        return False

    def _states(self) -> list[str]:
        """Of each node; a line says it for each partition it is in."""
        told = self.run("sinfo", "--noheader", "--Node", "--format", "%N %T", limit_s=10.0)
        return list(dict(line.split() for line in told.splitlines()).values())

    def _stop(self) -> None:
        """End the jobs and wait until their steps are gone, then the servers, and all that is left.

        A slurmd that ends while it starts or ends a step leaves that step's slurmstepd behind.
        """
        with suppress(subprocess.SubprocessError, OSError):
            self.run("scancel", "--user", psutil.Process().username(), limit_s=10.0)
            deadline_s = time.monotonic() + _CANCEL_S
            while self.run("squeue", "--noheader", limit_s=10.0) or self._steps():
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.1)
        for server in self._servers:
            server.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_S
        for server in self._servers:
            with suppress(subprocess.TimeoutExpired):
                server.wait(max(0.1, deadline_s - time.monotonic()))
        deadline_s = time.monotonic() + _KILL_S
        # what was started is told by the environment; it may start more until all of it is gone
        while left := [process for process in psutil.process_iter() if self._is_ours(process)]:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"processes that cannot be killed: {left}")
            for process in left:  # psutil knows a pid that is used again for another process
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, 0.2)
        for server in self._servers:
            server.wait()
        self._servers = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _steps(self) -> list[psutil.Process]:
        """What slurmd has started and has not ended yet."""
        ours = filter(self._is_ours, psutil.process_iter(["name"]))
        return [process for process in ours if process.info["name"] == "slurmstepd"]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            conf = process.environ().get("SLURM_CONF")
            return process.pid != os.getpid() and conf == self.environ.get("SLURM_CONF", "-")
        return False


def _fields(text: str) -> dict[str, str]:
    """`Key=value Key=value`, where a value may hold spaces (Reason) but no ` Key=`."""
    found = re.findall(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|\s*$)", text.strip())
    return {name: value.strip() for name, value in found}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
