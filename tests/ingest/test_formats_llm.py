"""Exact values from the formats of language-model trainers, DeepSpeed and MLPerf."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from cases import SAMPLES
from numpy.typing import NDArray

from failslow.errors import InputError
from failslow.ingest import Source, read_log
from failslow.records import Run, StepSeries

START_S = 1_741_082_400.0
"""2025-03-04 10:00:00, the start of every sample with a clock."""


def sample(name: str) -> StepSeries:
    return read_log(SAMPLES / name)


def read(text: str) -> StepSeries:
    return read_log(Source("train.log", data=text.encode()))


def close(column: NDArray[np.float64], *expected: float) -> None:
    np.testing.assert_allclose(column, expected, rtol=1e-4)


# --- Megatron-LM -------------------------------------------------------------------------------


def test_megatron_times_work_clock_and_runs() -> None:
    series = sample("megatron.log")
    assert series.step.tolist() == [10, 20, 30, 40, 50, 60, 70, 80, 70, 80, 90, 100]
    close(series.duration_s[:3], 5.1207, 0.5721, 0.5704)
    assert set(series.iterations) == {10}
    assert set(series.work) == {256.0}
    assert series.clocked
    assert series.start_time == pytest.approx(START_S)
    close(series.end_s[[0, 7, 8]], 51.207, 91.228, 91.228 + 120 + 48.752)
    assert series.runs == (Run(), Run(note="world_size 16 -> 8", config_changed=True))
    assert series.warnings == ()


def test_megatron_deepspeed_with_equals_signs_has_work_in_tokens() -> None:
    series = sample("megatron_deepspeed.log")
    close(series.duration_s, 16.0306, 16.0718, 16.0012, 15.9904, 16.0229, 16.0401)
    assert set(series.work) == {256.0 * 4096}


def test_megatron_in_seconds_as_for_bloom() -> None:
    series = sample("megatron_seconds.log")
    close(series.duration_s, 105.22, 104.97, 105.31, 105.08, 211.64, 105.16)
    assert series.step.tolist() == list(range(1201, 1207))
    assert set(series.work) == {2048.0}


def test_megatron_of_another_unit_is_left_alone() -> None:
    with pytest.raises(InputError, match="no timing record"):
        read(megatron_line(100, 800.0).replace("(ms)", "(min)"))


def test_megatron_current_time_is_a_clock() -> None:
    line = (
        " iteration {0:8d}/ 9 | current time: {1:.2f} | elapsed time per iteration (ms): 950.0 |\n"
    )
    series = read("".join(line.format(step, START_S + step) for step in (1, 2, 3)))
    assert series.clocked
    assert series.start_time == pytest.approx(START_S + 1 - 0.95)


def megatron_line(step: int, ms: float, extra: str = "") -> str:
    return (
        f" iteration {step:8d}/  500000 | consumed samples: {step * 512:12d} | elapsed time per "
        f"iteration (ms): {ms:.1f} | learning rate: 1.5E-04 | {extra}lm loss: 6.7E+00 |\n"
    )


def test_megatron_without_a_date_has_no_clock_and_work_from_consumed_samples() -> None:
    series = read("".join(megatron_line(step, 800.0 + step / 100) for step in (100, 200, 300)))
    assert not series.clocked
    assert set(series.work) == {512.0}
    close(series.end_s, 80.1, 160.3, 240.6)


def test_megatron_batch_ramp_shows_in_the_work() -> None:
    lines = [
        megatron_line(step, 500.0, f"global batch size: {batch:5d} | ")
        for step, batch in ((1, 16), (2, 16), (3, 32))
    ]
    assert read("".join(lines)).work.tolist() == [16.0, 16.0, 32.0]


def test_megatron_line_cut_inside_its_time_is_left_out() -> None:
    text = megatron_line(1, 500.0) + megatron_line(2, 512.5)
    cut = text[: text.index("512.5") + 3]
    assert read(cut).step.tolist() == [1]


def test_megatron_lines_of_a_labelled_rank_in_srun_output() -> None:
    dated = " [2025-03-04 10:00:01.500000]" + megatron_line(1, 500.0)
    series = read("55: " + dated + " 0: saving checkpoint at iteration 1\n")
    assert series.start_time == pytest.approx(START_S + 1.0)


# --- DeepSpeed ---------------------------------------------------------------------------------


def test_deepspeed_rate_and_batch_size_give_times() -> None:
    series = sample("deepspeed.log")
    close(
        series.duration_s,
        0.8,
        0.5,
        64 / 127.5,
        64 / 128.25,
        0.64,
        64 / 101.5,
        64 / 128.75,
        64 / 128.5,
    )
    assert set(series.iterations) == {10}
    assert set(series.work) == {64.0}
    assert series.start_time == pytest.approx(START_S, abs=0.01)


def test_deepspeed_without_the_printed_configuration_takes_the_clock() -> None:
    lines = (SAMPLES / "deepspeed.log").read_text().splitlines()
    series = read("\n".join(line for line in lines if "....." not in line))
    assert set(series.work) == {64.0}
    close(series.duration_s[:2], 0.8, 0.5)


def test_deepspeed_pipeline_engine_prints_times() -> None:
    series = sample("deepspeed_pipeline.log")
    close(series.duration_s, 0.192, 0.186, 0.187, 0.189, 0.372, 0.188)
    assert series.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert set(series.work) == {128.0}
    bare = read("steps: 1 loss: 0.0868 iter time (s): 2.784\nsteps: 2 loss: 0.1 iter time (s): 2.7")
    close(bare.duration_s, 2.784)  # the last line is cut off
    assert np.isnan(bare.work).all()


def test_deepspeed_breakdown_sums_forward_backward_and_step() -> None:
    series = sample("deepspeed_breakdown.log")
    assert series.step.tolist() == [3, 4, 5, 6]
    close(series.duration_s, 16.00379, 16.0, 16.0, 16.056)
    assert series.warnings == (
        "times are forward + backward + optimizer step: data loading is not in them",
    )


def test_deepspeed_breakdown_without_step_numbers_counts_its_lines() -> None:
    line = "[Rank 0] time (ms) | forward: {0}.10 | backward: 200.20 | step: 9.70\n"
    series = read("".join(line.format(100 + i) for i in range(5)))
    assert series.step.tolist() == [1, 2, 3, 4, 5]
    close(series.duration_s[:2], 0.310, 0.311)


# --- MLPerf ------------------------------------------------------------------------------------


def test_mllog_throughput_and_batch_size_give_times() -> None:
    series = sample("mllog_throughput.txt")
    assert series.step.tolist() == [100, 200, 300, 400, 500, 600, 700]
    close(
        series.duration_s, 0.25, 0.2, 256 / 1279, 256 / 640.5, 256 / 641, 256 / 1281, 256 / 1280.5
    )
    assert series.start_time == pytest.approx(START_S + 1)
    close(series.end_s[[0, 3, 4]], 25.0, 104.98, 104.98 + 7 + 39.94)  # the evaluation is a gap


def test_mllog_step_times_with_steps_that_count_samples() -> None:
    series = sample("mllog_step_time.txt")
    assert series.step.tolist() == [1152 * i for i in range(1, 9)]
    close(series.duration_s[[0, 5]], 11.224733, 15.214459)
    assert set(series.iterations) == {1}
    assert set(series.work) == {1152.0}
    assert series.warnings[0] == "a row that sums up a block of iterations was left out"


def test_mllog_running_means_are_undone() -> None:
    series = sample("mllog_running_mean.txt")
    close(series.duration_s, 0.2, 0.2, 0.21, 0.2, 0.3, 0.2, 0.2, 0.16)
    close(series.data_s, 0.01, 0.01, 0.012, 0.01, 0.1, 0.01, 0.01, 0.01)
    close(series.end_s, 10, 20, 30.5, 40.5, 55.5, 65.5, 75.5, 83.5)


def mllog(time_s: float, key: str, value: object, **about: object) -> str:
    event = {"time_ms": round(1000 * time_s), "key": key, "value": value, "metadata": about}
    return f":::MLLOG {json.dumps(event)}\n"


def test_mllog_windowed_times_are_taken_as_printed() -> None:
    times = [0.2, 0.2, 0.3, 0.3, 0.2, 0.25]
    ends = np.cumsum(times) * 50 + START_S
    series = read(
        "".join(
            mllog(end, "tracked_stats", {"time": t, "throughput": 8 / t}, step=50 * i)
            for i, (t, end) in enumerate(zip(times, ends, strict=True), start=1)
        )
    )
    close(series.duration_s, *times)


def test_mllog_samples_count_is_turned_into_iterations() -> None:
    text = mllog(START_S, "global_batch_size", 64) + "".join(
        mllog(START_S + 5 * i, "tracked_stats", {"throughput": 128.0}, samples_count=640 * i)
        for i in range(1, 5)
    )
    series = read(text)
    assert set(series.iterations) == {10}
    close(series.duration_s, 0.5, 0.5, 0.5, 0.5)


def test_mllog_second_trial_is_a_run() -> None:
    text = ""
    for begin, batch in ((START_S, 64), (START_S + 100, 128)):
        text += mllog(begin, "global_batch_size", batch) + mllog(begin, "run_start", None)
        text += "".join(
            mllog(begin + i, "tracked_stats", {"train_step_time": 1.0}, step=i) for i in (1, 2, 3)
        )
    series = read(text)
    assert series.runs[1] == Run(note="global_batch_size 64 -> 128", config_changed=True)


# --- torchtitan --------------------------------------------------------------------------------


def test_torchtitan_tokens_per_second_give_times() -> None:
    series = sample("torchtitan.log")
    assert series.step.tolist() == [1, 10, 20, 30, 40, 50, 60]
    close(
        series.duration_s, 8.0, 0.5, 4096 / 8190, 4096 / 8193, 4096 / 6302, 4096 / 6301, 4096 / 8191
    )
    assert series.iterations.tolist() == [1, 9, 10, 10, 10, 10, 10]
    assert set(series.work) == {16.0 * 2048}
    assert series.start_time == pytest.approx(START_S, abs=0.01)


def titan(second: float, step: int, tps: str, name: str = "root") -> str:
    return (
        f"[titan] 2025-03-04 10:00:{second:06.3f}".replace(".", ",")
        + f" - {name} - INFO - step: {step:2}  loss: -1.0000  memory: 36.90GiB(46.63%)  "
        f"tps: {tps}  tflops: 0.90  mfu: 0.29%\n"
    )


def test_torchtitan_without_a_header_takes_the_clock() -> None:
    series = read("".join(titan(2.0 * i, i, "1,000") for i in range(1, 6)))
    close(series.duration_s, 2, 2, 2, 2, 2)


def test_torchtitan_with_too_few_digits_takes_the_clock() -> None:
    series = read("".join(titan(10.5 * i, i, "8", "torchtitan.trainer") for i in range(1, 5)))
    close(series.duration_s[1:], 10.5, 10.5, 10.5)
    assert "too few digits" in series.warnings[0]


def test_torchtitan_validation_lines_are_left_out() -> None:
    lines = [titan(2.0 * i, i, "1,000") for i in range(1, 6)]
    lines.insert(3, titan(6.5, 3, "9,000").replace("step:", "validate step:"))
    assert read("".join(lines)).step.tolist() == [1, 2, 3, 4, 5]


def test_torchtitan_unlabelled_ranks_give_one_record_a_step() -> None:
    series = read("".join(titan(2.0 * i, i, f"1,00{r}") for i in range(1, 6) for r in range(8)))
    assert series.step.tolist() == [1, 2, 3, 4, 5]


def test_torchtitan_cut_off_inside_its_rate_is_no_record() -> None:
    whole = "".join(titan(2.0 * i, i, "1,000") for i in range(1, 6))
    for cut in range(whole.rindex("tps:"), whole.rindex("  tflops:") + 1):
        assert read(whole[:cut]).step.tolist() == [1, 2, 3, 4]


# --- nanoGPT, llm.c, modded-nanogpt ------------------------------------------------------------


def test_nanogpt_and_nanochat() -> None:
    series = sample("nanogpt.log")
    assert series.step.tolist() == [0, 10, 20, 30, 40, 50, 60]
    close(series.duration_s, 26.31844, 0.1352, 0.13531, 0.13497, 0.13512, 0.2025, 0.13505)
    assert set(series.work) == {491_520.0}
    chat = sample("nanochat.log")
    close(chat.duration_s, 9.12031, 0.35102, 0.35077, 0.3509, 0.3513)
    assert set(chat.work) == {524_288.0}


def test_nanogpt_resumed_with_another_batch_is_a_run() -> None:
    text = ""
    for tokens, first in (("491,520", 0), ("245,760", 20)):
        text += f"tokens per iteration will be: {tokens}\n"
        text += "".join(
            f"iter {i}: loss 3.1, time 10{i}.00ms, mfu 41.20%\n"
            for i in range(first, first + 30, 10)
        )
    series = read(text)
    assert series.runs[1].note == "tokens per iteration 491520 -> 245760"
    assert series.runs[1].config_changed


def test_llmc_times_and_tokens() -> None:
    series = sample("llmc.log")
    assert series.step.tolist() == [1, 2, 3, 4, 5, 6]
    close(series.duration_s, 1.83088, 1.6462, 1.6547, 1.63731, 1.64952, 1.6505)
    assert set(series.work) == {524_288.0}


def test_llmc_pytorch_reference_line() -> None:
    line = "step {0:4d}/100 | train loss 4.5 | norm 1.2 | lr 3e-04 | ({0}00.50 ms | 20480 tok/s)\n"
    close(read("".join(line.format(i) for i in range(1, 4))).duration_s, 0.1005, 0.2005, 0.3005)


def test_llmc_main_log_says_that_it_holds_no_times() -> None:
    with pytest.raises(InputError, match=r"main\.log holds losses but no times; give the program"):
        read("s:0 tel:11.0095\ns:1 trl:11.0095 lr:0.000001 norm:15.42\ns:2 trl:10.9 norm:15.3\n")


def test_modded_nanogpt_differences_reset_and_planned_ramp() -> None:
    series = sample("modded_nanogpt.txt")
    close(series.duration_s, 24.389, 0.11, 0.145, 0.147, 0.146, 0.112, 0.148, 0.147, 0.15, 0.149)
    assert series.planned_ramp == "the attention window grows by schedule"


def test_modded_nanogpt_without_its_source_has_no_ramp_and_validation_lines_serve() -> None:
    text = "".join(
        f"step:{i}/1000 val_loss:3.9 train_time:{150 * i}ms step_avg:150.00ms\n"
        for i in (0, 125, 250, 375)
    )
    series = read(text)
    assert series.planned_ramp == ""
    assert series.step.tolist() == [125, 250, 375]
    close(series.duration_s, 0.15, 0.15, 0.15)


# --- the journal -------------------------------------------------------------------------------


def test_journal_steps_and_runs() -> None:
    series = sample("journal.jsonl")
    assert series.step.tolist() == [1, 2, 3, 4, 3, 4]
    close(series.duration_s, 2.5, 0.5, 0.51, 0.75, 2.25, 0.5)
    assert set(series.work) == {4096.0}
    assert np.isnan(series.data_s).all()
    assert series.run.tolist() == [0, 0, 0, 0, 1, 1]
    assert series.start_time == START_S
    assert series.end_s[-1] == pytest.approx(37.01)


def journal(*steps: Mapping[str, object]) -> str:
    rows = [{"t": START_S + i, "kind": "step", "duration_s": 1.0, **s} for i, s in enumerate(steps)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_journal_of_ranks_gives_one_of_them() -> None:
    series = read(journal(*({"rank": r, "step": i} for i in range(1, 9) for r in range(4))))
    assert series.step.tolist() == list(range(1, 9))
    assert "4 writers print the same steps: kept writer 0" in series.warnings[0]


def test_journal_records_of_the_job_go_before_those_of_its_ranks() -> None:
    rows: list[dict[str, object]] = [{"rank": 0, "step": i, "duration_s": 2.0} for i in (1, 2, 3)]
    assert read(journal(*rows, {"step": 2}, {"step": 3})).duration_s.tolist() == [1.0, 1.0]
