"""TensorBoard event files, written by tensorboard itself."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest
from cases import SAMPLES

from failslow.errors import InputError, MissingDependencyError
from failslow.ingest import Source, detect_format, read_log

EVENTS = SAMPLES / "events.out.tfevents.1700000000.host.1.0"


def _write(folder: Path, scalars: list[tuple[str, int, float, float]]) -> Path:
    """An event file of (tag, step, wall time, value)."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for tag, step, wall_s, value in scalars:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=wall_s, step=step, summary=summary))
    writer.close()
    return next(folder.iterdir())


def test_a_known_scalar_gives_the_durations() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    series = read_log(EVENTS)
    assert series.format == "tensorboard"
    assert series.step.tolist() == list(range(10, 101, 10))
    assert series.duration_s == pytest.approx([0.50 + 0.01 * k for k in range(1, 11)])
    assert series.iterations.tolist() == [10] * 10
    assert series.start_time == pytest.approx(1_700_000_006 - 5.1)
    assert series.warnings == ()


def test_gzip_and_stdin_work(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    packed = tmp_path / "events.gz"
    packed.write_bytes(gzip.compress(EVENTS.read_bytes()))
    assert len(read_log(packed)) == 10
    assert len(read_log(Source("<stdin>", data=EVENTS.read_bytes()))) == 10


def test_a_file_cut_short_gives_its_whole_records() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    series = read_log(Source("x", data=EVENTS.read_bytes()[:-100]))
    assert 6 <= len(series) < 10
    assert series.duration_s[0] == pytest.approx(0.51)


def test_data_loading_is_kept(tmp_path: Path) -> None:
    scalars = []
    for k in range(1, 6):
        scalars += [
            ("time_metrics/end_to_end(s)", k, 1.7e9 + k, 0.5),
            ("time_metrics/data_loading(s)", k, 1.7e9 + k, 0.125),
        ]
    series = read_log(_write(tmp_path, scalars))
    assert series.duration_s.tolist() == [0.5] * 5
    assert series.data_s.tolist() == [0.125] * 5


def test_without_a_known_scalar_wall_times_differ_and_a_warning_says_so(tmp_path: Path) -> None:
    scalars = [("train/loss", 10 * k, 1.7e9 + 5 * k, 2.0) for k in range(1, 7)]
    scalars += [("train/lr", 10, 1.7e9 + 5, 0.1), ("val/loss", 30, 1.7e9 + 16, 2.0)]
    scalars += [("train/loss", 10 * k, 1.7e9 + 100 + 5 * k, 2.0) for k in range(1, 4)]
    series = read_log(_write(tmp_path, scalars))
    assert series.step.tolist() == [20, 30, 40, 50, 60, 20, 30]
    assert series.duration_s == pytest.approx([0.5] * 7)
    assert series.run.tolist() == [0] * 5 + [1] * 2
    assert "differences of the wall times of 'train/loss'" in series.warnings[0]


def test_a_file_without_training_scalars_names_what_it_has(tmp_path: Path) -> None:
    path = _write(tmp_path, [("val/loss", 1, 1.7e9, 2.0)])
    with pytest.raises(InputError, match="no scalar of training in it; its scalars: val/loss"):
        read_log(path)


def test_it_is_known_by_its_first_record_without_tensorboard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("tensorboard", "tensorboard.backend.event_processing.event_file_loader"):
        monkeypatch.setitem(sys.modules, name, None)
    source = Source.from_path(EVENTS)
    assert detect_format(source).name == "tensorboard"
    with pytest.raises(MissingDependencyError, match="pip install") as raised:
        read_log(source)
    assert "failslow[tensorboard]" in str(raised.value)
    assert "\n" not in str(raised.value)
