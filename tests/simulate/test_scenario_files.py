"""Scenarios: scripts and files say the same, and mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from failslow.cli import app
from failslow.errors import ConfigError, InputError
from failslow.simulate import Cluster, NodeGroup, Scenario, Workload, load_scenario

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "scenarios"

YAML = """
name: both
iterations: 500
seed: 3
cluster: {groups: [{nodes: 2}]}
faults:
  - {kind: slow_device, rank: 3, from_s: 20, for_s: 60, factor: 1.4}
  - {kind: congest, link: [0, 1], from_s: 30, factor: 4}
"""
TOML = """
name = "both"
iterations = 500
seed = 3
[cluster]
groups = [{ nodes = 2 }]
[[faults]]
kind = "slow_device"
rank = 3
from_s = 20
for_s = 60
factor = 1.4
[[faults]]
kind = "congest"
link = [0, 1]
from_s = 30
factor = 4
"""


def test_a_script_a_yaml_and_a_toml_file_are_the_same_scenario(tmp_path: Path) -> None:
    script = (
        Scenario(name="both", iterations=500, seed=3)
        .slow_device(rank=3, from_s=20, for_s=60, factor=1.4)
        .congest(link=(0, 1), from_s=30, factor=4)
    )
    (tmp_path / "both.yaml").write_text(YAML)
    (tmp_path / "both.toml").write_text(TOML)

    assert load_scenario(tmp_path / "both.yaml") == script
    assert load_scenario(tmp_path / "both.toml") == script


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("factor: 1.4", "factor: 0.5", r"faults\[0\]\.factor \(0\.5\): Input should be greater"),
        ("rank: 3", "rank: 99", r"faults\[0\] \(slow_device\): rank \(99\) must be below"),
        ("link: [0, 1]", "leaf: 7", r"faults\[1\] \(congest\): leaf \(7\) must be below .* 1 leav"),
        ("link: [0, 1], ", "", r"faults\[1\]: give one of node, link and leaf"),
        ("kind: congest", "kind: quake", r"faults\[1\].*'quake'"),
        ("rank: 3,", "rnak: 3,", r"faults\[0\]\.rank.*: Field required"),
        ("iterations: 500", "iterations: many", r"iterations \('many'\)"),
        ("{nodes: 2}", "{nodes: 3}", "needs tp · cp · dp · pp = 2 · 1 · 4 · 2 = 16 devices, but"),
        ("seed: 3", "sede: 3", "sede.*Extra inputs are not permitted"),
        ("name: both", "name: [", "while parsing"),
    ],
)
def test_mistakes_are_one_line_that_names_the_place(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    assert old in YAML
    path.write_text(YAML.replace(old, new))

    with pytest.raises(InputError, match=message) as caught:
        load_scenario(path)

    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_no_scenario_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "text.txt").write_text(YAML)
    (tmp_path / "bad.toml").write_text("a = \n")

    for name, message in (
        ("list.yaml", "a scenario is a table of settings, not list"),
        ("text.txt", r"must end in \.yaml or \.toml"),
        ("bad.toml", "Invalid value"),
        ("missing.yaml", "cannot be read: No such file"),
    ):
        with pytest.raises(InputError, match=message):
            load_scenario(tmp_path / name)


def test_scripts_are_checked_as_files_are() -> None:
    with pytest.raises(ConfigError, match=r"rank \(16\) must be below the cluster's 16 devices"):
        Scenario().slow_device(rank=16, from_s=0, factor=2)
    with pytest.raises(ConfigError, match="thermal needs either node or rank"):
        Scenario().thermal(from_s=0, factor=2)
    with pytest.raises(ConfigError, match="Input should be greater than 1"):
        Scenario().cpu_contention(node=0, from_s=0, factor=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 5, "pp": 2}, r"layers \(5\) must be a multiple of pp · vpp \(2\)"),
        ({"vpp": 2}, 'needs schedule "interleaved"'),
        (
            {"schedule": "interleaved", "micro_batches": 5},
            r"micro_batches \(5\) must be a multiple of pp \(2\)",
        ),
        ({"ep": 3}, r"ep \(3\) must divide dp \(4\)"),
    ],
)
def test_workloads_that_cannot_run_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**settings)


def test_a_tensor_parallel_group_stays_in_a_node() -> None:
    with pytest.raises(ValueError, match=r"tp \(16\) must divide the devices of a node"):
        Scenario(workload=Workload(tp=16, pp=1, dp=1))
    with pytest.raises(ValueError, match=r"tp · cp \(6\)"):
        Scenario(
            cluster=Cluster(groups=(NodeGroup(nodes=3),)),
            workload=Workload(tp=2, cp=3, pp=2, dp=2),
        )


def run(*args: str | Path) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [str(a) for a in args])


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.iterdir())) >= 6


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_runs_and_all_its_faults_are_found(path: Path) -> None:
    result = run("simulate", path, "--json")

    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["schema"] == "failslow.analysis/1"
    assert document["simulation"]["missed"] == 0
    assert document["simulation"]["false_alarms"] == 0
    faults = document["simulation"]["truth"]
    assert all(fault["found"] and fault["counts"] for fault in faults)
    assert bool(faults) == bool(document["jobs"][0]["episodes"])


def test_the_compound_case_has_the_shape_of_the_study() -> None:
    document = json.loads(run("simulate", EXAMPLES / "compound_1024.yaml", "--json").stdout)

    congestion, thermal, second = document["simulation"]["truth"]
    assert document["simulation"]["ranks"] == 1024
    assert 1 / congestion["slowdown"] == pytest.approx(0.20, abs=0.01)
    assert 1 / thermal["slowdown"] == pytest.approx(0.10, abs=0.01)
    assert 1 / second["slowdown"] == pytest.approx(0.15, abs=0.01)
    first, last = document["jobs"][0]["episodes"]
    assert first["start_s"] == pytest.approx(62 * 60, abs=30)
    assert last["start_s"] == pytest.approx(120 * 60, abs=60)
    assert last["duration_s"] == pytest.approx(2 * 3600, rel=0.02)
    assert len(first["levels"]) == 2


def test_tables_show_the_truth_beside_the_analysis(tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    result = run("simulate", EXAMPLES / "slow_gpu.yaml", "--html", page)

    assert result.exit_code == 0
    assert "1 fail-slow" in result.stdout
    assert "GPU degradation" in result.stdout
    assert "1 of 1 fault found, 0 false alarms" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    text = page.read_text(encoding="utf-8")
    assert "1 of 1 fault found" in text
    assert "one slow GPU" in text


def test_seed_and_length_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(YAML)

    def times(*options: str) -> tuple[int, float]:
        document = json.loads(run("simulate", path, "--json", *options).stdout)
        return document["jobs"][0]["iterations"], document["jobs"][0]["wall_s"]

    assert times("--seed", "3") == times()
    assert times("--seed", "4") != times()
    assert times("--iterations", "100")[0] == 100


def test_a_bad_scenario_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(YAML.replace("factor: 1.4", "factor: 0.5"))

    result = run("simulate", path)

    assert result.exit_code == 1
    assert result.stderr.strip().splitlines() == [
        f"failslow: {path}: faults[0].factor (0.5): Input should be greater than 1"
    ]
