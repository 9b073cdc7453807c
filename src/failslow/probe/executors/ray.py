"""Probes on a Ray cluster: one placement group a probe, its bundles spread over as many nodes.

In: specs. Out: one actor a node, which runs `failslow probe run` there and brings home what the
first node wrote: no shared disk is needed.

    RayExecutor("auto")        # the cluster this machine is a node of
    RayExecutor("ray://head:10001")

failslow must be installed on every node. A node that dies costs its probe, nothing else. A probe
takes over half of each of its nodes, so that no two share one and measure each other.
"""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from failslow.errors import MissingDependencyError, ProbeError
from failslow.probe.executors.base import RESULT_FILE, Command, JobState, last_line, read_result
from failslow.probe.executors.node import NodeProbe
from failslow.probe.result import ProbeResult, ProbeSpec, command

__all__ = ["RayExecutor", "RayJob"]

_HISTORY_FILE = "history.jsonl"


class _Node:
    """Runs on a node of the cluster, as an actor of two threads: one runs, one is told to stop."""

    def __init__(self) -> None:
        self._probe: NodeProbe | None = None
        self._stopped = False

    def address(self) -> str:
        """HOST:PORT that was free a moment ago, as other nodes reach it."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def run(
        self, argv: Sequence[str], token: str, folder: str, history: str
    ) -> tuple[int, bytes | None, str]:
        """Exit code, what the first node wrote, and its last words.

        folder: what stands for this node's own in `argv`. history: text of earlier results.
        """
        # what watches may still write there for a moment after a kill
        with tempfile.TemporaryDirectory(
            prefix="failslow-probe-", ignore_cleanup_errors=True
        ) as name:
            own = Path(name)
            if history:
                (own / _HISTORY_FILE).write_text(history, encoding="utf-8")
            log = own / "node.log"
            if self._stopped:
                return 1, None, "stopped before it began"
            self._probe = NodeProbe(
                # the campaign's Python may be elsewhere here
                [sys.executable, *(part.replace(folder, name) for part in argv[1:])],
                {"FAILSLOW_TOKEN": token} if token else {},
                log,
            )
            code = self._probe.wait()
            wrote = None
            with suppress(FileNotFoundError):
                wrote = (own / RESULT_FILE).read_bytes()
            return code, wrote, last_line(log)

    def stop(self) -> None:
        """Preempt it."""
        self._stopped = True
        if self._probe is not None:
            self._probe.tell()


class RayJob:
    """A probe on a placement group; goes on to its nodes as it is asked for its state."""

    def __init__(
        self, executor: RayExecutor, spec: ProbeSpec, folder: Path, history: str, *, each: int
    ) -> None:
        """each: what it takes of each of its nodes, in CPUs or GPUs."""
        self._executor, self._spec, self._folder, self._history = executor, spec, folder, history
        self._group = executor.group(spec, each)
        self._ready = self._group.ready()
        self._actors: list[Any] = []
        self._address: Any = None
        self._runs: list[Any] = []
        self._ended = self._stopped = self._preempted = False
        self._why = ""

    def state(self) -> JobState:
        if self._ended:
            return "ended"
        ray = self._executor.ray
        try:
            if not self._actors:
                if not _is_ready(ray, self._ready):
                    return "queued"
                self._actors = self._executor.actors(self._group, self._spec)
                self._address = self._actors[0].address.remote()
            if not self._runs:
                if not _is_ready(ray, self._address):
                    return "queued"
                self._run(ray.get(self._address))
            if not all(_is_ready(ray, run) for run in self._runs):
                return "running"
            ends = ray.get(self._runs)
        except Exception as error:  # Ray's own, and those of a connection that was lost
            self._preempted = _is_preempted(ray, error)
            # an error raised on the node ends with it, one of the cluster begins with it
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._end(f"the cluster lost it: {lines[-1 if lines[0].startswith('ray::') else 0]}")
            return "ended"
        _, wrote, _ = ends[0]
        if wrote is not None:
            (self._folder / RESULT_FILE).write_bytes(wrote)
        failed = [(n, code, said) for n, (code, _, said) in enumerate(ends) if code]
        self._end("".join(f"node {n} ended with {code}: {said}" for n, code, said in failed[:1]))
        return "ended"

    def stop(self) -> None:
        if self._ended or self._stopped:
            return
        self._stopped = True
        if not self._runs:
            self._end("stopped in the queue")
        for actor in self._actors:
            with suppress(Exception):  # of a lost cluster: the next question ends it
                actor.stop.remote()

    def kill(self) -> None:
        if not self._ended:
            self._end("killed")

    def result(self) -> ProbeResult | None:
        return read_result(self._folder / RESULT_FILE)[0]

    def why(self) -> str:
        found, why = read_result(self._folder / RESULT_FILE)
        return "" if found is not None else f"{why}: {self._why}" if self._why else why

    def preempted(self) -> bool:
        return self._preempted

    def _run(self, address: str) -> None:
        several = self._spec.nodes > 1
        token = secrets.token_hex(32) if several else ""
        stand_in = f"@{secrets.token_hex(8)}"
        for rank, actor in enumerate(self._actors):
            argv = self._executor.command(
                self._spec,
                out=f"{stand_in}/{RESULT_FILE}",
                folder=stand_in,
                history=[f"{stand_in}/{_HISTORY_FILE}"] if self._history else [],
                node_rank=rank if several else None,
                rendezvous=address if several else None,
            )
            self._runs.append(actor.run.remote(argv, token, stand_in, self._history))

    def _end(self, why: str) -> None:
        self._ended, self._why = True, why
        for actor in self._actors:
            with suppress(Exception):  # it may be gone, or the cluster
                self._executor.ray.kill(actor)
        with suppress(Exception):
            self._executor.release(self._group)


class RayExecutor:
    """Starts probes on a cluster.

    address: of the cluster, as `ray.init` takes it; "" for one that this process has joined. Raises
    MissingDependencyError without Ray, ProbeError without a cluster.
    """

    name = "ray"
    nodes = None

    def __init__(self, address: str = "auto", *, command: Command = command) -> None:
        try:
            import ray
        except ImportError:
            raise MissingDependencyError(
                "the ray executor needs Ray: pip install 'failslow[ray]'"
            ) from None
        self.ray, self.command = ray, command
        self._joined = False
        self._jobs: list[RayJob] = []
        if address:
            try:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level="ERROR",
                    ignore_reinit_error=True,
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise ProbeError(
                    f"no Ray cluster at {address!r}: {lines[0]}; name one by --ray-address"
                ) from None
            self._joined = True

    def start(self, spec: ProbeSpec, folder: Path, *, history: Sequence[Path] = ()) -> RayJob:
        with _cluster_errors():
            alive = [node for node in self.ray.nodes() if node["Alive"]]
        if spec.nodes > len(alive):
            raise ProbeError(
                f"a probe of {spec.nodes} nodes does not fit on the {len(alive)} of this cluster; "
                "leave the size out, or add nodes"
            )
        kind, wanted = _kind(spec), spec.workers_per_node
        has = [node.get("Resources", {}).get(kind, 0) for node in alive]
        fit = sum(number >= wanted for number in has)
        if spec.nodes > fit:
            # Ray would let it wait for ever
            raise ProbeError(
                f"a probe of {spec.nodes} nodes with {wanted} {kind}s each does not fit: {fit} of "
                f"the {len(alive)} nodes of this cluster have as many; lower --workers, or take "
                "another --preset"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).unlink(missing_ok=True)
        earlier = "".join(path.read_text(encoding="utf-8") for path in history if path.exists())
        with _cluster_errors():
            job = RayJob(self, spec, folder, earlier, each=_each(has, spec))
        self._jobs.append(job)
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.kill()
        if self._joined:
            self.ray.shutdown()

    def group(self, spec: ProbeSpec, each: int) -> Any:
        """A bundle a node, no two on the same one, of `each` CPUs or GPUs."""
        from ray.util.placement_group import placement_group

        return placement_group([{_kind(spec): each}] * spec.nodes, strategy="STRICT_SPREAD")

    def actors(self, group: Any, spec: ProbeSpec) -> list[Any]:
        """One in each bundle, in the order of node ranks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = {"num_gpus": spec.workers_per_node} if spec.preset == "gpu" else {}
        return [
            self.ray.remote(_Node)
            .options(
                num_cpus=0 if kind else spec.workers_per_node,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
                **kind,
            )
            .remote()
            for index in range(spec.nodes)
        ]

    def release(self, group: Any) -> None:
        """Give its nodes back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def _kind(spec: ProbeSpec) -> str:
    """What of a node a worker takes one of, as Ray calls it."""
    return "GPU" if spec.preset == "gpu" else "CPU"


def _each(has: Sequence[float], spec: ProbeSpec) -> int:
    """What a probe takes of each of its nodes; `has`: what the nodes of the cluster have.

    Over half of the largest: no other probe has room beside it. Where too few nodes have as much,
    what its workers need, and another may share a node with it.
    """
    over_half = max(spec.workers_per_node, int(max(has, default=0) // 2) + 1)
    enough = sum(number >= over_half for number in has) >= spec.nodes
    return over_half if enough else spec.workers_per_node


def _is_preempted(ray: Any, error: Exception) -> bool:
    """Whether it says that a node was taken away; not all versions of Ray say so alike."""
    if getattr(error, "preempted", False) is True:
        return True
    died = getattr(ray.exceptions, "NodeDiedError", None)
    return died is not None and isinstance(error, died) and "preempt" in str(error).lower()


@contextmanager
def _cluster_errors() -> Iterator[None]:
    """ProbeError for whatever Ray raises when its head is lost: of its own, of gRPC, of sockets."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ProbeError(
            f"the Ray cluster takes no probe: {lines[0].strip()}; see what `ray status` says"
        ) from None


def _is_ready(ray: Any, reference: Any) -> bool:
    done, _ = ray.wait([reference], timeout=0)
    return bool(done)
