"""`failslow analyze` on the sample logs: what it prints, where, and how it leaves."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

MEGATRON = "megatron_slow.log"


def one_line(text: str) -> str:
    """The only line of stderr, which begins as errors do."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("failslow: ")
    assert "Traceback" not in text
    return lines[0]


def test_the_table_shows_the_fail_slow_of_the_sample(run: Any, examples: Path) -> None:
    result = run("analyze", examples / MEGATRON)

    assert result.exit_code == 0
    assert "megatron · 2,000 iterations · healthy 820 ms" in result.stdout
    assert "1  fail-slow  step 920" in result.stdout
    assert "×1.40" in result.stdout
    assert "1 fail-slow, 2 min 11 s lost: completion time +7.7" in result.stdout
    assert result.stderr == ""


def test_every_sample_is_told_for_what_it_is(run: Any, examples: Path) -> None:
    result = run("analyze", examples, "--json")

    jobs = {Path(job["source"]).name: job for job in json.loads(result.stdout)["jobs"]}
    kinds = {name: [e["kind"] for e in job["episodes"]] for name, job in jobs.items()}
    assert kinds == {
        "megatron_slow.log": ["fail_slow"],
        "mllog_spikes.txt": [],
        "mxnet_batch_change.log": ["workload_change"],
        "nanogpt_clean.log": [],
    }
    assert jobs["nanogpt_clean.log"]["spikes"] == 9
    assert jobs["mllog_spikes.txt"]["spikes"] == 5


def test_json_is_the_schema_and_nothing_else(spawn: Any, examples: Path) -> None:
    done = spawn("analyze", examples / MEGATRON, "--json")

    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert done.stderr == b""
    assert document["schema"] == "failslow.analysis/1"
    (job,) = document["jobs"]
    (episode,) = job["episodes"]
    assert (episode["start_step"], episode["end_step"]) == (920, 1320)
    assert episode["slowdown"] == pytest.approx(1.4, abs=0.02)
    assert episode["culprits"] == []
    assert [level["start_step"] for level in episode["levels"]] == [920]


@pytest.mark.parametrize(
    ("name", "extra", "code"),
    [
        (MEGATRON, ["--fail-on-slow"], 3),
        (MEGATRON, [], 0),
        ("nanogpt_clean.log", ["--fail-on-slow"], 0),
        ("mxnet_batch_change.log", ["--fail-on-slow"], 0),
    ],
)
def test_the_exit_code_tells_only_fail_slows_and_only_when_asked(
    spawn: Any, examples: Path, name: str, extra: list[str], code: int
) -> None:
    done = spawn("analyze", examples / name, "--quiet", *extra)

    assert done.returncode == code
    assert done.stdout == b""
    assert done.stderr == b""


def test_stdin_plain_and_gzipped_is_a_job(run: Any, examples: Path) -> None:
    plain = (examples / MEGATRON).read_bytes()

    for data in (plain, gzip.compress(plain)):
        result = run("analyze", "-", "--json", stdin=data)
        (job,) = json.loads(result.stdout)["jobs"]
        assert job["source"] == "<stdin>"
        assert len(job["episodes"]) == 1


def test_a_folder_leaves_out_what_is_no_log_and_says_so(
    run: Any, examples: Path, tmp_path: Path
) -> None:
    shutil.copy(examples / MEGATRON, tmp_path)
    (tmp_path / "README.md").write_text("# notes\n")
    (tmp_path / "other.txt").write_text("hello\n")

    result = run("analyze", tmp_path)

    assert result.exit_code == 0
    assert "1  fail-slow" in result.stdout
    assert result.stderr.startswith("skipped ")
    assert result.stderr.strip().endswith("(and 1 more)")
    assert run("analyze", tmp_path, "--quiet").stderr == ""


def test_a_glob_and_a_file_named_twice_are_read_once(run: Any, examples: Path) -> None:
    result = run("analyze", f"{examples}/*.log", examples / MEGATRON, "--json")

    assert len(json.loads(result.stdout)["jobs"]) == 3


def test_one_bad_file_does_not_lose_the_others(spawn: Any, examples: Path, tmp_path: Path) -> None:
    bad = tmp_path / "notes.txt"
    bad.write_text("nothing here\n" * 3)
    gone = tmp_path / "gone.log"

    done = spawn("analyze", bad, examples / MEGATRON, gone, "--fail-on-slow")

    assert done.returncode == 1
    assert "1  fail-slow" in done.stdout.decode()
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 2
    assert any("gone.log: no such file or folder" in e for e in errors)
    assert any("notes.txt" in e and "--format csv --time-column" in e for e in errors)


def test_json_of_only_bad_files_is_still_json(run: Any, tmp_path: Path) -> None:
    result = run("analyze", tmp_path / "gone.log", "--json")

    assert json.loads(result.stdout) == {"schema": "failslow.analysis/1", "jobs": []}
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Missing argument 'PATH'"),
        (["--bogus", "x"], "No such option: --bogus"),
        (["x", "--min-slowdown", "fast"], "--min-slowdown"),
        (["x", "--min-slowdown", "0.9"], "min_slowdown = 0.9 from --min-slowdown"),
        (["x", "--min-duration", "-1"], "min_duration_s = -1.0 from --min-duration"),
        (["x", "--config", "/no/such.toml"], "cannot read the settings file /no/such.toml"),
        (["x", "--time-unit", "days"], "'days' is not one of 's', 'ms', 'us'"),
        (["x", "--format", "megatron", "--time-column", "t"], "--format megatron has columns of"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_1(spawn: Any, arguments: list[str], told: str) -> None:
    done = spawn("analyze", *arguments)

    assert done.returncode == 1
    assert done.stdout == b""
    assert told in one_line(done.stderr.decode())


def test_an_unknown_format_names_the_known_ones(run: Any, examples: Path) -> None:
    result = run("analyze", examples / MEGATRON, "--format", "nope")

    assert result.exit_code == 1
    assert "megatron" in one_line(result.stderr)
    assert "nope" in result.stderr


def test_columns_name_what_a_table_holds(run: Any, tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    with table.open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["n", "took", "toks", "when"])
        for n in range(200):
            took = 700.0 if 100 <= n < 140 else 500.0
            rows.writerow([n * 5, took + n % 7, 1024, 1_700_000_000 + n])

    result = run(
        *("analyze", table, "--time-column", "took", "--step-column", "n", "--time-unit", "ms"),
        *("--work-column", "toks", "--json"),
    )

    (job,) = json.loads(result.stdout)["jobs"]
    assert job["format"] == "csv"
    assert job["healthy_iteration_s"] == pytest.approx(0.503, abs=0.005)
    assert [e["start_step"] for e in job["episodes"]] == [500]


def test_json_lines_take_columns_too(run: Any, tmp_path: Path) -> None:
    table = tmp_path / "times.jsonl"
    lines = [json.dumps({"n": n, "took": 0.5 + n % 3 / 500}) for n in range(100)]
    table.write_text("\n".join(lines) + "\n")

    result = run("analyze", table, "--time-column", "took", "--step-column", "n", "--json")

    (job,) = json.loads(result.stdout)["jobs"]
    assert (job["format"], job["iterations"]) == ("jsonl", 100)


def test_settings_come_from_option_then_environment_then_file(
    run: Any, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "failslow.toml"
    file.write_text("[detect]\nmin_slowdown = 1.6\n")

    def episodes(*extra: str) -> int:
        result = run("analyze", examples / MEGATRON, "--json", *extra)
        return len(json.loads(result.stdout)["jobs"][0]["episodes"])

    assert episodes("--config", str(file)) == 0
    monkeypatch.setenv("FAILSLOW_DETECT_MIN_SLOWDOWN", "1.2")
    assert episodes("--config", str(file)) == 1
    assert episodes("--config", str(file), "--min-slowdown", "1.7") == 0
    assert episodes("--min-duration", "100000") == 0


def test_html_is_written_beside_the_table_and_named(
    run: Any, examples: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"

    result = run("analyze", examples, "--html", page)

    assert "1  fail-slow" in result.stdout
    assert result.stderr == f"wrote {page}\n"
    text = page.read_text()
    assert text.count('class="chart"') == 4
    assert "no fail-slow" in text


def test_a_page_that_cannot_be_written_is_one_error_after_the_table(
    run: Any, examples: Path, tmp_path: Path
) -> None:
    result = run("analyze", examples / MEGATRON, "--html", tmp_path / "no" / "report.html")

    assert result.exit_code == 1
    assert "1  fail-slow" in result.stdout
    assert "report.html: cannot be written: there is no such folder" in one_line(result.stderr)


def test_a_bug_in_a_reader_is_one_line_and_the_others_are_shown(
    run: Any, examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import failslow.detect

    real = failslow.detect.analyze

    def broken(series: Any, config: Any) -> Any:
        if "nanogpt" in series.source:
            raise ZeroDivisionError("half\nway")
        return real(series, config)

    monkeypatch.setattr(failslow.detect, "analyze", broken)

    result = run("analyze", examples)

    assert result.exit_code == 1
    assert "3 jobs: 1 hit" in result.stdout
    assert "internal error: ZeroDivisionError: half way" in one_line(result.stderr)
