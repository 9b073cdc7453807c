"""Real processes, groups and namespaces to hurt, and the proof that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tests.testbed import TestBed, until

from failslow.inject.cgroups import CpuGroup, cpu_group
from failslow.inject.processes import cpu_time_s

SPIN = "while True: pass"
WAIT = "import signal; signal.pause()"


Start = Callable[..., "subprocess.Popen[bytes]"]


class Share(Protocol):
    """`share(pid)`: CPU seconds a second that the process gets, measured over `cpu_s` of them."""

    def __call__(self, pid: int, cpu_s: float = 0.3) -> float: ...


@pytest.fixture(autouse=True)
def records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test keeps its injections' records in a folder of its own, empty at the end."""
    folder = tmp_path_factory.mktemp("records")
    folder.chmod(0o700)
    monkeypatch.setenv("FAILSLOW_INJECT_FOLDER", str(folder))
    return folder


@pytest.fixture
def heavy_group() -> Iterator[CpuGroup]:
    """A control group of its own, at 16 times the usual weight so that other load hardly matters.

    A limit that a test sets there is taken away again.
    """
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    own = cpu_group()
    if own is None:
        pytest.skip("no cpu control group is to be seen")
    group = CpuGroup(own.root / f"inject-test-{os.getpid()}", own.version, own.root)
    group.path.mkdir()
    group.weight_file().write_text({1: "16384", 2: "1600"}[group.version], encoding="ascii")
    unlimited = [file.read_text(encoding="ascii") for file in group.limit_files()]
    yield group
    for file, text in reversed(list(zip(group.limit_files(), unlimited, strict=True))):
        file.write_text(text, encoding="ascii")
    assert [p for p in group.path.iterdir() if p.is_dir()] == []
    until(lambda: not group.members())
    group.path.rmdir()


@pytest.fixture
def start(heavy_group: CpuGroup) -> Iterator[Start]:
    """`start(code)`: a Python process in the heavy group, killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def call(code: str = SPIN) -> subprocess.Popen[bytes]:
        # its program begins once it is in the group, so that all that it starts is there too
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh", sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        heavy_group.move_in({process.pid})
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def spinner(start: Start) -> subprocess.Popen[bytes]:
    """A process that would use a whole core."""
    return start()


@pytest.fixture
def share() -> Share:
    """Measures by /proc/PID/stat until enough CPU time was used."""

    def measure(pid: int, cpu_s: float = 0.3) -> float:
        begin_cpu_s, begin_s = cpu_time_s(pid), time.monotonic()
        until(lambda: cpu_time_s(pid) - begin_cpu_s >= cpu_s)
        return (cpu_time_s(pid) - begin_cpu_s) / (time.monotonic() - begin_s)

    return measure


@pytest.fixture(scope="module")
def bed() -> Iterator[TestBed]:
    """Three nodes."""
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=3) as made:
        yield made


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The installed command."""
    return [str(Path(sys.executable).with_name("failslow")), "inject"]


def processes_of(folder: Path) -> list[int]:
    """Guards and actors whose records are in `folder`: their order names it in no other place."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        ours = f"FAILSLOW_INJECT_FOLDER={folder}".encode()
        if ours in environ.split(b"\0") and b"failslow.inject" in words:
            found.append(int(entry.name))
    return found


@pytest.fixture
def nothing_left(records: Path) -> Callable[[], None]:
    """`nothing_left()`: waits until no record, guard or actor of this test is there."""

    def check() -> None:
        until(lambda: not processes_of(records) and not list(records.glob("*.json")))

    return check
