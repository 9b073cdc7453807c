"""Public training logs, where present: record counts, and what a careful reader sees in them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from cases import REAL_LOG_FOLDER, REAL_LOGS
from numpy.typing import NDArray

from failslow.ingest import read_log
from failslow.records import StepSeries

pytestmark = pytest.mark.skipif(
    not REAL_LOG_FOLDER.is_dir(),
    reason=f"no real logs in {REAL_LOG_FOLDER}; FAILSLOW_REAL_LOGS names their folder",
)


@cache
def log(name: str) -> StepSeries:
    path = REAL_LOG_FOLDER / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return read_log(path)


def median(values: NDArray[np.float64]) -> float:
    return float(np.median(values))


@pytest.mark.parametrize(("name", "format_name", "records"), REAL_LOGS)
def test_format_and_record_count(name: str, format_name: str, records: int) -> None:
    series = log(name)
    assert series.format == format_name
    assert len(series) == records


def test_stable_diffusion_slows_in_records_15_to_23() -> None:
    series = log("mllog_sd_64gpu_slow.txt")
    assert set(series.iterations) == {100}
    slow, healthy = series.duration_s[15:24], np.delete(series.duration_s, np.s_[15:24])
    assert median(slow) / median(healthy) == pytest.approx(1.9, abs=0.1)
    assert slow.max() / median(healthy) == pytest.approx(3.2, abs=0.1)
    assert series.end_s[23] - series.end_s[14] == pytest.approx(390, abs=30)


def test_llama_counts_samples_and_has_isolated_spikes() -> None:
    series = log("mllog_llama405b_1536gpu_spikes.txt")
    assert set(series.iterations) == {1}
    assert len(series.runs) == 1
    spikes = series.duration_s > 1.3 * median(series.duration_s)
    assert 6 <= spikes.sum() <= 10
    assert any("(6 times)" in warning for warning in series.warnings)


def test_gpt3_counts_tokens() -> None:
    series = log("mllog_gpt3_10752gpu_clean.txt")
    assert set(series.iterations) == {1}
    assert series.end_s[-1] == pytest.approx(239, abs=2)


def test_mask_rcnn_running_means_hide_a_speed_up_at_record_128() -> None:
    series = log("mllog_maskrcnn_running_mean.txt")
    assert median(series.duration_s[20:128]) == pytest.approx(0.215, abs=0.004)
    assert median(series.duration_s[128:]) == pytest.approx(0.168, abs=0.002)
    assert np.isfinite(series.data_s).all()


def test_deepspeed_is_flat_and_its_batch_is_128() -> None:
    series = log("deepspeed_chat_clean.log")
    assert set(series.work) == {128.0}
    assert set(series.iterations) == {10}
    assert series.duration_s.std() / series.duration_s.mean() < 0.02


def test_megatron_has_four_runs_of_300_iterations_with_slow_starts() -> None:
    series = log("megatron_four_restarts.out")
    assert np.bincount(series.run).tolist() == [300] * 4
    assert (series.duration_s[series.step == 1] > 100).all()
    assert [run.note for run in series.runs[1:]] == ["step numbers restart at 1"] * 3
    assert series.clocked


def test_llmc_bursts_are_there() -> None:
    series = log("llmc_gpt2_bursts.log")
    assert set(series.work) == {524_288.0}
    burst = series.duration_s[(series.step >= 13800) & (series.step <= 13841)]
    assert median(burst) / median(series.duration_s) == pytest.approx(1.19, abs=0.02)


def test_modded_nanogpt_ramp_is_planned() -> None:
    series = log("modded_nanogpt_window_ramp.txt")
    assert series.planned_ramp == "the attention window grows by schedule"
    assert median(series.duration_s[-200:]) / median(series.duration_s[20:220]) == pytest.approx(
        1.13, abs=0.03
    )
