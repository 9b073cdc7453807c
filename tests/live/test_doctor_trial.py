"""Doctor's own job, really run: what flows, what does not, and that nothing of it stays behind."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from failslow.capture.builder import extension_path
from failslow.capture.ring import find_rings, ring_folders
from failslow.runtime.doctor.trial import trial_checks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: pip install 'failslow[torch]'",
)
SCRIPT = Path(sys.executable).with_name("failslow")


def plain(**more: str) -> dict[str, str]:
    """This environment without anything of failslow's."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")} | more


def doctor(*arguments: str, environ: Mapping[str, str]) -> tuple[int, dict[str, Any], str]:
    """(exit code, checks by name, stderr) of the command."""
    done = subprocess.run(
        [SCRIPT, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        env=environ,
        timeout=110,
        check=False,
    )
    found = json.loads(done.stdout)
    assert found["schema"] == "failslow.doctor/1"
    assert found["ok"] == (done.returncode == 0)
    return done.returncode, {check["name"]: check for check in found["checks"]}, done.stderr


def test_where_all_is_well_records_flow_and_nothing_is_left() -> None:
    before = set(find_rings())
    code, checks, stderr = doctor("--timeout", "80", environ=plain(FAILSLOW_RUNTIME_NICE="0"))

    assert {c["name"]: c["found"] for c in checks.values() if c["status"] == "fail"} == {}
    assert code == 0
    assert stderr == ""
    assert "2 workers made" in checks["records"]["found"]
    assert checks["capture"]["found"].endswith("every collective is seen")
    assert checks["transport"]["found"].startswith("tcpstore: a signed message took")
    assert checks["monitoring"]["found"].startswith("agent and controller timed")
    assert set(find_rings()) <= before
    assert list(ring_folders()[0].glob("failslow-*-doctor-*")) == []


def test_what_the_weaker_mode_of_capture_misses_is_said(tmp_path: Path) -> None:
    environ = plain(
        FAILSLOW_CAPTURE_MODE="python", FAILSLOW_CAPTURE_FOLDER=str(tmp_path), FAILSLOW_AGENT="0"
    )
    checks = {check.name: check for check in trial_checks(environ, timeout_s=90.0)}

    assert checks["capture"].status == "warn"
    assert "collectives of DDP's C++ reducer" in checks["capture"].found
    assert "step()" in checks["capture"].remedy
    assert checks["monitoring"].found == "FAILSLOW_AGENT is off: no agent was started"


@pytest.mark.slow
def test_a_compiled_capture_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    environ = plain(
        XDG_CACHE_HOME=str(tmp_path), FAILSLOW_CAPTURE_FOLDER=str(tmp_path), FAILSLOW_AGENT="0"
    )
    path = extension_path(environ)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text("no extension")
    path.with_name("sha256").write_text(hashlib.sha256(b"no extension").hexdigest())
    checks = {check.name: check for check in trial_checks(environ, timeout_s=90.0)}

    assert checks["capture"].status == "warn"
    assert f"{path} cannot be loaded" in checks["capture"].found
    assert checks["capture"].remedy == "python -m failslow.capture.native"


def test_a_plugin_that_is_switched_off_fails_with_its_remedy() -> None:
    code, checks, _ = doctor(environ=plain(TORCH_DEVICE_BACKEND_AUTOLOAD="0"))

    assert code == 1
    assert checks["autoload"]["remedy"] == "unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    assert checks["capture"]["status"] == checks["records"]["status"] == "fail"
    assert checks["transport"]["status"] == "pass"


def test_a_worker_that_dies_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    environ = plain(PYTHONPATH=str(tmp_path))
    checks = {check.name: check for check in trial_checks(environ, timeout_s=60.0)}

    assert checks["capture"].status == "fail"
    assert "died starting Python" in checks["capture"].found
    assert "libcudart.so.13" in checks["capture"].found


def test_a_job_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nwhile True: signal.pause()\n")
    environ = plain(PYTHONPATH=str(tmp_path))
    begun = time.monotonic()
    checks = {check.name: check for check in trial_checks(environ, timeout_s=1.0)}

    assert "still starting Python and importing torch after 1 s" in checks["capture"].found
    assert checks["records"].status == checks["transport"].status == "fail"
    assert time.monotonic() - begun < 40
    assert psutil.Process().children(recursive=True) == []


def test_a_redis_that_is_not_there_fails_and_keeps_its_password(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError\n")  # only the bus is wanted
    environ = plain(FAILSLOW_TRANSPORT="redis://:secret7@127.0.0.1:1/0", PYTHONPATH=str(tmp_path))
    found = {check.name: check for check in trial_checks(environ, timeout_s=30.0)}["transport"]

    assert found.status == "fail"
    assert found.found.startswith("redis: ")
    assert "secret7" not in found.found + found.remedy
    assert "FAILSLOW_TRANSPORT" in found.remedy


def test_ctrl_c_ends_the_job_too(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nwhile True: signal.pause()\n")
    command = subprocess.Popen(
        [SCRIPT, "doctor"],
        env=plain(PYTHONPATH=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with command:
        process = psutil.Process(command.pid)
        deadline = time.monotonic() + 60
        # started for good: a fork that has not become its program yet is nobody's to end
        while len(children := [c for c in process.children() if "-m" in c.cmdline()]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        stdout, stderr = command.communicate(timeout=60)

    assert command.returncode == 130
    assert (stdout, stderr) == (b"", b"")
    # killed, but whoever inherited them may take a moment to collect them
    psutil.wait_procs(children, timeout=20)
    assert all(_ended(child) for child in children)


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_round_trip_ends_with_the_doctor_that_is_killed(tmp_path: Path) -> None:
    """A server that takes every connection and never answers holds its clients for good."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {**os.environ, "FAILSLOW_TRANSPORT": f"tcpstore://127.0.0.1:{_port(server)}"}
        start = (
            "import subprocess, sys, time\n"
            "one = [sys.executable, '-m', 'failslow.runtime.doctor.roundtrip']\n"
            "print(subprocess.Popen(one, start_new_session=True).pid, flush=True)\n"
            "time.sleep(60)"
        )
        doctor = subprocess.Popen(
            [sys.executable, "-c", start], env=environ, stdout=subprocess.PIPE, cwd=tmp_path
        )
        assert doctor.stdout is not None
        trip = psutil.Process(int(doctor.stdout.readline()))
        server.settimeout(60.0)
        with server.accept()[0]:
            doctor.kill()
            doctor.wait()
            doctor.stdout.close()
            trip.wait(10.0)


def _port(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port
