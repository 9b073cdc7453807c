"""A stand-in for `failslow probe run` that trains nothing; its behaviour is in the probe's name.

In: the arguments of `fake_command`. Out: of the node of rank 0 a result, once all nodes have met:

    quick  ends by itself    long   until it is told to end; a second time costs its result
    crash  writes nothing    torn   writes half a result    fails  says that it could not train
    stubborn  does not end
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from failslow.probe.result import ProbeResult, ProbeSpec

__all__ = ["fake_command"]

_MEET_S = 60.0


def fake_command(
    spec: ProbeSpec,
    *,
    out: str | Path | None = None,
    folder: str | Path | None = None,
    history: Sequence[str | Path] = (),
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> tuple[str, ...]:
    """As `failslow.probe.result.command`."""
    argv = [sys.executable, str(Path(__file__)), spec.probe_id, str(spec.nodes)]
    argv += ["--out", str(out), "--dir", str(folder)]
    for path in history:
        argv += ["--history", str(path)]
    if node_rank is not None:
        argv += ["--node-rank", str(node_rank)]
    if rendezvous is not None:
        argv += ["--rendezvous", rendezvous]
    return tuple(argv)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("probe_id")
    parser.add_argument("nodes", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--history", type=Path, action="append", default=[])
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--rendezvous", default="")
    told = parser.parse_args()
    began_t = time.time()
    what = told.probe_id.partition("-")[0]
    terms = 0

    def tell(_number: int, _frame: FrameType | None) -> None:
        nonlocal terms
        terms += 1
        if terms > 1 and what != "stubborn":
            os._exit(3)

    signal.signal(signal.SIGTERM, tell)
    if what == "crash":
        print("no torch here", flush=True)
        sys.exit(1)
    _meet(told.dir, told.nodes, told.node_rank, told.rendezvous)
    print("all nodes are here", flush=True)
    if marks := os.environ.get("FAKE_PROBE_MARKS"):
        (Path(marks) / f"{told.probe_id}-{told.nodes}-{told.node_rank}").touch()
    while what == "stubborn" or (what == "long" and not terms):
        time.sleep(0.05)
    time.sleep(0.3)
    if told.node_rank:
        return
    workers = told.nodes
    text = ProbeResult(
        probe_id=told.probe_id,
        nodes=tuple(f"n{rank}" for rank in range(told.nodes)),
        workers=workers,
        dp=workers,
        begin_t=began_t,
        end_t=time.time(),
        state="preempted" if terms else "failed" if what == "fails" else "done",
        error="worker 0 ended" if what == "fails" else "",
        iterations=sum(len(path.read_text().splitlines()) for path in told.history),
        reference_iteration_s=0.1,
        result="unknown" if what == "fails" else "healthy",
    ).to_json()
    draft = told.out.with_suffix(".draft")
    draft.write_text(text[: len(text) // 2] if what == "torn" else text)
    draft.replace(told.out)
    sys.exit(what == "fails")


def _meet(folder: Path, nodes: int, rank: int, rendezvous: str) -> None:
    """Wait until all nodes are here: at the rendezvous, or in the folder that all see."""
    if nodes > 1 and len(os.environ.get("FAILSLOW_TOKEN", "")) < 16:
        sys.exit("no token")
    if not rendezvous:
        (folder / f"here-{rank}").touch()
        _until(lambda: len(list(folder.glob("here-*"))) == nodes)
        return
    host, _, port = rendezvous.rpartition(":")
    if rank:
        _until(lambda: _knock(host, int(port), rank))
        return
    with socket.create_server((host, int(port))) as server:
        server.settimeout(_MEET_S)
        met: set[bytes] = set()
        while len(met) < nodes - 1:
            met.add(server.accept()[0].recv(8))


def _knock(host: str, port: int, rank: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0) as link:
            link.sendall(str(rank).encode())
            return True
    except OSError:
        return False


def _until(condition: object) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + _MEET_S
    while not condition():
        if time.monotonic() > deadline_s:
            sys.exit("the other nodes did not come")
        time.sleep(0.05)


if __name__ == "__main__":
    _main()
