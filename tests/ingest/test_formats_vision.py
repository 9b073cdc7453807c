"""Formats with the seconds of an iteration in the line: OpenMMLab, detectron2, meters."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cases import SAMPLES

from failslow.ingest import Source, read_log
from failslow.records import StepSeries


def _read(text: str) -> StepSeries:
    return read_log(Source("x.log", data=text.encode()))


# --- mmcv, mmengine -----------------------------------------------------------------------------


def test_mmcv_steps_go_on_over_epochs_and_validation_is_left_out() -> None:
    series = read_log(SAMPLES / "mmcv.log.json")
    assert series.format == "mmengine"
    assert series.step.tolist() == list(range(50, 701, 50))
    expected = [0.355, 0.36, 0.365, 0.37, 0.375, 0.38, 0.385]
    slow = [0.355, 0.36, 0.465, 0.37, 0.375, 0.38, 0.385]
    assert series.duration_s == pytest.approx(expected + slow)
    assert series.iterations.tolist() == [50] * 14
    assert series.data_s == pytest.approx([0.011] * 7 + [0.012] * 7)
    assert not series.clocked


def test_a_second_mmcv_header_starts_a_run() -> None:
    text = (SAMPLES / "mmcv.log.json").read_text()
    series = _read(text + text)
    assert series.run.tolist() == [0] * 14 + [1] * 14
    assert series.step[14] == 50
    assert series.runs[1].note


def test_mmengine_rows_without_iter_are_validation() -> None:
    series = read_log(SAMPLES / "mmengine_scalars.json")
    assert series.step.tolist() == list(range(50, 401, 50))
    assert series.duration_s == pytest.approx([0.29, 0.30, 0.31, 0.32, 0.33, 0.34, 0.35, 0.36])
    assert series.data_s == pytest.approx([0.012] * 8)


def test_mmengine_keys_with_hierarchy_are_read() -> None:
    rows = [
        {"train/data_time": 0.01, "train/time": 0.2 + k / 100, "train/lr": 0.1, "iter": 10 * k}
        for k in range(1, 5)
    ]
    rows.append({"val/time": 0.05, "val/data_time": 0.01, "step": 40})
    series = _read("".join(json.dumps(row) + "\n" for row in rows))
    assert series.duration_s == pytest.approx([0.21, 0.22, 0.23, 0.24])
    assert series.data_s == pytest.approx([0.01] * 4)


def test_mmengine_text_has_a_clock_and_the_length_of_an_epoch() -> None:
    series = read_log(SAMPLES / "mmengine.log")
    assert series.format == "mmengine"
    assert series.step.tolist() == [50, 100, 150, 230, 280, 330]
    assert series.duration_s == pytest.approx([0.3051, 0.3101, 0.3151, 0.3052, 0.3102, 0.3152])
    assert series.iterations.tolist() == [50, 50, 50, 80, 50, 50]
    assert series.data_s == pytest.approx([0.0101] * 3 + [0.0102] * 3)
    assert series.start_time == pytest.approx(1_661_860_815 - 50 * 0.3051)


def test_mmcv_text_of_both_runners_is_read() -> None:
    by_epoch = (
        "2021-03-01 12:00:{:02d},123 - mmdet - INFO - Epoch [1][{}/7330]\tlr: 2.000e-03, "
        "eta: 1 day, 4:40:13, time: 0.350, data_time: 0.050, memory: 3900, loss: 1.3\n"
    )
    by_iteration = (
        "2021-03-01 12:00:{:02d},123 - mmseg - INFO - Iter [{}/160000]\tlr: 1.000e-02, "
        "eta: 15:33:01, time: 0.350, data_time: 0.008, memory: 8000, loss: 1.3\n"
    )
    for line, data_s in ((by_epoch, 0.05), (by_iteration, 0.008)):
        series = _read("".join(line.format(17 * k, 50 * k) for k in (1, 2, 3)))
        assert series.format == "mmengine"
        assert series.step.tolist() == [50, 100, 150]
        assert series.duration_s.tolist() == [0.35] * 3
        assert series.data_s.tolist() == [data_s] * 3
        assert series.clocked


# --- detectron2, maskrcnn-benchmark -------------------------------------------------------------


def test_detectron2_metrics_are_medians_by_iteration() -> None:
    series = read_log(SAMPLES / "detectron2_metrics.json")
    assert series.format == "detectron2"
    assert series.step.tolist() == list(range(19, 240, 20))
    assert series.duration_s == pytest.approx([0.2540 + 0.0003 * k for k in range(12)])
    assert series.iterations[1:].tolist() == [20] * 11
    assert series.data_s == pytest.approx([0.0075 + 0.0001 * k for k in range(12)])


def test_detectron2_printed_mean_is_replaced_by_the_clock_without_evaluation() -> None:
    series = read_log(SAMPLES / "detectron2.log")
    assert series.format == "detectron2"
    assert series.step.tolist() == [59, 99, 139, 179, 259, 299, 339]
    assert series.iterations.tolist() == [40, 40, 40, 40, 80, 40, 40]
    # iterations 240 to 319 take 0.75 s, the others 0.5 s
    assert series.duration_s.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5625, 0.75, 0.625]
    assert series.end_s[-1] == 220.0  # 40 s of evaluation in the clock
    assert series.start_time is None  # the log does not print the year


def _without_clock(text: str) -> list[str]:
    return [line.partition(" INFO:  ")[2] for line in text.splitlines() if " iter: " in line]


def test_detectron2_without_a_clock_takes_the_last_iteration() -> None:
    lines = _without_clock((SAMPLES / "detectron2.log").read_text())
    series = _read("\n".join(lines))
    assert series.step.tolist() == list(range(19, 360, 20))
    assert series.duration_s == pytest.approx([0.51] * 12 + [0.76] * 4 + [0.51] * 2)


def test_detectron2_without_clock_and_last_iteration_has_its_mean_undone() -> None:
    lines = _without_clock((SAMPLES / "detectron2.log").read_text())
    lines = [line.partition("last_time: ")[0] + "data_time: 0.0101" for line in lines]
    series = _read("\n".join(lines))
    assert series.duration_s == pytest.approx([0.5] * 11 + [0.75] * 4 + [0.5] * 2, rel=0.01)
    assert series.data_s.tolist() == [0.0101] * 17


def test_a_restarted_detectron2_starts_a_run() -> None:
    text = (SAMPLES / "detectron2.log").read_text()
    again = text.replace("[03/02 10:", "[03/02 11:")
    series = _read(text + again)
    assert series.run.tolist() == [0] * 7 + [1] * 7
    assert series.duration_s[7:].tolist() == series.duration_s[:7].tolist()


def test_maskrcnn_benchmark_takes_the_median_not_the_mean_in_parentheses() -> None:
    series = read_log(SAMPLES / "maskrcnn_benchmark.log")
    assert series.format == "detectron2"
    assert series.step.tolist() == list(range(20, 161, 20))
    assert series.duration_s == pytest.approx([0.16 + 0.0001 * k for k in range(8)])
    assert series.data_s == pytest.approx([0.001 + 0.0001 * k for k in range(8)])
    assert series.iterations.tolist() == [20] * 8
    assert series.start_time == pytest.approx(1_551_521_472.345 - 3.2)


# --- meters -------------------------------------------------------------------------------------


def test_imagenet_meters_take_the_value_before_the_parentheses() -> None:
    series = read_log(SAMPLES / "meters_imagenet.log")
    assert series.format == "meters"
    assert series.step.tolist() == list(range(0, 100, 10))
    expected = [3.5, 0.355, 0.365, 0.375, 0.385, 4.5, 0.455, 0.465, 0.475, 0.485]
    assert series.duration_s == pytest.approx(expected)
    assert series.iterations.tolist() == [1, 10, 10, 10, 10] * 2
    assert series.data_s == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05] * 2)


def test_torchvision_meters_are_read_and_its_tests_left_out() -> None:
    series = read_log(SAMPLES / "meters_torchvision.log")
    assert series.step.tolist() == list(range(0, 100, 10))
    expected = np.concatenate([0.4 + np.arange(5) / 100, 0.4001 + np.arange(5) / 100])
    assert series.duration_s == pytest.approx(expected)
    assert series.data_s == pytest.approx([0.01, 0.011, 0.012, 0.013, 0.014] * 2)
    assert np.isnan(series.work).all()  # img/s is of one iteration, the time a mean of 20


def test_timm_meters_carry_work() -> None:
    series = read_log(SAMPLES / "meters_timm.log")
    assert series.step.tolist() == list(range(0, 200, 20))
    expected = [0.350, 0.351, 0.352, 0.353, 0.354, 0.360, 0.361, 0.362, 0.363, 0.364]
    assert series.duration_s == pytest.approx(expected)
    assert series.work == pytest.approx(np.full(10, 256.0), rel=1e-4)
    assert series.data_s == pytest.approx([0.010, 0.011, 0.012, 0.013, 0.014] * 2)


@pytest.mark.parametrize(
    ("line", "step", "work"),
    [
        ("[2021-04-12 12:00:0{k} swin] INFO Train: [3/300][1{k}/1251]\teta 0:31:07 lr 0.000001"
         "\ttime 0.3500 (0.4100)\tloss 6.9 (6.9)", 3 * 1251 + 10, None),
        ("Epoch: [3/100]  [  1{k}/1250]  eta: 0:31:07  lr: 0.1  loss: 6.9 (7.0)  time: 0.350000"
         "  data: 0.000200  max mem: 5000", 3 * 1250 + 10, None),
        ("I20230407 12:00:0{k} 77 dinov2 helpers.py:102] Training  [1{k}/125000]  eta: 1:02:03"
         "  loss: 11.2 (11.3)  time: 0.350000  data: 0.000200  max mem: 5000", 10, None),
        ("Epoch: [3][1{k}/1251]\tTime 0.350 (0.400)\tSpeed 731.429 (640.000)\tLoss 6.9 (7.0)",
         3 * 1251 + 10, 256.0),
        ("2023-01-01,12:00:0{k} | INFO | Train Epoch: 3 [1{k}/1251 (1%)] Data (t): 0.010 "
         "Batch (t): 0.350, 731.429/s, 91.429/s/gpu LR: 0.001", 3 * 1251 + 10, None),
    ],
)  # fmt: skip
def test_kin_of_the_meters_are_read(line: str, step: int, work: float | None) -> None:
    series = _read("\n".join(line.replace("{k}", str(k)) for k in range(4)))
    assert series.format == "meters"
    assert series.step.tolist() == [step + k for k in range(4)]
    assert series.duration_s == pytest.approx([0.35] * 4)
    if work is None:
        assert np.isnan(series.work).all()
    else:
        assert series.work == pytest.approx([work] * 4, rel=1e-4)


def test_interleaved_ranks_of_the_imagenet_example_are_told_apart() -> None:
    text = "".join(
        f"[rank{rank}]: Epoch: [0][{i:3d}/500]\tTime 0.{300 + rank * 50} ( 0.4)\tData 0.01 ( 0.1)\n"
        for i in range(10, 200, 10)
        for rank in (0, 1)
    )
    series = _read(text)
    assert series.duration_s.tolist() == [0.3] * 19
    assert "2 writers print the same steps" in series.warnings[0]
