"""The baselines find a plain step where it is and nothing in a flat series; the command runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.detection.baselines import plain_bocd, sliding_window
from benchmarks.detection.delay import measure
from benchmarks.detection.real import Reading, judge
from benchmarks.detection.score import DetectedEpisode
from benchmarks.detection.suite import make_suite
from benchmarks.detection.tune import tune
from numpy.typing import NDArray

from failslow.records import Episode, StepSeries

ROOT = Path(__file__).resolve().parents[2]
Baseline = Callable[[StepSeries], list[DetectedEpisode]]
BASELINES = [sliding_window, plain_bocd]


def _series(duration_s: NDArray[np.float64]) -> StepSeries:
    n = len(duration_s)
    return StepSeries(
        source="made",
        format="suite",
        step=np.arange(n, dtype=np.int64),
        duration_s=duration_s,
        end_s=np.cumsum(duration_s),
        iterations=np.ones(n, dtype=np.int64),
        work=np.full(n, np.nan),
        data_s=np.full(n, np.nan),
        run=np.zeros(n, dtype=np.int64),
    )


def _quiet(n: int = 800, seed: int = 0) -> NDArray[np.float64]:
    return 0.5 * np.exp(0.01 * np.random.default_rng(seed).normal(size=n))


@pytest.mark.parametrize("detect", BASELINES)
def test_baseline_finds_a_step_where_it_is(detect: Baseline) -> None:
    duration_s = _quiet()
    duration_s[300:450] *= 1.6
    (found,) = detect(_series(duration_s))
    assert abs(found.first_index - 300) <= 1
    assert abs(found.last_index - 449) <= 1
    assert found.slowdown == pytest.approx(1.6, rel=0.02)
    assert found.suspected_index is not None
    assert 300 <= found.suspected_index < 400


@pytest.mark.parametrize("detect", BASELINES)
def test_baseline_says_nothing_of_a_flat_series(detect: Baseline) -> None:
    assert detect(_series(_quiet())) == []


@pytest.mark.parametrize("detect", BASELINES)
def test_baseline_says_nothing_of_a_speed_up_and_keeps_an_open_episode(detect: Baseline) -> None:
    faster, slower = _quiet(), _quiet()
    faster[400:] *= 0.6
    slower[400:] *= 1.6
    assert detect(_series(faster)) == []
    assert detect(_series(slower))[0].last_index == 799


@pytest.mark.parametrize("detect", BASELINES)
@pytest.mark.parametrize("n", [1, 3, 20])
def test_baseline_takes_a_series_shorter_than_its_window(detect: Baseline, n: int) -> None:
    assert detect(_series(_quiet(n))) == []


def test_tuning_puts_the_better_detector_first() -> None:
    jobs = make_suite(40, seed=5)
    ranked = tune(jobs, [("blind", lambda _: []), ("window", sliding_window)])
    assert ranked[0][0] <= ranked[1][0]
    assert {label for _, label, _ in ranked} == {"blind", "window"}
    assert next(total.fnr.share for _, label, total in ranked if label == "blind") == 1.0


def test_a_clear_slowdown_is_suspected_within_six_iterations() -> None:
    delays = measure(1.3, jobs=5, seed=0)
    assert delays.never == 0
    assert delays.median <= 6


def _episode(first: int, last: int) -> Episode:
    return Episode(
        start_step=first, end_step=last + 1, start_s=0.0, end_s=1.0, duration_s=1.0,
        iteration_s=1.5, baseline_s=1.0, slowdown=1.5, peak_slowdown=1.5, lost_s=1.0,
        confidence=1.0, first_index=first, last_index=last,
    )  # fmt: skip


def test_real_logs_are_judged_by_overlap_and_arguable_stretches_count_for_nothing() -> None:
    reading = Reading(file="a.log", slow=((10, 20), (50, 60)), arguable=((80, 90),))
    finding = judge(reading, [_episode(19, 30), _episode(85, 86), _episode(95, 99)])
    assert (finding.missed, finding.false_alarms) == (1, 1)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.detection", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_command_prints_one_json_object_and_nothing_else() -> None:
    done = _run("--jobs", "30", "--seed", "2", "--only", "sliding,bocd", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == "failslow.benchmark.detection/1"
    assert set(told["detectors"]) == {"sliding", "bocd"}
    assert told["detectors"]["bocd"]["total"]["jobs"] == 30
    assert done.stderr == ""


def test_a_failure_is_printed_so_that_it_can_be_run_again(tmp_path: Path) -> None:
    done = _run("--jobs", "60", "--only", "sliding", "--kind", "spikes", "--show-failures")
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if x.startswith("sliding false_alarm"))
    number = line.split("job=")[1].split()[0]
    picture = tmp_path / "job.html"
    again = _run("--only", "sliding", "--job", number, "--plot", str(picture))
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == line.strip()
    assert "plotly" in picture.read_text(encoding="utf-8")


def test_an_unknown_detector_or_kind_is_refused_with_the_known_ones() -> None:
    done = _run("--only", "psychic")
    assert done.returncode == 2
    assert "sliding" in done.stderr
    assert _run("--kind", "psychic").returncode == 2
