"""Formats that tell the time since the start: Hugging Face, LLaMA-Factory, NeMo and Lightning."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cases import SAMPLES

from failslow.errors import InputError
from failslow.ingest import Source, read_log
from failslow.records import StepSeries


def _read(text: str) -> StepSeries:
    return read_log(Source("x.log", data=text.encode()))


# --- Hugging Face -------------------------------------------------------------------------------


def test_trainer_state_gives_the_time_between_entries_without_evaluation() -> None:
    series = read_log(SAMPLES / "hf_trainer_state.json")
    assert series.format == "hf_trainer"
    assert series.step.tolist() == [20, 30, 40, 50, 60, 70, 80]
    assert series.duration_s == pytest.approx([2.02, 2.02, 2.02, 2.02, 2.82, 2.82, 2.02])
    assert series.iterations.tolist() == [10] * 7
    assert series.work.tolist() == [32_768.0] * 7
    assert series.end_s[-1] == pytest.approx(169.9)  # evaluation's 12.5 s are in the clock
    assert series.start_time is None
    assert series.warnings == ()


def test_trainer_state_cut_short_gives_its_whole_entries() -> None:
    text = (SAMPLES / "hf_trainer_state.json").read_text()
    series = _read(text[: text.index('"step": 60')])
    assert series.step.tolist() == [20, 30, 40, 50]
    assert series.duration_s == pytest.approx([2.02] * 4)
    assert "cut short or broken" in series.warnings[0]


def test_trainer_state_without_times_names_the_option_that_adds_them() -> None:
    history = [{"epoch": 0.1, "loss": 2.0, "step": 10}, {"epoch": 0.2, "loss": 1.9, "step": 20}]
    history.append({"step": 20, "train_loss": 2.0, "train_runtime": 40.0})
    with pytest.raises(InputError, match="include_num_input_tokens_seen=True") as raised:
        _read(json.dumps({"log_history": history}, indent=2))
    assert "\n" not in str(raised.value)


def test_step_time_of_trl_is_the_duration() -> None:
    history = [{"loss": 0.1, "step": step, "step_time": 2.0 + step} for step in (10, 20, 30)]
    series = _read(json.dumps({"log_history": history}))
    assert series.duration_s.tolist() == [12.0, 22.0, 32.0]


def test_a_resumed_trainer_starts_a_run() -> None:
    history = [{"step": 10 * k, "train_runtime": 20.0 * k} for k in range(1, 5)]
    history += [{"step": 40 + 10 * k, "train_runtime": 3 + 20.0 * k} for k in range(1, 4)]
    series = _read(json.dumps({"log_history": history}, indent=2))
    assert series.duration_s.tolist() == [2.0] * 5
    assert series.step.tolist() == [20, 30, 40, 60, 70]
    assert series.run.tolist() == [0, 0, 0, 1, 1]
    assert series.runs[1].note == "elapsed time restarts at step 50"


def test_the_printed_bar_gives_whole_seconds_averaged_over_20() -> None:
    series = read_log(SAMPLES / "hf_trainer_printed.log")
    assert series.format == "hf_trainer"
    assert series.step.tolist() == [10, 20, 30, 50, 60]
    assert series.duration_s == pytest.approx([2.1, 2.1, 2.1, 2.1, 2.1], rel=0.05)
    assert series.iterations.tolist() == [10, 10, 10, 20, 10]
    assert series.end_s[-1] == 139.0  # 14 s of evaluation among them
    assert series.warnings == (
        "elapsed time has a resolution of 1 s: lines are averaged until they span 20 s",
    )


def test_printed_entries_with_a_time_are_exact_and_take_the_step_of_their_bar() -> None:
    lines = [
        f"{{'loss': 2.1, 'epoch': {step / 100}, 'num_input_tokens_seen': {step * 4096}, "
        f"'train_runtime': {step * 1.25:.4f}, 'train_tokens_per_second': 3276.8}}\n"
        f"{step}%|█   | {step}/100 [00:{step:02d}<01:00,  1.25s/it]"
        for step in (10, 20, 30, 40)
    ]
    lines.append("{'train_runtime': 60.0, 'train_loss': 2.0, 'epoch': 0.4}")
    series = _read("\r".join(lines))
    assert series.step.tolist() == [20, 30, 40]
    assert series.duration_s == pytest.approx([1.25] * 3)
    assert series.work.tolist() == [4096.0] * 3


def test_entries_of_newer_transformers_print_numbers_as_text() -> None:
    text = "".join(
        f"{{'loss': '2.1', 'epoch': '0.{k}', 'train_runtime': '{12.5 * k}'}}\n" for k in (1, 2, 3)
    )
    series = _read(text)
    assert series.duration_s.tolist() == [12.5, 12.5]
    assert "no step numbers" in series.warnings[0]


def test_printed_entries_without_any_time_name_the_option() -> None:
    with pytest.raises(InputError, match="include_num_input_tokens_seen"):
        _read("{'loss': 2.1, 'grad_norm': 1.0, 'learning_rate': 2e-05, 'epoch': 0.1}\n" * 3)


def test_bars_of_two_labelled_ranks_do_not_mix() -> None:
    lines = [
        f"[rank{rank}]: {step}%|█   | {step + rank}/200 "
        f"[{step // 60:02d}:{step % 60:02d}<01:00,  1.00s/it]"
        for step in range(0, 101, 10)
        for rank in (0, 1)
    ]
    series = _read("\n".join(lines))
    assert set(series.duration_s.tolist()) == {1.0}
    assert series.step.tolist() == [20, 40, 60, 80, 100]


# --- LLaMA-Factory ------------------------------------------------------------------------------


def _llamafactory(points: list[tuple[int, int]]) -> str:
    return "".join(
        json.dumps(
            {"current_steps": step, "total_steps": 900, "loss": 1.0}
            | {"elapsed_time": f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}"}
        )
        + "\n"
        for step, s in points
    )


def test_llamafactory_takes_exact_times_from_its_throughput() -> None:
    series = read_log(SAMPLES / "llamafactory.jsonl")
    assert series.format == "llamafactory"
    assert series.step.tolist() == list(range(10, 61, 5))
    expected = [1.3] * 5 + [1.95] * 2 + [1.3] * 4
    assert series.duration_s == pytest.approx(expected, rel=1e-4)
    assert series.iterations.tolist() == [5] * 11
    assert series.work == pytest.approx([8192.0] * 11)
    assert series.end_s[-1] == pytest.approx(98.0, abs=0.01)  # evaluation's 20 s in the clock
    assert series.warnings == ()


def test_llamafactory_without_throughput_averages_whole_seconds() -> None:
    points = [(step, int(step * 1.37)) for step in range(0, 301, 5)]
    series = _read(_llamafactory(points))
    assert series.duration_s == pytest.approx(np.full(len(series), 1.37), rel=0.05)
    assert (series.duration_s * series.iterations >= 20).all()
    assert "whole" not in series.warnings
    assert "until they span 20 s" in series.warnings[0]


def test_llamafactory_appended_to_by_a_resumed_job_starts_a_run() -> None:
    points = [(step, step) for step in range(0, 101, 25)]
    points += [(step, step - 90) for step in range(100, 201, 25)]
    series = _read(_llamafactory(points))
    assert series.duration_s.tolist() == [1.0] * 8
    assert series.run.tolist() == [0] * 4 + [1] * 4


def test_a_broken_llamafactory_line_costs_a_warning() -> None:
    text = _llamafactory([(step, step) for step in range(0, 201, 25)])
    series = _read(text[:-20])
    assert series.step[-1] == 175
    assert "a line that is no whole JSON record was skipped" in series.warnings


# --- NeMo and Lightning -------------------------------------------------------------------------


def test_nemo_bar_counts_a_redrawn_step_once() -> None:
    series = read_log(SAMPLES / "nemo_bar.log")
    assert series.format == "lightning"
    assert series.step.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert series.duration_s == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8])
    assert series.warnings == ()


def test_nemo_lines_carry_step_and_batch() -> None:
    series = read_log(SAMPLES / "nemo_lines.log")
    assert series.step.tolist() == list(range(8))
    assert series.duration_s[:3] == pytest.approx([7.126, 2.51, 2.52])
    assert series.work.tolist() == [8.0] * 8


def test_nemo_csv_skips_rows_of_validation() -> None:
    series = read_log(SAMPLES / "nemo_metrics.csv")
    assert series.format == "lightning"
    assert series.step.tolist() == [9, 19, 29, 39, 49, 59, 69, 79]
    assert series.duration_s == pytest.approx([2.5, 2.51, 2.52, 2.53, 2.54, 2.55, 2.56, 2.57])
    assert series.iterations[1:].tolist() == [10] * 7
    assert series.work[1:].tolist() == [256.0] * 7


def test_dllogger_has_a_clock() -> None:
    series = _read(
        "".join(
            f'DLLL {{"timestamp": "{1739210331.5 + 9 * step}", "type": "LOG", "step": {step}, '
            f'"data": {{"global_step": {step}.0, "train_step_timing in s": 9.0}}}}\n'
            for step in range(1, 5)
        )
    )
    assert series.format == "lightning"
    assert series.step.tolist() == [1, 2, 3, 4]
    assert series.clocked
    assert series.start_time == pytest.approx(1739210331.5)


def test_a_step_rounded_by_the_bar_comes_from_its_count() -> None:
    series = _read(
        "\r".join(
            f"Epoch 0: :  41%|█  | {n}/4900 [1:00:00<1:00:00, global_step=2e+3, "
            f"train_step_timing in s=1.9{n % 10}]"
            for n in range(2000, 2005)
        )
    )
    assert series.step.tolist() == [2000, 2001, 2002, 2003, 2004]


def test_a_plain_lightning_bar_goes_on_over_epochs() -> None:
    lines = []
    for epoch in (0, 1):
        for n in range(0, 101, 10):
            s = int(n * 0.9) + (30 if n > 50 else 0)
            bar = (
                f"Epoch {epoch}: {n:3d}%|█   | {n}/100 [{s // 60:02d}:{s % 60:02d}<00:30,  1.1it/s"
            )
            lines.append(f"{bar}, v_num=3]")
            if n == 50:
                v = s + 30
                lines.append("Validation DataLoader 0: 100%|██| 5/5 [00:30<00:00,  0.2it/s]")
                bar = f"Epoch {epoch}: {n:3d}%|█   | {n}/100 [{v // 60:02d}:{v % 60:02d}<00:30"
                lines.append(f"{bar},  1.1it/s, v_num=3]")
    series = _read("\r".join(lines))
    assert series.format == "lightning"
    assert series.duration_s == pytest.approx(np.full(len(series), 0.9), rel=0.05)
    assert series.step[-1] > 100


def test_carriage_returns_and_a_cut_line_do_no_harm() -> None:
    text = (SAMPLES / "nemo_bar.log").read_bytes().decode()
    assert "\r" in text
    whole = _read(text.replace("\n", "\r\n"))
    cut = _read(text.rstrip()[: -len(" in s=1.80]")])
    assert whole.step.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert cut.step.tolist() == [1, 2, 3, 4, 5, 6, 7]
