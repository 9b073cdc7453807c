"""The example trainers run as their READMEs say, and a layout changes nothing but speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from job_launch import launch
from tests.transport.servers import free_port

_EXAMPLES = Path(__file__).parents[2] / "examples"
_GPT = str(_EXAMPLES / "hybrid_gpt" / "train.py")
_SMALL = [
    *("--layers", "2", "--width", "32", "--length", "32", "--sequences", "2"),
    *("--micro-batches", "8", "--ragged", "--dropout", "0.1", "--clip", "0.5"),
    *("--epoch-steps", "4"),
]

Losses = list[float]


def _plain(world: int, folder: Path, name: str, *options: str) -> Losses:
    out = folder / f"{name}.json"
    with launch([_GPT, *_SMALL, *options, "--losses", str(out)], world=world, watch=False) as job:
        job.wait(250.0)
    losses: Losses = json.loads(out.read_text())
    return losses


def _torchrun(world: int, *command: str) -> str:
    """What it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    run = subprocess.Popen(
        [*launcher, "--master-port", str(free_port()), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = run.communicate(timeout=250.0)
    finally:
        if run.poll() is None:  # its workers outlive it
            for worker in psutil.Process(run.pid).children(recursive=True):
                worker.kill()
        run.kill()
        run.wait()
    assert run.returncode == 0, printed[-3000:]
    return printed


def _apart(one: Losses, other: Losses) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.timeout(900)
def test_losses_depend_on_neither_layout_nor_launcher_nor_a_restart(tmp_path: Path) -> None:
    whole = _plain(2, tmp_path, "replicas", "--dp", "2", "--steps", "14")
    assert len(whole) == 14
    assert whole[-1] < whole[0]

    again = tmp_path / "again.json"
    printed = _torchrun(2, _GPT, *_SMALL, "--dp", "2", "--steps", "14", "--losses", str(again))
    assert json.loads(again.read_text()) == whole  # to the last bit
    assert re.search(r"step +10 +loss \d", printed)

    saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "5"]
    stages = _plain(2, tmp_path, "stages", "--pp", "2", "--steps", "10", *saved)
    assert _apart(stages, whole[:10]) < 1e-5
    resumed = _plain(1, tmp_path, "resumed", "--steps", "14", *saved)
    assert _apart(resumed, whole[10:]) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tensor_parallel_training_goes_alike(tmp_path: Path) -> None:
    whole = _plain(1, tmp_path, "whole", "--steps", "10")
    split = _plain(4, tmp_path, "split", "--pp", "2", "--tp", "2", "--steps", "10")
    assert _apart(split, whole) < 1e-5


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        launch([_GPT, "--pp", "3"], world=1, watch=False) as job,
        pytest.raises(AssertionError, match="is not the world size 1"),
    ):
        job.wait(100.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_fsdp2_example_learns() -> None:
    printed = _torchrun(2, str(_EXAMPLES / "fsdp2" / "train.py"), "--steps", "41")
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
