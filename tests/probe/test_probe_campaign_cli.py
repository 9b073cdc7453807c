"""What `failslow probe campaign` says to mistakes. Nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from failslow.cli import app

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("options", "env", "told"),
    [
        (["--probes", "1x99999999999"], {}, "99999999999 probes in all; a campaign has at most"),
        (["--probes", f"1x{'9' * 5000}"], {}, "a number of 5000 digits"),
        (["--probes", "1x1", "--ray-address", "auto"], {}, "--ray-address has no meaning without"),
        (["--probes", "1x1"], {"FAILSLOW_TOKEN": "short"}, "job token of 5 characters: at least"),
        (
            ["--probes", "1x1", "--executor", "slurm", "--slurm", "ntasks_per_node=4"],
            {},
            "--slurm ntasks-per-node=4: the campaign sets ntasks-per-node of its jobs itself; a",
        ),
    ],
)
def test_a_mistake_makes_no_store(
    tmp_path: Path, options: list[str], env: dict[str, str], told: str
) -> None:
    arguments = ["probe", "campaign", str(tmp_path / "s"), *options]
    refused = CliRunner().invoke(app, arguments, env=env)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert told in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()
