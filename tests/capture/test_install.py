"""Installing the hook, by torch's own plug-in mechanism too: it fails open and leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from failslow.capture import hook, status
from failslow.capture.autoload import autoload
from failslow.capture.builder import build
from failslow.capture.joining import worker_environment
from failslow.errors import CaptureError

pytest_plugins = ("hooked",)


def test_installing_twice_is_installing_once_and_leaving_restores_torch(
    folder: Path, gloo: None, mode: str
) -> None:
    wait = dist.Work.wait
    recorder = hook.install(mode)
    assert hook.install() is recorder
    assert dist.Work.wait is not wait
    dist.all_reduce(torch.ones(1))
    assert hook.status()["records"] == 1
    assert sorted(file.suffix for file in folder.iterdir()) == [".mail", ".ring"]
    hook.uninstall()
    assert dist.Work.wait is wait
    assert list(folder.iterdir()) == []
    dist.all_reduce(torch.ones(1))
    assert status()["mode"] == "off"


def test_no_ring_is_made_before_the_first_collective(folder: Path, mode: str) -> None:
    hook.install(mode)
    torch.ones(3).sum()
    hook.uninstall()
    assert list(folder.iterdir()) == []


def test_without_room_for_a_ring_training_goes_on_and_the_reason_is_told(
    folder: Path,
    gloo: None,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILSLOW_CAPTURE_FOLDER", str(folder / "missing"))
    hook.install(mode)
    tensor = torch.ones(2)
    for _ in range(3):
        dist.all_reduce(tensor)
    told = capfd.readouterr().err
    now = status()
    hook.uninstall()
    assert tensor.tolist() == [1, 1]
    assert not now["active"]
    assert "no room for a ring" in now["reason"]
    assert told.count("this worker is not watched: no room for a ring") == 1


def test_an_unknown_mode_is_named(folder: Path) -> None:
    with pytest.raises(Exception, match="FAILSLOW_CAPTURE_MODE = 'magic' must be"):
        hook.install("magic")
    assert status()["mode"] == "off"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_extension_builds_where_it_is_missing_and_is_refused_if_others_can_write_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CaptureError, match=r"is not built; run python -m failslow.capture.native"):
        hook.install("native")
    path = build()
    assert build() == path
    hook.install()
    assert status()["mode"] == "native"
    hook.uninstall()
    path.chmod(0o777)
    with pytest.raises(CaptureError, match="can be written by others; remove it"):
        hook.install("native")
    hook.install()
    assert status()["mode"] == "dispatcher"
    hook.uninstall()


def test_without_a_compiler_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    with pytest.raises(CaptureError, match="no-such-compiler was not found; install one or set"):
        build(environ)


# ---- autoload


@pytest.mark.parametrize(
    ("failslow", "rank"), [("", "0"), ("0", "0"), ("off", "0"), ("1", ""), (None, "0"), ("1", None)]
)
def test_without_being_asked_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, failslow: str | None, rank: str | None
) -> None:
    for name, value in (("FAILSLOW", failslow), ("RANK", rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed_c10d, "_update_default_pg", distributed_c10d._update_default_pg)
    autoload()
    assert status()["mode"] == "off"


def test_autoload_never_raises_and_says_why_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILSLOW", "1")
    monkeypatch.setenv("FAILSLOW_CAPTURE_MODE", "magic")
    autoload()
    assert "this worker is not watched: FAILSLOW_CAPTURE_MODE = 'magic'" in capfd.readouterr().err
    monkeypatch.delenv("FAILSLOW_CAPTURE_MODE")
    autoload()
    assert status()["active"]
    hook.uninstall()


def test_importing_torch_hooks_a_worker_quickly_and_without_the_heavy_parts(folder: Path) -> None:
    probe = (
        "import sys, time, importlib, torch\n"
        "light = [n for n in sys.modules if n.startswith('failslow')]\n"
        "from failslow.capture import status\n"
        "assert status()['active'], status()\n"
        "heavy = {'failslow.records', 'failslow.capture.reader', 'pydantic', 'scipy', 'plotly'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from failslow.capture import hook\n"
        "hook.uninstall()\n"
        "mine = [n for n in sys.modules if n.startswith('failslow')]\n"
        "times = []\n"
        "for _ in range(5):\n"
        "    for n in mine: del sys.modules[n]\n"
        "    start = time.thread_time()\n"
        "    from failslow.capture.autoload import autoload; autoload()\n"
        "    times.append(time.thread_time() - start)\n"
        "    from failslow.capture import hook; hook.uninstall()\n"
        "print(min(times))\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"FAILSLOW": "1", "PYTHONPYCACHEPREFIX": str(folder.parent / "pycache")}
    out = subprocess.run(
        [sys.executable, "-c", probe], env=environ, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    # about 12 ms; twice that while the core's other half is busy. The heavy parts take 200
    assert float(out.stdout) < 0.050
    assert list(folder.iterdir()) == []


def test_a_broken_failslow_does_not_break_importing_torch(folder: Path) -> None:
    environ = {**os.environ, "FAILSLOW": "1", "FAILSLOW_CAPTURE_MODE": "magic"}
    out = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(2).sum().item())"],
        env=environ, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (out.returncode, out.stdout.strip()) == (0, "2.0")
    assert "this worker is not watched" in out.stderr


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_where_nothing_can_be_said_torch_is_imported_all_the_same(
    folder: Path, stderr: str
) -> None:
    environ = {**os.environ, "FAILSLOW": "1", "FAILSLOW_CAPTURE_MODE": "magic"}
    script = "import torch; print(torch.ones(2).sum().item())"
    out = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "$1" {stderr}', sys.executable, script],
        env=environ, stdout=subprocess.PIPE, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (out.returncode, out.stdout.strip()) == (0, "2.0")


def test_a_refusal_that_cannot_be_said_costs_no_step(
    folder: Path, gloo: None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILSLOW_CAPTURE_FOLDER", str(folder / "missing"))
    monkeypatch.setattr(sys, "stderr", None)
    hook.install(mode)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1]
    assert "no room for a ring" in hook.status()["reason"]
    hook.uninstall()


# ---- workers without a RANK

JOINS = """\
import os, sys, torch
assert "failslow.capture.hook" not in sys.modules
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
del os.environ["WORLD_SIZE"]
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
from failslow.capture import status
now = status()
assert (now["active"], now["records"], now["faults"]) == (True, 2, {}), now
assert "RANK" not in os.environ
print(os.path.basename(now["ring"]))
"""


def test_a_worker_without_a_rank_is_watched_once_it_joins_a_group(folder: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "FAILSLOW_JOB")}
    environ |= {"FAILSLOW": "1", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}
    environ.pop("MASTER_PORT", None)
    out = subprocess.run(
        [sys.executable, "-c", JOINS],
        env=environ, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert f"failslow-{os.getuid()}-slurm-4711.3-r0-p" in out.stdout


def test_only_a_launchers_numbers_that_are_the_groups_count() -> None:
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "FAILSLOW_JOB": "a"}
    assert worker_environment(srun, 5, 8)["LOCAL_RANK"] == "1"
    assert worker_environment(srun, 5, 8)["RANK"] == "5"
    assert "LOCAL_RANK" not in worker_environment(srun, 5, 64), "a task that spawned the workers"
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert "LOCAL_RANK" not in worker_environment(mpirun, 1, 2)
    named = worker_environment({**mpirun, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1, 2)
    assert (named["LOCAL_RANK"], named["FAILSLOW_JOB"]) == ("1", f"local-{os.getppid()}")
    assert "FAILSLOW_JOB" not in worker_environment({"MASTER_PORT": "1"}, 0, 1)
