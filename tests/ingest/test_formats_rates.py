"""Formats of throughput and cost: MXNet, PaddlePaddle, fairseq; and their real logs."""

from __future__ import annotations

import numpy as np
import pytest
from cases import REAL_LOG_FOLDER, SAMPLES

from failslow.ingest import Source, read_log
from failslow.records import Run, StepSeries


def _read(text: str) -> StepSeries:
    return read_log(Source("x.log", data=text.encode()))


def _real(name: str) -> StepSeries:
    path = REAL_LOG_FOLDER / name
    if not path.is_file():
        pytest.skip(f"the real log {name} is not at {REAL_LOG_FOLDER} (set FAILSLOW_REAL_LOGS)")
    return read_log(path)


# --- MXNet --------------------------------------------------------------------------------------


def test_mxnet_batches_become_iterations_and_a_new_header_a_run() -> None:
    series = read_log(SAMPLES / "mxnet.log")
    assert series.format == "mxnet"
    assert series.step.tolist() == [20, 40, 60, 80, 100, 120, 20, 40]
    assert series.iterations.tolist() == [20] * 8
    # 2 GPUs of 64, then of 16 samples each
    expected = [128 / 320, 128 / 640, 128 / 640, 128 / 321, 128 / 641, 128 / 641]
    assert series.duration_s == pytest.approx([*expected, 32 / 275, 32 / 295])
    assert series.work.tolist() == [128.0] * 6 + [32.0] * 2
    assert series.run.tolist() == [0] * 6 + [1] * 2
    note = "batch_size 64 -> 16, dtype float16 -> float32, num_workers 8 -> 4"
    assert series.runs == (Run(), Run(note=note, config_changed=True))
    assert not series.clocked


def test_an_identical_mxnet_header_is_a_run_of_the_same_configuration() -> None:
    text = (SAMPLES / "mxnet.log").read_text().partition("\n\n")[0] + "\n"
    series = _read(text + text)
    assert series.run.tolist() == [0] * 6 + [1] * 6
    assert not series.runs[1].config_changed


def test_mxnet_without_a_batch_size_counts_seconds_per_sample() -> None:
    series = _read(
        "".join(
            f"2018-01-01 12:00:{k:02d},123 Node[0] Epoch[0] Batch [{20 * k}]\tSpeed: 500.00 "
            f"samples/sec\tTrain-accuracy=0.1\n"
            for k in range(1, 6)
        )
    )
    assert series.duration_s.tolist() == [0.002] * 5
    assert np.isnan(series.work).all()
    assert series.warnings[0].startswith("no header names the batch size: times are seconds per")


@pytest.mark.parametrize(
    "line",
    [
        "INFO:root:Epoch[1] Batch [0-{batch}]\tSpeed: 640.00 samples/sec\taccuracy=0.6",
        "[Epoch 1][Batch {batch}], Speed: 640.000 samples/sec, CrossEntropy=1.204",
        "Epoch[1/90] Batch [{batch}/1250]\tSpeed: 640.000000 samples/sec\ttop1=0.1",
        "Epoch[001] Batch [{batch:04d}]/[1250]\tSpeed: 640.000000 samples/sec\t loss=0.1",
    ],
)
def test_variants_of_mxnet_lines_are_read(line: str) -> None:
    text = "Namespace(batch_size=128, dtype='float32')\n"
    text += "\n".join(line.format(batch=batch) for batch in (19, 39, 59))
    series = _read(text)
    assert series.format == "mxnet"
    assert series.step.tolist() == [20, 40, 60]
    assert series.duration_s.tolist() == [0.2] * 3


def test_the_real_mxnet_log_has_3000_records() -> None:
    series = _real("mxnet_darknet53_late_slow.log")
    assert len(series) == 3000
    assert (series.iterations == 50).all()
    assert series.step[-1] == 150_000
    assert float(np.median(series.duration_s)) == pytest.approx(0.246, abs=5e-4)
    assert len(series.runs) == 1


def test_the_real_mxnet_log_changes_its_batch_between_two_runs() -> None:
    series = _real("mxnet_simple_pose_batch_change.log")
    # 140 epochs of 7 and 140 of 5 records; its 140 summaries of epochs are no records
    assert len(series) == 1680
    assert np.flatnonzero(np.diff(series.run)).tolist() == [979]
    assert series.runs[1].config_changed
    assert series.runs[1].note.startswith("batch_size 128 -> 32, dtype float16 -> float32")
    assert series.work[[0, -1]].tolist() == [1024.0, 256.0]


# --- PaddlePaddle -------------------------------------------------------------------------------


def test_paddleseg_lines_have_a_global_iteration_and_a_clock() -> None:
    series = read_log(SAMPLES / "paddle_seg.log")
    assert series.format == "paddle"
    assert series.step.tolist() == list(range(10, 81, 10))
    assert series.duration_s == pytest.approx([0.51, 0.52, 0.53, 0.54, 0.55, 0.56, 0.57, 0.58])
    assert series.data_s == pytest.approx([0.02 + 0.001 * k for k in range(1, 9)])
    assert series.work == pytest.approx(np.full(8, 8.0), rel=1e-4)
    assert series.start_time == pytest.approx(1_688_205_606 - 5.1)


def test_paddleclas_means_since_the_sixth_iteration_are_undone() -> None:
    series = read_log(SAMPLES / "paddle_clas.log")
    assert series.step.tolist() == [10, 20, 30, 40, 51, 61, 71, 81]
    assert series.duration_s == pytest.approx([0.3, 0.3, 0.4, 0.4] * 2, abs=1e-4)
    assert series.data_s == pytest.approx([0.0037] * 8)


def test_paddlenlp_lines_carry_their_samples() -> None:
    series = read_log(SAMPLES / "paddle_nlp.log")
    assert series.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert series.duration_s == pytest.approx([0.35001 + 1e-5 * k for k in range(6)])
    assert series.work.tolist() == [16.0] * 6
    assert series.data_s == pytest.approx([0.00041 + 1e-5 * k for k in range(6)])


def test_the_paddlenlp_trainer_gives_the_runtime_of_an_interval() -> None:
    series = read_log(SAMPLES / "paddle_nlp_trainer.log")
    assert series.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert series.duration_s == pytest.approx([0.36, 0.37, 0.38, 0.39, 0.40, 0.41])
    assert series.iterations.tolist() == [10] * 6
    assert series.work == pytest.approx(np.full(6, 16.0), rel=1e-4)


@pytest.mark.parametrize(
    ("line", "first_step"),
    [
        ("[07/27 12:54:51] ppdet.engine INFO: Epoch: [1] [ {i}/1241] learning_rate: 0.01 "
         "loss: 3.1 eta: 1:02:03 batch_cost: 0.3512 data_cost: 0.0102 ips: 22.7790 images/s", 20),
        ("2021-04-21 10:26:35 INFO: epoch:0  , train step:{i}  , loss: 7.20494, lr: 0.05, "
         "batch_cost: 0.35120 s, reader_cost: 0.01020 s, ips: 22.77904 images/sec.", 20),
        ("[2022/08/16 03:08:41] ppocr INFO: epoch: [1/400], global_step: {i}, lr: 0.000100, "
         "avg_reader_cost: 0.01020 s, avg_batch_cost: 0.35120 s, avg_samples: 8.0, "
         "ips: 22.77904 samples/s, eta: 6 days, 23:28:43", 20),
    ],
)  # fmt: skip
def test_other_paddle_toolkits_are_read(line: str, first_step: int) -> None:
    series = _read("\n".join(line.replace("{i}", str(i)) for i in (20, 40, 60)))
    assert series.format == "paddle"
    assert series.step.tolist() == [first_step, first_step + 20, first_step + 40]
    assert series.duration_s.tolist() == [0.3512] * 3
    assert series.data_s.tolist() == [0.0102] * 3
    assert series.work == pytest.approx([8.0] * 3, rel=1e-4)


def test_the_real_paddle_log_has_26_records() -> None:
    series = _real("paddle_hrnet.log")
    assert len(series) == 26
    assert series.step[[0, -1]].tolist() == [15, 390]
    assert (series.iterations == 15).all()
    assert series.duration_s[0] == 1.1038
    assert series.data_s[0] == 0.21506
    assert series.clocked


# --- fairseq ------------------------------------------------------------------------------------


def test_fairseq_updates_take_words_over_words_per_second() -> None:
    series = read_log(SAMPLES / "fairseq.log")
    assert series.format == "fairseq"
    assert series.step.tolist() == list(range(100, 801, 100))
    k = np.arange(1, 9)
    assert series.duration_s == pytest.approx((8200 + 10 * k) / (23000.5 + 10 * k))
    assert series.work.tolist() == (8200.0 + 10 * k).tolist()
    assert series.iterations.tolist() == [100] * 8
    assert series.start_time == pytest.approx(1_677_664_835 - 100 * 8210 / 23010.5)


def test_fairseq_json_is_read_and_validation_left_out() -> None:
    series = read_log(SAMPLES / "fairseq_json.log")
    assert series.format == "fairseq"
    assert series.step.tolist() == list(range(100, 601, 100))
    assert series.duration_s == pytest.approx(8230 / (23000.5 + 10 * np.arange(1, 7)))


def test_a_fairseq_line_without_words_takes_updates_per_second() -> None:
    line = "2023-03-01 10:00:{:02d} | INFO | train_inner | ups=2.5, num_updates={}, lr=1"
    series = _read("\n".join(line.format(20 * k, 50 * k) for k in (0, 1, 2)))
    assert series.duration_s.tolist() == [0.4] * 3


def test_old_fairseq_means_of_an_epoch_give_way_to_its_wall_time() -> None:
    text = "".join(
        f"| epoch 001:  {100 * k:5d} / 9000 loss=9.1, wps=20000, ups=3, wpb=8230, bsz=256, "
        f"num_updates={100 * k}, lr=1e-05, wall={30 * k + (15 * (k - 10) if k > 10 else 0)}\n"
        for k in range(1, 21)
    )
    series = _read(text)
    assert series.duration_s.tolist() == [0.3] * 9 + [0.45] * 10


def test_transformer_lines_have_a_wall_time_of_their_own() -> None:
    series = read_log(SAMPLES / "transformer.log")
    assert series.format == "fairseq"
    assert series.step.tolist() == list(range(10, 81, 10))
    k = np.arange(1, 9)
    assert series.duration_s == pytest.approx((4700 + k) / (40000 + 100 * k))
    assert series.work.tolist() == (4700.0 + k).tolist()
    assert series.clocked
    assert series.start_time is None
    assert np.diff(series.end_s) == pytest.approx([1.2] * 7)


def test_the_real_transformer_log_has_3149_records() -> None:
    series = _real("transformer_tokens_slow.log")
    assert len(series) == 3149
    assert series.iterations[:-1].tolist() == [10] * 3148
    assert series.duration_s[0] == pytest.approx(4746 / 40822.725)
    assert series.clocked
    assert series.start_time is None
