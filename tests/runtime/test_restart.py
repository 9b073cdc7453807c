"""What a node's launcher does with an order to start again without a host: real processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.transport.servers import until

from failslow.pipeline import Order
from failslow.runtime.duty_restart import RestartDuty
from failslow.runtime.restart import RestartOrder, Supervised, leave_order, read_order, restart_file
from failslow.runtime.slurm import Allocation, Slurm

_COUNTED = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
number = len(list(folder.glob("start*")))
(folder / f"start{number}").touch()
codes = sys.argv[2].split(",")
code = codes[min(number, len(codes) - 1)]
if code == "saved":
    (folder / "saved-gpu-1").write_text(str(number))
    sys.exit(0)
if code != "wait":
    sys.exit(int(code))
while not (folder / "go").exists():
    time.sleep(0.01)
(folder / "go").unlink()
sys.exit(1)
"""
_STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"])
pathlib.Path(sys.argv[1], "pid").write_text(str(child.pid))
time.sleep(600)
"""


class Launched:
    """A supervised command in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        *command: str,
        node: str = "gpu-1",
        limit: int = 2,
        late_s: float = 0.3,
        slurm: Slurm | None = None,
        saved_s: float = 30.0,
    ) -> None:
        self.folder, self.node, self.said = folder, node, list[str]()
        self.code: int | None = None
        self._supervised = Supervised(
            [sys.executable, "-c", *command],
            os.environ,
            folder=folder,
            node=node,
            limit=limit,
            say=self.said.append,
            saved_s=saved_s,
            grace_s=0.5,
            backoff_s=0.05,
            late_s=late_s,
            slurm=slurm,
            killed_s=0.5,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.code = self._supervised._run()

    def order(self, *evict: str, id: str = "e1-1") -> None:
        order = RestartOrder(id=id, evict=evict, why="device rank 3 x1.84")
        leave_order(self.folder, self.node, order)

    def goes_on_without_a_host(self) -> int:
        """Its command runs, one is left out, and the starts after that end; the exit code."""
        until(lambda: starts(self.folder) == 1)
        self.order("gpu-3")
        until(lambda: any("without gpu-3" in text for text in self.said))
        (self.folder / "go").touch()
        return self.end()

    def end(self) -> int:
        self._thread.join(30.0)
        assert self.code is not None
        return self.code


def starts(folder: Path) -> int:
    return len(list(folder.glob("start*")))


@pytest.mark.parametrize("code", [0, 3])
def test_without_orders_a_command_runs_once(tmp_path: Path, code: int) -> None:
    job = Launched(tmp_path, _COUNTED, str(tmp_path), str(code))
    assert job.end() == code
    assert starts(tmp_path) == 1
    assert job.said == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_has_not_saved_itself_has_nothing_to_wait_for(
    tmp_path: Path, code: int
) -> None:
    (tmp_path / "saved-gpu-1").touch()  # of an earlier start
    if code == 0:
        (tmp_path / "journal.jsonl").touch()
    else:  # a spare would find those of the others
        (tmp_path / "saved-gpu-1").unlink()
    begin_s = time.monotonic()
    assert Launched(tmp_path, _COUNTED, str(tmp_path), str(code), late_s=20.0).end() == code
    assert time.monotonic() - begin_s < 2.5  # 20 s, and of a failure 3 s


def test_the_node_left_out_ends_all_it_started_and_stays_away(tmp_path: Path) -> None:
    job = Launched(tmp_path, _STUBBORN, str(tmp_path), node="gpu-3", saved_s=0.3)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    job.order("gpu-3")
    assert job.end() == 0
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert "gpu-3, is left out" in job.said[0]
    assert "device rank 3 x1.84" in job.said[0]


def test_others_go_on_and_are_started_again_if_their_command_fails(tmp_path: Path) -> None:
    job = Launched(tmp_path, _COUNTED, str(tmp_path), "wait,1,0")
    assert job.goes_on_without_a_host() == 0
    assert starts(tmp_path) == 3


def test_a_job_that_was_saved_and_ended_well_is_started_again(tmp_path: Path) -> None:
    job = Launched(tmp_path, _COUNTED, str(tmp_path), "saved,saved", late_s=20.0)
    until(lambda: starts(tmp_path) == 1)
    time.sleep(0.3)  # it has ended meanwhile: the order comes late
    job.order("gpu-3")
    until(lambda: starts(tmp_path) == 2)
    job.order("gpu-1", id="e1-2")
    assert job.end() == 0
    assert starts(tmp_path) == 2


def test_a_launcher_that_waits_for_nodes_that_are_gone_is_ended_and_started_again(
    tmp_path: Path,
) -> None:
    job = Launched(tmp_path, _COUNTED, str(tmp_path), "wait,0", saved_s=0.5)
    until(lambda: starts(tmp_path) == 1)
    job.order("gpu-3")
    assert job.end() == 0
    assert starts(tmp_path) == 2
    assert any("not ended within 0.5 s" in text for text in job.said)


def test_the_node_left_out_lets_its_launcher_end_as_others_may_wait_for_it(tmp_path: Path) -> None:
    polite = (
        "import pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'killed').touch())\n"
    )
    job = Launched(tmp_path, polite + _COUNTED, str(tmp_path), "wait", node="gpu-3")
    until(lambda: starts(tmp_path) == 1)
    job.order("gpu-3")
    until(lambda: any("is left out" in text for text in job.said))
    (tmp_path / "go").touch()
    assert job.end() == 0
    assert not (tmp_path / "killed").exists()


def test_a_restart_that_fails_is_given_up_after_the_limit_and_said(tmp_path: Path) -> None:
    job = Launched(tmp_path, _COUNTED, str(tmp_path), "wait,1", limit=3)
    until(lambda: starts(tmp_path) == 1)
    job.order("gpu-3")
    until(lambda: any("without gpu-3" in text for text in job.said))
    (tmp_path / "go").touch()
    assert job.end() == 1
    assert starts(tmp_path) == 4
    assert "left stopped" in job.said[-1]


def test_orders_of_an_earlier_run_are_none_of_this_one(tmp_path: Path) -> None:
    leave_order(tmp_path, "gpu-3", RestartOrder(id="e0-1", evict=("gpu-3",)))
    job = Launched(tmp_path, _COUNTED, str(tmp_path), "wait", node="gpu-3")
    until(lambda: starts(tmp_path) == 1)
    time.sleep(0.5)  # longer than it looks for orders
    assert starts(tmp_path) == 1
    (tmp_path / "go").touch()
    assert job.end() == 1


_PROGRAM = (
    "import os, sys\nfrom pathlib import Path\n"
    "from failslow.runtime.restart import Supervised\n"
    "sys.exit(Supervised([sys.executable, '-c', sys.argv[2], sys.argv[1], 'wait'], os.environ,"
    " folder=Path(sys.argv[1]), node='n', limit=2, say=print).run())"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("alone", [True, False])
def test_signals_reach_the_command_and_end_it_for_good(
    tmp_path: Path, number: signal.Signals, alone: bool
) -> None:
    """Whether they come to the launcher alone, as from `docker stop`, or to its group."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), _COUNTED], start_new_session=True
    )
    until(lambda: starts(tmp_path) == 1)
    (process.send_signal if alone else partial(os.killpg, process.pid))(number)
    assert process.wait(20.0) == 128 + number
    assert starts(tmp_path) == 1


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    counts = (
        "import pathlib, signal, sys\nfolder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGINT, lambda *_: (folder / 'got').open('a').write('x'))\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", _PROGRAM, str(tmp_path), counts + _COUNTED])
    try:
        until(lambda: starts(tmp_path) == 1)
        os.write(terminal, b"\x03")
        until(lambda: (tmp_path / "got").exists() and (tmp_path / "got").read_text() != "")
        time.sleep(0.5)  # a second one would come at once
        (tmp_path / "go").touch()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert (tmp_path / "got").read_text() == "x"
    finally:
        os.close(terminal)


def _quiet(tmp_path: Path) -> Supervised:
    command = [sys.executable, "-c", _COUNTED, str(tmp_path), "wait"]
    return Supervised(command, os.environ, folder=tmp_path, node="n", limit=2, say=print)


def test_a_signal_before_the_command_is_there_keeps_it_from_starting(tmp_path: Path) -> None:
    early = _quiet(tmp_path)
    early._forward(signal.SIGTERM, None)
    assert early._run() == 128 + signal.SIGTERM
    assert starts(tmp_path) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_command_is_being_started_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    early, popen = _quiet(tmp_path), subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started = popen(*arguments, **options)
        until(lambda: starts(tmp_path) == 1)
        early._forward(number, None)  # it is not yet known here
        return started

    monkeypatch.setattr("failslow.runtime.restart.subprocess.Popen", start)
    assert early._run() == 128 + number


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"id":1}', '{"id":"a","evict":7}', '{"evict":["x"]}']
)
def test_a_damaged_order_is_no_order(tmp_path: Path, text: str) -> None:
    restart_file(tmp_path, "gpu-3").write_text(text)
    assert read_order(tmp_path, "gpu-3") is None


def test_node_names_are_no_paths(tmp_path: Path) -> None:
    assert restart_file(tmp_path, "../../etc/x y").parent == tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_order_is_not_followed(tmp_path: Path) -> None:
    leave_order(tmp_path, "n", RestartOrder(id="1", evict=("n",)))
    os.chown(restart_file(tmp_path, "n"), 1234, 1234)
    assert read_order(tmp_path, "n") is None


def test_the_agent_hands_orders_on_and_tells_when_it_cannot(tmp_path: Path) -> None:
    order = Order(topic="restart", body={"id": "e1-4", "evict": ["gpu-3"], "why": "device rank 25"})
    duty = RestartDuty("gpu-1", tmp_path)
    duty.order(order, 0.0)
    (report,) = duty.turn([], 0.0)
    assert report.body == {"id": "e1-4", "error": ""}
    found = read_order(tmp_path, "gpu-1")
    assert found == RestartOrder(id="e1-4", evict=("gpu-3",), why="device rank 25")
    assert not list(duty.turn([], 0.0))
    lost = RestartDuty("gpu-1", tmp_path / "missing")
    lost.order(order, 0.0)
    (report,) = lost.turn([], 0.0)
    assert "No such file" in str(report.body["error"])


def test_a_spare_follows_the_order_the_others_had(tmp_path: Path) -> None:
    leave_order(tmp_path, "gpu-2", RestartOrder(id="e0-1", evict=("gpu-9",)))
    (tmp_path / "journal.jsonl").touch()  # the others'
    spare = Launched(tmp_path, _COUNTED, str(tmp_path), "wait,saved", node="gpu-7", late_s=20.0)
    until(lambda: starts(tmp_path) == 1)
    (tmp_path / "go").touch()  # nobody is left to meet: its launcher fails
    leave_order(tmp_path, "gpu-1", RestartOrder(id="e1-1", evict=("gpu-3",)))
    until(lambda: starts(tmp_path) == 2)
    leave_order(tmp_path, "gpu-7", RestartOrder(id="e2-1", evict=("gpu-7",)))
    assert spare.end() == 0
    assert any("without gpu-3" in text for text in spare.said)
    assert not any("gpu-9" in text for text in spare.said)


def test_a_command_that_is_started_again_is_told_how_often(tmp_path: Path) -> None:
    told = (
        "import os, pathlib, sys; folder = pathlib.Path(sys.argv[1]);"
        "(folder / 'told').open('a').write(os.environ.get('FAILSLOW_RESTARTED', '') + ';');"
    )
    job = Launched(tmp_path, told + _COUNTED, str(tmp_path), "wait,1,0")
    assert job.goes_on_without_a_host() == 0
    assert (tmp_path / "told").read_text() == ";1 e1-1;2 e1-1;"


def test_with_its_last_start_a_command_is_told_that_there_is_no_other(tmp_path: Path) -> None:
    """A job that saved itself and ended then would be left stopped."""
    told = (
        "import os, pathlib, sys; folder = pathlib.Path(sys.argv[1]);"
        "(folder / 'told').open('a').write(os.environ['FAILSLOW_DECIDE_ALLOW_RESTART'] + ';');"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILSLOW_DECIDE_ALLOW_RESTART", "true")
        job = Launched(tmp_path, told + _COUNTED, str(tmp_path), "wait,1,0")
    assert job.goes_on_without_a_host() == 0
    assert (tmp_path / "told").read_text() == "true;true;false;"


class _FakeSlurm(Slurm):
    """Says whether the job was requeued."""

    def __init__(self, requeued: bool) -> None:
        allocation = Allocation(job="4711", nodes=("gpu-1", "gpu-3"))
        super().__init__(allocation, requeue=True, limit=1, say=print)
        self.left_out: list[tuple[str, ...]] = []
        self._requeued = requeued

    def leave_out(self, evict: Sequence[str], why: str) -> bool:
        self.left_out.append((*evict, why))
        return self._requeued


@pytest.mark.parametrize(("requeued", "code"), [(True, 0), (False, 1)])
def test_a_job_that_slurm_starts_again_ends_here(tmp_path: Path, requeued: bool, code: int) -> None:
    slurm = _FakeSlurm(requeued)
    job = Launched(tmp_path, _COUNTED, str(tmp_path), "saved", late_s=20.0, slurm=slurm)
    until(lambda: starts(tmp_path) == 1)
    job.order("gpu-3")
    assert job.end() == code
    assert starts(tmp_path) == 1
    assert slurm.left_out == [("gpu-3", "device rank 3 x1.84")]
