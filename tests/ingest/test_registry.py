"""Detection, named formats, paths."""

from __future__ import annotations

import gzip
import random
import shutil
from pathlib import Path

import pytest
from cases import SAMPLES

from failslow.errors import InputError, UnknownFormatError
from failslow.ingest import Source, detect_format, expand_paths, read_log, readers

MEGATRON = (SAMPLES / "megatron.log").read_bytes()


def detect(data: bytes) -> str:
    return detect_format(Source("train.log", data=data)).name


def test_a_first_timing_line_after_many_of_noise_is_found() -> None:
    noise = b"".join(b"worker %d joined, waiting for step barrier\n" % i for i in range(30_000))
    assert detect(noise + MEGATRON) == "megatron"


def test_of_two_formats_in_a_file_the_one_of_higher_priority_wins() -> None:
    assert detect((SAMPLES / "mllog_running_mean.txt").read_bytes()) == "mllog"
    both = (SAMPLES / "deepspeed.log").read_bytes() + MEGATRON
    assert detect(both) == "megatron"


def test_a_header_like_line_does_not_make_a_log_a_table() -> None:
    assert (
        detect(b"step, step_time, see the manual\n" + b"noise\n" * 15_000 + MEGATRON) == "megatron"
    )


def test_an_unknown_file_names_the_formats_and_the_way_out_in_one_line() -> None:
    with pytest.raises(UnknownFormatError) as caught:
        read_log(Source("notes.txt", data=b"Dear all,\nthe training went well.\n"))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("notes.txt: no known training log in it; known formats: megatron, ")
    assert message.endswith("use --format csv --time-column NAME")
    assert all(reader.name in message for reader in readers())


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_an_empty_file_says_so(data: bytes) -> None:
    with pytest.raises(InputError, match=r"^train\.log: the file is empty"):
        read_log(Source("train.log", data=data))


def test_a_large_binary_file_is_refused_from_its_head(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(random.Random(0).randbytes(3_000_000))
    with pytest.raises(UnknownFormatError, match=r"model\.pt: a binary file"):
        read_log(checkpoint)


def test_a_folder_and_a_missing_file_are_errors_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        read_log(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        read_log(tmp_path / "absent.log")


def test_an_unknown_format_name_lists_the_known() -> None:
    with pytest.raises(InputError, match="--format tensorflow: no such format; known: megatron, "):
        read_log(SAMPLES / "megatron.log", format="tensorflow")


def test_a_format_by_name_without_its_lines_is_an_error() -> None:
    with pytest.raises(InputError, match="no timing record of format nanogpt"):
        read_log(SAMPLES / "megatron.log", format="nanogpt")


def test_a_gzip_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    packed = tmp_path / "train.log.gz"
    text = "".join(
        f"iteration {i}/ 9999 | elapsed time per iteration (ms): {500 + i % 97}.0 | loss: {i} |\n"
        for i in range(1, 5_000)
    )
    whole = gzip.compress(text.encode())
    packed.write_bytes(whole[: len(whole) // 2])
    series = read_log(packed)
    assert 1_000 < len(series) < 4_999
    assert "reading stopped before the end" in series.warnings[-1]


def test_a_log_with_a_hole_of_zeros_is_still_a_log() -> None:
    assert detect(b"\0" * 4096 + b"\n" + b"noise\n" * 20_000 + MEGATRON) == "megatron"


def test_a_path_that_cannot_be_looked_up_is_an_error_of_one_line() -> None:
    with pytest.raises(InputError, match="cannot be read: File name too long; check the path"):
        expand_paths(["x" * 5000])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/two.log", "a.log", "b/c/three.txt", ".hidden/four.log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SAMPLES / "megatron.log", path)
    shutil.copy(SAMPLES / "nanogpt.log", tmp_path / "b" / "nano.log")
    (tmp_path / "README.md").write_text("Logs of last week.\n")
    (tmp_path / "b" / "model.pt").write_bytes(bytes(range(256)) * 100)
    return tmp_path


def names(paths: list[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


def test_a_folder_gives_its_logs_recursively_and_tells_what_it_skips(folder: Path) -> None:
    skipped: list[str] = []
    found = expand_paths([folder], on_skip=skipped.append)
    assert names(found, folder) == ["a.log", "b/c/three.txt", "b/nano.log", "b/two.log"]
    assert len(skipped) == 2
    assert "README.md: no known training log in it" in skipped[0]
    assert "model.pt: a binary file" in skipped[1]


def test_a_format_narrows_a_folder_to_its_files(folder: Path) -> None:
    assert names(expand_paths([folder], format="nanogpt"), folder) == ["b/nano.log"]


def test_globs_give_files_and_folders(folder: Path) -> None:
    assert names(expand_paths([f"{folder}/**/*.log"]), folder) == [
        "a.log",
        "b/nano.log",
        "b/two.log",
    ]
    assert names(expand_paths([f"{folder}/b*"]), folder) == [
        "b/c/three.txt",
        "b/nano.log",
        "b/two.log",
    ]


def test_each_file_comes_once_in_the_order_given(folder: Path) -> None:
    found = expand_paths([folder / "b" / "two.log", folder, folder / "a.log"])
    assert names(found, folder)[0] == "b/two.log"
    assert len(found) == len(set(found)) == 4


def test_a_file_by_name_is_taken_though_it_is_unknown(folder: Path) -> None:
    assert expand_paths([folder / "README.md"]) == [folder / "README.md"]
    assert expand_paths(["-"]) == [Path("-")]


def test_a_name_with_brackets_is_a_file_when_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "log[1].txt"
    shutil.copy(SAMPLES / "megatron.log", path)
    assert expand_paths([path]) == [path]


def test_a_data_set_beside_a_log_is_not_read_to_its_end(tmp_path: Path) -> None:
    log, data = tmp_path / "train.log", tmp_path / "data.txt"
    late = b"\n" + (SAMPLES / "megatron.log").read_bytes()
    log.write_bytes(b"x" * (1 << 20) + late)
    data.write_bytes(b"x" * (40 << 20) + late)
    assert expand_paths([tmp_path]) == [log]
    assert detect_format(Source.from_path(data)).name == "megatron"  # by name it is


def test_paths_that_lead_nowhere_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.log: no such file or folder"):
        expand_paths([tmp_path / "absent.log"])
    with pytest.raises(InputError, match="no training log among its 0 files"):
        expand_paths([tmp_path])
    with pytest.raises(InputError, match=r"\*\.log: no file matches"):
        expand_paths([f"{tmp_path}/*.log"])
