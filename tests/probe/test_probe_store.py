"""The store: whole or not at all, one writer, many readers; what else lies in it is named."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.probe.probe_samples import record, result

from failslow.errors import MissingDependencyError, ProbeError
from failslow.probe.campaign import Ending
from failslow.probe.store import ProbeRecord, StoreWriter, is_store, read_store
from failslow.probe.store_parts import draft_part

JOB = {"workers_per_node": 2, "duration_s": 60.0}

slow = result(
    nodes=("gpu-1", "gpu-2"),
    result="communication",
    cause="network congestion",
    culprits=("link gpu-1>gpu-2",),
    culprit_causes=("network congestion",),
    culprit_nodes=("gpu-1", "gpu-2"),
    onset_delay_s=14.0,
    slow_s=30.0,
    slowdown=1.62,
    jct_increase_share=0.24,
    latency_cv_inter_node=0.31,
)


def filled(path: Path, *records: ProbeRecord) -> Path:
    """A store with these."""
    with StoreWriter(path, job=JOB) as store:
        for one in records:
            store.add(one)
    return path


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    records = [
        record("1n-0001"),
        record("2n-0001", found=slow, at_t=1100.0),
        record("1n-0002", ending="preempted", at_t=1200.0),
        record("1n-0002", attempt=2, ending="failed", at_t=1300.0),
    ]

    reading = read_store(filled(tmp_path / "s", *records))

    assert list(reading.records) == records
    assert reading.warnings == ()
    assert reading.job == JOB
    assert reading.campaign.startswith("c")


_TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)


@settings(max_examples=12)
@given(
    why=_TEXTS,
    hosts=st.lists(_TEXTS, min_size=1, max_size=3),
    slowdown=st.floats(0, 1e6),
    ending=st.sampled_from(["finished", "preempted", "stopped"]),
)
def test_no_text_or_number_is_changed(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    why: str,
    hosts: list[str],
    slowdown: float,
    ending: Ending,
) -> None:
    found = result(
        nodes=tuple(hosts),
        slowdown=slowdown,
        error=why,
        culprits=tuple(hosts),
        culprit_causes=(why,) * len(hosts),
    )
    made = ProbeRecord(
        probe="1n-0001", attempt=1, ending=ending, wanted_nodes=len(hosts), executor=why,
        submitted_t=1.0, ended_t=1e9 + 1 / 3, why=why, result=found,
    )  # fmt: skip

    reading = read_store(filled(tmp_path_factory.mktemp("s") / "[a]*? 'b'", made))

    assert reading.records == (made,)


def test_any_tool_can_ask_the_parts(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record(), record("2n-0001", found=slow))

    rows = duckdb.execute(
        f"SELECT probe, cause, culprit_nodes, slowdown FROM '{store}/parts/*.parquet' ORDER BY 1"
    ).fetchall()

    assert rows == [
        ("1n-0001", "", [], 1.0),
        ("2n-0001", "network congestion", ["gpu-1", "gpu-2"], 1.62),
    ]


def test_torn_and_foreign_files_are_named_and_left_out(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record(), record("1n-0002", at_t=1100.0))
    parts = store / "parts"
    whole = (parts / "1n-0001.1.parquet").read_bytes()
    (parts / "1n-0003.1.parquet").write_bytes(whole[: len(whole) // 2])
    (parts / "1n-0004.1.parquet").write_bytes(b"")
    (parts / "notes.parquet").write_text("not Parquet at all")
    (parts / "copy.parquet").write_bytes(whole)
    for name, columns in (("other", "1 AS probe, 'x' AS attempt"), ("else", "'x' AS a")):
        duckdb.execute(f"COPY (SELECT {columns}) TO '{parts}/{name}.parquet'")
    (parts / ".1n-0005.1.parquet.ab12cd34").write_bytes(whole[:100])  # of a writer that died

    for reading in (read_store(store), read_store(store)):
        assert [r.probe for r in reading.records] == ["1n-0001", "1n-0002"]
        assert sorted(Path(w.partition(": ")[0]).name for w in reading.warnings) == [
            "1n-0003.1.parquet", "1n-0004.1.parquet", "copy.parquet", "else.parquet",
            "notes.parquet", "other.parquet",
        ]  # fmt: skip

    with StoreWriter(store, job=JOB) as writer:
        assert len(writer.warnings) == 6
        assert len(writer.records) == 2
    assert not list(parts.glob(".*")), "drafts of the dead are cleared away"


def test_a_foreign_file_of_other_types_costs_only_itself(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record(), record("1n-0002", at_t=1100.0))
    columns = "'1n-0003' AS probe, 'first' AS attempt, 'finished' AS ending, 'x' AS ended_t"
    duckdb.execute(f"COPY (SELECT {columns}) TO '{store}/parts/1n-0003.1.parquet'")

    reading = read_store(store)

    assert reading.records == (record(), record("1n-0002", at_t=1100.0))
    assert len(reading.warnings) == 1
    assert "1n-0003.1.parquet" in reading.warnings[0]


def test_a_part_that_cannot_be_used_is_not_replaced(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record(), record("1n-0002", attempt=2, at_t=1100.0))
    part = store / "parts" / "1n-0002.2.parquet"
    newer = part.read_bytes().replace(b"failslow.probe/1", b"failslow.probe/2")
    part.write_bytes(newer[: len(newer) // 2])  # torn, or of another schema: all the same here

    with StoreWriter(store, job=JOB) as writer:
        assert {(a.probe, a.number, a.ending) for a in writer.attempts} == {
            ("1n-0001", 1, "finished"), ("1n-0002", 2, "stopped"),
        }  # fmt: skip
        with pytest.raises(ProbeError, match="is there already, and is not replaced"):
            writer.add(record("1n-0002", attempt=2))
        writer.add(record("1n-0002", attempt=3))
    assert part.read_bytes() == newer[: len(newer) // 2]


def test_a_writer_does_not_go_on_over_a_part_the_disk_does_not_give(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record(), record("1n-0002", at_t=1100.0))
    bad = store / "parts" / "1n-0002.1.parquet"
    whole = bad.read_bytes()
    bad.unlink()
    bad.symlink_to(bad.name)  # reading it fails, for root as well

    with pytest.raises(ProbeError, match=r"1n-0002.1.parquet: cannot be read: .*symbolic") as told:
        StoreWriter(store, job=JOB).__enter__()
    assert "\n" not in str(told.value)
    reading = read_store(store)
    assert [r.probe for r in reading.records] == ["1n-0001"]
    assert "cannot be read" in reading.warnings[0]

    bad.unlink()
    bad.write_bytes(whole)
    with StoreWriter(store, job=JOB) as writer:  # and holds no lock that was left
        assert len(writer.records) == 2


def test_a_result_that_was_not_recorded_is_taken_up_by_the_next_run(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", record())
    campaign = read_store(path).campaign

    def left(name: str, **more: Any) -> Path:
        folder = path / "probes" / name
        folder.mkdir(parents=True)
        made: dict[str, Any] = {
            "probe_id": f"{campaign}-{name}",
            "begin_t": 2000.0,
            "end_t": 2060.0,
        } | more
        (folder / "result.json").write_text(result(**made).to_json())
        return folder

    healthy = left("1n-0002.1")
    cut = left("1n-0003.2", state="preempted", begin_t=3000.0, end_t=3030.0)
    usual = left("1n-0006.1", begin_t=4000.0, end_t=4060.0, fleet_iteration_s=0.12)
    late = left("1n-0007.1", begin_t=5000.0, end_t=5060.0, fleet_iteration_s=0.1)
    left("1n-0004.1", probe_id="another-1n-0004.1")
    (left("1n-0005.1") / "result.json").write_text("{")
    left("1n-0001.1", slowdown=9.0)

    for _ in range(2):
        with StoreWriter(path, job=JOB) as writer:
            assert [(r.probe, r.attempt, r.ending) for r in writer.records] == [
                ("1n-0001", 1, "finished"), ("1n-0002", 1, "finished"), ("1n-0003", 2, "stopped"),
                ("1n-0006", 1, "finished"), ("1n-0007", 1, "finished"),
            ]  # fmt: skip
            assert writer.records[0] == record()
            assert len(writer.history.read_text().splitlines()) == 5
            assert len(writer.attempts) == 7, "the others are lost, and their numbers taken"
    assert len(read_store(path).records) == 5
    assert not healthy.exists()
    assert not usual.exists()
    assert late.exists(), "it was slower than the fleet, and called healthy"
    assert cut.exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; make room there"),
        (errno.EROFS, "Read-only file system; nothing can be written there"),
        (errno.EACCES, "Permission denied; it must be yours to read and write"),
        (errno.ENOLCK, "No locks available; its file system has no locks"),
        (errno.EBUSY, "Device or resource busy; mend that, or use another folder"),
    ],
)
def test_what_the_disk_refuses_is_told_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with StoreWriter(tmp_path / "s", job=JOB) as store:
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(ProbeError, match=remedy):
            store.add(record())


def test_a_full_disk_is_told_though_the_database_writes(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", job=JOB) as store:
        (tmp_path / "s" / "parts").rename(tmp_path / "gone")
        with pytest.raises(ProbeError, match=r"1n-0001\.1\.parquet"):
            store.add(record())

    class Full:
        """A database on a full disk."""

        def execute(self, *_: object) -> None:
            raise duckdb.IOException('IO Error: Could not write file "x": No space left on device')

    with pytest.raises(OSError, match="No space left") as told:
        draft_part(Full(), record(), tmp_path)  # type: ignore[arg-type]  # no more is used of it
    assert told.value.errno == errno.ENOSPC


def test_a_flipped_bit_anywhere_costs_no_other_part(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record(), record("1n-0002", at_t=1100.0))
    part = store / "parts" / "1n-0002.1.parquet"
    whole = part.read_bytes()

    for place in range(0, len(whole), max(1, len(whole) // 20)):
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        reading = read_store(store)
        # the flip may lie in bytes nobody reads; then the record is whole
        assert reading.records[0] == record()
        assert len(reading.records) + len(reading.warnings) == 2


def test_one_writer_many_readers(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", record())

    with StoreWriter(path, job=JOB) as writer:
        with pytest.raises(ProbeError, match=f"another campaign writes it .pid {os.getpid()} on"):
            StoreWriter(path, job=JOB).__enter__()
        writer.add(record("1n-0002", at_t=1100.0))
        assert len(read_store(path).records) == 2

    with StoreWriter(path, job=JOB) as writer:
        assert len(writer.records) == 2


def test_a_killed_writer_loses_nothing_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "s"
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.probe.probe_samples import record
from failslow.probe.store import StoreWriter
with StoreWriter(Path({str(path)!r}), job={JOB!r}) as store:
    for number in range(1, 10_000):
        store.add(record(f"1n-{{number:04d}}", at_t=1000.0 + number))
        print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = 20 + len(process.stdout.read().splitlines())

    reading = read_store(path)
    assert reading.warnings == ()
    # one may be in place and not yet told
    assert len(reading.records) in (told, told + 1)
    with StoreWriter(path, job=JOB) as writer:
        lines = writer.history.read_text().splitlines()
        assert len(lines) == len(writer.records) == len(reading.records)
        assert json.loads(lines[0])["schema"] == "failslow.probe/1"


def test_a_store_is_known_by_its_content(tmp_path: Path) -> None:
    store = filled(tmp_path / "any name")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("x")

    assert is_store(store)
    assert not is_store(logs)
    assert not is_store(tmp_path / "gone")
    with pytest.raises(ProbeError, match="no store of probes"):
        read_store(logs)
    with pytest.raises(ProbeError, match="is there and is no store"):
        StoreWriter(logs, job=JOB).__enter__()
    with pytest.raises(ProbeError, match="is there and is no store"):
        StoreWriter(logs / "a.log", job=JOB).__enter__()
    assert (logs / "a.log").read_text() == "x"
    assert list(logs.iterdir()) == [logs / "a.log"]


def test_a_store_of_another_schema_is_one_and_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record())
    manifest = store / "failslow-probes.json"
    whole = manifest.read_text()

    manifest.write_text(whole.replace("probe-store/1", "probe-store/10"))
    before = sorted(store.rglob("*"))
    told = "schema failslow.probe-store/10, and this failslow knows failslow.probe-store/1; use the"
    assert is_store(store)
    for ask in (read_store, lambda path: StoreWriter(path, job=JOB).__enter__()):
        with pytest.raises(ProbeError, match=told):
            ask(store)
    assert sorted(store.rglob("*")) == before

    for text in (whole[:40], "null", "[]", '{"schema": 1}', whole.replace("campaign", "other")):
        manifest.write_text(text)
        with pytest.raises(ProbeError, match="torn, or no manifest of a store"):
            read_store(store)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("null", "null"),
        ('"abc"', '"abc"'),
        ("true", "true"),
        ("-1", "-1"),
        ("NaN", "NaN"),
        ("1" + 400 * "0", "1000"),
    ],
)
def test_a_duration_that_is_none_is_told(tmp_path: Path, value: str, told: str) -> None:
    store = filled(tmp_path / "s", record())
    manifest = store / "failslow-probes.json"
    manifest.write_text(
        manifest.read_text().replace('"duration_s": 60.0', f'"duration_s": {value}')
    )

    for ask in (read_store, lambda path: StoreWriter(path, job=JOB).__enter__()):
        with pytest.raises(ProbeError, match="is no number of seconds; restore") as found:
            ask(store)
        assert f"failslow-probes.json: the duration_s of its job, {told}" in str(found.value)
        assert len(str(found.value)) < len(str(manifest)) + 150


def test_drafts_of_a_writer_that_died_are_not_foreign(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    draft = path / ".failslow-probes.json.0123abcd"
    draft.write_text("{")

    with StoreWriter(path, job=JOB):
        assert not draft.exists()


def test_probes_of_another_job_are_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")

    with pytest.raises(ProbeError, match=r"have duration_s 60.0, not 30.0, and would not compare"):
        StoreWriter(path, job={**JOB, "duration_s": 30.0}).__enter__()
    with StoreWriter(path, job=JOB):
        pass


def test_a_folder_nobody_may_write_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ProbeError, match="file/s: Not a directory; name a folder"):
        StoreWriter(tmp_path / "file" / "s", job=JOB).__enter__()


def test_without_duckdb_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "duckdb", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'failslow\[probe\]'"):
        read_store(path)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a.b", "ü"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a file is named by them"):
        record(name)
