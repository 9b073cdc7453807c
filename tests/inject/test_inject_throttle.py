"""Throttling a real process: the share it gets, by both means, and that it gets it all back."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.inject.conftest import WAIT, Share, Start

from failslow.errors import InjectError
from failslow.inject import throttle
from failslow.inject.cgroups import CpuGroup

_PARENT = """
import signal, subprocess, sys
code = "import signal; signal.pause()"
subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session={})
print(flush=True)
signal.pause()
"""


def test_a_quota_leaves_the_share_asked_for_and_then_all(
    spinner: subprocess.Popen[bytes], share: Share, nothing_left: Callable[[], None]
) -> None:
    with throttle(spinner.pid, to=0.3, method="cgroup") as injection:
        during = share(spinner.pid)
    after = share(spinner.pid)

    assert "quota" in injection.how
    assert during == pytest.approx(0.3, abs=0.06)
    assert after > 0.5
    assert injection.ended == "it was asked to"
    nothing_left()


def test_signals_leave_the_share_asked_for_and_then_all(
    spinner: subprocess.Popen[bytes], share: Share, nothing_left: Callable[[], None]
) -> None:
    with throttle(spinner.pid, to=0.4, method="signal") as injection:
        during = share(spinner.pid)
    after = share(spinner.pid)

    assert "signals" in injection.how
    assert during == pytest.approx(0.4, abs=0.12)
    assert after > 0.5
    nothing_left()


def test_a_process_alone_in_its_group_is_limited_there_and_its_old_limit_returns(
    spinner: subprocess.Popen[bytes], heavy_group: CpuGroup
) -> None:
    heavy_group.set_limit(0.9)
    before = [file.read_text() for file in heavy_group.limit_files()]

    with throttle(spinner.pid, to=0.2):
        assert heavy_group.limit_cores() == pytest.approx(0.2)
        assert heavy_group.members() == {spinner.pid}

    assert [file.read_text() for file in heavy_group.limit_files()] == before


def test_others_in_the_same_group_keep_their_speed(
    start: Start, heavy_group: CpuGroup, share: Share
) -> None:
    slowed, other = start(), start()

    with throttle(slowed.pid, to=0.2) as injection:
        assert share(slowed.pid) == pytest.approx(0.2, abs=0.06)
        assert share(other.pid) > 0.3
        assert heavy_group.members() == {other.pid}
        assert f"failslow-{slowed.pid}" in injection.how

    assert heavy_group.members() == {slowed.pid, other.pid}


@pytest.mark.parametrize(("own_session", "moved"), [(False, 2), (True, 1)])
def test_data_loaders_are_slowed_with_it_and_monitors_in_their_own_session_are_not(
    start: Start, heavy_group: CpuGroup, own_session: bool, moved: int
) -> None:
    parent = start(_PARENT.format(own_session))
    bystander = start(WAIT)
    assert parent.stdout is not None
    parent.stdout.readline()
    try:
        everyone = heavy_group.members()
        with throttle(parent.pid, to=0.2):
            limited = CpuGroup(heavy_group.path / f"failslow-{parent.pid}", heavy_group.version,
                               heavy_group.root)  # fmt: skip
            assert len(limited.members()) == moved
            assert bystander.pid in heavy_group.members()
        assert heavy_group.members() == everyone
        assert len(everyone) == 3
    finally:
        for pid in heavy_group.members() - {parent.pid, bystander.pid}:
            os.kill(pid, signal.SIGKILL)


def test_several_threads_get_the_share_each(spinner: subprocess.Popen[bytes]) -> None:
    with throttle(spinner.pid, to=0.5, threads=3) as injection:
        assert injection.how.startswith("cpu quota of 1.50 cores")


def test_it_ends_with_its_target(
    spinner: subprocess.Popen[bytes], nothing_left: Callable[[], None]
) -> None:
    with throttle(spinner.pid, to=0.5) as injection:
        spinner.kill()
        assert injection.wait(20) == "its target ended"
    nothing_left()


def test_it_ends_by_itself_when_its_time_is_up(
    spinner: subprocess.Popen[bytes], heavy_group: CpuGroup, nothing_left: Callable[[], None]
) -> None:
    with throttle(spinner.pid, to=0.5, for_s=0.2) as injection:
        assert injection.wait(20) == "time is up"
        assert heavy_group.limit_cores() is None
    nothing_left()


def test_it_is_undone_after_an_exception(
    spinner: subprocess.Popen[bytes], heavy_group: CpuGroup, nothing_left: Callable[[], None]
) -> None:
    def fail_inside() -> None:
        with throttle(spinner.pid, to=0.5):
            assert heavy_group.limit_cores() == 0.5
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        fail_inside()
    assert heavy_group.limit_cores() is None
    nothing_left()


def test_a_second_throttle_of_the_process_is_refused(
    spinner: subprocess.Popen[bytes], heavy_group: CpuGroup
) -> None:
    with throttle(spinner.pid, to=0.5):
        with pytest.raises(InjectError, match=r"already has a throttle injection in force .*undo"):
            throttle(spinner.pid, to=0.2, method="signal").start()
        assert heavy_group.limit_cores() == 0.5


def test_a_limit_that_is_tighter_already_is_not_called_a_throttle(
    spinner: subprocess.Popen[bytes], heavy_group: CpuGroup
) -> None:
    heavy_group.set_limit(0.2)

    with pytest.raises(InjectError, match=r"already allows only 0\.20 cores"):
        throttle(spinner.pid, to=0.5, method="cgroup").start()

    assert heavy_group.limit_cores() == 0.2


def test_without_a_writable_group_signals_do_it() -> None:
    nobody = 65534
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    source = Path(__file__).resolve().parents[2] / "src"
    trial = (
        f"import sys; open({str(source / 'failslow/__init__.py')!r}).close()\n"
        "assert sys.version_info > (3, 10)"
    )
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-c", trial], user=nobody, check=True, capture_output=True)
            break
    else:
        pytest.skip("another user cannot read this checkout, or has no Python")
    # pytest's own folders are closed to others
    with tempfile.TemporaryDirectory() as records:
        os.chown(records, nobody, nobody)
        told = _throttle_as(nobody, python, source, records)

    assert "stopped 70 % of the time by signals" in told


def _throttle_as(user: int, python: str, source: Path, records: str) -> str:
    """What a user without rights has to do, and what it says."""
    code = (
        "import subprocess, sys\n"
        "from failslow.inject import throttle\n"
        "p = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'while True: pass'])\n"
        "try:\n"
        "    with throttle(p.pid, to=0.3) as injection:\n"
        "        print(injection.how)\n"
        "finally:\n"
        "    p.kill()\n"
    )
    done = subprocess.run(
        [python, "-c", code],
        user=user,
        group=user,
        env={"PYTHONPATH": str(source), "FAILSLOW_INJECT_FOLDER": records},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )

    return done.stdout + done.stderr


def test_pid_1_ancestors_kernel_threads_and_strangers_are_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("starting a process as another user needs root")
    stranger = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        for pid, told in [
            (1, "runs this machine"),
            (os.getpid(), "started this command"),
            (os.getppid(), "started this command|runs this machine"),
            (2, "belongs to the kernel|no process"),
            (stranger.pid, r"belongs to user 65534, you are 0; run this as its user"),
            (-5, "is no process id"),
            (2**22 + 1, "no process"),
        ]:
            with pytest.raises(InjectError, match=told):
                throttle(pid, to=0.5).start()
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"to": 1.0}, r"to \(1\) must be from 0.01"),
        ({"to": 0.0}, r"to \(0\)"),
        ({"to": float("nan")}, r"to \(nan\)"),
        ({"to": 0.5, "threads": 0}, r"threads \(0\)"),
        ({"to": 0.5, "method": "magic"}, "none of auto, cgroup, signal"),
        ({"to": 0.5, "for_s": 0.0}, r"for \(0 s\) must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(InjectError, match=told):
        throttle(os.getpid(), **options).start()  # type: ignore[arg-type]  # wrong on purpose


def test_what_holds_a_terminal_is_not_stopped_under_its_shell() -> None:
    ours, theirs = pty.openpty()
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    shell = subprocess.Popen(
        ["setsid", "--ctty", "sh", "-c", '"$0" -I -S -c "$1"; true', sys.executable, code],
        stdin=theirs,
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    try:
        with pytest.raises(InjectError, match=r"foreground of a terminal.*in the background"):
            throttle(pid, to=0.5, method="signal").start()
    finally:
        os.kill(pid, signal.SIGKILL)
        shell.communicate(timeout=20)
        os.close(theirs)
        os.close(ours)
