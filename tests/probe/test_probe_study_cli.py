"""`failslow study STORE` and `failslow probe campaign`, as users call them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.probe.fake_probe import fake_command
from tests.probe.probe_samples import record, result
from typer.testing import CliRunner, Result

from failslow.cli import app
from failslow.probe.executors import LocalExecutor
from failslow.probe.store import StoreWriter

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def run(*args: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [str(a) for a in args], env=env)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Forty probes of two nodes; gpu-3 slows every one it is in."""
    path = tmp_path / "a store"
    told: dict[str, Any] = {
        "result": "communication", "cause": "network congestion", "onset_delay_s": 10.0,
        "slow_s": 30.0, "slowdown": 1.62, "jct_increase_share": 0.155,
        "culprits": ("host gpu-3",), "culprit_causes": ("network congestion",),
        "culprit_nodes": ("gpu-3",),
    }  # fmt: skip
    with StoreWriter(path, job={"duration_s": 60.0}) as writer:
        for n in range(40):
            nodes = (f"gpu-{n % 10}", f"gpu-{(n + 1) % 10}")
            at_t = 1_800_000_000.0 + 100 * n
            more = told if "gpu-3" in nodes else {}
            found = result(nodes=nodes, begin_t=at_t, **more)
            writer.add(record(f"2n-{n + 1:04d}", found=found, at_t=at_t))
    return path


def test_a_store_is_studied_by_its_content(store: Path) -> None:
    shown = run("study", store, env={"COLUMNS": "160"})

    assert shown.exit_code == 0, shown.output
    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in shown.stdout.splitlines()]
    assert lines[0].endswith("40 probes of 10 nodes, 8 hit; drain candidate: gpu-3")
    assert "probe, 2 nodes  40  8 (20 %)  8 network congestion  30.0 s  +15.5 %" in lines
    assert "gpu-3  8  8  8  1  < 0.001  drain candidate: 8 network congestion" in lines


def test_no_terminal_is_too_narrow_for_causes(store: Path) -> None:
    with StoreWriter(store, job={"duration_s": 60.0}) as writer:
        more: dict[str, Any] = {
            "result": "compute", "cause": "CPU contention", "onset_delay_s": 1.0,
            "slow_s": 1430.0, "slowdown": 2.0, "jct_increase_share": 0.5,
        }  # fmt: skip
        for n in range(12):
            found = result(begin_t=1e9 + 100 * n, **more)
            writer.add(record(f"1n-{n + 1:04d}", found=found, at_t=1e9 + 100 * n))
        writer.add(record("1n-0099", ending="failed"))

    def told(columns: int) -> str:
        shown = run("study", store, env={"COLUMNS": str(columns)})
        head, *table = shown.stdout.splitlines()
        assert "drain candidate: gpu-3" in head
        assert max(map(len, table)) <= columns
        assert "…" not in shown.stdout
        return " ".join(" ".join(table).split())

    for columns in (60, 66, 72, 80):
        text = told(columns)
        assert "probe, 1 node 12 12 (100 %) 23 min 50 s +50.0 %" in text
        assert "probe, 1 node: 12 CPU contention (1 failed) probe, 2 nodes: 8 network" in text
        assert "gpu-3: drain candidate: 8" in text or columns > 66
    row = "probe, 1 node 12 12 (100 %) 12 CPU contention 23 min 50 s +50.0 % (1 failed)"
    assert row in told(100)


def test_json_is_all_there_is_on_stdout(store: Path) -> None:
    shown = run("study", store, "--json")

    document = json.loads(shown.stdout)
    assert document["schema"] == "failslow.probe-study/1"
    assert document["drain_candidates"] == ["gpu-3"]
    assert document["total"]["causes"] == {"network congestion": 8}


def test_torn_parts_are_warned_of(store: Path) -> None:
    (store / "parts" / "2n-0001.1.parquet").write_bytes(b"PAR1")

    shown = run("study", store)

    assert shown.exit_code == 0
    assert "39 probes" in shown.stdout
    assert "warning:" in shown.stdout
    assert "2n-0001.1.parquet" in shown.stdout


def test_a_store_and_logs_do_not_mix(store: Path, tmp_path: Path) -> None:
    shown = run("study", store, tmp_path)

    assert shown.exit_code == 1
    assert "is a store of probes: name it alone" in shown.output


def test_options_for_logs_are_refused_for_a_store(store: Path) -> None:
    for option in (["--min-slowdown", "1.2"], ["--time-unit", "ms"], ["--step-column", "step"]):
        shown = run("study", store, *option)
        assert shown.exit_code == 1
        assert f"{option[0]}" in shown.output
        assert "has no meaning for a store of probes" in shown.output


def test_a_store_of_another_schema_is_no_folder_of_logs(store: Path) -> None:
    manifest = store / "failslow-probes.json"
    manifest.write_text(manifest.read_text().replace("probe-store/1", "probe-store/2"))

    shown = run("study", store)

    assert shown.exit_code == 1
    assert "a store of schema failslow.probe-store/2, and this failslow knows" in shown.output
    assert len(shown.output.strip().splitlines()) == 1


@pytest.mark.parametrize("value", ["null", '"abc"'])
def test_a_damaged_manifest_is_one_line(store: Path, value: str) -> None:
    manifest = store / "failslow-probes.json"
    manifest.write_text(
        manifest.read_text().replace('"duration_s": 60.0', f'"duration_s": {value}')
    )

    shown = run("study", store)

    assert shown.exit_code == 1
    assert f"duration_s of its job, {value}, is no number of seconds" in shown.output
    assert len(shown.output.strip().splitlines()) == 1


def test_where_a_store_was_meant_it_is_named(store: Path) -> None:
    def told(path: str | Path) -> str:
        shown = run("study", path)
        assert shown.exit_code == 1
        assert len(shown.output.strip().splitlines()) == 1
        return shown.output

    for inside in ("parts", "parts/*.parquet", "history.jsonl"):
        assert f"; {store} is a store of probes: name that one alone" in told(store / inside)
    assert "no training log among its" in told(store / "parts")
    meant = f"a store of probes is among them: name one alone, as failslow study '{store}'"
    assert meant in told(store.parent)
    assert meant in told(store.parent / "a*")
    with StoreWriter(store.parent / "b", job={"duration_s": 60.0}):
        pass
    assert "2 stores of probes are among them: name one alone" in told(store.parent)


def test_a_folder_of_logs_is_no_store(tmp_path: Path) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples" / "logs"

    assert json.loads(run("study", examples, "--json").stdout)["schema"] == "failslow.study/1"


@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")
def test_the_page_draws_its_map_without_a_network(store: Path, tmp_path: Path) -> None:
    page = tmp_path / "study.html"
    assert run("study", store, "--html", page).exit_code == 0
    probe = """<script>
addEventListener("error", (e) => { document.title = "failed " + e.message; });
addEventListener("load", () => setTimeout(() => {
  const map = document.querySelector('[data-picture="nodes"]');
  document.querySelector("button.theme").click();
  document.title = "told " + JSON.stringify({rows: map.data[0].y.length,
    first: map.data[0].y[0], worst: Math.max(...map.data[0].z[0].filter((v) => v !== null)),
    hover: map.data[0].customdata[0].find((t) => t.startsWith("named"))});
}, 600));
</script></body>"""
    page.write_text(page.read_text().replace("</body>", probe))

    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--virtual-time-budget=8000", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    told = json.loads(title[1].removeprefix("told ").replace("&quot;", '"'))
    assert (told["rows"], told["first"], told["worst"]) == (10, "gpu-3", 3)
    assert "×1.62 network congestion: host gpu-3" in told["hover"]


# -- failslow probe campaign -----------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that train nothing."""
    monkeypatch.setattr(
        "failslow.probe.executors.LocalExecutor", lambda: LocalExecutor(command=_quick)
    )


def _crash(spec: Any, **more: Any) -> tuple[str, ...]:
    from dataclasses import replace

    return fake_command(replace(spec, probe_id=f"crash-{spec.probe_id}"), **more)


@pytest.fixture
def a_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what local probes run."""

    def runs(command: Any) -> None:
        monkeypatch.setattr(
            "failslow.probe.executors.LocalExecutor", lambda: LocalExecutor(command=command)
        )

    return runs


def test_a_campaign_of_which_nothing_came_says_so(
    tmp_path: Path, a_machine: Callable[[Any], None]
) -> None:
    a_machine(_crash)
    failed = run("probe", "campaign", tmp_path / "s", "--probes", "1x2", "--retries", "1")
    assert failed.exit_code == 1
    told = failed.output.strip().splitlines()[-1]
    assert "no probe finished: 2 probes given up at --retries 1, the last one failed: " in told
    assert told.endswith("no torch here; --retries 2 tries again")

    a_machine(_quick)
    more = run("probe", "campaign", tmp_path / "s", "--probes", "1x3", "--retries", "1")
    assert more.exit_code == 0
    assert "warning: 2 probes given up" in more.output
    more = run("probe", "campaign", tmp_path / "s", "--probes", "1x3", "--retries", "2")
    assert more.exit_code == 0
    assert "given up" not in more.output


def test_after_a_halt_the_same_command_goes_on(
    tmp_path: Path, a_machine: Callable[[Any], None]
) -> None:
    a_machine(_crash)
    arguments = ("probe", "campaign", tmp_path / "s", "--probes", "1x6", "--retries", "0")

    halted = run(*arguments)
    assert halted.exit_code == 1
    assert "5 attempts failed one after the other" in halted.output
    assert "given up" not in halted.output

    a_machine(_quick)
    mended = run(*arguments, "--json")
    assert mended.exit_code == 0
    assert json.loads(mended.stdout)["campaign"]["finished"] == 6


def _quick(spec: Any, **more: Any) -> tuple[str, ...]:
    from dataclasses import replace

    return fake_command(replace(spec, probe_id=f"quick-{spec.probe_id}"), **more)


@pytest.mark.usefixtures("stand_in")
def test_a_campaign_fills_a_store_and_goes_on_by_the_same_command(tmp_path: Path) -> None:
    first = run("probe", "campaign", tmp_path / "s", "--probes", "1x1")
    more = run("probe", "campaign", tmp_path / "s", "--probes", "1x2", "--json")

    assert first.exit_code == 0, first.output
    assert "1n-0001.1: healthy" in first.output
    assert "probe, 1 node" in first.stdout
    document = json.loads(more.stdout)
    assert document["campaign"] == {
        "end": "over", "probes": 2, "finished": 2, "given_up": 0, "left": 0,
    }  # fmt: skip
    assert [job["probe"] for job in document["jobs"]] == ["1n-0001", "1n-0002"]
    assert json.loads(run("study", tmp_path / "s", "--json").stdout)["total"]["jobs"] == 2


@pytest.mark.usefixtures("stand_in")
def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    def told(*args: str) -> str:
        shown = run("probe", "campaign", tmp_path / "s", *args)
        assert shown.exit_code == 1
        assert len(shown.output.strip().splitlines()) == 1
        return shown.output

    assert "'4' is no NODESxCOUNT, as 4x30" in told("--probes", "4")
    assert "this machine is one node; add --executor" in told("--probes", "4x2")
    assert "0 nodes x 3 probes: both must be at least 1" in told("--probes", "0x3")
    assert "each once" in told("--probes", "1x3", "--probes", "1x4")
    assert "is no KEY=VALUE" in told("--probes", "4x2", "--executor", "slurm", "--slurm", "x")
    assert "--slurm has no meaning" in told("--probes", "1x2", "--slurm", "qos=low")
    assert "nothing to synchronise" in told("--probes", "1x2", "--workers", "1")
    assert "must be over 0 and at most 604800" in told("--probes", "1x2", "--duration", "inf")
    assert "--probes" in told()
    assert not (tmp_path / "s").exists()
    assert run("probe", "campaign", tmp_path / "s", "--probes", "1x1").exit_code == 0
    assert "have duration_s 60.0, not 30.0" in told("--probes", "1x1", "--duration", "30")


def test_help_has_examples() -> None:
    shown = run("probe", "campaign", "--help", env={"COLUMNS": "120"})

    assert "failslow probe campaign probes/ --probes 1x20" in shown.stdout
