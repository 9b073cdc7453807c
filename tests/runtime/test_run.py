"""`failslow run`: what the command gets, and that nothing stands between it and its caller."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.runtime.watched import TRAIN, clean_environ, watched
from tests.transport.servers import free_port, until

from failslow.cli.run import _supervise
from failslow.runtime.doctor.running import running_checks

FAILSLOW = str(Path(sys.executable).with_name("failslow"))
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FAILSLOW, "run", *arguments],
        cwd=cwd,
        env=clean_environ() | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_command_gets_the_environment_that_has_it_watched(tmp_path: Path) -> None:
    config = tmp_path / "failslow.toml"
    config.touch()
    done = run(
        "--job", "pretrain7", "--mode", "advise", "--transport", "redis://10.0.0.5",
        "--config", "failslow.toml", "--no-reference", "--", sys.executable, "-c", SHOW,
        cwd=tmp_path,
    )  # fmt: skip
    environ = json.loads(done.stdout)
    assert environ["FAILSLOW"] == "1"
    assert environ["FAILSLOW_JOB"] == "pretrain7"
    assert environ["FAILSLOW_MODE"] == "advise"
    assert environ["FAILSLOW_LOCALIZE_REFERENCE"] == "false"
    assert environ["FAILSLOW_TRANSPORT"] == "redis://10.0.0.5"
    assert environ["FAILSLOW_CONFIG"] == str(config)
    assert environ["FAILSLOW_DIR"] == str(tmp_path / "failslow-runs" / "pretrain7")
    assert "failslow-runs/pretrain7/journal.jsonl" in done.stderr


def test_nodes_that_share_the_folder_share_a_secret_token(tmp_path: Path) -> None:
    first, second = (
        json.loads(run("-q", sys.executable, "-c", SHOW, cwd=tmp_path).stdout) for _ in range(2)
    )
    assert first["FAILSLOW_TOKEN"] == second["FAILSLOW_TOKEN"]
    kept = tmp_path / "failslow-runs" / ".token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    given = run(sys.executable, "-c", SHOW, cwd=tmp_path, FAILSLOW_TOKEN="t" * 40)
    assert json.loads(given.stdout)["FAILSLOW_TOKEN"] == "t" * 40


def test_a_compiled_capture_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="without torch there is nothing to build it for")
    bare = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = run("true", cwd=tmp_path, **bare, CXX="true")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == (
        "the compiled capture is being built in the background for jobs started later; "
        "this one is captured in Python"
    )
    assert not (tmp_path / "cache").exists(), "that is left to the job's own supervisor"
    done = run("true", cwd=tmp_path, **bare, CXX="no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in done.stderr.splitlines()[-1]
    assert run("-q", "true", cwd=tmp_path, **bare).stderr == ""


def test_options_of_the_command_are_its_own(tmp_path: Path) -> None:
    done = run("-q", "sh", "-c", 'echo "$@"', "sh", "--job", "x", "-q", "--", "y", cwd=tmp_path)
    assert done.stdout == "--job x -q -- y\n"
    assert done.stderr == ""


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    assert run("-q", "sh", "-c", "exit 77", cwd=tmp_path).returncode == 77
    killed = run("-q", "sh", "-c", "kill -SEGV $$", cwd=tmp_path)
    assert killed.returncode == -signal.SIGSEGV


def test_signals_reach_the_command_itself(tmp_path: Path) -> None:
    script = "trap 'echo got; exit 5' USR1; echo $$; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [FAILSLOW, "run", "-q", "--", "sh", "-c", script],
        cwd=tmp_path,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read() == "got\n"
    assert process.returncode == 5


def test_a_reader_that_goes_away_ends_the_command_as_ever(tmp_path: Path) -> None:
    # Python ignores SIGPIPE; what it starts must not
    done = subprocess.run(
        f"{FAILSLOW} run -q -- sh -c 'while :; do echo y; done; exit 3' | head -1; "
        'echo "${PIPESTATUS[0]}"',
        shell=True,
        executable="/bin/bash",
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == f"y\n{128 + signal.SIGPIPE}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nosuchcommand"], 127, "nosuchcommand: cannot be run: No such file"),
        (["/"], 126, "/: cannot be run: Permission denied"),
        ([], 1, "Missing argument"),
        (["--mode", "mad", "true"], 1, "is none of observe, advise, auto"),
        (["--transport", "http://x", "true"], 1, "write tcpstore://HOST:PORT"),
        (["--config", "nosuch.toml", "true"], 1, "no such file"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    line = done.stderr.splitlines()[-1]
    assert line.startswith("failslow: ")
    assert says in line


def test_a_folder_that_cannot_be_made_costs_the_watching_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "failslow-runs").touch()
    done = run("sh", "-c", "echo trained", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("not watched: failslow-runs cannot be made: File exists; ")
    assert "watching" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (["--config", "bad.toml"], {}, "cannot read the settings file "),
        (["--config", "typo.toml"], {}, "min_slowdwn = 1.2 from [detect] in "),
        ([], {"FAILSLOW_CONFIG": "typo.toml"}, "min_slowdwn = 1.2 from [detect] in typo.toml"),
        ([], {"FAILSLOW_MODE": "foo"}, "mode = 'foo' from $FAILSLOW_MODE: Input should be"),
        ([], {"FAILSLOW_TRANSPORT": "http://x"}, "FAILSLOW_TRANSPORT=http://x has no known scheme"),
        (["--dir", "/proc/x"], {}, "--dir /proc/x: cannot be made: No such file or directory; "),
        (["--dir", "bad.toml"], {}, "--dir bad.toml: is a file; name a folder"),
        ([], {"FAILSLOW_DIR": "bad.toml/x"}, "FAILSLOW_DIR=bad.toml/x: cannot be made: Not a dir"),
    ],
)
def test_a_job_whose_settings_or_folder_nobody_could_use_does_not_begin(
    arguments: list[str], environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text("[detect\n")
    (tmp_path / "typo.toml").write_text("[detect]\nmin_slowdwn = 1.2\n")
    done = run(*arguments, "--", "touch", "began", cwd=tmp_path, **environ)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"failslow: {says}")
    assert not (tmp_path / "began").exists()


def test_torchrun_under_it_is_watched_and_leaves_nothing_behind(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [
        FAILSLOW, "run", "--", torchrun, "--nproc-per-node", "2",
        "--master-port", str(free_port()), str(TRAIN),
    ]  # fmt: skip
    port = free_port()
    environ = {"FAILSLOW": "0", "FAILSLOW_METRICS_PORT": str(port)}
    with watched(world=2, command=command, environ=environ) as job:
        job.until(lambda: len(job.steps()) >= 10)
        here = {"FAILSLOW_CAPTURE_FOLDER": str(job.folder / "rings")}
        checks = list(running_checks(str(job.folder / "run"), here, now_s=time.time()))
        assert {c.name: c.status for c in checks} == dict.fromkeys(
            ("journal", "rings", "agent", "controller"), "pass"
        ), checks

        def metrics() -> str:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        assert 'failslow_iteration_seconds{job="' in metrics()
        job.until(lambda: "failslow_episode_active" in metrics())  # the controller's news came
        job.stop()
        until(lambda: not job.ours(), 20.0)
        assert job.health("controller")[-1]["event"] == "ended"
        assert job.health("agent")[-1]["left"]
        assert not list((job.folder / "rings").iterdir())
        assert {e.rank for e in job.entries("step")} == {None, 0, 1}
        assert os.path.relpath(job.journal_path) in (job.folder / "out0.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        ([], {}, "--restarts 1 does nothing in mode observe, "),
        ([], {"FAILSLOW_MODE": "advise"}, "--restarts 1 leaves no host out by itself in mode adv"),
        (["--mode", "auto"], {}, ""),
        ([], {"FAILSLOW_MODE": "auto"}, ""),
    ],
)
def test_what_restarts_need_is_said(
    arguments: list[str], environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    done = run("-q", *arguments, "--restarts", "1", "echo", "trained", cwd=tmp_path, **environ)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == bool(says)
    assert done.stderr.endswith("; add --mode auto\n") == bool(says)


def test_a_misspelt_variable_is_named_and_costs_the_job_nothing(tmp_path: Path) -> None:
    misspelt = {"FAILSLOW_DECIDE_SPARE": "1", "FAILSLOW_DECIDE_SPARES": "1"}
    done = run("-q", sys.executable, "-c", SHOW, cwd=tmp_path, **misspelt)
    assert done.returncode == 0
    assert done.stderr == (
        "FAILSLOW_DECIDE_SPARE is set, and nothing reads it: did you mean FAILSLOW_DECIDE_SPARES?\n"
    )
    # what failslow sets itself for the job is none
    assert run("-q", "true", cwd=tmp_path, **json.loads(done.stdout)).stderr == done.stderr


def test_slurm_is_told_nothing_without_restarts_and_outside_of_a_job(tmp_path: Path) -> None:
    refused = run("--slurm", "drain", "true", cwd=tmp_path)
    assert refused.returncode == 1
    assert "--slurm drain without --restarts does nothing; add --restarts 1" in refused.stderr
    unknown = run("--slurm", "reboot", "--restarts", "1", "true", cwd=tmp_path)
    assert unknown.returncode == 1
    assert "none of off, drain, requeue" in unknown.stderr
    bare = run("--slurm", "requeue", "--restarts", "1", "false", cwd=tmp_path)
    assert bare.returncode == 1
    assert "this is no Slurm job: nothing will be requeued" in bare.stderr


class _Supervised:
    """In the place of the launcher: keeps what the command would get."""

    environ: Mapping[str, str]

    def __init__(self, _command: object, environ: Mapping[str, str], **_: object) -> None:
        type(self).environ = environ

    def run(self) -> int:
        return 0


def test_a_job_that_could_not_start_again_never_saves_itself_to_do_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("failslow.runtime.restart.Supervised", _Supervised)
    monkeypatch.setenv("PATH", "/nowhere")  # Slurm does not answer

    def given(*command: str, **environ: str) -> tuple[Mapping[str, str], str]:
        assert _supervise(command, {"FAILSLOW_DIR": str(tmp_path)} | environ, 2) == 0
        return _Supervised.environ, capsys.readouterr().err

    environ, _ = given("train")
    assert environ["FAILSLOW_DECIDE_ALLOW_RESTART"] == "true"
    assert environ["FAILSLOW_LAUNCHER"] == socket.gethostname()
    requeue = {"FAILSLOW_DECIDE_SLURM": "requeue"}
    outside, said = given("train", **requeue)
    assert "nothing will be requeued" in said
    assert outside["FAILSLOW_DECIDE_SLURM"] == "off"  # no node may count on it
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", **requeue}
    first, _ = given("srun", **job)
    assert first["FAILSLOW_DECIDE_ALLOW_RESTART"] == "true"
    assert first["FAILSLOW_LAUNCHER"] == "*"
    last, said = given("srun", SLURM_RESTART_COUNT="2", **job)
    assert last["FAILSLOW_DECIDE_ALLOW_RESTART"] == "false"
    assert "level S4 is off, for the job could not start again: Slurm has started it" in said
    _, said = given("torchrun", "--nnodes", "8", "train.py")
    assert "--nnodes asks for 8 nodes: unless a spare one waits" in said
    assert "--nnodes" not in given("torchrun", "--nnodes", "6:8", "train.py")[1]
