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

from failslow.capture import hook, status
from failslow.capture.autoload import autoload
from failslow.capture.builder import build
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
