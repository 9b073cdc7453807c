"""Building the compiled capture: once, whole or not at all, and never in anybody's way.

The compiler is a script that hands out the extension built before, after as long as a test wants.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="capture needs torch")

from failslow.capture import builder, hook, native
from failslow.capture.builder import build, build_later, extension_path, state
from failslow.errors import CaptureError

BUILT = extension_path()
Compiler = Callable[[str], dict[str, str]]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes an environment whose compiler is a shell script; each run of it leaves a line in
    `runs`. $out is where the extension goes."""
    if not BUILT.exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()

    def make(script: str) -> dict[str, str]:
        path = tmp_path / "c++"
        path.write_text(
            f"#!/bin/sh\necho $$ >> {tmp_path}/runs\n"
            'while [ "$1" != -o ]; do shift; done\nout=$2\n' + script.replace("BUILT", str(BUILT))
        )
        path.chmod(0o755)
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return kept | {
            "CXX": str(path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "TMPDIR": str(tmp_path / "temp"),
        }

    return make


def runs(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "runs").read_text().split()]
    except FileNotFoundError:
        return []


def left_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.02)


def test_it_is_built_once_and_then_found(compiler: Compiler, tmp_path: Path) -> None:
    environ = compiler("cp BUILT $out; chmod 777 $out")  # as with a lax umask
    assert state(environ).name == "missing"
    path = build(environ)
    assert path == extension_path(environ)
    assert path.is_relative_to(tmp_path / "cache")
    assert build(environ) == path
    assert len(runs(tmp_path)) == 1
    assert state(environ) == builder.BuildState("built", str(path))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "build.lock",
        path.name,
        "sha256",
    ]
    assert native.load(environ) is not None
    path.chmod(0o777)
    with pytest.raises(CaptureError, match="can be written by others; remove it"):
        native.load(environ)


def test_two_at_a_time_build_it_once(compiler: Compiler, tmp_path: Path) -> None:
    environ = compiler("sleep 1; cp BUILT $out")
    command = [sys.executable, "-m", "failslow.capture.native"]
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) for _ in range(2)]
    until(lambda: state(environ).name == "building")
    told = {process.communicate(timeout=100)[0] for process in both}
    assert told == {f"{extension_path(environ)}\n".encode()}
    assert len(runs(tmp_path)) == 1


def test_in_the_background_nobody_waits_for_it(compiler: Compiler, tmp_path: Path) -> None:
    environ = compiler(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; cp BUILT $out")
    environ["FAILSLOW_RUNTIME_NICE"] = "1"  # a test cannot wait for what everybody else leaves
    begun_s = time.monotonic()
    assert "is being built in the background for jobs started later" in build_later(environ)
    assert time.monotonic() - begun_s < 5.0
    until(lambda: runs(tmp_path))
    assert os.getpriority(os.PRIO_PROCESS, runs(tmp_path)[0]) == 1
    assert build_later(environ) == "", "another build goes on"
    (tmp_path / "go").touch()
    until(lambda: state(environ).name == "built")
    assert build_later(environ) == ""
    assert len(runs(tmp_path)) == 1


def test_it_has_the_lowest_priority_from_its_first_instruction(
    compiler: Compiler, tmp_path: Path
) -> None:
    environ = compiler("exit 1")
    assert build_later(environ)
    builds = [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and of_this_build(process, environ)
    ]
    try:
        # first it is a shell's child and then the program `nice`, each for a moment
        until(lambda: all(Path(p.cmdline()[0]).name not in {"sh", "nice"} for p in builds), 20.0)
        assert [process.nice() for process in builds] == [19]
    finally:
        for process in builds:
            process.kill()


def of_this_build(process: psutil.Process, environ: dict[str, str]) -> bool:
    try:
        return process.environ().get("XDG_CACHE_HOME") == environ["XDG_CACHE_HOME"]
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("name", "value"),
    [("FAILSLOW_CAPTURE_BUILD", "0"), ("FAILSLOW_CAPTURE_MODE", "dispatcher")],
)
def test_who_does_not_want_it_does_not_get_it(
    name: str, value: str, compiler: Compiler, tmp_path: Path
) -> None:
    environ = compiler("cp BUILT $out") | {name: value}
    assert build_later(environ) == ""
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_one_line_says_so(compiler: Compiler) -> None:
    environ = compiler("") | {"CXX": "no-such-compiler"}
    assert state(environ) == builder.BuildState("no compiler", "no-such-compiler")
    told = build_later(environ)
    assert told.startswith("no C++ compiler (no-such-compiler): calls are captured in Python")
    assert "\n" not in told
    with pytest.raises(CaptureError, match="no-such-compiler was not found; install one or set"):
        build(environ)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'native.cpp:3: error: no member' >&2; exit 1", r"does not compile .*no member"),
        ("echo this is no extension > $out", "does not run: "),
    ],
)
def test_what_does_not_build_or_run_is_not_put_in_place(
    script: str, says: str, compiler: Compiler, tmp_path: Path
) -> None:
    environ = compiler(script)
    with pytest.raises(CaptureError, match=says) as caught:
        build(environ)
    assert not extension_path(environ).exists()
    assert state(environ) == builder.BuildState("failed", str(caught.value))
    assert build_later(environ) == f"calls are captured in Python: {caught.value}"
    assert len(runs(tmp_path)) == 1, "it is not tried again by itself"
    build(compiler("cp BUILT $out"))  # by hand it is
    assert state(environ).name == "built"


def test_a_compiler_that_hangs_is_ended_with_all_its_children(
    compiler: Compiler, tmp_path: Path
) -> None:
    environ = compiler(f"sh -c 'echo $$ >> {tmp_path}/runs; sleep 100'")
    with pytest.raises(CaptureError, match="not done in time; try python -m"):
        build(environ, limit_s=1.0)
    assert len(runs(tmp_path)) == 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in runs(tmp_path)))


def test_a_build_that_is_killed_leaves_the_way_free(compiler: Compiler, tmp_path: Path) -> None:
    environ = compiler("sleep 100")
    command = [sys.executable, "-m", "failslow.capture.native"]
    with subprocess.Popen(command, env=environ) as process:
        until(lambda: runs(tmp_path))
        process.kill()
    os.kill(runs(tmp_path)[0], signal.SIGKILL)
    assert list(extension_path(environ).parent.glob("build-*"))
    path = build(compiler("cp BUILT $out"))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "build.lock",
        path.name,
        "sha256",
    ]


def test_where_the_home_cannot_be_written_the_temporary_folder_serves(
    compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    environ = compiler("cp BUILT $out") | {"XDG_CACHE_HOME": str(tmp_path / "file")}
    path = build(environ)
    assert path.is_relative_to(tmp_path / "temp" / f"failslow-cache-{os.getuid()}")
    assert extension_path(environ) == path
    assert native.load(environ) is not None
    path.parent.chmod(0o777)  # somebody else may put there what he likes
    with pytest.raises(CaptureError, match="can be written by others"):
        native.load(environ)


def test_a_temporary_folder_that_others_could_change_is_refused(
    compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    environ = compiler("cp BUILT $out") | {"XDG_CACHE_HOME": str(tmp_path / "file")}
    path = build(environ)
    root = path.parent.parent
    assert root.stat().st_mode & 0o777 == 0o700

    root.chmod(0o755)
    with pytest.raises(CaptureError, match="is not this user's alone; remove it"):
        native.load(environ)
    assert state(environ).name == "missing"
    assert build(environ) == path, "our own: made private again"
    assert native.load(environ) is not None

    root.parent.chmod(0o777)  # others can put theirs in its place
    with pytest.raises(CaptureError, match="is not this user's alone; remove it"):
        native.load(environ)
    with pytest.raises(CaptureError, match=r"others can put their own folders there; chmod \+t"):
        build(environ)
    root.parent.chmod(0o1777)
    assert native.load(environ) is not None

    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    assert native.load(environ) is None
    assert len(runs(tmp_path)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder is made")
def test_a_temporary_folder_of_another_user_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = compiler("cp BUILT $out") | {"XDG_CACHE_HOME": str(tmp_path / "file")}
    root = build(environ).parent.parent
    os.chown(root, 4711, 4711)
    with pytest.raises(CaptureError, match="is not this user's alone; remove it"):
        native.load(environ)
    with pytest.raises(CaptureError, match="is not this user's alone; remove it"):
        build(environ)


def test_what_is_loaded_is_what_was_looked_at(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = compiler("cp BUILT $out")
    path = build(environ)
    looked_at = path.stat().st_ino
    load, loaded = native._import, []

    def swapped(name: Path, handle: int) -> object:
        path.parent.rename(tmp_path / "moved")  # after the look, before the loading
        path.parent.mkdir()
        path.write_text("another user's")
        loaded.append(os.stat(f"/proc/self/fd/{handle}").st_ino)
        return load(name, handle)

    monkeypatch.setattr(native, "_import", swapped)
    assert native.load(environ).__file__ == str(path)
    assert loaded == [looked_at]


def test_one_that_is_refused_is_built_again(compiler: Compiler) -> None:
    environ = compiler("cp BUILT $out")
    path = build(environ)
    path.write_text("no extension")
    assert state(environ) == builder.BuildState(
        "missing", f"{path} is damaged; remove it, then python -m failslow.capture.native"
    )
    assert build(environ) == path
    assert state(environ).name == "built"


def test_a_cache_that_a_lax_umask_left_open_is_closed_and_used(
    compiler: Compiler, tmp_path: Path
) -> None:
    environ = compiler("cp BUILT $out")
    path = build(environ)
    path.parent.parent.chmod(0o775)
    assert state(environ).name == "missing"
    assert build(environ) == path
    assert path.parent.parent.stat().st_mode & 0o777 == 0o755
    assert state(environ).name == "built"
    assert len(runs(tmp_path)) == 1


@pytest.mark.slow
def test_one_that_cannot_be_loaded_is_told_and_built_again_by_hand(compiler: Compiler) -> None:
    environ = compiler("cp BUILT $out")
    path = build(environ)
    assert build(environ, again=True) == path
    built = path.stat().st_ino
    path.write_text("no extension")
    path.with_name("sha256").write_text(hashlib.sha256(b"no extension").hexdigest())
    with contextlib.ExitStack() as stack:
        for _ in range(200):  # the loader takes a file of the same name, its number, for the same
            stack.enter_context(open(os.devnull))
        with pytest.raises(CaptureError, match=r"cannot be loaded \(.*\); run python -m failslow"):
            native.load(environ)
    assert build(environ, again=True) == path
    assert path.stat().st_ino != built
    assert native.load(environ) is not None


def test_one_that_was_damaged_costs_the_speed_only(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = compiler("cp BUILT $out")
    path = build(environ)
    os.truncate(path, 10_000)  # loading that ends the process
    monkeypatch.setenv("XDG_CACHE_HOME", environ["XDG_CACHE_HOME"])
    with pytest.raises(CaptureError, match=r"is damaged; remove it, then python -m"):
        native.load()
    hook.install()
    try:
        assert hook.status()["mode"] == "dispatcher"
        assert "is damaged" in hook.status()["refused"]
    finally:
        hook.uninstall()
