"""Causes of real faults in real processes: a burner, a quota, signals, a limited link.

As root, on the test bed; telemetry is what the agent's duty samples, five times a second here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.testbed import TRAIN_DDP, TestBed, until

from failslow.inject import burn, congest, throttle
from failslow.inject.cgroups import cpu_group
from failslow.lab.sweep import NAMESPACES
from failslow.localize.evidence import explain
from failslow.steering import Finding

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INTERVAL_S = 0.2
_MOST_WEIGHT = {1: "262144", 2: "10000"}
"""That the kernel accepts."""
BEFORE_S, DURING_S, AFTER_S = 3.5, 3.5, 1.5


@pytest.fixture(autouse=True)
def _possible() -> None:
    if reason := TestBed.available():
        pytest.skip(reason)


class Sampler:
    """The duty in a process of its own, in the node's network namespace."""

    def __init__(self, node: Any, job: str, workers: Sequence[Any]) -> None:
        mine = [w for w in workers if w.node is node]
        self._process = subprocess.Popen(
            # first, or what else the machine does would leave holes in the series
            ["nice", "-n", "-15", "nsenter", f"--net={NAMESPACES / node.namespace}", sys.executable,
             str(HERE / "sample_node.py"), node.namespace, job, str(INTERVAL_S),
             *(f"{w.rank}:{w.pid}" for w in mine)],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def body(self, since_t: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"last_s": time.time() - since_t}).encode() + b"\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _sampled(bed: TestBed) -> Iterator[list[Sampler]]:
    with ExitStack() as ending:
        samplers = []
        for node in bed.nodes:
            sampler = Sampler(node, f"{bed.name}-0", bed.workers)
            ending.callback(sampler.kill)
            samplers.append(sampler)
        for sampler in samplers:
            sampler.until_ready()
        yield samplers


def _episode(
    samplers: Sequence[Sampler], fault: AbstractContextManager[object]
) -> tuple[list[dict[str, Any]], float, float]:
    """Telemetry of every node over a time with a fault in its middle, onset and relief."""
    begin_t = time.time()
    time.sleep(BEFORE_S)
    with fault:
        onset_t = time.time()
        time.sleep(DURING_S)
        relief_t = time.time()
    time.sleep(AFTER_S)
    return [sampler.body(begin_t) for sampler in samplers], onset_t, relief_t


@pytest.fixture(scope="module")
def lone_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, list[Sampler]]]:
    """A worker on core 0, and its node's sampler."""
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=1, folder=tmp_path_factory.mktemp("bed")) as bed:
        bed.launch(HERE / "work.py", args=["alone"], cores=[0])
        until(bed.workers[0].text)
        # only what runs in the same group is a rival, not what else this machine does
        group = cpu_group(bed.workers[0].pid)
        assert group is not None
        group.weight_file().write_text(_MOST_WEIGHT[group.version], encoding="ascii")
        with _sampled(bed) as samplers:
            yield bed.workers[0].pid, samplers


@pytest.mark.parametrize(
    ("fault", "what", "cause"),
    [
        ("burn", "host", "CPU contention"),
        ("quota", "device", "device degradation (quota)"),
        ("signal", "device", "device degradation (stopped by signals)"),
        ("nothing", "device", ""),
    ],
)
def test_what_keeps_a_worker_from_computing_is_told(
    lone_worker: tuple[int, list[Sampler]], fault: str, what: str, cause: str
) -> None:
    pid, samplers = lone_worker
    faults: dict[str, AbstractContextManager[object]] = {
        "burn": burn((0,), beside=pid),
        "quota": throttle(pid, to=0.35, method="cgroup"),
        "signal": throttle(pid, to=0.6, method="signal"),
        "nothing": nullcontext(),
    }
    bodies, onset_t, relief_t = _episode(samplers, faults[fault])
    finding = Finding(what="device", slowdown=1.5, ranks=(0,), device="cpu")
    told = explain(finding, bodies, onset_t=onset_t, relief_t=relief_t)
    assert (told.what, told.cause) == (what, cause), "\n".join(told.evidence)
    assert bool(told.measurements) == bool(cause)


@pytest.mark.parametrize("job", ["sockets", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_limited_link_shows_in_the_connections_over_it(tmp_path: Path, job: str) -> None:
    with TestBed(nodes=2, folder=tmp_path) as bed:
        if job == "sockets":
            bed.launch(HERE / "work.py", args=["exchange"])
            until(lambda: all(w.text() for w in bed.workers))
        else:
            bed.launch(TRAIN_DDP, args=["--seconds", "600", "--gradient-mb", "2"])
            bed.until_iterations(10, limit_s=90)
        zero, one = bed.nodes
        with _sampled(bed) as samplers:
            bodies, onset_t, relief_t = _episode(
                samplers, congest(one.namespace, one.interface, 40, dst=zero.address)
            )
        assert all(w.process.poll() is None for w in bed.workers)
    finding = Finding(
        what="link", slowdown=4.0, ranks=(1,), peer_ranks=(0,), host="h1", peer_host="h0"
    )
    told = explain(finding, bodies, onset_t=onset_t, relief_t=relief_t)
    text = "\n".join(told.evidence)
    assert (told.what, told.cause) == ("link", "network congestion"), text
    where = f"from {one.namespace} to {zero.namespace}"
    assert f"For network congestion: round trips {where} took" in text
    # at 40 Mbit/s no more than 5 MB/s arrive
    peers = bodies[1]["series"]
    name = f"peer/{zero.address}/delivery_bytes_per_s"
    during = [x for t, x in zip(bodies[1]["t"], peers[name], strict=True)
              if onset_t + 1 < t < relief_t and x is not None]  # fmt: skip
    assert sorted(during)[len(during) // 2] < 6e6
