"""Level S4 with real torchrun launchers, in short: the training is a counter that saves itself.

`test_restart_elastic` has real training, detection and verdicts; it is slow.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.runtime.watched import clean_environ
from tests.transport.servers import free_port, until

from failslow.runtime.restart import RestartOrder, leave_order

FAILSLOW = str(Path(sys.executable).with_name("failslow"))
_TRAIN = """
import os, pathlib, sys, time
folder, rank, world = pathlib.Path(sys.argv[1]), os.environ["RANK"], os.environ["WORLD_SIZE"]
saved = folder / "saved"
step = int(saved.read_text()) if saved.exists() else 0
again = os.environ.get("FAILSLOW_RESTARTED", "")
with (folder / "starts").open("a") as file:
    file.write(f"{world} {rank} {step} {again}\\n")
if step:
    sys.exit(7)
while not (folder / "save").exists():
    time.sleep(0.02)
    step += 1
if rank == "0":
    saved.with_suffix(".new").write_text(str(step))
    saved.with_suffix(".new").replace(saved)
while not saved.exists():
    time.sleep(0.02)
"""


@contextmanager
def _nodes(folder: Path, names: tuple[str, ...]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A launcher a node, on loopback; the first hosts the rendezvous."""
    script, port = folder / "train.py", free_port()
    script.write_text(_TRAIN)
    launchers = {}
    try:
        for number, name in enumerate(names):
            command = [
                *(FAILSLOW, "run", "-q", "--restarts", "1", "--dir", str(folder / "run"), "--"),
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
                *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "short"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}"),
                *("--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=4"),
                *("--local-addr", "127.0.0.1", str(script), str(folder)),
            ]
            with (folder / f"{name}.log").open("wb") as log:
                launchers[name] = subprocess.Popen(
                    command,
                    env=clean_environ() | {"FAILSLOW_NODE": name},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        yield launchers
    finally:
        for launcher in launchers.values():
            if launcher.poll() is None:
                family = psutil.Process(launcher.pid).children(recursive=True)
                launcher.kill()
                for child in family:
                    child.kill()
            launcher.wait()


@pytest.mark.timeout(200)
def test_the_others_go_on_from_what_was_saved_and_are_left_stopped_where_they_cannot(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch", reason="torchrun comes with torch")
    starts = tmp_path / "starts"

    def started() -> list[str]:
        return starts.read_text().splitlines() if starts.exists() else []

    with _nodes(tmp_path, ("gpu-1", "gpu-2")) as launchers:
        until(lambda: len(started()) == 2, 100.0)
        assert sorted(line.strip() for line in started()) == ["2 0 0", "2 1 0"]
        (tmp_path / "save").touch()
        until((tmp_path / "saved").exists, 20.0)
        order = RestartOrder(id="e1-4", evict=("gpu-2",), why="device rank 1 x1.84")
        for name in launchers:
            leave_order(tmp_path / "run", name, order)
        assert launchers["gpu-2"].wait(100.0) == 0
        until(lambda: len(started()) == 3, 100.0)
        step = (tmp_path / "saved").read_text()
        assert started()[-1] == f"1 0 {step} 1 e1-4"
        assert launchers["gpu-1"].wait(60.0) == 1  # torchrun's code for a worker's 7
    assert "gpu-2, is left out of the job" in (tmp_path / "gpu-2.log").read_text()
    said = (tmp_path / "gpu-1.log").read_text()
    assert "the job starts again without gpu-2 (device rank 1 x1.84)" in said
    assert "after 1 more starts, and is left stopped; its last checkpoint is as it was" in said
