"""A store wherever it lies, beside whatever else: no name has a meaning of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.probe.probe_samples import record
from tests.probe.test_probe_store import JOB, filled

from failslow.errors import ProbeError
from failslow.probe.store import StoreWriter, read_store


def test_hidden_files_that_are_not_ours_stay(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record())
    foreign = [store / "parts" / name for name in (".gitkeep", ".DS_Store", ".1n-0002.1.parquet")]
    for file in foreign:
        file.write_text("x")
    snapshot = store / "parts" / ".snapshot" / "1n-0001.1.parquet"
    snapshot.parent.mkdir()
    snapshot.write_text("x")
    drafts = [store / ".history.jsonl.0123abcd", store / "parts" / ".1n-0009.1.parquet.0123abcd"]
    for folder in drafts:  # named as ours, and none of ours
        folder.mkdir()

    with StoreWriter(store, job=JOB) as writer:
        assert writer.records == (record(),)
        assert writer.warnings == ()
    assert all(path.exists() for path in (*foreign, snapshot, *drafts))


@pytest.mark.parametrize("name", ["probe=1n-0007", "ending=x/s", "~", "~/s", "file:"])
def test_no_folder_name_has_a_meaning_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))

    store = filled(Path(name), record(), record("1n-0002", at_t=1100.0))
    (store / "parts" / "notes.parquet").write_text("not Parquet at all")
    reading = read_store(store)

    assert reading.records == (record(), record("1n-0002", at_t=1100.0))
    assert reading.warnings[0].startswith(f"{store}/parts/notes.parquet: left out")
    assert not list(home.iterdir())
    with StoreWriter(store, job=JOB) as writer:
        assert len(writer.records) == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (os.fsdecode(b"caf\xe9"), r"caf\\xe9.*: its name is no UTF-8, and DuckDB opens"),
        ("a\\[b", r"has a backslash and one of \[ \* \? in its name"),
    ],
)
def test_a_place_that_the_database_cannot_name_is_refused_at_once(
    tmp_path: Path, name: str, told: str
) -> None:
    store = tmp_path / name / "s"

    with pytest.raises(ProbeError, match=told):
        StoreWriter(store, job=JOB).__enter__()
    assert not store.parent.exists()
    filled(tmp_path / "moved", record()).rename(tmp_path / name)
    with pytest.raises(ProbeError, match=told):
        read_store(tmp_path / name)


def test_a_foreign_part_of_a_name_that_is_no_text_costs_only_itself(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", record())
    (store / "parts" / os.fsdecode(b"caf\xe9.parquet")).write_text("x")

    for reading in (read_store(store), read_store(store)):
        assert reading.records == (record(),)
        assert [w.partition(": ")[0] for w in reading.warnings] == [
            f"{store}/parts/caf\\xe9.parquet"
        ]
