"""What `failslow probe run` says to mistakes, and what it makes of environments. No training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.probe.test_probe_result import FULL
from typer.testing import CliRunner

from failslow.cli import app
from failslow.cli.probe import _check_out, _table, _tell
from failslow.cli.probeplace import made_up_name, place_of
from failslow.errors import ConfigError, OutputError
from failslow.probe import ProbeSpec
from failslow.probe.job import Place, grid_of
from failslow.probe.result import Preset

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--preset", "tpu"], "--preset 'tpu' is none of cpu, gpu; use one of them"),
        (
            ["--duration", "3"],
            "--duration 3 is too short to tell anything",
        ),
        (["--duration", "nan"], "duration_s (nan) must be over 0 and at most 604800, a week"),
        (["--duration", "inf"], "duration_s (inf) must be over 0 and at most 604800, a week"),
        (["--iterations", "19"], "--iterations 19 are too few to tell anything; give at least 20"),
        (["--workers", "1"], "--workers 1 leaves nothing to synchronise"),
        (["--workers", "0"], "'--workers': Input should be greater than or equal to 1"),
        (["--probe-id", "a b"], "probe_id ('a b') must be letters"),
        (["--nodes", "2"], "--node-rank (not given) must be from 0 to 1 on 2 nodes"),
        (["--nodes", "2", "--node-rank", "2"], "--node-rank (2) must be from 0 to 1 on 2 nodes"),
        (["--nodes", "2", "--node-rank", "0"], "several nodes need a place to meet"),
        (["--node-rank", "1"], "--node-rank 1 of one node; give --nodes as well"),
        (
            ["--nodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1"],
            "--rendezvous '10.0.0.1' is no HOST:PORT",
        ),
        (
            ["--nodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1:29400"],
            "several nodes need one secret; set FAILSLOW_TOKEN",
        ),
        (["--history", "nowhere"], "--history nowhere: cannot be read"),
        (["--out", "no/such/folder.json"], "--out no/such/folder.json: its folder"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MASTER_ADDR", "SLURM_STEP_NODELIST", "FAILSLOW_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["probe", "run", *arguments])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_token_that_is_too_short_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILSLOW_TOKEN", "short")
    done = CliRunner().invoke(app, ["probe", "run", "--dir", str(tmp_path / "d")])
    assert (done.exit_code, done.stdout, (tmp_path / "d").exists()) == (1, "", False)
    assert done.stderr.startswith("failslow: job token of 5 characters: at least 16 are needed")
    assert done.stderr.count("\n") == 1


def test_the_result_is_told_though_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        _tell(FULL, out=tmp_path / "gone" / "r.json", json=True, quiet=False)
    assert FULL.to_json() in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    _check_out(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []
    _check_out(Path("/dev/stdout"))
    with pytest.raises(OutputError, match=r"--out /proc/r.json: cannot be written: .*has room"):
        _check_out(Path("/proc/r.json"))


SLURM = {
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[017-019,031]",
    "SLURM_JOB_ID": "41822",
}


@pytest.mark.parametrize(
    ("given", "environ", "place"),
    [
        ({}, {}, (1, Place())),
        # of an allocation in which nobody made a step
        ({}, {"SLURM_NNODES": "4", "SLURM_JOB_ID": "1"}, (1, Place())),
        ({}, SLURM, (4, Place(node_rank=2, host="gpu017", port=21822))),
        ({"nodes": 1}, SLURM, (1, Place())),
        (
            {},
            {
                "GROUP_WORLD_SIZE": "2",
                "GROUP_RANK": "1",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "29500",
            },
            (2, Place(node_rank=1, host="10.0.0.1", port=29500)),
        ),
        (
            {"nodes": 2, "node_rank": 0, "rendezvous": "[fd00::1]:29400"},
            SLURM,
            (2, Place(node_rank=0, host="fd00::1", port=29400)),
        ),
    ],
)
def test_where_a_node_is(given: dict[str, Any], environ: dict[str, str], place: Any) -> None:
    wanted = {"nodes": None, "node_rank": None, "rendezvous": None} | given
    assert place_of(environ=environ, **wanted) == place


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no HOST:PORT"):
        place_of(2, 0, "host:70000", {})


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu[017-020,031],x1", "gpu017"),
        ("node1,node2", "node1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("tux[1-3]-ib0", "tux1-ib0"),
        ("r[08,10-12]n[003-010]-e[0-1],x[1-2]", "r08n003-e0"),
    ],
)
def test_nodes_of_slurm_meet_at_the_first(names: str, first: str) -> None:
    _, place = place_of(None, None, None, SLURM | {"SLURM_STEP_NODELIST": names})
    assert place.host == first


def test_all_nodes_come_to_the_same_name() -> None:
    zero, one = (Place(node_rank=r, host="10.0.0.1", port=29400) for r in (0, 1))
    assert made_up_name(zero, {}) == made_up_name(one, {})
    assert made_up_name(zero, SLURM | {"SLURM_STEP_ID": "3"}) == "slurm-41822-3"
    ProbeSpec(probe_id=made_up_name(zero, {}))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_every_worker_has_a_place_in_the_grid(nodes: int, workers: int) -> None:
    presets: tuple[Preset, ...] = ("cpu", "gpu")
    for preset in presets:
        spec = ProbeSpec(
            probe_id="p",
            nodes=nodes,
            workers_per_node=workers,
            preset=preset,
        )
        tp, pp, dp = grid_of(spec)
        assert tp * pp * dp == spec.workers
        assert workers % tp == 0


def test_the_table_shows_what_matters() -> None:
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as captured:
        console.print(_table(FULL))
    text = captured.get()
    for part in ("communication", "link node1>node0", "×1.62 for 31 s", "+24.0 %", "0.31 between"):
        assert part in text
