"""`failslow whatif`: the document of its schema, tables, and a page that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.simulate.made_traces import Job, make_trace, rows_of, write_csv
from typer.testing import CliRunner, Result

from failslow.cli import app
from failslow.simulate.schedule import Computation


def run(*args: str | Path) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [str(a) for a in args])


def slow_worker(step: int, dp: int, c: Computation) -> float:
    """Rank 4 (replica 1, stage 1) takes twice as long as its peers."""
    rng = np.random.default_rng([step, dp, c.chunk, c.micro_batch])
    usual = (0.1 if c.forward else 0.2) * float(np.exp(0.02 * rng.standard_normal()))
    return usual * (2 if (dp, c.chunk) == (1, 1) else 1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with a slow worker."""
    made, _ = make_trace(Job(dp=3, pp=2, steps=4), slow_worker)
    return write_csv(tmp_path_factory.mktemp("trace") / "made.csv", rows_of(made))


def test_the_document_has_the_keys_of_its_schema(trace: Path) -> None:
    result = run("whatif", trace, "--json")

    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["schema"] == "failslow.whatif/1"
    assert document["steps"] == 4
    assert document["measured_s"] == pytest.approx(document["replayed_s"])
    assert document["slowdown"] == pytest.approx(document["replayed_s"] / document["ideal_s"])
    assert [row["dp"] for row in document["dp_ranks"]] == [0, 1, 2]
    assert [row["stage"] for row in document["stages"]] == [0, 1]
    assert {row["kind"] for row in document["operations"]} >= {"forward-compute", "optimizer"}
    assert len(document["workers"]) == 6
    by_dp = {row["dp"]: row["slowdown"] for row in document["dp_ranks"]}
    by_stage = {row["stage"]: row["slowdown"] for row in document["stages"]}
    for row in document["workers"]:
        assert row["slowdown"] == min(by_dp[row["dp"]], by_stage[row["stage"]])
    cause = document["diagnosis"][0]
    assert cause["what"] == "worker"
    assert cause["where"].startswith("dp 1 stage 1 (rank 4)")
    assert document["fixes"][0]["gain_pct"] > 10
    assert [row["step"] for row in document["per_step"]] == [0, 1, 2, 3]


def test_the_tables_name_the_worker_and_show_the_heat_map(trace: Path) -> None:
    result = run("whatif", trace)

    assert result.exit_code == 0
    text = result.stdout
    assert "worker: dp 1 stage 1 (rank 4) ×" in text
    assert "replace the worker: dp 1 stage 1 (rank 4)" in text
    assert "dp \\ stage" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_wide_job_is_folded_into_its_slowest_rows(tmp_path: Path) -> None:
    made, _ = make_trace(Job(dp=30, pp=2, micro_batches=2, steps=2), slow_worker)
    path = write_csv(tmp_path / "wide.csv", rows_of(made))

    text = run("whatif", path).stdout

    assert "6 of 30 replicas, none of them slower, are left out" in text


def test_the_page_is_self_contained(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "whatif.html"

    result = run("whatif", trace, "--html", page, "--quiet")

    assert (result.exit_code, result.stdout) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "dp 1 stage 1 (rank 4)" in text
    assert "Plotly.react" in text
    start = text.index('id="whatif-data">') + len('id="whatif-data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert len(data["workers"]) == 3
    assert data["ranks"][1][1] == 4


def test_the_layout_file_is_checked(trace: Path, tmp_path: Path) -> None:
    meta = tmp_path / "meta.yaml"
    meta.write_text("dp_size: 2\npp_size: 2\n")

    result = run("whatif", trace, "--meta", meta)

    assert result.exit_code == 1
    assert "dp_rank goes up to 2, but the layout says dp_size: 2" in result.stderr
