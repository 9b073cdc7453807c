"""Doctor's checks against machines that really are as they say."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import failslow
from failslow.capture.builder import extension_path
from failslow.capture.ring import RingWriter
from failslow.runtime.doctor import Check
from failslow.runtime.doctor.machine import machine_checks, stale_rings
from failslow.runtime.doctor.settings import known_variables, settings_checks
from failslow.runtime.doctor.trial import _await_end

SOURCE = Path(failslow.__file__).parent


def environment_checks(environ: Mapping[str, str]) -> list[Check]:
    return [*settings_checks(environ), *machine_checks(environ)]


def checked(name: str, **environ: str) -> Check:
    """The check called `name` in exactly that environment."""
    found = {check.name: check for check in environment_checks(environ)}
    return found[name]


def test_a_plain_environment_fails_nothing() -> None:
    checks = environment_checks({})

    assert [c.name for c in checks if c.status == "fail"] == []
    assert len({c.name for c in checks}) == len(checks)


@pytest.mark.parametrize(
    ("name", "environ", "status", "remedy"),
    [
        ("autoload", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "fail", "unset TORCH_DEVICE"),
        ("variables", {"FAILSLOW_TRANSORT": "x"}, "warn", "did you mean FAILSLOW_TRANSPORT?"),
        ("variables", {"FAILSLOW_ZZZZZZZZZZ": "x"}, "warn", "unset FAILSLOW_ZZZZZZZZZZ"),
        (
            "variables",
            {"FAILSLOW_DECIDE_SPARE": "1", "FAILSLOW_TRANSORT": "x"},
            "warn",
            "did you mean FAILSLOW_DECIDE_SPARES?; did you mean FAILSLOW_TRANSPORT?",
        ),
        ("variables", {"FAILSLOW_MODE": "automatic"}, "fail", "set FAILSLOW_MODE to one of them"),
        ("variables", {"FAILSLOW": "off"}, "warn", "export FAILSLOW=1"),
        ("variables", {"FAILSLOW": "1", "RANK": "0"}, "warn", "unset RANK"),
        ("variables", {"FAILSLOW": "1", "FAILSLOW_AGENT": "0"}, "warn", "unset FAILSLOW_AGENT"),
        ("settings", {"FAILSLOW_DETECT_MIN_SLOWDOWN": "0.5"}, "fail", "correct it"),
        ("settings", {"FAILSLOW_CONFIG": "/nowhere/x.toml"}, "fail", "correct it"),
        ("ring folder", {"FAILSLOW_CAPTURE_RECORDS": "many"}, "fail", "unset FAILSLOW_CAPTURE_R"),
        ("ring folder", {"FAILSLOW_CAPTURE_FOLDER": "/nowhere"}, "fail", "FAILSLOW_CAPTURE_FOL"),
        ("ring folder", {"LOCAL_WORLD_SIZE": "100000000"}, "fail", "free space"),
        ("token", {"GROUP_WORLD_SIZE": "2"}, "fail", "the same on every node"),
        ("token", {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "fail", "the same on every node"),
        ("token", {"FAILSLOW_TOKEN": "short"}, "fail", "openssl rand -hex 32"),
        ("metrics port", {"FAILSLOW_METRICS_PORT": "http"}, "fail", "a free port"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(
    name: str, environ: Mapping[str, str], status: str, remedy: str
) -> None:
    check = checked(name, **environ)

    assert check.status == status
    assert remedy in check.remedy
    assert "\n" not in check.found + check.remedy


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("variables", {"FAILSLOW": "1"}),
        ("variables", {"FAILSLOW": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}),
        ("autoload", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}),
        ("token", {"FAILSLOW_TOKEN": "f" * 64, "NNODES": "4"}),
        ("token", {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}),
        ("settings", {"FAILSLOW_DETECT_MIN_SLOWDOWN": "1.2"}),
    ],
)
def test_what_is_right_passes(name: str, environ: Mapping[str, str]) -> None:
    assert checked(name, **environ).status == "pass"


@pytest.mark.parametrize(
    ("environ", "status", "found", "remedy"),
    [
        ({"FAILSLOW_CAPTURE_MODE": "dispatcher"}, "info", "FAILSLOW_CAPTURE_MODE=dispatcher", ""),
        (
            {"CXX": "no-such-compiler"},
            "warn",
            "mode dispatcher: .* no C\\+\\+ compiler \\(no-such-compiler\\)",
            "install one or set CXX, then python -m failslow.capture.native",
        ),
        ({"CXX": "true"}, "warn", "mode dispatcher: .*in the background", "python -m failslow.cap"),
    ],
)
def test_the_mode_of_capture_is_named_with_the_remedy(
    environ: Mapping[str, str], status: str, found: str, remedy: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="what is built depends on torch")
    here = {"XDG_CACHE_HOME": str(tmp_path), "PATH": os.environ["PATH"], **environ}
    check = checked("compiled capture", **here)

    assert check.status == status
    assert re.search(found, check.found)
    assert check.remedy.startswith(remedy)


def kept(folder: Path, content: bytes, digest: str) -> Path:
    """A compiled capture in a cache of its own, and what is said to be its digest."""
    path = extension_path({"XDG_CACHE_HOME": str(folder)})
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(content)
    path.chmod(0o700)
    path.with_name("sha256").write_text(f"{digest}\n")
    return path


def test_a_compiled_capture_that_is_there_passes(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="what is built depends on torch")
    path = kept(tmp_path, b"an extension", hashlib.sha256(b"an extension").hexdigest())

    check = checked("compiled capture", XDG_CACHE_HOME=str(tmp_path))

    assert (check.status, check.found) == ("pass", f"mode native: {path}")


def test_a_compiled_capture_that_is_refused_does_not_pass(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="what is built depends on torch")
    path = kept(tmp_path, b"half an exten", hashlib.sha256(b"an extension").hexdigest())

    check = checked("compiled capture", XDG_CACHE_HOME=str(tmp_path), CXX="true")

    assert check.status == "warn"
    assert f"{path} is damaged" in check.found
    assert check.remedy.startswith("python -m failslow.capture.native")


def test_every_variable_the_source_reads_is_known() -> None:
    read = {
        name.rstrip("_")
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\bFAILSLOW(?:_[A-Z0-9]+)+\b", path.read_text(encoding="utf-8"))
    }

    assert read - known_variables() == set()


def test_without_the_entry_point_the_remedy_is_to_reinstall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where no distribution is installed
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test may have imported it

    found = {check.name: check for check in environment_checks({})}

    assert (found["autoload"].status, found["torch"].status) == ("fail", "fail")
    assert "--force-reinstall" in found["autoload"].remedy
    assert "pip install 'failslow[torch]'" in found["torch"].remedy


@pytest.mark.parametrize(("version", "status"), [("2.4.1+cu121", "fail"), ("3.0.0a1", "pass")])
def test_a_torch_without_plugins_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, status: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch-0.dist-info").mkdir()
    (tmp_path / "torch-0.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert checked("torch").status == status


def test_a_full_first_ring_folder_is_a_warning_that_names_the_second(tmp_path: Path) -> None:
    shm, temp = os.statvfs("/dev/shm"), os.statvfs("/tmp")
    room, more = shm.f_bavail * shm.f_frsize, temp.f_bavail * temp.f_frsize
    workers = room // (4 << 20) + 1
    if workers * (5 << 20) > more:
        pytest.skip("/tmp has less room than /dev/shm: there is no second folder to fall back to")

    check = checked("ring folder", LOCAL_WORLD_SIZE=str(workers))

    assert check.status == "warn"
    assert "/dev/shm has" in check.found
    assert "--shm-size" in check.remedy


def test_a_dead_workers_ring_is_stale_and_a_live_ones_is_not(tmp_path: Path) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path), "PATH": os.environ["PATH"]}
    program = (
        "import os; from failslow.capture.ring import RingWriter\n"
        "RingWriter.create(job='dead', rank=0, world_size=1, description={}, capacity=16)\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)
    dead = stale_rings(environ)
    for path in tmp_path.glob("*.ring"):
        path.unlink()
    alive = RingWriter.create(
        job="live", rank=0, world_size=1, description={}, capacity=16, environ=environ
    )
    live = stale_rings(environ)
    alive.close()

    assert dead.status == "warn"
    assert "1 of dead workers" in dead.found
    assert live.status == "pass"


def test_doctors_own_job_leaves_no_folder_even_where_its_parts_must_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("failslow.runtime.doctor.trial._LEAVE_S", 0.5)
    job, environ = f"doctor-{os.getpid()}-x", {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}
    program = (
        "import os, sys; from failslow.runtime.folder import RunFolder\n"
        "RunFolder.given(os.environ).lock('agent-n1'); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environ, "FAILSLOW_JOB": job},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"\n"
        _await_end(job, environ)
        assert list(tmp_path.iterdir()) == [], "not as long as anybody held a lock in it"


def test_a_taken_metrics_port_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = checked("metrics port", FAILSLOW_METRICS_PORT=str(port))

    assert check.status == "warn"
    assert str(port) in check.found
    assert checked("metrics port", FAILSLOW_METRICS_PORT=str(port)).status == "pass"


@pytest.mark.parametrize(("limit", "status"), [(63, "fail"), (256, "warn"), (1024, "pass")])
def test_few_open_files_are_seen(limit: int, status: str) -> None:
    script = Path(sys.executable).with_name("failslow")
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n {limit}; exec {script} doctor --quick --json"],
        capture_output=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )

    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["open files"]["status"] == status
    assert done.returncode == (status == "fail")
